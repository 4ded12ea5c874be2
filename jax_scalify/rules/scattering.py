"""Scatters of arrays with scales along axes, and scatters that apply a function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend.core import Primitive

from jax_scalify import _compat
from jax_scalify.base.filling import filled
from jax_scalify.interpreter.constants import promote
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.interpreter.value import Plain
from jax_scalify.rules.shared.along_axes import (
    Windows,
    own_scales,
    scale_along,
    scale_array,
    scale_of,
    uniform_over,
    varying_axes,
)
from jax_scalify.rules.shared.joining import align
from jax_scalify.scales.algebra import Scale, join

# With other modes, an update whose window lies outside is dropped.
_NEVER_DROPS = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def scatter(
    primitive: Primitive, x: Any, indices: Any, updates: Any, params: dict[str, Any]
) -> Any:
    """Scatter data of any dtype. The equation itself, with its `update_jaxpr`, takes one dtype."""
    function = getattr(lax, primitive.name.replace("-", "_"))  # `lax.scatter_add` for "scatter-add"
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return function(x, indices, updates, **{name: params[name] for name in names})


def scatter_along_axes(
    ctx: RuleContext,
    x: Operand,
    indices: Any,
    updates: Operand,
    factor: Scale,
    params: dict[str, Any],
    dtype: Any,
) -> tuple[Any, Scale]:
    """Scatter with scales along axes. Return data in `dtype`, or wide values, and the scale.

    Each scale of the result is `factor` times the maximum of the array's scale and the scales of
    the updates that are written to its elements. For `x.at[rows].add(u)` with one scale for each
    row of `x`, `out.scale = x.scale.at[rows].max(u.scale)`, and `u` is brought to
    `out.scale[rows]`. If an update replaces all elements that share a scale, the array's own scale
    does not count there.
    """
    windows = Windows.scattered(params["dimension_numbers"], x.ndim, updates.shape)
    partial = windows.partial_axes(x.shape)
    updates, axes = _with_few_scales(x, updates, windows, partial)
    own = own_scales(x, updates)
    replaces = False
    if not partial & set(axes):
        # No index chooses a scale: `x.at[rows].add(u)` with a scale for each column.
        scale = join(own[0], own[1].map(windows.on_operand)) * factor
        there = scale.map(lambda s: windows.on_windows(s, updates.ndim))
    else:
        # Indices choose scales: `x.at[rows].add(u)` with a scale for each row. The array of scales
        # has length 1 along other axes, and is gathered and scattered by the same rows.
        inner, columns = windows.along(axes, indices)
        old = scale_along(ctx.table, own[0], axes, x.shape)
        new = scale_array(ctx.table, own[1], inner.shape_along(axes, updates.shape))
        # Scales of dropped updates must be dropped too, so all starts must choose scales.
        starts = set(params["dimension_numbers"].scatter_dims_to_operand_dims)
        is_placed = starts <= set(axes) or params["mode"] in _NEVER_DROPS
        replaces = ctx.primitive is lax.scatter_p and partial <= set(axes) and is_placed
        kept = old
        if replaces:
            # The scale 0 loses every maximum, so the scales of replaced elements do not count.
            kept = inner.write(lax.scatter, old, columns, jnp.zeros_like(new), params["mode"])
        joined = inner.write(lax.scatter_max, kept, columns, new, params["mode"])
        taken = inner.take(joined, columns)
        scale = scale_of(ctx.table, joined) * factor
        there = scale_of(ctx.table, taken) * factor
    if ctx.holds_values:
        old, new = x.value, updates.value
    else:
        old, new = align(x, own[0] if replaces else scale, dtype), align(updates, there, dtype)
    old, new = filled(old, ctx.in_avals[0]), filled(new, ctx.in_avals[2])
    return scatter(ctx.primitive, old, indices, new, params), scale


def _with_few_scales(
    x: Operand, updates: Operand, windows: Windows, partial: set[int]
) -> tuple[Operand, Sequence[int]]:
    """Return the updates, and the axes along which the result has scales.

    If there would be a scale for nearly every element, the updates are brought to fewer scales.
    """
    axes = _axes_of_result(x, updates, windows, partial)
    each = math.prod(updates.scale.shape) == math.prod(updates.shape)
    into_zeros = x.constant == 0
    # The gradient of a diagonal scatters updates with one scale each into zeros.
    if _is_worth_it(x, axes) or (each and into_zeros):
        return updates, axes
    # For `x.at[i, j].set(u)`, `whole` is empty, and the updates get one scale. For `x.at[i].set(u)`
    # they may keep a scale for each column.
    whole = [d for d, a in windows.inside.items() if a not in partial]
    updates = uniform_over(updates, [d for d in range(updates.ndim) if d not in whole])
    axes = _axes_of_result(x, updates, windows, partial)
    if _is_worth_it(x, axes):
        return updates, axes
    return uniform_over(updates), varying_axes(x.scale)


def _axes_of_result(x: Operand, updates: Operand, windows: Windows, partial: set[int]) -> list[int]:
    """Return the array axes along which the array's scale or the updates' scales differ."""
    axes = set(varying_axes(x.scale))
    batch, inside = {b: a for a, b in windows.batch.items()}, windows.inside
    apart = [dim for dim in range(updates.ndim) if dim not in inside]
    for dim in varying_axes(updates.scale):
        if dim in inside:
            axes.add(inside[dim])
        elif apart.index(dim) in batch:
            axes.add(batch[apart.index(dim)])
        else:
            # A scale for each window lies along the axes that the indices move the window on.
            axes |= partial - set(batch.values())
    return sorted(axes)


def _is_worth_it(x: Operand, axes: list[int]) -> bool:
    """Return whether scales along `axes` are the array's own, or fewer than elements, or in 1-d."""
    given = len(axes) == len(varying_axes(x.scale))
    return given or x.ndim == 1 or math.prod(x.shape[a] for a in axes) < math.prod(x.shape)


def apply_function(
    ctx: RuleContext, x: Operand, indices: Any, params: dict[str, Any]
) -> Operand | None:
    """Interpret `x.at[i].apply(f)` as a choice: `where(i names the element, f(x), x)`.

    As in JAX, `f` is applied to an element once for each occurrence of its index. The result is
    None for an ordinary scatter, which replaces elements with the updates: its jaxpr returns its
    second operand.
    """
    jaxpr = params["update_jaxpr"]
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if ctx.primitive is not lax.scatter_p or jaxpr is None or jaxpr.outvars[0] is jaxpr.invars[1]:
        return None
    closed = _compat.close_jaxpr(jaxpr, params["update_consts"])
    aval, updates = ctx.in_avals[0], ctx.in_avals[2]

    def function(value: Any) -> Any:
        # JAX traces `f` on one element, with a second operand that it ignores, the update.
        return jex_core.jaxpr_as_fun(closed)(value, value)[0]

    for _ in aval.shape:
        function = jax.vmap(function)

    def program(x: Any, indices: Any) -> Any:
        marks = jnp.ones(updates.shape, np.int32)
        # How often the indices name each element: twice in `x.at[[0, 0]].apply(f)`.
        count = scatter(lax.scatter_add_p, jnp.zeros(aval.shape, np.int32), indices, marks, params)

        def step(i: Any, x: Any) -> Any:
            return jnp.where(i < count, function(x), x)

        once = params["unique_indices"] or math.prod(ctx.in_avals[1].shape[:-1]) == 1
        return step(0, x) if once else lax.fori_loop(0, jnp.max(count, initial=0), step, x)

    traced = jax.make_jaxpr(program)(jax.ShapeDtypeStruct(aval.shape, aval.dtype), indices)
    (out,) = ctx.scale_jaxpr(traced, [x, Plain.of(indices)])
    return promote(out, ctx.table, full=True)
