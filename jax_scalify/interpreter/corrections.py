"""Static corrections of an interpretation: powers of two that move between data and scale.

A rule's scale is an estimate. Where a calibration (`numerics/calibrating.py`) has found the data of
a value far from 1, its data is multiplied by `2**-k` and its scale by `2**k`, with a `k` that is
known while tracing: next to the rule's own factor, in the same kernel, and without any statistic.
Rules whose results may be larger than their operands multiply before they round (`Pending`), so
that what would overflow or vanish does not; the result of any other rule is multiplied as it is.
Without a correction nothing is added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.value import Value
from jax_scalify.scales.algebra import Scale

# Chooses a correction while tracing, given the name and the value without it.
Chooser = Callable[[str, Operand], Scale]


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """An equation of the user's function, as a plan of corrections knows it.

    Attributes:
        eqn: the equation; it is kept, and so its id.
        names: of its results; empty where nobody asks for them.
        exponents: of the corrections of its results; empty for none.
        inside: the equations that it holds, by id.
    """

    eqn: Any
    names: tuple[str, ...] = ()
    exponents: tuple[int, ...] = ()
    inside: Mapping[int, Place] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Pending:
    """The correction of an equation's result, for its rule to apply before it rounds.

    Attributes:
        exponent: the data is to be divided by two to that, and the scale to be multiplied.
        taken: whether the rule has.
    """

    exponent: int = 0
    taken: bool = False

    def take(self) -> int:
        """Return the exponent to a rule that applies it; 0 if nothing is asked for."""
        self.taken = self.exponent != 0
        return self.exponent


@dataclasses.dataclass(frozen=True, eq=False)
class Corrections:
    """The corrections of the equations of one jaxpr, and of those that they hold.

    Attributes:
        places: by the id of the equation.
        choose: chooses corrections while tracing, instead of those of `places`.
    """

    places: Mapping[int, Place]
    choose: Chooser | None = None

    def inside(self, eqn: Any) -> Corrections | None:
        """The corrections of what an equation holds, if there are any."""
        place = self.places.get(id(eqn))
        return Corrections(place.inside, self.choose) if place and place.inside else None

    def names(self, eqn: Any) -> tuple[str, ...]:
        """The names of an equation's results; none for an equation that the plan does not know."""
        place = self.places.get(id(eqn))
        return place.names if place else ()

    def of_operands(self, eqn: Any, values: Sequence[Value]) -> list[Value]:
        """The operands of an equation: a cast's is multiplied before it is rounded."""
        return self._corrected(eqn, values) if rounds(eqn) else list(values)

    def pending(self, eqn: Any) -> Pending:
        """The correction of an equation's only result, if it is known before that is computed."""
        place = self.places.get(id(eqn))
        known = place is not None and self.choose is None and not rounds(eqn)
        exponents = place.exponents if place is not None and known else ()
        return Pending(exponents[0] if len(exponents) == 1 else 0)

    def of_results(self, eqn: Any, values: Sequence[Value], pending: Pending) -> list[Value]:
        """The results of an equation."""
        return list(values) if pending.taken or rounds(eqn) else self._corrected(eqn, values)

    def _corrected(self, eqn: Any, values: Sequence[Value]) -> list[Value]:
        place, out = self.places.get(id(eqn)), list(values)
        if place is None:
            return out
        choose = self.choose
        for i in range(len(place.exponents if choose is None else place.names)):
            value = out[i]
            if not isinstance(value, Operand) or value.number is not None or value.scale.is_zero:
                continue
            found = Scale(place.exponents[i]) if choose is None else choose(place.names[i], value)
            if not found.is_one:
                out[i] = value.with_scale(value.scale * found)
        return out


class Calibrated(Protocol):
    """What `scalify` asks of a calibration."""

    def corrections(self, closed: Any, arguments: Sequence[str]) -> Corrections | None:
        """The corrections of a traced function, given the names of its arguments."""
        ...

    def scale_of(self, argument: str) -> int | None:
        """The exponent of the scale that an argument is calibrated with; None if it has none."""
        ...


def rounds(eqn: Any) -> bool:
    """Tell whether an equation is a cast to fewer bits, of a shorter range than float32's."""
    if traits_of(eqn.primitive.name).elements != "cast" or len(eqn.outvars) != 1:
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    real = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return real and dtypes.has_short_range(after) and _bits(after) < _bits(before)


def _bits(dtype: Any) -> int:
    return jnp.finfo(dtype).bits
