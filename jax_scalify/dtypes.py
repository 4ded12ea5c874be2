"""Dtypes: which are scaled, which the arithmetic runs in, and casts that saturate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def is_scalable(dtype: Any) -> bool:
    """Tell whether values of a dtype carry a scale: real and complex floating point."""
    return jnp.issubdtype(dtype, jnp.inexact)


def is_narrow_float(dtype: Any) -> bool:
    """Tell whether a dtype is a float of at most 8 bits: casts to it saturate."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8


def has_short_range(dtype: Any) -> bool:
    """Tell whether the numbers of a dtype end before those of float32: float16 and FP8."""
    return (
        jnp.issubdtype(dtype, jnp.inexact)
        and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp
    )


def compute_dtype(dtype: Any) -> Any:
    """Return the dtype that arithmetic on a floating dtype runs in: at least float32."""
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.finfo(dtype).bits >= 32:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32)


def real_dtype(dtype: Any) -> Any:
    """Return the real dtype of a complex one, and any other dtype itself."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def cast(data: Any, dtype: Any) -> Any:
    """Cast an array; to a float of at most 8 bits, finite values and infinities saturate.

    nan stays nan where the dtype has one.
    """
    dtype = jnp.dtype(dtype)
    if jnp.dtype(data.dtype) == dtype:
        return data
    if is_narrow_float(dtype) and jnp.issubdtype(data.dtype, jnp.floating):
        wide = compute_dtype(data.dtype)
        low, high = (np.array(jnp.finfo(dtype).min, wide), np.array(jnp.finfo(dtype).max, wide))
        data = lax.clamp(low, lax.convert_element_type(data, wide), high)
    return lax.convert_element_type(data, dtype)


def leaf_dtype(leaf: Any) -> Any:
    """Return the dtype that JAX gives to an array or a Python number; None for anything else."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.dtype
    if isinstance(leaf, (bool, int, float, complex)):
        return jax.dtypes.canonicalize_dtype(np.result_type(type(leaf)))
    return None
