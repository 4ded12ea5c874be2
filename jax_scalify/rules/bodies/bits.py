"""Functions that read the bits of numbers. They are evaluated on values, not on data."""

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
    """Interpret the body of a function with its own derivative rule.

    A body that reads bits of float32 is evaluated on plain values, and its floating results have
    the scale 1. In JAX, the derivative of `erf` reads bits: it splits a float32 in two to compute
    `exp(-x**2)`. Wide dtypes lose nothing by this. A body that reads bits of narrow dtypes is
    interpreted as usual, and `bitcast_convert_type` is reported.
    """
    if not any(v.is_scaled for v in args) or not _reads_wide_bits(closed.jaxpr):
        return ctx.scale_jaxpr(closed, args, wide=ctx.wide)
    plain = [jnp.asarray(ctx.dequantise(v, v.dtype) if v.is_scaled else v.whole()) for v in args]
    results = jex_core.jaxpr_as_fun(closed)(*plain)
    return [value_of(ScaledArray(x, ONE) if _is_scalable(x) else x) for x in results]


def _reads_wide_bits(jaxpr: Any) -> bool:
    """Return whether a jaxpr reads bits of floats, and all its floats have the range of float32."""
    equations = list(all_equations(jaxpr))
    read = [e.invars[0].aval for e in equations if e.primitive is lax.bitcast_convert_type_p]
    avals = [v.aval for v in jaxpr.invars] + [v.aval for e in equations for v in e.outvars]
    is_narrow = any(dtypes.is_narrow(getattr(aval, "dtype", jnp.int32)) for aval in avals)
    return any(map(_is_scalable, read)) and not is_narrow


def _is_scalable(x: Any) -> bool:
    return dtypes.is_scalable(x.dtype)
