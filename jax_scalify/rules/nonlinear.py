"""Non-linear primitives: evaluated in at least float32 on dequantised values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_scalify import dtypes, pow2
from jax_scalify.array import ScaledArray
from jax_scalify.pow2 import ONE
from jax_scalify.registry import RuleContext, register_scale_rule
from jax_scalify.rules.common import multiply


def _wide(ctx: RuleContext, args: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """Evaluate the primitive on plain values in at least float32."""
    plain = [ctx.dequantise(x) if isinstance(x, ScaledArray) else x for x in args]
    plain = [
        lax.convert_element_type(p, dtypes.compute_dtype(p.dtype))
        if dtypes.is_scalable(p.dtype)
        else p
        for p in plain
    ]
    return ctx.bind(*(jnp.asarray(p) for p in plain), **params)


@register_scale_rule(
    lax.exp_p, lax.exp2_p, lax.log_p, "log2", lax.logistic_p, lax.cos_p, lax.cosh_p, lax.erfc_p,
    lax.lgamma_p, lax.digamma_p, lax.acos_p, lax.acosh_p, lax.atan2_p, "one_minus_square",
    "polynomial",
)  # fmt: skip
def wide_rule(ctx: RuleContext, *args: Any, **params: Any) -> ScaledArray:
    """`scale = 1`, evaluated in at least float32."""
    return ScaledArray(dtypes.cast(_wide(ctx, args, params), ctx.out_dtype), ONE)


@register_scale_rule(
    lax.tanh_p, lax.sin_p, lax.erf_p, lax.atan_p, lax.asinh_p, lax.expm1_p, lax.log1p_p,
    lax.asin_p, lax.atanh_p, lax.tan_p, lax.sinh_p, lax.erf_inv_p,
)  # fmt: skip
def through_zero_rule(ctx: RuleContext, x: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = min(1, scale)`: f(x) is near x for small x, which stays representable."""
    scale = pow2.meet(ONE, x.scale)
    out = _wide(ctx, (x,), params)
    return ScaledArray(multiply(out, scale**-1, ctx.out_dtype), scale)


@register_scale_rule(lax.floor_p, lax.ceil_p, lax.round_p)
def rounding_rule(ctx: RuleContext, x: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = max(1, scale)`, of dequantised values."""
    scale = pow2.join(ONE, x.scale)
    return ScaledArray(multiply(_wide(ctx, (x,), params), scale**-1, ctx.out_dtype), scale)


@register_scale_rule(lax.bitcast_convert_type_p)
def bitcast_convert_type_rule(ctx: RuleContext, x: ScaledArray, **params: Any) -> Any:
    """Dequantised: the bits are those of the value. Integers are plain, floats have scale 1."""
    out = ctx.bind(jnp.asarray(ctx.dequantise(x, x.dtype)), **params)
    return ScaledArray(out, ONE) if dtypes.is_scalable(out.dtype) else out
