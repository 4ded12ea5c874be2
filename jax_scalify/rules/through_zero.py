"""Non-linear primitives that pass through zero: f(0) = 0 and f(x) is near x for small x."""

from __future__ import annotations

from typing import Any

from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule
from jax_scalify.rules.nonlinear import evaluate_wide
from jax_scalify.rules.shared.growth import finish
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import ONE


@register_scale_rule(
    *(lax.tanh_p, lax.erf_p, lax.atan_p, lax.asinh_p, lax.expm1_p, lax.log1p_p, lax.sinh_p),
    elements="new",
    elementwise=True,
    nonnegative="keeps",
)
@register_scale_rule(
    *(lax.sin_p, lax.asin_p, lax.atanh_p, lax.tan_p, lax.erf_inv_p),
    elements="new",
    elementwise=True,
)
@register_scale_rule(lax.bessel_i1e_p, elements="new")
def through_zero_rule(ctx: RuleContext, x: Operand, **params: Any) -> ScaledArray:
    """`scale = min(1, scale)`: f(x) is near x for small x, which stays representable."""
    scale = algebra.meet(ONE, x.scale)
    out = evaluate_wide(ctx, (x,), params)
    return finish(ctx, out, ONE, scale)
