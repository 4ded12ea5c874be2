"""Dtypes: which are scaled, which the arithmetic runs in, and casts that saturate."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@functools.cache
def is_scalable(dtype: Any) -> bool:
    """Tell whether values of a dtype carry a scale: real and complex floating point."""
    return jnp.issubdtype(dtype, jnp.inexact)


def as_floating(dtype: Any, name: str, *, real: bool = False) -> Any:
    """Return a floating dtype, real or complex.

    Raises:
        TypeError: for another dtype, or what is none; the message says what `name` is.
    """
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # that of None is float64
    except TypeError:
        found = None
    if found is None:
        raise TypeError(
            f'`{name}` must be floating point, as jnp.float16 or "float16", got {dtype!r}.'
        )
    if not is_scalable(found) or (real and found.kind == "c"):
        raise TypeError(f"`{name}` must be floating point, got {found}.")
    return found


@functools.cache
def is_narrow_float(dtype: Any) -> bool:
    """Tell whether a dtype is a float of at most 8 bits: casts to it saturate."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8


@functools.cache
def has_short_range(dtype: Any) -> bool:
    """Tell whether the numbers of a dtype end before those of float32: float16 and FP8."""
    return (
        jnp.issubdtype(dtype, jnp.inexact)
        and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp
    )


def has_wide_range(dtype: Any) -> bool:
    """Tell whether a dtype is a real one of the range of float32, as bfloat16 is."""
    return jnp.issubdtype(dtype, jnp.floating) and not has_short_range(dtype)


def sum_dtype(dtype: Any) -> Any:
    """The dtype that a matmul is asked for, given that of its result.

    All compilers add up in float32. A result in bfloat16 has the range of float32, so it is as good
    before its power of two as behind it, and half of what a result in float32 moves through memory.
    One in float16 might overflow before it.
    """
    return dtype if dtype == jnp.bfloat16 else compute_dtype(dtype)


def compute_dtype(dtype: Any) -> Any:
    """Return the dtype that arithmetic on a floating dtype runs in: at least float32."""
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.finfo(dtype).bits >= 32:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32)


def of_leaf(leaf_dtype: Any, dtype: Any) -> Any:
    """Return what a leaf of a tree is cast to by `dtype`: a complex one by no real dtype."""
    is_complex = jnp.issubdtype(leaf_dtype, jnp.complexfloating)
    return leaf_dtype if is_complex and not jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def promoted(*given: Any) -> Any:
    """Return the dtype that dtypes promote to, where users forbid implicit promotion too."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, given)


def real_dtype(dtype: Any) -> Any:
    """Return the real dtype of a complex one, and any other dtype itself."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def times(data: Any, factor: Any) -> Any:
    """Return `data * factor` of a real factor, in the dtype of the data.

    Of complex data the parts are multiplied: `(inf + 0i) * (2 + 0i)` would be `inf + nan i`.
    """
    if not jnp.issubdtype(data.dtype, jnp.complexfloating):
        return data * factor
    return lax.complex(lax.real(data) * factor, lax.imag(data) * factor)


def cast(data: Any, dtype: Any) -> Any:
    """Cast an array; to a float of at most 8 bits, finite values and infinities saturate.

    nan stays nan where the dtype has one. Rounding is to nearest even.
    """
    dtype = jnp.dtype(dtype)
    if jnp.dtype(data.dtype) == dtype:
        return data
    if is_narrow_float(dtype) and not jnp.issubdtype(data.dtype, jnp.complexfloating):
        return _saturate(data, dtype)
    return lax.convert_element_type(data, dtype)


def _saturate(data: jax.Array, dtype: np.dtype) -> jax.Array:
    wide = compute_dtype(data.dtype) if jnp.issubdtype(data.dtype, jnp.floating) else np.float32
    data = lax.convert_element_type(data, wide)
    low, high = (np.array(jnp.finfo(dtype).min, wide), np.array(jnp.finfo(dtype).max, wide))
    if dtype != jnp.float8_e8m0fnu:
        return lax.convert_element_type(lax.clamp(low, data, high), dtype)
    # E8M0 has no 0 and no sign. Its smallest number is subnormal in float32, where XLA may flush
    # it, and is wrongly rounded to in float64: what is nearest to it is found by the bits.
    normal = lax.convert_element_type(lax.clamp(2 * low, data, high), dtype)
    integer = np.dtype(f"int{8 * low.itemsize}")
    below = lax.lt(lax.bitcast_convert_type(data, integer), (low + low / 2).view(integer)[()])
    below = lax.bitwise_and(below, lax.eq(data, data))
    return lax.select(below, lax.full_like(normal, low.astype(dtype)), normal)


def leaf_dtype(leaf: Any) -> Any:
    """Return the dtype that JAX gives to an array or a Python number; None for anything else."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.dtype
    if isinstance(leaf, (bool, int, float, complex)):
        return jax.dtypes.canonicalize_dtype(np.result_type(type(leaf)))
    return None
