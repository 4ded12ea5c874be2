"""The degree of an optimizer's state: the power of the gradients with which a leaf grows.

A first moment has degree 1, and a second moment degree 2. Parameters, scalars and constants have
the degree `None`, which does not count in sums and products. In `0.9 * mu + 0.1 * g * g`, the
constants have `None` and `g * g` has 2, so the sum has 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_scalify.base.jaxprs import Interpretation, is_var
from jax_scalify.interpreter.traits import traits_of

Degree = float | None


def join(lhs: Degree, rhs: Degree) -> Degree:
    """Return the degree of a sum: the largest known degree, or None."""
    known = [d for d in (lhs, rhs) if d is not None]
    return max(known, default=None)


def _product(lhs: Degree, rhs: Degree, sign: int = 1) -> Degree:
    return None if lhs is rhs is None else (lhs or 0) + sign * (rhs or 0)


def _exponent(eqn: Any) -> float | None:
    """Return the power to which an equation raises its operand; None for other equations."""
    name = eqn.primitive.name
    if name == "integer_pow":
        return eqn.params["y"]
    if name == "pow" and not is_var(eqn.invars[1]):
        return float(np.asarray(eqn.invars[1].val))
    degree = traits_of(name).degree
    return degree if isinstance(degree, (int, float)) else None


def _result(eqn: Any, degrees: list[Degree]) -> Degree:
    exponent = _exponent(eqn)
    if not any(v.aval.shape for v in eqn.outvars):
        return None
    if exponent is not None:
        return None if degrees[0] is None else degrees[0] * exponent
    traits = traits_of(eqn.primitive.name)
    if traits.degree in ("product", "quotient"):
        return _product(degrees[0], degrees[1], 1 if traits.degree == "product" else -1)
    if traits.degree == "sum" or traits.elements in ("joined", "placed"):
        known: Degree = None
        for degree in degrees:
            known = join(known, degree)
        return known
    return degrees[0] if traits.is_given or traits.is_view else None


_DEGREES = Interpretation(
    equation=lambda eqn, degrees: [_result(eqn, degrees)] * len(eqn.outvars),
    constant=lambda literal: None,
    join=join,
    unknown=None,
)


def degrees_of_results(jaxpr: Any, degrees: Sequence[Degree]) -> list[Degree]:
    """Return the degree of each result of a jaxpr, given the degrees of its operands."""
    return _DEGREES.results(jaxpr, degrees)
