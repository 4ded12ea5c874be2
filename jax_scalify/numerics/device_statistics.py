"""Statistics of an array as a part of a compiled program; `host_statistics` looks at values."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes, pow2
from jax_scalify.numerics.host_statistics import mask_limit

# What `observe` returns, in this order: `combine` takes the maximum of three, and sums the others.
_FIELDS = """scale limit highest size small middle large masked zeros underflow overflow
nonfinite masks masks_overflow""".split()
# Squares of float32 leave its range: those of numbers below 2**-50 and from 2**45 on are summed
# apart, of the numbers times 2**90 and 2**-90; the latter those of masks, too.
_SMALL, _LARGE, _SHIFT = 2.0**-50, 2.0**45, 90


@functools.partial(jax.jit, static_argnames="dtype")
def observe(data: jax.Array, scale: Any = None, dtype: Any = None) -> jax.Array:
    """Return what `finish` makes statistics of; complex numbers count as two.

    The data is read once. Elements are told apart by their bits: XLA flushes what is subnormal in
    float32.

    Args:
        data: of any floating dtype.
        scale: of the data, or None.
        dtype: whose limits count; by default that of the data.
    """
    if jnp.issubdtype(data.dtype, jnp.complexfloating):
        data = jnp.stack([data.real, data.imag])
    own, wide = data.dtype, dtypes.compute_dtype(data.dtype)
    target, (integer, nmant) = jnp.finfo(dtype or own), pow2.exponent_layout(wide)
    pattern = _pattern(jnp.atleast_1d(data), integer)
    sign = np.array(1, integer) << np.array(8 * wide.itemsize - 1, integer)
    size = pattern & ~sign

    def bits(value: float) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.array(value, wide).view(integer)

    infinity, step = bits(np.inf), float(target.smallest_subnormal)
    limit = mask_limit(own) or np.inf
    is_mask = (pattern > sign) & (size >= bits(limit)) & (size < infinity)
    number = lax.bitcast_convert_type(size, wide)
    ordinary = jnp.where((size < infinity) & ~is_mask, number, 0)
    none = jnp.zeros_like(ordinary)
    small = large = masked = none
    if not dtypes.is_narrow(own):
        is_small, is_large = ordinary < _SMALL, ordinary >= _LARGE
        # What is subnormal would be flushed; its bits count it in steps.
        steps = size.astype(wide) * np.array(2.0 ** (_SHIFT // 2 - nmant), wide)
        steps = steps * np.array(float(jnp.finfo(wide).tiny) * 2.0 ** (_SHIFT // 2), wide)
        is_subnormal = size < bits(float(jnp.finfo(wide).tiny))
        up = jnp.where(is_subnormal, steps, ordinary * np.array(2.0**_SHIFT, wide))
        small = jnp.square(jnp.where(is_small, up, 0))
        down = jnp.square(number * np.array(2.0**-_SHIFT, wide))
        large, masked = jnp.where(is_large, down, 0), jnp.where(is_mask, down, 0)
        ordinary = jnp.where(is_small | is_large, 0, ordinary)
    overflow = (size >= bits(float(target.max))) & (size <= infinity)
    counts = (
        size <= bits(step / 2),  # halves are rounded to even
        (size > 0) & (size < bits(float(target.tiny) - step / 2)),
        overflow & ~is_mask,
        size >= infinity,
        is_mask,
        overflow & is_mask,
    )
    arrays = [jnp.where(pattern <= infinity, number, 0)]
    arrays += [small, jnp.square(ordinary), large, masked]
    arrays += [count.astype(jnp.int32) for count in counts]
    highest, *sums = _reduce(arrays)
    fields = [jnp.nan if scale is None else jnp.max(scale, initial=0), limit, highest, data.size]
    parts = [jnp.asarray(f, jnp.float32) for f in (*fields, *sums[:4])]
    return jnp.concatenate([jnp.stack(parts), jnp.stack(sums[4:]).astype(jnp.float32)])


def _pattern(data: jax.Array, integer: Any) -> jax.Array:
    """The bits of an array as float32 or float64."""
    if data.dtype == jnp.bfloat16:  # the upper half of float32
        upper = lax.bitcast_convert_type(data, jnp.uint16).astype(integer)
        return upper << np.array(16, integer)
    wide = data.astype(dtypes.compute_dtype(data.dtype))
    return lax.bitcast_convert_type(wide, integer)


def _reduce(arrays: list[jax.Array]) -> list[jax.Array]:
    """The maximum of the first array, and the sums of the others, in one pass over them."""

    def both(xs: Any, ys: Any) -> Any:
        pairs = zip(xs[1:], ys[1:], strict=True)
        return [lax.max(xs[0], ys[0]), *(x + y for x, y in pairs)]

    zeros = [np.zeros((), a.dtype) for a in arrays]
    return lax.reduce(arrays, zeros, both, range(arrays[0].ndim))


def absent() -> jax.Array:
    """Return what `observe` would of no array: of a value in a branch that was not taken."""
    return jnp.zeros(len(_FIELDS), jnp.float32).at[0].set(jnp.nan)


def combine(found: jax.Array) -> jax.Array:
    """Return what `observe` would of several arrays together, given its results in rows."""
    highest = jnp.max(found[:, 1:3], 0)
    return jnp.concatenate([jnp.nanmax(found[:, :1], 0), highest, jnp.sum(found[:, 3:], 0)])


def finish(found: jax.Array) -> dict[str, jax.Array]:
    """Return statistics by their names, given results of `observe` in rows; nan of no array.

    `scale_exponent` is nan for no scale, and -inf if all are 0. `log2_rms` is that of the finite
    elements without masks. The others are shares of all elements, after rounding to the dtype.
    """
    x = dict(zip(_FIELDS, found.T, strict=True))
    size, was_seen = jnp.maximum(x["size"], 1), x["limit"] > 0
    are_masks = x["highest"] < x["limit"]  # else they are values as any other
    kept, masked, overflow = (
        jnp.where(are_masks, 0, x[name]) for name in ("masks", "masked", "masks_overflow")
    )
    count = jnp.maximum(size - x["nonfinite"] - x["masks"] + kept, 1)
    limit = jnp.where(x["limit"] < _LARGE, x["limit"], 0)  # of float16: no number is beyond it
    squares = x["small"], x["middle"] + kept * jnp.square(limit), x["large"] + masked
    shares = {name: x[name] / size for name in ("zeros", "underflow", "nonfinite")}
    exponent = pow2.exponent(x["scale"]).astype(x["scale"].dtype)
    exponent = jnp.where(x["scale"] == 0, -jnp.inf, exponent)
    statistics = {
        "scale_exponent": jnp.where(jnp.isnan(x["scale"]), jnp.nan, exponent),
        "log2_rms": (_log2_sum(*squares) - jnp.log2(count)) / 2,
        "overflow": (x["overflow"] + overflow) / size,
        **shares,
    }
    return {name: jnp.where(was_seen, value, jnp.nan) for name, value in statistics.items()}


def _log2_sum(small: jax.Array, middle: jax.Array, large: jax.Array) -> jax.Array:
    """`log2` of the sum of squares, of which two are shifted; -inf for 0."""
    down = np.float32(2.0**-_SHIFT)
    if_large = jnp.log2(large + middle * down * down) + 2 * _SHIFT
    if_middle = jnp.log2(middle + small * down * down)
    if_small = jnp.log2(small) - 2 * _SHIFT
    return jnp.where(large > 0, if_large, jnp.where(middle > 0, if_middle, if_small))
