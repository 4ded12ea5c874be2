"""Random bits for stochastic rounding, made from the rounded numbers and a step count."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.base.stochastic_rounding import mixed

# These bits round every number towards 0.
_TOWARDS_ZERO = np.uint32(0)


@functools.partial(jax.jit, inline=True)
def bits_of(x: jax.Array, salt: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Make random bits from the numbers that are rounded, and from numbers that change every step.

    With rounding to nearest, the small steps of a moving average are lost or too large: `0.999 * x`
    in float16, `0.9 * x` in E4M3. These bits need no key in the state, and a step is reproducible.

    Both moments of a parameter have its gradient as their salt, so a kernel that rounds both
    computes the first half of the hash once. Only the upper bits look random, and rounding uses
    the upper 13 for float16, and at most 21 (for E5M2).

    Args:
        x: the numbers to round, in float32.
        salt: array of the shape of `x`, or a scalar, that changes every step.
        count: the result of `count_of`, or None.

    Source: one round each of MurmurHash3, by Austin Appleby, and of lowbias32, in Chris Wellons,
    "Prospecting for hash functions", 2018.
    """
    first, second = (lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32) for a in (x, salt))
    second = second * np.uint32(0x9E3779B1)
    second = second if count is None else second ^ count
    shared = (second ^ (second >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    own = shared + first * np.uint32(0x9E3779B1)
    return (own ^ (own >> np.uint32(15))) * np.uint32(0x846CA68B)


def drawn(x: jax.Array, bits: jax.Array | None, salt: jax.Array | None) -> jax.Array | None:
    """Return the bits to round `x` with: made from a salt, or the given bits, or None."""
    return bits if salt is None else bits_of(x, salt)


def count_of(state: Any) -> jax.Array | None:
    """Return a `uint32` that changes every step; None if the state does not count steps."""
    counts = [
        leaf
        for leaf in jax.tree.leaves(state)
        if jnp.ndim(leaf) == 0 and jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
    ]
    if not counts:
        return None
    total = jnp.uint32(0)
    for count in counts:
        total = total * np.uint32(0x85EBCA6B) + jnp.asarray(count).astype(jnp.uint32)
    return mixed(total * np.uint32(0x9E3779B1) + np.uint32(1))


def bits_to_round(
    x: jax.Array,
    salt: jax.Array | None,
    bits: jax.Array | None,
    count: jax.Array | None,
    dtype: Any,
    *,
    fades: bool = False,
) -> jax.Array | None:
    """Return the bits to round a leaf with: made from a salt, or the given bits, or None.

    If a gradient stays 0, as for an embedding row that does not occur, a moment `x = 0.9 * old`
    depends on `old` only. If its bits round it back to `old`, they do so at every step, and the
    moment moves the weights forever. A step count prevents this. Without a count, a leaf that
    `fades` is rounded towards zero where its gradient is 0.

    Args:
        x: the numbers to round, in float32.
        salt: for a moment, the gradient. A salt of another shape is not used.
        bits: `uint32` bits, one for each element, if there is no salt; or None.
        count: the result of `count_of`, or None.
        dtype: the dtype to round to.
        fades: whether the leaf is a first moment.
    """
    if salt is None:
        return bits
    is_of_shape = jnp.shape(salt) == jnp.shape(x)
    made = bits_of(x, salt if is_of_shape else x, count)
    if count is not None or not (fades and is_of_shape and dtypes.is_narrow(dtype)):
        return made
    return jnp.where(salt == 0, _TOWARDS_ZERO, made)
