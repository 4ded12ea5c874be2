"""The floating operand of a rule: an array, a scale, and what is known about the values.

Float16 and FP8 arrays hold data, `value / scale`. Arrays of wide dtypes hold the values themselves,
and the scale that the law gives is kept beside them. They are divided by this scale only when they
are cast to a narrow dtype or returned by the function. Arguments are the exception. They arrive as
data, and stay data while they are moved, cast, summed, or multiplied by a constant or a matrix.

Example: a float32 value 6 with the law's scale 4 has `source = 6`, `unit = 1` and `scale = 4`. Cast
to float16 it has `source = 1.5`, `unit = 4` and `scale = 4`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import ONE, Scale
from jax_scalify.scales.multiplying import multiply


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound of the elements of an array.

    Attributes:
        number: a lower bound if it is negative, an upper bound if it is positive.
        x: the array that was compared with the number; None if it belongs to another trace.
    """

    number: float
    # `==` of two operands would compare their elements, so `x` is left out of comparisons.
    x: Operand | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class OfGate:
    """What is known of an elementwise function of the source of a gate, outside of its body.

    Attributes:
        source: the variable of the body that the function is of.
        bound: how many times its scale the value is at most, 2 for a gate; 0 if it has no bound.
        ends: whether the value is constant for large sources.
        array: the array of the source, if the body got it as an argument in the same trace.
    """

    source: Any
    bound: int
    ends: bool
    array: Any = dataclasses.field(default=None, compare=False)

    def has_source_of(self, other: OfGate) -> bool:
        """Return whether two values are functions of one source."""
        # Two calls of one function have the same variables, and different arrays.
        known = self.array is not None and other.array is not None
        return self.array is other.array if known else self.source is other.source


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about the elements of a value.

    Attributes:
        nonneg: no element is negative.
        computed: the elements were computed, not given to the function as an argument. Computed
            values may be correlated, so a product of two need not have mean 0.
        peaked: the elements are exponentials, or a mask that was cast, in a narrow dtype. One
            element may be as large as the sum of all others, and the dtype does not hold both
            extremes.
        sums: how many sums over axes, such as matmuls, were added to give the value; 0 if the value
            is not a sum of such sums.
        bound: the bound of the elements after the first half of `clip`; of a condition such as
            `x > 1`, the bound of `x` where it is false. None if there is no bound.
        constant: the size of the largest constant that was written among the elements, or of its
            product with an array. At the value's scale, the data of this constant may be near the
            largest number of the dtype. A static size may lie between two powers of two. None if
            there is no constant.
        gate, leads: the value is a gate, or the larger term of a gate's derivative: see
            `interpreter/gates.py`.
        of_gate: the value left a body in which it was computed from the source of a gate.
    """

    nonneg: bool = False
    computed: bool = False
    peaked: bool = False
    sums: int = 0
    bound: Bound | None = None
    constant: Scale | None = None
    gate: bool = False
    leads: bool = False
    of_gate: OfGate | None = None

    def outside_of_trace(self) -> Facts:
        """Return what is known in every trace: no array, and no size with a dynamic scale."""
        constant = self.constant if self.constant and self.constant.is_static else None
        bound = Bound(self.bound.number) if self.bound else None
        of_gate = dataclasses.replace(self.of_gate, array=None) if self.of_gate else None
        return dataclasses.replace(self, constant=constant, bound=bound, of_gate=of_gate)

    def join(self, other: Facts) -> Facts:
        """Return what is known about a value that may be either of two values."""
        return Facts(
            # Promises, such as `nonneg`, must hold for both values. `computed` and `peaked` are
            # reasons for caution, for which one of the values is enough.
            self.nonneg and other.nonneg,
            self.computed or other.computed,
            self.peaked or other.peaked,
            self.sums if self.sums == other.sums else 0,
            self.bound if self.bound == other.bound else None,
            largest([self.constant, other.constant]),
            self.gate and other.gate,
            self.leads and other.leads,
            self.of_gate if self.of_gate == other.of_gate else None,
        )


def largest(sizes: Iterable[Scale | None]) -> Scale | None:
    """Return the largest size that is not None; None if there is no size."""
    known = comparable_sizes(size for size in sizes if size is not None)
    return algebra.join(*known) if known else None


def comparable_sizes(sizes: Iterable[Scale]) -> list[Scale]:
    """Return sizes that may be compared at run time, rounded up if one of them is dynamic.

    The size of the constant 3 is 2**1.58. An atom is a power of two, so no fraction may become a
    part of it.
    """
    sizes = list(sizes)
    if all(size.is_static for size in sizes):
        return sizes
    return [s if s.is_zero else Scale(math.ceil(s.exponent), s.factors) for s in sizes]


NOTHING = Facts()


def ratio_of(unit: Scale, scale: Scale) -> Scale:
    """Return `unit / scale`, which turns an array of this unit into data; 1 if `unit` is 0."""
    return ONE if unit.is_zero else unit / scale


class Operand(ScaledArray):
    """A `ScaledArray` inside the transform: values, a scale, and what is known about the values.

    `value = source * unit` and `data = source * unit / scale`. In a narrow dtype `unit == scale`,
    and the source is the data. In a wide dtype the unit is usually 1, and the source is the value.
    The properties `data` and `value` multiply the source on first use, if they must.

    Attributes:
        source: an array, or a 0-d number that stands for an array of equal elements.
        scale: the `Scale` that the law gives.
        unit: the `Scale` of the source. A unit with axes is always the operand's scale.
        origin, mantissa: the value is `mantissa * 2**k` times the source `origin`.
        home: the scale of the leaf of the state that the value is a multiple of: see
            `interpreter/homes.py`. None if it is not a multiple of exactly one leaf.
        returns: whether the value is a sum that replaces this leaf, and leaves the function at the
            leaf's scale.
        number: the 0-d plain value that every element equals: a NumPy scalar for a constant, or a
            traced array. None if elements may differ.
        facts: what is known about the elements.
        depth: how many alignments XLA may fuse into a kernel that reads the value: see
            `interpreter/survey.py`.
        declared: the dtype in the program, if the source is float32 instead: see
            `interpreter/survey.py`. Otherwise None.
        fits: whether a cast of the data to the dtype in the program need not saturate: no element
            is larger than the largest number of the dtype, or the data is a sum, which becomes
            infinite as the result of a matmul does.
    """

    is_scaled = is_scalable = True
    known_scale = None

    source: Any
    unit: Scale
    origin: Any
    mantissa: float
    home: Scale | None
    returns: bool
    number: Any
    facts: Facts
    depth: int
    declared: Any
    fits: bool
    # It has the source at other units, so that all readers of `data` share one multiplication.
    _made: dict[Scale, Any]

    def __init__(
        self,
        source: Any,
        scale: Any,
        *,
        unit: Scale | None = None,
        home: Scale | None = None,
        number: Any = None,
        facts: Facts = NOTHING,
        declared: Any = None,
        fits: bool = True,
    ):
        # The dataclass is frozen, so fields are set in `vars`. `is_static` is a property here.
        fields = dict(source=source, scale=scale, unit=scale if unit is None else unit)
        known = dict(home=home, number=number, facts=facts, declared=declared, fits=fits)
        vars(self).update(
            fields, **known, depth=0, returns=False, origin=source, mantissa=1.0, _made={}
        )

    @classmethod
    def of(cls, x: ScaledArray) -> Operand:
        """Return `x` as an operand."""
        return x if isinstance(x, Operand) else cls(x.data, x.scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data; `()` for a number that stands for an array."""
        return self.source.shape

    @property
    def dtype(self) -> Any:
        """The dtype in the program."""
        return self.source.dtype if self.declared is None else self.declared

    @property
    def is_widened(self) -> bool:
        """Whether the data is float32 instead of the dtype in the program."""
        return self.declared is not None

    @property
    def holds_data(self) -> bool:
        """Whether the source is the data."""
        return self.unit == self.scale

    @property
    def constant(self) -> Any:
        """The value of every element, if it is known while tracing; otherwise None."""
        return self.number if isinstance(self.number, np.generic) else None

    @property
    def sharding(self) -> Any:
        """The sharding of the data."""
        return getattr(jax.typeof(self.source), "sharding", None)

    @property
    def is_static(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the scale is known while tracing."""
        return self.scale.is_static

    @property
    def data(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The array `value / scale`."""
        return self.source if self.holds_data else self._once(self.scale)

    @property
    def value(self) -> Any:
        """The array of values. Only for wide dtypes: a narrow dtype may not hold them."""
        return self.source if self.unit.is_one else self._once(ONE)

    def _once(self, unit: Scale) -> Any:
        """Return `value / unit`, memoised if it belongs to the trace of `source`."""
        made = self._made.get(unit)
        if made is None:
            made = self.at_unit(unit, self.source.dtype)
            if _compat.is_of_one_trace(made, self.source):  # a rule may have opened an inner trace
                self._made[unit] = made
        return made

    @property
    def at_scalar_unit(self) -> tuple[Any, Scale]:
        """The source and its unit; if the unit has axes, the array of values and 1.

        Used for results whose unit is not their scale. Rules that move elements also move the axes
        of the scale, but not the axes of a separate unit.
        """
        return (self.value, ONE) if self.unit.ndim else (self.source, self.unit)

    def at_unit(self, unit: Scale, dtype: Any = None, **options: Any) -> Any:
        """Return the array `value / unit`; `options` are passed to `multiply`."""
        return multiply(self.source, ratio_of(self.unit, unit), dtype, **options)

    def to_array(self, dtype: Any = None) -> Any:
        """Return the array of values in a dtype, by default the operand's."""
        return self.at_unit(ONE, self.dtype if dtype is None else dtype)

    def unit_at(self, scale: Scale) -> Scale:
        """Return the unit of the moved source, given the operand's moved scale."""
        return scale if self.holds_data else self.unit

    def known(self, **fields: Any) -> Operand:
        """Return the same array with other fields: facts, number, depth, home, origin."""
        x = Operand.__new__(Operand)
        vars(x).update(vars(self), **fields)
        return x

    def as_pair(self, data: Any, scale: Any, unit: Scale | None = None, **fields: Any) -> Operand:
        """Return the same values as another pair of data and scale. The data may be float32."""
        is_widened = dtypes.is_narrow(self.dtype) and dtypes.is_wide(data.dtype)
        # Float32 data may be larger than the narrow dtype holds, so a later cast must saturate.
        fields |= dict(declared=self.dtype if is_widened else None, fits=not is_widened)
        unit = scale if unit is None else unit
        return self.known(source=data, scale=scale, unit=unit, _made={}, **fields)

    def with_scale(self, scale: Scale) -> Operand:
        """Return the same values at another scale."""
        if scale is self.scale:
            return self
        if dtypes.is_narrow(self.dtype):
            return self.as_pair(self.at_unit(scale, self.source.dtype), scale)
        # A unit with axes must be the scale. If the scale changes, the source becomes the values.
        if self.unit.ndim and self.holds_data:
            return self.known(source=self.value, scale=scale, unit=ONE, _made={})
        # A wide source keeps its unit. Its scale counts in casts to narrow dtypes and in results.
        return self.known(scale=scale, _made={})

    def moved(self, source: Any, scale: Scale) -> Operand:
        """Return the operand of a moved source (transposed, sliced, cast) and its moved scale."""
        # The elements have other places, so the origin is a new one: `x * x[::-1]` is no square.
        return self.as_pair(source, scale, self.unit_at(scale), origin=source, mantissa=1.0)
