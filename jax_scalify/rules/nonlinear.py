"""Nonlinear primitives. They are evaluated on plain values: float16 and FP8 in float32."""

from __future__ import annotations

from typing import Any

from jax import lax

from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_elementwise, register_scale_rule
from jax_scalify.scales.algebra import ONE, Scale, join, meet


@register_elementwise(
    *(lax.exp_p, lax.cosh_p, lax.erfc_p, lax.acos_p, lax.acosh_p), nonnegative="always"
)
@register_elementwise(lax.log_p, "log2", lax.cos_p, lax.lgamma_p, lax.digamma_p)
@register_scale_rule(
    *(lax.igamma_p, lax.igammac_p, lax.regularized_incomplete_beta_p, lax.bessel_i0e_p),
    "random_gamma",
    elements="new",
    nonnegative="always",
)
@register_scale_rule(
    *(lax.polygamma_p, lax.igamma_grad_a_p, lax.zeta_p, "random_gamma_grad"), elements="new"
)
def wide_rule(ctx: RuleContext, *args: Any, **params: Any) -> Operand:
    """`scale = 1`, evaluated on plain values."""
    return ctx.on_values(ONE, *args, saturates=False, **params)


@register_elementwise(lax.exp2_p, nonnegative="always")
def exp2_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = 1`, evaluated on plain values, bfloat16 in float32 too."""
    # JAX multiplies by ln 2 before `exp`. In bfloat16, the product has an error of up to 3%.
    out = ctx.bind(ctx.dequantise(x), **params)
    return ctx.result(out, ONE, ONE, saturates=False)


@register_elementwise(
    *(lax.floor_p, lax.ceil_p, lax.round_p), family="rounding", nonnegative="keeps"
)
def rounding_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = max(1, scale)`, evaluated on plain values."""
    # Results are integers: `floor(-0.001)` is -1, however small the scale is.
    return ctx.on_values(join(ONE, x.scale), x, saturates=False, **params)


@register_elementwise("one_minus_square")
def one_minus_square_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = max(1, scale**2)`, evaluated on plain values."""
    return ctx.on_values(join(ONE, x.scale**2), x, saturates=False, **params)


@register_scale_rule("polynomial", elements="new")
def polynomial_rule(ctx: RuleContext, x: Operand, *coefficients: Operand, **params: Any) -> Operand:
    """`scale = max` of the terms' scales; 1 in wide dtypes if all coefficients are constants.

    Evaluated on plain values. JAX approximates special functions by polynomials with constant
    coefficients, and the size of the terms says nothing about the size of such a function.
    """
    scale, narrow = ONE, not ctx.holds_values
    if narrow or any(c.constant is None for c in coefficients):
        terms = [c.scale * x.scale**k for k, c in enumerate(coefficients)]
        scale = join(*terms, narrow=narrow)
    return ctx.on_values(scale, x, *coefficients, saturates=False, **params)


@register_elementwise(lax.logistic_p, nonnegative="always")
def logistic_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = 1/2`, the value at 0; evaluated on plain values.

    A scale of 1 would be twice the mean of the gate. In a chain of gates, as in a recurrent
    network, this error would double with each gate.
    """
    return ctx.on_values(Scale(-1), x, saturates=False, **params)


@register_elementwise(
    *(lax.tanh_p, lax.erf_p, lax.atan_p, lax.asinh_p, lax.expm1_p, lax.log1p_p, lax.sinh_p),
    nonnegative="keeps",
)
@register_elementwise(lax.sin_p, lax.asin_p, lax.atanh_p, lax.tan_p, lax.erf_inv_p)
@register_scale_rule(lax.bessel_i1e_p, elements="new")
def through_zero_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = min(1, scale)`: for small `x`, `f(x)` is close to `x` and must not underflow."""
    return ctx.on_values(meet(ONE, x.scale), x, saturates=False, **params)
