"""Structural primitives: data through the primitive, scale unchanged.

A scale that is not scalar goes through the matching operation, or is first made uniform over the
axes that the primitive mixes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_scalify import dtypes
from jax_scalify.algebra import ONE
from jax_scalify.array import ScaledArray
from jax_scalify.deferred import can_defer, defer, split, takes_deferred
from jax_scalify.registry import Rule, RuleContext, register_scale_rule
from jax_scalify.rules.common import filled, uniform_over, windowed_axes


def structural_rule(
    mixed_axes: Callable[..., Any] | None = None, move_scale: Callable[..., Any] | None = None
) -> Rule:
    """Make the rule of a primitive that rearranges the elements of its first operand.

    Args:
        mixed_axes: `(ctx, **params)` -> axes over which the scale has to be uniform; None for all.
        move_scale: `(scale, ctx, **params)` -> the scale of the result, by default the same.
    """

    def rule(ctx: RuleContext, x: ScaledArray, *others: Any, **params: Any) -> Any:
        if x.scale.ndim:
            x = uniform_over(x, None if mixed_axes is None else mixed_axes(ctx, **params))
        scale = x.scale
        if move_scale is not None:
            scale = scale.map(functools.partial(move_scale, ctx=ctx, **params))
        data, exponent = split(x)
        out = ctx.bind(data, *others, **params)
        if ctx.primitive.multiple_results:
            return [defer(o, exponent, scale) if dtypes.is_scalable(o.dtype) else o for o in out]
        return defer(out, exponent, scale)

    rule.__doc__ = "`out = f(data)`, scale unchanged."
    return takes_deferred(rule)


def no_axes(ctx: RuleContext, **params: Any) -> tuple[int, ...]:
    """No axis is mixed: an elementwise primitive."""
    return ()


register_scale_rule(
    lax.neg_p, lax.abs_p, "copy", "copy_p", "stop_gradient",
    lax.real_p, lax.imag_p, lax.conj_p, "name", "on_backward", "sharding_constraint",
    "reshard", "layout_constraint", "relayout", "pvary",
)(structural_rule(no_axes))  # fmt: skip


def _moved_axes(ctx: RuleContext, *, axes: Any = None, dimensions: Any = None, **_: Any) -> Any:
    return dimensions if axes is None else axes


register_scale_rule(lax.transpose_p)(
    structural_rule(no_axes, lambda s, ctx, *, permutation, **_: lax.transpose(s, permutation))
)
register_scale_rule(lax.squeeze_p)(
    structural_rule(no_axes, lambda s, ctx, *, dimensions, **_: lax.squeeze(s, dimensions))
)
register_scale_rule(lax.rev_p)(structural_rule(_moved_axes))


def _broadcast_scale(scale: Any, ctx: RuleContext, *, broadcast_dimensions: Any, **_: Any) -> Any:
    shape = [1] * ctx.out_avals[0].ndim
    for size, dim in zip(scale.shape, broadcast_dimensions, strict=True):
        shape[dim] = size
    return lax.broadcast_in_dim(scale, shape, broadcast_dimensions)


register_scale_rule(lax.broadcast_in_dim_p)(structural_rule(no_axes, _broadcast_scale))


def _sliced_axes(ctx: RuleContext, **_: Any) -> list[int]:
    before, after = ctx.in_avals[0].shape, ctx.out_avals[0].shape
    return [a for a, (b, c) in enumerate(zip(before, after, strict=True)) if b != c]


register_scale_rule(lax.slice_p, lax.dynamic_slice_p, "split")(structural_rule(_sliced_axes))
register_scale_rule(lax.top_k_p, "tile", "unstack")(structural_rule())


@register_scale_rule(lax.reshape_p)
@takes_deferred
def reshape_rule(ctx: RuleContext, x: ScaledArray, **params: Any) -> ScaledArray:
    """`out = reshape(data)`; a scale lies along the axes that an axis of it becomes.

    Where each element would have a scale of its own, there is one for all.
    """
    if x.scale.ndim:
        groups = _reshaped_groups(x.shape, ctx.out_avals[0].shape)
        varies = [any(x.scale.shape[a] != 1 for a in axes) for axes, _ in groups]
        size = math.prod(math.prod(sizes) for (_, sizes), v in zip(groups, varies) if v)
        if not x.size or math.prod(x.scale.shape) < size == x.size:  # a scale for every element
            x = uniform_over(x)
    if not x.scale.ndim:
        data, exponent = split(x)
        return defer(ctx.bind(data, **params), exponent, x.scale)
    wide, shape = [1] * x.ndim, []
    for (axes, sizes), v in zip(groups, varies):
        for a in axes:
            wide[a] = x.shape[a] if v else 1
        shape += sizes if v else [1] * len(sizes)
    scale = x.scale.map(lambda s: jnp.broadcast_to(s, wide).reshape(shape))
    return ScaledArray(ctx.bind(x.data, **params), scale)


def _reshaped_groups(
    before: tuple[int, ...], after: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of axes with as many elements before as after: axes, new sizes."""
    if 0 in before:
        return [(list(range(len(before))), list(after))]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        axes, sizes, old, new = [], [], 1, 1
        while not (axes or sizes) or old != new:
            if j == len(after) or (i < len(before) and old <= new):
                axes.append(i)
                old, i = old * before[i], i + 1
            else:
                sizes.append(after[j])
                new, j = new * after[j], j + 1
        groups.append((axes, sizes))
    return groups


def _reduced_scale(scale: Any, ctx: RuleContext, *, axes: Any, **_: Any) -> Any:
    return lax.squeeze(scale, axes)


register_scale_rule(lax.reduce_max_p, lax.reduce_min_p)(
    structural_rule(_moved_axes, _reduced_scale)
)
register_scale_rule(lax.cummax_p, lax.cummin_p)(structural_rule(lambda ctx, *, axis, **_: (axis,)))
register_scale_rule(lax.reduce_window_max_p, lax.reduce_window_min_p)(
    structural_rule(windowed_axes)
)
register_scale_rule("approx_top_k")(
    structural_rule(lambda ctx, *, reduction_dimension, **_: (reduction_dimension,))
)


@register_scale_rule("select_and_gather_add")
def select_and_gather_add_rule(
    ctx: RuleContext, tangents: ScaledArray, operand: ScaledArray, **params: Any
) -> ScaledArray:
    """`scale = tangents.scale`; the operand only says which of them."""
    axes = windowed_axes(ctx, **params)
    arrays = uniform_over(tangents, axes), uniform_over(operand, axes)
    shape = ctx.in_avals[0].shape
    return ScaledArray(
        ctx.bind(*(filled(x.data, shape) for x in arrays), **params), arrays[0].scale
    )


@register_scale_rule(lax.reduce_precision_p)
def reduce_precision_rule(ctx: RuleContext, x: ScaledArray, **params: Any) -> ScaledArray:
    """`out = f(data)`, scale unchanged."""
    return ScaledArray(ctx.bind(x.data, **params), x.scale)


@register_scale_rule("optimization_barrier", "device_put", lax.sort_p)
@takes_deferred
def operandwise_rule(ctx: RuleContext, *args: Any, **params: Any) -> Any:
    """`out = f(data)`, scale unchanged, for each operand."""
    if ctx.primitive is lax.sort_p:
        args = tuple(uniform_over(x) if isinstance(x, ScaledArray) else x for x in args)
    shapes = [v.shape for v in ctx.in_avals]
    data = [split(x) if isinstance(x, ScaledArray) else (x, 0) for x in args]
    exponents = [exponent for _, exponent in data]
    data = [filled(d, s) for (d, _), s in zip(data, shapes, strict=True)]
    out = ctx.bind(*data, **params)
    out = out if ctx.primitive.multiple_results else [out]
    out = [
        defer(o, exponent, x.scale) if isinstance(x, ScaledArray) else o
        for o, x, exponent in zip(out, args, exponents, strict=True)
    ]
    return out if ctx.primitive.multiple_results else out[0]


@register_scale_rule(lax.convert_element_type_p, family="convert")
@takes_deferred
def convert_element_type_rule(ctx: RuleContext, x: Any, **params: Any) -> Any:
    """Float to float: the data only, saturating for FP8. To int or bool: dequantise first."""
    dtype = ctx.out_dtype
    if not isinstance(x, ScaledArray):  # int or bool to float: a constant of scale 1
        return ScaledArray(ctx.bind(x, **params), ONE)
    if not dtypes.is_scalable(dtype):
        if dtype == jnp.bool_:
            return ctx.bind(x.data, **params)
        return ctx.bind(ctx.dequantise(x), **params)
    if can_defer(dtype) and jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        data, exponent = split(x)
        return defer(dtypes.cast(data, dtype), exponent, x.scale)
    return ScaledArray(dtypes.cast(x.data, dtype), x.scale)
