"""What the interpreter knows about a value: plain or scaled, and facts found while tracing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import NOTHING, Facts, Operand
from jax_scalify.scales.algebra import Scale


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Value:
    """A variable's value and the facts about it.

    Attributes:
        shape, dtype: of the variable.
        array: a plain array or an `Operand`; None for a uniform value of which
            no array has been made.
        uniform: the 0-d value that every element has: a NumPy scalar for a constant (of a wider
            dtype, if float16 does not hold what was computed), a traced 0-d array for a scalar
            that was broadcast (learning rate, loss / batch size).
        facts: about its elements.
        scale: for a plain 0-d value that *is* a scale, that scale.
        depth: number of alignments that XLA may fuse into one kernel with the value's computation.
        made_with: the sharding of a uniform value of which no array has been made, if it is
            explicit.
    """

    shape: tuple[int, ...]
    dtype: Any
    array: Any = None
    uniform: Any = None
    facts: Facts = NOTHING
    scale: Scale | None = None
    depth: int = 0
    made_with: Any = None

    @classmethod
    def of(
        cls,
        array: Any,
        *,
        facts: Facts = NOTHING,
        scale: Scale | None = None,
        depth: int = 0,
    ) -> Value:
        """Wrap a plain array, a NumPy or Python number, or a `ScaledArray`."""
        if isinstance(array, ScaledArray):
            array = Operand.of(array, facts)
            return cls(
                shape=array.shape,
                dtype=array.dtype,
                array=array,
                facts=facts,
                depth=depth,
            )
        if not isinstance(array, (jax.Array, np.ndarray, np.generic)):
            array = np.asarray(array, dtypes.leaf_dtype(array))
        if isinstance(array, np.ndarray) and array.ndim == 0:
            array = array[()]
        return cls(
            shape=array.shape,
            dtype=array.dtype,
            array=array,
            uniform=array if array.ndim == 0 else None,
            facts=_with_constant(facts, array),
            scale=scale,
        )

    @classmethod
    def filled(
        cls,
        like: Any,
        uniform: Any,
        *,
        facts: Facts = NOTHING,
    ) -> Value:
        """A value whose elements are all equal; its array is made when somebody needs it.

        It has the shape, dtype and sharding of `like`: an abstract value, a `Value`, an array.
        """
        return cls(
            shape=tuple(like.shape),
            dtype=like.dtype,
            uniform=uniform,
            facts=_with_constant(facts, uniform),
            made_with=_compat.explicit_sharding(like),
        )

    @property
    def sharding(self) -> Any:
        """The sharding of its array, or of the one that would be made."""
        if self.array is None:
            return self.made_with
        data = self.array.source if self.is_scaled else self.array
        return getattr(jax.typeof(data), "sharding", None)

    @property
    def nonneg(self) -> bool:
        """Whether no element is negative."""
        return self.facts.nonneg

    @property
    def computed(self) -> bool:
        """Whether it was made of other values."""
        return self.facts.computed

    @property
    def peaked(self) -> bool:
        """Whether one element may be as large as all others together, in a short range."""
        return self.facts.peaked

    @property
    def is_scaled(self) -> bool:
        """Whether the value carries a scale."""
        return isinstance(self.array, Operand)

    @property
    def is_scalable(self) -> bool:
        """Whether the value has a floating dtype."""
        return dtypes.is_scalable(self.dtype)

    @property
    def constant(self) -> Any:
        """The number that every element has, if it is known while tracing, else None."""
        return self.uniform if isinstance(self.uniform, np.generic) else None

    def plain(self) -> Any:
        """The value as a plain array; not for scaled values."""
        if self.array is not None:
            return self.array
        return filled(in_dtype(self.uniform, self.dtype), self)

    @property
    def is_beyond(self) -> bool:
        """Whether it is a constant that its dtype does not hold, but a scale does."""
        return self.constant is not None and self.uniform.dtype != self.dtype


def in_dtype(number: Any, dtype: Any) -> Any:
    """A uniform number in the dtype of its value: inf, if that does not hold it."""
    with np.errstate(over="ignore"):
        return number if number.dtype == dtype else number.astype(dtype)


def filled(data: Any, like: Any) -> Any:
    """Give the data of a constant or of a broadcast scalar its full shape, and sharding.

    They are those of `like`: an abstract value, a `Value`, an array.
    """
    shape, sharding = tuple(like.shape), _compat.explicit_sharding(like)
    if np.shape(data) == shape:
        return data
    if sharding is None:
        return jnp.broadcast_to(data, shape)
    dims = range(len(shape) - np.ndim(data), len(shape))
    return lax.broadcast_in_dim(jnp.asarray(data), shape, dims, out_sharding=sharding)


def _is_nonnegative_constant(array: Any) -> bool:
    if array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        return True
    real = jnp.issubdtype(array.dtype, np.floating) or jnp.issubdtype(array.dtype, np.integer)
    return isinstance(array, np.generic) and real and float(array) >= 0


def _with_constant(facts: Facts, array: Any) -> Facts:
    nonneg = facts.nonneg or _is_nonnegative_constant(array)
    return dataclasses.replace(facts, nonneg=nonneg)
