"""Dtypes: which dtypes carry scales, the dtype of arithmetic, and saturating casts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@functools.cache
def is_scalable(dtype: Any) -> bool:
    """Return whether values of a dtype carry a scale: real and complex floating-point dtypes do."""
    return jnp.issubdtype(dtype, jnp.inexact)


def as_floating(dtype: Any, name: str, *, real: bool = False) -> Any:
    """Return `dtype` as a floating-point dtype, real or complex (or `real` only).

    Raises:
        TypeError: if `dtype` is not a floating-point dtype. The message calls it `name`.
    """
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # `jnp.dtype(None)` is float64
    except TypeError:
        found = None
    if found is None:
        raise TypeError(
            f'`{name}` must be floating point, as jnp.float16 or "float16", got {dtype!r}.'
        )
    if not is_scalable(found) or (real and found.kind == "c"):
        raise TypeError(f"`{name}` must be floating point, got {found}.")
    return found


def as_data_dtype(dtype: Any, name: str) -> Any:
    """Return `dtype` as a dtype of a `ScaledArray`'s data.

    Raises:
        TypeError: if `dtype` is not a floating-point dtype, or if it is float8_e4m3, where
            float8_e4m3fn is meant. The message calls it `name`.
    """
    found = as_floating(dtype, name)
    if found == jnp.float8_e4m3:
        raise TypeError(
            f"`{name}` must not be float8_e4m3, the format of IEEE, which no GPU and no TPU "
            "multiplies: `jnp.float8_e4m3fn` is the E4M3 that they have."
        )
    return found


@functools.cache
def is_fp8(dtype: Any) -> bool:
    """Return whether a dtype is a float of at most 8 bits. Casts to it saturate."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8


@functools.cache
def is_narrow(dtype: Any) -> bool:
    """Return whether a dtype's largest number is below float32's, as in float16 and FP8."""
    return (
        jnp.issubdtype(dtype, jnp.inexact)
        and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp
    )


def is_wide(dtype: Any) -> bool:
    """Return whether a dtype is real and has at least the range of float32, as bfloat16 has."""
    return jnp.issubdtype(dtype, jnp.floating) and not is_narrow(dtype)


def sum_dtype(dtype: Any) -> Any:
    """Return the `preferred_element_type` of a matmul, given the dtype of its result.

    XLA accumulates in float32 in any case. A bfloat16 result has the range of float32, so it can be
    multiplied by its power of two after rounding, and it moves half the bytes. A float16 result
    might overflow before it is multiplied, so it stays in float32.
    """
    return dtype if dtype == jnp.bfloat16 else compute_dtype(dtype)


def compute_dtype(dtype: Any) -> Any:
    """Return the dtype that arithmetic on a floating dtype runs in: at least float32."""
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.finfo(dtype).bits >= 32:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32)


def of_leaf(leaf_dtype: Any, dtype: Any) -> Any:
    """Return the dtype that a leaf is cast to: `dtype`, or the leaf's if only that is complex."""
    is_complex = jnp.issubdtype(leaf_dtype, jnp.complexfloating)
    return leaf_dtype if is_complex and not jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def promoted(*given: Any) -> Any:
    """Return the dtype that dtypes promote to, even if the user forbids implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, given)


def real_dtype(dtype: Any) -> Any:
    """Return the dtype of the real part of a complex dtype; any other dtype unchanged."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def times(data: Any, factor: Any) -> Any:
    """Return `data * factor` for a real factor, in the dtype of the data.

    Real and imaginary parts are multiplied separately: `(inf + 0i) * (2 + 0i)` is `inf + nan i`.
    """
    if not jnp.issubdtype(data.dtype, jnp.complexfloating):
        return data * factor
    return lax.complex(lax.real(data) * factor, lax.imag(data) * factor)


def cast(data: Any, dtype: Any) -> Any:
    """Cast an array, rounding to nearest even. Casts to floats of at most 8 bits saturate.

    Infinities saturate too. nan stays nan if the dtype has a nan.
    """
    dtype = jnp.dtype(dtype)
    if jnp.dtype(data.dtype) == dtype:
        return data
    if is_fp8(dtype) and not jnp.issubdtype(data.dtype, jnp.complexfloating):
        return _saturate(data, dtype)
    return lax.convert_element_type(data, dtype)


def _saturate(data: jax.Array, dtype: np.dtype) -> jax.Array:
    wide = compute_dtype(data.dtype) if jnp.issubdtype(data.dtype, jnp.floating) else np.float32
    data = lax.convert_element_type(data, wide)
    low, high = (np.array(jnp.finfo(dtype).min, wide), np.array(jnp.finfo(dtype).max, wide))
    if dtype != jnp.float8_e8m0fnu:
        return lax.convert_element_type(lax.clamp(low, data, high), dtype)
    # E8M0 has no 0 and no sign. Its smallest number is subnormal in float32, so XLA may flush it to
    # 0, and XLA's cast from float64 rounds to it wrongly. The bits show which values round to it.
    normal = lax.convert_element_type(lax.clamp(2 * low, data, high), dtype)
    integer = np.dtype(f"int{8 * low.itemsize}")
    below = lax.lt(lax.bitcast_convert_type(data, integer), (low + low / 2).view(integer)[()])
    below = lax.bitwise_and(below, lax.eq(data, data))
    return lax.select(below, lax.full_like(normal, low.astype(dtype)), normal)


def leaf_dtype(leaf: Any) -> Any:
    """Return the dtype that JAX gives an array or a Python number; None for any other object."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.dtype
    if isinstance(leaf, (bool, int, float, complex)):
        return jax.dtypes.canonicalize_dtype(np.result_type(type(leaf)))
    return None


def is_python_number(leaf: Any) -> bool:
    """Return whether a leaf is a number of Python's own types, which NumPy's scalars are not."""
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, np.generic)
