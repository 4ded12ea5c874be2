"""Statistics of data, from which rescales compute scales."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.base.stochastic_rounding import binade

STATISTICS = ("rms", "l2", "l1", "max")


@functools.partial(jax.jit, static_argnames=("stat", "axes"))
def statistic(data: jax.Array, stat: str, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Return the RMS ("rms", "l2"), mean absolute value ("l1") or maximum ("max").

    The result is at least float32, and a constant to derivatives. Without `axes` the result is 0-d;
    otherwise these axes have size 1. It is correct for every finite input, and non-finite if an
    element is non-finite. XLA flushes subnormal float32 numbers to 0, so a result that would be
    subnormal, but not 0, becomes the smallest normal number.

    The data is read once. If squares or sums have left the range of float32, the data is read again
    and divided by its largest power of two. For float16 and FP8 data this cannot happen.
    """
    data = lax.stop_gradient(data)
    wide = dtypes.real_dtype(dtypes.compute_dtype(data.dtype))
    if data.size == 0:
        return jnp.zeros(jnp.sum(data, axes, keepdims=axes is not None).shape, wide)
    average = _average(jnp.abs(data).astype(wide), stat, axes)
    if stat == "max" or dtypes.is_narrow(data.dtype):
        return average
    # Squares below the smallest normal number are lost. If the mean is less than 2**nmant times as
    # large as this number, the loss is more than a rounding error.
    finfo = jnp.finfo(wide)
    smallest = math.ldexp(1.0, (finfo.minexp + finfo.nmant + 2) // 2)
    in_range = jnp.all((average > smallest) & jnp.isfinite(average))

    def again() -> jax.Array:
        sizes = jnp.abs(data).astype(wide)
        # XLA may flush the reciprocal of a larger power of two to 0.
        largest = math.ldexp(1.0, finfo.maxexp - 2)
        power = jnp.minimum(binade(_average(sizes, "max", axes)), largest)
        power = jnp.where(power == 0, jnp.ones_like(power), power)
        unit = _average(sizes / power, stat, axes)
        is_number = (unit > 0) & (unit < jnp.inf)
        return jnp.where(is_number, jnp.clip(unit * power, finfo.tiny, finfo.max), unit)

    return lax.cond(in_range, lambda: average, again)


def _average(sizes: jax.Array, stat: str, axes: tuple[int, ...] | None) -> jax.Array:
    """Return the statistic of absolute values. Their squares must be in range."""
    keepdims = axes is not None
    if stat == "max":
        return jnp.max(sizes, axes, keepdims=keepdims)
    if stat == "l1":
        return jnp.mean(sizes, axes, keepdims=keepdims)
    return jnp.sqrt(jnp.mean(jnp.square(sizes), axes, keepdims=keepdims))
