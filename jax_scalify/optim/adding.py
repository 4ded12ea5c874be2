"""Sums that are right on average, however small the added term is, as in slow averages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base.stochastic_rounding import mixed
from jax_scalify.ops.custom_scale import custom_scale
from jax_scalify.optim.random_bits import drawn


def _added(x: jax.Array, step: jax.Array, bits: jax.Array | None) -> jax.Array:
    """Return `x + step`, rounded with random bits to a float32 neighbour of the exact sum."""
    total = x + step
    if bits is None or total.dtype != jnp.float32:
        return total
    moved = total - x
    rest = (x - (total - moved)) + (step - moved)  # exact
    # The neighbour on the side of the rest. A bit pattern plus 1 is the next number away from 0.
    pattern = lax.bitcast_convert_type(total, jnp.int32)
    away = (rest > 0) == (total > 0)
    beside = lax.bitcast_convert_type(pattern + jnp.where(away, 1, -1), jnp.float32)
    share = jnp.abs(rest) / jnp.abs(beside - total)
    # A uint32 does not hold 2**32. The float32 number below it is 2**32 - 2**8.
    threshold = (jnp.minimum(share, 1) * np.float32(2.0**32 - 2.0**8)).astype(jnp.uint32)
    takes = (mixed(bits ^ np.uint32(0x5BD1E995)) < threshold) & (rest != 0)
    return jnp.where(takes & jnp.isfinite(total) & jnp.isfinite(beside), beside, total)


@custom_scale
def add_stochastically(
    x: jax.Array, step: jax.Array, bits: jax.Array | None, salt: jax.Array | None
) -> jax.Array:
    """Return `x + step` in float32, right on average however small the step is.

    With rounding to nearest, steps of less than 2**-25 of `x` are lost, and others become up to
    twice as large. A second stochastic rounding to fewer bits, with the same bits, keeps the mean.

    Source: the rest is Knuth's TwoSum, "The Art of Computer Programming", volume 2, 4.2.2.
    """
    return _added(x, step, drawn(x, bits, salt))


@add_stochastically.defscale
def _add_stochastically_scale(x: ScaledArray, step: ScaledArray, bits: Any, salt: Any) -> Any:
    start = x.to_array()
    bits = drawn(start, bits, salt.to_array() if is_scaled(salt) else salt)
    return ScaledArray(_added(start, step.to_array(), bits), 1.0)
