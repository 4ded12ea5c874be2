"""Losses for each example, and the gradient that starts every backward pass."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.algebra import ONE, Scale, join
from jax_scalify.nn._rules import scale_rules
from jax_scalify.nn.softmax import class_count, log_scale, logsumexp


def _cross_entropy_slope(logits: Any, axis: int) -> Scale:
    """The RMS of `p - onehot` for s classes at the start, `sqrt(s - 1) / s`, rounded."""
    count = max(class_count(logits, axis), 2)
    return Scale(round(math.log2(math.sqrt(count - 1) / count)))


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

    Scales: `max(log(s), scale of the logits)` for s classes, and for the gradient the cotangent's
    times `sqrt(s - 1) / s`, the RMS of `p - onehot` where all classes are alike. This rule decides
    how good every scale of the backward pass is.

    Args:
        logits: `(..., classes)`, of a floating dtype.
        labels: integers in `[0, classes)`, of the shape of the logits without `axis`.
        axis: the axis of the classes.
        where: bool array that broadcasts to the logits: the classes that count.

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
    return jax.nn.logsumexp(logits, axis, where=where) - picked


@scale_rules(
    scale=lambda logits, labels, where, *, axis: _loss_scale(logits, axis),
    slopes=lambda logits, labels, where, *, axis: (
        _cross_entropy_slope(logits, axis),
        _loss_scale(logits, axis),
    ),
    static_argnames="axis",
)
def softmax_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    axis: int = -1,
    where: jax.Array | None = None,
) -> jax.Array:
    """`-sum(labels * log_softmax(logits))`, as `optax.softmax_cross_entropy`.

    Scales as of `softmax_cross_entropy_with_integer_labels`; for the gradient of the labels that of
    the loss.

    Args:
        logits: `(..., classes)`, of a floating dtype.
        labels: probabilities of the same shape, one-hot or smoothed: `optax.smooth_labels`.
        axis: the axis of the classes.
        where: bool array that broadcasts to the logits: the classes that count.
    """
    log_probabilities = jax.nn.log_softmax(logits, axis, where)
    terms = labels * log_probabilities
    return -jnp.sum(terms, axis, where=where)


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: jax.Array | None = None,
) -> jax.Array:
    """Mean cross-entropy of integer labels, with what language models add to it.

    Args:
        logits: `(..., classes)`, of a floating dtype.
        labels: integers of shape `(...)`.
        label_smoothing: share of the probability that is spread over all classes, in [0, 1).
        z_loss: weight of the squared normaliser `logsumexp(logits)**2` (Chowdhery et al., "PaLM",
            2022, section 5).
        weights: of each label, of shape `(...)`; 0 for padding. The mean is over their sum.

    Returns:
        A 0-d array, in nats.

    Raises:
        ValueError: if `label_smoothing` is not in [0, 1).
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
    if weights is None:
        return jnp.mean(losses)
    weights = weights.astype(losses.dtype)
    total = jnp.sum(weights, dtype=jnp.float32)
    return jnp.sum(losses * weights) / jnp.maximum(total, 1).astype(losses.dtype)


@scale_rules(
    scale=lambda logits, labels: join(ONE, logits.scale),
    slopes=lambda logits, labels: (Scale(-1), logits.scale),
)
def sigmoid_binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """`-labels * log(p) - (1 - labels) * log(1 - p)`, as `optax.sigmoid_binary_cross_entropy`.

    Scales: `max(1, scale of the logits)`, and for the gradient of the logits, `p - labels`, half of
    the cotangent's.

    Args:
        logits: of a floating dtype.
        labels: probabilities, of a floating dtype and a shape that broadcasts with the logits.
    """
    positive, negative = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -labels * positive - (1 - labels) * negative


@scale_rules(
    scale=lambda predictions, targets: join(predictions.scale, targets.scale) ** 2 * Scale(1),
    slopes=lambda predictions, targets: join(predictions.scale, targets.scale) * Scale(1),
)
def squared_error(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """`(predictions - targets)**2`, as `optax.squared_error`.

    Scales: twice the square of the larger one (the difference of two unit Gaussians has variance
    2), and for the gradients the cotangent's times twice the larger one.
    """
    return jnp.square(predictions - targets)
