"""Primitives that call a jaxpr. It is interpreted in place, so facts and scales pass through."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.interpreter.observing import Observed, observe_p
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_value_rule
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.scales.algebra import ONE
from jax_scalify.scales.rounds import round_p


def _is_constraint(sharding: Any) -> bool:
    """Return whether a `jit` sharding parameter constrains an array.

    It does not if it was left unspecified, or on a mesh with explicit axes, where types have the
    shardings.
    """
    mesh = getattr(sharding, "mesh", None)
    if mesh is not None and jax.sharding.AxisType.Explicit in (mesh.axis_types or ()):
        return False
    return type(sharding).__name__ not in ("UnspecifiedValue", "AUTO", "NoneType")


def _constrain(value: Value, sharding: Any) -> Value:
    if not _is_constraint(sharding):
        return value
    if isinstance(value, Operand):
        source = lax.with_sharding_constraint(value.source, sharding)
        return value.moved(source, value.scale)
    return Plain.of(lax.with_sharding_constraint(value.whole(), sharding), facts=value.facts)


@register_value_rule("jit")
def jit_rule(ctx: RuleContext, *args: Value, jaxpr: Any, **params: Any) -> list[Value]:
    """Interpret the body in place; shardings become constraints on the data."""
    # Without floating operands and results, no scale passes: keep the call.
    if not any(map(_is_scalable, (*args, *ctx.out_avals))):
        return [Plain.of(x) for x in ctx.bind(*(v.whole() for v in args), jaxpr=jaxpr, **params)]
    inputs = [_constrain(v, s) for v, s in zip(args, params["in_shardings"], strict=True)]
    outputs = ctx.scale_jaxpr(jaxpr, inputs, wide=ctx.wide)
    return [_constrain(v, s) for v, s in zip(outputs, params["out_shardings"], strict=True)]


@register_value_rule(round_p)
def round_rule(ctx: RuleContext, *args: Value, **params: Any) -> list[Value]:
    """Evaluate the primitive on plain values: it computes the scales of a nested `scalify`."""
    return [Plain.of(out) for out in ctx.bind(*map(ctx.dequantise, args), **params)]


@register_value_rule("custom_jvp_call", "custom_vjp_call", "closed_call", "call")
def call_rule(ctx: RuleContext, *args: Value, call_jaxpr: Any, **_: Any) -> list[Value]:
    """Interpret the body in place: inside `scalify`, derivatives have already been taken."""
    if not hasattr(call_jaxpr, "consts"):
        call_jaxpr = _compat.close_jaxpr(call_jaxpr, ())
    return call_in_place(ctx, call_jaxpr, list(args))


@register_value_rule("eval_jaxpr", "composite")
def body_rule(ctx: RuleContext, *args: Value, **params: Any) -> list[Value]:
    """Interpret the body in place."""
    return ctx.scale_jaxpr(params.get("jaxpr") or params["call_jaxpr"], list(args))


@register_value_rule("call_hi_primitive")
def call_hi_primitive_rule(ctx: RuleContext, *args: Value, _prim: Any) -> list[Value]:
    """Interpret its expansion in place: inside `scalify`, derivatives have already been taken."""
    return call_in_place(ctx, _compat.expanded_jaxpr(_prim), list(args))


@register_value_rule(observe_p)
def observe_rule(ctx: RuleContext, *args: Value, observed: Observed) -> list[Value]:
    """Return the observed results unchanged: a nested `scalify` binds this primitive."""
    return [data for data, _ in observed.pairs(args)[: len(observed.results)]]


def call_in_place(ctx: RuleContext, closed: Any, args: list[Value]) -> list[Value]:
    """Interpret the body of a function that has its own derivative rule.

    A body that reads the bits of float32 is evaluated on plain values, and its floating-point
    results get the scale 1. For example, JAX's derivative of `erf` splits a float32 in two, by its
    bits, to compute `exp(-x**2)`. Wide dtypes lose nothing by this. If the body has values of
    narrow dtypes too, it is interpreted as usual, and `bitcast_convert_type` is reported.
    """
    if not any(v.is_scaled for v in args) or not _reads_wide_bits(closed.jaxpr):
        return ctx.scale_jaxpr(closed, args, wide=ctx.wide)
    plain = [jnp.asarray(ctx.dequantise(v, v.dtype)) for v in args]
    results = jex_core.jaxpr_as_fun(closed)(*plain)
    return [Operand(x, ONE) if _is_scalable(x) else Plain.of(x) for x in results]


def _reads_wide_bits(jaxpr: Any) -> bool:
    """Return whether a jaxpr reads the bits of floats, and has no floats of narrow dtypes."""
    equations = list(all_equations(jaxpr))
    read = [e.invars[0].aval for e in equations if e.primitive is lax.bitcast_convert_type_p]
    avals = [v.aval for v in jaxpr.invars] + [v.aval for e in equations for v in e.outvars]
    is_narrow = any(dtypes.is_narrow(getattr(aval, "dtype", jnp.int32)) for aval in avals)
    return any(map(_is_scalable, read)) and not is_narrow


def _is_scalable(x: Any) -> bool:
    return dtypes.is_scalable(x.dtype)
