"""Scales as they are stored: one byte each, in E8M0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import (
    PACKED,
    ScaledArray,
    along_leading_axes,
    check_scale_dtype,
    is_packed,
    is_scaled,
)
from jax_scalify.base import dtypes, pow2

_SMALLEST = 2.0**-pow2.MAX_EXPONENT


def pack_scales(tree: Any) -> Any:
    """Store the dynamic scales of a state as `float8_e8m0fnu`, exactly; `unpack_scales` undoes it.

    For checkpoints and transfers: computations take unpacked scales. E8M0, the scale format of OCP
    MX, has the powers of two from 2**-127 to 2**127 and no 0: its smallest number stands for 0
    ("any scale will do"). Static scales and plain leaves stay as they are. It runs on the host,
    and NumPy scales stay on it.

    Raises:
        TypeError: if a scaled leaf is traced or abstract.
        ValueError: if a scale is nan, infinite, negative or no power of two, or below 2**-126 where
            the data is not zero. The message names the leaf.

    Source: OCP Microscaling Formats (MX) Specification v1.0, section 5.4.1.

    Example:
        >>> state = {"w": jsa.scaled_array(jnp.ones(2), jnp.float32(2.0**20))}
        >>> packed = jsa.pack_scales(state)
        >>> print(packed["w"].scale.dtype, jsa.unpack_scales(packed)["w"].scale)
        float8_e8m0fnu 1.048576e+06
    """
    return tree_util.tree_map_with_path(_pack, tree, is_leaf=is_scaled)


def unpack_scales(tree: Any, scale_dtype: Any = None) -> Any:
    """Turn scales that `pack_scales` has stored into those that computations take.

    Args:
        tree: any pytree; leaves whose scales are not packed stay as they are.
        scale_dtype: dtype of the scales, float32 by default.

    Raises:
        TypeError: if a scaled leaf is traced or abstract, or `scale_dtype` cannot hold the
            exponents of float32.
        ValueError: if a scale is nan. The message names the leaf.
    """
    dtype = check_scale_dtype(scale_dtype)
    return tree_util.tree_map_with_path(
        lambda path, leaf: _unpack(path, leaf, dtype), tree, is_leaf=is_scaled
    )


def _on_host(path: tuple, leaf: ScaledArray, function: str) -> np.ndarray:
    for part in (leaf.data, leaf.scale):
        if _compat.is_traced(part) or dtypes.leaf_dtype(part) is None:
            raise TypeError(
                f"`{function}` is for storage, on the host: call it on concrete arrays, outside of "
                f"`jit`. `tree{tree_util.keystr(path)}` is {type(part).__name__}."
            )
    return np.asarray(leaf.scale).astype(np.float64)


def _placed(values: np.ndarray, scale: Any) -> Any:
    """Values in the place of a scale: on the host, or on its devices."""
    if not isinstance(scale, jax.Array):
        return values
    return jax.device_put(values, scale.sharding) if scale.committed else jnp.asarray(values)


def _pack(path: tuple, leaf: Any) -> Any:
    if not is_scaled(leaf) or leaf.is_static:
        return leaf
    scale = _on_host(path, leaf, "pack_scales")
    mantissa, exponent = np.frexp(scale)
    if not np.all((scale == 0) | (mantissa == 0.5)) or np.any(exponent > 128):
        raise ValueError(
            f"The scale of `tree{tree_util.keystr(path)}` must be a power of two up to 2**127, or "
            f"0, got {leaf.scale!r}. `jsa.scaled_array(data, scale)` moves the rest into the data."
        )
    too_small = (scale > 0) & (scale < _SMALLEST)
    if np.any(too_small):
        where = np.broadcast_to(along_leading_axes(too_small, leaf.ndim), leaf.shape)
        if np.any(np.asarray(leaf.data)[where] != 0):
            raise ValueError(
                f"The scale of `tree{tree_util.keystr(path)}` must be at least 2**-126 where the "
                f"data is not zero, got {leaf.scale!r}. `jsa.dynamic_rescale` raises it."
            )
    # By the exponent and not by a cast: XLA may flush the smallest number, which stands for 0.
    bits = np.where(scale < _SMALLEST, 0, exponent - 1 + 127).astype(np.uint8)
    return ScaledArray(leaf.data, _placed(bits.view(PACKED), leaf.scale))


def _unpack(path: tuple, leaf: Any, dtype: np.dtype) -> Any:
    if not is_packed(leaf):
        return leaf
    scale = _on_host(path, leaf, "unpack_scales")
    if np.any(np.isnan(scale)):
        raise ValueError(f"The scale of `tree{tree_util.keystr(path)}` is nan.")
    scale = np.where(scale < _SMALLEST, 0, scale).astype(dtype)
    return ScaledArray(leaf.data, _placed(scale, leaf.scale))
