"""Functions with a rule of their own: `jsa.custom_scale`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import dtypes
from jax_scalify.algebra import Scale
from jax_scalify.array import ScaledArray, align_scale, is_scaled, may_be_powers_of_two
from jax_scalify.custom_scale import AppliedRule, custom_scale_p
from jax_scalify.deferred import Deferred, is_given_deferred, with_scale
from jax_scalify.multiplying import multiply, within_range
from jax_scalify.registry import RuleContext, register_scale_rule
from jax_scalify.rules.common import promote
from jax_scalify.rules.subtrace import takes_values
from jax_scalify.scale_table import ScaleTable
from jax_scalify.values import Facts, Value, nonnegative_results

FlatRule = Callable[..., list[Any]]


@register_scale_rule(custom_scale_p, family="calls", elements="new")
@takes_values
def custom_scale_rule(
    ctx: RuleContext, *args: Value, jaxpr: Any, applied: AppliedRule
) -> list[Value]:
    """The rule that the function was given; without one, its body in place."""
    values = args[applied.num_consts :]
    if applied.rule is None or not any(_has_scale(v) for v in values):
        return ctx.scale_jaxpr(jaxpr, list(args))
    waits = is_given_deferred(applied.rule) and not applied.batched
    operands = []
    for value in values:
        x = promote(value, ctx.table, full=True) if value.is_scalable else value.plain()
        if is_scaled(x) and not (waits and isinstance(x, Deferred)):
            x = ScaledArray(jnp.asarray(x.data), x.scale)
        operands.append(x)
    rule = _flat_rule(applied.rule, applied)
    for batched, size, name in applied.batched:
        rule = _batched_rule(rule, batched, size, name, ctx.table.dtype)
    results = rule(*operands)
    _check_types(applied, results, ctx.out_avals)
    nonneg = nonnegative_results(jaxpr.jaxpr, [v.nonneg for v in args])
    return [
        Value.of(_with_symbolic_scale(x, ctx.table), facts=Facts(flag, computed=True))
        for x, flag in zip(results, nonneg, strict=True)
    ]


def _has_scale(value: Value) -> bool:
    return value.is_scaled or (value.is_scalable and value.constant is not None)


def _with_symbolic_scale(x: Any, table: ScaleTable) -> Any:
    if not is_scaled(x):
        return x
    if isinstance(x, Deferred):
        return _settled(x)
    data, scale = jnp.asarray(x.data), x.scale
    if type(scale) in (float, int):
        scale = Scale.of(scale)
    elif not isinstance(scale, Scale):
        scale = table.atom(align_scale(scale, data.ndim).astype(table.dtype))
    return _settled(ScaledArray(data, scale))


def _settled(x: ScaledArray) -> ScaledArray:
    scale, rest = x.scale.settled()
    return with_scale(x, scale, lambda data: multiply(data, rest, data.dtype))


def _flat_rule(function: Callable, applied: AppliedRule) -> FlatRule:
    """The rule on flat operands; its results are checked for their structure."""

    def rule(*operands: Any) -> list[Any]:
        out = function(*jax.tree.unflatten(applied.in_tree, operands))
        leaves, tree = jax.tree.flatten(out, is_leaf=is_scaled)
        if tree != applied.out_tree:
            raise TypeError(
                f"The scale rule of `{applied.name}` must return the structure of the function, "
                f"{applied.out_tree}, got {tree}."
            )
        return leaves

    return rule


def _check_types(applied: AppliedRule, results: Sequence[Any], avals: Sequence[Any]) -> None:
    for x, aval in zip(results, avals, strict=True):
        scaled = dtypes.is_scalable(aval.dtype)
        if scaled != is_scaled(x):
            got, wanted = type(x).__name__, "a ScaledArray" if scaled else "an array"
            raise TypeError(f"The scale rule of `{applied.name}` must return {wanted}, got {got}.")
        data = x.source if isinstance(x, Deferred) else x.data if scaled else x
        shape, dtype = np.shape(data), dtypes.leaf_dtype(data)
        if shape != aval.shape or dtype != aval.dtype:
            raise TypeError(
                f"The scale rule of `{applied.name}` must return {aval.dtype}{list(aval.shape)}, "
                f"got {dtype}{list(shape)}."
            )
        if not scaled:
            continue
        scale = np.shape(x.scale)
        # An array of a lower rank lies along the leading axes; a symbolic scale has all of them.
        ranks = (0, len(shape)) if isinstance(x.scale, Scale) else range(len(shape) + 1)
        if len(scale) not in ranks or any(s not in (1, n) for s, n in zip(scale, shape)):
            raise TypeError(
                f"The scale rule of `{applied.name}` must return a scale of shape () or one that "
                f"fits {list(shape)}, got {list(scale)}."
            )
        if not isinstance(x.scale, Scale) and not may_be_powers_of_two(x.scale):
            raise ValueError(
                f"The scale rule of `{applied.name}` must return a scale that is a power of two or "
                f"0, got {x.scale!r}. Round it down, and multiply the data by the rest."
            )


def _batched_rule(
    rule: FlatRule, batched: Sequence[bool], size: int, name: Any, dtype: Any
) -> FlatRule:
    """A rule under `vmap`: one example has a scale of its own if its operands have."""

    def example_scale(x: ScaledArray, has_axis: bool) -> tuple[Any, int | None]:
        """A scale as an operand of `vmap`, and its axis."""
        array = x.scale.array
        if not x.scale.ndim or not has_axis:
            return array, None
        shape = array.shape[1:] if any(n != 1 for n in array.shape[1:]) else ()
        return (
            (array.reshape((size, *shape)), 0)
            if array.shape[0] == size
            else (
                array.reshape(shape),
                None,
            )
        )

    def call(*operands: Any) -> list[Any]:
        data = [x.data if is_scaled(x) else x for x in operands]
        scales = [
            example_scale(x, has_axis) if is_scaled(x) and not x.scale.is_static else (None, None)
            for x, has_axis in zip(operands, batched, strict=True)
        ]
        statics: list[Any] = []

        def example(data: list[Any], scales: list[Any]) -> Any:
            table = ScaleTable(dtype)
            results = rule(
                *(
                    x
                    if not is_scaled(x)
                    else ScaledArray(d, x.scale if s is None else table.atom(s))
                    for x, d, s in zip(_at(operands, data), data, scales, strict=True)
                )
            )
            results = [_with_symbolic_scale(x, table) for x in results]
            results = [within_range(x) if is_scaled(x) else x for x in results]
            statics[:] = [x.scale if is_scaled(x) and x.scale.is_static else None for x in results]
            return [x.data if is_scaled(x) else x for x in results], [
                table.output(x.scale) if is_scaled(x) and not x.scale.is_static else None
                for x in results
            ]

        in_axes = [0 if b else None for b in batched], [axis for _, axis in scales]
        arrays = [s for s, _ in scales]
        own = any(axis is not None for axis in in_axes[1])

        def run(scale_axis: int | None) -> Any:
            mapped = jax.vmap(example, in_axes, (0, scale_axis), axis_size=size, axis_name=name)
            return mapped(data, arrays)

        try:
            out, out_scales = run(0 if own else None)
        except ValueError:  # the rule has looked at the data
            own = True
            out, out_scales = run(0)
        results = []
        for x, scale, static in zip(out, out_scales, statics, strict=True):
            if scale is not None and not own and scale.ndim:
                scale = scale[None]
            known = static if scale is None else scale
            results.append(x if known is None else ScaledArray(x, known))
        return results

    return call


def _at(operands: Sequence[Any], data: Sequence[Any]) -> list[Any]:
    """The operands, those that are plain replaced by their examples."""
    return [x if is_scaled(x) else d for x, d in zip(operands, data, strict=True)]
