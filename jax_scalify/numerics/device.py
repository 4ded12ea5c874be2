"""Statistics of an array as a part of a compiled program, where `measuring` is on the host."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import dtypes, pow2
from jax_scalify.numerics.measuring import mask_limit

# What `statistics` returns, in this order. The first two are for `combine`: whether the value was
# computed at all, and the share of its elements that `log2_rms` is of.
FIELDS = (
    "computed",
    "ordinary",
    "scale_exponent",
    "log2_rms",
    "zeros",
    "underflow",
    "overflow",
    "nonfinite",
)


@functools.partial(jax.jit, static_argnames="dtype")
def statistics(data: jax.Array, scale: Any = None, dtype: Any = None) -> jax.Array:
    """Return `FIELDS` of an array in float32; complex numbers count as two.

    Elements are told apart by their bits: XLA flushes what is subnormal in float32.

    Args:
        data: of any floating dtype.
        scale: of the data, or None.
        dtype: whose limits count; by default that of the data.
    """
    if jnp.issubdtype(data.dtype, jnp.complexfloating):
        data = jnp.stack([data.real, data.imag])
    target, wide = jnp.finfo(dtype or data.dtype), dtypes.compute_dtype(data.dtype)
    integer, nmant = pow2.exponent_layout(wide)
    pattern = _pattern(data, integer)
    sign = np.array(1, integer) << np.array(8 * wide.itemsize - 1, integer)
    size = pattern & ~sign

    def bits(value: float) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.array(value, wide).view(integer)

    infinity, tiny = bits(np.inf), bits(float(jnp.finfo(wide).tiny))
    step = float(target.smallest_subnormal)
    is_mask = jnp.zeros(size.shape, bool)
    limit = mask_limit(data.dtype)
    if limit is not None:
        is_number = (pattern <= infinity).astype(integer)  # and not negative
        high = jnp.max(pattern * is_number, initial=0)
        is_mask = (pattern > sign) & (size >= bits(limit)) & (size < infinity)
        is_mask = is_mask & (high < bits(limit))
    ordinary = (size < infinity) & ~is_mask
    count = jnp.sum(ordinary)
    largest = jnp.max(jnp.where(ordinary, size, 0), initial=0)
    share = lambda found: jnp.sum(found) / max(found.size, 1)  # noqa: E731
    fields = (
        1.0,
        share(ordinary),
        jnp.nan if scale is None else _scale_exponent(scale),
        _log2_rms(size, ordinary, count, largest, tiny, wide),
        share(size <= bits(step / 2)),  # halves are rounded to even
        share((size > 0) & (size < bits(float(target.tiny) - step / 2))),
        share((size >= bits(float(target.max))) & (size <= infinity) & ~is_mask),
        share(size >= infinity),
    )
    return jnp.stack([jnp.asarray(f, jnp.float32) for f in fields])


def _pattern(data: jax.Array, integer: Any) -> jax.Array:
    """The bits of an array as float32 or float64."""
    if data.dtype == jnp.bfloat16:  # the upper half of float32
        upper = lax.bitcast_convert_type(data, jnp.uint16).astype(integer)
        return upper << np.array(16, integer)
    wide = data.astype(dtypes.compute_dtype(data.dtype))
    return lax.bitcast_convert_type(wide, integer)


def _scale_exponent(scale: Any) -> jax.Array:
    """The exponent of the largest of some powers of two; -inf if all are 0."""
    largest = jnp.max(jnp.asarray(scale, jnp.float32), initial=0)
    return jnp.where(largest == 0, -jnp.inf, pow2.exponent(largest))


def _log2_rms(
    size: jax.Array, ordinary: jax.Array, count: jax.Array, largest: jax.Array, tiny: Any, wide: Any
) -> jax.Array:
    """`log2` of the RMS of numbers given by their bits; squares are in range for any of them."""
    finfo, (integer, nmant) = jnp.finfo(wide), pow2.exponent_layout(wide)
    exponent = (largest >> np.array(nmant, integer)).astype(jnp.int32) - (finfo.maxexp - 1)
    exponent = jnp.clip(exponent, -pow2.MAX_EXPONENT, pow2.MAX_EXPONENT)
    power = pow2.power(exponent, wide)
    # A number that is subnormal in float32 would be flushed; its bits count it in steps.
    subnormal = size.astype(wide) * np.array(2.0**-nmant, wide)
    subnormal = subnormal * (np.array(finfo.tiny, wide) / power)
    unit = jnp.where(size < tiny, subnormal, lax.bitcast_convert_type(size, wide) / power)
    squares = jnp.sum(jnp.square(jnp.where(ordinary, unit, 0)))
    mean = squares / jnp.maximum(count, 1).astype(wide)
    return jnp.log2(mean).astype(jnp.float32) / 2 + exponent.astype(jnp.float32)


def absent() -> jax.Array:
    """Return the statistics of a value that was not computed, in a branch that was not taken."""
    return jnp.array([0, 0, jnp.nan, -jnp.inf] + [0] * (len(FIELDS) - 4), jnp.float32)


def combine(found: jax.Array) -> jax.Array:
    """Return the statistics of all elements of arrays of one shape, given those of each in a row.

    The scale exponent is the largest one.
    """
    computed, ordinary = found[:, 0], found[:, 0] * found[:, 1]
    total, elements = jnp.sum(computed), jnp.sum(ordinary)
    exponents = jnp.where(ordinary > 0, found[:, 3], -jnp.inf)
    top = jnp.max(exponents)
    top = jnp.where(jnp.isfinite(top), top, 0)
    squares = jnp.sum(ordinary * jnp.exp2(2 * (exponents - top)))
    times = jnp.where(total == 0, 1, total)
    whole = (
        jnp.mean(computed),
        elements / times,
        jnp.nanmax(found[:, 2]),
        jnp.log2(squares / jnp.where(elements == 0, 1, elements)) / 2 + top,
    )
    return jnp.concatenate([jnp.stack(whole), jnp.sum(computed[:, None] * found[:, 4:], 0) / times])
