"""Linear algebra. Each result is homogeneous in the matrix, with its own degree.

Each matrix is brought to one scale. The matrices of a batch may have different scales.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import Rule, RuleContext, register_scale_rule
from jax_scalify.rules.shared.along_axes import uniform_over
from jax_scalify.scales.algebra import ONE, join

_MATRIX = (-2, -1)  # the axes of a matrix; the others enumerate the matrices of a batch


def _factor_rule(*degrees: int) -> Rule:
    """Return the rule of a factorisation, given the degree (0 or 1) of each of its results."""

    def rule(ctx: RuleContext, x: Operand, **params: Any) -> list[Any]:
        x = uniform_over(x, _MATRIX)
        results = []
        # There may be fewer results: `svd` without vectors has the singular values only.
        for out, degree in zip(ctx.bind(x.value, **params), degrees, strict=False):
            if dtypes.is_scalable(out.dtype):
                drop = tuple(range(out.ndim, x.ndim))  # eigenvalues have one axis less
                scale = x.scale.map(lambda s, drop=drop: lax.squeeze(s, drop)) if drop else x.scale
                out = Operand(out, scale if degree else ONE, unit=ONE)
            results.append(out)
        return results

    names = ", ".join("scale" if degree else "1" for degree in degrees)
    rule.__doc__ = f"The scales of the results are ({names})."
    return rule


register_scale_rule(lax.linalg.eigh_p, elements="new")(_factor_rule(0, 1))
register_scale_rule(lax.linalg.eig_p, lax.linalg.svd_p, elements="new")(_factor_rule(1, 0, 0))
register_scale_rule(lax.linalg.qr_p, elements="new")(_factor_rule(0, 1, 0))
register_scale_rule(lax.linalg.schur_p, elements="new")(_factor_rule(1, 0))


@register_scale_rule(lax.linalg.cholesky_p, elements="new")
def cholesky_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = scale**(1/2)`; for an odd exponent, one factor of two moves into the data."""
    x = uniform_over(x, _MATRIX)
    return ctx.on_values(x.scale.root(2)[0], x, **params)


@register_scale_rule("cholesky_update", elements="new")
def cholesky_update_rule(ctx: RuleContext, r: Operand, w: Operand, **params: Any) -> Operand:
    """`scale = max(r.scale, w.scale)`: the result has degree 1 in `(r, w)` together."""
    r, w = uniform_over(r), uniform_over(w)
    return ctx.on_values(join(r.scale, w.scale), r, w, **params)


@register_scale_rule(lax.linalg.triangular_solve_p, elements="new")
def triangular_solve_rule(ctx: RuleContext, a: Operand, b: Operand, **params: Any) -> Operand:
    """`scale = b.scale / a.scale`; with a unit diagonal, `scale = b.scale`."""
    a, b = uniform_over(a, _MATRIX), uniform_over(b, _MATRIX)
    scale = b.scale if params["unit_diagonal"] else b.scale / a.scale
    return ctx.on_values(scale, a, b, **params)


@register_scale_rule(lax.linalg.tridiagonal_solve_p, elements="new")
def tridiagonal_solve_rule(ctx: RuleContext, *diagonals_and_b: Operand, **params: Any) -> Operand:
    """`scale = b.scale / max(diagonals' scales)`."""
    *diagonals, b = (uniform_over(x) for x in diagonals_and_b)
    joined = join(*(x.scale for x in diagonals))
    return ctx.on_values(b.scale / joined, *diagonals, b, **params)
