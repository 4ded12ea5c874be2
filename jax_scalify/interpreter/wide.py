"""Values of float16 and FP8 that stay in float32 between equations.

The data of a power may leave the range of float16 although its value does not. For example, the
data 300 at the scale `2**-8` is the value 1.2. The cube is the value 1.6, but its scale is `2**-24`
and its data `2.7e7`. XLA fuses a chain of elementwise equations into one kernel, where float32
intermediates cost nothing. A value is rounded to its own dtype at the end of the chain: at a
matmul, a loop, or a result of the function.

Example: in `h = gelu(x)`, the cube, its multiple, the sum and the argument of `tanh` are float32.
`h` itself is float16, because a matmul reads it. A value that several equations read is stored, and
therefore rounded, unless it is so cheap that XLA recomputes it for each reader.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import applied, is_var

# `_KEEPS`: primitives whose result may stay in float32. `_TAKES`: primitives that take such an
# operand. `_CHEAP`: primitives that XLA is expected to recompute for each reader of their result.
_KEEPS = frozenset(
    "mul div square integer_pow sqrt rsqrt cbrt add sub add_any neg abs max min clamp select_n "
    "reduce_sum tanh logistic erf erfc broadcast_in_dim reshape squeeze "
    "convert_element_type".split()
)
_TAKES = _KEEPS | frozenset("eq ne lt le gt ge is_finite sign exp log log1p expm1 sin cos".split())
_CHEAP = _KEEPS - frozenset("div sqrt rsqrt cbrt add sub add_any reduce_sum tanh logistic".split())
# Calls whose rules pass `RuleContext.wide` on to their bodies.
_CALLS = frozenset("jit custom_jvp_call custom_vjp_call closed_call call".split())
# The most equations that XLA is expected to recompute for each reader of their result.
_MAX_COST = 3

_takes: weakref.WeakKeyDictionary[Any, list[bool]] = weakref.WeakKeyDictionary()


def wide_variables(
    jaxpr: Any, equations: Sequence[Any], leaving: Sequence[int] = ()
) -> dict[Any, int]:
    """Return the variables that may stay in float32, each with the number of its readers.

    Args:
        jaxpr: the jaxpr of a function.
        equations: the equations of the jaxpr that are evaluated.
        leaving: for each result, how many equations outside the jaxpr read it; 0 if the result must
            leave in its own dtype. Empty means 0 for every result.
    """
    readers: collections.Counter = collections.Counter()
    refused = set()
    for eqn in equations:
        for var, takes in zip(eqn.invars, _operands_taken(eqn), strict=True):
            if is_var(var):
                readers[var] += 1
                refused |= set() if takes else {var}
    leaves = {v for v in jaxpr.outvars if is_var(v)}
    for var, count in zip(jaxpr.outvars, leaving or [0] * len(jaxpr.outvars), strict=True):
        if is_var(var):
            readers[var] += count
            refused |= set() if count else {var}
    found, costs = {}, {}
    for eqn in equations:
        name = eqn.primitive.name
        if name not in _KEEPS and name not in _CALLS:
            continue
        cost = 1 + sum(costs.get(v, 0) for v in eqn.invars if is_var(v))
        for var in eqn.outvars:
            if var in refused or not readers[var] or not _is_narrow(var.aval):
                continue
            is_cheap = name in _CALLS or name in _CHEAP and cost <= _MAX_COST
            if is_cheap or readers[var] == 1 and var not in leaves:
                found[var], costs[var] = readers[var], cost
    return found


def _operands_taken(eqn: Any) -> list[bool]:
    """Return for each operand whether the equation takes it in float32 instead of its own dtype."""
    if eqn.primitive.name in _CALLS:
        body = applied(eqn)
        body = getattr(body, "jaxpr", body)
        if body not in _takes:
            _takes[body] = _taken_by(body)
        return _takes[body]
    return [eqn.primitive.name in _TAKES] * len(eqn.invars)


def _taken_by(jaxpr: Any) -> list[bool]:
    refused = {v for v in jaxpr.outvars if is_var(v)}
    for eqn in jaxpr.eqns:
        taken = zip(eqn.invars, _operands_taken(eqn), strict=True)
        refused.update(v for v, takes in taken if is_var(v) and not takes)
    return [v not in refused for v in jaxpr.invars]


def _is_narrow(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_float and dtypes.is_narrow(dtype)
