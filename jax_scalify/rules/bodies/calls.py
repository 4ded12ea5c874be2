"""Primitives that call a jaxpr. It is interpreted in place, so facts and scales pass through."""

from __future__ import annotations

from typing import Any

import jax

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.interpreter.observing import Observed, observe_p
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import (
    RuleContext,
    register_body_rule,
)
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.rules.bodies.bits import call_in_place
from jax_scalify.scales.rounds import round_p


def _constrain(value: Value, sharding: Any) -> Value:
    if _compat.is_unspecified_sharding(sharding):
        return value
    if isinstance(value, Operand):
        data = jax.lax.with_sharding_constraint(value.data, sharding)
        return Operand(data, value.scale, facts=value.facts)
    return Plain.of(jax.lax.with_sharding_constraint(value.whole(), sharding), facts=value.facts)


@register_body_rule("jit", "pjit")
def jit_rule(ctx: RuleContext, *args: Value, jaxpr: Any, **params: Any) -> list[Value]:
    """Interpret the body in place; shardings become constraints on the data."""
    if not any(map(dtypes.is_scalable, (v.dtype for v in (*args, *ctx.out_avals)))):
        return [Plain.of(x) for x in ctx.bind(*(v.whole() for v in args), jaxpr=jaxpr, **params)]
    inputs = [_constrain(v, s) for v, s in zip(args, params["in_shardings"], strict=True)]
    outputs = ctx.scale_jaxpr(jaxpr, inputs, wide=ctx.wide)
    return [_constrain(v, s) for v, s in zip(outputs, params["out_shardings"], strict=True)]


@register_body_rule(round_p)
def round_rule(ctx: RuleContext, *args: Value, **params: Any) -> list[Value]:
    """Evaluate the primitive on plain values: it computes the scales of a nested `scalify`."""
    plain = [ctx.dequantise(v) if isinstance(v, Operand) else v.whole() for v in args]
    return [Plain.of(out) for out in ctx.bind(*plain, **params)]


@register_body_rule("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call", "call")
def call_rule(ctx: RuleContext, *args: Value, call_jaxpr: Any, **_: Any) -> list[Value]:
    """Interpret the body in place: inside `scalify`, derivatives have already been taken."""
    if not hasattr(call_jaxpr, "consts"):
        call_jaxpr = _compat.close_jaxpr(call_jaxpr, ())
    return call_in_place(ctx, call_jaxpr, list(args))


@register_body_rule("eval_jaxpr", "composite")
def body_rule(
    ctx: RuleContext, *args: Value, jaxpr: Any = None, call_jaxpr: Any = None, **_: Any
) -> list[Value]:
    """Interpret the body in place."""
    return ctx.scale_jaxpr(jaxpr or call_jaxpr, list(args))


@register_body_rule("call_hi_primitive")
def call_hi_primitive_rule(ctx: RuleContext, *args: Value, _prim: Any) -> list[Value]:
    """Interpret its expansion in place: inside `scalify`, derivatives have already been taken."""
    return call_in_place(ctx, _compat.expanded_jaxpr(_prim), list(args))


@register_body_rule(observe_p)
def observe_rule(ctx: RuleContext, *args: Value, observed: Observed) -> list[Value]:
    """Return the observed results unchanged: a nested `scalify` binds this primitive."""
    return [data for data, _ in observed.pairs(args)[: len(observed.results)]]
