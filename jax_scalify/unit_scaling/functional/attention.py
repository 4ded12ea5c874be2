"""Attention, and the rotary embedding."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

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
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> jax.Array:
    """Apply attention with the scale `mult / d_head`, the result and all gradients of unit scale.

    The factor of the result is 1/√(the mean of Σ p²), with the mean taken exactly for a softmax of
    Gaussians; Blake et al. interpolate it between √(log s / s) (causal) or 1/√s and 1.

    Args:
        query: `(..., T, N, H)`, with at most one leading axis, as in
            `jsa.nn.dot_product_attention`.
        key: `(..., S, K, H)`; N is a multiple of K.
        value: as `key`.
        mask: booleans that broadcast to `(..., N, T, S)`, or None; they are not known when the
            factors are chosen, which are those of a softmax over all that `is_causal` leaves.
        is_causal: position t sees those up to t only.
        mult: of the operand of the softmax. Its size at initialisation is mult / √d_head.
        constraint: on the factors of the result and of the gradients of query, key and value.

    Returns:
        `(..., T, N, H)`.

    Raises:
        TypeError: if an operand is not floating or `mult` is no number.
        ValueError: if `mult` is not positive and finite, or the shapes do not fit.

    Source: Blake et al., *u-µP* (2024), table 2 and appendix B.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> x = jnp.ones((1, 1, 2, 8))
        >>> us.functional.scaled_dot_product_attention(x, x, x).shape
        (1, 1, 2, 8)
    """
    name = "scaled_dot_product_attention"
    query, key, value = floating(name, query=query, key=key, value=value)
    mult = positive("mult", mult, name)
    if not 3 <= query.ndim <= 4 or key.ndim != query.ndim or key.shape != value.shape:
        raise ValueError(
            f"`{name}` takes query (..., T, N, H) and key and value (..., S, K, H) with at most "
            f"one leading axis, got {query.shape}, {key.shape}, {value.shape}."
        )
    length, d_head = key.shape[-3], key.shape[-1]
    output, grad = _factors(length, d_head, mult, is_causal)
    # Of a key and its value many rows leave a gradient.
    rows = math.sqrt(query.shape[-3] * query.shape[-2] / max(1, length * key.shape[-2])) or 1.0

    def attend(query: Any, key: Any, value: Any) -> jax.Array:
        scale = mult / d_head
        return dot_product_attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale)

    grads = [grad, grad / rows, output / rows]
    return scaled(attend, [query, key, value], output, grads, constraint)


def _factors(length: int, d_head: int, mult: float, is_causal: bool) -> tuple[float, float]:
    """Factors of the result, and of the gradient of the query."""
    if not length or not d_head:
        return 1.0, 1.0
    output, _, back = softmax_stds(length, mult / math.sqrt(d_head), is_causal)
    return inverse(output), inverse(back * mult / math.sqrt(d_head))


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
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = base ** (-jnp.arange(half, dtype=wide) / max(half, 1))
    angles = positions[..., None, None].astype(wide) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    left, right = jnp.split(x.astype(wide), 2, axis=-1)
    rotated = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
