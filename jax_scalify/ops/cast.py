"""Casts on the forward or on the backward pass only, saturating for FP8."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.primitives import _checked, cast, on_backward


@jax.custom_jvp
def _through(x: jax.Array, like: jax.Array) -> jax.Array:
    return cast(cast(x, like.dtype), x.dtype)


_through.defjvps(lambda tangent, *_: tangent, None)


@dataclasses.dataclass(frozen=True)
class _RoundThrough:
    """Round a cotangent to the values of a dtype."""

    dtype: Any

    def __call__(self, cotangent: jax.Array) -> jax.Array:
        return _through(cotangent, jnp.zeros((), self.dtype))


def _float_dtype(dtype: Any) -> Any:
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`dtype` must be a floating dtype, got {dtype}.")
    return dtype


def cast_on_forward(x: Any, dtype: Any) -> jax.Array:
    """Cast a value on the forward pass; its cotangent comes back in the dtype of `x`.

    Out-of-range values saturate for dtypes of at most 8 bits. JAX gives the cotangent of an array
    the array's dtype, so between the consumer and this cast it is of `dtype` too: for matmuls
    `jax_scalify.nn.dot_general` keeps the cotangent wide.

    Raises:
        TypeError: if `dtype` is not a floating dtype.

    Example:
        >>> print(jsa.ops.cast_on_forward(jnp.float32(1000.0), jnp.float8_e4m3fn))
        448
    """
    x = _checked(x)
    return cast(x, _float_dtype(dtype))


def cast_on_backward(x: Any, dtype: Any) -> jax.Array:
    """Return `x`; on the backward pass round its cotangent to the values of `dtype`.

    The cotangent keeps the dtype of `x`, as JAX requires, and saturates for dtypes of at most
    8 bits.

    Raises:
        TypeError: if `dtype` is not a floating dtype.

    Example:
        >>> f = lambda x: 1.1 * jsa.ops.cast_on_backward(x, jnp.float8_e5m2)
        >>> print(jax.grad(f)(2.0))
        1.0
    """
    return on_backward(x, _RoundThrough(_float_dtype(dtype)))


def reduce_precision_on_forward(x: Any, dtype: Any) -> jax.Array:
    """Round a value to those of `dtype` on the forward pass, in the dtype of `x`.

    Saturates for dtypes of at most 8 bits; the cotangent passes unchanged.

    Raises:
        TypeError: if `dtype` is not a floating dtype.

    Example:
        >>> print(jsa.ops.reduce_precision_on_forward(jnp.float32(1.1), jnp.float8_e4m3fn))
        1.125
    """
    return _through(_checked(x), jnp.zeros((), _float_dtype(dtype)))


def reduce_precision_on_backward(x: Any, dtype: Any) -> jax.Array:
    """Return `x`; on the backward pass round its cotangent to the values of `dtype`.

    Raises:
        TypeError: if `dtype` is not a floating dtype.

    Example:
        >>> f = lambda x: 1.1 * jsa.ops.reduce_precision_on_backward(x, jnp.float8_e5m2)
        >>> print(jax.grad(f)(2.0))
        1.0
    """
    return cast_on_backward(x, dtype)
