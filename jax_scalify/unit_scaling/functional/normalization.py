"""Functions along an axis: softmax, layer norm, RMS norm; and dropout."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.unit_scaling.constraints import Constraint
from jax_scalify.unit_scaling.factors import softmax_stds
from jax_scalify.unit_scaling.functional._common import axis_of, floating, inverse, positive, scaled
from jax_scalify.unit_scaling.scaling import scale_bwd

_DEFAULT = "to_output_scale"


def softmax(
    x: Any, axis: int = -1, mult: float = 1.0, constraint: Constraint = _DEFAULT
) -> jax.Array:
    """Apply `softmax(mult * x)`, with factors from the exact moments of a softmax of Gaussians.

    The factor of the result makes its standard deviation 1, around the mean factor / length. (An
    attention is scaled as a whole: `scaled_dot_product_attention`.)

    Args:
        x: a floating array.
        axis: whose sum is 1 before scaling.
        mult: of the operand.
        constraint: on the factors of the result and of the gradient.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not floating or `mult` is no number.
        ValueError: if `mult` is not positive and finite, or there is no such axis.

    Source: Blake et al., *Unit Scaling* (2023), table A.2, has s for both factors, with which
    result and gradient are 1.31 and 1.65 for `mult` 1 and a long axis.
    `unit_scaling/factors.py` derives the moments for all.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> round(float(us.functional.softmax(jnp.zeros(4))[0]), 2)
        1.33
    """
    (x,) = floating("softmax", x=x)
    mult = positive("mult", mult, "softmax")
    axis = axis_of(x, axis, "softmax")
    length = x.shape[axis]
    spread, back = 0.0, 0.0
    if length > 1:
        _, spread, back = softmax_stds(length, mult)
    grad = inverse(mult * back / math.sqrt(length)) if length else 1.0

    def function(x: Any) -> jax.Array:
        return jax.nn.softmax(mult * x, axis)

    return scaled(function, [x], inverse(spread), [grad], constraint)


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    axis: int | tuple[int, ...] = -1,
    eps: float = 1e-5,
) -> jax.Array:
    """Normalise to mean 0 and variance 1 along axes; gradients of the affine part by 1/√rows.

    Args:
        x: a floating array.
        weight: of the shape of the normalised axes, or None. Its edge is a cut-edge.
        bias: as `weight`.
        axis: one, or several, that are normalised together.
        eps: added to the variance.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if there is no such axis, or the shapes do not fit.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.layer_norm(jnp.array([1.0, 3.0])).round(2)
        Array([-1.,  1.], dtype=float32)
    """
    return _normalise("layer_norm", x, weight, bias, axis, eps, centred=True)


def rms_norm(
    x: Any, weight: Any = None, axis: int | tuple[int, ...] = -1, eps: float = 1e-5
) -> jax.Array:
    """Divide by the RMS along axes; the gradient of the weight by 1/√rows.

    Args:
        x: a floating array.
        weight: an array of the shape of the normalised axes, or None. Its edge is a cut-edge.
        axis: one, or several, that are normalised together.
        eps: added to the mean square.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if there is no such axis, or the shapes do not fit.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.rms_norm(jnp.array([3.0, 3.0])).round(2)
        Array([1., 1.], dtype=float32)
    """
    return _normalise("rms_norm", x, weight, None, axis, eps, centred=False)


def _normalise(
    name: str, x: Any, weight: Any, bias: Any, axis: Any, eps: float, centred: bool
) -> jax.Array:
    (x,) = floating(name, x=x)
    axes = sorted(axis_of(x, a, name) for a in (axis if isinstance(axis, tuple) else (axis,)))
    wide = x.astype(dtypes.compute_dtype(x.dtype))
    if centred:
        wide = wide - jnp.mean(wide, axes, keepdims=True)
    square = jnp.mean(lax.square(wide), axes, keepdims=True)
    out = (wide * lax.rsqrt(square + eps)).astype(x.dtype)
    shape = tuple(x.shape[a] for a in axes)
    factor = inverse(math.sqrt(x.size * inverse(math.prod(shape))))
    for argument, array in (("weight", weight), ("bias", bias)):
        if array is None:
            continue
        (array,) = floating(name, **{argument: array})
        if array.shape != shape:
            raise ValueError(
                f"`{argument}` of `{name}` must have shape {shape}, got {array.shape}."
            )
        along = [x.shape[a] if a in axes else 1 for a in range(x.ndim)]
        array = scale_bwd(array, factor).reshape(along).astype(x.dtype)
        out = out * array if argument == "weight" else out + array
    return out


def dropout(x: Any, rate: float, key: Any = None, deterministic: bool = False) -> jax.Array:
    """Set elements to 0 at random; what is left keeps unit scale: `x * mask / √(1 - rate)`.

    Args:
        x: a floating array.
        rate: probability of 0, in `[0, 1)`.
        key: of `jax.random`; not needed if `deterministic`, or at the rate 0.
        deterministic: return the mean over all masks, as evaluation asks for: `x * √(1 - rate)`.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not floating.
        ValueError: if `rate` is not in `[0, 1)`, or there is no key where one is needed.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.dropout(jnp.ones(3), 0.75, deterministic=True)
        Array([0.5, 0.5, 0.5], dtype=float32)
    """
    (x,) = floating("dropout", x=x)
    if not 0 <= rate < 1:
        raise ValueError(f"`rate` of `dropout` must be in [0, 1), got {rate}.")
    if not rate:
        return x
    if deterministic:
        return x * math.sqrt(1 - rate)
    if key is None:
        raise ValueError("`dropout` needs a `key` of jax.random, or `deterministic=True`.")
    mask = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(mask, x * (1 / math.sqrt(1 - rate)), jnp.zeros_like(x))
