"""Rounding to few bits: up or down by random bits, so that the mean is the value, or to nearest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes, pow2


def random_bits(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return the random bits that `round_stochastically` takes, one `uint32` an element."""
    return jax.random.bits(key, shape, jnp.uint32)


def cast(data: jax.Array, dtype: Any, *, key: Any = None) -> jax.Array:
    """Cast an array as `dtypes.cast` does; with a `key` of `jax.random`, stochastically."""
    if key is None or data.dtype == dtype:
        return dtypes.cast(data, dtype)
    return round_stochastically(data, random_bits(key, data.shape), dtype)


def round_stochastically(
    data: jax.Array, bits: jax.Array, dtype: Any, *, keeps_nonzero: bool = False
) -> jax.Array:
    """Round each element up with a probability that is its distance from the number below.

    The result is one of the two neighbours in `dtype`, and its mean the value; numbers of `dtype`
    stay as they are. Finite values saturate in every dtype. Towards a dtype of at least 32 bits,
    and from integers, it is an ordinary cast. Of E8M0 the smallest binade rounds to nearest, since
    it is subnormal in float32.

    Args:
        data: array of a floating dtype.
        bits: random `uint32`, of the shape of `data`.
        dtype: the target.
        keeps_nonzero: whether what is not 0 becomes the smallest number at least.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications",
    2022, mode 1.
    """
    target = jnp.finfo(dtype)
    if target.bits >= 32 or not jnp.issubdtype(data.dtype, jnp.floating):
        return dtypes.cast(data, dtype)
    data = lax.convert_element_type(data, dtypes.compute_dtype(data.dtype))
    size = off_zero(lax.abs(data), dtype) if keeps_nonzero else lax.abs(data)
    if target.minexp == jnp.finfo(data.dtype).minexp:
        rounded = with_sign_of(data, _round_upper_half(size, bits, target))
    else:
        rounded = with_sign_of(data, round_sizes(size, dtype, bits))
    if target.bits > 8:  # which have an infinity
        rounded = lax.select(lax.is_finite(data), rounded, data)
    elif target.minexp < jnp.finfo(data.dtype).minexp:  # E8M0 has no sign and no 0
        return dtypes.cast(lax.select(lax.is_finite(data), rounded, data), dtype)
    return lax.convert_element_type(rounded, dtype)


def off_zero(size: jax.Array, dtype: Any) -> jax.Array:
    """Positive numbers of which those that are not 0 are at least the smallest of a dtype."""
    smallest = np.array(jnp.finfo(dtype).smallest_subnormal, size.dtype)
    return lax.max(size, jnp.where(size > 0, smallest, 0))


def with_sign_of(data: jax.Array, size: jax.Array) -> jax.Array:
    """Positive numbers with the signs of others."""
    integer, _ = pow2.exponent_layout(size.dtype)
    sign = np.array(-0.0, size.dtype).view(integer)
    signs = lax.bitwise_and(lax.bitcast_convert_type(data, integer), sign)
    pattern = lax.bitwise_or(lax.bitcast_convert_type(size, integer), signs)
    return lax.bitcast_convert_type(pattern, size.dtype)


def round_sizes(size: jax.Array, dtype: Any, bits: jax.Array | None = None) -> jax.Array:
    """Round positive numbers of float32 or float64 to those of a dtype of a shorter range.

    Every step is exact: the ulp and its inverse are powers of two, made of the exponent's bits.
    Infinity, too, is rounded to the largest number; nan stays nan.

    Args:
        size: array of positive numbers.
        dtype: the target.
        bits: random `uint32`, of the shape of `size`; None rounds to nearest even.
    """
    wide, target, source = size.dtype, jnp.finfo(dtype), jnp.finfo(size.dtype)
    integer, nmant = pow2.exponent_layout(wide)
    bias = source.maxexp - 1
    low = max(target.minexp + bias, 1)
    high = 2 * bias + min(target.nmant - 1, 0)  # its inverse is not subnormal
    low, high, top, digits = (
        np.array(biased << nmant, integer)
        for biased in (low, high, 2 * bias + target.nmant, target.nmant)
    )
    exponent = lax.clamp(low, binade_bits(size), high)
    ulp = lax.bitcast_convert_type(exponent - digits, wide)
    steps = size * lax.bitcast_convert_type(top - exponent, wide)
    if bits is None:
        steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    else:
        down = lax.floor(steps)
        threshold = ((steps - down) * np.array(2.0**32, wide)).astype(jnp.uint32)
        steps = down + (bits < threshold).astype(wide)
    rounded = steps * ulp
    if target.minexp < source.minexp:  # what is subnormal in float32 XLA may flush
        rounded = lax.select(size < source.smallest_normal, size, rounded)
    return lax.min(rounded, np.array(target.max, wide))


def binade(size: jax.Array) -> jax.Array:
    """The powers of two at or below positive numbers; of subnormal ones 0."""
    return lax.bitcast_convert_type(binade_bits(size), size.dtype)


def binade_bits(size: jax.Array) -> jax.Array:
    """The bits of the powers of two at or below positive numbers."""
    integer, _ = pow2.exponent_layout(size.dtype)
    infinity = np.array(np.inf, size.dtype).view(integer)
    return lax.bitwise_and(lax.bitcast_convert_type(size, integer), infinity)


def _round_upper_half(size: jax.Array, bits: jax.Array, target: Any) -> jax.Array:
    """Round positive float32 to bfloat16, its upper half, subnormal numbers included."""
    pattern = lax.bitcast_convert_type(size, jnp.uint32)
    pattern += lax.shift_right_logical(bits, np.uint32(16))
    pattern = lax.bitwise_and(pattern, np.uint32(0xFFFF0000))
    largest = np.float32(target.max).view(np.uint32)
    return lax.bitcast_convert_type(lax.min(pattern, largest), jnp.float32)
