"""The values of a jaxpr's variables: `Plain` values, and scaled values, which are `Operand`s."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.filling import filled
from jax_scalify.interpreter.operand import NOTHING, Facts, Operand
from jax_scalify.scales.algebra import Scale


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plain:
    """A value without a scale, and what is known about it.

    Attributes:
        shape, dtype: the shape and dtype of the variable.
        array: the array; None if all elements are equal and no array has been made.
        number: the 0-d value that every element equals. A constant is a NumPy scalar, in a wider
            dtype if float16 does not hold it. A scalar that is not known while tracing, such as a
            learning rate or loss / batch size, is a traced 0-d array. None if elements may differ.
        facts: what is known about the elements.
        known_scale: the symbolic scale, if the value is a scale from `get_data_and_scale`.
        made_with: the explicit sharding of the array, if it has not been made.
    """

    # `Operand` has these attributes too, so most code need not ask which kind a `Value` is.
    is_scaled = False
    depth = 0

    shape: tuple[int, ...]
    dtype: Any
    array: Any = None
    number: Any = None
    facts: Facts = NOTHING
    known_scale: Scale | None = None
    made_with: Any = None

    @classmethod
    def of(cls, array: Any, *, facts: Facts = NOTHING, known_scale: Scale | None = None) -> Plain:
        """Return the value of an array, or of a NumPy or Python number."""
        if not hasattr(array, "dtype"):
            array = np.asarray(array, dtypes.leaf_dtype(array))
        # A NumPy scalar is a constant (see `constant`), but a 0-d NumPy array would not be.
        if isinstance(array, np.ndarray) and array.ndim == 0:
            array = array[()]
        return cls(
            shape=array.shape,
            dtype=array.dtype,
            array=array,
            number=_number_of(array),
            facts=_with_constant(facts, array),
            known_scale=known_scale,
        )

    @classmethod
    def filled(cls, like: Any, number: Any, *, facts: Facts = NOTHING) -> Plain:
        """Return a value whose elements all equal `number`. Its array is made on first use.

        `like` gives shape, dtype and sharding: an aval, a `Value` or an array.
        """
        return cls(
            shape=tuple(like.shape),
            dtype=like.dtype,
            number=number,
            facts=_with_constant(facts, number),
            made_with=_compat.explicit_sharding(like),
        )

    @property
    def sharding(self) -> Any:
        """The sharding of the array, or of the array that would be made."""
        if self.array is None:
            return self.made_with
        return getattr(jax.typeof(self.array), "sharding", None)

    @property
    def is_scalable(self) -> bool:
        """Whether the value has a floating dtype."""
        return dtypes.is_scalable(self.dtype)

    @property
    def constant(self) -> Any:
        """The number that every element equals, if it is known while tracing; otherwise None."""
        return self.number if isinstance(self.number, np.generic) else None

    @property
    def is_beyond(self) -> bool:
        """Whether it is a constant that its dtype does not hold, such as 2**24 in float16."""
        return self.constant is not None and self.number.dtype != self.dtype

    def whole(self) -> Any:
        """Return the array, of full shape."""
        if self.array is not None:
            return self.array
        return filled(in_dtype(self.number, self.dtype), self)


Value: TypeAlias = Plain | Operand


def _number_of(array: Any) -> Any:
    """Return the number that every element of an array equals; None if elements may differ.

    A condition of one element, such as `norm(x, keepdims=True) < 1`, is one choice for a whole
    array: see `rules/choosing.py`.
    """
    if array.ndim == 0:
        return array
    if array.dtype != np.bool_ or any(size != 1 for size in array.shape):
        return None
    if not isinstance(jax.typeof(array), ShapedArray):  # a `Ref`, whose elements may change
        return None
    number = array.reshape(())
    return number[()] if isinstance(number, np.ndarray) else number


def in_dtype(number: Any, dtype: Any) -> Any:
    """Return a number in the dtype of its value; inf if the dtype does not hold it."""
    with np.errstate(over="ignore"):
        return number if number.dtype == dtype else number.astype(dtype)


def _with_constant(facts: Facts, array: Any) -> Facts:
    kind = array.dtype
    real = jnp.issubdtype(kind, np.floating) or jnp.issubdtype(kind, np.integer)
    constant = isinstance(array, np.generic) and real and float(array) >= 0
    unsigned = kind == np.bool_ or jnp.issubdtype(kind, jnp.unsignedinteger)
    return dataclasses.replace(facts, nonneg=facts.nonneg or unsigned or constant)
