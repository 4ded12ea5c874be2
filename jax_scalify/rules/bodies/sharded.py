"""The rule of `shard_map`. Its body is interpreted on each device's shard of the data and scales.

A scalar scale is replicated. A scale along axes is sharded as its data is. If a body computes a
scale from its shard, as a rescale does, devices have different scales. The data of such a result is
brought to the largest scale of all devices. All scales that vary along the same mesh axes share one
`pmax`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import align_scale, rescale_data
from jax_scalify.interpreter.registry import RuleContext, register_value_rule
from jax_scalify.interpreter.value import Value
from jax_scalify.rules.bodies.form import Form, pack, scales_of, unpack
from jax_scalify.scales.table import ScaleTable

_SMALLEST_RATIO = 2.0**-126


@register_value_rule("shard_map")
def shard_map_rule(ctx: RuleContext, *args: Value, jaxpr: Any, **params: Any) -> list[Value]:
    """Interpret the body on each device's shard; all devices agree on the scales of results."""
    out_specs = params["out_specs"]
    forms = [_as_sharded(Form.of(v), var.aval) for v, var in zip(args, jaxpr.invars, strict=True)]
    inner = [_part(f, var.aval) for f, var in zip(forms, jaxpr.invars, strict=True)]
    specs = _specs(forms, params["in_specs"])
    arrays = [
        _compat.resharded(a, params["mesh"], spec)
        for a, spec in zip(pack(forms, args, ctx.table), specs, strict=True)
    ]
    closed = _compat.close_jaxpr(jaxpr, ())
    names = tuple(n for n in params["mesh"].axis_names if n in params["newly_manual_axes"])
    found: list[Form] = []

    def body(*arrays: Any) -> tuple[Any, ...]:
        def flat(table: ScaleTable, *arrays: Any) -> list[Any]:
            outputs = ctx.scale_jaxpr(closed, unpack(inner, arrays, table), table)
            # A number that all elements equal on one device may differ between devices.
            found[:] = [Form.of(value).as_array() for value in outputs]
            return pack(found, outputs, table)

        results = _compat.inlined(ctx.table.trace(flat, arrays), arrays)
        specs = _specs(found, out_specs)
        # Without `check_vma`, types do not say along which mesh axes a scale varies: assume all.
        checked = names if not params["check_vma"] else None
        return tuple(_at_common_scales(found, results, specs, names, checked))

    sharded = functools.partial(
        jax.shard_map,
        mesh=params["mesh"],
        in_specs=tuple(specs),
        axis_names=set(names),
        check_vma=params["check_vma"],
    )

    # This finds the forms, which determine `out_specs`.
    jax.eval_shape(sharded(lambda *xs: body(*xs)[:0], out_specs=()), *arrays)
    results = sharded(body, out_specs=tuple(_specs(found, out_specs)))(*arrays)
    whole = [_part(f, aval) for f, aval in zip(found, ctx.out_avals, strict=True)]
    return unpack(whole, results, ctx.table)


def _part(form: Form, aval: Any) -> Form:
    """Return the form of a value's shard, or of the whole value, given the aval of either."""
    scale_shape = tuple(
        1 if n == 1 and m != 1 else size
        for n, m, size in zip(form.scale_shape, form.shape, aval.shape, strict=False)
    )
    return dataclasses.replace(
        form,
        shape=aval.shape,
        scale_shape=scale_shape,
        sharding=_compat.explicit_sharding(aval),
        varying=_compat.varying_axes(aval),
    )


def _as_sharded(form: Form, aval: Any) -> Form:
    """Return the form of an operand. Equal elements are an array if the body's type varies.

    Otherwise the body would mix a number, which does not vary along mesh axes, with arrays that do.
    """
    is_number = form.kind in ("constant", "uniform") and _compat.varying_axes(aval)
    return dataclasses.replace(form, kind="plain", constant=None) if is_number else form


def _specs(forms: Sequence[Form], specs: Sequence[Any]) -> list[Any]:
    """Return the spec of each array. A scale has its data's spec, except along axes of length 1."""
    out = []
    for form, spec in zip(forms, specs, strict=True):
        if form.kind != "constant":
            out.append(P() if form.kind == "uniform" else spec)
        if form.has_scale:
            axes = [*spec, *[None] * (len(form.shape) - len(spec))]
            own = [a if n == m else None for a, n, m in zip(axes, form.scale_shape, form.shape)]
            out.append(P(*own))
    return out


def _at_common_scales(
    forms: Sequence[Form],
    arrays: list[Any],
    specs: Sequence[Any],
    names: Sequence[Any],
    may_differ: Sequence[Any] | None,
) -> list[Any]:
    """Bring data to the largest scale of all devices, along mesh axes that do not shard the scale.

    `may_differ` names the mesh axes along which scales may differ. If it is None, the types of the
    scales name these axes.
    """
    axes, positions = {}, scales_of(forms)
    for at in positions:
        cut = jax.tree.leaves(tuple(specs[at]))  # an entry is None, a name, or a tuple of names
        differs = _compat.varying_axes(arrays[at]) if may_differ is None else may_differ
        axes[at] = tuple(n for n in names if n in differs and n not in cut)
    out = list(arrays)
    for group in dict.fromkeys(filter(None, axes.values())):
        members = [at for at, own in axes.items() if own == group]
        largest = lax.pmax(jnp.concatenate([arrays[at].reshape(-1) for at in members]), group)
        start = 0
        for at in members:
            data, scale = arrays[at - 1 : at + 1]
            common = largest[start : start + scale.size].reshape(scale.shape)
            start += scale.size
            out[at] = common
            if not positions[at].holds_data:  # values do not depend on the scale
                continue
            # A ratio of 0 would turn infinite data into nan.
            ratio = jnp.maximum(scale / jnp.where(common == 0, 1, common), _SMALLEST_RATIO)
            out[at - 1] = rescale_data(data, align_scale(ratio, data.ndim))
    return out
