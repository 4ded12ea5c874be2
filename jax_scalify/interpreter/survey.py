"""What the readers of each variable of a jaxpr mean for its value.

**Chains are cut.** XLA fuses a chain of elementwise equations into every kernel that reads its end,
so each reader of a residual stream would recompute the stream from the first layer on. Therefore a
barrier cuts the chain after 2 alignments, at a value with several readers. The size of the program
that is compiled for a CPU is then linear in the number of layers. Example: in `h1 = h0 + f(h0)`,
`h2 = h1 + f(h1)`, `h3 = h2 + f(h2)` with dynamic scales, the depths of `h1` and `h2` are 1 and 2.
`h2` has two readers and is pinned, so its depth becomes 0. The depth of `h3` is then 1.

**Narrow arrays are stored once.** XLA for GPUs drops a rounding to float16 before a float32
equation (`xla_allow_excess_precision`). If a matmul reads the same array, XLA stores it twice: in
float32 for the other equations, and in float16 for the matmul. A barrier (`base.pins.store`) keeps
one float16 array for all readers. Example: the cotangent of `x @ w + b` is read by two matmuls, and
by the sum that gives the gradient of `b`. Without the barrier, the sum reads a float32 array of
twice the size.

**Values stay in float32 between equations.** The data of a power may leave the range of float16
although its value does not. For example, the data 300 at the scale `2**-8` is the value 1.2. The
cube is the value 1.6, but its scale is `2**-24` and its data `2.7e7`. XLA fuses a chain of
elementwise equations into one kernel, where float32 intermediates cost nothing. A value is rounded
to its own dtype at the end of the chain: at a matmul, a loop, or a result of the function. Example:
in `h = gelu(x)`, the cube, its multiple, the sum and the argument of `tanh` are float32. `h` itself
is float16, because a matmul reads it. A value that several equations read is stored, and therefore
rounded, unless it is so cheap that XLA recomputes it for each reader.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import applied, is_var, memoised
from jax_scalify.base.pins import pin, store
from jax_scalify.interpreter.gates import Gates, Given, gates_of
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.value import Value

_MAX_DEPTH = 2 if _compat.keeps_barriers() else 8  # without barriers, a cut costs a division
# FP8 matmuls read a `saturating_cast` of the array.
_MATMULS = ("dot_general", "conv_general_dilated", "saturating_cast")
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


@dataclasses.dataclass(frozen=True, eq=False)
class Survey:
    """The equations of a jaxpr, and what becomes of their results.

    Attributes:
        equations: the equations on which a result or an effect depends.
        reused: variables that are read several times. A result of the jaxpr counts: the caller may
            reuse it.
        stored: variables that both a matmul and another equation read.
        wide: variables of narrow dtypes that may stay in float32, each with the number of its
            readers.
        gates: see `interpreter/gates.py`.
    """

    equations: list[Any]
    reused: set[Any]
    stored: set[Any]
    wide: Mapping[Any, int]
    gates: Gates

    def after(self, var: Any, x: Value) -> Value:
        """Return the value of a variable as its readers get it."""
        if not isinstance(x, Operand):
            return x
        if x.depth >= _MAX_DEPTH and var in self.reused:  # the value is computed once
            x = x.moved(pin(x.source), x.scale).known(depth=0)
        if var in self.stored and dtypes.is_narrow(x.dtype):
            x = x.moved(store(x.source), x.scale)
        return self.gates.marked(var, x)


@memoised  # a loop's body is interpreted several times
def survey(jaxpr: Any, leaving: tuple[int, ...], given: tuple[Given | None, ...] = ()) -> Survey:
    """Survey a jaxpr.

    Args:
        jaxpr: an open jaxpr.
        leaving: for each result, how many equations of the caller read it; 0 for a result that must
            leave in its own dtype. Empty means 0 for every result.
        given: what is known of each argument: see `interpreter/gates.py`. Empty means nothing.
    """
    results = {v for v in jaxpr.outvars if is_var(v)}
    used, equations = set(results), []
    # An equation that no result needs is left out here, so that it does not count as a reader.
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in used for v in eqn.outvars):
            used.update(v for v in eqn.invars if is_var(v))
            equations.append(eqn)
    equations.reverse()
    counts: collections.Counter[Any] = collections.Counter()
    by_matmuls, by_others, refused = set(), set(), set()
    for eqn in equations:
        readers = by_matmuls if eqn.primitive.name in _MATMULS else by_others
        # `d * d` reads `d` once, as `square(d)` does.
        counts.update({v for v in eqn.invars if is_var(v)})
        for var, takes in zip(eqn.invars, _operands_taken(eqn), strict=True):
            if is_var(var):
                readers.add(var)
                refused |= set() if takes else {var}
    reused = {v for v, n in counts.items() if n > 1} | results
    for var, count in zip(jaxpr.outvars, leaving or [0] * len(jaxpr.outvars), strict=True):
        if is_var(var):
            counts[var] += count
            refused |= set() if count else {var}
    wide = _wide_variables(equations, counts, refused, results)
    return Survey(equations, reused, by_matmuls & by_others, wide, gates_of(jaxpr, given))


def _wide_variables(
    equations: list[Any], counts: Mapping[Any, int], refused: set[Any], results: set[Any]
) -> dict[Any, int]:
    """Return the variables that may stay in float32, each with the number of its readers."""
    found, costs = {}, {}
    for eqn in equations:
        name = eqn.primitive.name
        if name not in _KEEPS and name not in _CALLS:
            continue
        # XLA would repeat so many equations for each reader: 2 for `z` in `y = 0.5 * x; z = -y`.
        cost = 1 + sum(costs.get(v, 0) for v in eqn.invars if is_var(v))
        is_cheap = name in _CALLS or name in _CHEAP and cost <= _MAX_COST
        for var in eqn.outvars:
            is_narrow = dtypes.is_narrow(getattr(var.aval, "dtype", bool))  # tokens have no dtype
            if var in refused or not counts[var] or not is_narrow:
                continue
            # Nothing is repeated for a single reader, however long the chain. A result may have
            # readers that are not known here.
            if is_cheap or counts[var] == 1 and var not in results:
                found[var], costs[var] = counts[var], cost
    return found


def _operands_taken(eqn: Any) -> list[bool]:
    """Return for each operand whether the equation takes it in float32 instead of its own dtype."""
    if eqn.primitive.name not in _CALLS:
        return [eqn.primitive.name in _TAKES] * len(eqn.invars)
    body = applied(eqn)
    return _arguments_taken(getattr(body, "jaxpr", body))


@memoised
def _arguments_taken(jaxpr: Any) -> list[bool]:
    refused = {v for v in jaxpr.outvars if is_var(v)}
    for eqn in jaxpr.eqns:
        taken = zip(eqn.invars, _operands_taken(eqn), strict=True)
        refused.update(v for v, takes in taken if is_var(v) and not takes)
    return [v not in refused for v in jaxpr.invars]
