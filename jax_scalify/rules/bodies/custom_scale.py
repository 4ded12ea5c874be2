"""Functions with their own scale rules: `jsa.custom_scale`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled, may_be_powers_of_two
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import LazyJaxpr, closed_jaxpr, depends
from jax_scalify.interpreter.constants import promote
from jax_scalify.interpreter.facts import nonnegative_results
from jax_scalify.interpreter.operand import Facts, Operand
from jax_scalify.interpreter.registry import RuleContext, check_scale_shape, register_value_rule
from jax_scalify.interpreter.rescaling import as_operand, within_range
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.primitives.custom_scale import AppliedRule, custom_scale_p
from jax_scalify.scales.algebra import Scale
from jax_scalify.scales.table import ScaleTable


@register_value_rule(custom_scale_p, family="calls")
def custom_scale_rule(
    ctx: RuleContext, *args: Value, jaxpr: Any, applied: AppliedRule
) -> list[Value]:
    """Apply the function's own rule; without a rule, interpret the body in place."""
    values = list(args[applied.num_consts :])
    # Constants are scaled from the start, so a constant operand suffices.
    has_scale = any(v.is_scaled or (v.is_scalable and v.constant is not None) for v in values)
    if applied.rule is None or not has_scale:
        return ctx.scale_jaxpr(closed_jaxpr(jaxpr), list(args))
    operands = []
    for value in values:
        if value.is_scalable and (value.is_scaled or not applied.keeps_plain):
            x = promote(value, ctx.table, full=True)
            known = isinstance(x.source, jax.Array)  # rules get JAX arrays, also of constants
            operands.append(x if known else x.moved(jnp.asarray(x.source), x.scale))
        else:
            operands.append(value.whole())
    rule = functools.partial(_apply, applied)
    # The innermost `vmap` comes first: the rule itself is for one of its examples.
    for mapping in applied.batched:
        rule = functools.partial(_map, rule, mapping, ctx.table.dtype)
    results = rule(*operands)
    for x, aval in zip(results, ctx.out_avals, strict=True):
        _check_result(applied, x, aval)
    nonneg = _nonnegative(jaxpr, applied, [v.facts.nonneg for v in args])
    values: list[Value] = []
    for x, flag in zip(results, nonneg, strict=True):
        x, facts = _symbolic(x, ctx.table), Facts(flag, computed=True)
        known = is_scaled(x)  # a rule may return its operand, with other facts
        values.append(
            x.known(facts=facts, number=None, depth=0) if known else Plain.of(x, facts=facts)
        )
    return values


def _nonnegative(jaxpr: Any, applied: AppliedRule, given: list[bool]) -> list[bool]:
    """Return for each result whether it is non-negative.

    A gradient is linear in the cotangents, so its sign is unknown if their signs are unknown. A
    lazy jaxpr is traced only if a cotangent is known to be non-negative.
    """
    cotangents = given[len(given) - applied.num_cotangents :]
    if isinstance(jaxpr, LazyJaxpr) and not any(cotangents):
        return [False] * len(jaxpr.out_avals)
    return nonnegative_results(closed_jaxpr(jaxpr).jaxpr, given)


def _symbolic(x: Any, table: ScaleTable) -> Any:
    """Return a rule's result, as an operand if it is scaled."""
    if not is_scaled(x):
        return x
    if not isinstance(x, Operand):  # it may hold a NumPy array
        x = ScaledArray(jnp.asarray(x.data), x.scale)
    return as_operand(x, table)


def _apply(applied: AppliedRule, *operands: Any) -> list[Any]:
    """Apply the rule to flat operands. Check the structure of its results."""
    assert applied.rule is not None
    out = applied.rule(*jax.tree.unflatten(applied.in_tree, operands))
    leaves, tree = jax.tree.flatten(out, is_leaf=is_scaled)
    if tree != applied.out_tree:
        raise TypeError(
            f"The scale rule of `{applied.name}` must return the structure of the function, "
            f"{applied.out_tree}, got {tree}."
        )
    return leaves


def _check_result(applied: AppliedRule, x: Any, aval: Any) -> None:
    scaled, must = is_scaled(x), f"The scale rule of `{applied.name}` must return"
    wanted = dtypes.is_scalable(aval.dtype) and (scaled or not applied.keeps_plain)
    if scaled != wanted:
        kind = "a ScaledArray" if wanted else "an array"
        raise TypeError(f"{must} {kind}, got {type(x).__name__}.")
    data = x.source if isinstance(x, Operand) else x.data if scaled else x
    shape, dtype = np.shape(data), dtypes.leaf_dtype(data)
    if shape != aval.shape or dtype != aval.dtype:
        raise TypeError(f"{must} {aval.dtype}{list(aval.shape)}, got {dtype}{list(shape)}.")
    if not scaled:
        return
    check_scale_shape(f"`{applied.name}`", x.scale, shape)
    if not isinstance(x.scale, Scale) and not may_be_powers_of_two(x.scale):
        raise ValueError(
            f"{must} a scale that is a power of two or 0, got {x.scale!r}. Round it down, and "
            "multiply the data by the rest."
        )


def _map(
    rule: Callable[..., list[Any]], mapping: tuple[Any, ...], dtype: Any, *operands: Any
) -> list[Any]:
    """Apply the rule of one example to all examples of a `vmap`.

    Examples have different scales if the operands' scales differ between examples, or if the rule
    computes a scale from data. Otherwise all examples share one scale.

    `mapping` is an entry of `AppliedRule.batched`, and `dtype` is the dtype of scales.
    """
    batched, size, name = mapping
    data = [x.data if is_scaled(x) else x for x in operands]
    pairs = [_scale_and_axis(x, b, size) for x, b in zip(operands, batched, strict=True)]
    scales, axes = [s for s, _ in pairs], [axis for _, axis in pairs]
    statics: list[Operand | None] = []  # the results with static scales

    def of_example(data: list[Any], scales: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return data and dynamic scales of an example's results."""
        table = ScaleTable(dtype)
        arguments = [
            (Operand(d, x.scale, home=x.home) if s is None else Operand(d, table.atom(s)))
            if is_scaled(x)
            else d
            for x, d, s in zip(operands, data, scales, strict=True)
        ]
        results = [_symbolic(x, table) for x in rule(*arguments)]
        results = [within_range(x) if is_scaled(x) else x for x in results]
        statics[:] = [x if is_scaled(x) and x.scale.is_static else None for x in results]
        dynamic = [x.scale if is_scaled(x) and not x.scale.is_static else None for x in results]
        data = [x.data if is_scaled(x) else x for x in results]
        return data, [s if s is None else table.output(s) for s in dynamic]

    in_axes = ([0 if b else None for b in batched], axes)
    mapped = jax.vmap(of_example, in_axes, axis_size=size, axis_name=name)
    closed, types = jax.make_jaxpr(mapped, return_shape=True)(data, scales)
    given, count = jax.tree.leaves((data, scales)), len(jax.tree.leaves(data))
    leaves = _compat.inlined(closed, given)
    out, out_scales = jax.tree.unflatten(jax.tree.structure(types), leaves)
    # A scale that does not depend on data is the same for all examples.
    differs = iter(depends(closed, [i < count for i in range(len(given))])[len(out) :])
    results = []
    for x, scale, static in zip(out, out_scales, statics, strict=True):
        if static is not None:
            x = Operand(x, static.scale, home=static.home)
        elif scale is not None:
            if not next(differs) and all(axis is None for axis in axes):
                # Shape (size, ...): `vmap` returns a scale for each example, but these are equal.
                scale = scale[:1] if scale.ndim > 1 else scale[0]
            x = ScaledArray(x, scale)
        results.append(x)
    return results


def _scale_and_axis(x: Any, has_axis: bool, size: int) -> tuple[Any, int | None]:
    """Return the dynamic scale of an operand as an argument of `vmap`, and its `in_axes`."""
    if not is_scaled(x) or x.scale.is_static:
        return None, None
    array = x.scale.array
    if not array.ndim or not has_axis:
        return array, None
    # An example has a scalar scale if the scales have the shape (examples, 1, 1), and scales of
    # shape (4, 1) if they have the shape (examples, 4, 1).
    shape = array.shape[1:] if any(n != 1 for n in array.shape[1:]) else ()
    if array.shape[0] != size:
        return array.reshape(shape), None
    return array.reshape((size, *shape)), 0
