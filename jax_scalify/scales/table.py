"""The scales of one trace: its atoms, and the arrays that are computed from them.

A table computes exponents (`scales/exponents.py`). An array of powers of two is made only if data
is multiplied by a scale, or if a scale leaves the trace. With a scale program, scalar scales are
placeholders until the trace is over, and are then computed together. All other scales are computed
at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.pins import pin
from jax_scalify.base.pow2 import reciprocal, round_down
from jax_scalify.scales.algebra import (
    LARGEST_EXTENT,
    NARROW_EXTENT,
    ONE,
    Atom,
    Computed,
    Scale,
    sorted_factors,
    without_smaller,
)
from jax_scalify.scales.exponents import computed_now, exponents_now, powers_now
from jax_scalify.scales.program import ScaleProgram
from jax_scalify.scales.rounds import resolve


class ScaleTable:
    """The atoms of one trace, and a memo of computed scales.

    A loop's body has a table of its own, so that memoised tracers do not leak out of its trace.
    """

    def __init__(
        self,
        dtype: Any = jnp.float32,
        *,
        program: ScaleProgram | None = None,
        splits_scalars: bool = True,
        narrow: bool = True,
    ):
        """Make an empty table.

        Args:
            dtype: the dtype of scales.
            program: computes scalar scales together when the trace is over. Scales with axes are
                computed one by one, and so are all scales without a program.
            splits_scalars: whether a traced scalar is split into data and scale. Otherwise it has
                the scale 1.
            narrow: whether the trace has values of float16 or FP8.
        """
        self.dtype: Any = jnp.dtype(dtype)
        self.splits_scalars = splits_scalars
        self.narrow = narrow
        self._program: Any = program
        self._counter = itertools.count()
        self._memo: dict[Any, Any] = {}

    def trace(self, function: Callable[..., list[Any]], arrays: Sequence[Any]) -> Any:
        """Return the jaxpr of `function(table, *arrays)`, traced with a new table of this kind.

        `arrays` are arrays or `ShapeDtypeStruct` objects. The new table has a scale program if XLA
        keeps barriers.
        """
        program = ScaleProgram(self.dtype) if _compat.keeps_barriers() else None
        options = dict(splits_scalars=self.splits_scalars, narrow=self.narrow)

        def flat(*arrays: Any) -> list[Any]:
            results = function(ScaleTable(self.dtype, program=program, **options), *arrays)
            # As results, the sources are variables of the jaxpr, from which rounds are computed.
            return [*results, *program.sources] if program else results

        closed = jax.make_jaxpr(flat)(*arrays)
        return resolve(program, closed) if program else closed

    def atom(self, array: jax.Array, **known: Any) -> Scale:
        """Return the scale of an array of powers of two. The same array gives the same atom.

        `known` are attributes of the new `Atom`.
        """

        def make() -> Scale:
            program = None if array.shape else self._program
            number = program.source(array) if program else None
            return self._new(source=array, number=number, **known)

        # The new atom holds the array, so that its id is not reused.
        return self.memoised(("atom", id(array)), make)

    def _new(self, **fields: Any) -> Scale:
        return Scale.of_factor(Atom(self, next(self._counter), **fields))

    def varying_axes(self, scale: Scale) -> frozenset[Any]:
        """Return the mesh axes along which a scale may vary, inside `shard_map`.

        A scale that the program computes may depend on every source of the program.
        """
        arrays = [a.source if a.exponents is None else a.exponents for a, _ in scale.factors]
        if self._program is not None and any(a is None for a in arrays):
            arrays += self._program.sources
        return frozenset().union(*(_compat.varying_axes(a) for a in arrays if a is not None))

    def memoised(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, called once in this trace for each key."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def output(self, scale: Scale) -> jax.Array:
        """Return the array of a scale that leaves the trace. The scale must be within range."""
        return jnp.array(scale.value, self.dtype) if scale.is_static else jnp.asarray(scale.array)

    def request(self, scale: Scale, most: float = math.inf) -> jax.Array:
        """Return the array of a monomial, computed once for all users.

        Its exponent is at most `most`.
        """
        atom = scale.only_factor
        if atom and atom.source is not None and scale.exponent == 0 and most == math.inf:
            return atom.source
        if numbered := _numbered(scale):
            return self._program.placeholder(*numbered, most)

        def make() -> jax.Array:
            (monomial,), exponents = self._in_positions(scale)
            return powers_now(monomial, self.dtype, most, exponents)

        return self.memoised(("request", scale, most), make)

    def computed(self, computed: Computed, extent: float, members: Any = frozenset()) -> Scale:
        """Return the atom of a computed scale: the same atom for equal scales.

        The program computes the exponents if it computes all factors. Otherwise they are computed
        now.
        """

        def make() -> Scale:
            known: dict[str, Any] = dict(computed.facts, extent=int(extent), members=members)
            if numbered := _numbered(*computed.terms):
                deferred = dataclasses.replace(computed, terms=numbered)
                return self._new(number=self._program.define(deferred), **known)
            terms, exponents = self._in_positions(*computed.terms)
            here = dataclasses.replace(computed, terms=terms)
            return self._new(exponents=computed_now(here, exponents), **known)

        return self.memoised(computed, make)

    def _in_positions(self, *terms: Scale) -> tuple[tuple[Scale, ...], list[jax.Array]]:
        """Return terms whose factors are positions in a list of exponents, and this list."""
        terms = tuple(map(self._without_numbers, terms))
        atoms = list(dict.fromkeys(atom for term in terms for atom, _ in term.factors))
        of_atom = {atom: Scale.of_factor(i) for i, atom in enumerate(atoms)}
        return tuple(t.renamed(of_atom.__getitem__) for t in terms), [*map(self._exponents, atoms)]

    def _without_numbers(self, scale: Scale) -> Scale:
        """Replace all factors that the program computes by one atom."""
        # `a * b * rows`, with scalar `a` and `b`, has axes and is computed now. The exponent of
        # `a * b` is only known after the trace, so a placeholder stands for it.
        scalar = Scale(0, tuple(f for f in scale.factors if f[0].number is not None))
        if scalar.is_one:
            return scale

        def make() -> Scale:
            return self._new(exponents=self._program.placeholder(*_numbered(scalar), None))

        return scale / scalar * self.memoised(("exponents", scalar), make)

    def _exponents(self, atom: Atom) -> jax.Array:
        if atom.exponents is not None:
            return atom.exponents
        return self.memoised(("exponents", atom), lambda: exponents_now(atom.source))

    def maximum(self, terms: list[Scale], narrow: bool = False) -> Scale:
        """Return the maximum of monomials that cannot be compared while tracing."""
        common = Scale(0, _common_factors(terms))
        terms = [t / common for t in terms]
        terms.sort(key=lambda t: ([(a.index, p) for a, p in t.factors], t.exponent))
        members = _members(terms)
        for term in terms:  # `max(max(a, b), a)` is one of its terms
            if _members([term]) == members:
                return term * common

        # Maxima that differ by a static factor share the atom of the maximum that was made first:
        # `max(4 * a, 8)` is `4 * max(a, 2)`. `low` is 0 for `max(a, 2)`, and 2 for `max(4 * a, 8)`.
        assert all(float(m.exponent).is_integer() for m in members), members
        low = min(m.exponent for m in members)
        key = frozenset(m / Scale(low) for m in members)
        extent = min(NARROW_EXTENT if narrow else LARGEST_EXTENT, max(t.span for t in terms))
        made, its_low = self.memoised(
            ("maximum", key), lambda: (self.computed(Computed(tuple(terms)), extent, members), low)
        )
        return made * Scale(low - its_low) * common

    def held(self, first: Scale, second: Scale, limit: int) -> Scale:
        """Return `first`; where it is 0, `second` with its exponent clamped to `+-limit`."""
        extent = max(first.span, min(limit, second.span))
        return self.computed(Computed((first, second), limit=limit, is_held=True), extent)

    def split(self, value: jax.Array) -> tuple[jax.Array, Scale]:
        """Split a traced array into data in [1, 2) and a scale, element by element: 12 = 1.5 * 8.

        Values in [1/2, 1) get the scale 1. If a decay of 0.9 were `1.8 * 2**-1`, its repeated use
        would double the data and halve the scale each time. Non-finite values get the scale 1 too,
        because they may come from the untaken side of a `where`, and their scale must not make the
        other side underflow.
        """
        if not self.splits_scalars:
            return value, ONE

        def make() -> tuple[Any, Any, Scale]:
            power = round_down(value, self.dtype)
            to_one = lax.bitwise_or(lax.eq(power, np.array(0.5, power.dtype)), ~jnp.isfinite(value))
            power = jnp.where(to_one, jnp.ones_like(power), power)
            scale = self.atom(pin(power), extent=LARGEST_EXTENT, is_number=True)
            compute = dtypes.compute_dtype(value.dtype)
            inverse = reciprocal(scale.array)
            data = lax.mul(value.astype(compute), inverse.astype(compute))
            data = pin(data.astype(value.dtype))
            return value, data, scale  # keeps `value` alive, so that its id is not reused

        return self.memoised(("split", id(value)), make)[1:]


def _common_factors(terms: list[Scale]) -> tuple[tuple[Atom, int], ...]:
    """Return the factors that all terms share: `max(a * c, b * c) = max(a, b) * c`."""
    common = dict(terms[0].factors)
    for term in terms[1:]:
        powers = dict(term.factors)
        common = {atom: min(power, powers.get(atom, 0)) for atom, power in common.items()}
    return sorted_factors({atom: power for atom, power in common.items() if power > 0})


def _members(terms: Iterable[Scale]) -> frozenset[Scale]:
    """Flatten nested maxima into monomials. Keep the largest of those with the same factors."""
    monomials: list[Scale] = []
    for term in terms:
        nested = term.only_factor.members if term.only_factor else ()
        monomials += [m * Scale(term.exponent) for m in nested] or [term]
    return frozenset(without_smaller(monomials))


def _numbered(*scales: Scale) -> tuple[Scale, ...]:
    """Return scales in the numbers of the program; empty if the program does not compute them."""
    if any(atom.number is None for scale in scales for atom, _ in scale.factors):
        return ()
    return tuple(s.renamed(lambda atom: Scale.of_factor(atom.number)) for s in scales)
