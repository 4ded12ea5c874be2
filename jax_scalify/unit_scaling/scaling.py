"""Factors of the forward and of the backward pass, apart from each other.

A unit-scaled operation multiplies its result by one number and the gradients of its operands by
others, so that all have unit scale: what autodiff would call wrong by a constant is meant.

Source: Blake et al., *Unit Scaling* (2023), section 5.1.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import _compat


def scale_fwd(x: Any, factor: Any) -> jax.Array:
    """Multiply in the forward pass only: `out = x * factor`, and the gradient passes unchanged.

    Args:
        x: an array of a floating or complex dtype.
        factor: a finite number; or a scalar array, which is taken in the dtype of `x` and as a
            constant in derivatives, for factors that are data, as those of layers in a scan.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not a floating or complex array, or `factor` not a number.
        ValueError: if `factor` is inf or nan, or an array that is no scalar.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> jax.value_and_grad(lambda x: us.scale_fwd(x, 4.0))(2.0)
        (Array(8., dtype=float32, weak_type=True), Array(1., dtype=float32, weak_type=True))
    """
    return _scale(_array(x, "scale_fwd"), _number(factor, "scale_fwd"), 1.0)


def scale_bwd(x: Any, factor: Any) -> jax.Array:
    """Multiply in the backward pass only: `out = x`, and the gradient is multiplied by `factor`.

    In forward mode the tangent is.

    Args:
        x: an array of a floating or complex dtype.
        factor: a finite number; or a scalar array, which is taken in the dtype of `x` and as a
            constant in derivatives, for factors that are data, as those of layers in a scan.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not a floating or complex array, or `factor` not a number.
        ValueError: if `factor` is inf or nan, or an array that is no scalar.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> jax.value_and_grad(lambda x: us.scale_bwd(x, 4.0))(2.0)
        (Array(2., dtype=float32, weak_type=True), Array(4., dtype=float32, weak_type=True))
    """
    return _scale(_array(x, "scale_bwd"), 1.0, _number(factor, "scale_bwd"))


def _scale(x: jax.Array, forward: Any, backward: Any) -> jax.Array:
    if isinstance(forward, float) and isinstance(backward, float):
        return _scale_by_numbers(x, forward, backward)
    return _scale_by_arrays(x, forward, backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _scale_by_numbers(x: jax.Array, forward: float, backward: float) -> jax.Array:
    return x if forward == 1 else x * forward


@_scale_by_numbers.defjvp
def _scale_by_numbers_jvp(forward: float, backward: float, primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    return _scale(x, forward, backward), tangent if backward == 1 else tangent * backward


@jax.custom_jvp
def _scale_by_arrays(x: jax.Array, forward: Any, backward: Any) -> jax.Array:
    return x * jnp.asarray(forward, x.dtype)


@_scale_by_arrays.defjvp
def _scale_by_arrays_jvp(primals: Any, tangents: Any) -> Any:
    x, _, backward = primals
    return _scale_by_arrays(*primals), tangents[0] * jnp.asarray(backward, x.dtype)


def _array(x: Any, name: str) -> jax.Array:
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"`{name}` takes an array of a floating or complex dtype, got {array.dtype}."
        )
    return array


def _number(factor: Any, name: str) -> Any:
    """A factor as a finite float; as it is if it is traced."""
    if _compat.is_traced(factor) and jnp.issubdtype(factor.dtype, jnp.floating):
        if factor.shape:
            raise ValueError(f"The factor of `{name}` must be a scalar, got {factor.shape}.")
        return factor
    try:
        number = float(factor)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"The factor of `{name}` must be a number, got {type(factor).__name__}."
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"The factor of `{name}` must be finite, got {number}.")
    return number
