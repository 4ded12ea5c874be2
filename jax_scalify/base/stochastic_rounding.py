"""Round to few bits: to nearest, or stochastically, so that the expected result is the value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes, pow2


def random_bits(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return the random bits that `round_stochastically` takes: one `uint32` for each element."""
    return jax.random.bits(key, shape, jnp.uint32)


def mixed(bits: jax.Array) -> jax.Array:
    """Hash `uint32` numbers: different numbers give independent-looking bits.

    Source: the finaliser of MurmurHash3 by Austin Appleby.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))


def cast(data: jax.Array, dtype: Any, *, key: Any = None) -> jax.Array:
    """Cast an array as `dtypes.cast` does; round stochastically if a `jax.random` key is given."""
    if key is None or data.dtype == dtype:
        return dtypes.cast(data, dtype)
    return round_stochastically(data, random_bits(key, data.shape), dtype)


def round_stochastically(data: jax.Array, bits: jax.Array, dtype: Any) -> jax.Array:
    """Round each element to one of its neighbours in `dtype`. The expected result is the element.

    `P(up) = (x - low) / (high - low)`: 1.25 between 1 and 2 is rounded up with probability 1/4.
    Numbers of `dtype` are unchanged. Finite values saturate in every dtype. A cast of integers, or
    to a dtype of at least 32 bits, is an ordinary cast. In E8M0, the smallest binade is rounded to
    nearest, because it is subnormal in float32.

    Args:
        data: array of a floating dtype.
        bits: random `uint32`, of the shape of `data`.
        dtype: the target dtype.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications",
    2022, mode 1.
    """
    target = jnp.finfo(dtype)
    if target.bits >= 32 or not jnp.issubdtype(data.dtype, jnp.floating):
        return dtypes.cast(data, dtype)
    data = lax.convert_element_type(data, dtypes.compute_dtype(data.dtype))
    size = lax.abs(data)
    if target.minexp == jnp.finfo(data.dtype).minexp:
        rounded = _with_sign_of(data, _round_upper_half(size, bits, target))
    else:
        rounded = _with_sign_of(data, round_sizes(size, dtype, bits))
    if target.bits > 8:  # these dtypes have an infinity
        rounded = lax.select(lax.is_finite(data), rounded, data)
    elif target.minexp < jnp.finfo(data.dtype).minexp:  # E8M0 has no sign and no 0
        return dtypes.cast(lax.select(lax.is_finite(data), rounded, data), dtype)
    return lax.convert_element_type(rounded, dtype)


def keep_nonzero(rounded: jax.Array, data: jax.Array, dtype: Any) -> jax.Array:
    """Replace elements that a narrow dtype rounded to 0 by its smallest number.

    Optimizers divide by second moments, so a moment that becomes 0 causes a huge step.
    """
    if not dtypes.is_narrow(dtype) or jnp.issubdtype(dtype, jnp.complexfloating):
        return rounded
    smallest = np.array(jnp.finfo(dtype).smallest_subnormal, rounded.dtype)
    # XLA:GPU would store an array of 0.0 if another equation needs one, and read it here.
    zero = np.array(-0.0, data.dtype)
    lost = (rounded == zero.astype(rounded.dtype)) & (data != zero)
    return jnp.where(lost, jnp.where(data < zero, -smallest, smallest), rounded)


def _with_sign_of(data: jax.Array, size: jax.Array) -> jax.Array:
    """Return `size` with the signs of `data`."""
    integer, _ = pow2.exponent_layout(size.dtype)
    sign = np.array(-0.0, size.dtype).view(integer)
    signs = lax.bitwise_and(lax.bitcast_convert_type(data, integer), sign)
    pattern = lax.bitwise_or(lax.bitcast_convert_type(size, integer), signs)
    return lax.bitcast_convert_type(pattern, size.dtype)


def round_sizes(size: jax.Array, dtype: Any, bits: jax.Array | None = None) -> jax.Array:
    """Round positive float32 or float64 numbers to a dtype of a shorter range.

    The ulp and its inverse are powers of two, made from the bits of the exponent, so that every
    step is exact. Infinity is rounded to the largest number; nan stays nan.

    Args:
        size: array of positive numbers.
        dtype: the target dtype.
        bits: random `uint32`, of the shape of `size`. None rounds to nearest even.
    """
    wide, target, source = size.dtype, jnp.finfo(dtype), jnp.finfo(size.dtype)
    integer, nmant = pow2.exponent_layout(wide)
    bias = source.maxexp - 1
    low = max(target.minexp + bias, 1)
    high = 2 * bias + min(target.nmant - 1, 0)  # so that its inverse is not subnormal
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
    if target.minexp < source.minexp:  # XLA may flush numbers that are subnormal in float32
        rounded = lax.select(size < source.smallest_normal, size, rounded)
    return lax.min(rounded, np.array(target.max, wide))


def binade(size: jax.Array) -> jax.Array:
    """Round positive numbers down to powers of two; subnormal numbers give 0."""
    return lax.bitcast_convert_type(binade_bits(size), size.dtype)


def binade_bits(size: jax.Array) -> jax.Array:
    """Return the bits of `binade(size)` as unsigned integers."""
    integer, _ = pow2.exponent_layout(size.dtype)
    infinity = np.array(np.inf, size.dtype).view(integer)
    return lax.bitwise_and(lax.bitcast_convert_type(size, integer), infinity)


def _round_upper_half(size: jax.Array, bits: jax.Array, target: Any) -> jax.Array:
    """Round positive float32 numbers, also subnormal numbers, to bfloat16: their upper 16 bits."""
    pattern = lax.bitcast_convert_type(size, jnp.uint32)
    # The sum carries into the upper half with the probability `lower half / 2**16`.
    pattern += lax.shift_right_logical(bits, np.uint32(16))
    pattern = lax.bitwise_and(pattern, np.uint32(0xFFFF0000))
    largest = np.float32(target.max).view(np.uint32)
    return lax.bitcast_convert_type(lax.min(pattern, largest), jnp.float32)
