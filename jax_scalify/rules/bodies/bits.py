"""Functions that read the bits of numbers: they are called on values, not on data."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.interpreter.value import Value, value_of
from jax_scalify.scales.algebra import ONE


def call_in_place(ctx: RuleContext, closed: Any, args: list[Value]) -> list[Value]:
    """Interpret the body of a function that has a derivative of its own.

    If it reads bits, as `exp(-x**2)` in the derivative of JAX's `erf` does to split a float32 in
    two, each of its operations is about values: the body is evaluated on them, and its floating
    results have scale 1. Nothing is lost by that in dtypes of the range of float32. What reads the
    bits of narrower numbers is interpreted as usual, and `bitcast_convert_type` is reported.
    """
    if not any(v.is_scaled for v in args) or not _reads_wide_bits(closed.jaxpr):
        return ctx.scale_jaxpr(closed, args, wide=ctx.wide)
    plain = [jnp.asarray(ctx.dequantise(v, v.dtype) if v.is_scaled else v.whole()) for v in args]
    results = jex_core.jaxpr_as_fun(closed)(*plain)
    return [value_of(ScaledArray(x, ONE) if _is_scalable(x) else x) for x in results]


def _reads_wide_bits(jaxpr: Any) -> bool:
    """Tell whether bits are read, and everything that is floating has the range of float32."""
    equations = list(all_equations(jaxpr))
    read = [e.invars[0].aval for e in equations if e.primitive is lax.bitcast_convert_type_p]
    avals = [v.aval for v in jaxpr.invars] + [v.aval for e in equations for v in e.outvars]
    is_narrow = any(dtypes.has_short_range(getattr(aval, "dtype", jnp.int32)) for aval in avals)
    return any(map(_is_scalable, read)) and not is_narrow


def _is_scalable(x: Any) -> bool:
    return dtypes.is_scalable(x.dtype)
