"""The scalar scales of a trace, computed together.

A training step has thousands of scales that are known at run time only. One by one they would be
most of the operations of the compiled program, each on one number. While a function is traced, a
scale that data has to be multiplied by is therefore a placeholder, an equation without operands.
When the trace is over, the placeholders are replaced by the results of a few operations on vectors
of exponents: one round for all scales that can be computed of what is known by then.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify.pow2 import MAX_EXPONENT, exponent, exponent_layout

# The exponent of the scale 0; what is below the limit is 0 still, a root or times other scales.
_ZERO = -float(2**22)
_ZERO_LIMIT = -float(2**18)
_MAX_TERMS = 32  # of a maximum that is computed at once, and not of the maxima that it is made of
_MAX_CHAIN = 128  # of a maximum of one scale after the other, as a norm over all leaves has

# The name of the function that a round is: a `scalify` around this one leaves it as it is.
CALL_NAME = "jax_scalify_scales"

placeholder_p = jex_core.Primitive("scale_placeholder")


@placeholder_p.def_abstract_eval
def _placeholder_aval(*, number: int, dtype: Any) -> Any:
    return ShapedArray((), dtype)


@dataclasses.dataclass(frozen=True)
class Monomial:
    """`2**exponent * prod(scales[number] ** power)` of the scales of a program, by their numbers.

    Attributes:
        exponent: the static factor; `-inf` for 0.
        factors: pairs of a scale's number and its power.
    """

    exponent: float
    factors: tuple[tuple[int, int], ...] = ()

    def __mul__(self, other: Monomial) -> Monomial:
        powers = dict(self.factors)
        for number, power in other.factors:
            powers[number] = powers.get(number, 0) + power
        factors = tuple(sorted((n, p) for n, p in powers.items() if p))
        return Monomial(self.exponent + other.exponent, factors)

    def __pow__(self, power: int) -> Monomial:
        return Monomial(power * self.exponent, tuple((n, power * p) for n, p in self.factors))


@dataclasses.dataclass(frozen=True)
class _Computed:
    """A scale made of others: the maximum of monomials, or (degree > 1) a root or its rest.

    The exponent of a maximum is at most `limit`; that of a single monomial, unless it is a 0, is
    brought within `+-limit`. `root**degree * rest` is the monomial, with a rest between 1 and
    `2**(degree - 1)`.
    """

    terms: tuple[Monomial, ...]
    degree: int = 1
    is_rest: bool = False
    limit: float = MAX_EXPONENT


class ScaleProgram:
    """What has to be computed of the scalar scales of one trace."""

    def __init__(self, dtype: Any):
        """Start an empty program for scales of the given dtype."""
        self.dtype = jnp.dtype(dtype)
        self.sources: list[Any] = []  # arrays that scales are made of
        self._scales: list[Any] = []  # a source's position, or how it is computed
        self._numbers: dict[_Computed, int] = {}
        self._chains: set[int] = set()  # maxima whose terms are maxima of their own
        self._needs: list[int] = []  # the sources that a scale is computed of, as bits
        self._requests: list[Monomial] = []
        self._placeholders: dict[Monomial, Any] = {}

    def source(self, array: Any) -> int:
        """Take in a scale that is an array; return its number."""
        self.sources.append(array)
        self._needs.append(1 << len(self.sources) - 1)
        self._scales.append(len(self.sources) - 1)
        return len(self._scales) - 1

    def maximum(self, terms: Sequence[Monomial], limit: float = MAX_EXPONENT) -> int:
        """Define the maximum of some monomials, at most `limit`; return its number."""
        choices = [self._choices(term) for term in terms]
        chain = [part for term in terms for part in self._chain(term)]
        goes_on = len(terms) < len(chain) <= _MAX_CHAIN
        if goes_on or sum(math.prod(map(len, c)) for c in choices) > _MAX_TERMS:
            number = self._define(_Computed(_largest(chain if goes_on else terms), limit=limit))
            self._chains.add(number)
            return number
        # max(a, b) * c is the maximum of a * c and b * c: no scale has to wait for another one.
        products = [
            math.prod(chosen, start=Monomial(term.exponent))
            for term, factors in zip(terms, choices, strict=True)
            for chosen in itertools.product(*factors)
        ]
        return self._define(_Computed(_largest(products), limit=limit))

    def bounded(self, of: Monomial, limit: float) -> int:
        """Define a monomial with its exponent brought within `+-limit`; return its number."""
        return self._define(_Computed((of,), limit=limit))

    def _chain(self, term: Monomial) -> list[Monomial]:
        """The monomials of which a term is the maximum, if it is one of too many to multiply."""
        (number, power), *others = term.factors or ((-1, 0),)
        if others or power != 1 or number not in self._chains:
            return [term]
        return [Monomial(term.exponent + t.exponent, t.factors) for t in self._scales[number].terms]

    def _choices(self, term: Monomial) -> list[list[Monomial]]:
        """For each factor the monomials of which it is the maximum, by itself or to a power."""
        choices = []
        for number, power in term.factors:
            scale = self._scales[number]
            is_maximum = isinstance(scale, _Computed) and scale.degree == 1 and scale.terms[1:]
            alone = [Monomial(0, ((number, power),))]
            choices.append([t**power for t in scale.terms] if is_maximum and power > 0 else alone)
        return choices

    def root(self, of: Monomial, degree: int) -> tuple[int, int]:
        """Define root and rest of a monomial; return their numbers."""
        root, rest = (_Computed((of,), degree, is_rest) for is_rest in (False, True))
        return self._define(root), self._define(rest)

    def _define(self, computed: _Computed) -> int:
        if computed in self._numbers:
            return self._numbers[computed]
        self._numbers[computed] = len(self._scales)
        needs = 0
        for term in computed.terms:
            needs |= self._needs_of(term)
        self._needs.append(needs)
        self._scales.append(computed)
        return len(self._scales) - 1

    def _needs_of(self, monomial: Monomial) -> int:
        needs = 0
        for number, _ in monomial.factors:
            needs |= self._needs[number]
        return needs

    def placeholder(self, monomial: Monomial) -> Any:
        """Return an array that will be a monomial's value."""
        if monomial not in self._placeholders:
            number = len(self._requests)
            self._requests.append(monomial)
            self._placeholders[monomial] = placeholder_p.bind(number=number, dtype=self.dtype)
        return self._placeholders[monomial]

    def resolve(self, closed: Any) -> Any:
        """Replace the placeholders of a closed jaxpr whose last results are the sources."""
        jaxpr = closed.jaxpr
        count = len(jaxpr.outvars) - len(self.sources)
        rounds = _Rounds(self, jaxpr, jaxpr.outvars[count:])
        equations = []
        for eqn in jaxpr.eqns:
            if eqn.primitive is not placeholder_p:
                equations += [*rounds.before(eqn.invars), eqn]
                rounds.define(eqn.outvars)
        equations += rounds.before(jaxpr.outvars[:count])
        return _compat.replace_equations(closed, _pinned_together(equations), count)

    def is_ready(self, number: int, available: int) -> bool:
        """Whether the sources of a request are among those available."""
        return not self._needs_of(self._requests[number]) & ~available

    def request(self, number: int) -> Monomial:
        """Return what was asked for."""
        return self._requests[number]

    def scale(self, number: int) -> Any:
        """Return the position of a scale's source, or how it is computed."""
        return self._scales[number]


def _pinned_together(equations: Sequence[Any]) -> list[Any]:
    """Pin all constants by one barrier.

    XLA merges equal barriers of one constant. Where a kernel has its constants to itself and
    another one shares some, they take their operands in different orders, and are compiled twice.
    """
    pins = [e for e in equations if e.primitive is lax.optimization_barrier_p]
    pins = [e for e in pins if not any(map(_is_var, e.invars))]
    if len(pins) < 2:
        return list(equations)
    together = pins[0].replace(
        invars=[v for e in pins for v in e.invars], outvars=[v for e in pins for v in e.outvars]
    )
    pinned = set(map(id, pins))
    return [together, *(e for e in equations if id(e) not in pinned)]


def _largest(monomials: Sequence[Monomial]) -> tuple[Monomial, ...]:
    """Of monomials that differ in nothing but the static factor only the largest one."""
    largest: dict[tuple, float] = {}
    for m in monomials:
        largest[m.factors] = max(m.exponent, largest.get(m.factors, -math.inf))
    return tuple(Monomial(e, f) for f, e in largest.items())


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, jex_core.Literal)


class _Rounds:
    """The rounds in which a program is computed: each goes on from the exponents of the last."""

    def __init__(self, program: ScaleProgram, jaxpr: Any, sources: Sequence[Any]):
        self._program = program
        self._sources = sources
        self._exponents: list[Any] = []  # the variable of all exponents so far, if there is one
        self._size = 1  # the first exponent is 0, of no scale at all
        self._positions: dict[int, int] = {}  # of a scale, by its number, among the exponents
        used = {v for eqn in jaxpr.eqns for v in eqn.invars if _is_var(v)}
        used.update(filter(_is_var, jaxpr.outvars))
        self._pending = {
            eqn.outvars[0]: eqn.params["number"]
            for eqn in jaxpr.eqns
            if eqn.primitive is placeholder_p and eqn.outvars[0] in used
        }
        made_here = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        self._available = 0  # the sources that have been computed, as bits
        self._bits: dict[Any, int] = {}
        for position, source in enumerate(sources):
            if _is_var(source) and source in made_here:
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
        while any(_is_var(v) and v in self._pending for v in operands):
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

    def _plan(self, requests: Sequence[Monomial]) -> tuple[list[int], list[list[int]]]:
        """The sources that have to be taken in, and what has to be computed, level by level."""
        sources: list[int] = []
        depth: dict[int, int] = {}
        todo = [n for monomial in requests for n, _ in monomial.factors]
        while todo:
            number = todo[-1]
            scale = self._program.scale(number)
            if number in self._positions or number in depth:
                todo.pop()
                continue
            if not isinstance(scale, _Computed):
                depth[number] = 0
                sources.append(number)
                continue
            operands = {n for term in scale.terms for n, _ in term.factors}
            missing = [n for n in operands if n not in self._positions and n not in depth]
            if missing:
                todo += missing
                continue
            depth[number] = 1 + max((depth.get(n, 0) for n in operands), default=0)
        levels: list[list[int]] = [[] for _ in range(max(depth.values(), default=0))]
        for number, level in depth.items():
            if level:
                levels[level - 1].append(number)
        return sources, levels

    def _runner(
        self, requests: Sequence[Monomial], sources: list[int], levels: list[list[int]]
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
        scales: dict[int, Any] = {n: self._program.scale(n) for n in numbers}
        maxima = [n for n in numbers if scales[n].degree == 1 and scales[n].terms[1:]]
        bounded = [n for n in numbers if scales[n].degree == 1 and not scales[n].terms[1:]]
        roots: dict[tuple[int, bool], list[int]] = {}
        for n in numbers:
            if scales[n].degree > 1:
                roots.setdefault((scales[n].degree, scales[n].is_rest), []).append(n)
        parts: list[Callable[[Any], Any]] = []
        if maxima:
            limits = [scales[n].limit for n in maxima]
            parts.append(self._maxima([scales[n].terms for n in maxima], limits))
        if bounded:
            read = self._read([scales[n].terms[0] for n in bounded])
            limits = np.array([scales[n].limit for n in bounded], np.float32)
            parts.append(functools.partial(_bounded, read=read, limits=limits))
        for (degree, is_rest), group in roots.items():
            read = self._read([scales[n].terms[0] for n in group])
            parts.append(functools.partial(_root, read=read, degree=degree, is_rest=is_rest))
        numbers[:] = [*maxima, *bounded, *(n for group in roots.values() for n in group)]
        return lambda exponents: (
            parts[0](exponents)
            if len(parts) == 1
            else jnp.concatenate([part(exponents) for part in parts])
        )

    def _maxima(
        self, rows: Sequence[tuple[Monomial, ...]], limits: Sequence[float]
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

    def _read(self, monomials: Sequence[Monomial]) -> Callable[[Any], Any]:
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
