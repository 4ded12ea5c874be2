"""The scale at which an array is stored, and its cast to few bits."""

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
from jax_scalify.base.stochastic_rounding import keep_nonzero, round_stochastically
from jax_scalify.optim.arena import first_axis_of_rows
from jax_scalify.optim.square_roots import moved_for_square

# `j` in `scale = 2**j * s**d`, for a leaf of degree `d` and a gradient of scale `s`. The data of
# gradients has an RMS of 2**-9 to 2**4, and single elements are 2**4 times as large. A float16
# second moment then overflows at a gradient of 2**7, and keeps 8 bits at an RMS of 2**-9.
GRADIENT_EXPONENTS = {1: -6, 2: -2}


_SMALLEST = math.ldexp(1.0, -pow2.MAX_EXPONENT)
# Above this mean square, the squares that float32 flushes to 0 are less than 2**-26 of it.
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
    """Cast so that finite values stay finite, and in a `wide` leaf nonzero values stay nonzero.

    Optimizers divide by second moments: a moment rounded to 0 would make a huge step. With
    random `bits` (one `uint32` for each element) rounding is stochastic, otherwise to nearest even.
    If `is_root`, stochastic rounding keeps the mean of the square. JAX traces the function once for
    leaves of one shape.
    """
    if bits is not None:
        if not is_root:
            return round_stochastically(x, bits, dtype, nonzero=wide)
        rounded = round_stochastically(moved_for_square(x, dtype), bits, dtype)
    else:
        limit = np.array(jnp.finfo(dtype).max, x.dtype)
        limited = jnp.where(jnp.isfinite(x), lax.clamp(-limit, x, limit), x)
        rounded = dtypes.cast(limited, dtype)
    return keep_nonzero(rounded, x, dtype) if wide else rounded


def reduced(x: jax.Array, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest finite size in `x`, and the sum of `(x * unit)**2`, in one reading of `x`.

    `unit` is the `inverse` of the old scale. Both results have its shape. If an element is not
    finite, the sum is -inf or nan. Without finite elements, the largest size is -inf.
    """
    axes = tuple(a for a in range(x.ndim) if not unit.ndim or unit.shape[a] == 1)
    largest, total = _reduced(x, unit, axes)
    return largest.reshape(unit.shape), total.reshape(unit.shape)


def reduced_by_rows(x: jax.Array, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `reduced` for each row of `x`: as many last axes as a GPU thread block can reduce.

    A GPU needs two kernels to reduce a large array. The rows of many arrays are then reduced
    together, so that the second kernel is needed only once.
    """
    axes = tuple(range(first_axis_of_rows(x.shape), x.ndim))
    largest, total = _reduced(x, unit.reshape(()), axes)
    return largest.reshape(-1), total.reshape(-1)


def inverse(scale: jax.Array, of_zero: float = 1.0) -> jax.Array:
    """Return `1 / scale`, or `of_zero` where the scale is 0."""
    is_zero = scale == 0
    return jnp.where(is_zero, of_zero, 1.0) / jnp.where(is_zero, 1, scale)


def _reduced(x: jax.Array, unit: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    finite, size = jnp.isfinite(x), jnp.abs(x)
    in_units = size * unit.astype(x.dtype)
    sizes, squares = (
        jnp.where(finite, y, np.array(-np.inf, x.dtype)) for y in (size, in_units * in_units)
    )
    return _largest_and_sum(sizes, squares, axes)


@functools.partial(jax.jit, static_argnames="axes", inline=True)
def _largest_and_sum(
    sizes: jax.Array, squares: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return the maximum of the sizes and the sum of the squares.

    Both are one reduction, so that devices that share the array exchange both at once, and a GPU
    needs one final kernel. On CPUs they are two reductions. XLA:CPU would add up sequentially in a
    joint reduction, and a float32 sum of ones would stop at 2**24.
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
    """Choose scales for `data = x / scale` from `sizes`, the largest element and the mean square.

    If `by_rms`, the RMS of the data is in [1, 2). Otherwise the maximum of the data is in
    `[2**top, 2 * 2**top)`, near the top of the range. The maximum is used too if an element would
    leave the range, or if values are 2**-50 or 2**64 times the old scale, so that their squares
    leave the range of float32. Zeros get the scale 0. If an element is not finite, the mean square
    is -inf or nan, and the `old` scale is kept, unless it is 0: infinity at the scale 0 is nan.
    """
    largest, mean_square = sizes
    is_finite = mean_square >= 0
    power = pow2.round_down(largest, old.dtype)
    scale = power * np.ldexp(np.float32(1), -np.asarray(top))
    in_range = (mean_square > _SMALLEST_MEAN_SQUARE) & jnp.isfinite(mean_square) & by_rms
    rms = pow2.round_down(jnp.sqrt(mean_square), old.dtype) * jnp.where(old == 0, 1, old)
    scale = jnp.maximum(scale, jnp.where(in_range, rms, 0))
    # Where the largest size is 0, an element that is not finite gets the scale 1.
    one_or_zero = (~is_finite).astype(scale.dtype)
    scale = jnp.where(power == 0, one_or_zero, jnp.maximum(scale, _SMALLEST))
    return jnp.where(is_finite | (old == 0), scale, old)


def top_exponent(dtype: Any) -> int:
    """Return the exponent that the data's maximum gets, if the maximum chooses the scale."""
    return min(pow2.floor_exponent(jnp.finfo(dtype).max) - 1, 14)


def scale_of_gradient(grad: ScaledArray, old: jax.Array, degree: int) -> jax.Array:
    """Return `2**j * s**degree`, where `s` is the scale of the gradient.

    If `s` is 0 or the gradient is not finite, return the `old` scale: a step that is skipped for an
    infinite gradient then changes no bit of the state. An `old` scale of 0 counts as 1.
    """
    scale = array_lib.align_scale(grad.scale, grad.ndim)
    if scale.ndim:  # elements that share a scale in `old` must share one here
        fits = old.ndim == scale.ndim
        axes = tuple(a for a in range(scale.ndim) if not fits or old.shape[a] == 1)
        scale = jnp.max(scale, axes, keepdims=fits)
    exponent = GRADIENT_EXPONENTS[degree]
    limit = math.ldexp(1.0, (pow2.MAX_EXPONENT - abs(exponent)) // degree)
    followed = jnp.clip(scale, 1 / limit, limit) ** degree * math.ldexp(1.0, exponent)
    keeps = ~jnp.all(jnp.isfinite(grad.data)) & (old != 0)
    old = jnp.where(old == 0, 1, old)
    return jnp.where((scale == 0) | keeps, old, followed.astype(old.dtype))
