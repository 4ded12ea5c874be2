"""What a rule gets for a floating operand: data, scale, and what is known of the values.

In float32 a chain of static factors need not be applied one by one: they are exact, and the range
is wide. They add up in the exponent of an `Operand`, until something needs the product: there, they
cost one multiplication, or none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.base.pins import pin_constant
from jax_scalify.scales.algebra import Scale

# Operands may together be this much larger or smaller than their data will be, a result twice as
# much until it is used.
LARGEST_EXPONENT = 24
# Beyond, a constant is a mask, or dodges an overflow.
_LARGEST_DEFERRED = 2.0**32
_LARGEST_FACTOR = 90  # times a constant, it is a number of float32


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
    """A `ScaledArray` inside the transform: `data * scale`, and what is known of these values.

    Its data is `source * mantissa * 2**exponent`. The mantissa is that of a constant by which the
    user multiplies: it and the powers of two make one factor. A rule that asks for `data` gets the
    product; `split` gives source and exponent apart.

    Attributes:
        source: an array, or a number that stands for an array of equal elements.
        scale: a `Scale`.
        mantissa, exponent: of the factor that the source is still to be multiplied by.
        home: the scale of the state's leaf that it is a multiple of, element by element: see
            `interpreter/homes.py`; None if it is of no leaf, or of several.
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
    mantissa: float
    exponent: int
    home: Scale | None
    number: Any
    facts: Facts
    depth: int
    declared: Any
    _products: dict[int, Any]

    def __init__(
        self,
        source: Any,
        scale: Any,
        *,
        mantissa: float = 1.0,
        exponent: int = 0,
        home: Scale | None = None,
        number: Any = None,
        facts: Facts = NOTHING,
        declared: Any = None,
    ):
        fields = dict(source=source, mantissa=mantissa, exponent=exponent, scale=scale)
        known = dict(home=home, number=number, facts=facts, depth=0, declared=declared)
        vars(self).update(fields, **known, _products={})

    @classmethod
    def of(cls, x: ScaledArray, facts: Facts | None = None) -> Operand:
        """Make an operand of data and scale; `facts` are known from now on."""
        if not isinstance(x, Operand):
            return cls(x.data, x.scale, facts=facts or NOTHING)
        return x if facts is None or facts is x.facts else x._with(facts=facts)

    def as_result(self, facts: Facts, depth: int = 0, home: Scale | None = None) -> Operand:
        """The same array, as the result of an equation: what was known of it holds no more."""
        return self._with(facts=facts, number=None, depth=depth, home=home)

    def at_home(self, home: Scale | None) -> Operand:
        """The same array, as a multiple of a leaf of a scale."""
        return self if home is self.home else self._with(home=home)

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
    def is_wide(self) -> bool:
        """Whether the data is float32 in place of the dtype in the program."""
        return self.declared is not None

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
    def is_deferred(self) -> bool:
        """Whether the source is still to be multiplied."""
        return bool(self.exponent) or self.mantissa != 1

    @property
    def raw(self) -> Any:
        """`data / 2**exponent`."""
        return self._times(0)

    @property
    def data(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The product."""
        return self._times(self.exponent)

    def reaches(self, factor: Scale) -> bool:
        """Tell whether `data * factor` can be computed with one factor of float32."""
        return factor.is_static and abs(self.exponent + factor.exponent) <= _LARGEST_FACTOR

    def times(self, factor: Scale) -> Any:
        """Return `data * factor`, with one factor or, if that is 1, none."""
        exponent = self.exponent + int(factor.exponent)
        return self.raw if not exponent else self.data if factor.is_one else self._times(exponent)

    def _times(self, exponent: int) -> Any:
        """`source * mantissa * 2**exponent`, computed once in the trace that `source` is of."""
        if self.mantissa == 1 and not exponent:
            return self.source
        product = self._products.get(exponent)
        if product is None:
            product = self._product(exponent)
            if _compat.is_of_one_trace(product, self.source):  # not inside of a function of a rule
                self._products[exponent] = product
        return product

    def _product(self, exponent: int) -> Any:
        data, mantissa = self.source, self.mantissa
        while mantissa != 1 or exponent:
            step = max(-_LARGEST_FACTOR, min(_LARGEST_FACTOR, exponent))
            factor = math.ldexp(mantissa, step)
            exponent, mantissa = exponent - step, 1.0
            if factor != 1:
                number = np.asarray(factor, self.dtype)
                data = lax.mul(pin_constant(number) if step else number, data)
        return data

    def as_pair(self, data: Any, scale: Any) -> Operand:
        """The same values, as another pair of data and scale."""
        return self._with(source=data, scale=scale, mantissa=1.0, exponent=0, _products={})

    def moved(self, source: Any, scale: Any) -> Operand:
        """Another array, of another scale, to be multiplied by the same."""
        return self._with(source=source, scale=scale, _products={})


def can_defer(dtype: Any) -> bool:
    """Tell whether data of a dtype may wait for its factor: real, of the range of float32."""
    return jnp.issubdtype(dtype, jnp.floating) and not dtypes.has_short_range(dtype)


def defer(raw: Any, exponent: float, scale: Any) -> Operand:
    """Make an array with `data = raw * 2**exponent`, which is not computed yet if it can wait."""
    array = Operand(raw, scale, exponent=int(exponent))
    if not exponent or can_defer(raw.dtype) and abs(exponent) <= 2 * LARGEST_EXPONENT:
        return array
    return Operand(array.data, scale)


def defer_constant(x: Operand, number: Any, scale: Any) -> Operand | None:
    """Make an array with `data = x.data * number`, if the product can wait and is in range."""
    raw, exponent = split(x)
    if not can_defer(x.dtype) or not 1 / _LARGEST_DEFERRED < abs(number) < _LARGEST_DEFERRED:
        return None
    return Operand(raw, scale, mantissa=float(number), exponent=exponent)


def split(x: Operand) -> tuple[Any, int]:
    """Return `(raw, exponent)` with `data = raw * 2**exponent`."""
    return x.raw, x.exponent


def split_product(*arrays: Operand, powers: Sequence[int] | None = None) -> Any:
    """Return `(*raws, exponent)` of a product of powers, which is that of raws `* 2**exponent`.

    If all cannot wait together, those that weigh most are multiplied first.
    """
    powers = powers or (1,) * len(arrays)
    parts = [split(x) for x in arrays]
    weights = [power * exponent for power, (_, exponent) in zip(powers, parts, strict=True)]
    while abs(sum(weights)) > LARGEST_EXPONENT:
        heaviest = weights.index(max(weights, key=abs))
        parts[heaviest], weights[heaviest] = (arrays[heaviest].data, 0), 0
    return (*(raw for raw, _ in parts), sum(weights))


def settled(x: Operand) -> Operand:
    """Return the operand, its data multiplied."""
    return x.as_pair(x.data, x.scale) if x.is_deferred else x


def with_scale(
    x: Operand, scale: Scale, function: Callable[[Any], Any] = lambda data: data
) -> Operand:
    """Return an array with another scale, and `function` applied to its data.

    It is applied before the multiplication, with which it has to commute.
    """
    return x.moved(function(x.source), scale)
