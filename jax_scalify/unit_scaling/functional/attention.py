"""Attention, and the rotary embedding."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.nn import dot_product_attention
from jax_scalify.unit_scaling.constraints import Constraint
from jax_scalify.unit_scaling.factors import softmax_stds
from jax_scalify.unit_scaling.functional._common import floating, inverse, positive, scaled


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> jax.Array:
    """Apply attention with the scale `mult / d_head`, the result and all gradients of unit scale.

    The factor of the result is 1/√(the mean of Σ p²), with the mean taken exactly for a softmax of
    Gaussians over the keys that each query sees, of all positions; Blake et al. interpolate it
    between √(log s / s) (causal) or 1/√s and 1. With fewer heads of keys than of queries, a key and
    its value get gradients from T * N / (S * K) rows on average: by the root of that theirs are
    larger, and their factors smaller.

    Args:
        query: `(..., T, N, H)`, with at most one leading axis, as in
            `jsa.nn.dot_product_attention`.
        key: `(..., S, K, H)`; N is a multiple of K: fewer heads than of queries for grouped-query
            attention, 1 for multi-query attention.
        value: as `key`.
        mask: booleans that broadcast to `(..., N, T, S)`, or None; they are not known when the
            factors are chosen, which are those of a softmax over all that `is_causal` leaves.
        is_causal: position t sees those up to t only.
        window: how many keys before and behind its own position a query sees, one number for both
            or a pair, as `local_window_size` of `jax.nn.dot_product_attention`. A causal sliding
            window of W keys, as Mistral counts them, is `window=W - 1`.
        mult: of the operand of the softmax. Its size at initialisation is mult / √d_head.
        constraint: on the factors of the result and of the gradients of query, key and value.

    Returns:
        `(..., T, N, H)`.

    Raises:
        TypeError: if an operand is not floating, `mult` is no number, or `window` no integers.
        ValueError: if `mult` is not positive and finite, the shapes do not fit, `window` is
            negative, or with a window there are more queries than keys.

    Source: Blake et al., *u-µP* (2024), appendix B; Ainslie et al., *GQA* (2023), for
    fewer heads of keys; Beltagy et al., *Longformer* (2020), for windows.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> query, key = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 2, 8))
        >>> us.functional.scaled_dot_product_attention(query, key, key, window=1).shape
        (1, 3, 4, 8)
    """
    name = "scaled_dot_product_attention"
    query, key, value = floating(name, query=query, key=key, value=value)
    mult = positive("mult", mult, name)
    if not 3 <= query.ndim <= 4 or key.ndim != query.ndim or key.shape != value.shape:
        raise ValueError(
            f"`{name}` takes query (..., T, N, H) and key and value (..., S, K, H) with at most "
            f"one leading axis, got {query.shape}, {key.shape}, {value.shape}."
        )
    (queries, heads), (length, groups, d_head) = query.shape[-3:-1], key.shape[-3:]
    if not groups or heads % groups:
        raise ValueError(
            f"The heads of `key` of `{name}` must divide those of `query`, {heads}, got {groups}."
        )
    sides = _window(window, name)
    if sides is not None and queries > length:
        raise ValueError(
            f"With a `window`, `{name}` takes no more queries than keys, got {queries} and "
            f"{length}: the last queries would see nothing."
        )
    options: dict[str, Any] = dict(is_causal=is_causal, scale=mult / max(d_head, 1))
    if sides is not None:
        options["local_window_size"] = sides
    output, grad = 1.0, 1.0
    if queries and length and d_head:
        seen = (is_causal, sides, queries if is_causal or sides is not None else None)
        output, _, back = softmax_stds(length, mult / math.sqrt(d_head), *seen)
        output, grad = inverse(output), inverse(back * mult / math.sqrt(d_head))
    # Of a key and its value many rows leave a gradient.
    rows = math.sqrt(queries * heads / max(1, length * groups)) or 1.0

    def attend(query: Any, key: Any, value: Any) -> jax.Array:
        return dot_product_attention(query, key, value, mask=mask, **options)

    grads = [grad, grad / rows, output / rows]
    return scaled(attend, [query, key, value], output, grads, constraint)


def _window(window: Any, name: str) -> tuple[int, int] | None:
    """How many keys a query sees before and behind its own position."""
    if window is None:
        return None
    sides = window if isinstance(window, tuple) else (window, window)
    try:
        left, right = map(operator.index, sides)
    except (TypeError, ValueError):
        raise TypeError(
            f"`window` of `{name}` must be an integer, a pair of integers or None, got {window!r}."
        ) from None
    if left < 0 or right < 0:
        raise ValueError(f"`window` of `{name}` must not be negative, got {window}.")
    return left, right


def rope(x: Any, positions: Any = None, base: float = 10_000.0) -> jax.Array:
    """Rotate pairs of features by their position: scales stay as they are, in both passes.

    Args:
        x: `(..., T, N, H)` with an even H; features i and i + H/2 are a pair.
        positions: integers that broadcast to `(..., T)`; by default 0, 1, ..., T - 1.
        base: of the wavelengths.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not floating.
        ValueError: if `x` has fewer than three axes or an odd number of features.

    Source: Su et al., *RoFormer* (2021).

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> print(us.functional.rope(jnp.ones((2, 1, 2)))[:, 0].round(1))
        [[ 1.   1. ]
         [-0.3  1.4]]
    """
    (x,) = floating("rope", x=x)
    if x.ndim < 3 or x.shape[-1] % 2:
        raise ValueError(f"`x` of `rope` must be (..., T, N, H) with an even H, got {x.shape}.")
    base = positive("base", base, "rope")
    half = x.shape[-1] // 2
    positions = jnp.arange(x.shape[-3]) if positions is None else jnp.asarray(positions)
    wide = dtypes.compute_dtype(x.dtype)
    frequencies = base ** (-jnp.arange(half, dtype=wide) / max(half, 1))
    angles = positions[..., None, None].astype(wide)
    angles = angles * lax.broadcast_to_rank(frequencies, angles.ndim)
    sin, cos = (lax.broadcast_to_rank(f(angles), x.ndim) for f in (jnp.sin, jnp.cos))
    left, right = jnp.split(x.astype(wide), 2, axis=-1)
    rotated = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
