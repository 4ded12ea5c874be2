"""The scales of one trace: its atoms, and the arrays that are computed from them.

Without a scale program, a table emits operations for each scale. With a program, scalar scales are
placeholders until the trace is over, and are then computed together.
"""

from __future__ import annotations

import functools
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
from jax_scalify.base.pow2 import MAX_EXPONENT, exponent_layout, round_down
from jax_scalify.scales.algebra import (
    LARGEST_EXTENT,
    NARROW_EXTENT,
    ONE,
    Atom,
    Scale,
    sorted_factors,
)
from jax_scalify.scales.program import Computed, ScaleProgram
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
        self.dtype = jnp.dtype(dtype)
        self.splits_scalars = splits_scalars
        self.narrow = narrow
        self._program = program
        self._counter = itertools.count()
        self._memo: dict[Any, Any] = {}

    def atom(self, array: jax.Array, **known: Any) -> Scale:
        """Return the scale of an array of powers of two. The same array gives the same atom.

        `known` are attributes of the new `Atom`.
        """

        def make() -> Scale:
            program = None if array.shape else self._program
            number = program.source(array) if program else None
            return Scale.of_factor(Atom(self, next(self._counter), array, number, **known))

        return self.memoised(("atom", id(array)), make)

    def varying_axes(self, scale: Scale) -> frozenset[Any]:
        """Return the mesh axes along which a scale may vary, inside `shard_map`.

        A scale that the program computes may depend on every source of the program.
        """
        arrays = [a.source for a, _ in scale.factors if a.source is not None]
        if self._program is not None and len(arrays) < len(scale.factors):
            arrays += self._program.sources
        return frozenset().union(*map(_compat.varying_axes, arrays))

    def _computed(self, number: int, **known: Any) -> Scale:
        """Return the scale of a number of the program."""
        atom = Atom(self, next(self._counter), None, number, **known)
        return Scale.of_factor(atom)

    def _together(self, *scales: Scale) -> tuple[ScaleProgram, list[Scale]] | None:
        """Return the program and the scales in its numbers; None if an atom has no number."""
        atoms = {atom for scale in scales for atom, _ in scale.factors}
        if self._program is None or any(atom.number is None for atom in atoms):
            return None
        return self._program, [s.renamed(lambda a: Scale.of_factor(a.number)) for s in scales]

    def memoised(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, called once in this trace for each key."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def at_most(self, scale: Scale, exponent: int) -> jax.Array:
        """Return the array of the minimum of a monomial and `2**exponent`."""
        if together := self._together(scale):
            program, (monomial,) = together
            return program.placeholder(monomial, exponent)
        return lax.min(scale.array, jnp.full_like(scale.array, 2.0**exponent))

    def request(self, scale: Scale) -> jax.Array:
        """Return the array of a monomial, computed once for all users."""
        ((first, power), *others) = scale.factors
        if not others and power == 1 and scale.exponent == 0 and first.source is not None:
            return first.source
        if together := self._together(scale):
            program, (monomial,) = together
            return program.placeholder(monomial)
        if not others:
            return self.product(scale)
        return self.memoised(("request", scale), lambda: pin(self.product(scale)))

    def settled(self, scale: Scale) -> tuple[Scale, Scale]:
        """Return one atom for a monomial, and the factor that is beyond the range of its array."""

        def make() -> tuple[Scale, Scale]:
            together = self._together(scale)
            if not together:
                return self.bounded(scale, MAX_EXPONENT)
            program, (monomial,) = together
            number = program.define(Computed((monomial,), limit=math.inf))
            extent = int(scale.extent)
            known: dict[str, Any] = dict(nonzero=scale.is_nonzero, extent=extent, limit=math.inf)
            known["vanishes"] = scale.vanishes
            return self._computed(number, **known), ONE

        return self.memoised(("settled", scale), make)

    def bounded(self, scale: Scale, limit: int) -> tuple[Scale, Scale]:
        """Split a monomial into an atom with an exponent within `+-limit`, and the rest."""

        def make() -> tuple[Scale, Scale]:
            extent = min(limit, int(scale.span))
            known: dict[str, Any] = dict(nonzero=scale.is_nonzero, extent=extent, limit=limit)
            known["vanishes"] = scale.vanishes
            if together := self._together(scale):
                program, (monomial,) = together
                number = program.define(Computed((monomial,), limit=limit))
                within = self._computed(number, **known)
                return within, scale / within
            # In floating point, overflow is clamped. Underflow looks like a scale of 0, and is
            # clamped only if the scale is known not to be 0.
            array = self.product(scale)
            low, high = (np.array(math.ldexp(1.0, e), self.dtype) for e in (-limit, limit))
            inside = lax.clamp(low, array, high)
            if not scale.is_nonzero:
                inside = lax.select(lax.eq(array, jnp.zeros_like(array)), array, inside)
            within = self.atom(pin(inside), **known)
            rest = self.product(scale / within)
            extent = max(0, int(scale.span) - limit)
            return within, self.atom(rest, nonzero=scale.is_nonzero, extent=extent)

        return self.memoised(("bounded", scale, limit), make)

    def output(self, scale: Scale) -> jax.Array:
        """Return the array of a scale that leaves the trace. The scale must be within range."""
        return jnp.array(scale.value, self.dtype) if scale.is_static else jnp.asarray(scale.array)

    def product(self, scale: Scale) -> jax.Array:
        """Return the array of a monomial."""
        if scale.exponent == 0 and len(scale.factors) == 1 and scale.factors[0][1] == 1:
            return scale.factors[0][0].array

        def make() -> jax.Array:
            above = [(atom, 1) for atom, power in scale.factors for _ in range(power)]
            below = [(atom, -1) for atom, power in scale.factors for _ in range(-power)]
            # Multiply and divide alternately, so that intermediate products stay in range.
            pairs = itertools.zip_longest(above, below)
            out = self._chain(tuple(term for pair in pairs for term in pair if term is not None))
            exponent = int(scale.exponent)
            while exponent:
                step = max(-MAX_EXPONENT, min(MAX_EXPONENT, exponent))
                out = lax.mul(out, np.array(math.ldexp(1.0, step), self.dtype))
                exponent -= step
            return out

        return self.memoised(("product", scale), make)

    def _chain(self, terms: tuple[tuple[Atom, int], ...]) -> jax.Array:
        """Return the product of atoms and reciprocals. Products with a common prefix share it."""
        *first, (atom, power) = terms
        factor = atom.array if power > 0 else self._reciprocal(atom)
        if not first:
            return factor
        return self.memoised(
            ("chain", terms), lambda: _broadcast(lax.mul)(self._chain(tuple(first)), factor)
        )

    def _reciprocal(self, atom: Atom, guarded: bool = True) -> jax.Array:
        """Return `1 / atom`, computed on the bits: XLA gives a float division its own kernel.

        If `guarded`, the reciprocal of 0 is 1. Otherwise it is the largest power of two.
        """

        def make() -> jax.Array:
            integer, nmant = exponent_layout(self.dtype)
            bias = jnp.finfo(self.dtype).maxexp - 1
            bits = lax.bitcast_convert_type(atom.array, integer)
            inverse = lax.sub(np.array(2 * bias << nmant, integer), bits)
            if guarded and not atom.nonzero:
                one = jnp.full_like(bits, np.array(bias << nmant, integer))
                inverse = lax.select(lax.eq(bits, np.array(0, integer)), one, inverse)
            return lax.bitcast_convert_type(inverse, self.dtype)

        return self.memoised(("reciprocal", atom, guarded), make)

    def alignment(self, ratio: Scale) -> Scale:
        """Return the ratio of a scale to a maximum that it is a member of."""
        below = [a for a, power in ratio.factors if power == -1 and a.members]
        if not below or self._together(ratio):
            return ratio
        joined = below[-1]

        def make() -> Scale:
            # If the maximum is 0, `top` is 0 too, so the reciprocal of 0 needs no guard.
            top = (ratio * Scale.of_factor(joined)).array
            inverse = self._reciprocal(joined, guarded=False)
            return self.atom(_broadcast(lax.mul)(top.astype(self.dtype), inverse))

        return self.memoised(("alignment", ratio), make)

    def maximum(self, terms: list[Scale], narrow: bool = False) -> Scale:
        """Return the maximum of monomials that cannot be compared while tracing."""
        common = Scale(0, _common_factors(terms))
        terms = sorted((t / common for t in terms), key=_monomial_key)
        members = _members(terms)
        for term in terms:  # one term may already be the maximum of all terms
            if _members([term]) == members:
                return term * common

        # Maxima that differ by a static factor share the atom of the maximum that was made first.
        low = min(exponent for _, exponent in members)
        key = frozenset((factors, exponent - low) for factors, exponent in members)
        known: dict[str, Any] = dict(
            members=members,
            nonzero=any(t.is_nonzero for t in terms),
            extent=min(
                NARROW_EXTENT if narrow else LARGEST_EXTENT, int(max(t.span for t in terms))
            ),
            vanishes=frozenset.intersection(*(t.vanishes for t in terms)),
            # A maximum is clamped from above only, and is at least as large as each term.
            limit=max(MAX_EXPONENT, min(t.limit for t in terms)),
        )
        make = functools.partial(self._make_maximum, terms, known)
        made, its_low = self.memoised(("maximum", key), lambda: (make(), low))
        return made * Scale(low - its_low) * common

    def _make_maximum(self, terms: list[Scale], known: dict[str, Any]) -> Scale:
        if together := self._together(*terms):
            program, monomials = together
            return self._computed(program.maximum(monomials), **known)
        within = [t.bounded()[0] if t.may_leave_range else t for t in terms]
        array = jnp.asarray(within[0].array, self.dtype)
        for term in within[1:]:
            array = _broadcast(lax.max)(array, jnp.asarray(term.array, self.dtype))
        return self.atom(pin(array), **known)

    def held(self, first: Scale, second: Scale, limit: int, **known: Any) -> Scale:
        """Return `first`; where it is 0, `second` with its exponent clamped to `+-limit`."""

        def make() -> Scale:
            known["nonzero"] = second.is_nonzero
            known["extent"] = int(max(first.span, min(limit, second.span)))
            known["limit"] = max(first.limit, limit)
            if together := self._together(first, second):
                program, (a, b) = together
                number = program.define(Computed((a, b), limit=limit, is_held=True))
                return self._computed(number, holds=first, **known)
            arrays = (first.array, second.bounded(limit)[0].array)
            a, b = jnp.broadcast_arrays(*(jnp.asarray(x, self.dtype) for x in arrays))
            array = lax.select(lax.eq(a, jnp.zeros_like(a)), b, a)
            return self.atom(pin(array), holds=first, **known)

        return self.memoised(("held", first, second, limit), make)

    def root(self, scale: Scale, degree: int) -> tuple[Scale, Scale]:
        """Return the root and the rest of a monomial that has no exact root. The root of 0 is 0."""
        extent = math.ceil(scale.span / degree)

        def make() -> tuple[Scale, Scale]:
            known: dict[str, Any] = dict(nonzero=scale.is_nonzero, extent=extent)
            if together := self._together(scale):
                program, (monomial,) = together
                pair = (Computed((monomial,), degree, is_rest) for is_rest in (False, True))
                root, rest = map(program.define, pair)
                found = self._computed(root, **known)
                return found, self._computed(rest, nonzero=True, extent=degree)
            array = scale.array
            integer, nmant = exponent_layout(self.dtype)
            # exponent = biased - bias. Adding bias * (degree - 1) makes the quotient biased again,
            # and positive.
            offset = np.array((jnp.finfo(self.dtype).maxexp - 1) * (degree - 1), integer)
            shift, count = np.array(nmant, integer), np.array(degree, integer)
            bits = lax.bitcast_convert_type(array, integer)
            biased = lax.add(lax.shift_right_logical(bits, shift), offset)
            quotient = lax.div(biased, count)
            root = lax.bitcast_convert_type(lax.shift_left(quotient, shift), self.dtype)
            if not scale.is_nonzero:
                is_zero = lax.eq(bits, np.array(0, integer))
                root = lax.select(is_zero, jnp.zeros_like(root), root)
            power = lax.shift_left(np.array(1, integer), lax.rem(biased, count))
            rest = lax.convert_element_type(power, self.dtype)
            return self.atom(pin(root), **known), self.atom(rest, nonzero=True, extent=degree)

        return self.memoised(("root", scale, degree), make)

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
            inverse = self._reciprocal(scale.factors[0][0])
            data = lax.mul(value.astype(compute), inverse.astype(compute))
            data = pin(data.astype(value.dtype))
            return value, data, scale  # keeps `value` alive, so that its id is not reused

        return self.memoised(("split", id(value)), make)[1:]


def _monomial_key(scale: Scale) -> tuple:
    return (tuple((a.index, p) for a, p in scale.factors), scale.exponent)


def _common_factors(terms: list[Scale]) -> tuple[tuple[Atom, int], ...]:
    """Return the factors that all terms share: `max(a * c, b * c) = max(a, b) * c`."""
    common = dict(terms[0].factors)
    for term in terms[1:]:
        powers = dict(term.factors)
        common = {atom: min(power, powers.get(atom, 0)) for atom, power in common.items()}
    return sorted_factors({atom: power for atom, power in common.items() if power > 0})


def _members(terms: Iterable[Scale]) -> frozenset[tuple]:
    """Flatten nested maxima into monomials. Keep the largest of those with the same factors."""
    largest: dict[tuple, float] = {}
    for term in terms:
        atom = term.factors[0][0] if len(term.factors) == 1 and term.factors[0][1] == 1 else None
        nested = atom.members if atom is not None and atom.members else None
        for factors, exponent in nested or [(term.factors, 0)]:
            exponent += term.exponent
            largest[factors] = max(exponent, largest.get(factors, -math.inf))
    return frozenset(largest.items())


def _broadcast(operation: Callable) -> Callable:
    """Return a binary `lax` operation that broadcasts scales, of shape `()` or of full rank."""

    def apply(a: Any, b: Any) -> jax.Array:
        if a.shape == b.shape or not a.shape or not b.shape:
            return operation(a, b)
        return operation(*jnp.broadcast_arrays(a, b))

    return apply


def trace_with_table(
    function: Callable[..., list[Any]],
    arrays: Sequence[Any],
    dtype: Any,
    **options: bool,
) -> Any:
    """Return the jaxpr of `function(table, *arrays)`, given arrays or `ShapeDtypeStruct` objects.

    `options` are arguments of the new `ScaleTable`. It has a scale program if XLA keeps barriers.
    """
    program = ScaleProgram(dtype) if _compat.keeps_barriers() else None

    def flat(*arrays: Any) -> list[Any]:
        table = ScaleTable(dtype, program=program, **options)
        results = function(table, *arrays)
        return [*results, *program.sources] if program else results

    closed = jax.make_jaxpr(flat)(*arrays)
    return resolve(program, closed) if program else closed
