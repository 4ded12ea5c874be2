"""Random bits for stochastic rounding, made of what is rounded and of what changes at each step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.base.mixing import mixed

_TOWARDS_ZERO = np.uint32(2**32 - 1)


@functools.partial(jax.jit, inline=True)
def bits_of(x: jax.Array, salt: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Make random bits of the numbers that are rounded, and of others that change at each step.

    Rounded to nearest, the small steps of a moving average are lost or too large (0.999 x in
    float16, 0.9 x in E4M3). These bits need no key in the state, and a step repeats exactly.

    Args:
        x: what is rounded, in float32.
        salt: of the shape of `x`, or a scalar.
        count: that of `count_of`, or None.
    """
    first, second = (lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32) for a in (x, salt))
    second = second if count is None else second ^ count
    return mixed(first * np.uint32(0x9E3779B1) + second)


def drawn(x: jax.Array, bits: jax.Array | None, salt: jax.Array | None) -> jax.Array | None:
    """The bits to round `x` with: those given, or made of it and a salt; None for to nearest."""
    return bits if salt is None else bits_of(x, salt)


def count_of(state: Any) -> jax.Array | None:
    """A scalar `uint32` that is another one at each step; None if the state counts no steps."""
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
    """The bits to round a leaf with: made of it and a salt, or those given; None for to nearest.

    Where a gradient stays 0, as of a row of an embedding that does not occur, a moment
    `x = 0.9 * old` is the same whenever `old` is, and bits of the same numbers would round it back
    to `old` for ever: it would move the weights at every step. A count mends it. Where there is
    none, what `fades` is rounded towards zero there.

    Args:
        x: what is rounded, in float32.
        salt: of a moment the gradient; of another shape it is not looked at.
        bits: without a salt, `uint32`, one an element; or None.
        count: that of `count_of`, or None.
        dtype: that it is rounded to.
        fades: whether it is a first moment.
    """
    if salt is None:
        return bits
    is_of_shape = jnp.shape(salt) == jnp.shape(x)
    made = bits_of(x, salt if is_of_shape else x, count)
    if count is not None or not (fades and is_of_shape and dtypes.has_short_range(dtype)):
        return made
    return jnp.where(salt == 0, _TOWARDS_ZERO, made)
