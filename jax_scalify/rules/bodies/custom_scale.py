"""Functions with their own scale rules: `jsa.custom_scale`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import (
    ScaledArray,
    is_scaled,
    may_be_powers_of_two,
)
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import LazyJaxpr, closed_jaxpr, depends
from jax_scalify.interpreter.constants import promote
from jax_scalify.interpreter.facts import nonnegative_results
from jax_scalify.interpreter.operand import Facts, Operand
from jax_scalify.interpreter.registry import RuleContext, check_scale_shape, register_value_rule
from jax_scalify.interpreter.rescaling import as_operand, within_range
from jax_scalify.interpreter.value import Value, value_of
from jax_scalify.primitives.custom_scale import AppliedRule, custom_scale_p
from jax_scalify.scales.algebra import Scale
from jax_scalify.scales.table import ScaleTable

FlatRule = Callable[..., list[Any]]


@register_value_rule(custom_scale_p, family="calls")
def custom_scale_rule(
    ctx: RuleContext, *args: Value, jaxpr: Any, applied: AppliedRule
) -> list[Value]:
    """Apply the function's own rule; without a rule, interpret the body in place."""
    values = args[applied.num_consts :]
    if applied.rule is None or not any(_has_scale(v) for v in values):
        return ctx.scale_jaxpr(closed_jaxpr(jaxpr), list(args))
    operands = []
    for value in values:
        if value.is_scalable and (value.is_scaled or not applied.keeps_plain):
            x = promote(value, ctx.table, full=True)
            known = isinstance(x.source, jax.Array)  # rules get JAX arrays, also of constants
            operands.append(x if known else x.moved(jnp.asarray(x.source), x.scale))
        else:
            operands.append(value.whole())
    rule = _flat_rule(applied.rule, applied)
    for batched, size, name in applied.batched:
        rule = _Batched(rule, tuple(batched), size, name, ctx.table.dtype)
    results = rule(*operands)
    _check_types(applied, results, ctx.out_avals)
    nonneg = _nonnegative(jaxpr, applied, [v.facts.nonneg for v in args])
    return [
        value_of(_symbolic(x, ctx.table), facts=Facts(flag, computed=True))
        for x, flag in zip(results, nonneg, strict=True)
    ]


def _nonnegative(jaxpr: Any, applied: AppliedRule, given: list[bool]) -> list[bool]:
    """Return for each result whether it is non-negative.

    A gradient is linear in the cotangents, so its sign is unknown if their signs are unknown. A
    lazy jaxpr is not traced then, nor if it has no cotangents.
    """
    cotangents = given[len(given) - applied.num_cotangents :]
    if isinstance(jaxpr, LazyJaxpr) and not any(cotangents):
        return [False] * len(jaxpr.out_avals)
    return nonnegative_results(closed_jaxpr(jaxpr).jaxpr, given)


def _has_scale(value: Value) -> bool:
    return value.is_scaled or (value.is_scalable and value.constant is not None)


def _symbolic(x: Any, table: ScaleTable) -> Any:
    if not is_scaled(x):
        return x
    if not isinstance(x, Operand):  # it may hold a NumPy array
        x = ScaledArray(jnp.asarray(x.data), x.scale)
    return as_operand(x, table)


def _flat_rule(function: Callable, applied: AppliedRule) -> FlatRule:
    """Return the rule as a function of flat operands. It checks the structure of the results."""

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
        scaled = is_scaled(x) if scaled and applied.keeps_plain else scaled
        if scaled != is_scaled(x):
            got, wanted = type(x).__name__, "a ScaledArray" if scaled else "an array"
            raise TypeError(f"The scale rule of `{applied.name}` must return {wanted}, got {got}.")
        data = x.source if isinstance(x, Operand) else x.data if scaled else x
        shape, dtype = np.shape(data), dtypes.leaf_dtype(data)
        if shape != aval.shape or dtype != aval.dtype:
            raise TypeError(
                f"The scale rule of `{applied.name}` must return {aval.dtype}{list(aval.shape)}, "
                f"got {dtype}{list(shape)}."
            )
        if not scaled:
            continue
        check_scale_shape(f"`{applied.name}`", x.scale, shape)
        if not isinstance(x.scale, Scale) and not may_be_powers_of_two(x.scale):
            raise ValueError(
                f"The scale rule of `{applied.name}` must return a scale that is a power of two or "
                f"0, got {x.scale!r}. Round it down, and multiply the data by the rest."
            )


@dataclasses.dataclass(frozen=True)
class _Batched:
    """A rule under `vmap`.

    Examples have different scales if the operands' scales differ between examples, or if the rule
    computes a scale from data. Otherwise all examples share one scale.

    Attributes:
        rule: the rule for one example.
        batched: for each operand, whether its first axis is the axis of examples.
        size: the number of examples.
        name: the name of the axis.
        dtype: the dtype of scales.
    """

    rule: FlatRule
    batched: tuple[bool, ...]
    size: int
    name: Any
    dtype: Any

    def __call__(self, *operands: Any) -> list[Any]:
        data = [x.data if is_scaled(x) else x for x in operands]
        pairs = [self._scale_and_axis(x, b) for x, b in zip(operands, self.batched, strict=True)]
        scales, axes = [s for s, _ in pairs], [axis for _, axis in pairs]
        statics: list[Operand | None] = []
        mapped = jax.vmap(
            functools.partial(self._example, operands, statics),
            ([0 if b else None for b in self.batched], axes),
            axis_size=self.size,
            axis_name=self.name,
        )
        closed, types = jax.make_jaxpr(mapped, return_shape=True)(data, scales)
        given = jax.tree.leaves((data, scales))
        count = len(jax.tree.leaves(data))
        leaves = _compat.inlined(closed, given)
        out, out_scales = jax.tree.unflatten(jax.tree.structure(types), leaves)
        # A scale that does not depend on data is the same for all examples.
        differs = depends(closed, [i < count for i in range(len(given))])[len(out) :]
        if any(axis is not None for axis in axes):
            differs = [True] * len(differs)
        own = iter(differs)
        return [
            self._result(x, scale, static, scale is not None and next(own))
            for x, scale, static in zip(out, out_scales, statics, strict=True)
        ]

    def _result(self, x: Any, scale: Any, static: Any, own: bool) -> Any:
        """Return a result with the scales of all examples (`own`), or with their shared scale."""
        if scale is None:
            return x if static is None else Operand(x, static.scale, home=static.home)
        if not own:
            scale = scale[:1] if scale.ndim > 1 else scale[0]
        return ScaledArray(x, scale)

    def _scale_and_axis(self, x: Any, has_axis: bool) -> tuple[Any, int | None]:
        """Return the dynamic scale of an operand as an argument of `vmap`, and its `in_axes`."""
        if not is_scaled(x) or x.scale.is_static:
            return None, None
        array = x.scale.array
        if not array.ndim or not has_axis:
            return array, None
        shape = array.shape[1:] if any(n != 1 for n in array.shape[1:]) else ()
        if array.shape[0] != self.size:
            return array.reshape(shape), None
        return array.reshape((self.size, *shape)), 0

    def _example(
        self, operands: Sequence[Any], statics: list[Any], data: list[Any], scales: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return data and dynamic scales of an example's results.

        `statics` gets the results with static scales.
        """
        table = ScaleTable(self.dtype)
        arguments = [
            (Operand(d, x.scale, home=x.home) if s is None else Operand(d, table.atom(s)))
            if is_scaled(x)
            else d
            for x, d, s in zip(operands, data, scales, strict=True)
        ]
        results = [_symbolic(x, table) for x in self.rule(*arguments)]
        parts = [_parts(x, table) for x in results]
        statics[:] = [static for _, _, static in parts]
        return [data for data, _, _ in parts], [scale for _, scale, _ in parts]


def _parts(x: Any, table: ScaleTable) -> tuple[Any, Any, Any]:
    """Return the data of `x`, the array of its scale if dynamic, and `x` itself if static."""
    if not is_scaled(x):
        return x, None, None
    x = within_range(x)
    return (x.data, None, x) if x.scale.is_static else (x.data, table.output(x.scale), None)
