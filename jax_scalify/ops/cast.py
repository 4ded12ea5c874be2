"""Casts on the forward pass or the backward pass only. Casts to FP8 saturate.

They round to nearest even, or stochastically if a `jax.random` key is given. Stochastic rounding
keeps the mean: 1.25 between 1 and 2 is rounded up with probability 1/4. It saturates in every
dtype. Use a key for one cast only, as always in JAX. Derivatives are those of the cast to nearest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.ops.scaling import cast, checked_array, on_backward


@jax.custom_jvp
def _through(x: jax.Array, like: jax.Array, key: Any) -> jax.Array:
    return cast(cast(x, like.dtype, key), x.dtype)


_through.defjvps(lambda tangent, *_: tangent, None, None)


@dataclasses.dataclass(frozen=True)
class _RoundThrough:
    """Round a cotangent to the values of a dtype, stochastically if it gets the data of a key."""

    dtype: Any
    key_impl: Hashable = None

    def __call__(self, cotangent: jax.Array, *key_data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(*key_data, impl=self.key_impl) if key_data else None
        return _through(cotangent, jnp.zeros((), self.dtype), key)


def cast_on_forward(x: Any, dtype: Any, *, key: Any = None) -> jax.Array:
    """Cast a value on the forward pass. Its cotangent is returned in the dtype of `x`.

    Out-of-range values saturate for dtypes of at most 8 bits. JAX gives a cotangent the dtype of
    its array, so between the consumer and this cast the cotangent has `dtype` too. For matmuls, use
    `jax_scalify.nn.dot_general`, which keeps the cotangent wide: `jnp.dot` of two E4M3 arrays, as
    in algorithm 6 of Balanca et al. (2024), is E4M3 in JAX.

    Args:
        x: array of a floating dtype.
        dtype: the floating dtype to round to.
        key: `jax.random` key for stochastic rounding; by default, rounding is to nearest even.

    Raises:
        TypeError: if `dtype` is not a floating dtype.

    Example:
        >>> print(jsa.ops.cast_on_forward(jnp.float32(1000.0), jnp.float8_e4m3fn))
        448
    """
    x = checked_array(x)
    return cast(x, dtypes.as_floating(dtype, "dtype", real=True), key)


def cast_on_backward(x: Any, dtype: Any, *, key: Any = None) -> jax.Array:
    """Return `x`; on the backward pass, round its cotangent to the values of `dtype`.

    The cotangent keeps the dtype of `x`, as JAX requires, and saturates for dtypes of at most
    8 bits. With a `key`, rounding is stochastic.

    Raises:
        TypeError: if `dtype` is not a floating dtype.

    Example:
        >>> f = lambda x: 1.1 * jsa.ops.cast_on_backward(x, jnp.float8_e5m2)
        >>> print(jax.grad(f)(2.0))
        1.0
    """
    dtype = dtypes.as_floating(dtype, "dtype", real=True)
    if key is None:
        return on_backward(x, _RoundThrough(dtype))
    # The key is an operand, so that each step of a scan or map can have its own key.
    rounding = _RoundThrough(dtype, jax.random.key_impl(key))
    return on_backward(x, rounding, jax.random.key_data(key))


def reduce_precision_on_forward(x: Any, dtype: Any, *, key: Any = None) -> jax.Array:
    """Round a value to the values of `dtype` on the forward pass, in the dtype of `x`.

    It saturates for dtypes of at most 8 bits. The cotangent is unchanged. With a `key`, rounding is
    stochastic.

    Raises:
        TypeError: if `dtype` is not a floating dtype.

    Example:
        >>> print(jsa.ops.reduce_precision_on_forward(jnp.float32(1.1), jnp.float8_e4m3fn))
        1.125
        >>> x, key = jnp.full(1000, 1.1), jax.random.key(0)
        >>> y = jsa.ops.reduce_precision_on_forward(x, jnp.float8_e4m3fn, key=key)
        >>> print(jnp.unique(y), f"{jnp.mean(y):.2f}")
        [1.    1.125] 1.10
    """
    return _through(
        checked_array(x), jnp.zeros((), dtypes.as_floating(dtype, "dtype", real=True)), key
    )


def reduce_precision_on_backward(x: Any, dtype: Any, *, key: Any = None) -> jax.Array:
    """Return `x`; on the backward pass, round its cotangent to the values of `dtype`.

    An alias of `cast_on_backward`.

    Raises:
        TypeError: if `dtype` is not a floating dtype.

    Example:
        >>> f = lambda x: 1.1 * jsa.ops.reduce_precision_on_backward(x, jnp.float8_e5m2)
        >>> print(jax.grad(f)(2.0))
        1.0
    """
    return cast_on_backward(x, dtype, key=key)
