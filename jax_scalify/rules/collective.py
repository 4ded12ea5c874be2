"""Collectives: each device has a scale of its own, so the data is brought to the largest first.

Only scales are compared; no statistic of the data is taken.
"""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.interpreter.multiplying import multiply
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule
from jax_scalify.interpreter.value import filled
from jax_scalify.rules.shared.along_axes import uniform_over, varying_axes
from jax_scalify.rules.shared.growth import Terms, finish, growth
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import Scale


def _axis_names(params: dict[str, Any]) -> tuple[Any, ...]:
    """The named axes; `vmap` with an axis name leaves positional ones, which are integers."""
    axes = params["axes"] if "axes" in params else params["axis_name"]
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(a for a in axes if not isinstance(a, int))


def _is_shared(ctx: RuleContext, scale: Scale, data: Any, params: dict[str, Any]) -> bool:
    """Tell whether the types say that all devices that take part have the same scale.

    They say it of the axes of a checked `shard_map`, along which the data varies.
    """
    names = set(_axis_names(params))
    if scale.is_static or not names:
        return True
    checked = names <= _compat.varying_axes(data)
    return checked and not names & ctx.table.varying_axes(scale)


def _largest(ctx: RuleContext, scale: Scale, data: Any, params: dict[str, Any]) -> Scale:
    """The largest scale among the devices that take part."""
    if _is_shared(ctx, scale, data, params):
        return scale
    names = _axis_names(params)
    groups = params.get("axis_index_groups")
    return ctx.table.atom(lax.pmax(scale.array, names, axis_index_groups=groups))


def _collected(ctx: RuleContext, scale: Scale, data: Any, params: dict[str, Any]) -> Scale:
    """What a collective makes of scales, which may differ where the types say that data does."""
    varying = _compat.varying_axes(data) & set(_axis_names(params))
    return ctx.table.atom(ctx.bind(_compat.as_varying(scale.array, varying), **params))


def _at_one_scale(ctx: RuleContext, x: Operand, params: dict[str, Any]) -> tuple[Any, Scale]:
    """Bring an array's data to the scale that all devices share, one for what is mixed."""
    x = x.as_pair(filled(x.data, ctx.in_avals[0]), x.scale)
    x = uniform_over(x, _mixed_axes(ctx, params))
    scale = _largest(ctx, x.scale, x.data, params)
    return multiply(x.data, x.scale / scale), scale


def _mixed_axes(ctx: RuleContext, params: dict[str, Any]) -> Any:
    """The array's axes along which a collective moves elements; None for all."""
    name, tiled = ctx.primitive.name, params.get("tiled", False)
    positional = any(isinstance(a, int) for a in params.get("axes", ()))
    if positional or (name == "all_to_all" and not tiled):
        return None
    if name == "all_to_all":
        return params["split_axis"], params["concat_axis"]
    if name == "reduce_scatter":
        return (params["scatter_dimension"],)
    return ()


def _moved(scale: Scale, params: dict[str, Any]) -> Scale:
    """The scale of a result that has an axis more, one for each device, or an axis less."""
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
def gathering_rule(ctx: RuleContext, x: Operand, **params: Any) -> ScaledArray:
    """`scale` = the largest of all devices, or, along the axis that is gathered, theirs."""
    if params.get("tiled") and params.get("all_gather_dimension") in varying_axes(x.scale):
        data = filled(x.data, ctx.in_avals[0])
        return ScaledArray(ctx.bind(data, **params), _collected(ctx, x.scale, data, params))
    data, scale = _at_one_scale(ctx, x, params)
    out = ctx.bind(dtypes.cast(data, ctx.out_dtype), **params)
    return ScaledArray(out, _moved(scale, params))


@register_scale_rule(
    *("psum", "psum_invariant", "reduce_scatter"), elements="new", nonnegative="keeps", degree=1
)
def psum_rule(ctx: RuleContext, x: Operand, **params: Any) -> ScaledArray:
    """`scale` = the largest of all n devices `* pow2(n**p)`; p as of `reduce_sum`."""
    data, scale = _at_one_scale(ctx, x, params)
    total = ctx.bind(dtypes.cast(data, dtypes.compute_dtype(x.dtype)), **params)
    positional = [a for a in params.get("axes", ()) if isinstance(a, int)]
    groups = params.get("axis_index_groups")
    names = _axis_names(params)
    count = lax.psum(1, names, axis_index_groups=groups) if names else 1
    count *= math.prod(ctx.in_avals[0].shape[a] for a in positional)
    factor = growth(ctx, count, Terms.of(x))
    return finish(ctx, total, _moved(scale, params), factor)


@register_scale_rule("ppermute", elements="taken")
def ppermute_rule(ctx: RuleContext, x: Operand, **params: Any) -> ScaledArray:
    """The scale travels with the data, where it differs; where nothing arrives both are 0."""
    data, scale = filled(x.data, ctx.in_avals[0]), x.scale
    if not _is_shared(ctx, scale, data, params):
        scale = _collected(ctx, scale, data, params)
    return ScaledArray(ctx.bind(data, **params), scale)


@register_scale_rule("ragged_all_to_all", elements="new", nonnegative="keeps")
def ragged_all_to_all_rule(
    ctx: RuleContext, x: Operand, out: Operand, *sizes: Any, **params: Any
) -> ScaledArray:
    """`scale` = the largest of operand and output buffer, of all devices."""
    x, out = uniform_over(x), uniform_over(out)
    scale = _largest(ctx, algebra.join(x.scale, out.scale), x.data, params)
    data = [
        filled(multiply(a.data, a.scale / scale, ctx.out_dtype), aval)
        for a, aval in zip((x, out), ctx.in_avals, strict=False)
    ]
    return ScaledArray(ctx.bind(*data, *sizes, **params), scale)
