"""Multiplying data by scales: in at least float32, and within the range of float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.pins import pin_constant
from jax_scalify.interpreter.operand import Operand, with_scale
from jax_scalify.interpreter.value import filled
from jax_scalify.scales.algebra import GIVEN_EXTENT, LARGEST_EXTENT, Scale


def multiply(
    data: Any, factor: Scale, dtype: Any = None, *, trusted: float = pow2.MAX_EXPONENT
) -> Any:
    """Return `data * factor`, multiplied in at least float32; a factor 1 costs nothing.

    One number of float32 may not hold the factor: `2**-20 * 2**140` is `2**120`. A dynamic factor
    that may be beyond `2**+-trusted` is therefore two. With an infinite `trusted` it is one, and 0
    below the range: for a ratio to a larger scale, where what is lost does not count.
    Without `dtype` the result stays in the dtype that it was computed in.
    """
    limit = pow2.MAX_EXPONENT if factor.is_static else trusted
    while factor.span > limit and not factor.is_zero:
        within, factor = factor.bounded()
        data = _multiply(data, within)
        data = _compat.kept_apart(data) if within.is_static else data
        limit = limit if factor.is_static else np.inf
    data = data if factor.is_one else _multiply(data, factor)
    return data if dtype is None else dtypes.cast(data, dtype)


def _multiply(data: Any, factor: Scale) -> Any:
    # Powers of two are exact in bfloat16 too, which has the range of float32.
    is_bfloat16 = data.dtype == jnp.bfloat16
    compute = data.dtype if is_bfloat16 else dtypes.compute_dtype(data.dtype)
    if factor.is_static:
        number = np.asarray(factor.value).astype(dtypes.real_dtype(compute))
        number = pin_constant(number) if np.ndim(data) else number
    else:
        number = factor.array.astype(dtypes.real_dtype(compute))
    data = lax.convert_element_type(data, compute)
    if number.ndim and number.shape != data.shape:  # either may have dims of size 1
        shape = jnp.broadcast_shapes(data.shape, number.shape)
        if data.shape == shape:
            number = filled(number, jax.typeof(data))
        else:
            data, number = jnp.broadcast_arrays(data, number)
    if jnp.issubdtype(compute, jnp.complexfloating):
        return dtypes.times(data, number)
    return lax.mul(_compat.for_partial_sums(number, data), data)


def kept_wide(data: Any, scale: Scale, dtype: Any) -> Operand:
    """Make an array of a dtype whose data is float32: see `interpreter/wide.py`."""
    data = lax.convert_element_type(data, dtypes.compute_dtype(dtype))
    return Operand(data, scale, declared=jnp.dtype(dtype))


def narrowed(data: Any, scale: Scale, dtype: Any) -> Any:
    """Cast data of float32 to a dtype; what float16 holds of `data * scale` is no infinity.

    Data of `2**17` at a scale of `2**-10` is 128, which plain float16 holds: it saturates. At a
    scale of 1 it is an infinity in plain float16 too.
    """
    if data.dtype == dtype or dtype != jnp.float16 or scale.is_zero:
        return dtypes.cast(data, dtype)
    if scale.is_static and scale.exponent >= 0:
        return dtypes.cast(data, dtype)
    largest = np.float32(jnp.finfo(dtype).max)
    top = multiply(jnp.asarray(largest), scale**-1)
    inside = lax.le(lax.abs(data), jnp.broadcast_to(top, data.shape))
    data = lax.select(inside, lax.clamp(-largest, data, largest), data)
    return lax.convert_element_type(data, dtype)


def moved(
    x: Operand, factor: Scale, dtype: Any = None, *, trusted: float = pow2.MAX_EXPONENT
) -> Any:
    """Return `x.data * factor` as `multiply` does, with one factor for a deferred array."""
    if x.is_deferred and not factor.is_static:
        return multiply(x.raw, factor * Scale(x.exponent), dtype, trusted=trusted)
    if x.is_deferred and x.reaches(factor):
        return x.times(factor) if dtype is None else dtypes.cast(x.times(factor), dtype)
    return multiply(x.data, factor, dtype, trusted=trusted)


def within_range(x: Operand, limit: int = pow2.MAX_EXPONENT) -> Operand:
    """Bring the exponent of a scale within `+-limit`; the data takes the rest."""
    if not x.scale.may_leave_range and x.scale.span <= limit:
        return x
    within, rest = x.scale.bounded(limit)
    if rest.is_one:
        return x
    data = keep_infinity(x.data, moved(x, rest, x.dtype))
    return x.as_pair(_compat.kept_apart(data) if rest.is_static else data, within)


def at_scale(x: Operand, scale: Scale) -> Operand:
    """Bring a value to a scale that is not 0."""
    return x.as_pair(keep_infinity(x.data, moved(x, x.scale / scale, x.dtype)), scale)


def in_reach(x: Operand) -> Operand:
    """Keep a dynamic scale to few factors and, of float32 data, to where one number reaches it.

    Two scales within `2**+-84` and a maximum of them within `2**+-42` have ratios of float32.
    """
    if x.scale.is_static:
        return x
    if x.scale.extent > 2 * LARGEST_EXTENT and not dtypes.has_short_range(x.dtype):
        return within_range(x, LARGEST_EXTENT)
    scale, rest = x.scale.settled()
    return with_scale(x, scale, lambda data: multiply(data, rest, data.dtype))


def at_whole_scale(x: Operand) -> Operand:
    """Give an array the scale that it had before that was limited: for data of a narrow dtype."""
    whole = x.scale.whole()
    return x.as_pair(moved(x, x.scale / whole, x.dtype), whole)


def keep_infinity(before: Any, after: Any) -> Any:
    """Leave an infinity one, where a cast to FP8 would make it a number."""
    if not dtypes.is_narrow_float(before.dtype) or not np.isinf(np.array(np.inf, before.dtype)):
        return after
    return lax.select(lax.is_finite(before), after, before)


def to_plain(x: ScaledArray, dtype: Any) -> Any:
    """Return the values `data * scale` of an array inside the transform."""
    if not isinstance(x.scale, Scale):
        return x.to_array(dtype)
    x = Operand.of(x)
    if x.is_deferred and x.reaches(x.scale):
        return dtypes.cast(x.times(x.scale), dtype)
    return multiply(x.data, x.scale, dtype, trusted=2 * GIVEN_EXTENT - 1)
