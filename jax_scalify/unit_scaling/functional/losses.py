"""Losses: their values are the usual ones, their gradients have unit scale.

The end of a network is a cut-edge: the backward pass may start at any scale.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.unit_scaling.factors import softmax_stds
from jax_scalify.unit_scaling.functional._common import floating, positive
from jax_scalify.unit_scaling.scaling import scale_bwd, scale_fwd


def cross_entropy(logits: Any, labels: Any, mult: float = 1.0, where: Any = None) -> jax.Array:
    """Return the mean cross entropy of `softmax(mult * logits)`; its gradients have unit scale.

    The gradient of the sum over rows is multiplied by s / √(s - 1) / `mult`, as long as all classes
    are about as likely; where `mult` makes some more likely, by what a softmax of Gaussians needs.

    Args:
        logits: `(..., s)`, of which `mult * logits` goes into the softmax.
        labels: integers `(...)`.
        mult: α_loss-softmax.
        where: booleans that broadcast to `(...)`: rows that count; or None for all.

    Returns:
        The mean over the rows that count, a scalar of float32 or wider; 0 if there are none.

    Raises:
        TypeError: if `logits` are not floating, or `labels` not integers.
        ValueError: if the shapes do not fit, or `mult` is not positive and finite.

    Source: Blake et al., *Unit Scaling* (2023), table A.2; *u-µP* (2024), appendix B.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> logits, labels = jnp.zeros((3, 2)), jnp.array([0, 1, 1])
        >>> us.functional.cross_entropy(logits, labels).round(3)
        Array(0.693, dtype=float32)
        >>> print(jax.grad(us.functional.cross_entropy)(logits, labels)[0].round(2))
        [-0.89  0.89]
    """
    (logits,) = floating("cross_entropy", logits=logits)
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"`labels` of `cross_entropy` must be integers, got {labels.dtype}.")
    if not logits.ndim or labels.shape != logits.shape[:-1]:
        raise ValueError(
            "`cross_entropy` takes logits (..., s) and labels (...), got "
            f"{logits.shape} and {labels.shape}."
        )
    mult = positive("mult", mult, "cross_entropy")
    # Its own gradient may be too small for a narrow dtype.
    wide = logits.astype(dtypes.compute_dtype(logits.dtype))
    wide = scale_bwd(wide, _cross_entropy_factor(logits.shape[-1], mult))
    log_p = jax.nn.log_softmax(wide * mult, axis=-1)
    losses = -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    if where is None:
        return scale_fwd(jnp.sum(losses), 1 / max(1, losses.size))
    counts = jnp.broadcast_to(jnp.asarray(where, bool), losses.shape)
    number = jnp.maximum(jnp.sum(counts), 1).astype(losses.dtype)
    return _divide_fwd(jnp.sum(jnp.where(counts, losses, 0)), number)


@jax.custom_jvp
def _divide_fwd(total: jax.Array, number: jax.Array) -> jax.Array:
    """Divide in the forward pass only."""
    return total / number


@_divide_fwd.defjvp
def _divide_fwd_jvp(primals: Any, tangents: Any) -> Any:
    return _divide_fwd(*primals), tangents[0]


def _cross_entropy_factor(classes: int, mult: float) -> float:
    """1 / the RMS of the gradient: of `mult * (p - one_hot)`, over classes."""
    if classes < 2:
        return 1.0
    square = softmax_stds(classes, mult)[0] ** 2
    return math.sqrt(classes / (1 - 2 / classes + square)) / mult


def mse_loss(prediction: Any, target: Any) -> jax.Array:
    """Return the mean square of the difference; its gradients have unit scale.

    The gradient of the sum, 2 (prediction - target), is multiplied by 1/√8, for targets of unit
    scale that are independent of the predictions.

    Args:
        prediction: a floating array.
        target: one of the same shape.

    Returns:
        A scalar.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes differ.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.mse_loss(jnp.array([1.0, 2.0]), jnp.zeros(2))
        Array(2.5, dtype=float32)
    """
    prediction, target = floating("mse_loss", prediction=prediction, target=target)
    if prediction.shape != target.shape:
        raise ValueError(
            f"`mse_loss` takes operands of one shape, got {prediction.shape}, {target.shape}."
        )
    prediction, target = (scale_bwd(x, math.sqrt(1 / 8)) for x in (prediction, target))
    wide = dtypes.compute_dtype(prediction.dtype)
    total = jnp.sum(jnp.square(prediction.astype(wide) - target.astype(wide)))
    return scale_fwd(total, 1 / max(1, prediction.size))
