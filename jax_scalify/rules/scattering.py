"""Scatters of arrays with scales along axes, and scatters that apply a function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes, jaxprs
from jax_scalify.base.filling import filled
from jax_scalify.interpreter.constants import promote
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.interpreter.value import Plain
from jax_scalify.rules.shared.along_axes import (
    Windows,
    own_scales,
    scale_array,
    scale_of,
    uniform_over,
    varying_axes,
)
from jax_scalify.rules.shared.joining import align
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import Scale
from jax_scalify.scales.multiplying import multiply

_SCATTERS = {
    lax.scatter_p: lax.scatter,
    lax.scatter_add_p: lax.scatter_add,
    lax.scatter_sub_p: lax.scatter_sub,
    lax.scatter_mul_p: lax.scatter_mul,
    lax.scatter_min_p: lax.scatter_min,
    lax.scatter_max_p: lax.scatter_max,
}


def scatter(ctx: RuleContext, x: Any, indices: Any, updates: Any, params: dict[str, Any]) -> Any:
    """Scatter data of any dtype. The equation itself, with its `update_jaxpr`, takes one dtype."""
    return _SCATTERS[ctx.primitive](
        x,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


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
    shape, rank = x.shape, updates.ndim
    dims = params["dimension_numbers"]
    windows = Windows.scattered(dims, x.ndim, ctx.in_avals[2].shape)
    partial = windows.partial_axes(ctx.in_avals[0].shape)
    updates, axes = _with_few_scales(x, updates, windows, partial)
    own = own_scales(x, updates)
    replaces = False
    if not partial & set(axes):
        scale = algebra.join(own[0], own[1].map(windows.on_operand)) * factor
        there = scale.map(lambda s: windows.on_windows(s, rank))
    else:
        inner, columns = windows.along(axes, indices)
        old = scale_array(ctx.table, own[0], [n if a in axes else 1 for a, n in enumerate(shape)])
        new = scale_array(ctx.table, own[1], inner.shape_along(axes, updates.shape))
        replaces = ctx.primitive is lax.scatter_p and partial <= set(axes)
        kept = old
        if replaces:
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
    return scatter(ctx, old, indices, new, params), scale


def _with_few_scales(
    x: Operand,
    updates: Operand,
    windows: Windows,
    partial: set[int],
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
    whole = [d for d, a in zip(windows.dims, windows.axes, strict=True) if a not in partial]
    updates = uniform_over(updates, [d for d in range(updates.ndim) if d not in whole])
    axes = _axes_of_result(x, updates, windows, partial)
    if _is_worth_it(x, axes):
        return updates, axes
    return uniform_over(updates), varying_axes(x.scale)


def _axes_of_result(x: Operand, updates: Operand, windows: Windows, partial: set[int]) -> list[int]:
    """Return the array axes along which the array's scale or the updates' scales differ."""
    axes = set(varying_axes(x.scale))
    batch = {b: a for a, b in windows.batch}
    inside = dict(zip(windows.dims, windows.axes, strict=True))
    apart = [dim for dim in range(updates.ndim) if dim not in inside]
    for dim in varying_axes(updates.scale):
        if dim in inside:
            axes.add(inside[dim])
        elif apart.index(dim) in batch:
            axes.add(batch[apart.index(dim)])
        else:
            axes |= partial - set(batch.values())
    return sorted(axes)


def _is_worth_it(x: Operand, axes: list[int]) -> bool:
    """Return whether the result may have scales along `axes`.

    It may if they are the axes of the array's own scale, if the array is 1-d, or if there are fewer
    scales than elements.
    """
    given = len(axes) == len(varying_axes(x.scale))
    return given or x.ndim == 1 or math.prod(x.shape[a] for a in axes) < math.prod(x.shape)


def applies_function(params: dict[str, Any]) -> bool:
    """Return whether a scatter is `x.at[i].apply(f)`, which replaces elements `v` with `f(v)`.

    An ordinary scatter replaces them with the updates: its jaxpr returns its second operand.
    """
    jaxpr = params["update_jaxpr"]
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return jaxpr is not None and jaxpr.outvars[0] is not jaxpr.invars[1]


def apply_function(
    ctx: RuleContext, x: Operand, indices: Any, params: dict[str, Any]
) -> ScaledArray:
    """Evaluate `x.at[i].apply(f)` on plain values, in at least float32.

    As in JAX, `f` is applied to an element once for each occurrence of its index.
    `scale = max(x.scale, f(x).scale)`, where the rules give the scale of `f(x)`.
    """
    jaxpr, consts = params["update_jaxpr"], params["update_consts"]
    closed = _compat.close_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), consts)
    scale = algebra.join(x.scale, _scale_of_function(ctx, closed, x))
    aval = ctx.in_avals[0]
    compute = dtypes.compute_dtype(x.dtype)
    plain = filled(ctx.dequantise(x, compute), aval)
    dims = params["dimension_numbers"]
    known = {k: params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
    size = ctx.in_avals[2].shape

    def applied(operand: Any, function: Any) -> Any:
        return lax.scatter_apply(operand, indices, function, dims, update_shape=size, **known)

    try:
        out = applied(plain, functools.partial(_evaluate_wide, closed))
    except TypeError:  # `f` holds a jaxpr that only takes the dtype of `x`
        function = jex_core.jaxpr_as_fun(closed)
        out = applied(dtypes.cast(plain, x.dtype), lambda v: function(v, v)[0])
    marks = jnp.zeros(aval.shape, bool)
    touched = lax.scatter(marks, indices, jnp.ones(size, bool), dims, **known)
    if ctx.holds_values:
        return ctx.of_value(lax.select(touched, filled(out, aval), plain), scale)
    new = multiply(out, scale**-1, ctx.out_dtype)
    old = filled(align(x, scale, ctx.out_dtype), aval)
    return ScaledArray(lax.select(touched, filled(new, aval), old), scale)


def _scale_of_function(ctx: RuleContext, closed: Any, x: Operand) -> Scale:
    """Return the scale that the rules give `f(x)`: interpret `f` on one element of each scale."""
    if 0 in x.shape:
        return x.scale
    element = filled(x.data, ctx.in_avals[0])
    shape = x.scale.shape or (1,) * x.ndim
    element = lax.reshape(lax.slice(element, (0,) * x.ndim, shape), x.scale.shape)
    function = jex_core.jaxpr_as_fun(closed)
    for _ in x.scale.shape:
        function = jax.vmap(function)
    aval = jax.ShapeDtypeStruct(element.shape, element.dtype)
    mapped = jax.make_jaxpr(function)(aval, aval)
    inputs = [Operand(element, x.scale), Plain.of(jnp.zeros_like(element))]
    (value,) = ctx.scale_jaxpr(mapped, inputs)
    return promote(value, ctx.table, full=True).scale


def _evaluate_wide(closed: Any, value: Any) -> Any:
    """Evaluate an update jaxpr `(element, ignored) -> element` in the dtype of `value`.

    Raises:
        TypeError: if the jaxpr holds another jaxpr that is not a call, a branch or a loop's body.
    """
    narrow, wide = closed.jaxpr.invars[0].aval.dtype, value.dtype

    def widened(x: Any) -> Any:
        return lax.convert_element_type(x, wide) if x.dtype == narrow else x

    def literal(atom: Any) -> Any:
        return widened(np.asarray(atom.val, atom.aval.dtype))

    def constant(_: Any, value: Any) -> Any:
        return widened(jnp.asarray(value))

    def function(closed: Any) -> Callable[..., list[Any]]:
        return lambda *args: jaxprs.evaluate(closed, args, equation, literal, constant)

    def equation(eqn: Any, args: list[Any]) -> list[Any]:
        return list(map(widened, results(eqn, args)))

    def results(eqn: Any, args: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        call = jaxprs.applied(eqn)
        if call is not None:
            return function(call)(*args)
        if name == "cond":
            return lax.switch(args[0], [function(b) for b in params["branches"]], *args[1:])
        if name == "while":
            cond_consts, body_consts, start = jaxprs.while_operands(params, args)
            proceed, body = function(params["cond_jaxpr"]), function(params["body_jaxpr"])
            return lax.while_loop(
                lambda carry: proceed(*cond_consts, *carry)[0],
                lambda carry: body(*body_consts, *carry),
                start,
            )
        if name == "scan":
            consts, start, xs = jaxprs.scan_operands(params, args)
            step, count = function(params["jaxpr"]), len(start)

            def body(carry: Any, xs: Any) -> Any:
                out = step(*consts, *carry, *xs)
                return out[:count], out[count:]

            carry, ys = lax.scan(body, start, xs, params["length"], params["reverse"])
            return [*carry, *ys]
        if jaxprs.sub_jaxprs(params):
            raise TypeError(f"`{name}` holds a function for arrays of its own dtype.")
        if params.get("new_dtype") == narrow:
            params = {**params, "new_dtype": wide}
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
        return out if eqn.primitive.multiple_results else [out]

    return function(closed)(value, value)[0]
