"""Embedding, dropout, residual connections."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.ops.custom_scale import custom_scale
from jax_scalify.rules.shared.along_axes import uniform_over
from jax_scalify.rules.shared.products import made
from jax_scalify.scales.algebra import Scale


@custom_scale
def embed(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Look up rows: `table[ids]`, as `jnp.take`.

    Scales: `out.scale = table.scale`, or `table.scale[ids]` if each row has a scale. A row's
    gradient is the sum over all its uses. Words and bytes follow Zipf's law: among `n` ids out of
    `v`, row i is used about `n / (i * log(v))` times. The gradient's scale is the cotangent's times
    the RMS of these numbers, at least 1.

    Args:
        table: `(vocabulary, channels)`, of a floating dtype.
        ids: integers of any shape, in `[0, vocabulary)`. Other ids give nan.

    Returns:
        An array of shape `(*ids.shape, channels)`.

    Raises:
        TypeError: if `ids` are not integers.

    Example:
        >>> table = jsa.as_scaled_array(jnp.ones((4, 2), jnp.float16), scale=0.5)
        >>> print(jsa.scalify(jsa.nn.embed)(table, jnp.array([3, 0])).scale)
        0.5
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"`ids` must be integers, got {ids.dtype}.")
    return jnp.take(table, ids, axis=0)


@embed.defscale
def _embed_scale(table: Operand, ids: jax.Array) -> ScaledArray:
    rows = jnp.take(table.data, ids, axis=0)
    if not np.ndim(table.scale):
        return ScaledArray(rows, table.scale)
    scale = jnp.broadcast_to(jnp.asarray(table.scale), (table.shape[0], np.shape(table.scale)[1]))
    return ScaledArray(rows, jnp.take(scale, ids, axis=0, mode="clip"))


@embed.defscale_vjp
def _embed_scale_vjp(
    table: Operand, ids: jax.Array, cotangent: Operand
) -> tuple[ScaledArray, None]:
    cotangent = uniform_over(cotangent)
    # Its elements are not read: its type gives the gradient's shape and sharding.
    rows = table.data.astype(dtypes.compute_dtype(table.dtype))
    pull = jax.vjp(lambda rows: jnp.take(rows, ids, axis=0), rows)[1]
    (total,) = pull(cotangent.source.astype(rows.dtype))
    uses = _zipf_uses(ids.size, table.shape[0])
    return made(total, cotangent.unit, cotangent.scale * uses, table.dtype), None


def _zipf_uses(count: int, vocabulary: int) -> Scale:
    """Return the RMS over rows of their numbers of uses, by `sum(1 / i**2) = pi**2 / 6`."""
    uses = count * math.pi / math.sqrt(6 * max(vocabulary, 1)) / math.log(max(vocabulary, 3))
    return Scale(math.floor(math.log2(max(uses, 1))))


def dropout(
    x: jax.Array,
    rate: float,
    key: jax.Array | None = None,
    *,
    deterministic: bool = False,
    shape: tuple[int, ...] | None = None,
) -> jax.Array:
    """Set elements to 0 with probability `rate`, and divide the others by `1 - rate`.

    Scales: `out.scale = x.scale`; the gradient has the cotangent's scale.

    Args:
        x: array of a floating dtype.
        rate: probability in [0, 1].
        key: `jax.random` key; not needed if `deterministic`, or if `rate` is 0 or 1.
        deterministic: whether to return `x` unchanged, as in evaluation.
        shape: shape of the random mask, which broadcasts to `x`; by default that of `x`.

    Raises:
        TypeError: if `x` is not floating point.
        ValueError: if `rate` is not in [0, 1], or `key` is missing.

    Example:
        >>> print(jsa.nn.dropout(jnp.ones(100), 0.75, jax.random.key(0)).max())
        4.0
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`x` must be floating point, got {x.dtype}.")
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
    """`x + update`, for arrays of equal shape and dtype.

    Scales: `out.scale = max(x.scale, update.scale)`; both gradients have the cotangent's scale.

    Raises:
        ValueError: if shapes or dtypes differ. A broadcast here would be a mistake.

    Example:
        >>> x = jsa.as_scaled_array(jnp.ones(2), scale=4.0)
        >>> update = jsa.as_scaled_array(jnp.ones(2), scale=0.5)
        >>> print(jsa.scalify(jsa.nn.residual_add)(x, update).scale)
        4.0
    """
    if x.shape != update.shape or x.dtype != update.dtype:
        raise ValueError(
            "`x` and `update` must agree in shape and dtype, got "
            f"{x.dtype}{x.shape} and {update.dtype}{update.shape}."
        )
    return x + update
