"""Collectives. Devices may have different scales, so data is first brought to the largest scale.

Devices compare only their scales, and compute no statistic of the data.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule
from jax_scalify.rules.shared.along_axes import lies_along, uniform_over
from jax_scalify.rules.shared.growth import Terms, growth
from jax_scalify.scales.algebra import ONE, Scale, join
from jax_scalify.scales.multiplying import multiply


def _axis_names(params: dict[str, Any]) -> tuple[Any, ...]:
    """Return the named axes only. `vmap` replaces a name with a positional axis, an integer."""
    axes = params["axes"] if "axes" in params else params["axis_name"]
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(a for a in axes if not isinstance(a, int))


def _is_shared(ctx: RuleContext, scale: Scale, data: Any, params: dict[str, Any]) -> bool:
    """Return whether the types prove that all participating devices have the same scale.

    Only a `shard_map` with `check_vma=True` has such types: they name the mesh axes along which an
    array varies.
    """
    names = set(_axis_names(params))
    if scale.is_static or not names:
        return True
    checked = names <= _compat.varying_axes(data)
    return checked and not names & ctx.table.varying_axes(scale)


def _largest(ctx: RuleContext, scale: Scale, data: Any, params: dict[str, Any]) -> Scale:
    """Return the largest scale of all participating devices."""
    if _is_shared(ctx, scale, data, params):
        return scale
    names = _axis_names(params)
    groups = params.get("axis_index_groups")
    array = _compat.as_varying(scale.array, _compat.varying_axes(data) & set(names))
    return ctx.table.atom(lax.pmax(array, names, axis_index_groups=groups))


def _collected(ctx: RuleContext, scale: Scale, data: Any, params: dict[str, Any]) -> Scale:
    """Apply the collective to the scale, typed to vary along the mesh axes of the data."""
    # A checked `shard_map` refuses to collect an array whose type does not vary along the axes.
    varying = _compat.varying_axes(data) & set(_axis_names(params))
    return ctx.table.atom(ctx.bind(_compat.as_varying(scale.array, varying), **params))


def _at_one_scale(ctx: RuleContext, x: Operand, params: dict[str, Any]) -> tuple[Any, Scale]:
    """Return the data at the largest scale of all devices, and this scale.

    The scale is uniform over the axes along which the collective moves elements.
    """
    x = uniform_over(x, _mixed_axes(ctx, params))
    scale = _largest(ctx, x.scale, x.source, params)
    return ctx.array_of(x, scale), scale


def _mixed_axes(ctx: RuleContext, params: dict[str, Any]) -> Any:
    """Return the array axes along which a collective moves elements; None for all axes."""
    is_positional = any(isinstance(a, int) for a in params.get("axes", ()))
    if is_positional or (ctx.primitive.name == "all_to_all" and not params["tiled"]):
        return None
    return [params[n] for n in ("split_axis", "concat_axis", "scatter_dimension") if n in params]


def _moved(scale: Scale, params: dict[str, Any]) -> Scale:
    """Return the scale with the axis that an untiled collective adds or removes."""
    if params.get("tiled", True):
        return scale
    if "all_gather_dimension" in params:
        return scale.map(lambda s: lax.expand_dims(s, (params["all_gather_dimension"],)))
    if "scatter_dimension" in params:
        return scale.map(lambda s: lax.squeeze(s, (params["scatter_dimension"],)))
    return scale


@register_scale_rule(
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all"), elements="taken"
)
@register_scale_rule("pmax", "pmin", elements="new", nonnegative="keeps")
@register_scale_rule("pbroadcast", elements="same")
def gathering_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = max` over all devices; scales along a gathered axis are gathered too."""
    if params.get("tiled") and lies_along(x, params.get("all_gather_dimension", 0)):
        # For example, weights that are sharded along their rows, with a scale for each row.
        scale = _collected(ctx, x.scale, x.source, params)
        return x.moved(ctx.bind(x.source, **params), scale)
    data, scale = _at_one_scale(ctx, x, params)
    out, scale = ctx.bind(dtypes.cast(data, ctx.out_dtype), **params), _moved(scale, params)
    return ctx.result(out, scale)


@register_scale_rule(
    *("psum", "psum_invariant", "reduce_scatter"), elements="new", nonnegative="keeps", degree=1
)
def psum_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = max(devices' scales) * pow2(n**p)` for n devices; p as in `reduce_sum`.

    Arrays of 16 bits are communicated in 16 bits. float16 data is divided by `pow2(n**p)` before
    the collective, so that partial sums do not overflow. bfloat16 has the range of float32, so its
    values are added as they are. `ScalifyConfig(sum_dtype=...)` chooses float32 instead, or FP8
    for gradients.
    """
    data, scale = _at_one_scale(ctx, x, params)
    positional = [a for a in params.get("axes", ()) if isinstance(a, int)]
    groups = params.get("axis_index_groups")
    names = _axis_names(params)
    # JAX evaluates `psum` of a Python number while tracing.
    devices = lax.psum(1, names, axis_index_groups=groups) if names else 1
    count = devices * math.prod(ctx.in_avals[0].shape[a] for a in positional)
    factor = growth(ctx, count, Terms.of(x))
    sum_dtype, out = ctx.config.sum_dtype, ctx.out_dtype
    if sum_dtype == jnp.float8_e5m2 and not positional and _is_gradient(ctx, names):
        data = x.at_unit(scale)  # E5M2 needs data of unit size, not values
        total, scale = _summed_in_fp8(ctx, data, params, devices), _moved(scale, params)
        result = ctx.result(total, scale * factor, scale, saturates=False)
        is_part = ctx.primitive.name == "reduce_scatter"
        return result if is_part else _gathered(ctx, result, params, devices)
    widens = sum_dtype == jnp.float32 or positional or dtypes.is_fp8(out)
    travels = dtypes.compute_dtype(out) if widens else out
    if travels == jnp.float16:
        data = multiply(data, factor**-1)
        total = ctx.bind(dtypes.cast(data, travels), **params)
        return Operand(total, _moved(scale, params) * factor)
    total, scale = ctx.bind(dtypes.cast(data, travels), **params), _moved(scale, params)
    return ctx.result(total, scale * factor, ONE if ctx.holds_values else scale, saturates=False)


def _is_gradient(ctx: RuleContext, names: tuple[Any, ...]) -> bool:
    """Return whether `psum` adds gradients: arrays of rank 2 or more, outside a forward pass."""
    # With tensor parallelism, a forward pass adds activations. It is only recognised if it is
    # differentiated, so an evaluation must not set `sum_dtype` to E5M2.
    is_forward = _compat.is_forward_pass()
    is_real = jnp.issubdtype(ctx.out_dtype, jnp.floating)
    return bool(names) and is_real and ctx.in_avals[0].ndim > 1 and not is_forward


def _summed_in_fp8(ctx: RuleContext, data: Any, params: dict[str, Any], devices: int) -> Any:
    """Return each device's part of the sum. Data is communicated in E5M2 and added in float32.

    Each term is rounded to E5M2 once. A reduction in E5M2 would round the partial sums too: a sum
    of ones would stop at 8, because `8 + 1` rounds to 8. If the number of devices does not divide
    the axis, the axis is padded.
    """
    axis = _cut_axis(ctx, params, devices)
    size = -(-data.shape[axis] // devices)
    if size * devices != data.shape[axis]:
        padding = [(0, size * devices - n if a == axis else 0) for a, n in enumerate(data.shape)]
        data = jnp.pad(data, padding)
    # The cast saturates, but an infinity must stay infinite.
    infinite = lax.convert_element_type(data, jnp.float8_e5m2)
    parts = lax.select(jnp.isinf(data), infinite, dtypes.cast(data, jnp.float8_e5m2))
    # Shape (..., devices, size, ...): a part for each device.
    parts = parts.reshape(*data.shape[:axis], devices, size, *data.shape[axis + 1 :])
    groups = params.get("axis_index_groups")
    parts = lax.all_to_all(parts, _axis_names(params), axis, 0, axis_index_groups=groups)
    # Shape (devices, ..., size, ...): the terms of one part, from all devices.
    total = jnp.sum(parts.astype(dtypes.compute_dtype(ctx.out_dtype)), 0)
    return total if params.get("tiled", True) else jnp.squeeze(total, axis)


def _cut_axis(ctx: RuleContext, params: dict[str, Any], devices: int) -> int:
    """Return the axis along which the sum is divided among devices."""
    shape = ctx.in_avals[0].shape
    axis = next((a for a, n in enumerate(shape) if n % devices == 0), len(shape) - 1)
    return params.get("scatter_dimension", axis)


def _gathered(ctx: RuleContext, part: Operand, params: dict[str, Any], devices: int) -> Operand:
    """Gather the parts of a sum from all devices, in the dtype of the result."""
    aval, axis = ctx.out_avals[0], _cut_axis(ctx, params, devices)
    whole = lax.all_gather(
        part.source,
        _axis_names(params),
        axis_index_groups=params.get("axis_index_groups"),
        axis=axis,
        tiled=True,
        to="invarying" if ctx.primitive.name == "psum_invariant" else "varying",
    )
    # `_summed_in_fp8` may have padded the axis.
    return part.moved(lax.slice_in_dim(whole, 0, aval.shape[axis], axis=axis), part.scale)


@register_scale_rule("ppermute", elements="taken")
def ppermute_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """The scale moves with the data, unless all devices share it; missing data and scales are 0."""
    data, scale = ctx.array_of(x, x.scale), x.scale
    if not _is_shared(ctx, scale, data, params):
        scale = _collected(ctx, scale, data, params)
    return ctx.result(ctx.bind(data, **params), scale)


@register_scale_rule("ragged_all_to_all", elements="new", nonnegative="keeps")
def ragged_all_to_all_rule(
    ctx: RuleContext, x: Operand, out: Operand, *sizes: Any, **params: Any
) -> Operand:
    """`scale = max` of the scales of operand and output buffer on all devices."""
    x, out = uniform_over(x), uniform_over(out)
    scale = _largest(ctx, join(x.scale, out.scale), x.source, params)
    data = [ctx.array_of(a, scale, ctx.out_dtype) for a in (x, out)]
    return ctx.result(ctx.bind(*data, *sizes, **params), scale)
