"""Aligning primitives: the scale is the largest vote, and every operand is brought to it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import dtypes, pow2
from jax_scalify.array import ScaledArray
from jax_scalify.pow2 import Scale
from jax_scalify.registry import Rule, RuleContext, register_scale_rule
from jax_scalify.rules.common import (
    align,
    align_constant,
    constant_floor,
    filled,
    multiply,
    same_dtype,
    shared_scale,
    uniform_over,
)


def _sum_rule(negate_rhs: bool) -> Rule:
    def rule(ctx: RuleContext, lhs: ScaledArray, rhs: ScaledArray, **params: Any) -> ScaledArray:
        shape = ctx.out_avals[0].shape
        if ctx.inputs[1].constant == 0:
            return ScaledArray(filled(lhs.data, shape), lhs.scale)
        if ctx.inputs[0].constant == 0:
            data = lax.neg(rhs.data) if negate_rhs else rhs.data
            return ScaledArray(filled(data, shape), rhs.scale)
        scale = shared_scale(ctx, {0: lhs, 1: rhs}, additive=True)
        lhs_data, rhs_data = same_dtype(align(ctx, 0, lhs, scale), align(ctx, 1, rhs, scale))
        operation = lax.sub if negate_rhs else lax.add
        return ScaledArray(dtypes.cast(operation(lhs_data, rhs_data), ctx.out_dtype), scale)

    rule.__doc__ = "`scale = max(lhs.scale, rhs.scale)`; a constant 0 changes nothing."
    return rule


register_scale_rule(lax.add_p, "add_any")(_sum_rule(negate_rhs=False))
register_scale_rule(lax.sub_p)(_sum_rule(negate_rhs=True))


def _extremum_rule(sign: int) -> Rule:
    def rule(ctx: RuleContext, lhs: ScaledArray, rhs: ScaledArray, **params: Any) -> ScaledArray:
        args = (lhs, rhs)
        numbers = [ctx.inputs[i].constant for i in (0, 1)]
        harmless = [n is not None and sign * n <= 0 for n in numbers]
        if any(harmless):  # max(x, c <= 0): the constant saturates, right for every finite x
            scale = args[harmless.index(True) ^ 1].scale
        else:
            scale = shared_scale(ctx, {0: lhs, 1: rhs})
        data = same_dtype(*(align(ctx, i, x, scale) for i, x in enumerate(args)))
        return ScaledArray(dtypes.cast(ctx.bind(*data, **params), ctx.out_dtype), scale)

    rule.__doc__ = "`scale = max(lhs.scale, rhs.scale)`; a constant on the far side of 0: no vote."
    return rule


register_scale_rule(lax.max_p)(_extremum_rule(+1))
register_scale_rule(lax.min_p)(_extremum_rule(-1))


@register_scale_rule(lax.clamp_p)
def clamp_rule(
    ctx: RuleContext, low: ScaledArray, x: ScaledArray, high: ScaledArray, **params: Any
) -> ScaledArray:
    """`scale = max` of the votes; bounds around 0 have none."""
    low_number, high_number = ctx.inputs[0].constant, ctx.inputs[2].constant
    around_zero = (
        low_number is not None and high_number is not None and low_number <= 0 <= high_number
    )
    scale = x.scale if around_zero else shared_scale(ctx, {0: low, 1: x, 2: high})
    args = [align(ctx, i, a, scale) for i, a in enumerate((low, x, high))]
    low_data, x_data, high_data = same_dtype(*args)
    x_data = filled(x_data, ctx.out_avals[0].shape)
    out = ctx.bind(low_data, x_data, high_data, **params)
    return ScaledArray(dtypes.cast(out, ctx.out_dtype), scale)


def _brought_together(
    ctx: RuleContext, operands: dict[int, ScaledArray]
) -> tuple[list[Any], Scale]:
    """Align operands in the result's dtype and give constants their shapes."""
    scale = shared_scale(ctx, operands)
    data = [
        filled(align(ctx, i, x, scale, ctx.out_dtype), ctx.in_avals[i].shape)
        for i, x in operands.items()
    ]
    return data, scale


@register_scale_rule(lax.select_n_p)
def select_n_rule(ctx: RuleContext, which: Any, *cases: ScaledArray, **params: Any) -> Any:
    """`scale = max` of the cases' votes."""
    data, scale = _brought_together(ctx, dict(enumerate(cases, start=1)))
    return ScaledArray(ctx.bind(which, *data, **params), scale)


@register_scale_rule(lax.concatenate_p, "stack")
def concatenate_rule(ctx: RuleContext, *args: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = max` of the operands' votes."""
    data, scale = _brought_together(ctx, {i: uniform_over(x) for i, x in enumerate(args)})
    return ScaledArray(ctx.bind(*data, **params), scale)


@register_scale_rule(lax.pad_p)
def pad_rule(ctx: RuleContext, x: ScaledArray, value: ScaledArray, **params: Any) -> ScaledArray:
    """`scale = max` of the votes of array and padding value."""
    data, scale = _brought_together(ctx, {0: uniform_over(x), 1: value})
    return ScaledArray(ctx.bind(*data, **params), scale)


@register_scale_rule(lax.dynamic_update_slice_p)
def dynamic_update_slice_rule(
    ctx: RuleContext, x: ScaledArray, update: ScaledArray, *starts: Any, **params: Any
) -> ScaledArray:
    """`scale = max` of the votes of array and update."""
    data, scale = _brought_together(ctx, {0: uniform_over(x), 1: uniform_over(update)})
    return ScaledArray(ctx.bind(*data, *starts, **params), scale)


@register_scale_rule(lax.gather_p)
def gather_rule(ctx: RuleContext, x: ScaledArray, indices: Any, **params: Any) -> ScaledArray:
    """`out = gather(data)`, scale unchanged; a finite fill value is divided by it."""
    x = uniform_over(x)
    fill = params["fill_value"]
    if fill is None or fill == 0 or not np.isfinite(fill):
        return ScaledArray(ctx.bind(x.data, indices, **params), x.scale)
    scale = pow2.join(x.scale, constant_floor(fill, x.dtype))
    data = multiply(x.data, pow2.alignment(x.scale, scale), x.dtype)
    taken = ctx.bind(data, indices, **{**params, "fill_value": 0})
    inside = jnp.ones(ctx.in_avals[0].shape, bool)
    inside = ctx.bind(inside, indices, **{**params, "fill_value": False})
    return ScaledArray(jnp.where(inside, taken, align_constant(fill, x.dtype, scale)), scale)


_SCATTERS = {
    lax.scatter_p: lax.scatter,
    lax.scatter_add_p: lax.scatter_add,
    lax.scatter_min_p: lax.scatter_min,
    lax.scatter_max_p: lax.scatter_max,
}


@register_scale_rule(*_SCATTERS)
def scatter_rule(
    ctx: RuleContext, x: ScaledArray, indices: Any, updates: ScaledArray, **params: Any
) -> ScaledArray:
    """`scale = max` of the votes of array and updates; a scatter-add sums in float32."""
    data, scale = _brought_together(ctx, {0: uniform_over(x), 2: uniform_over(updates)})
    if ctx.primitive is lax.scatter_add_p:
        data = [lax.convert_element_type(d, dtypes.compute_dtype(d.dtype)) for d in data]
    out = _SCATTERS[ctx.primitive](
        data[0],
        indices,
        data[1],
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    return ScaledArray(dtypes.cast(out, ctx.out_dtype), scale)
