"""The algebra of scales.

Inside the transform a scale is a `Scale`: a static power of two times a monomial of *atoms*. An
atom is an array of powers of two that is known at run time only. Products, quotients and exact
roots are computed symbolically while tracing. They add no operations to the program, and equal
scales are known to be equal. A scale becomes an array only if data is multiplied by it.

Example: with atoms `a` and `b`, `(2**3 * a) * (2**-5 * b) / a` is `2**-2 * b`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.base.pow2 import MAX_EXPONENT, floor_exponent, is_power_of_two

# The most factors of a monomial. A lower limit makes longer chains of maxima, which are computed
# one after the other. Without a limit, a net of n layers without norms has monomials of n factors.
_MAX_FACTORS = 8

# The exponents of scales are expected within `+-extent`: GIVEN_EXTENT for arguments, LARGEST_EXTENT
# for computed scales. A scale beyond its extent is valid, but float32 data that is as far from 1
# may leave the range of float32.
GIVEN_EXTENT = 40
LARGEST_EXTENT = 42
NARROW_EXTENT = 20  # for float16, whose normal numbers reach from 2**-14 to 2**16
_SMALL_EXPONENT = 24  # static factors within `2**+-24` are left out of `Scale.extent`


@dataclasses.dataclass(frozen=True, eq=False)
class Atom:
    """A scale that is known at run time only: an array of powers of two, or 0.

    The array has shape `()`, or the rank of the data with each dim 1 or equal to the data's.

    Attributes:
        table: the `ScaleTable` of its trace.
        index: atoms are numbered in the order in which they were made.
        source: its array; None if it is computed from other scales.
        exponents: its exponents; None if it has a source, or a scale program computes them.
        number: its number in the scale program; None if it is not scalar or there is no program.
        members: the monomials that this atom is the maximum of.
        nonzero: whether it is known not to be 0.
        extent: an expectation. The scale is within `2**+-extent`, and so is the data that it
            belongs to.
        is_number: whether it is the power of two of a traced scalar, whose data is close to 1.
        limit: a guarantee. The scale is within `2**+-limit`, or 0.
        holds: a scale that it equals wherever that scale is not 0.
        vanishes: if one of these atoms is 0, this atom is 0 too.
    """

    table: Any
    index: int
    source: jax.Array | None = None
    exponents: jax.Array | None = None
    number: int | None = None
    members: frozenset[Scale] = frozenset()
    nonzero: bool = False
    extent: int = GIVEN_EXTENT
    is_number: bool = False
    limit: float = MAX_EXPONENT
    holds: Scale | None = None
    vanishes: frozenset[Atom] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its array."""
        return np.shape(self.source if self.exponents is None else self.exponents)


@dataclasses.dataclass(frozen=True)
class Scale:
    """`2**exponent * prod(atom**power)`. The exponent `-inf` is the scale 0: any scale will do.

    Supports `*`, `/`, integer `**` and `maximum`, also with powers of two as Python numbers.
    `scale.array` and `jnp.asarray(scale)` return its array.

    In a scale program, the factors are numbers of the program instead of atoms.
    """

    exponent: float
    factors: tuple[tuple[Any, int], ...] = ()

    @classmethod
    def of_factor(cls, factor: Atom | int) -> Scale:
        """Return the scale of one atom, or of its number in a scale program."""
        return cls(0, ((factor, 1),))

    @classmethod
    def of(cls, value: Any) -> Scale:
        """Return the static scale of a concrete power of two or 0."""
        if isinstance(value, Scale):
            return value
        if float(value) == 0.0:
            return ZERO
        if not is_power_of_two(value):
            raise ValueError(f"`scale` must be a power of two or 0, got {value!r}.")
        return cls(floor_exponent(value))

    @property
    def table(self) -> Any:
        """The `ScaleTable` of the trace of a dynamic scale."""
        return self.factors[0][0].table

    @property
    def only_factor(self) -> Any:
        """The atom `a` of a scale `2**k * a`; None for any other scale."""
        ((factor, power), *others) = self.factors or ((None, 1),)
        return None if others or power != 1 else factor

    @property
    def is_static(self) -> bool:
        """Whether the scale is known while tracing."""
        return not self.factors

    @property
    def is_zero(self) -> bool:
        """Whether the scale is the static 0."""
        return self.exponent == -math.inf

    @property
    def is_one(self) -> bool:
        """Whether the scale is the static 1."""
        return self.exponent == 0 and not self.factors

    @functools.cached_property
    def is_nonzero(self) -> bool:
        """Whether the scale is known not to be 0. An atom of 0 to a negative power counts as 1."""
        return not self.is_zero and all(atom.nonzero or p < 0 for atom, p in self.factors)

    @functools.cached_property
    def vanishes(self) -> frozenset[Atom]:
        """If one of these atoms is 0, the scale is 0."""
        own = [atom for atom, power in self.factors if power > 0]
        return frozenset(own).union(*(atom.vanishes for atom in own))

    @functools.cached_property
    def limit(self) -> float:
        """A guarantee: the scale is within `2**+-limit`, or 0."""
        if self.is_zero:
            return 0
        return abs(self.exponent) + sum(a.limit * abs(power) for a, power in self.factors)

    @functools.cached_property
    def most(self) -> float:
        """An upper bound of the exponent: 0 for `min(1, s)`, inf if no bound is known."""
        most = self.exponent
        for atom, power in self.factors:
            # `min(1, s)` is `1 / max(1, 1 / s)`: an inverse maximum, of which one member is static.
            least = next((m.exponent for m in atom.members if m.is_static), None)
            if power != -1 or least is None:
                return math.inf
            most -= min(least, atom.limit)
        return most

    @property
    def may_leave_range(self) -> bool:
        """Whether `limit` lets the scale leave the range of scales, `2**+-MAX_EXPONENT`."""
        return self.limit > MAX_EXPONENT

    @functools.cached_property
    def extent(self) -> float:
        """How far the data is expected to be from 1, in octaves, if the values are close to 1.

        The extents of the atoms add up. Traced scalars are left out, because their own data is
        close to 1. Static factors within `2**+-24` are left out too. A larger static factor counts,
        because it may belong to a constant that `select_n` did not choose, as in `hypot`.
        """
        if self.is_static:
            return self.span
        factors = sum(0 if a.is_number else a.extent * abs(power) for a, power in self.factors)
        return factors + (abs(self.exponent) if abs(self.exponent) > _SMALL_EXPONENT else 0)

    @functools.cached_property
    def span(self) -> float:
        """How far the scale itself is expected to be from 1, in octaves: every factor counts."""
        if self.is_zero:
            return 0
        return abs(self.exponent) + sum(a.extent * abs(power) for a, power in self.factors)

    @property
    def value(self) -> float:
        """The value of a static scale as a Python float."""
        if not self.is_static:
            raise ValueError("The value of a dynamic scale is not known while tracing.")
        return 0.0 if self.is_zero else math.ldexp(1.0, int(self.exponent))

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """`()`, or a shape of the data's rank, with each dim 1 or equal to the data's."""
        shapes = (atom.shape for atom, _ in self.factors)
        return jnp.broadcast_shapes(*shapes)  # pyright: ignore[reportReturnType]

    @property
    def ndim(self) -> int:
        """The rank of the scale."""
        return len(self.shape)

    @property
    def array(self) -> Any:
        """The scale as an array of the scale dtype; a static scale as a float32 NumPy scalar."""
        if self.is_static:
            return np.float32(self.value)
        return self.table.request(self)

    def __float__(self) -> float:
        return self.value

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.array)

    def __mul__(self, other: Any) -> Scale:
        other = Scale.of(other)
        if self.is_zero or other.is_zero:
            return ZERO
        powers = dict(self.factors)
        for atom, power in other.factors:
            powers[atom] = powers.get(atom, 0) + power
        return Scale(self.exponent + other.exponent, sorted_factors(powers))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Scale:
        return self * Scale.of(other) ** -1

    def __rtruediv__(self, other: Any) -> Scale:
        return Scale.of(other) * self**-1

    def __pow__(self, power: int) -> Scale:
        if power == 0 or (self.is_zero and power < 0):  # 0 to a negative power counts as 1
            return ONE
        return Scale(self.exponent * power, tuple((atom, power * p) for atom, p in self.factors))

    def renamed(self, scale_of: Callable[[Any], Scale]) -> Scale:
        """Return the same product with each factor replaced by `scale_of(factor)`."""
        scale = Scale(self.exponent)
        for factor, power in self.factors:
            scale *= scale_of(factor) ** power
        return scale

    def maximum(self, other: Any) -> Scale:
        """Return the larger of two scales, the scale of a sum."""
        return join(self, Scale.of(other))

    def root(self, degree: int) -> tuple[Scale, Scale]:
        """Split into `(root, rest)` with `root**degree * rest == self`, `1 <= rest < 2**degree`.

        The square root of `2**-5` splits into `2**-3` and `2**1`.
        """
        if self.is_zero:
            return ZERO, ONE
        # `sqrt(a**2 * b)` is `a * sqrt(b)`: whether the exponent of `b` is even is not known yet.
        whole = {atom: p // degree for atom, p in self.factors if p % degree == 0}
        broken = tuple((atom, p) for atom, p in self.factors if p % degree)
        if not broken:
            quotient, rest = divmod(int(self.exponent), degree)
            return Scale(quotient, sorted_factors(whole)), Scale(rest)
        scale = Scale(self.exponent, broken)
        root, rest = (Computed((scale,), degree, is_rest) for is_rest in (False, True))
        root = self.table.computed(root, math.ceil(scale.span / degree))
        return root * Scale(0, sorted_factors(whole)), self.table.computed(rest, degree)

    def settled(self) -> Scale:
        """Return one atom for a monomial of many factors; any other scale unchanged.

        Without this, each later maximum would add up all factors again.
        """
        return self if len(self.factors) <= _MAX_FACTORS else self._as_atom()

    def _as_atom(self) -> Scale:
        return self.table.computed(Computed((self,), limit=math.inf), self.extent)

    def bounded(self, limit: int = MAX_EXPONENT) -> Scale:
        """Return the scale with its exponent clamped to `+-limit`: `2**126` for `2**140`.

        The data is multiplied by the rest, here `2**14`. The scale 0 stays 0.
        """
        if not self.is_static:
            return self.table.computed(Computed((self,), limit=limit), min(limit, self.span))
        return self if self.is_zero else Scale(max(-limit, min(limit, self.exponent)))

    def or_one(self) -> Scale:
        """Return the scale, with 1 where it is 0 at run time: 0 times an infinity would be nan."""
        if self.is_nonzero:
            return self
        # Two inversions turn 0 into 1, because a 0 to a negative power counts as 1.
        return ONE if self.is_zero else (self**-1)._as_atom() ** -1

    def map(self, function: Callable[[jax.Array], jax.Array]) -> Scale:
        """Apply a function, such as a transpose, to the array. A scalar scale is unchanged."""
        if self.ndim == 0:
            return self
        # No float32 array holds a scale of 2**140: it is mapped in two parts.
        within, atom = self.bounded() if self.may_leave_range else self, self.table.atom
        mapped, rest = atom(function(within.array), extent=int(within.extent)), self / within
        if rest.is_one:
            return mapped
        extent = max(MAX_EXPONENT, int(rest.extent))
        return mapped * atom(function(rest.array), extent=extent)

    @property
    def largest(self) -> Scale:
        """The maximum over all axes, as a scalar scale."""
        return self.map(lambda array: jnp.max(array, initial=0))


@dataclasses.dataclass(frozen=True)
class Computed:
    """A scale that is computed from other scales.

    It is one of the following:

    - the maximum of several monomials, with an exponent of at most `limit`;
    - one monomial, with its exponent clamped to `+-limit` unless it is 0;
    - the root of a monomial (`degree > 1`), or, if `is_rest`, its rest:
      `root**degree * rest == monomial` with `1 <= rest <= 2**(degree - 1)`;
    - if `is_held`, the first of two terms; where it is 0, the second term, clamped to `+-limit`.
    """

    terms: tuple[Scale, ...]
    degree: int = 1
    is_rest: bool = False
    limit: float = MAX_EXPONENT
    is_held: bool = False

    @property
    def is_maximum(self) -> bool:
        """Whether it is the maximum of several monomials."""
        return self.degree == 1 and len(self.terms) > 1 and not self.is_held

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of an atom of this scale: see `Atom`."""
        known: dict[str, Any] = dict(
            nonzero=self.is_rest or any(t.is_nonzero for t in self.terms), limit=self.limit
        )
        if self.is_held:
            return known | dict(holds=self.terms[0], limit=max(self.limit, self.terms[0].limit))
        if self.degree == 1:
            # A maximum is 0 only if all its terms are.
            known["vanishes"] = frozenset.intersection(*(t.vanishes for t in self.terms))
        if self.is_maximum:  # it is clamped from above only, and is at least as large as each term
            known["limit"] = max(self.limit, min(t.limit for t in self.terms))
        return known

    @property
    def settings(self) -> tuple[Any, ...]:
        """How the exponent follows from the maximum of the terms: see `outcome`."""
        # Single monomials and held scales are clamped from below too; maxima are not.
        low = -math.inf if self.is_maximum else -self.limit
        return low, self.limit, self.degree, self.is_rest, self.is_held


ONE = Scale(0)
ZERO = Scale(-math.inf)


def sorted_factors(powers: dict[Any, int]) -> tuple[tuple[Any, int], ...]:
    """Return the factors of a monomial in the order of their atoms, without zero powers."""
    kept = [(a, p) for a, p in powers.items() if p]
    return tuple(sorted(kept, key=lambda f: f[0].index if isinstance(f[0], Atom) else f[0]))


def without_smaller(scales: Iterable[Scale]) -> list[Scale]:
    """Drop the scale 0, and scales that are smaller than another scale by a static factor."""
    largest: dict[tuple, float] = {}
    for scale in scales:
        if not scale.is_zero:
            largest[scale.factors] = max(scale.exponent, largest.get(scale.factors, -math.inf))
    return [Scale(exponent, factors) for factors, exponent in largest.items()]


def join(*scales: Scale, narrow: bool = False) -> Scale:
    """Return the maximum of scales, the power of two that `sqrt(a**2 + b**2)` rounds down to.

    Monomials that differ by a static factor are compared while tracing: `max(a, 4 * a)` is `4 * a`.
    So are monomials with a static bound: `max(1, min(1, s))` is 1. Equal sets of scales give the
    same atom, which is computed once. If `narrow`, the data is float16 or FP8, and the extent of
    the maximum is at most `NARROW_EXTENT`.
    """
    terms = without_smaller(scales)
    static = max((t.exponent for t in terms if t.is_static), default=-math.inf)
    terms = [t for t in terms if t.is_static or t.most > static]
    if len(terms) < 2:
        return terms[0] if terms else ZERO
    return next(t for t in terms if t.factors).table.maximum(terms, narrow)


def meet(*scales: Scale) -> Scale:
    """Return the minimum of scales. A static 0 does not count; a 0 at run time counts as 1."""
    inverses = [scale**-1 for scale in scales if not scale.is_zero]
    return join(*inverses) ** -1 if inverses else ZERO
