"""Aligning primitives. The largest vote is the scale, and every operand is brought to it.

`rules/shared/joining.py` computes the votes. An array votes with its scale. In a sum, a constant
votes with its own power of two. Elsewhere it votes with the smallest scale at which its data fits.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.base.filling import filled
from jax_scalify.interpreter.constants import align_constant, constant_floor
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_elementwise, register_scale_rule
from jax_scalify.rules.scattering import apply_function, scatter, scatter_along_axes
from jax_scalify.rules.shared.along_axes import (
    Windows,
    comparable,
    gathered_scale,
    least_scales,
    lies_along,
    own_scales,
    scale_along,
    scale_array,
    scale_of,
    uniform_over,
    varying_axes,
    windowed_axes,
)
from jax_scalify.rules.shared.holding import at_its_home, home_of_sum, in_unit, of_leaf_shape
from jax_scalify.rules.shared.joining import (
    align,
    at_shared_scale,
    same_dtype,
    scale_for,
    shared_scale,
)
from jax_scalify.rules.shared.products import widened
from jax_scalify.scales.algebra import ONE, ZERO, Scale, join, meet
from jax_scalify.scales.multiplying import multiply


def _sum_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> Operand:
    out, negate_rhs = ctx.out_avals[0], ctx.primitive is lax.sub_p
    if rhs.constant == 0 and not ctx.holds_values:
        return ctx.result(filled(lhs.data, out), lhs.scale)
    if lhs.constant == 0 and not ctx.holds_values:
        data = rhs.data
        # Not `-x`: if `x` is 0, `0 - x` is 0 but `-x` is -0.
        data = lax.sub(jnp.zeros_like(data), data) if negate_rhs else data
        return ctx.result(filled(data, out), rhs.scale)
    operation = lax.sub if negate_rhs else lax.add  # `add_any` does not broadcast numbers
    leading = [x for x in (lhs, rhs) if x.facts.leads]
    if len(leading) == 1:  # the larger term of a gate's derivative: see `interpreter/gates.py`
        scale = leading[0].scale
    else:
        scale = shared_scale(lhs, rhs, additive=True) * _growth(ctx, lhs, rhs)
        scale = of_leaf_shape(scale, lhs, rhs)
    home = home_of_sum(ctx, lhs, rhs)
    if ctx.holds_values:
        unit = ONE if home is None or home.ndim else home  # see `in_unit`
        out = ctx.of_value(operation(*(in_unit(x, unit) for x in (lhs, rhs))), scale, unit)
    else:
        data = same_dtype(align(lhs, scale), align(rhs, scale))
        out = ctx.result(operation(*widened(ctx, data, scale)), scale)
    return at_its_home(out, home, lhs, rhs)


_sum_rule.__doc__ = (
    "`scale = max(lhs.scale, rhs.scale)`, without that of a constant 0; the sum that updates a "
    "float32 or bfloat16 leaf of the state keeps the leaf's scale."
)
register_elementwise(lax.add_p, "add_any", nonnegative="keeps", degree="sum")(_sum_rule)
register_elementwise(lax.sub_p, degree="sum")(_sum_rule)


def _growth(ctx: RuleContext, *terms: Operand) -> Scale:
    """Return the growth of a sum of cotangents, relative to its larger term.

    A weight that is used n times has n cotangents, and their sum grows like `sqrt(n)`. If they are
    added one at a time, the fourth doubles the scale, and the second and third leave it unchanged.
    """
    counts = [x.facts.sums for x in terms]
    if ctx.primitive.name != "add_any" or not all(counts):
        return ONE
    grown = [int(math.log2(n) / 2) for n in (sum(counts), max(counts))]
    return Scale(grown[0] - grown[1])


@register_scale_rule(lax.concatenate_p, elements="joined")
def concatenate_rule(ctx: RuleContext, *args: Operand, dimension: int, **params: Any) -> Operand:
    """`scale = max(votes)`; if an operand has scales along the axis, each keeps its own scales.

    With scales of shape `(4,)` and `()`, operands of shape `(4,)` and `(2,)` give scales of shape
    `(6,)`.
    """
    # An empty array may have an empty array of scales. Its maximum is the scale 0, which any fits.
    args = tuple(x if x.size else uniform_over(x) for x in args)
    if not any(lies_along(x, dimension) for x in args):
        scale = scale_for(args)
        data = at_shared_scale(ctx, args, scale)
        return ctx.result(ctx.bind(*data, dimension=dimension, **params), scale)
    axes = {dimension, *varying_axes(*(x.scale for x in args))}
    data, pieces = [], []
    for x, own in zip(args, own_scales(*args), strict=True):
        data += at_shared_scale(ctx, (x,), own)
        pieces.append(scale_along(ctx.table, own, axes, x.shape))
    scale = scale_of(ctx.table, lax.concatenate(pieces, dimension))
    return ctx.result(ctx.bind(*data, dimension=dimension, **params), scale)


@register_scale_rule("stack", elements="joined")
def stack_rule(ctx: RuleContext, *args: Operand, axis: int, **params: Any) -> Operand:
    """`scale = max(votes)` of the operands."""
    arrays = least_scales(*args)
    scale = scale_for(arrays)
    data = at_shared_scale(ctx, arrays, scale)
    scale = scale.map(lambda s: lax.expand_dims(s, (axis,)))
    return ctx.result(ctx.bind(*data, axis=axis, **params), scale)


@register_scale_rule(lax.pad_p, elements="placed")
def pad_rule(ctx: RuleContext, x: Operand, value: Operand, **params: Any) -> Operand:
    """`scale = max(votes)` of the array and the padding value.

    If the array has scales along a padded axis, new indices get the scale 0 for the padding value
    0, and the largest vote for any other value.
    """
    x = x if x.size else uniform_over(x)
    if not x.scale.ndim:
        scale = scale_for((x, value))
        data = at_shared_scale(ctx, (x, value), scale)
        return ctx.result(ctx.bind(*data, **params), scale)
    number, config = value.constant, params["padding_config"]
    scale = shared_scale(x, value)
    (data,) = at_shared_scale(ctx, (x,), scale)
    own = [tuple(c) if lies_along(x, a) else (0, 0, 0) for a, c in enumerate(config)]
    if any(c != (0, 0, 0) for c in own):
        # The gradient of `x[:2]` pads with zeros. In a sum of such gradients, the scale 0 of the
        # zeros leaves the other terms their scales.
        new = scale_array(ctx.table, ZERO if number == 0 else scale.largest)
        scale = scale_of(ctx.table, lax.pad(scale.array, new, own))
    if ctx.holds_values:
        return ctx.of_value(ctx.bind(data, value.value, **params), scale)
    if number is not None and (number == 0 or not np.isfinite(number)):
        return Operand(ctx.bind(data, value.data, **params), scale)
    # The padding value's data differs where scales differ, but `lax.pad` takes one number.
    out = ctx.bind(data, np.zeros((), data.dtype), **params)
    inside = lax.pad(jnp.ones(data.shape, bool), np.zeros((), bool), config)
    return Operand(jnp.where(inside, out, align(value, scale, out.dtype)), scale)


@register_scale_rule(lax.dynamic_update_slice_p, elements="placed")
def dynamic_update_slice_rule(
    ctx: RuleContext, x: Operand, update: Operand, *starts: Any, **params: Any
) -> Operand:
    """`scale = max(votes)`; with scales along axes, only updated indices change their scales."""
    x, update = least_scales(x, update)
    axes = varying_axes(x.scale, update.scale)
    partial = {a for a, (n, m) in enumerate(zip(x.shape, update.shape, strict=True)) if n != m}
    if not partial & set(axes):  # every scale belongs to old and to new elements
        scale = scale_for((x, update))
        data = at_shared_scale(ctx, (x, update), scale)
        return ctx.result(ctx.bind(*data, *starts, **params), scale)
    own = own_scales(x, update)
    old = scale_along(ctx.table, own[0], axes, x.shape)
    new = scale_along(ctx.table, own[1], axes, update.shape)
    offsets = [s if a in axes else np.zeros((), s.dtype) for a, s in enumerate(starts)]
    if not partial <= set(axes):  # some old elements share a scale with new elements
        taken = lax.dynamic_slice_p.bind(old, *offsets, slice_sizes=new.shape)
        new = lax.max(new, taken)
    written = lax.dynamic_update_slice_p.bind(old, new, *offsets)
    scale = scale_of(ctx.table, written)
    # Elements that are overwritten need not be brought to the new scales.
    kept = own[0] if partial <= set(axes) else scale
    data = at_shared_scale(ctx, (x,), kept)
    data += at_shared_scale(ctx, (update,), scale_of(ctx.table, new))
    return ctx.result(ctx.bind(*data, *starts, **params), scale)


@register_scale_rule(lax.gather_p, elements="taken")
def gather_rule(ctx: RuleContext, x: Operand, indices: Any, **params: Any) -> Operand:
    """`out = gather(data)`, `scale = gather(scale)`; a finite fill value votes."""
    (x,) = least_scales(x)
    windows = Windows(params["dimension_numbers"], params["slice_sizes"])
    fill = params["fill_value"]
    if fill is not None and not np.isfinite(fill):
        own = x.scale.or_one()  # at the scale 0, the fill value would be 0 * inf = nan
        x = x.as_pair(x.data, own) if x.holds_data else x.with_scale(own)
    if fill is None or fill == 0 or not np.isfinite(fill):
        scale = gathered_scale(ctx, x.scale, indices, windows)
        return x.moved(ctx.bind(x.source, indices, **params), scale)
    scale = join(x.scale, constant_floor(fill, x.dtype))
    if ctx.holds_values:
        return ctx.on_values(gathered_scale(ctx, scale, indices, windows), x, indices, **params)
    # The fill value is a static parameter of `gather`, but with a dynamic scale its data is not
    # known while tracing. So the gather fills with 0, and the fill value is chosen afterwards.
    data = multiply(x.data, x.scale / scale, x.dtype)
    taken = ctx.bind(data, indices, **{**params, "fill_value": 0})
    inside = jnp.ones(ctx.in_avals[0].shape, bool)
    inside = ctx.bind(inside, indices, **{**params, "fill_value": False})
    scale = gathered_scale(ctx, scale, indices, windows)
    return Operand(jnp.where(inside, taken, align_constant(fill, x.dtype, scale)), scale)


# The smallest factor by which sparse updates lower a scale in float16 and FP8. An update of unit
# size then has data of 2**4, and 12 octaves remain up to the largest float16.
_LEAST_DENSITY = Scale(-4)


@register_scale_rule(lax.scatter_p, lax.scatter_min_p, lax.scatter_max_p, elements="placed")
@register_scale_rule(lax.scatter_add_p, elements="new", nonnegative="keeps", degree="sum")
@register_scale_rule(lax.scatter_sub_p, elements="new", degree="sum")
def scatter_rule(
    ctx: RuleContext, x: Operand, indices: Any, updates: Operand, **params: Any
) -> Operand:
    """`scale = max(votes)` of array and updates; updates are summed in float32.

    If k updates are added to n zeros, the scale is multiplied by `pow2(sqrt(k / n))`, the RMS of
    the result. For example, the gradient of a loss that picks one logit per token is 0 almost
    everywhere. `x.at[i].apply(f)` applies `f` to plain values.
    """
    sums = ctx.primitive in (lax.scatter_add_p, lax.scatter_sub_p)
    if sums and not x.scale.ndim and x.home == x.scale:  # a leaf keeps the shape of its scale
        updates = uniform_over(updates)
    x, updates = least_scales(x, updates)
    if (applied := apply_function(ctx, x, indices, params)) is not None:
        return applied
    density = ONE
    counted = all(isinstance(v.size, int) and v.size for v in (x, updates))
    if sums and x.constant == 0 and counted:
        density = Scale(round(math.log2(updates.size / x.size) / 2))
        if dtypes.is_narrow(x.dtype):
            density = join(density, _LEAST_DENSITY)
    # In the gradient of an embedding, thousands of updates may be added to one row, in float32.
    compute = dtypes.compute_dtype(ctx.out_dtype) if sums else ctx.out_dtype
    if x.scale.ndim or updates.scale.ndim:
        out, scale = scatter_along_axes(ctx, x, indices, updates, density, params, compute)
        return ctx.result(out, scale)
    scale = scale_for((x, updates), density)
    data = at_shared_scale(ctx, (x, updates), scale)
    data = [lax.convert_element_type(d, compute) for d in data] if sums else data
    out = scatter(ctx.primitive, data[0], indices, data[1], params)
    out = ctx.result(out, scale)
    home = home_of_sum(ctx, x, updates) if sums else None
    return at_its_home(out, home, x, updates)


@register_scale_rule(lax.select_and_scatter_add_p, elements="new", nonnegative="keeps")
def select_and_scatter_add_rule(
    ctx: RuleContext, source: Operand, operand: Operand, **params: Any
) -> Operand:
    """`scale = source.scale`, added up in float32; the operand only selects positions."""
    # The gradient of max pooling: an element that several windows choose gets a sum.
    axes = windowed_axes(ctx, **params)
    source = uniform_over(source, axes)
    compute = dtypes.compute_dtype(ctx.out_dtype)
    if ctx.holds_values:
        return ctx.on_values(source.scale, source, operand, **params)
    data = [dtypes.cast(x.data, compute) for x in (source, comparable(operand, axes))]
    return ctx.result(ctx.bind(*data, **params), source.scale)


@register_elementwise(lax.complex_p)
def complex_rule(ctx: RuleContext, re: Operand, im: Operand, **params: Any) -> Operand:
    """`scale = max(re.scale, im.scale)`."""
    return ctx.on_values(shared_scale(re, im, additive=True), re, im)


@register_elementwise(lax.rem_p, family="remainder", nonnegative="keeps")
def rem_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> Operand:
    """`scale = min(lhs.scale, rhs.scale)`, in at least float32: the divisor must not underflow."""
    scale = meet(lhs.scale, rhs.scale)
    if ctx.holds_values:
        return ctx.on_values(scale, lhs, rhs, **params)
    data = same_dtype(*(multiply(x.data, x.scale / scale) for x in (lhs, rhs)))
    data = [lax.convert_element_type(d, dtypes.compute_dtype(d.dtype)) for d in data]
    return ctx.result(ctx.bind(*data, **params), scale, saturates=False)
