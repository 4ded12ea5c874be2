"""Dot-product attention."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.blocks.formats import BlockFormat
from jax_scalify.nn.fp8_dot import DotGeneral
from jax_scalify.nn.layers import dropout
from jax_scalify.nn.softmax import softmax
from jax_scalify.ops.scaling import on_backward, rebalance_scale, set_scaling


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = True,
    forward_dtype: Any = None,
    backward_dtype: Any = jnp.float8_e5m2,
) -> jax.Array:
    """`softmax(query @ key.T * scale + bias) @ value`, as `jax.nn.dot_product_attention`.

    Scores and softmax are computed in at least float32. A masked score is the smallest finite
    number, so that a mask gives the same, finite result in every dtype. A query whose sources are
    all masked attends to all of them equally.

    Scales: by the rules of its parts, except that `out.scale = value.scale / sources**(1/8)`: the
    values that are averaged are correlated.

    Args:
        query: `(batch, time, heads, channels)`, or without `batch`.
        key: `(batch, source, groups, channels)`. `groups` divides `heads`: 1 for multi-query,
            fewer than `heads` for grouped-query attention.
        value: array of the shape of `key`, except for the number of channels.
        bias: added to the scores; broadcasts to `(batch, heads, time, source)`.
        mask: bool, broadcasts like `bias`: True where a query may attend.
        scale: factor of the scores; by default `1 / sqrt(channels)`.
        is_causal: whether to mask later sources.
        query_seq_lengths: integers `(batch,)`. Queries at this position and later give 0.
        key_value_seq_lengths: integers `(batch,)`. Sources at this position and later are masked.
        local_window_size: the number of sources before and after its own position to which a query
            attends: one number for both, or a pair.
        dropout_rate: probability with which a weight becomes 0; see `dropout`.
        dropout_key: `jax.random` key for dropout.
        broadcast_dropout: whether to drop the same weights in all examples and heads.
        forward_dtype: format of the operands of both products, as in `dot_general`; by default
            their own dtype. In FP8, weights are multiplied by the power of two that brings 1, their
            largest possible value, to the top of the format.
        backward_dtype: format of the cotangents of the products, if `forward_dtype` is given.

    Returns:
        An array of the shape and dtype of `query`, with the channels of `value`.

    Raises:
        TypeError: if `mask` is not bool, lengths are not integers, or a format is not floating
            point.
        ValueError: if shapes do not fit, or as `dropout` raises it.

    Example:
        >>> x = jnp.ones((1, 4, 2, 8), jnp.float16)
        >>> x = jsa.as_scaled_array(x, scale=4.0)
        >>> print(jsa.scalify(jsa.nn.dot_product_attention)(x, x, x).shape)
        (1, 4, 2, 8)
    """
    if query.ndim == key.ndim == value.ndim == 3:
        return dot_product_attention(
            query[None],
            key[None],
            value[None],
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            broadcast_dropout=broadcast_dropout,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )[0]
    _check_shapes(query, key, value)
    batch, time, heads, channels = query.shape
    source, groups = key.shape[1:3]
    factor = 1 / math.sqrt(channels) if scale is None else scale
    if mask is not None and mask.dtype != bool:
        raise TypeError(f"`mask` must be bool, True where a query may look, got {mask.dtype}.")
    for name, array in (("bias", bias), ("mask", mask)):
        _check_fits(name, array, (batch, heads, time, source))
    bias, mask = (x if x is None else lax.broadcast_to_rank(x, 4) for x in (bias, mask))
    positions = _Positions(time, source)
    if is_causal:
        mask = positions.seen(mask, right=0)
    if local_window_size is not None:
        mask = positions.seen(mask, *_window(local_window_size))
    if key_value_seq_lengths is not None:
        _check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
        known = jnp.arange(source)[None, None, None] < key_value_seq_lengths[:, None, None, None]
        mask = known if mask is None else mask & known
    products = _Products.of(forward_dtype, backward_dtype)
    scores = _scores(query, key, factor, products)
    if bias is not None:
        wide = dtypes.promoted(scores.dtype, bias.dtype)
        scores = (scores.astype(wide) + bias.astype(wide)).astype(scores.dtype)
    weights = softmax(_masked(scores, mask)).astype(query.dtype)
    weights = dropout(
        weights,
        dropout_rate,
        dropout_key,
        shape=(1, 1, time, source) if broadcast_dropout else None,
    )
    weights = weights.reshape(batch, groups, heads // groups, time, source)
    # Averaged values are correlated. Their mean shrinks by 2**(-1/8) for each octave of sources,
    # and the rule of products assumes 2**(-1/4). The same holds for their gradients.
    value = on_backward(value, _Rebalance(_eighth_root(time * heads // groups)))
    out = products.weighted("bgrts,bsgc->btgrc", weights, value)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    if query_seq_lengths is not None:
        _check_lengths("query_seq_lengths", query_seq_lengths, batch)
        is_query = jnp.arange(time)[:, None, None] < query_seq_lengths[:, None, None, None]
        out = jnp.where(is_query, out, jnp.zeros_like(out))
    return rebalance_scale(out, _eighth_root(source))


@dataclasses.dataclass(frozen=True)
class _Positions:
    """The positions of queries and sources, which both start at 0."""

    time: int
    source: int

    def seen(self, mask: Any, left: int | None = None, right: int | None = None) -> jax.Array:
        """Return `mask` without sources more than `left` before or `right` after a query."""
        source, time = jnp.arange(self.source)[None], jnp.arange(self.time)[:, None]
        distance = (source - time)[None, None]  # (1, 1, time, source)
        for limit, near in ((left, lambda n: distance >= -n), (right, lambda n: distance <= n)):
            if limit is not None:
                mask = near(limit) if mask is None else mask & near(limit)
        return mask


def _window(size: Any) -> tuple[int, int]:
    left, right = (size, size) if isinstance(size, int) else size
    if left < 0 or right < 0:
        raise ValueError(f"`local_window_size` must not be negative, got {size}.")
    return left, right


def _check_lengths(name: str, lengths: jax.Array, batch: int) -> None:
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be integers, got {lengths.dtype}.")
    if lengths.shape != (batch,):
        raise ValueError(f"`{name}` must be one for each example, ({batch},), got {lengths.shape}.")


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if query.ndim != 4 or key.ndim != 4 or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            "`query`, `key` and `value` must have shapes (batch, time, heads, channels) and "
            f"(batch, source, groups, channels), got {query.shape}, {key.shape}, {value.shape}."
        )
    batch, _, heads, channels = query.shape
    groups = key.shape[2]
    if not channels or not groups:
        raise ValueError(
            f"`query` and `key` must have heads and channels, got {query.shape}, {key.shape}."
        )
    if key.shape[0] != batch or key.shape[3] != channels or heads % groups:
        raise ValueError(
            f"`key` must have the batch and the channels of `query` {query.shape} and a number of "
            f"heads that divides its {heads}, got {key.shape}."
        )


def _check_fits(name: str, array: jax.Array | None, shape: tuple[int, ...]) -> None:
    """Raise if an array does not broadcast to the scores."""
    if array is None:
        return
    missing = len(shape) - array.ndim
    if missing < 0 or any(n not in (1, s) for n, s in zip(array.shape, shape[missing:])):
        raise ValueError(
            f"`{name}` must broadcast to (batch, heads, time, source), {shape}, got {array.shape}."
        )


@dataclasses.dataclass(frozen=True)
class _Products:
    """The two products of attention: as `jnp.einsum`, or in the formats of a `DotGeneral`."""

    formats: DotGeneral | None

    @classmethod
    def of(cls, forward_dtype: Any, backward_dtype: Any) -> _Products:
        if forward_dtype is None:
            return cls(None)
        return cls(DotGeneral(forward_dtype=forward_dtype, backward_dtype=backward_dtype))

    def einsum(self, subscripts: str, lhs: jax.Array, rhs: jax.Array, out: Any) -> jax.Array:
        if self.formats is None:
            return jnp.einsum(subscripts, lhs, rhs, preferred_element_type=out)
        types = dict(precision=None, preferred_element_type=out)
        return _compat.einsum(self.formats, subscripts, lhs, rhs, optimize="auto", **types)

    def weighted(self, subscripts: str, weights: jax.Array, value: jax.Array) -> jax.Array:
        """Return a product with weights between 0 and 1, which fill the range of an FP8 format."""
        formats = self.formats
        in_blocks = formats is not None and isinstance(formats.forward_dtype[0], BlockFormat)
        if formats is None or in_blocks or not dtypes.is_fp8(formats.forward_dtype[0]):
            return self.einsum(subscripts, weights, value, None)
        # The factor multiplies the numbers or, inside `scalify`, the data (`set_scaling` to 1). It
        # is divided out after the product. `on_backward` removes both factors from the cotangents.
        largest = 2.0 ** math.floor(math.log2(jnp.finfo(formats.forward_dtype[0]).max))
        numbers = set_scaling(on_backward(weights * largest, _Times(1 / largest)), 1.0)
        value = on_backward(value, _Times(1 / largest))
        out = self.einsum(subscripts, numbers, value, dtypes.promoted(weights.dtype, value.dtype))
        return on_backward(out, _Times(largest)) * (1 / largest)


@dataclasses.dataclass(frozen=True)
class _Times:
    factor: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.factor


def _scores(query: jax.Array, key: jax.Array, factor: float, products: _Products) -> jax.Array:
    """Return the products of queries and keys times a factor: `(batch, heads, time, source)`."""
    batch, time, heads, channels = query.shape
    source, groups = key.shape[1:3]
    grouped = query.reshape(batch, time, groups, heads // groups, channels)
    wide = dtypes.compute_dtype(query.dtype)
    scores = products.einsum("btgrc,bsgc->bgrts", grouped, key, wide) * factor
    return scores.reshape(batch, heads, time, source)


def _masked(scores: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return the scores, with the smallest finite number where `mask` is False."""
    return scores if mask is None else jnp.where(mask, scores, jnp.finfo(scores.dtype).min)


@dataclasses.dataclass(frozen=True)
class _Rebalance:
    factor: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return rebalance_scale(x, self.factor)


def _eighth_root(count: int) -> float:
    return 2.0 ** round(math.log2(max(count, 1)) / 8)
