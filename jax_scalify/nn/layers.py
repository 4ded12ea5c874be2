"""Embedding, dropout, residual connections: plain functions, whose parts have the right rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def embed(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Look up rows: `table[ids]`.

    Scales: that of the table; the gradient is a scatter-add at the cotangent's scale.

    Args:
        table: `(vocabulary, channels)`, of a floating dtype.
        ids: integers of any shape, in `[0, vocabulary)`; others give nan, as `jnp.take`.

    Returns:
        An array of shape `(*ids.shape, channels)`.

    Raises:
        TypeError: if `ids` are not integers.
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"`ids` must be integers, got {ids.dtype}.")
    return jnp.take(table, ids, axis=0)


def dropout(
    x: jax.Array,
    rate: float,
    key: jax.Array | None = None,
    *,
    deterministic: bool = False,
    shape: tuple[int, ...] | None = None,
) -> jax.Array:
    """Set elements to 0 with probability `rate`, and divide others by `1 - rate`.

    Scales: that of `x`, and of the cotangent.

    Args:
        x: array of a floating dtype.
        rate: in [0, 1].
        key: of `jax.random`; not needed where nothing is random.
        deterministic: return `x` as it is, as in evaluation.
        shape: of the random mask, which broadcasts to `x`; by default that of `x`.

    Raises:
        ValueError: if `rate` is not in [0, 1], or `key` is missing.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"`rate` must be in [0, 1], got {rate}.")
    if deterministic or rate == 0:
        return x
    if rate == 1:
        return jnp.zeros_like(x)
    if key is None:
        raise ValueError("`key` is needed to choose what is dropped.")
    keep = jax.random.bernoulli(key, 1 - rate, shape or x.shape)
    return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros_like(x))


def residual_add(x: jax.Array, update: jax.Array) -> jax.Array:
    """`x + update`, of one shape and dtype.

    Scales: the larger one, and for both gradients the cotangent's.

    Raises:
        ValueError: if shapes or dtypes differ: a broadcast here is a mistake.
    """
    if x.shape != update.shape or x.dtype != update.dtype:
        raise ValueError(
            "`x` and `update` must agree in shape and dtype, got "
            f"{x.dtype}{x.shape} and {update.dtype}{update.shape}."
        )
    return x + update
