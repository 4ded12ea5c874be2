"""What a rule gets for a floating operand: an array, its scale, and what is known of the values.

Data of float16 and FP8 is `value / scale`. A value of a wider dtype is an array of the value
itself: the law's scale goes beside it, and nothing is multiplied until a cast to a narrow dtype or
a result of the function asks for data at that scale. What was given as data stays data as long as
it is only moved, cast, summed, or multiplied by a constant or another matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.scales.algebra import ONE, Scale
from jax_scalify.scales.multiplying import multiply


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of the elements of a value.

    Attributes:
        nonneg: none is negative.
        computed: they were made of other values, and not given to the function as they are. They
            may be correlated with other computed values: a product of the two need not have mean 0.
        peaked: they are exponentials, or a mask, in a dtype of short range: one of them may be as
            large as all others together, and the range does not hold both ends.
        sums: how many sums over other axes, as of a matmul, were added up to it; else 0.
        bound: none is below it if it is negative, and none above if it is positive: the result of
            the first half of `clip`; else None.
        constant: `log2` of the largest constant that was put among them, whose data may be nearly
            as large as the dtype's; else None.
        gate, leads: a bounded function of what they multiply, and the larger term of its
            derivative: see `interpreter/gates.py`.
    """

    nonneg: bool = False
    computed: bool = False
    peaked: bool = False
    sums: int = 0
    bound: float | None = None
    constant: float | None = None
    gate: bool = False
    leads: bool = False

    def join(self, other: Facts) -> Facts:
        """What is known of a value that may be either of two."""
        return Facts(
            self.nonneg and other.nonneg,
            self.computed or other.computed,
            self.peaked or other.peaked,
            self.sums if self.sums == other.sums else 0,
            self.bound if self.bound == other.bound else None,
            largest([self.constant, other.constant]),
            self.gate and other.gate,
            self.leads and other.leads,
        )


def largest(numbers: Iterable[float | None]) -> float | None:
    """The largest of those that are known, if any is."""
    return max((n for n in numbers if n is not None), default=None)


NOTHING = Facts()


class Operand(ScaledArray):
    """A `ScaledArray` inside the transform: values, a scale, and what is known of the values.

    The values are `source * unit`, and `data` is `source * unit / scale`. An array of a narrow
    dtype has its scale for a unit; a value of a wide one has the unit 1. A rule that asks for
    `data` or `value` gets that array, multiplied if need be.

    Attributes:
        source: an array, or a number that stands for an array of equal elements.
        scale: the `Scale` that the law gives.
        unit: the `Scale` that the source has; if it lies along an axis, it is the operand's scale.
        origin, mantissa: the source it is a multiple of, and the mantissa of the constant.
        home: the scale of the state's leaf that it is a multiple of, element by element: see
            `interpreter/homes.py`; None if it is of no leaf, or of several.
        returns: whether it is a sum that replaces the leaf, and leaves the function at home.
        number: the value of every element, 0-d, where all are equal and of scale 1 in the program:
            a NumPy scalar for a constant, else a traced array; None for any other array.
        facts: what is known of the elements.
        depth: number of alignments that XLA may fuse into one kernel with its computation.
        declared: the dtype in the program, if the source is float32 in its place
            (`interpreter/wide.py`); else None.
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
    _made: dict[str, Any]

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
    ):
        fields = dict(source=source, scale=scale, unit=scale if unit is None else unit)
        known = dict(home=home, number=number, facts=facts, depth=0, declared=declared)
        vars(self).update(fields, **known, returns=False, origin=source, mantissa=1.0, _made={})

    @classmethod
    def of(cls, x: ScaledArray, facts: Facts | None = None) -> Operand:
        """Make an operand of data and scale; `facts` are known from now on."""
        if not isinstance(x, Operand):
            return cls(x.data, x.scale, facts=facts or NOTHING)
        return x if facts is None or facts is x.facts else x._with(facts=facts)

    @classmethod
    def of_value(cls, value: Any, scale: Scale, **known: Any) -> Operand:
        """Make an operand of an array of values, and the scale that the law gives them."""
        return cls(value, scale, unit=ONE, **known)

    def as_result(self, facts: Facts, depth: int = 0, home: Scale | None = None) -> Operand:
        """The same array, as the result of an equation: what was known of it holds no more."""
        returns = self.returns and home is not None
        return self._with(facts=facts, number=None, depth=depth, home=home, returns=returns)

    def at_home(self, home: Scale | None, returns: bool = False) -> Operand:
        """The same array, as a multiple of a leaf of a scale."""
        if home is self.home and returns is self.returns:
            return self
        return self._with(home=home, returns=returns)

    def as_multiple(self, x: Operand, mantissa: float) -> Operand:
        """The same array, as a multiple of another."""
        return self._with(origin=x.origin, mantissa=x.mantissa * mantissa)

    def _with(self, **fields: Any) -> Operand:
        x = Operand.__new__(Operand)
        vars(x).update(vars(self), **fields)
        return x

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the data; `()` of a number that stands for an array."""
        return self.source.shape

    @property
    def dtype(self) -> Any:
        """Dtype in the program."""
        return self.source.dtype if self.declared is None else self.declared

    @property
    def is_widened(self) -> bool:
        """Whether the data is float32 in place of the dtype in the program."""
        return self.declared is not None

    @property
    def holds_data(self) -> bool:
        """Whether the source is the data."""
        return self.unit is self.scale or self.unit == self.scale

    @property
    def ndim(self) -> int:
        """Rank of the data."""
        return self.source.ndim

    @property
    def constant(self) -> Any:
        """The value of every element, if it is known while tracing, else None."""
        return self.number if isinstance(self.number, np.generic) else None

    @property
    def sharding(self) -> Any:
        """The sharding of its data."""
        return getattr(jax.typeof(self.source), "sharding", None)

    @property
    def is_static(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the scale is known while tracing."""
        return self.scale.is_static

    @property
    def data(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The array `values / scale`."""
        if self.holds_data:
            return self.source
        return self._once("data", lambda: self.at_unit(self.scale, self.source.dtype))

    @property
    def value(self) -> Any:
        """The array of values, of a wide dtype."""
        if self.unit.is_one:
            return self.source
        return self._once("value", lambda: self.at_unit(ONE, self.source.dtype))

    @property
    def at_scalar_unit(self) -> tuple[Any, Scale]:
        """The source and its unit; the array of values and 1, if the unit lies along an axis.

        For results whose unit is not their scale: only a scale goes along where elements move.
        """
        return (self.value, ONE) if self.unit.ndim else (self.source, self.unit)

    def at_unit(self, unit: Scale, dtype: Any = None, **options: Any) -> Any:
        """The array `values / unit`, multiplied as `multiply` does."""
        same = self.unit is unit or self.unit == unit or self.unit.is_zero
        ratio = ONE if same else self.unit / unit
        return multiply(self.source, ratio, dtype, **options)

    def to_array(self, dtype: Any = None) -> Any:
        """The array of values in a dtype, by default the operand's."""
        return self.at_unit(ONE, self.dtype if dtype is None else dtype)

    def _once(self, name: str, make: Any) -> Any:
        """What is made once in the trace that `source` is of."""
        made = self._made.get(name)
        if made is None:
            made = make()
            if _compat.is_of_one_trace(made, self.source):  # not inside of a function of a rule
                self._made[name] = made
        return made

    def as_pair(self, data: Any, scale: Any) -> Operand:
        """The same values, as another pair of data and scale; the data may be float32."""
        return self._with(source=data, scale=scale, unit=scale, _made={}, **self._type_of(data))

    def _type_of(self, source: Any) -> dict[str, Any]:
        is_narrow = dtypes.has_short_range(self.dtype) and dtypes.has_wide_range(source.dtype)
        return dict(declared=self.dtype if is_narrow else None)

    def with_scale(self, scale: Scale) -> Operand:
        """The same values, at another scale."""
        if scale is self.scale:
            return self
        if dtypes.has_short_range(self.dtype):
            return self.as_pair(self.at_unit(scale, self.source.dtype), scale)
        if self.unit.ndim and self.holds_data:
            return self._with(source=self.value, scale=scale, unit=ONE, _made={})
        return self._with(scale=scale, _made={})

    def unit_at(self, scale: Scale) -> Scale:
        """The unit of the source's elements somewhere else, where the operand's scale is this."""
        return scale if self.holds_data else self.unit

    def moved(self, source: Any, scale: Scale) -> Operand:
        """The source's elements somewhere else, as its scale's are."""
        unit = self.unit_at(scale)
        fields = dict(source=source, scale=scale, unit=unit, origin=source, mantissa=1.0, _made={})
        return self._with(**fields, **self._type_of(source))
