"""The scale that an array is stored at, and its one cast to few bits."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays import scaled_array as array_lib
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.stochastic_rounding import off_zero, round_stochastically, with_sign_of
from jax_scalify.optim.square_roots import moved_for_square

# `j` in `scale = 2**j * s**d`, for a leaf of degree `d` in a gradient of scale `s`. The data of
# gradients has an RMS of 2**-9 to 2**4, and single elements are 2**4 times as large. So a second
# moment in float16 leaves the range at an element of 2**7, and has 8 bits at an RMS of 2**-9.
GRADIENT_EXPONENTS = {1: -6, 2: -2}


_SMALLEST = math.ldexp(1.0, -pow2.MAX_EXPONENT)
# Elements that a block of a GPU reduces without a second kernel.
_ROW = 2**13
# Squares that float32 flushes to 0 are less than 2**-26 of a mean square above this one.
_SMALLEST_MEAN_SQUARE = 2.0**-100


@functools.partial(jax.jit, static_argnames=("dtype", "wide", "is_root"), inline=True)
def saturate(
    x: jax.Array,
    dtype: Any,
    *,
    wide: bool = False,
    bits: jax.Array | None = None,
    is_root: bool = False,
) -> jax.Array:
    """Cast once: what is finite stays finite; in a `wide` leaf, what is not 0 does not become 0.

    A second moment is divided by: if it were rounded to 0, the step would be huge. With random
    `bits` (`uint32`, one an element) the rounding is stochastic, else to nearest even. Of a root it
    is the square that is right on average. Leaves of one shape are traced once.
    """
    wide = wide and dtypes.has_short_range(dtype)
    if bits is not None:
        x = moved_for_square(x, dtype) if is_root else x
        return round_stochastically(x, bits, dtype, keeps_nonzero=wide)
    limit = np.array(jnp.finfo(dtype).max, x.dtype)
    x = jnp.where(jnp.isfinite(x), lax.clamp(-limit, x, limit), x)
    if wide:
        x = with_sign_of(x, off_zero(jnp.abs(x), dtype))
    return dtypes.cast(x, dtype)


def reduced(x: jax.Array, old: jax.Array, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest element and the sum of squares over the old scale's, in one reading of `x`.

    Both are of the shape of the `old` scale, and infinite if an element is not finite. But of a
    leaf whose old scale is 0 the largest is that of the finite ones, since infinity at scale 0
    would be nan. Of no elements it is -inf. `unit` is the `inverse` of the old scale.
    """
    axes = tuple(a for a in range(x.ndim) if not old.ndim or old.shape[a] == 1)
    largest, total = _reduced(x, old, unit, axes)
    return largest.reshape(old.shape), total.reshape(old.shape)


def reduced_by_rows(x: jax.Array, old: jax.Array, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `reduced`, of each row of `x`: as many of the last axes as a block of a GPU can reduce.

    A GPU needs two kernels to reduce a large array. The rows of many arrays are reduced together,
    and the second kernel is needed once.
    """
    first = x.ndim - 1
    while first > 1 and math.prod(x.shape[first - 1 :]) <= _ROW:
        first -= 1
    largest, total = _reduced(x, old.reshape(()), unit.reshape(()), tuple(range(first, x.ndim)))
    return largest.reshape(-1), total.reshape(-1)


def inverse(scale: jax.Array, of_zero: float = 1.0) -> jax.Array:
    """What a multiplication by takes a scale away; a scale 0 has none."""
    is_zero = scale == 0
    return jnp.where(is_zero, of_zero, 1.0) / jnp.where(is_zero, 1, scale)


def _reduced(
    x: jax.Array, old: jax.Array, unit: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    finite, size = jnp.isfinite(x), jnp.abs(x)
    infinity = np.array(np.inf, x.dtype)
    in_units = size * unit.astype(x.dtype)
    sizes = jnp.where(finite, size, jnp.where(old == 0, 0, infinity))
    return _largest_and_sum(sizes, jnp.where(finite, in_units * in_units, infinity), axes)


@functools.partial(jax.jit, static_argnames="axes", inline=True)
def _largest_and_sum(
    sizes: jax.Array, squares: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The maximum of the sizes and the sum of the squares.

    As one reduction, devices that share the array exchange both at once, and a GPU ends it with one
    kernel. XLA:CPU adds up in a row then: in float32 a sum of 2**24 squares is 2**24 at most.
    """

    def apart(sizes: jax.Array, squares: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.reduce_max(sizes, axes), lax.reduce_sum(squares, axes)

    def together(sizes: jax.Array, squares: jax.Array) -> tuple[jax.Array, jax.Array]:
        none = sizes.dtype.type(-np.inf), squares.dtype.type(0)
        return lax.reduce((sizes, squares), none, _larger_and_sum, axes)

    return lax.platform_dependent(sizes, squares, cpu=apart, default=together)


def _larger_and_sum(x: tuple, y: tuple) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(x[0], y[0]), x[1] + y[1]


def scale_by_statistic(
    sizes: tuple[jax.Array, jax.Array], old: jax.Array, top: Any, by_rms: Any
) -> jax.Array:
    """Choose scales for `data = x / scale` by what was `measured`, elementwise.

    By RMS that of the data is in [1, 2), or if an element would leave the range then, the maximum
    is near `2**top`, the top of the range. That is so, too, where values are 2**-50 or 2**64 times
    the old scale, whose squares leave the range of float32, and without `by_rms`. A zero has
    scale 0; what is not finite keeps the `old` scale.
    """
    largest, mean_square = sizes
    power = pow2.round_down(largest, old.dtype)
    scale = power * np.ldexp(np.float32(1), -np.asarray(top))
    in_range = (mean_square > _SMALLEST_MEAN_SQUARE) & jnp.isfinite(mean_square) & by_rms
    rms = pow2.round_down(jnp.sqrt(mean_square), old.dtype) * jnp.where(old == 0, 1, old)
    scale = jnp.maximum(scale, jnp.where(in_range, rms, 0))
    zero = jnp.isinf(mean_square).astype(old.dtype)  # then all others are 0
    scale = jnp.where(power == 0, zero, jnp.maximum(scale, _SMALLEST))
    return jnp.where(jnp.isfinite(largest), scale, old)


def top_exponent(dtype: Any) -> int:
    """The exponent that the maximum of data gets, where it is the maximum that chooses."""
    return min(pow2.floor_exponent(jnp.finfo(dtype).max) - 1, 14)


def scale_of_gradient(grad: ScaledArray, old: jax.Array, degree: int) -> jax.Array:
    """`2**j * s**degree` for a gradient of scale `s`; the `old` scale if it is 0 or not finite.

    A step that is refused for an infinite gradient then leaves every bit as it was. An `old` scale
    0 is none to keep.
    """
    scale = array_lib.align_scale(grad.scale, grad.ndim)
    if scale.ndim:  # one scale for what shares one in `old`
        fits = old.ndim == scale.ndim
        axes = tuple(a for a in range(scale.ndim) if not fits or old.shape[a] == 1)
        scale = jnp.max(scale, axes, keepdims=fits)
    exponent = GRADIENT_EXPONENTS[degree]
    limit = math.ldexp(1.0, (pow2.MAX_EXPONENT - abs(exponent)) // degree)
    followed = jnp.clip(scale, 1 / limit, limit) ** degree * math.ldexp(1.0, exponent)
    keeps = ~jnp.all(jnp.isfinite(grad.data)) & (old != 0)
    old = jnp.where(old == 0, 1, old)
    return jnp.where((scale == 0) | keeps, old, followed.astype(old.dtype))
