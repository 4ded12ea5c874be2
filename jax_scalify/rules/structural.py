"""Structural primitives: `out.data = f(data)` and `out.scale = scale`.

A scale with axes goes through the matching operation: `transpose` transposes the scale too. Along
axes whose elements the primitive mixes, the scale is first made uniform.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.base.filling import filled
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_elementwise, register_scale_rule
from jax_scalify.rules.shared.along_axes import comparable, scale_of, uniform_over, windowed_axes
from jax_scalify.rules.shared.joining import same_dtype
from jax_scalify.scales.algebra import ONE, Scale

# A cast applies a scale as one float32 factor if it is at most this far from 1, in octaves.
_LARGEST_SPAN = 120


def structural_rule(
    move_scale: Callable[..., Any] | None = None, mixed_axes: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return the rule of a primitive that rearranges the elements of its first operand.

    Args:
        move_scale: `(scale, *others, ctx, **params)` -> the array of the result's scale, or a list
            of arrays if the primitive has several results. By default the scale is unchanged.
        mixed_axes: `(ctx, **params)` -> the axes along which the scale must be uniform. By default
            none.
    """

    def rule(ctx: RuleContext, x: Operand, *others: Any, **params: Any) -> Any:
        """`out = f(data)`, scale unchanged."""
        if x.scale.ndim:
            x = uniform_over(x, () if mixed_axes is None else mixed_axes(ctx, **params))
        scales = [x.scale] * len(ctx.out_avals)
        if move_scale is not None and x.scale.ndim:
            moved = move_scale(x.scale.array, *others, ctx=ctx, **params)
            moved = moved if ctx.primitive.multiple_results else [moved]
            scales = [_scale(ctx, *s) for s in zip(moved, ctx.out_avals, strict=True)]
        out = ctx.bind(x.source, *others, **params)
        if not ctx.primitive.multiple_results:
            return _moved(ctx, x, out, scales[0])
        return [x.moved(o, s) for o, s in zip(out, scales, strict=True)]

    return rule


def _moved(ctx: RuleContext, x: Operand, source: Any, scale: Scale) -> Operand:
    """Return `x` with its source and scale moved, rounded if the source is widened."""
    if not (ctx.stays_wide or x.is_widened):
        return x.moved(source, scale)
    # In `square(x).reshape(-1)` the square may arrive in float32. It is rounded here, unless the
    # result may stay in float32 too.
    return ctx.result(source, scale, fits=x.fits)


def _scale(ctx: RuleContext, array: Any, aval: Any) -> Scale:
    """Return the scale of a result, given the array of the scale.

    A scale with one element keeps its axes if the result has an axis of length 1. It is then the
    scale of this index only: where the gradient of a slice pads this axis, the zeros do not get it.
    """
    own = math.prod(array.shape) == 1 and 1 in aval.shape
    return ctx.table.atom(array) if own else scale_of(ctx.table, array)


_same_axes_rule = structural_rule()
register_scale_rule(lax.neg_p, elements="negated", elementwise=True)(_same_axes_rule)
register_elementwise(lax.abs_p, nonnegative="always", degree=1)(_same_axes_rule)
register_elementwise(lax.real_p, nonnegative="keeps", degree=1)(_same_axes_rule)
register_elementwise(lax.imag_p, lax.conj_p)(_same_axes_rule)
for _name in ("copy", "copy_p", "stop_gradient", "name"):
    register_scale_rule(_name, elements="same", elementwise=True)(_same_axes_rule)
for _name in "on_backward sharding_constraint reshard layout_constraint relayout pvary".split():
    register_scale_rule(_name, elements="same")(_same_axes_rule)


def _broadcast_scale(scale: Any, *_: Any, ctx: RuleContext, **params: Any) -> Any:
    dims = params["broadcast_dimensions"]
    sizes = dict(zip(dims, scale.shape, strict=True))
    shape = [sizes.get(a, 1) for a in range(ctx.out_avals[0].ndim)]
    return lax.broadcast_in_dim(scale, shape, dims)


def _slice_scale(scale: Any, **params: Any) -> Any:
    strides = params["strides"] or [1] * scale.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    # An axis of length 1 has one scale for all indices, so it is not sliced.
    taken = [(0, 1, 1) if n == 1 else own for n, own in zip(scale.shape, bounds, strict=True)]
    return lax.slice(scale, *zip(*taken, strict=True))


def _dynamic_slice_scale(scale: Any, *starts: Any, slice_sizes: Any, **_: Any) -> Any:
    varies = [size != 1 for size in scale.shape]
    # The start on an axis of length 1 is 0. So in a loop over `x[i]`, scales of columns do not
    # depend on `i`, and all steps share them.
    starts = tuple(s if v else np.zeros((), s.dtype) for s, v in zip(starts, varies, strict=True))
    sizes = [size if v else 1 for size, v in zip(slice_sizes, varies, strict=True)]
    # Starts of the equation are final: XLA moves the slice to the nearest valid start. The function
    # `lax.dynamic_slice` would add the length to negative starts again, or refuse those below 0.
    return lax.dynamic_slice_p.bind(scale, *starts, slice_sizes=tuple(sizes))


def _split_scale(scale: Any, *, sizes: Any, axis: int, **_: Any) -> list[Any]:
    if scale.shape[axis] == 1:
        return [scale] * len(sizes)
    return list(lax.split(scale, sizes, axis))


def _unstack_scale(scale: Any, *, ctx: RuleContext, axis: int, **_: Any) -> list[Any]:
    count = len(ctx.out_avals)
    if scale.shape[axis] == 1:
        return [lax.squeeze(scale, (axis,))] * count
    return [lax.index_in_dim(scale, i, axis, keepdims=False) for i in range(count)]


def _tile_scale(scale: Any, *, reps: Any, **_: Any) -> Any:
    return jnp.tile(scale, [1 if n == 1 else r for n, r in zip(scale.shape, reps, strict=True)])


for _primitive, _elements, _move in (
    (lax.transpose_p, "moved", lambda s, *, permutation, **_: lax.transpose(s, permutation)),
    (lax.squeeze_p, "moved", lambda s, *, dimensions, **_: lax.squeeze(s, dimensions)),
    (lax.rev_p, "moved", lambda s, *, dimensions, **_: lax.rev(s, dimensions)),
    (lax.broadcast_in_dim_p, "moved", _broadcast_scale),
    (lax.slice_p, "moved", _slice_scale),
    (lax.dynamic_slice_p, "taken", _dynamic_slice_scale),
    ("split", "taken", _split_scale),
    ("unstack", "taken", _unstack_scale),
    ("tile", "taken", _tile_scale),
):
    register_scale_rule(_primitive, elements=_elements)(structural_rule(_move))


@register_scale_rule(lax.reshape_p, elements="moved")
def reshape_rule(ctx: RuleContext, x: Operand, *, dimensions: Any = None, **params: Any) -> Operand:
    """`out = reshape(data)`; the scales along an axis move to the axes that it becomes.

    Example: data of shape `(4, 6)` has scales of shape `(4, 1)`. Reshaped to `(2, 2, 6)`, it has
    scales of shape `(2, 2, 1)`. Reshaped to `(24,)`, it has one scale per element. In wide dtypes,
    such scales are replaced with their maximum. float16 and FP8 keep them, because small elements
    would be lost.
    """
    if dimensions is not None:  # the order in which the axes are read
        scale = x.scale.map(lambda s: lax.transpose(s, dimensions))
        x = x.moved(lax.transpose(x.source, dimensions), scale)
    params["dimensions"] = None
    if x.scale.ndim:
        groups = _reshaped_groups(x.shape, ctx.out_avals[0].shape)
        varies = [any(x.scale.shape[a] != 1 for a in axes) for axes, _ in groups]
        size = math.prod(math.prod(sizes) for (_, sizes), v in zip(groups, varies) if v)
        every = math.prod(x.scale.shape) != size == x.size  # each element would get a scale
        if not x.size or every and not dtypes.is_narrow(x.dtype):
            x = uniform_over(x)
    scale = x.scale
    if scale.ndim:
        wide, shape = [1] * x.ndim, []
        for (axes, sizes), v in zip(groups, varies):
            for a in axes:
                wide[a] = x.shape[a] if v else 1
            shape += sizes if v else [1] * len(sizes)
        # From (4, 6) to (24,): scales of shape (4, 1) are broadcast to (4, 6), and then reshaped.
        scale = scale.map(lambda s: jnp.broadcast_to(s, wide).reshape(shape))
    return _moved(ctx, x, ctx.bind(x.source, **params), scale)


def _reshaped_groups(
    before: tuple[int, ...], after: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """Pair the smallest groups of axes of equal total size: old axes, and their new sizes.

    `(4, 6)` to `(2, 2, 6)` gives `[([0], [2, 2]), ([1], [6])]`.
    """
    if 0 in before:
        # All products that contain a 0 are equal, so smaller groups would be ambiguous.
        return [(list(range(len(before))), list(after))]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        axes, sizes, old, new = [], [], 1, 1
        while not (axes or sizes) or old != new:
            if j == len(after) or (i < len(before) and _at_most(old, new)):
                axes.append(i)
                old, i = old * before[i], i + 1
            else:
                sizes.append(after[j])
                new, j = new * after[j], j + 1
        groups.append((axes, sizes))
    return groups


def _at_most(size: Any, other: Any) -> bool:
    """Return whether `size <= other`; False if symbolic sizes leave it undecided."""
    try:
        return bool(size <= other)
    except jax.errors.InconclusiveDimensionOperation:
        return False


register_scale_rule(lax.reduce_max_p, lax.reduce_min_p, elements="picked")(
    structural_rule(lambda s, *, axes, **_: lax.squeeze(s, axes), lambda _, *, axes, **__: axes)
)
register_scale_rule(lax.cummax_p, lax.cummin_p, elements="picked")(
    structural_rule(mixed_axes=lambda _, *, axis, **__: (axis,))
)
register_scale_rule(
    lax.reduce_window_max_p, lax.reduce_window_min_p, elements="new", nonnegative="keeps"
)(structural_rule(mixed_axes=windowed_axes))


@register_scale_rule(lax.top_k_p, "approx_top_k", elements="taken")
def top_k_rule(ctx: RuleContext, x: Operand, **params: Any) -> list[Any]:
    """`out = f(data)`; elements of the searched axis are compared at one scale."""
    axis = params.get("axis", params.get("reduction_dimension", -1)) % x.ndim
    x = comparable(x, (axis,))
    values, indices = ctx.bind(x.source, **params)
    return [x.moved(dtypes.cast(values, ctx.out_dtype), x.scale), indices]


@register_scale_rule("select_and_gather_add", elements="new", nonnegative="keeps")
def select_and_gather_add_rule(
    ctx: RuleContext, tangents: Operand, operand: Operand, **params: Any
) -> Operand:
    """`scale = tangents.scale`; the operand only selects positions."""
    # JAX differentiates max pooling with this primitive, in forward mode.
    axes = windowed_axes(ctx, **params)
    tangents = uniform_over(tangents, axes)
    if ctx.holds_values:
        return ctx.on_values(tangents.scale, tangents, operand, **params)
    data = same_dtype(tangents.data, comparable(operand, axes).data)
    return ctx.result(ctx.bind(*data, **params), tangents.scale, saturates=False)


@register_scale_rule(lax.reduce_precision_p, elements="cast", elementwise=True)
def reduce_precision_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`out = f(data)`, scale unchanged; FP8 data that fits the precision is not touched."""
    kind = jnp.finfo(x.dtype)
    fits = params["exponent_bits"] >= kind.nexp and params["mantissa_bits"] >= kind.nmant
    # XLA's `reduce_precision` turns E4M3 values above 240 into nan, and subnormal values into 0.
    # `jax.checkpoint` inserts it wherever a policy saves an array (JAX 0.12).
    if fits and dtypes.is_fp8(x.dtype):
        return x
    return x.moved(ctx.bind(x.source, **params), x.scale)


@register_scale_rule("optimization_barrier", "pin", "store", elements="same", elementwise=True)
@register_scale_rule("device_put", elements="same")
def operandwise_rule(ctx: RuleContext, *args: Any, **params: Any) -> list[Any]:
    """`out = f(data)`, scale unchanged, for each operand."""
    data = [x.source if isinstance(x, Operand) else x for x in args]
    # A number beside arrays may be 0-d, but the results must have the shapes of the equation.
    data = [filled(d, aval) for d, aval in zip(data, ctx.in_avals, strict=True)]
    out = ctx.bind(*data, **params)
    out = out if ctx.primitive.multiple_results else [out]
    return [
        x.moved(dtypes.cast(o, aval.dtype), x.scale) if isinstance(x, Operand) else o
        for o, aval, x in zip(out, ctx.out_avals, args, strict=True)
    ]


@register_scale_rule(lax.sort_p, elements="taken")
def sort_rule(
    ctx: RuleContext, *args: Any, dimension: int, num_keys: int, **params: Any
) -> list[Any]:
    """`out = f(data)`; each operand has one scale along the sorted axis."""
    # Keys are compared, so small keys must keep their order. Other operands are only moved.
    bring = [comparable] * num_keys + [uniform_over] * (len(args) - num_keys)
    pairs = zip(bring, args, strict=True)
    args = tuple(to_one(x, (dimension,)) if isinstance(x, Operand) else x for to_one, x in pairs)
    return operandwise_rule(ctx, *args, dimension=dimension, num_keys=num_keys, **params)


@register_scale_rule(
    lax.convert_element_type_p, family="convert", elements="cast", elementwise=True
)
def convert_element_type_rule(ctx: RuleContext, x: Any, **params: Any) -> Any:
    """Cast float data at its scale, saturating in FP8 and, where the value is finite, in float16.

    Integers are cast from the plain values.
    """
    dtype = ctx.out_dtype
    if not isinstance(x, Operand):  # integers and bools have scale 1
        return Operand(ctx.bind(x, **params), ONE)
    if not dtypes.is_scalable(dtype):
        # A cast to bool is `x != 0`, which the data decides. An integer needs the value.
        return ctx.bind(x.source if dtype == jnp.bool_ else ctx.dequantise(x), **params)
    if not dtypes.is_narrow(dtype):
        source, unit = dtypes.cast(x.source, dtype), x.unit
        if unit.ndim or unit.is_zero:
            return ctx.result(source, x.scale, unit)
        return ctx.of_value(source, x.scale, unit)  # a scalar unit is kept, not multiplied
    if dtypes.is_narrow(x.dtype):
        return Operand(dtypes.cast(x.data, dtype), x.scale)
    # In `jnp.where(m, x, 1).astype(float16)` with tiny `x`, the 1 must fit at the scale too.
    scale = ctx.with_room(x.scale)
    if scale.may_leave_range and (scale.ndim or scale.span > _LARGEST_SPAN):
        scale = scale.bounded()  # the unbounded factor may be infinite, and 0 * inf is nan
    if dtypes.is_fp8(dtype):  # never stays in float32: the program rounds here
        return Operand(x.at_unit(scale, dtype), scale)
    # A real dtype takes the real part. It is taken first, because complex numbers cannot saturate.
    source = lax.real(x.source) if jnp.iscomplexobj(x.source) else x.source
    return ctx.result(source, scale, x.unit)
