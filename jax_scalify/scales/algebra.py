"""The algebra of scales.

Inside the transform a scale is a `Scale`: a static power of two times a monomial of *atoms*, the
arrays that are only known at run time. Products, quotients and even roots of scales are computed
symbolically while tracing, so that a chain of them costs nothing and equal scales are known to be
equal. An array is made of a scale only where data has to be multiplied by it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.base import dtypes
from jax_scalify.base.pow2 import MAX_EXPONENT, floor_exponent, is_power_of_two

_MAX_FACTORS = 3

# The exponents that scales are expected to have: of arrays that are given, and of what is computed.
# Nothing is wrong beyond, but float32 data that is as far from 1 may leave its range.
GIVEN_EXTENT = 40
LARGEST_EXTENT = 42
NARROW_EXTENT = 20  # float16 data cannot be farther from 1
_SMALL_EXPONENT = 24


class Table(Protocol):
    """What the algebra asks of the table that its atoms belong to: `scales/table.py` has one."""

    def atom(self, array: jax.Array, **known: Any) -> Scale:
        """Make a scale of an array."""
        ...

    def request(self, scale: Scale) -> jax.Array:
        """Make the array of a monomial."""
        ...

    def settled(self, scale: Scale) -> tuple[Scale, Scale]:
        """Compute a monomial; see `Scale.settled`."""
        ...

    def bounded(self, scale: Scale, limit: int) -> tuple[Scale, Scale]:
        """Split a monomial; see `Scale.bounded`."""
        ...

    def maximum(self, terms: list[Scale], narrow: bool = False) -> Scale:
        """The maximum of monomials that are not multiples of each other."""
        ...

    def root(self, scale: Scale, degree: int) -> tuple[Scale, Scale]:
        """Root and rest of a monomial that has no symbolic root; see `Scale.root`."""
        ...

    def alignment(self, ratio: Scale) -> Scale:
        """The ratio of a scale to a maximum that it is one of."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Atom:
    """A scale that is known at run time only: an array of powers of two (or 0).

    Its array has shape `()`, or the rank of the data with every dim 1 or equal to the data's.

    Attributes:
        table: that of its trace.
        index: atoms are ordered as they were made.
        source: its array; None if a scale program computes it.
        number: what the scale program calls it; None if it is not scalar or there is no program.
        members: the monomials of which this atom is the maximum.
        nonzero: whether it is known not to be 0.
        extent: its exponent is expected within `+-extent`, and the data that it belongs to may be
            as far from 1 in the other direction.
        is_number: it is the exponent of a traced scalar, whose data is close to 1.
        limit: its exponent is within `+-limit`, whatever the values are.
        holds: the scale that it is, wherever that is not 0.
        vanishes: the atoms of which each makes it 0 where it is 0 itself.
    """

    table: Table
    index: int
    source: jax.Array | None = None
    number: int | None = None
    members: frozenset[tuple] = frozenset()
    nonzero: bool = False
    extent: int = GIVEN_EXTENT
    is_number: bool = False
    limit: float = MAX_EXPONENT
    holds: Scale | None = None
    vanishes: frozenset[Atom] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its array."""
        return () if self.source is None else self.source.shape

    @property
    def array(self) -> jax.Array:
        """Its array, to be computed if need be."""
        return self.table.request(Scale.of_factor(self)) if self.source is None else self.source


@dataclasses.dataclass(frozen=True)
class Scale:
    """`2**exponent * prod(atom**power)`; the exponent `-inf` is the scale 0, "any scale will do".

    Supports `*`, `/`, integer `**`, `maximum` and powers of two as plain numbers. `scale.array`
    and `jnp.asarray(scale)` make an array of it.

    Where a scale is described for another trace, or for a scale program, each atom is a number.
    """

    exponent: float
    factors: tuple[tuple[Any, int], ...] = ()

    @classmethod
    def of_factor(cls, factor: Atom | int) -> Scale:
        """Make the scale that is an atom, or the number of one."""
        return cls(0, ((factor, 1),))

    @classmethod
    def of(cls, value: Any) -> Scale:
        """Make a static scale of a concrete power of two or 0."""
        if isinstance(value, Scale):
            return value
        if float(value) == 0.0:
            return ZERO
        if not is_power_of_two(value):
            raise ValueError(f"`scale` must be a power of two or 0, got {value!r}.")
        return cls(floor_exponent(value))

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
        """Whether the scale is known not to be 0 at run time; 0 is inverted as if it were 1."""
        return not self.is_zero and all(atom.nonzero or p < 0 for atom, p in self.factors)

    @functools.cached_property
    def vanishes(self) -> frozenset[Atom]:
        """The atoms of which each makes the scale 0 where it is 0 itself."""
        own = [atom for atom, power in self.factors if power > 0]
        return frozenset(own).union(*(atom.vanishes for atom in own))

    @functools.cached_property
    def limit(self) -> float:
        """The exponent is within `+-limit`, whatever the values are."""
        if self.is_zero:
            return 0
        return abs(self.exponent) + sum(a.limit * abs(power) for a, power in self.factors)

    @functools.cached_property
    def most(self) -> float:
        """The exponent is no larger; inf if no such number is known. Known of `min(1, s)`."""
        most = self.exponent
        for atom, power in self.factors:
            least = dict(atom.members).get(())
            if power != -1 or least is None:
                return math.inf
            most -= min(least, atom.limit)
        return most

    @property
    def may_leave_range(self) -> bool:
        """Whether the exponent may be beyond that of a scale: a product, power or multiple."""
        return self.limit > MAX_EXPONENT

    @functools.cached_property
    def extent(self) -> float:
        """How far the data may be from 1, in octaves, if its values are not: see `Atom`.

        A large static factor may be that of a constant whose array was not chosen, as in `hypot`;
        a small one is shared by data and values, or as good as 1.
        """
        if self.is_static:
            return 0 if self.is_zero else abs(self.exponent)
        factors = sum(0 if a.is_number else a.extent * abs(power) for a, power in self.factors)
        return factors + (abs(self.exponent) if abs(self.exponent) > _SMALL_EXPONENT else 0)

    @functools.cached_property
    def span(self) -> float:
        """How far the scale may be from 1, in octaves, static factors and numbers included."""
        if self.is_static:
            return self.extent
        return abs(self.exponent) + sum(a.extent * abs(power) for a, power in self.factors)

    @property
    def value(self) -> float:
        """The static scale as a Python float."""
        if not self.is_static:
            raise ValueError("The value of a dynamic scale is not known while tracing.")
        return 0.0 if self.is_zero else math.ldexp(1.0, int(self.exponent))

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """`()`, or a shape of the data's rank whose dims are 1 or the data's."""
        shapes = (atom.shape for atom, _ in self.factors)
        return jnp.broadcast_shapes(*shapes)  # pyright: ignore[reportReturnType]

    @property
    def ndim(self) -> int:
        """Rank of the scale."""
        return len(self.shape)

    @property
    def array(self) -> Any:
        """The scale as an array of the scale dtype; a static one as a NumPy scalar."""
        if self.is_static:
            return np.float32(self.value)
        return self.factors[0][0].table.request(self)

    def __float__(self) -> float:
        return self.value

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.array)

    def __mul__(self, other: Any) -> Scale:
        other = as_operand(other)
        if self.is_zero or other.is_zero:
            return ZERO
        powers = dict(self.factors)
        for atom, power in other.factors:
            powers[atom] = powers.get(atom, 0) + power
        return Scale(self.exponent + other.exponent, sorted_factors(powers))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Scale:
        return self * as_operand(other) ** -1

    def __rtruediv__(self, other: Any) -> Scale:
        return as_operand(other) * self**-1

    def __pow__(self, power: int) -> Scale:
        if power == 0 or (self.is_zero and power < 0):  # where 0 is inverted it is read as 1
            return ONE
        return Scale(self.exponent * power, tuple((atom, power * p) for atom, p in self.factors))

    def renamed(self, scale_of: Callable[[Any], Scale]) -> Scale:
        """The same product of other scales: `scale_of` gives one for each factor."""
        scale = Scale(self.exponent)
        for factor, power in self.factors:
            scale *= scale_of(factor) ** power
        return scale

    def maximum(self, other: Any) -> Scale:
        """The larger of two scales: that of a sum."""
        return join(self, as_operand(other))

    def root(self, degree: int) -> tuple[Scale, Scale]:
        """Split into `(root, rest)` with `root**degree * rest == self` and `rest` small."""
        if self.is_zero:
            return ZERO, ONE
        whole = {atom: p // degree for atom, p in self.factors if p % degree == 0}
        broken = tuple((atom, p) for atom, p in self.factors if p % degree)
        if not broken:
            quotient, rest = divmod(int(self.exponent), degree)
            return Scale(quotient, sorted_factors(whole)), Scale(rest)
        table = broken[0][0].table
        root, rest = table.root(Scale(self.exponent, broken), degree)
        return root * Scale(0, sorted_factors(whole)), rest

    def settled(self) -> tuple[Scale, Scale]:
        """Compute a monomial of many factors: each join downstream would multiply them again.

        Returns `(scale, rest)`, of which the product is the monomial. The rest is 1 where scales
        are computed as exponents; an array holds no exponent beyond the range of scales.
        """
        if len(self.factors) <= _MAX_FACTORS:
            return self, ONE
        return self.factors[0][0].table.settled(self)

    def bounded(self, limit: int = MAX_EXPONENT) -> tuple[Scale, Scale]:
        """Split into `(bounded, rest)`, the first with an exponent within `+-limit`.

        A scale 2**140 is `2**126 * 2**14`: the rest is for the data to take.
        """
        if not self.is_static:
            return self.factors[0][0].table.bounded(self, limit)
        if self.is_zero:
            return self, ONE
        exponent = max(-limit, min(limit, self.exponent))
        return Scale(exponent), Scale(self.exponent - exponent)

    def or_one(self) -> Scale:
        """The scale, or 1 where it is 0 at run time: beside an infinity 0 would make nan."""
        if self.is_nonzero:
            return self
        if self.is_zero:
            return ONE
        inverse, rest = self.factors[0][0].table.settled(self**-1)
        return (inverse * rest) ** -1

    def map(self, function: Callable[[jax.Array], jax.Array]) -> Scale:
        """Send a scale that is not scalar through a structural function; a scalar one is kept."""
        if self.ndim == 0:
            return self
        within, rest = self.bounded() if self.may_leave_range else (self, ONE)
        return within._mapped(function) * rest._mapped(function, MAX_EXPONENT)

    def _mapped(self, function: Callable[[jax.Array], jax.Array], least: int = 0) -> Scale:
        if self.ndim == 0:
            return self
        return self.factors[0][0].table.atom(
            function(self.array), extent=max(least, int(self.extent))
        )


ONE = Scale(0)
ZERO = Scale(-math.inf)


def given_extent(dtype: Any) -> int:
    """The extent of the scale of an array of a dtype that is given."""
    return NARROW_EXTENT if dtypes.has_short_range(dtype) else GIVEN_EXTENT


def as_operand(value: Any) -> Scale:
    """Read a `Scale` or a concrete power of two."""
    return value if isinstance(value, Scale) else Scale.of(value)


def sorted_factors(powers: dict[Any, int]) -> tuple[tuple[Any, int], ...]:
    """The factors of a monomial in the order of their atoms, those to the power 0 left out."""
    return tuple(sorted(((a, p) for a, p in powers.items() if p), key=_order))


def _order(factor: tuple[Any, int]) -> int:
    return factor[0].index if isinstance(factor[0], Atom) else factor[0]


def join(*scales: Scale, narrow: bool = False) -> Scale:
    """Return the maximum: the power of two that `sqrt(a**2 + b**2)` rounds down to.

    Monomials that differ by a static factor are compared while tracing, as are those with a static
    bound: `max(1, min(1, s))` is 1. The maximum of the same set is the same atom, so that it is
    computed once. With `narrow` data, its exponent is expected within that of float16.
    """
    largest: dict[tuple, float] = {}
    for scale in scales:
        if not scale.is_zero:
            largest[scale.factors] = max(scale.exponent, largest.get(scale.factors, -math.inf))
    static = largest.get((), -math.inf)
    terms = [Scale(exponent, factors) for factors, exponent in largest.items()]
    terms = [t for t in terms if t.is_static or t.most > static]
    if not terms:
        return ZERO
    if len(terms) == 1:
        return terms[0]
    return next(t for t in terms if t.factors).factors[0][0].table.maximum(terms, narrow)


def meet(*scales: Scale) -> Scale:
    """Return the minimum. A static 0 has no say; one that only the run time knows counts as 1."""
    inverses = [scale**-1 for scale in scales if not scale.is_zero]
    return join(*inverses) ** -1 if inverses else ZERO


def alignment(scale: Scale, joined: Scale) -> Scale:
    """Return `scale / joined` for a maximum that `scale` is one of; 0 / 0 is any finite number."""
    ratio = scale / joined
    if ratio.is_static:
        return ratio
    return ratio.factors[0][0].table.alignment(ratio)
