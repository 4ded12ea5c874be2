"""Normalisation. Its results have the static scale 1, so that chains of scales end here."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.nn._rules import axes_of, scale_rules
from jax_scalify.ops.custom_scale import custom_scale
from jax_scalify.ops.scaling import get_data_and_scale
from jax_scalify.rules.shared.products import made
from jax_scalify.scales.algebra import ONE, ZERO, Scale, join


def _check_epsilon(epsilon: float) -> None:
    if isinstance(epsilon, (int, float)) and not epsilon >= 0:
        raise ValueError(f"`epsilon` must not be negative, got {epsilon!r}.")


def _root(epsilon: float) -> Scale:
    """Return `sqrt(epsilon)`, rounded: the smallest possible divisor of a norm."""
    _check_epsilon(epsilon)
    return Scale(round(math.log2(epsilon) / 2)) if epsilon else ZERO


@scale_rules(
    scale=lambda x, *, axis, epsilon, center: ONE,
    slopes=lambda x, *, axis, epsilon, center: join(x.scale, _root(epsilon)) ** -1,
    static_argnames=("axis", "epsilon", "center"),
)
def standardize(
    x: jax.Array,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-5,
    center: bool = True,
) -> jax.Array:
    """`(x - mean) / sqrt(variance + epsilon)`; without `center`, `x / sqrt(mean(x**2) + epsilon)`.

    The statistics are taken in at least float32.

    Scales: `out.scale = 1`, static. The gradient has
    `cotangent.scale / max(x.scale, sqrt(epsilon))`, because the derivative is `1 / std`.

    Args:
        x: array of a floating dtype.
        axis: the axis or axes that are normalised together.
        epsilon: added to the variance, inside the root.
        center: whether to subtract the mean.

    Raises:
        TypeError: if `x` is not floating point, or `axis` is no int and no tuple of ints.
        ValueError: if `epsilon` is negative, or `x` has no such axis.

    Example:
        >>> x = jsa.as_scaled_array(jnp.float16([1.0, 3.0]), scale=2.0**20)
        >>> print(jsa.scalify(jsa.nn.standardize)(x).data)
        [-1.  1.]
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`x` must be floating point, got {x.dtype}.")
    _check_epsilon(epsilon)
    axes_of(x, axis)
    value = x.astype(dtypes.compute_dtype(x.dtype))
    if center:
        value = value - jnp.mean(value, axis, keepdims=True)
    variance = jnp.mean(jnp.square(value), axis, keepdims=True)
    return (value * lax.rsqrt(variance + epsilon)).astype(x.dtype)


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-6,
    relative_epsilon: bool = False,
) -> jax.Array:
    """`standardize(x) * scale + bias`: layer norm (Ba et al., 2016), at the static scale 1.

    Args:
        x: array of a floating dtype.
        scale: factor of the result; its shape broadcasts to that of `x`.
        bias: added to the result; its shape broadcasts to that of `x`.
        axis: the axis or axes that are normalised together.
        epsilon: added to the variance.
        relative_epsilon: whether it is added to the variance of the data in place of that of the
            value, as in Balanca et al. (2024), appendix C.2. Inputs far below `sqrt(epsilon)` are
            then normalised too. By default the result does not depend on the scale of `x`, and is
            the one without `scalify`.

    Example:
        >>> x = jsa.as_scaled_array(jnp.float16([1.0, 3.0]), scale=4.0)
        >>> print(jsa.scalify(jsa.nn.layer_norm)(x).scale)
        1.0
    """
    return _affine(standardize(_or_data(x, relative_epsilon), axis, epsilon), scale, bias)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-6,
    relative_epsilon: bool = False,
) -> jax.Array:
    """`x / sqrt(mean(x**2) + epsilon) * scale` (Zhang & Sennrich, 2019), at the static scale 1.

    It has the arguments of `layer_norm`.

    Example:
        >>> x = jsa.as_scaled_array(jnp.float16([3.0, 3.0]), scale=2.0**20)
        >>> y = jsa.scalify(jsa.nn.rms_norm)(x)
        >>> print(y.data, y.scale)
        [1. 1.] 1.0
    """
    x = _or_data(x, relative_epsilon)
    return _affine(standardize(x, axis, epsilon, center=False), scale, None)


def group_norm(
    x: jax.Array,
    num_groups: int,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
) -> jax.Array:
    """Normalise groups of channels of `x` `(batch, ..., channels)` (Wu & He, 2018).

    Other arguments are those of `layer_norm`. `scale` and `bias` have shape `(channels,)`.

    Raises:
        TypeError: if `num_groups` is no int.
        ValueError: if the channels do not divide into `num_groups`.

    Example:
        >>> print(jsa.nn.group_norm(jnp.float32([[1.0, 3.0, 20.0, 60.0]]), num_groups=2).round(3))
        [[-1.  1. -1.  1.]]
    """
    channels = x.shape[-1]
    if not hasattr(num_groups, "__index__"):
        raise TypeError(f"`num_groups` must be an int, got {num_groups!r}.")
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"`num_groups` must divide the {channels} channels, got {num_groups}.")
    grouped = x.reshape((*x.shape[:-1], num_groups, channels // num_groups))
    axes = (*range(1, x.ndim - 1), x.ndim)
    return _affine(standardize(grouped, axes, epsilon).reshape(x.shape), scale, bias)


def batch_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axis: int | tuple[int, ...] | None = None,
    epsilon: float = 1e-5,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise over the batch (Ioffe & Szegedy, 2015). Return the result and the statistics.

    Args:
        x: array `(batch, ..., channels)` of a floating dtype.
        scale: factor of the result, of shape `(channels,)`.
        bias: added to the result, of shape `(channels,)`.
        axis: the axis or axes that are normalised together; by default all except the last.
        epsilon: added to the variance.

    Returns:
        The result, and mean and variance of shape `(channels,)`, in at least float32, for running
        statistics. Mean and variance have no derivative.

    Example:
        >>> y, mean, variance = jsa.nn.batch_norm(jnp.float16([[1.0, 8.0], [3.0, 8.0]]))
        >>> print(mean, variance)
        [2. 8.] [1. 0.]
    """
    axis = tuple(range(x.ndim - 1)) if axis is None else axis
    value = lax.stop_gradient(x).astype(dtypes.compute_dtype(x.dtype))
    mean, variance = jnp.mean(value, axis), jnp.var(value, axis)
    return _affine(standardize(x, axis, epsilon), scale, bias), mean, variance


def _or_data(x: jax.Array, is_data: bool) -> jax.Array:
    return get_data_and_scale(x)[0] if is_data else x


def _affine(x: jax.Array, scale: Any, bias: Any) -> jax.Array:
    """Apply scale and bias. They stay close to 1 and 0, so the result keeps the static scale 1."""
    if scale is None and bias is None:
        return x
    out = x if scale is None else x * lax.broadcast_to_rank(scale, x.ndim)
    out = out if bias is None else out + lax.broadcast_to_rank(bias, x.ndim)
    return _at_unit_scale(out.astype(x.dtype))


@custom_scale
def _at_unit_scale(x: jax.Array) -> jax.Array:
    return x


@_at_unit_scale.defscale
def _at_unit_scale_rule(x: Operand) -> ScaledArray:
    return made(x.source, x.unit, ONE, x.dtype)
