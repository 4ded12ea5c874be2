"""Functions that store their inputs for the backward pass in FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.ops.scaling import cast
from jax_scalify.primitives.straight_through import straight_through


def store_inputs(
    fun: Callable, dtype: Any = jnp.float8_e4m3fn, argnums: int | Sequence[int] = 0
) -> Callable:
    """Transform a function so that it stores its inputs for the backward pass in `dtype`.

    `grad = vjp(fun)(cast(x, dtype))`. The results are those of `fun`. The backward pass computes
    `fun` again at the rounded inputs. Use it for norms, activations and gates, whose derivatives
    are smooth: it stores one byte for each element, where JAX stores several arrays in the dtype of
    `x`.

    Scales: inside `scalify`, the data is rounded, and its scale is kept. Outside, values should be
    close to 1: the largest number of E4M3 is 448, and the smallest is 0.002.

    Args:
        fun: a function of arrays, or trees of arrays. It may not close over weights: everything
            that is differentiated must be an argument.
        dtype: a floating dtype of at most 16 bits.
        argnums: which arguments to store in `dtype`; -1 is the last. Other arguments, and arrays of
            rank 0 and 1 such as scales and biases, are stored in their own dtype.

    Returns:
        A function of the same positional arguments and results. It has reverse-mode derivatives.
        Second derivatives, of either mode, are those of `fun` without rounding.

    Raises:
        TypeError: if `fun` is not callable, `dtype` is not a floating dtype of at most 16 bits, or
            `argnums` are not ints. When differentiated:
        ValueError: if there is no argument of such a number.

    Source: Xi et al., "COAT: Compressing Optimizer States and Activations for Memory-Efficient FP8
    Training", 2024. COAT scales each group of elements by its maximum; here the propagated scale is
    used.

    Example:
        >>> norm = jsa.nn.store_inputs(jsa.nn.rms_norm)
        >>> x, weight = jnp.float16([[3.0, 3.1]]), jnp.ones(2, jnp.float16)
        >>> bool((norm(x, weight) == jsa.nn.rms_norm(x, weight)).all())
        True
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
    dtype = dtypes.as_floating(dtype, "dtype", real=True)
    if dtype.itemsize > 2:
        raise TypeError(f"`dtype` must have at most 16 bits, as jnp.float8_e4m3fn, got {dtype}.")
    chosen = argnums if isinstance(argnums, Sequence) else (argnums,)
    if not all(isinstance(i, int) for i in chosen):
        raise TypeError(f"`argnums` must be an int or a sequence of ints, got {argnums!r}.")

    @jax.custom_vjp
    def stored(*args: Any) -> Any:
        return fun(*args)

    def forward(*args: Any) -> Any:
        if not all(-len(args) <= i < len(args) for i in chosen):
            raise ValueError(f"`argnums` is {argnums!r}, but there are {len(args)} arguments.")
        narrow = {i % len(args) for i in chosen}
        kept = [
            jax.tree.map(functools.partial(_narrowed, dtype=dtype), arg) if i in narrow else arg
            for i, arg in enumerate(args)
        ]
        return fun(*args), (kept, args)

    def backward(residuals: Any, cotangents: Any) -> Any:
        kept, args = residuals
        _, pull = jax.vjp(fun, *jax.tree.map(_widened, kept, list(args)))
        return pull(cotangents)

    stored.defvjp(forward, backward)
    return functools.wraps(fun)(lambda *args: stored(*args))


def _narrowed(x: jax.Array, dtype: Any) -> jax.Array:
    if x.ndim < 2 or not dtypes.is_scalable(x.dtype) or x.dtype.itemsize <= dtype.itemsize:
        return x
    return straight_through(cast(x, dtype))


def _widened(kept: jax.Array, x: jax.Array) -> jax.Array:
    """Return the rounded numbers in the dtype of `x`, with the derivative of `x`."""
    if kept.dtype == x.dtype:
        return x
    return straight_through(kept.astype(x.dtype), _same, x)


def _same(x: Any) -> Any:
    return x
