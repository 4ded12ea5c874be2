"""Arrays whose data is still to be multiplied by a power of two.

In float32 a chain of static factors need not be applied one by one: they are exact, and the range
is wide. Inside the transform they add up in the exponent of a `Deferred` array, until something
needs the product: there, they cost one multiplication, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.scales.algebra import Scale

# Operands may together be this much larger or smaller than their data will be, a result twice as
# much until it is used.
LARGEST_EXPONENT = 24
# Beyond, a constant is a mask, or dodges an overflow.
_LARGEST_CONSTANT = 2.0**32
_LARGEST_FACTOR = 90  # times a constant, it is a number of float32


class Deferred(ScaledArray):
    """A `ScaledArray` with `data = source * mantissa * 2**exponent`, multiplied when asked for.

    The mantissa is that of a constant by which the user multiplies: it and the powers of two make
    one factor. A rule that asks for `data` gets the product; `split` gives both.
    """

    source: Any
    mantissa: float
    exponent: int
    _products: dict[int, Any]

    def __init__(self, source: Any, mantissa: float, exponent: int, scale: Any):
        fields = dict(source=source, mantissa=mantissa, exponent=exponent, scale=scale)
        for name, value in (*fields.items(), ("is_static", False), ("_products", {})):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the data."""
        return self.source.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the data."""
        return self.source.dtype

    @property
    def ndim(self) -> int:
        """Rank of the data."""
        return self.source.ndim

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
                data = lax.mul(_compat.pin_constant(number) if step else number, data)
        return data

    def moved(self, source: Any, scale: Any) -> Deferred:
        """Return another array, to be multiplied by the same."""
        return Deferred(source, self.mantissa, self.exponent, scale)


def can_defer(dtype: Any) -> bool:
    """Tell whether data of a dtype may wait for its factor: real, of the range of float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32


def defer(raw: Any, exponent: float, scale: Any) -> ScaledArray:
    """Make an array with `data = raw * 2**exponent`, which is not computed yet if it can wait."""
    if not exponent:
        return ScaledArray(raw, scale)
    array = Deferred(raw, 1.0, int(exponent), scale)
    if can_defer(raw.dtype) and abs(exponent) <= 2 * LARGEST_EXPONENT:
        return array
    return ScaledArray(array.data, scale)


def defer_constant(x: ScaledArray, number: Any, scale: Any) -> ScaledArray | None:
    """Make an array with `data = x.data * number`, if the product can wait and is in range."""
    raw, exponent = split(x)
    if not can_defer(raw.dtype) or not 1 / _LARGEST_CONSTANT < abs(number) < _LARGEST_CONSTANT:
        return None
    return Deferred(raw, float(number), exponent, scale)


def split(x: ScaledArray) -> tuple[Any, int]:
    """Return `(raw, exponent)` with `data = raw * 2**exponent`."""
    return (x.raw, x.exponent) if isinstance(x, Deferred) else (x.data, 0)


def split_product(*arrays: ScaledArray, powers: Sequence[int] | None = None) -> Any:
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


def settled(x: Any) -> Any:
    """Return a plain `ScaledArray` in place of a deferred one, and anything else as it is."""
    return ScaledArray(x.data, x.scale) if isinstance(x, Deferred) else x


def with_scale(
    x: ScaledArray, scale: Scale, function: Callable[[Any], Any] = lambda data: data
) -> ScaledArray:
    """Return an array with another scale, and `function` applied to its data.

    Of a deferred array it is applied before the multiplication, with which it has to commute.
    """
    if isinstance(x, Deferred):
        return x.moved(function(x.source), scale)
    return ScaledArray(function(x.data), scale)
