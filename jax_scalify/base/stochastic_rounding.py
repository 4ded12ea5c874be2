"""Round to few bits: to nearest, or stochastically, so that the expected result is the value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes, pow2


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
    return round_stochastically(data, jax.random.bits(key, data.shape, jnp.uint32), dtype)


def round_stochastically(
    data: jax.Array, bits: jax.Array, dtype: Any, *, nonzero: bool = False
) -> jax.Array:
    """Round each element to one of its neighbours in `dtype`. The expected result is the element.

    `P(up) = (x - low) / (high - low)`: 1.25 between 1 and 2 is rounded up with probability 1/4.
    Below the smallest normal number of `dtype`, float32 data is first rounded to nearest, to a
    multiple of `2**-13` of the distance between neighbours (in FP8, at most `2**-20`).
    Numbers of `dtype` are unchanged. Finite values saturate in every dtype. A cast of integers, or
    to a dtype of at least 32 bits, is an ordinary cast. In E8M0, the smallest binade is rounded to
    nearest, because it is subnormal in float32.

    Args:
        data: array of a floating dtype.
        bits: random `uint32`, of the shape of `data`. The largest round up, 0 rounds down.
        dtype: the target dtype.
        nonzero: whether elements that would become 0 become the smallest number: `keep_nonzero`.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications",
    2022, mode 1.
    """
    target = jnp.finfo(dtype)
    if target.bits >= 32 or not jnp.issubdtype(data.dtype, jnp.floating):
        return dtypes.cast(data, dtype)
    data = lax.convert_element_type(data, dtypes.compute_dtype(data.dtype))
    size = lax.abs(data)
    rounded = round_sizes(size, dtype, bits)
    if nonzero and dtypes.is_narrow(dtype):
        # XLA:GPU would store an array of 0.0 if another equation needs one, and read it here.
        zero, smallest = np.array([-0.0, target.smallest_subnormal], data.dtype)
        rounded = lax.select(size > zero, lax.max(rounded, smallest), rounded)
    rounded = _with_sign_of(data, rounded)
    if target.minexp < jnp.finfo(data.dtype).minexp:  # E8M0 has no sign, no 0 and no infinity
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
    """Round positive float32 or float64 numbers to a dtype with fewer bits.

    Finite numbers saturate. Infinity is rounded to the largest number of FP8 and FP4, and stays
    infinite in other dtypes; nan stays nan.

    Args:
        size: array of positive numbers.
        dtype: the target dtype.
        bits: random `uint32`, of the shape of `size`. None rounds to nearest even.
    """
    wide, target = size.dtype, jnp.finfo(dtype)
    largest = np.array(target.max, wide)
    rounded = _to_nearest(size, target) if bits is None else _up_or_down(size, bits, target)
    # XLA may flush numbers that are subnormal in float32.
    if target.minexp < jnp.finfo(wide).minexp:
        rounded = lax.select(size < jnp.finfo(wide).smallest_normal, size, rounded)
    other = size if target.bits > 8 else lax.min(size, largest)
    return lax.select(lax.is_finite(size), rounded, other)


def _to_nearest(size: jax.Array, target: Any) -> jax.Array:
    """Round positive numbers to nearest even.

    The ulp and its inverse are powers of two, made from the bits of the exponent, so that every
    step is exact.
    """
    wide, source = size.dtype, jnp.finfo(size.dtype)
    integer, nmant = pow2.exponent_layout(wide)
    bias = source.maxexp - 1
    low = max(target.minexp + bias, 1)
    high = 2 * bias + min(target.nmant - 1, 0)  # so that its inverse is not subnormal
    low, high, top, digits = (
        np.array(biased << nmant, integer)
        for biased in (low, high, 2 * bias + target.nmant, target.nmant)
    )
    exponent = lax.clamp(low, binade_bits(size), high)
    steps = size * lax.bitcast_convert_type(top - exponent, wide)
    ulp = lax.bitcast_convert_type(exponent - digits, wide)
    rounded = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN) * ulp
    return lax.min(rounded, np.array(target.max, wide))


def _up_or_down(size: jax.Array, bits: jax.Array, target: Any) -> jax.Array:
    """Round positive finite numbers up or down: the largest `bits` round up, 0 rounds down.

    The sum carries into the kept bits if the dropped part, plus as many random bits, is at least
    the ulp. Below the smallest normal number of the target the ulp is constant, but the number of
    dropped bits is not. Such numbers are moved to the next binade.
    """
    wide = size.dtype
    integer, nmant = pow2.exponent_layout(wide)
    dropped, moved = nmant - target.nmant, None
    if target.minexp > jnp.finfo(wide).minexp:
        # XLA:GPU would store an array of 0.0 if another equation needs one, and read it here.
        smallest, nothing = np.array([target.smallest_normal, -0.0], wide)
        moved = jnp.where(size < smallest, smallest, nothing)
        # In float16, the ulp from 2**-14 to 2**-13 is 2**-24, as it is for subnormal numbers.
        size = size + moved
    random = bits.astype(integer)
    # It has as many random bits as bits are dropped: 13 from float32 to float16.
    random = random >> (32 - dropped) if dropped <= 32 else random << (dropped - 32)
    kept = np.array(-1 << dropped).astype(integer)
    largest = np.array(target.max, wide).view(integer)
    pattern = lax.bitwise_and(lax.bitcast_convert_type(size, integer) + random, kept)
    rounded = lax.bitcast_convert_type(lax.min(pattern, largest), wide)
    return rounded if moved is None else rounded - moved


def binade(size: jax.Array) -> jax.Array:
    """Round positive numbers down to powers of two; subnormal numbers give 0."""
    return lax.bitcast_convert_type(binade_bits(size), size.dtype)


def binade_bits(size: jax.Array) -> jax.Array:
    """Return the bits of `binade(size)` as unsigned integers."""
    integer, _ = pow2.exponent_layout(size.dtype)
    infinity = np.array(np.inf, size.dtype).view(integer)
    return lax.bitwise_and(lax.bitcast_convert_type(size, integer), infinity)
