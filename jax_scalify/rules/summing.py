"""Summing primitives: the scale grows by `sqrt(n)`, or by n where no term is negative.

They accumulate in at least float32, multiply by the constant reciprocal and cast once.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_scalify import dtypes, pow2
from jax_scalify.array import ScaledArray
from jax_scalify.config import Pow2RoundMode
from jax_scalify.pow2 import Scale
from jax_scalify.registry import RuleContext, register_scale_rule
from jax_scalify.rules.common import NONNEGATIVE_LIMIT, filled, multiply, uniform_over


def growth(ctx: RuleContext, count: int, nonneg: bool) -> Scale:
    """The factor by which a sum of `count` terms of unit RMS outgrows one of them."""
    if count <= 1:
        return Scale(0)
    if not nonneg:
        exponent = pow2.sqrt_exponent(count)
        exact = count.bit_count() == 1 and count.bit_length() % 2 == 1
    else:
        exponent, exact = count.bit_length() - 1, count.bit_count() == 1
    if ctx.config.rounding_mode is Pow2RoundMode.UP and not exact:
        exponent += 1
    if nonneg and jnp.finfo(ctx.out_dtype).bits < 32:
        exponent = min(exponent, NONNEGATIVE_LIMIT)
    return Scale(exponent)


def _finish(ctx: RuleContext, total: Any, scale: Scale, factor: Scale) -> ScaledArray:
    return ScaledArray(multiply(total, factor**-1, ctx.out_dtype), scale * factor)


@register_scale_rule(lax.reduce_sum_p)
def reduce_sum_rule(ctx: RuleContext, x: ScaledArray, *, axes: Any, **params: Any) -> ScaledArray:
    """`scale = scale * pow2(sqrt(n))`, or `pow2(n)` for non-negative terms."""
    x = uniform_over(x, axes)
    count = math.prod(ctx.in_avals[0].shape[a] for a in axes)
    data = lax.convert_element_type(x.data, dtypes.compute_dtype(x.dtype))
    total = ctx.bind(data, axes=axes, **params)
    scale = x.scale.map(lambda s: lax.squeeze(s, axes))
    return _finish(ctx, total, scale, growth(ctx, count, ctx.inputs[0].nonneg))


@register_scale_rule(lax.cumsum_p)
def cumsum_rule(ctx: RuleContext, x: ScaledArray, *, axis: int, **params: Any) -> ScaledArray:
    """`scale = scale * pow2(sqrt(n))`, or `pow2(n)` for non-negative terms."""
    x = uniform_over(x, (axis,))
    data = lax.convert_element_type(x.data, dtypes.compute_dtype(x.dtype))
    total = ctx.bind(data, axis=axis, **params)
    factor = growth(ctx, ctx.in_avals[0].shape[axis], ctx.inputs[0].nonneg)
    return _finish(ctx, total, x.scale, factor)


def _operand_scale(x: ScaledArray, contract: Any, batch: Any, before: int, after: int) -> Scale:
    """Lay an operand's scale along the result's dims: batch, lhs free, rhs free."""

    def move(scale: Any) -> Any:
        free = [a for a in range(x.ndim) if a not in contract and a not in batch]
        scale = lax.transpose(scale, (*batch, *free, *contract))
        shape = scale.shape[: len(batch) + len(free)]
        head, tail = shape[: len(batch)], shape[len(batch) :]
        return lax.reshape(scale, (*head, *(1,) * before, *tail, *(1,) * after))

    return x.scale.map(move)


@register_scale_rule(lax.dot_general_p)
def dot_general_rule(
    ctx: RuleContext,
    lhs: ScaledArray,
    rhs: ScaledArray,
    *,
    dimension_numbers: Any,
    preferred_element_type: Any = None,
    **params: Any,
) -> ScaledArray:
    """`scale = lhs.scale * rhs.scale * pow2(sqrt(K))`, or `pow2(K)` for non-negative operands.

    A scale that is not scalar is carried along the batch and free dims and made uniform over the
    contracted ones.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs, rhs = (
        ScaledArray(filled(x.data, aval.shape), x.scale)
        for x, aval in zip((lhs, rhs), ctx.in_avals, strict=True)
    )
    lhs, rhs = uniform_over(lhs, lhs_contract), uniform_over(rhs, rhs_contract)
    total = ctx.bind(
        lhs.data,
        rhs.data,
        dimension_numbers=dimension_numbers,
        preferred_element_type=dtypes.compute_dtype(ctx.out_dtype),
        **params,
    )
    lhs_free = lhs.ndim - len(lhs_contract) - len(lhs_batch)
    rhs_free = rhs.ndim - len(rhs_contract) - len(rhs_batch)
    scale = _operand_scale(lhs, lhs_contract, lhs_batch, 0, rhs_free)
    scale = scale * _operand_scale(rhs, rhs_contract, rhs_batch, lhs_free, 0)
    count = math.prod(ctx.in_avals[0].shape[a] for a in lhs_contract)
    nonneg = ctx.inputs[0].nonneg and ctx.inputs[1].nonneg
    return _finish(ctx, total, scale, growth(ctx, count, nonneg))
