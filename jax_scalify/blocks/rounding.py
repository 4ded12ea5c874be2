"""Rounding to block formats, exactly: how block scales are chosen, and elements rounded.

All of it is arithmetic of float32 on powers of two, and integer arithmetic on its bits. A value is
on the grid of its format before it is cast: XLA may leave out a cast to a narrow dtype and back
(`xla_allow_excess_precision`), and that must not change a result. Subnormal numbers of float32
count as 0, as everywhere in XLA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.base.stochastic_rounding import mixed, round_sizes
from jax_scalify.blocks.formats import BlockFormat

_EXPONENT, _FRACTION = np.uint32(0x7F800000), np.uint32(0x007FFFFF)
_BIAS = 127
# The largest number of NVFP4, 6 * 448 = 1.3125 * 2**11.
_NVFP4_MAX = 2688.0
# What is halfway between two neighbours of E2M1, whether it belongs to the upper one (that whose
# last bit is 0), and how far they are apart.
_E2M1_STEPS = (
    *((0.25, False, 0.5), (0.75, True, 0.5), (1.25, False, 0.5), (1.75, True, 0.5)),
    *((2.5, False, 1.0), (3.5, True, 1.0), (5.0, False, 2.0)),
)


def split_into_blocks(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Split each axis of length `n` into `(ceil(n / size), size)`, filled up with zeros.

    Args:
        x: array.
        sizes: of a block along each axis; 1 leaves the axis as `(n, 1)`.
    """
    padding = [(0, -n % size, 0) for n, size in zip(x.shape, sizes, strict=True)]
    if any(high for _, high, _ in padding):
        x = lax.pad(x, np.zeros((), x.dtype), padding)
    shape = [part for n, size in zip(x.shape, sizes) for part in (n // size, size)]
    return lax.reshape(x, shape)


def join_blocks(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Undo `split_into_blocks` for an array of this shape."""
    x = lax.reshape(x, [x.shape[2 * a] * x.shape[2 * a + 1] for a in range(x.ndim // 2)])
    return x if x.shape == tuple(shape) else lax.slice(x, [0] * x.ndim, shape)


def round_blocks(
    blocks: jax.Array,
    format: BlockFormat,
    bits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Choose the scales of blocks, and round their elements.

    Args:
        blocks: float32, each axis split into `(blocks, size)`; what shares a scale lies along the
            odd axes.
        format: the format.
        bits: random `uint32` of the same shape: elements are rounded stochastically.

    Returns:
        The elements, float32 numbers of the format's dtype, and the bits of the block scales,
        `uint8` with 1 for the odd axes.
    """
    inner = tuple(range(1, blocks.ndim, 2))
    raw = lax.bitcast_convert_type(blocks, jnp.uint32)
    pattern = raw & (_EXPONENT | _FRACTION)
    size = lax.bitcast_convert_type(pattern, jnp.float32)
    is_nan = pattern > _EXPONENT
    pattern = jnp.where(pattern <= _FRACTION, jnp.uint32(0), pattern)
    if format.is_fp8:  # FP8 has nan: it does not spread to its block
        pattern = jnp.where(is_nan, jnp.uint32(0), pattern)
    amax = jnp.max(pattern, inner, keepdims=True, initial=0)
    if format.is_mx:
        codes = _e8m0_codes(amax, format)
        scaled = _times_power(size, -_exponents(codes))
        elements = round_sizes(scaled, format.dtype, bits)
    else:
        codes, scale = _e4m3_codes(amax)
        nonzero = jnp.where(scale == 0, jnp.float32(1), scale)
        if bits is None:
            elements = _nearest_quotient(size, nonzero)
        else:
            elements = round_sizes(size / nonzero, format.dtype, bits)
        elements = jnp.where((scale == 0) | jnp.isnan(scale), jnp.float32(0), elements)
    if not format.is_fp8:  # which has no nan: it is the block scale that has
        elements = jnp.where(amax > _EXPONENT, jnp.float32(0), elements)
    signed = lax.bitcast_convert_type(elements, jnp.uint32) | (raw & ~(_EXPONENT | _FRACTION))
    return lax.bitcast_convert_type(signed, jnp.float32), codes


def times_scales(elements: jax.Array, codes: jax.Array, format: BlockFormat) -> jax.Array:
    """Multiply elements, float32, by the block scales whose bits are given."""
    if not format.is_mx:
        scales = lax.bitcast_convert_type(codes, format.scale_dtype)
        return elements * lax.convert_element_type(scales, jnp.float32)
    out = _times_power(elements, _exponents(codes))
    return jnp.where(codes == 255, jnp.float32(np.nan), out)


def tensor_exponent(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The exponent of the smallest power of two with which NVFP4 has all of an array in range.

    Args:
        x: float32.
        axes: those that share it; they are kept with length 1.

    Returns:
        `int32`; 0 where all is 0. What is not finite does not count.
    """
    pattern = lax.bitcast_convert_type(x, jnp.uint32) & (_EXPONENT | _FRACTION)
    counts = (pattern > _FRACTION) & (pattern < _EXPONENT)
    amax = jnp.max(jnp.where(counts, pattern, jnp.uint32(0)), axes, keepdims=True, initial=0)
    exponent = _smallest_exponent(amax, _NVFP4_MAX)
    return jnp.where(amax == 0, 0, jnp.clip(exponent, -126, 126))


def times_power(x: jax.Array, exponent: Any) -> jax.Array:
    """Return `x * 2**exponent` of float32, for traced or known exponents within +-127."""
    return _times_power(x, jnp.asarray(exponent, jnp.int32))


def cast_dequantised(values: jax.Array, dtype: Any) -> jax.Array:
    """Cast dequantised float32 numbers. What only the format's rounding made infinite stays finite.

    MX formats round 65,504, the largest number of float16, to 65,536.
    """
    largest = float(jnp.finfo(dtype).max)
    if not dtypes.is_narrow(dtype):
        return values.astype(dtype)
    within = lax.clamp(np.float32(-largest), values, np.float32(largest))
    return dtypes.cast(lax.select(lax.abs(values) < 2 * largest, within, values), dtype)


def hashed_bits(x: jax.Array) -> jax.Array:
    """Bits that look random, `uint32`, from the bits and the places of elements of float32.

    For rounding without a key, in a backward pass. Equal elements in different places get different
    bits, and so does an element that changes.
    """
    place = lax.iota(jnp.uint32, x.size).reshape(x.shape)
    return mixed(lax.bitcast_convert_type(x, jnp.uint32) ^ (place * np.uint32(0x9E3779B9)))


def _smallest_exponent(amax: jax.Array, largest: float) -> jax.Array:
    """The smallest `e` with `amax <= largest * 2**e`, of the bits of float32; `int32`."""
    mantissa, exponent = math.frexp(largest)
    fraction = np.uint32(int(math.ldexp(2 * mantissa - 1, 23)))
    above = ((amax & _FRACTION) > fraction).astype(jnp.int32)
    return _exponent_of(amax) - (exponent - 1) + above


def _exponent_of(pattern: jax.Array) -> jax.Array:
    return (pattern >> np.uint32(23)).astype(jnp.int32) - _BIAS


def _e8m0_codes(amax: jax.Array, format: BlockFormat) -> jax.Array:
    """The bits of E8M0 scales: the exponent and 127, or 255 for nan; `amax` are bits of float32.

    An infinity has the largest scale, with which it is one in float32, and the others are 0.
    """
    info = jnp.finfo(format.dtype)
    if format.scale_rounding == "up":
        exponent = _smallest_exponent(amax, float(info.max))
    else:
        exponent = _exponent_of(amax) - math.frexp(float(info.max))[1] + 1
    exponent = jnp.where(amax == 0, -_BIAS, jnp.clip(exponent, -_BIAS, _BIAS))
    exponent = jnp.where(amax == _EXPONENT, _BIAS, exponent)
    return jnp.where(amax > _EXPONENT, 255, exponent + _BIAS).astype(jnp.uint8)


def _e4m3_codes(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bits of `amax / 6` in E4M3, to nearest even and saturating, and its value in float32.

    E4M3 has no infinity, and 448 would hide one: it is nan, as nan is.
    """
    value = lax.bitcast_convert_type(amax, jnp.float32)
    # 6 = 1.5 * 2**2: the quotient's binade is known of the bits.
    upper = ((amax & _FRACTION) >= np.uint32(0x400000)).astype(jnp.int32)
    ulp = jnp.clip(_exponent_of(amax) - 3 + upper, -6, 8) - 3
    steps = _times_power(jnp.minimum(value, np.float32(_NVFP4_MAX)), -ulp)
    # `steps / 6` by its floor and remainder: both are exact, as the rounded quotient is not.
    down = lax.floor(steps * np.float32(1 / 6))
    rest = steps - 6 * down
    down = down + jnp.where(rest >= 6, 1.0, 0.0) - jnp.where(rest < 0, 1.0, 0.0)
    rest = steps - 6 * down
    is_odd = down - 2 * lax.floor(down / 2) == 1
    up = (rest > 3) | ((rest == 3) & is_odd)
    scale = jnp.minimum(_times_power(down + up.astype(jnp.float32), ulp), np.float32(448))
    scale = jnp.where(amax >= _EXPONENT, np.float32(np.nan), scale)
    codes = lax.bitcast_convert_type(scale.astype(jnp.float8_e4m3fn), jnp.uint8)
    return codes, scale


def _nearest_quotient(size: jax.Array, scale: jax.Array) -> jax.Array:
    """Round `size / scale` to E2M1, by products with E4M3 scales, which are exact."""
    out = jnp.zeros_like(size)
    for middle, belongs_above, step in _E2M1_STEPS:
        limit = scale * np.float32(middle)
        above = size >= limit if belongs_above else size > limit
        out += above.astype(jnp.float32) * np.float32(step)
    return out


def _exponents(codes: jax.Array) -> jax.Array:
    """The exponents of E8M0 scales whose bits are given."""
    return codes.astype(jnp.int32) - _BIAS


def _times_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Multiply by two powers of two: one that is subnormal would be 0 to XLA."""
    for part in (exponent >> 1, exponent - (exponent >> 1)):
        biased = (part + _BIAS).astype(jnp.uint32) << np.uint32(23)
        x = x * lax.bitcast_convert_type(biased, jnp.float32)
    return x
