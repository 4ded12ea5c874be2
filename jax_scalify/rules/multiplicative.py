"""Multiplicative primitives: homogeneous of degree k, so the scale is `scale**k`."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from jax_scalify import dtypes
from jax_scalify.algebra import ONE
from jax_scalify.array import ScaledArray
from jax_scalify.registry import RuleContext, register_scale_rule
from jax_scalify.rules.common import filled, multiply
from jax_scalify.rules.nonlinear import wide_rule

# Beyond, a constant exponent is no power that a model has, and its scale would leave every range.
_LARGEST_POWER = 64


def _unit(ctx: RuleContext, index: int, x: ScaledArray) -> int:
    """+1 or -1 if a constant operand's data is that number, else 0."""
    return int(x.data) if ctx.inputs[index].constant is not None and abs(x.data) == 1 else 0


@register_scale_rule(lax.mul_p)
def mul_rule(ctx: RuleContext, lhs: ScaledArray, rhs: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = lhs.scale * rhs.scale`; a constant power of two costs nothing."""
    scale = lhs.scale * rhs.scale
    for sign, other in ((_unit(ctx, 1, rhs), lhs), (_unit(ctx, 0, lhs), rhs)):
        if sign and ctx.out_dtype == other.dtype:
            data = filled(other.data, ctx.out_avals[0].shape)
            return ScaledArray(data if sign > 0 else lax.neg(data), scale)
    return ScaledArray(ctx.bind(lhs.data, rhs.data, **params), scale)


@register_scale_rule(lax.div_p)
def div_rule(ctx: RuleContext, lhs: ScaledArray, rhs: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = lhs.scale / rhs.scale`; a constant power of two costs nothing."""
    scale = lhs.scale / rhs.scale
    sign = _unit(ctx, 1, rhs)
    if sign:
        data = filled(lhs.data, ctx.out_avals[0].shape)
        return ScaledArray(data if sign > 0 else lax.neg(data), scale)
    return ScaledArray(ctx.bind(lhs.data, rhs.data, **params), scale)


@register_scale_rule(lax.square_p)
def square_rule(ctx: RuleContext, x: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = scale**2`."""
    return ScaledArray(ctx.bind(x.data, **params), x.scale**2)


@register_scale_rule(lax.integer_pow_p)
def integer_pow_rule(ctx: RuleContext, x: ScaledArray, *, y: int, **params: Any) -> ScaledArray:
    """`scale = scale**y`."""
    return ScaledArray(ctx.bind(x.data, y=y, **params), x.scale**y)


def _root(ctx: RuleContext, x: ScaledArray, degree: int, inverse: bool, **params: Any) -> Any:
    root, rest = x.scale.root(degree)
    out = ctx.bind(multiply(x.data, rest), **params)
    return ScaledArray(dtypes.cast(out, ctx.out_dtype), root**-1 if inverse else root)


@register_scale_rule(lax.sqrt_p)
def sqrt_rule(ctx: RuleContext, x: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = scale**(1/2)`; of an odd exponent, one factor of two moves into the data."""
    return _root(ctx, x, 2, inverse=False, **params)


@register_scale_rule(lax.rsqrt_p)
def rsqrt_rule(ctx: RuleContext, x: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = scale**(-1/2)`; of an odd exponent, one factor of two moves into the data."""
    return _root(ctx, x, 2, inverse=True, **params)


@register_scale_rule(lax.cbrt_p)
def cbrt_rule(ctx: RuleContext, x: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = scale**(1/3)`; up to two factors of two move into the data."""
    return _root(ctx, x, 3, inverse=False, **params)


@register_scale_rule(lax.pow_p)
def pow_rule(ctx: RuleContext, x: ScaledArray, y: Any, **params: Any) -> Any:
    """`scale = scale**y` for a constant y that is a multiple of 1/2; else scale 1."""
    number = ctx.inputs[1].constant
    if number is None:
        return wide_rule(ctx, x, y, **params)
    halves = 2 * float(number)
    if not halves.is_integer() or abs(halves) > _LARGEST_POWER:
        return wide_rule(ctx, x, y, **params)
    root, rest = x.scale.root(2) if halves % 2 else (x.scale, ONE)
    scale = root ** int(halves) if halves % 2 else root ** int(number)
    data = multiply(x.data, rest)
    exponent = np.asarray(number).astype(data.dtype if halves % 2 else ctx.in_avals[1].dtype)[()]
    return ScaledArray(dtypes.cast(ctx.bind(data, exponent, **params), ctx.out_dtype), scale)
