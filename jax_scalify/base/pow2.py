"""Exact power-of-two arithmetic on numbers and arrays."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

# Computed scales stay within [2**-126, 2**126], because XLA flushes subnormal numbers to 0.
MAX_EXPONENT = 126


def is_power_of_two(value: Any) -> bool:
    """Return whether a concrete number is a positive, finite power of two."""
    value = float(value)
    return math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5


def floor_exponent(value: Any) -> int:
    """Return the largest `e` with `2**e <= |value|`, for a concrete finite nonzero number."""
    return math.frexp(float(value))[1] - 1


def split_constant(value: Any) -> tuple[float, int]:
    """Split a finite nonzero constant into `(mantissa, exponent)`: `mantissa * 2**exponent`.

    The power of two lies between `|value|` and 1: 0.3 = 0.6 * 2**-1, 3 = 1.5 * 2**1. If the factor
    is applied repeatedly, the data then moves in the same direction as the value, but more slowly.
    0.995 stays 0.995 * 2**0, because 1.99 * 2**-1 would double the data each time.
    """
    value = float(value)
    mantissa, exponent = math.frexp(value)  # 0.5 <= |mantissa| < 1
    if abs(value) >= 1 or abs(mantissa) == 0.5:
        mantissa, exponent = mantissa * 2, exponent - 1
    exponent = max(-MAX_EXPONENT, min(MAX_EXPONENT, exponent))
    return math.ldexp(value, -exponent), exponent


def exponent_layout(dtype: Any) -> tuple[Any, int]:
    """Return the unsigned integer dtype and the number of mantissa bits of a floating dtype."""
    finfo = jnp.finfo(dtype)
    return {16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[finfo.bits], finfo.nmant


def round_down(value: jax.Array, dtype: Any = None) -> jax.Array:
    """Round the absolute values of a traced array down to powers of two, exactly.

    It clears mantissa bits. 0 and subnormal numbers give 0; inf and nan give the largest power of
    two. If `dtype` has fewer bits, normal numbers below the smallest scale give the smallest scale.

    Derivatives treat the result as a constant. If the array is differentiated, 0 gives 1, because
    a tangent of the data would be lost at the scale 0.
    """
    return _round_down(value, jnp.dtype(value.dtype if dtype is None else dtype))


def exponent(power: jax.Array) -> jax.Array:
    """Return the exponents of traced powers of two as `int32`. 0 gives the lowest exponent."""
    integer, nmant = exponent_layout(power.dtype)
    biased = lax.bitcast_convert_type(power, integer) >> np.array(nmant, integer)
    return biased.astype(jnp.int32) - (jnp.finfo(power.dtype).maxexp - 1)


def power(exponent: jax.Array, dtype: Any) -> jax.Array:
    """Return `2**exponent` for traced integers, clamped to the range of scales."""
    integer, nmant = exponent_layout(dtype)
    biased = jnp.clip(exponent, -MAX_EXPONENT, MAX_EXPONENT) + (jnp.finfo(dtype).maxexp - 1)
    return lax.bitcast_convert_type(biased.astype(integer) << np.array(nmant, integer), dtype)


def reciprocal(power: jax.Array) -> jax.Array:
    """Return `1 / power` for traced powers of two; 1 for 0.

    It is computed on the bits: XLA gives a float division a kernel of its own.
    """
    integer, nmant = exponent_layout(power.dtype)
    bias = jnp.finfo(power.dtype).maxexp - 1
    bits = lax.bitcast_convert_type(power, integer)
    # 2**e and 2**-e have the biased exponents `bias + e` and `bias - e`.
    inverse = lax.sub(np.array(2 * bias << nmant, integer), bits)
    one = jnp.full_like(bits, np.array(bias << nmant, integer))
    inverse = lax.select(lax.eq(bits, np.array(0, integer)), one, inverse)
    return lax.bitcast_convert_type(inverse, power.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_down(value: jax.Array, dtype: np.dtype) -> jax.Array:
    if jnp.finfo(value.dtype).bits < jnp.finfo(dtype).bits:
        # Subnormal float16 numbers are normal numbers of float32, and keep their exponents.
        value = value.astype(dtype)
    integer, nmant = exponent_layout(value.dtype)
    bits = lax.bitcast_convert_type(value, integer)
    # It keeps the bits of the exponent, and clears those of the sign and of the mantissa.
    mask = np.array((1 << jnp.finfo(value.dtype).bits - 1) - (1 << nmant), integer)
    power = lax.bitcast_convert_type(lax.bitwise_and(bits, mask), value.dtype)
    largest = math.ldexp(1.0, min(MAX_EXPONENT, jnp.finfo(value.dtype).maxexp - 1))
    power = lax.min(power, np.array(largest, value.dtype))
    if value.dtype == dtype:
        return power
    smallest = np.array(math.ldexp(1.0, -MAX_EXPONENT), value.dtype)
    return jnp.where(power == 0, power, jnp.maximum(power, smallest)).astype(dtype)


@functools.partial(_round_down.defjvp, symbolic_zeros=True)
def _round_down_jvp(dtype: np.dtype, primals: Any, tangents: Any) -> Any:
    (value,) = primals
    power = _round_down(value, dtype)
    if not isinstance(tangents[0], SymbolicZero):
        power = jnp.where(power == 0, 1, power)
    return power, SymbolicZero(jax.typeof(power))


def round_down_number(value: Any) -> np.ndarray:
    """Round concrete numbers down to powers of two, in float64 and within the range of scales."""
    value = np.abs(np.asarray(value, np.float64))
    exponent = np.clip(np.frexp(value)[1] - 1, -MAX_EXPONENT, MAX_EXPONENT)
    return np.where(value == 0, 0.0, np.ldexp(1.0, exponent))
