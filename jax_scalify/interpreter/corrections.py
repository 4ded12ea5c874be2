"""Static corrections of a calibration: powers of two that move between data and scale.

A rule's scale is an estimate. If a calibration (`numerics/calibrating.py`) has found the data of a
value far from 1, the data is multiplied by `2**-k` and the scale by `2**k`. `k` is known while
tracing, so the factor joins the rule's own factor in the same kernel, and no statistic is computed.
Rules whose results may be larger than their operands multiply before they round (`Pending`), so
that the data neither overflows nor underflows. Results of other rules are multiplied afterwards.
Values without a correction add no equations.

Example: a matmul's float16 data has the amax 2**14, and the correction is `k = 12`. The rule
multiplies its float32 total by a further `2**-12`, and rounds data with the amax 2**2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.interpreter.context import Pending, RuleContext
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.value import Value
from jax_scalify.scales.algebra import Scale

# Returns the correction of a value while tracing, given its name and the uncorrected value.
Chooser = Callable[[str, Operand], Scale]


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """The corrections of one equation of the user's function.

    Attributes:
        eqn: the equation. The reference keeps its id valid.
        names: the names of its results; empty if they are not needed.
        exponents: the exponents of the corrections of its results; empty without corrections.
        inside: the places of the equations in its jaxprs, by the id of the equation.
    """

    eqn: Any
    names: tuple[str, ...] = ()
    exponents: tuple[int, ...] = ()
    inside: Mapping[int, Place] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Corrections:
    """The hook of `evaluate` that corrects the equations of a jaxpr.

    Attributes:
        places: the places by the id of the equation.
        choose: a function that chooses the corrections while tracing; None to take them from
            `places`.
    """

    places: Mapping[int, Place]
    choose: Chooser | None = None

    def place(self, eqn: Any) -> Place:
        """Return the place of an equation; without corrections if it is unknown."""
        return self.places.get(id(eqn)) or Place(eqn)

    def before(self, ctx: RuleContext) -> RuleContext:
        """Return an equation's context with the correction of its only result, if it is known.

        If the equation `rounds`, its operand is corrected instead of its result.
        """
        place = self.place(ctx.eqn)
        ctx = dataclasses.replace(ctx, hook=dataclasses.replace(self, places=place.inside))
        if rounds(ctx.eqn):
            return dataclasses.replace(ctx, inputs=tuple(self._corrected(place, ctx.inputs)))
        # `choose` must see the result before it is corrected: `after` corrects it.
        is_known = self.choose is None and len(place.exponents) == 1
        return dataclasses.replace(ctx, pending=Pending(place.exponents[0] if is_known else 0))

    def after(self, ctx: RuleContext, outputs: list[Value], jaxpr: Any) -> list[Value]:
        """Return an equation's results, corrected unless this was done before it rounded."""
        is_done = ctx.pending.taken or rounds(ctx.eqn)
        return outputs if is_done else self._corrected(self.place(ctx.eqn), outputs)

    def _corrected(self, place: Place, values: Sequence[Value]) -> list[Value]:
        out, choose = list(values), self.choose
        for i in range(len(place.exponents if choose is None else place.names)):
            value = out[i]
            if not isinstance(value, Operand) or value.scale.is_zero:
                continue
            found = Scale(place.exponents[i]) if choose is None else choose(place.names[i], value)
            if not found.is_one:
                out[i] = value.with_scale(value.scale * found)
        return out


class Calibrated(Protocol):
    """The interface of a calibration that `scalify` uses."""

    def corrections(self, closed: Any, arguments: Sequence[str]) -> Corrections | None:
        """Return the corrections of a traced function, given the names of its arguments."""
        ...

    def scale_of(self, argument: str) -> int | None:
        """Return the exponent of the calibrated scale of an argument; None if it has no scale."""
        ...


def rounds(eqn: Any) -> bool:
    """Return whether an equation is a cast to a narrow dtype that has fewer bits."""
    if traits_of(eqn.primitive.name).elements != "cast" or len(eqn.outvars) != 1:
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    real = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return real and dtypes.is_narrow(after) and jnp.finfo(after).bits < jnp.finfo(before).bits
