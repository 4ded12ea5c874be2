"""Dtypes: which are scaled, which the arithmetic runs in, and casts that saturate."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import pow2


@functools.cache
def is_scalable(dtype: Any) -> bool:
    """Tell whether values of a dtype carry a scale: real and complex floating point."""
    return jnp.issubdtype(dtype, jnp.inexact)


def as_floating(dtype: Any, name: str, *, real: bool = False) -> Any:
    """Return a floating dtype, real or complex.

    Raises:
        TypeError: for another dtype, or what is none; the message says what `name` is.
    """
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # that of None is float64
    except TypeError:
        found = None
    if found is None:
        raise TypeError(
            f'`{name}` must be floating point, as jnp.float16 or "float16", got {dtype!r}.'
        )
    if not is_scalable(found) or (real and found.kind == "c"):
        raise TypeError(f"`{name}` must be floating point, got {found}.")
    return found


@functools.cache
def is_narrow_float(dtype: Any) -> bool:
    """Tell whether a dtype is a float of at most 8 bits: casts to it saturate."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8


@functools.cache
def has_short_range(dtype: Any) -> bool:
    """Tell whether the numbers of a dtype end before those of float32: float16 and FP8."""
    return (
        jnp.issubdtype(dtype, jnp.inexact)
        and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp
    )


def has_wide_range(dtype: Any) -> bool:
    """Tell whether a dtype is a real one of the range of float32, as bfloat16 is."""
    return jnp.issubdtype(dtype, jnp.floating) and not has_short_range(dtype)


def sum_dtype(dtype: Any) -> Any:
    """The dtype that a matmul is asked for, given that of its result.

    All compilers add up in float32. A result in bfloat16 has the range of float32, so it is as good
    before its power of two as behind it, and half of what a result in float32 moves through memory.
    One in float16 might overflow before it.
    """
    return dtype if dtype == jnp.bfloat16 else compute_dtype(dtype)


def compute_dtype(dtype: Any) -> Any:
    """Return the dtype that arithmetic on a floating dtype runs in: at least float32."""
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.finfo(dtype).bits >= 32:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32)


def of_leaf(leaf_dtype: Any, dtype: Any) -> Any:
    """Return what a leaf of a tree is cast to by `dtype`: a complex one by no real dtype."""
    is_complex = jnp.issubdtype(leaf_dtype, jnp.complexfloating)
    return leaf_dtype if is_complex and not jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def promoted(*given: Any) -> Any:
    """Return the dtype that dtypes promote to, where users forbid implicit promotion too."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, given)


def real_dtype(dtype: Any) -> Any:
    """Return the real dtype of a complex one, and any other dtype itself."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def times(data: Any, factor: Any) -> Any:
    """Return `data * factor` of a real factor, in the dtype of the data.

    Of complex data the parts are multiplied: `(inf + 0i) * (2 + 0i)` would be `inf + nan i`.
    """
    if not jnp.issubdtype(data.dtype, jnp.complexfloating):
        return data * factor
    return lax.complex(lax.real(data) * factor, lax.imag(data) * factor)


def cast(data: Any, dtype: Any, *, key: Any = None) -> Any:
    """Cast an array; to a float of at most 8 bits, finite values and infinities saturate.

    nan stays nan where the dtype has one. With a `key` of `jax.random` the rounding is
    stochastic (`round_stochastically`), else to nearest even.
    """
    dtype = jnp.dtype(dtype)
    if jnp.dtype(data.dtype) == dtype:
        return data
    if key is not None:
        return round_stochastically(data, random_bits(key, data.shape), dtype)
    if is_narrow_float(dtype) and not jnp.issubdtype(data.dtype, jnp.complexfloating):
        return _saturate(data, dtype)
    return lax.convert_element_type(data, dtype)


def _saturate(data: jax.Array, dtype: np.dtype) -> jax.Array:
    wide = compute_dtype(data.dtype) if jnp.issubdtype(data.dtype, jnp.floating) else np.float32
    data = lax.convert_element_type(data, wide)
    low, high = (np.array(jnp.finfo(dtype).min, wide), np.array(jnp.finfo(dtype).max, wide))
    if dtype != jnp.float8_e8m0fnu:
        return lax.convert_element_type(lax.clamp(low, data, high), dtype)
    # E8M0 has no 0 and no sign. Its smallest number is subnormal in float32, where XLA may flush
    # it, and is wrongly rounded to in float64: what is nearest to it is found by the bits.
    normal = lax.convert_element_type(lax.clamp(2 * low, data, high), dtype)
    integer = np.dtype(f"int{8 * low.itemsize}")
    below = lax.lt(lax.bitcast_convert_type(data, integer), (low + low / 2).view(integer)[()])
    below = lax.bitwise_and(below, lax.eq(data, data))
    return lax.select(below, lax.full_like(normal, low.astype(dtype)), normal)


def random_bits(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return the random bits that `round_stochastically` takes, one `uint32` an element."""
    return jax.random.bits(key, shape, jnp.uint32)


def round_stochastically(data: jax.Array, bits: jax.Array, dtype: Any) -> jax.Array:
    """Round each element up with a probability that is its distance from the number below.

    The result is one of the two neighbours in `dtype`, and its mean the value; numbers of `dtype`
    stay as they are. Finite values saturate in every dtype. Towards a dtype of at least 32 bits,
    and from integers, it is an ordinary cast. Of E8M0 the smallest binade rounds to nearest, since
    it is subnormal in float32.

    Args:
        data: array of a floating dtype.
        bits: random `uint32`, of the shape of `data`.
        dtype: the target.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications",
    2022, mode 1.
    """
    target = jnp.finfo(dtype)
    if target.bits >= 32 or not jnp.issubdtype(data.dtype, jnp.floating):
        return cast(data, dtype)
    data = lax.convert_element_type(data, compute_dtype(data.dtype))
    size, same_range = lax.abs(data), target.minexp == jnp.finfo(data.dtype).minexp
    rounded = (_round_upper_half if same_range else _round_steps)(size, bits, target)
    return cast(lax.select(lax.is_finite(data), jnp.copysign(rounded, data), data), dtype)


def _round_steps(size: jax.Array, bits: jax.Array, target: Any) -> jax.Array:
    """Round positive numbers to multiples of the target's ulp; every step is exact."""
    wide, source = size.dtype, jnp.finfo(size.dtype)
    smallest = max(math.ldexp(1.0, target.minexp), float(source.smallest_normal))
    largest = math.ldexp(1.0, source.maxexp - 2)  # XLA may flush the reciprocal of a larger one
    power = lax.clamp(np.array(smallest, wide), binade(size), np.array(largest, wide))
    ulp = power * np.array(2.0**-target.nmant, wide)
    steps = size / ulp
    down = lax.floor(steps)
    threshold = ((steps - down) * np.array(2.0**32, wide)).astype(jnp.uint32)
    rounded = (down + (bits < threshold).astype(wide)) * ulp
    # XLA may flush what is subnormal here, which E8M0 alone can tell from 0.
    rounded = lax.select(size < source.smallest_normal, size, rounded)
    return lax.min(rounded, np.array(target.max, wide))


def binade(size: jax.Array) -> jax.Array:
    """The powers of two at or below positive numbers; of subnormal ones 0."""
    integer, nmant = pow2.exponent_layout(size.dtype)
    infinity = np.array(np.inf, size.dtype).view(integer)
    exponent = lax.bitwise_and(lax.bitcast_convert_type(size, integer), infinity)
    return lax.bitcast_convert_type(exponent, size.dtype)


def _round_upper_half(size: jax.Array, bits: jax.Array, target: Any) -> jax.Array:
    """Round positive float32 to bfloat16, its upper half, subnormal numbers included."""
    pattern = lax.bitcast_convert_type(size, jnp.uint32)
    pattern += lax.shift_right_logical(bits, np.uint32(16))
    pattern = lax.bitwise_and(pattern, np.uint32(0xFFFF0000))
    largest = np.float32(target.max).view(np.uint32)
    return lax.bitcast_convert_type(lax.min(pattern, largest), jnp.float32)


def leaf_dtype(leaf: Any) -> Any:
    """Return the dtype that JAX gives to an array or a Python number; None for anything else."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.dtype
    if isinstance(leaf, (bool, int, float, complex)):
        return jax.dtypes.canonicalize_dtype(np.result_type(type(leaf)))
    return None
