"""How a scale program is computed: in rounds, of a few operations on vectors of exponents.

Each round computes all scales that can be computed of what is known by then, before the first
equation that needs one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.base.jaxprs import is_var
from jax_scalify.base.pow2 import MAX_EXPONENT, exponent, exponent_layout
from jax_scalify.scales.algebra import Scale
from jax_scalify.scales.program import Computed, ScaleProgram, placeholder_p

# The exponent of the scale 0; what is below the limit is 0 still, a root or times other scales.
_ZERO = -float(2**22)
_ZERO_LIMIT = -float(2**18)
# Each round is a jitted function of this name. A `scalify` around this one knows it by the name,
# and evaluates it on plain values.
CALL_NAME = "jax_scalify_scales"


def resolve(program: ScaleProgram, closed: Any) -> Any:
    """Replace the placeholders of a closed jaxpr whose last results are the program's sources."""
    jaxpr = closed.jaxpr
    count = len(jaxpr.outvars) - len(program.sources)
    rounds = _Rounds(program, jaxpr, jaxpr.outvars[count:])
    equations = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is not placeholder_p:
            equations += [*rounds.before(eqn.invars), eqn]
            rounds.define(eqn.outvars)
    equations += rounds.before(jaxpr.outvars[:count])
    return _compat.replace_equations(closed, _pinned_together(equations), count)


def _pinned_together(equations: Sequence[Any]) -> list[Any]:
    """Pin all constants by one barrier.

    XLA merges equal barriers of one constant. Where a kernel has its constants to itself and
    another one shares some, they take their operands in different orders, and are compiled twice.
    """
    pins = [e for e in equations if e.primitive is lax.optimization_barrier_p]
    pins = [e for e in pins if not any(map(is_var, e.invars))]
    if len(pins) < 2:
        return list(equations)
    together = pins[0].replace(
        invars=[v for e in pins for v in e.invars], outvars=[v for e in pins for v in e.outvars]
    )
    pinned = set(map(id, pins))
    return [together, *(e for e in equations if id(e) not in pinned)]


class _Rounds:
    """The rounds in which a program is computed: each goes on from the exponents of the last."""

    def __init__(self, program: ScaleProgram, jaxpr: Any, sources: Sequence[Any]):
        self._program = program
        self._sources = sources
        self._exponents: list[Any] = []  # the variable of all exponents so far, if there is one
        self._size = 1  # the first exponent is 0, of no scale at all
        self._positions: dict[int, int] = {}  # of a scale, by its number, among the exponents
        used = {v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v)}
        used.update(filter(is_var, jaxpr.outvars))
        self._pending = {
            eqn.outvars[0]: eqn.params["number"]
            for eqn in jaxpr.eqns
            if eqn.primitive is placeholder_p and eqn.outvars[0] in used
        }
        made_here = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        self._available = 0  # the sources that have been computed, as bits
        self._bits: dict[Any, int] = {}
        for position, source in enumerate(sources):
            if is_var(source) and source in made_here:
                self._bits[source] = self._bits.get(source, 0) | 1 << position
            else:
                self._available |= 1 << position

    def define(self, variables: Sequence[Any]) -> None:
        """Take note of variables that have been computed."""
        for var in variables:
            self._available |= self._bits.get(var, 0)

    def before(self, operands: Sequence[Any]) -> list[Any]:
        """Return what has to be computed before an equation of some operands."""
        equations = []
        while any(is_var(v) and v in self._pending for v in operands):
            equations.append(self._compute())
            self.define(equations[-1].outvars)
        return equations

    def _compute(self) -> Any:
        """The equation of all pending placeholders that can be computed now."""
        program = self._program
        ready = [v for v, n in self._pending.items() if program.is_ready(n, self._available)]
        requests = [program.request(self._pending.pop(v)) for v in ready]
        sources, levels = self._plan(requests)
        avals = [jax.ShapeDtypeStruct((self._size,), jnp.float32) for _ in self._exponents]
        avals += [jax.ShapeDtypeStruct((), program.dtype) for _ in sources]
        invars = self._exponents + [self._sources[program.scale(n)] for n in sources]
        run = self._runner(requests, sources, levels)
        (call,) = jax.make_jaxpr(jax.jit(run))(*avals).jaxpr.eqns
        new = call.outvars[len(ready) :]
        self._exponents = new or self._exponents
        return call.replace(invars=invars, outvars=[*ready, *new])

    def _plan(self, requests: Sequence[Scale]) -> tuple[list[int], list[list[int]]]:
        """The sources that have to be taken in, and what has to be computed, level by level."""
        sources: list[int] = []
        depth: dict[int, int] = {}
        todo = [n for monomial in requests for n, _ in monomial.factors]
        while todo:
            number = todo.pop()
            if self._is_placed(number, depth):
                continue
            scale = self._program.scale(number)
            operands = scale.operands() if isinstance(scale, Computed) else []
            missing = [n for n in operands if not self._is_placed(n, depth)]
            if missing:
                todo += [number, *missing]
            elif isinstance(scale, Computed):
                depth[number] = 1 + max((depth.get(n, 0) for n in operands), default=0)
            else:
                depth[number] = 0
                sources.append(number)
        levels: list[list[int]] = [[] for _ in range(max(depth.values(), default=0))]
        for number, level in depth.items():
            if level:
                levels[level - 1].append(number)
        return sources, levels

    def _is_placed(self, number: int, depth: dict[int, int]) -> bool:
        """Tell whether a scale has been computed, or has a place in the round that is planned."""
        return number in self._positions or number in depth

    def _runner(
        self, requests: Sequence[Scale], sources: list[int], levels: list[list[int]]
    ) -> Callable[..., Any]:
        """The function of all exponents so far, and of new sources, to the values asked for."""
        is_first = not self._exponents
        self._place(sources)
        steps: list[Callable[[Any], Any]] = []
        for level in levels:
            steps.append(self._level(level))
            self._place(level)
        last = self._read(requests)
        dtype = self._program.dtype

        def run(*arrays: Any) -> list[Any]:
            exponents = jnp.zeros(1, jnp.float32) if is_first else arrays[0]
            new = arrays if is_first else arrays[1:]
            if new:
                found = exponent(jnp.stack(new)).astype(jnp.float32)
                zero = lax.full_like(found, _ZERO)
                found = lax.select(found < np.float32(-MAX_EXPONENT), zero, found)
                exponents = jnp.concatenate([exponents, found])
            for step in steps:
                exponents = _compat.pin(jnp.concatenate([exponents, step(exponents)]))
            values = _compat.pin(_to_float(last(exponents), dtype))
            # Which element a kernel reads is an operand, or it would be a kernel of its own.
            places = _compat.pin_constant([np.uint32(i) for i in range(len(requests))])
            singles = [lax.squeeze(lax.dynamic_slice(values, (i,), (1,)), (0,)) for i in places]
            return [*singles, exponents] if new or steps else singles

        run.__name__ = CALL_NAME
        return run

    def _place(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._positions[number] = self._size
            self._size += 1

    def _level(self, numbers: list[int]) -> Callable[[Any], Any]:
        """The function of all exponents to those of one level; the level is put in its order."""
        groups: dict[Any, list[int]] = {}
        for n in numbers:
            groups.setdefault(_kind(self._program.scale(n)), []).append(n)
        groups = dict(sorted(groups.items()))
        parts = [self._part(kind, group) for kind, group in groups.items()]
        numbers[:] = [n for group in groups.values() for n in group]
        return lambda exponents: (
            parts[0](exponents)
            if len(parts) == 1
            else jnp.concatenate([part(exponents) for part in parts])
        )

    def _part(self, kind: tuple[int, bool, bool], numbers: list[int]) -> Callable[[Any], Any]:
        """The function of all exponents to those of scales of one kind."""
        degree, is_rest, is_bounded = kind
        scales: list[Any] = [self._program.scale(n) for n in numbers]
        limits = [s.limit for s in scales]
        if degree == 1 and not is_bounded:
            return self._maxima([s.terms for s in scales], limits)
        read = self._read([s.terms[0] for s in scales])
        if degree == 1:
            limits = np.array(limits, np.float32)
            return functools.partial(_bounded, read=read, limits=limits)
        return functools.partial(_root, read=read, degree=degree, is_rest=is_rest)

    def _maxima(
        self, rows: Sequence[tuple[Scale, ...]], limits: Sequence[float]
    ) -> Callable[[Any], Any]:
        terms = [term for row in rows for term in row]
        read = self._read(terms)
        width = max(map(len, rows))
        starts = np.cumsum([0, *map(len, rows)])[:-1]
        index = np.array(
            [
                [start + min(i, len(row) - 1) for i in range(width)]
                for start, row in zip(starts, rows)
            ]
        )

        def maxima(exponents: Any) -> Any:
            values = read(exponents)
            if width > 1:
                values = lax.reduce_max(_take(values, index), (1,))
            return lax.min(values, np.broadcast_to(np.array(limits, np.float32), values.shape))

        return maxima

    def _read(self, monomials: Sequence[Scale]) -> Callable[[Any], Any]:
        """The function of all exponents to those of some monomials."""
        width = max((len(m.factors) for m in monomials), default=0)
        index = np.zeros((len(monomials), width), np.int32)
        power = np.zeros((len(monomials), width), np.float32)
        shift = np.array([max(m.exponent, _ZERO) for m in monomials], np.float32)
        for row, monomial in enumerate(monomials):
            for column, (number, p) in enumerate(monomial.factors):
                index[row, column], power[row, column] = self._positions[number], p

        def read(exponents: Any) -> Any:
            if not width:
                return jnp.asarray(shift)
            values = _take(exponents, index)
            if (power < 0).any():  # where 0 is inverted it is read as 1
                limit = np.where(power < 0, _ZERO_LIMIT, -np.inf).astype(np.float32)
                values = lax.select(values < limit, jnp.zeros_like(values), values)
            if (power != 1).any():
                values = values * power
            values = lax.squeeze(values, (1,)) if width == 1 else lax.reduce_sum(values, (1,))
            return values + shift if shift.any() else values

        return read


def _kind(scale: Computed) -> tuple[int, bool, bool]:
    """What scales of a level are computed together: maxima, bounded monomials, roots, rests."""
    return scale.degree, scale.is_rest, scale.degree == 1 and len(scale.terms) <= 1


def _take(vector: Any, index: np.ndarray) -> Any:
    """Elements of a vector by known positions."""
    return vector.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _root(exponents: Any, *, read: Callable, degree: int, is_rest: bool) -> Any:
    values = read(exponents)
    quotient = lax.floor(values * np.float32(1 / degree))
    return values - quotient * np.float32(degree) if is_rest else quotient


def _bounded(exponents: Any, *, read: Callable, limits: np.ndarray) -> Any:
    values = read(exponents)
    return lax.select(values < np.float32(_ZERO_LIMIT), values, lax.clamp(-limits, values, limits))


def _to_float(exponents: Any, dtype: Any) -> Any:
    """Powers of two: 0 below the smallest normal one, and inf beyond the largest."""
    integer, nmant = exponent_layout(dtype)
    bias = jnp.finfo(dtype).maxexp - 1
    low, high = np.float32(0), np.float32(2 * bias + 1)
    biased = lax.clamp(low, exponents + np.float32(bias), high).astype(integer)
    return lax.bitcast_convert_type(biased << np.array(nmant, integer), dtype)
