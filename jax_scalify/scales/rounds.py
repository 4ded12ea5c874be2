"""The evaluation of a scale program: in rounds of a few operations on vectors of exponents.

A round is placed before the first equation that needs one of its scales. It computes every
requested scale whose sources are known there.

Example: a round with sources `a = 2**3`, `b = 2**-1` and the request `max(a, b) / b` starts from
the exponents `[0, 3, -1]` (the first is always 0). Its one level appends `max(3, -1) = 3`. The
request sums positions 3 and 2 with powers 1 and -1: `3 + 1 = 4`, and the value is 16.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_scalify import _compat
from jax_scalify.base.eager import compiled
from jax_scalify.base.jaxprs import is_var
from jax_scalify.base.pins import elements, pin_p
from jax_scalify.scales.algebra import Computed, Scale
from jax_scalify.scales.exponents import ZERO, of_powers, outcome, ranked, times, to_powers
from jax_scalify.scales.program import ScaleProgram, placeholder_p


def resolve(program: ScaleProgram, closed: Any) -> Any:
    """Replace the placeholders of a closed jaxpr, whose last results are the program's sources."""
    jaxpr = closed.jaxpr
    count = len(jaxpr.outvars) - len(program.sources)
    rounds = _Rounds(program, jaxpr, jaxpr.outvars[count:])
    equations = []
    for eqn in jaxpr.eqns:
        # A placeholder is dropped, and its round is placed before its first reader: the later a
        # round, the more sources are known, and the more scales it computes.
        if eqn.primitive is not placeholder_p:
            equations += [*rounds.before(eqn.invars), eqn]
            rounds.define(eqn.outvars)
    equations += rounds.before(jaxpr.outvars[:count])
    return _compat.replace_equations(closed, _pinned_together(equations), count)


def _pinned_together(equations: Sequence[Any]) -> list[Any]:
    """Pin all constants in one barrier.

    XLA merges barriers of equal constants. If one of two equal kernels shares constants with other
    kernels, the two take their operands in different orders, and XLA compiles both.
    """
    pins = [e for e in equations if e.primitive is pin_p]
    pins = [e for e in pins if not any(map(is_var, e.invars))]
    if len(pins) < 2:
        return list(equations)
    together = pins[0].replace(
        invars=[v for e in pins for v in e.invars], outvars=[v for e in pins for v in e.outvars]
    )
    pinned = set(map(id, pins))
    return [together, *(e for e in equations if id(e) not in pinned)]


class _Rounds:
    """The rounds of a program. Each round appends to the exponents of the rounds before it."""

    def __init__(self, program: ScaleProgram, jaxpr: Any, sources: Sequence[Any]):
        self._program = program
        self._sources = sources
        self._exponents: list[Any] = []  # the variable of all exponents so far, or empty
        # By number of a scale: its place in the exponents. The first exponent is 0, of no scale.
        self._positions: dict[int, int] = {}
        # A rule may ask for a scale and not use it.
        used = {v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v)}
        used.update(filter(is_var, jaxpr.outvars))
        # Of placeholders: the monomial and the largest exponent, or None for the exponent itself.
        self._pending = {
            eqn.outvars[0]: (eqn.params["monomial"], eqn.params["most"])
            for eqn in jaxpr.eqns
            if eqn.primitive is placeholder_p and eqn.outvars[0] in used
        }
        # All other sources are arguments or constants, which are there from the start.
        made_here = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        self._available = 0  # the sources computed so far, as bits
        self._bits: dict[Any, int] = {}
        for position, source in enumerate(sources):
            if is_var(source) and source in made_here:
                self._bits[source] = self._bits.get(source, 0) | 1 << position
            else:
                self._available |= 1 << position

    def define(self, variables: Sequence[Any]) -> None:
        """Mark variables as computed."""
        for var in variables:
            self._available |= self._bits.get(var, 0)

    def before(self, operands: Sequence[Any]) -> list[Any]:
        """Return the rounds that must precede an equation with these operands."""
        equations = []
        # One round may need another: a source may be a placeholder itself, such as a scale that a
        # user's rule returned as an array.
        while any(is_var(v) and v in self._pending for v in operands):
            equations.append(self._compute())
            self.define(equations[-1].outvars)
        return equations

    def _compute(self) -> Any:
        """Return the equation that computes all pending placeholders that can be computed now."""
        program = self._program
        missing = ~self._available
        ready = [v for v, (m, _) in self._pending.items() if not program.needs(m) & missing]
        ready.sort(key=lambda v: self._pending[v][1] is None)  # exponents last
        monomials, most = zip(*map(self._pending.pop, ready), strict=True)
        size = 1 + len(self._positions)
        sources, *levels = self._plan(monomials)
        self._place(sources)
        steps = []
        for level in levels:
            steps.append(_Level([program.scales[n] for n in level], self._positions))
            self._place(level)
        computed = _Round(
            levels=steps,
            values=_Sums(monomials, self._positions),
            most=np.array([m for m in most if m is not None]),
            dtype=program.dtype,
            is_first=not self._exponents,
            size=1 + len(self._positions) if sources or steps else None,
        )
        avals = [jax.ShapeDtypeStruct((size,), jnp.float32) for _ in self._exponents]
        avals += [jax.ShapeDtypeStruct((), program.dtype) for _ in sources]
        invars = self._exponents + [self._sources[program.scales[n]] for n in sources]
        bind = functools.partial(round_p.bind, computed=computed)
        # Tracing makes an equation. Its variables are then replaced by those of the program.
        (eqn,) = jax.make_jaxpr(bind)(*avals).jaxpr.eqns
        new = eqn.outvars[len(ready) :]
        self._exponents = new or self._exponents
        return eqn.replace(invars=invars, outvars=[*ready, *new])

    def _plan(self, requests: Sequence[Scale]) -> list[list[int]]:
        """Return the new scales that requests depend on: sources, then computed scales by level."""
        depth: dict[int, int] = {}
        known = collections.ChainMap(depth, self._positions)
        todo = [n for monomial in requests for n, _ in monomial.factors]
        while todo:
            number = todo.pop()
            if number in known:
                continue
            scale = self._program.scales[number]
            terms = scale.terms if isinstance(scale, Computed) else ()
            operands = list({n for term in terms for n, _ in term.factors})
            missing = [n for n in operands if n not in known]
            if missing:
                todo += [number, *missing]
            elif isinstance(scale, Computed):
                depth[number] = 1 + max((depth.get(n, 0) for n in operands), default=0)
            else:
                depth[number] = 0
        levels: list[list[int]] = [[] for _ in range(1 + max(depth.values(), default=0))]
        for number, level in depth.items():
            levels[level].append(number)
        return levels

    def _place(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._positions[number] = 1 + len(self._positions)


@dataclasses.dataclass(frozen=True, eq=False)
class _Round:
    """A round: a function of the exponents so far and of new sources that returns the requests.

    Attributes:
        levels: the levels, computed one after the other.
        values: the requested monomials.
        most: the largest exponents of requests for arrays. The last requests are for exponents.
        dtype: the dtype of sources and requests.
        is_first: whether there are no exponents yet.
        size: the number of exponents after the round, whose last result is the vector of all
            exponents. None if the round adds no exponents, and does not return them.
    """

    levels: Sequence[_Level]
    values: _Sums
    most: np.ndarray
    dtype: Any
    is_first: bool
    size: int | None

    def __call__(self, style: _Style, *arrays: Any) -> list[Any]:
        exponents = jnp.zeros(1, jnp.float32) if self.is_first else arrays[0]
        new = arrays if self.is_first else arrays[1:]
        if new:
            exponents = jnp.concatenate([exponents, of_powers(jnp.stack(new))])
        for count, level in enumerate(self.levels, 1):
            exponents = jnp.concatenate([exponents, level(exponents, style)])
            exponents = exponents if count % style.levels else lax.optimization_barrier(exponents)
        values, count = self.values(exponents, style), len(self.most)
        found = elements(to_powers(values[:count], self.dtype, self.most)) if count else []
        found += elements(values[count:]) if count < self.values.count else []
        return found if self.size is None else [*found, exponents]

    @functools.cached_property
    def jitted(self) -> Any:
        """The round as a jitted function."""
        return jax.jit(lambda *arrays: round_p.bind(*arrays, computed=self))


@dataclasses.dataclass(frozen=True)
class _Style:
    """How a round is lowered for a platform, so that XLA makes few kernels of it.

    Attributes:
        levels: the exponents are stored after this many levels. A kernel recomputes the levels
            since the last store for each of its elements.
        sums: how exponents are added and compared. "rows" reduces along an axis, "columns" adds
            one column after the other, and "matrix" multiplies by a matrix, without a gather.
    """

    levels: int
    sums: str


round_p = jex_core.Primitive("scale_round")
round_p.multiple_results = True
round_p.def_impl(compiled(lambda *arrays, computed: computed.jitted(*arrays)))


@round_p.def_abstract_eval
def _round_avals(*_: Any, computed: _Round) -> list[Any]:
    powers = len(computed.most)
    avals = [ShapedArray((), computed.dtype)] * powers
    avals += [ShapedArray((), np.float32)] * (computed.values.count - powers)
    return avals if computed.size is None else [*avals, ShapedArray((computed.size,), np.float32)]


def _lowered(style: _Style) -> Any:
    return mlir.lower_fun(lambda *arrays, computed: computed(style, *arrays), multiple_results=True)


# On GPUs each kernel is a launch, and XLA fuses no reduction into another kernel. On TPUs it
# compiles a gather to many kernels. On CPUs compile time dominates.
ON_CPU = _Style(levels=1, sums="rows")
ON_GPU = _Style(levels=2, sums="columns")
ON_TPU = _Style(levels=1, sums="matrix")
mlir.register_lowering(round_p, _lowered(ON_GPU))
mlir.register_lowering(round_p, _lowered(ON_TPU), platform="tpu")
mlir.register_lowering(round_p, _lowered(ON_CPU), platform="cpu")


def _round_jvp(primals: Any, tangents: Any, *, computed: _Round) -> Any:
    """Return zero tangents: scales are constants to derivatives."""
    out = round_p.bind(*primals, computed=computed)
    return out, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]


def _round_batch(arrays: Any, dims: Any, *, computed: _Round) -> Any:
    # While `vmap` traces, the platform is not known yet.
    out = jax.vmap(functools.partial(computed, ON_CPU), dims)(*arrays)
    return out, [0] * len(out)


ad.primitive_jvps[round_p] = _round_jvp
batching.primitive_batchers[round_p] = _round_batch


class _Sums:
    """The exponents of monomials, as a function of all exponents."""

    def __init__(self, monomials: Sequence[Scale], positions: dict[int, int]):
        # For `2**3 * a / b` and `c**2`, with `a`, `b` and `c` at the positions 1, 2 and 3, index is
        # [[1, 2], [3, 0]], power is [[1, -1], [2, 0]] and shift is [3, 0]. Position 0, of the
        # exponent 0, fills up the short row.
        self.count = len(monomials)
        width = max((len(m.factors) for m in monomials), default=0)
        self._index = np.zeros((len(monomials), width), np.int32)
        self._power = np.zeros((len(monomials), width), np.float32)
        self._shift = np.array([max(m.exponent, ZERO) for m in monomials], np.float32)
        for row, monomial in enumerate(monomials):
            for column, (number, p) in enumerate(monomial.factors):
                self._index[row, column], self._power[row, column] = positions[number], p

    def __call__(self, exponents: Any, style: _Style) -> Any:
        index, power = self._index, self._power
        if not index.size:
            return jnp.asarray(self._shift)
        if style.sums == "columns" or index.shape[1] == 1 and style.sums == "rows":
            parts = [times(_take(exponents, i), p) for i, p in zip(index.T, power.T)]
            total = functools.reduce(lax.add, parts)
        elif style.sums == "rows":
            total = lax.reduce_sum(times(_take(exponents, index), power), (1,))
        else:
            matrix = np.zeros((len(index), exponents.size), np.float32)
            np.add.at(matrix, (np.arange(len(index))[:, None], index), power)
            exponents = lax.broadcast_in_dim(exponents, matrix.shape, (1,))
            total = lax.reduce_sum(times(exponents, matrix), (1,))
        return total + self._shift if self._shift.any() else total


class _Level:
    """The exponents of the scales of a level, as a function of the exponents before it."""

    def __init__(self, scales: Sequence[Computed], positions: dict[int, int]):
        self._width = max(len(s.terms) for s in scales)
        columns = list(map(ranked, scales))
        # The first terms of all scales, then the second terms: `max(a, b, c)` and `max(d, e)` give
        # `a d b e c e`. A maximum does not change if its last term is repeated.
        terms = [terms[min(i, len(terms) - 1)] for i in range(self._width) for terms in columns]
        self._terms = _Sums(terms, positions)
        self._settings = [np.array(column) for column in zip(*(s.settings for s in scales))]

    def __call__(self, exponents: Any, style: _Style) -> Any:
        found = self._terms(exponents, style)
        if style.sums == "rows" and self._width > 1:
            found = lax.reduce_max(found.reshape(self._width, -1), (0,))
        else:
            size = found.size // self._width
            parts = [lax.slice_in_dim(found, i, i + size) for i in range(0, found.size, size)]
            found = functools.reduce(lax.max, parts)
        return outcome(found, self._settings)


def _take(vector: Any, index: np.ndarray) -> Any:
    """Return the elements of a vector at known positions."""
    return vector.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
