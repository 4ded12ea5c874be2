"""Aligning primitives: the scale is the largest vote, and every operand is brought to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes, pow2
from jax_scalify.interpreter.constants import align_constant, constant_floor, room
from jax_scalify.interpreter.multiplying import multiply, within_range
from jax_scalify.interpreter.operand import Operand, defer, split
from jax_scalify.interpreter.registry import Rule, RuleContext, register_scale_rule
from jax_scalify.interpreter.value import filled
from jax_scalify.rules.scattering import (
    applies_function,
    apply_function,
    scatter,
    scatter_along_axes,
)
from jax_scalify.rules.shared.along_axes import (
    Windows,
    comparable,
    gathered_scale,
    largest,
    least_scales,
    lies_along,
    own_scales,
    scale_array,
    scale_of,
    uniform_over,
    varying_axes,
    windowed_axes,
)
from jax_scalify.rules.shared.holding import brought_home, held_scale, keeper_of
from jax_scalify.rules.shared.joining import align, bring_together, same_dtype, shared_scale
from jax_scalify.rules.shared.products import rounded, widened
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import NARROW_EXTENT, ZERO, Scale


def _sum_rule(negate_rhs: bool) -> Rule:
    def rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> ScaledArray:
        out = ctx.out_avals[0]
        if rhs.constant == 0:
            data, exponent = split(lhs)
            return rounded(ctx, filled(data, out), lhs.scale, exponent)
        if lhs.constant == 0:
            data, exponent = split(rhs)
            data = lax.sub(jnp.zeros_like(data), data) if negate_rhs else data  # 0 - 0 is no -0
            return rounded(ctx, filled(data, out), rhs.scale, exponent)
        operation = lax.sub if negate_rhs else lax.add
        keeper = keeper_of(ctx, lhs, rhs)
        if keeper is not None:
            terms = (lhs, rhs) if keeper == 0 else (rhs, lhs)
            scale = held_scale(*terms, is_sum=keeper == 0 or not negate_rhs)
            data = widened(ctx, brought_home((lhs, rhs), keeper, scale))
            return rounded(ctx, operation(*data), scale).at_home(scale)
        scale = shared_scale(lhs, rhs, additive=True) * _growth(ctx, lhs, rhs)
        data, exponent = bring_together((lhs, rhs), scale)
        return rounded(ctx, operation(*widened(ctx, same_dtype(*data))), scale, exponent)

    rule.__doc__ = (
        "`scale = max(lhs.scale, rhs.scale)`, of a state's leaf in wide dtypes its own; a constant "
        "0 changes nothing."
    )
    return rule


def _growth(ctx: RuleContext, *terms: Operand) -> Scale:
    """The cotangents of a weight that is used n times grow like `sqrt(n)`."""
    counts = [x.facts.sums for x in terms]
    if ctx.primitive.name != "add_any" or not all(counts):
        return algebra.ONE
    grown = [int(math.log2(n) / 2) for n in (sum(counts), max(counts))]
    return Scale(grown[0] - grown[1])


register_scale_rule(
    lax.add_p, "add_any", elements="new", elementwise=True, nonnegative="keeps", degree="sum"
)(_sum_rule(negate_rhs=False))
register_scale_rule(lax.sub_p, elements="new", elementwise=True, degree="sum")(
    _sum_rule(negate_rhs=True)
)


def _extremum_rule(sign: int) -> Rule:
    def rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> ScaledArray:
        args = (lhs, rhs)
        numbers = [x.constant for x in args]
        harmless = [n is not None and sign * n <= 0 for n in numbers]
        bound = None
        if any(harmless):  # max(x, c <= 0): the constant saturates, right for every finite x
            which = harmless.index(True)
            other = args[which ^ 1]
            scale, limit = other.scale, _bound(args[which])
            if sign < 0 and other.facts.nonneg:  # 0 <= min(x, c) <= c
                scale = algebra.meet(scale, limit)
            elif other.facts.bound is not None and sign * other.facts.bound > 0:
                bound = other.facts.bound  # the second half of `clip`
                own = Scale(pow2.split_constant(bound)[1])
                scale = algebra.meet(scale, algebra.join(limit, own))
        else:
            scale = shared_scale(lhs, rhs)
        data, exponent = bring_together(args, scale)
        out = ctx.bind(*same_dtype(*data), **params)
        if bound is not None:  # at the scale of the first half it may have been too small to write
            again = align_constant(bound, out.dtype, scale * Scale(exponent))
            out = lax.max(out, again) if sign < 0 else lax.min(out, again)
        return _of_number(ctx, out, scale, exponent, args)

    rule.__doc__ = "`scale = max(lhs.scale, rhs.scale)`; a constant on the far side of 0: no vote."
    return rule


register_scale_rule(lax.max_p, elements="placed", elementwise=True)(_extremum_rule(+1))
register_scale_rule(lax.min_p, elements="placed", elementwise=True)(_extremum_rule(-1))


def _bound(x: Operand) -> Scale:
    """The scale of a constant bound; an infinite one is no bound."""
    return x.scale if np.isfinite(np.float64(x.constant)) else Scale(pow2.MAX_EXPONENT)


@register_scale_rule(lax.clamp_p, elements="placed", elementwise=True)
def clamp_rule(
    ctx: RuleContext, low: Operand, x: Operand, high: Operand, **params: Any
) -> ScaledArray:
    """`scale = max` of the votes; between constants: `x.scale`, clamped to their scales."""
    if low.constant is None or high.constant is None:
        scale = shared_scale(low, x, high)
    else:
        bounds = _bound(low), _bound(high)
        scale = algebra.meet(x.scale, algebra.join(*bounds))
        if low.constant > 0 or high.constant < 0:
            scale = algebra.join(scale, algebra.meet(*bounds))
    args, exponent = bring_together((low, x, high), scale)
    out = ctx.out_avals[0]
    args = [a if i != 1 and not np.ndim(a) else filled(a, out) for i, a in enumerate(args)]
    out = ctx.bind(*same_dtype(*args), **params)
    return _of_number(ctx, out, scale, exponent, (low, x, high))


def _of_number(
    ctx: RuleContext, out: Any, scale: Scale, exponent: int, operands: Sequence[Operand]
) -> Operand:
    """A result that was chosen among others: of rank 0, its scale is its own exponent.

    The smaller of a norm of 1e-9 and of 1 has data of 1e-9 at the scale that both share, and would
    make zeros of the float16 that it multiplies.
    """
    table, dtype = ctx.table, ctx.out_dtype
    scales = {x.scale for x in operands if x.constant is None and not x.scale.is_zero}
    is_number = not ctx.out_avals[0].shape and jnp.issubdtype(dtype, jnp.floating)
    if not (is_number and len(scales) > 1 and table.narrow and table.splits_scalars):
        return rounded(ctx, out, scale, exponent)
    wide = multiply(lax.convert_element_type(out, dtypes.compute_dtype(dtype)), Scale(exponent))
    data, own = table.split(wide)
    return Operand(dtypes.cast(data, dtype), scale * own)


def _brought_together(
    ctx: RuleContext, operands: Sequence[Operand], avals: Sequence[Any], factor: Scale = algebra.ONE
) -> tuple[list[Any], Scale, int]:
    """Align operands in the result's dtype, at a multiple of the largest vote, in given shapes.

    The result has yet to be multiplied by `2**exponent`: the last of what is returned.
    """
    scale = shared_scale(*operands) * factor
    if factor.exponent < 0:  # constants have to fit still
        numbers = [(x.constant, x.dtype) for x in operands]
        floors = [constant_floor(abs(n), dtype) for n, dtype in numbers if n and np.isfinite(n)]
        scale = algebra.join(scale, *floors) if floors else scale
    keeps = ctx.stays_wide or any(x.is_wide for x in operands)
    data, exponent = bring_together(operands, scale, None if keeps else ctx.out_dtype)
    data = [filled(d, aval) for d, aval in zip(same_dtype(*data), avals, strict=True)]
    return data, scale, exponent


def _less(ctx: RuleContext, cases: Sequence[Operand]) -> Scale:
    """By how much the scale of multiples of one array may be less than the largest.

    `where(x < 0.03, 4096 * x, x)`, as in `hypot`, multiplies what is small. At the scale of the
    multiple the other elements would be as small as these were.
    """
    first, *others = cases
    multiples = [x.scale / first.scale for x in others]
    if first.scale.is_zero or not all(m.is_static and not m.is_zero for m in multiples):
        return algebra.ONE
    if any(split(x)[0] is not split(first)[0] or split(x)[1] for x in cases):
        return algebra.ONE
    exponents = [0, *(m.exponent for m in multiples)]
    dtype = dtypes.compute_dtype(first.dtype) if ctx.stays_wide else first.dtype
    return Scale(max(min(exponents) - max(exponents), room(dtype).exponent))


# Cases whose static scales are nearer than this have one scale.
_NEAR = 2


def _chosen_scale(ctx: RuleContext, which: Any, cases: Sequence[Operand]) -> Scale | None:
    """The scale that a predicate of rank 0 chooses; None where one scale is as good.

    `where(norm < 1, g, g / norm)` has gradients of 1e-9 on one side and of 1 on the other. It is
    as good in a step of wide dtypes that keeps its scales. A zero takes any scale.
    """
    numbers = [None if x.constant is None else np.complex128(x.constant) for x in cases]
    scales = [x.scale for x, n in zip(cases, numbers) if n is None or (n != 0 and np.isfinite(n))]
    scales = [s for s in scales if not s.is_zero]
    if not ctx.table.splits_scalars or len(set(scales)) < 2:
        return None
    if all(s.is_static for s in scales):
        exponents = [s.exponent for s in scales]
        if max(exponents) - min(exponents) <= _NEAR:
            return None

    each = [
        scales[0] if x.scale.is_zero or n == 0 else x.scale
        for x, n in zip(cases, numbers, strict=True)
    ]
    shape = np.broadcast_shapes(*(s.shape for s in each))
    arrays = [scale_array(ctx.table, s, shape) for s in each]
    known: dict[str, Any] = dict(
        nonzero=all(s.is_nonzero for s in each),
        extent=min(NARROW_EXTENT, int(max(s.span for s in each))),
    )
    return ctx.table.atom(lax.select_n(which, *arrays), **known)


@register_scale_rule(lax.select_n_p, elements="placed", elementwise=True)
def select_n_rule(ctx: RuleContext, which: Any, *cases: Operand, **params: Any) -> Any:
    """`scale = max` of the cases' votes; of one array's multiples, the least that fits them all.

    One predicate for the whole array chooses the scale too: that of the case that is chosen.
    """
    if not np.ndim(which):
        cases = tuple(map(within_range, cases))
        scale = _chosen_scale(ctx, which, cases)
        if scale is not None:
            data = same_dtype(*(x.data for x in cases))
            data = [filled(d, aval) for d, aval in zip(data, ctx.in_avals[1:], strict=True)]
            return rounded(ctx, ctx.bind(which, *data, **params), scale)
    data, scale, exponent = _brought_together(ctx, cases, ctx.in_avals[1:], _less(ctx, cases))
    return rounded(ctx, ctx.bind(which, *data, **params), scale, exponent)


@register_scale_rule(lax.concatenate_p, elements="joined")
def concatenate_rule(
    ctx: RuleContext, *args: Operand, dimension: int, **params: Any
) -> ScaledArray:
    """`scale = max` of the operands' votes, or, along the axis, the operands' scales.

    One scale along the axis is enough where every operand has one. If an operand has several, it
    keeps them, and so does each other operand.
    """
    args = tuple(x if x.size else uniform_over(x) for x in args)
    if not any(lies_along(x, dimension) for x in args):
        data, scale, exponent = _brought_together(ctx, args, ctx.in_avals)
        return defer(ctx.bind(*data, dimension=dimension, **params), exponent, scale)
    axes = {dimension, *varying_axes(*(x.scale for x in args))}
    data, pieces = [], []
    for x, own, aval in zip(args, own_scales(*args), ctx.in_avals, strict=True):
        data.append(filled(align(x, own, ctx.out_dtype), aval))
        along = [n if a in axes else 1 for a, n in enumerate(aval.shape)]
        pieces.append(scale_array(ctx.table, own, along))
    scale = scale_of(ctx.table, lax.concatenate(pieces, dimension))
    return ScaledArray(ctx.bind(*data, dimension=dimension, **params), scale)


@register_scale_rule("stack", elements="joined")
def stack_rule(ctx: RuleContext, *args: Operand, axis: int, **params: Any) -> ScaledArray:
    """`scale = max` of the operands' votes."""
    data, scale, exponent = _brought_together(ctx, least_scales(*args), ctx.in_avals)
    scale = scale.map(lambda s: lax.expand_dims(s, (axis,)))
    return defer(ctx.bind(*data, axis=axis, **params), exponent, scale)


@register_scale_rule(lax.pad_p, elements="placed")
def pad_rule(
    ctx: RuleContext, x: Operand, value: Operand, *, padding_config: Any, **params: Any
) -> ScaledArray:
    """`scale = max` of the votes of array and padding value.

    Where new indices have scales of their own, it is 0 if their elements are, else the largest.
    """
    x = x if x.size else uniform_over(x)
    if not x.scale.ndim:
        data, scale, exponent = _brought_together(ctx, (x, value), ctx.in_avals)
        return defer(ctx.bind(*data, padding_config=padding_config, **params), exponent, scale)
    number = value.constant
    scale = shared_scale(x, value)
    data = filled(align(x, scale, ctx.out_dtype), ctx.in_avals[0])
    own = [tuple(c) if lies_along(x, a) else (0, 0, 0) for a, c in enumerate(padding_config)]
    if any(c != (0, 0, 0) for c in own):
        new = scale_array(ctx.table, ZERO if number == 0 else largest(scale))
        scale = scale_of(ctx.table, lax.pad(scale.array, new, own))
    if number is not None and (number == 0 or not np.isfinite(number)):
        out = ctx.bind(data, value.data, padding_config=padding_config, **params)
        return ScaledArray(out, scale)
    zero, config = np.zeros((), data.dtype), padding_config
    out = ctx.bind(data, zero, padding_config=config, **params)
    inside = lax.pad(jnp.ones(data.shape, bool), np.zeros((), bool), config)
    return ScaledArray(jnp.where(inside, out, align(value, scale, out.dtype)), scale)


@register_scale_rule(lax.dynamic_update_slice_p, elements="placed")
def dynamic_update_slice_rule(
    ctx: RuleContext, x: Operand, update: Operand, *starts: Any, **params: Any
) -> ScaledArray:
    """`scale = max` of the votes of array and update; that of the array where it is not updated."""
    x, update = least_scales(x, update)
    axes = varying_axes(x.scale, update.scale)
    shape, window = (aval.shape for aval in ctx.in_avals[:2])
    partial = {a for a, (n, size) in enumerate(zip(shape, window, strict=True)) if n != size}
    if not partial & set(axes):  # every scale is one of old and of new elements
        data, scale, exponent = _brought_together(ctx, (x, update), ctx.in_avals[:2])
        return defer(ctx.bind(*data, *starts, **params), exponent, scale)
    own = own_scales(x, update)
    old = scale_array(ctx.table, own[0], [n if a in axes else 1 for a, n in enumerate(shape)])
    new = scale_array(ctx.table, own[1], [n if a in axes else 1 for a, n in enumerate(window)])
    offsets = [s if a in axes else np.zeros((), s.dtype) for a, s in enumerate(starts)]
    if not partial <= set(axes):  # some old elements have the same scales as new ones
        new = lax.max(new, lax.dynamic_slice(old, offsets, new.shape))
    scale = scale_of(ctx.table, lax.dynamic_update_slice(old, new, offsets))
    kept = own[0] if partial <= set(axes) else scale
    targets = (x, kept), (update, scale_of(ctx.table, new))
    data = [
        filled(align(a, own_scale, ctx.out_dtype), aval)
        for (a, own_scale), aval in zip(targets, ctx.in_avals, strict=False)
    ]
    return ScaledArray(ctx.bind(*data, *starts, **params), scale)


@register_scale_rule(lax.gather_p, elements="taken")
def gather_rule(ctx: RuleContext, x: Operand, indices: Any, **params: Any) -> ScaledArray:
    """`out = gather(data)`, and so for scales; a finite fill value is divided by them."""
    (x,) = least_scales(x)
    windows = Windows.gathered(params["dimension_numbers"], params["slice_sizes"])
    fill = params["fill_value"]
    if fill is not None and not np.isfinite(fill):
        x = x.as_pair(x.data, x.scale.or_one())
    if fill is None or fill == 0 or not np.isfinite(fill):
        data, exponent = split(x)
        scale = gathered_scale(ctx, x.scale, indices, windows)
        return defer(ctx.bind(data, indices, **params), exponent, scale)
    scale = algebra.join(x.scale, constant_floor(fill, x.dtype))
    data = multiply(x.data, algebra.alignment(x.scale, scale), x.dtype)
    taken = ctx.bind(data, indices, **{**params, "fill_value": 0})
    inside = jnp.ones(ctx.in_avals[0].shape, bool)
    inside = ctx.bind(inside, indices, **{**params, "fill_value": False})
    scale = gathered_scale(ctx, scale, indices, windows)
    return ScaledArray(jnp.where(inside, taken, align_constant(fill, x.dtype, scale)), scale)


# An element that is picked out of many keeps 12 octaves in float16.
_LEAST_DENSITY = Scale(-4)


@register_scale_rule(lax.scatter_p, lax.scatter_min_p, lax.scatter_max_p, elements="placed")
@register_scale_rule(lax.scatter_add_p, elements="new", nonnegative="keeps", degree="sum")
@register_scale_rule(lax.scatter_sub_p, elements="new", degree="sum")
def scatter_rule(
    ctx: RuleContext, x: Operand, indices: Any, updates: Operand, **params: Any
) -> ScaledArray:
    """`scale = max` of the votes of array and updates; updates are summed in float32.

    Added to n zeros, k updates have `scale * pow2(sqrt(k / n))`: a gradient that is 0 almost
    everywhere, as that of one logit a token. A function that is applied is so to plain values.
    """
    x, updates = least_scales(x, updates)
    if ctx.primitive is lax.scatter_p and applies_function(params):
        return apply_function(ctx, x, indices, updates, params)
    sums = ctx.primitive in (lax.scatter_add_p, lax.scatter_sub_p)
    density = algebra.ONE
    counted = all(isinstance(v.size, int) and v.size for v in (x, updates))
    if sums and x.constant == 0 and counted:
        density = Scale(round(math.log2(updates.size / x.size) / 2))
        if dtypes.has_short_range(x.dtype):
            density = algebra.join(density, _LEAST_DENSITY)
    compute = dtypes.compute_dtype(ctx.out_dtype) if sums else ctx.out_dtype
    if x.scale.ndim or updates.scale.ndim:
        out, scale = scatter_along_axes(ctx, x, indices, updates, density, params, compute)
        return rounded(ctx, out, scale)
    if sums and keeper_of(ctx, x, updates) == 0:
        scale = held_scale(x, updates)
        data = brought_home((x, updates), 0, scale)
        data = [lax.convert_element_type(d, compute) for d in data]
        out = scatter(ctx, data[0], indices, filled(data[1], ctx.in_avals[2]), params)
        return rounded(ctx, out, scale).at_home(scale)
    data, scale, exponent = _brought_together(ctx, (x, updates), ctx.in_avals[::2], density)
    data = [lax.convert_element_type(d, compute) for d in data] if sums else data
    out = scatter(ctx, data[0], indices, data[1], params)
    return rounded(ctx, out, scale, exponent)


@register_scale_rule(lax.select_and_scatter_add_p, elements="new", nonnegative="keeps")
def select_and_scatter_add_rule(
    ctx: RuleContext, source: Operand, operand: Operand, **params: Any
) -> ScaledArray:
    """`scale = source.scale`, added up in float32; the operand only says where."""
    axes = windowed_axes(ctx, **params)
    source = uniform_over(source, axes)
    compute = dtypes.compute_dtype(ctx.out_dtype)
    arrays = source, comparable(operand, axes)
    data = [
        filled(dtypes.cast(x.data, compute), v) for x, v in zip(arrays, ctx.in_avals, strict=True)
    ]
    return rounded(ctx, ctx.bind(*data, **params), source.scale)


@register_scale_rule(lax.complex_p, elements="new", elementwise=True)
def complex_rule(ctx: RuleContext, re: Operand, im: Operand, **params: Any) -> ScaledArray:
    """`scale = max` of the scales of real and imaginary part."""
    scale = shared_scale(re, im, additive=True)
    return ScaledArray(ctx.bind(align(re, scale), align(im, scale)), scale)


@register_scale_rule(
    lax.rem_p, family="remainder", elements="new", elementwise=True, nonnegative="keeps"
)
def rem_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> ScaledArray:
    """`scale = min(lhs.scale, rhs.scale)`, in at least float32: no divisor becomes 0."""
    scale = algebra.meet(lhs.scale, rhs.scale)
    data = same_dtype(*(multiply(x.data, x.scale / scale) for x in (lhs, rhs)))
    data = [lax.convert_element_type(d, dtypes.compute_dtype(d.dtype)) for d in data]
    return ScaledArray(dtypes.cast(ctx.bind(*data, **params), ctx.out_dtype), scale)
