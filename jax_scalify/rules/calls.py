"""Primitives that call a jaxpr, evaluated in place so that facts and scales flow through."""

from __future__ import annotations

from typing import Any

import jax

from jax_scalify import _compat
from jax_scalify.array import ScaledArray
from jax_scalify.registry import RuleContext, register_scale_rule
from jax_scalify.values import Value


def takes_values(rule: Any) -> Any:
    """Mark a rule that is given the interpreter's values instead of arrays."""
    rule.takes_values = True
    return rule


def _constrain(value: Value, sharding: Any) -> Value:
    if _compat.is_unspecified_sharding(sharding):
        return value
    if isinstance(value.array, ScaledArray):
        data = jax.lax.with_sharding_constraint(value.array.data, sharding)
        return Value.of(ScaledArray(data, value.array.scale), nonneg=value.nonneg)
    return Value.of(jax.lax.with_sharding_constraint(value.plain(), sharding), nonneg=value.nonneg)


@register_scale_rule("jit", "pjit")
@takes_values
def jit_rule(
    ctx: RuleContext, *args: Value, jaxpr: Any, in_shardings: Any, out_shardings: Any, **_: Any
) -> list[Value]:
    """The body, in place; shardings become constraints on the data."""
    inputs = [_constrain(v, s) for v, s in zip(args, in_shardings, strict=True)]
    outputs = ctx.scale_jaxpr(jaxpr, inputs)
    return [_constrain(v, s) for v, s in zip(outputs, out_shardings, strict=True)]


@register_scale_rule("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call", "call")
@takes_values
def call_rule(ctx: RuleContext, *args: Value, call_jaxpr: Any, **_: Any) -> list[Value]:
    """The body, in place: inside `scalify` derivatives have been taken already."""
    if not hasattr(call_jaxpr, "consts"):
        call_jaxpr = _compat.close_jaxpr(call_jaxpr, ())
    return ctx.scale_jaxpr(call_jaxpr, list(args))


@register_scale_rule("eval_jaxpr", "composite")
@takes_values
def body_rule(ctx: RuleContext, *args: Value, jaxpr: Any, **_: Any) -> list[Value]:
    """The body, in place."""
    return ctx.scale_jaxpr(jaxpr, list(args))
