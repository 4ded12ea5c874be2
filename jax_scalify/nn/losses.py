"""Losses. Every backward pass starts from their gradients, and inherits their scales."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.nn._rules import scale_rules
from jax_scalify.nn.softmax import class_count, log_scale, logsumexp
from jax_scalify.scales.algebra import ONE, Scale, join


def _cross_entropy_slope(logits: Any, axis: int) -> Scale:
    """Return the RMS of `p - onehot` for s equally likely classes: `sqrt(s - 1) / s`, rounded.

    In float16 it is at least 2**-4, so that the label's element keeps 12 octaves of room.
    """
    count = max(class_count(logits, axis), 2)
    exponent = round(math.log2(math.sqrt(count - 1) / count))
    return Scale(max(exponent, -4) if dtypes.is_narrow(logits.dtype) else exponent)


def _loss_scale(logits: Any, axis: int) -> Scale:
    return join(log_scale(class_count(logits, axis)), logits.scale)


@scale_rules(
    scale=lambda logits, labels, where, *, axis: _loss_scale(logits, axis),
    slopes=lambda logits, labels, where, *, axis: _cross_entropy_slope(logits, axis),
    static_argnames="axis",
)
def softmax_cross_entropy_with_integer_labels(
    logits: jax.Array,
    labels: jax.Array,
    axis: int = -1,
    where: jax.Array | None = None,
) -> jax.Array:
    """`logsumexp(logits) - logits[label]`, as `optax.softmax_cross_entropy_with_integer_labels`.

    Scales: `out.scale = max(log(s), logits.scale)` for s classes. The gradient has the cotangent's
    scale times `sqrt(s - 1) / s`, the RMS of `p - onehot` for equally likely classes. All scales of
    the backward pass follow from it.

    Args:
        logits: `(..., classes)`, of a floating dtype.
        labels: integers in `[0, classes)`, of the shape of the logits without `axis`.
        axis: the axis of the classes.
        where: bool array that broadcasts to the logits, True for classes that count. An example
            without such classes has the loss 0.

    Returns:
        An array of the shape of `labels`, in nats.

    Raises:
        TypeError: if `labels` are not integers.

    Source: Blake et al., "Unit Scaling", 2023, table A.2.

    Example:
        >>> logits = jsa.as_scaled_array(jnp.zeros((2, 8), jnp.float16))
        >>> loss = jsa.scalify(jsa.nn.softmax_cross_entropy_with_integer_labels)
        >>> print(jsa.asarray(loss(logits, jnp.array([0, 1]))))
        [2.08 2.08]
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"`labels` must be integers, got {labels.dtype}.")
    picked = jnp.take_along_axis(logits, jnp.expand_dims(labels, axis), axis).squeeze(axis)
    if where is None:
        return jax.nn.logsumexp(logits, axis) - picked
    counts = jnp.any(jnp.broadcast_to(where, logits.shape), axis, keepdims=True)
    total = jax.nn.logsumexp(logits, axis, where=where | ~counts)
    return jnp.where(counts.squeeze(axis), total - picked, 0)


def softmax_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    axis: int | tuple[int, ...] | None = -1,
    where: jax.Array | None = None,
) -> jax.Array:
    """`-sum(labels * log_softmax(logits))`, as `optax.softmax_cross_entropy`.

    Scales as in `softmax_cross_entropy_with_integer_labels`. The gradient of the labels has the
    cotangent's scale times the loss's.

    Args:
        logits: `(..., classes)`, of a floating dtype.
        labels: probabilities of the same shape, one-hot or smoothed (`optax.smooth_labels`).
        axis: the axis or axes of the classes.
        where: bool array that broadcasts to the logits, True for classes that count.

    Example:
        >>> labels = jnp.float32([[0.9, 0.1]])
        >>> print(jsa.nn.softmax_cross_entropy(jnp.zeros((1, 2)), labels).round(4))
        [0.6931]
    """
    return _softmax_cross_entropy(*_alike(logits, labels), where, axis=axis)


@scale_rules(
    scale=lambda logits, labels, where, *, axis: _loss_scale(logits, axis),
    slopes=lambda logits, labels, where, *, axis: (
        _cross_entropy_slope(logits, axis),
        _loss_scale(logits, axis),
    ),
    static_argnames="axis",
)
def _softmax_cross_entropy(logits: Any, labels: Any, where: Any, axis: Any) -> jax.Array:
    return -jnp.sum(labels * jax.nn.log_softmax(logits, axis, where), axis, where=where)


def _alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both arrays in their promoted floating dtype."""
    dtype = jnp.result_type(x, y)
    dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: jax.Array | None = None,
) -> jax.Array:
    """Mean cross-entropy of integer labels, with label smoothing, z-loss and padding.

    Args:
        logits: `(..., classes)`, of a floating dtype.
        labels: integers of shape `(...)`.
        label_smoothing: share of the probability that is spread over all classes, in [0, 1).
        z_loss: weight of the squared normaliser `logsumexp(logits)**2` (Chowdhery et al., "PaLM",
            2022, section 5).
        weights: weight of each label, of shape `(...)`; 0 for padding. The weighted sum of losses
            is divided by the sum of weights. If that is 0, the result is 0.

    Returns:
        A 0-d array, in nats.

    Raises:
        ValueError: if `label_smoothing` is not in [0, 1), or `weights` has another shape.

    Example:
        >>> logits, labels = jnp.float32([[0.0, 0.0], [0.0, 9.0]]), jnp.array([0, 0])
        >>> padded = jnp.array([1, 0])
        >>> print(jsa.nn.cross_entropy(logits, labels, weights=padded).round(4))
        0.6931
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"`label_smoothing` must be in [0, 1), got {label_smoothing}.")
    losses = softmax_cross_entropy_with_integer_labels(logits, labels)
    if label_smoothing:
        spread = jnp.full(logits.shape, 1 / logits.shape[-1], logits.dtype)
        uniform = softmax_cross_entropy(logits, spread)
        losses = (1 - label_smoothing) * losses + label_smoothing * uniform
    if z_loss:
        losses = losses + z_loss * jnp.square(logsumexp(logits, -1))
    wide = losses.astype(dtypes.compute_dtype(losses.dtype))
    if weights is None:
        return jnp.mean(wide).astype(losses.dtype)
    weights = jnp.asarray(weights, wide.dtype)
    if weights.shape != labels.shape:
        raise ValueError(
            f"`weights` must have the shape of `labels`, {labels.shape}, got {weights.shape}."
        )
    total = jnp.sum(weights)
    mean = jnp.sum(wide * weights) / jnp.where(total == 0, 1, total)
    return mean.astype(losses.dtype)


def sigmoid_binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """`-labels * log(p) - (1 - labels) * log(1 - p)`, as `optax.sigmoid_binary_cross_entropy`.

    Scales: `out.scale = max(1, logits.scale)`. The gradient of the logits, `p - labels`, has half
    of the cotangent's scale.

    Args:
        logits: array of a floating dtype.
        labels: probabilities, of a shape that broadcasts with the logits.

    Example:
        >>> labels = jnp.float32([0.0, 1.0])
        >>> print(jsa.nn.sigmoid_binary_cross_entropy(jnp.zeros(2), labels).round(4))
        [0.6931 0.6931]
    """
    return _sigmoid_binary_cross_entropy(*_alike(logits, labels))


@scale_rules(
    scale=lambda logits, labels: join(ONE, logits.scale),
    slopes=lambda logits, labels: (Scale(-1), logits.scale),
)
def _sigmoid_binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    positive, negative = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -labels * positive - (1 - labels) * negative


def squared_error(predictions: jax.Array, targets: jax.Array | None = None) -> jax.Array:
    """`(predictions - targets)**2`, as `optax.squared_error`.

    Scales: with `s = max(predictions.scale, targets.scale)`, `out.scale = 2 * s**2` (the difference
    of two unit Gaussians has the variance 2), and the gradients have `cotangent.scale * 2 * s`.

    Args:
        predictions: array of a floating dtype.
        targets: array of a shape that broadcasts with `predictions`; by default 0.

    Example:
        >>> x = jsa.as_scaled_array(jnp.float16([3.0]), scale=2.0**10)
        >>> y = jsa.scalify(jsa.nn.squared_error)(x)
        >>> print(jsa.asarray(y, jnp.float32))
        [9.]
    """
    if targets is None:
        return jnp.square(predictions)
    return _squared_error(*_alike(predictions, targets))


@scale_rules(
    scale=lambda predictions, targets: join(predictions.scale, targets.scale) ** 2 * Scale(1),
    slopes=lambda predictions, targets: join(predictions.scale, targets.scale) * Scale(1),
)
def _squared_error(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.square(predictions - targets)
