"""Conversions between dynamic scales and static scales, which the compiler knows."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray, check_scaled, is_scaled
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.stochastic_rounding import keep_nonzero
from jax_scalify.blocks.array import is_array_of_ours
from jax_scalify.conversions.nnx_objects import map_leaves

# The octaves of room above the largest element of a frozen leaf, for dtypes of 8 and 16 bits. A
# second moment is a hundred times as large after a thousand steps as after ten.
_ROOM = {8: 3, 16: 10}


def octaves_too_high(log2_max: float, dtype: Any) -> float:
    """Return how many octaves of room are missing above the largest element of a leaf.

    The number is negative if there is more room than needed. It is -inf for dtypes with the range
    of float32, and if `log2_max` is not finite.
    """
    if not dtypes.is_narrow(dtype) or not math.isfinite(log2_max):
        return -math.inf
    finfo = jnp.finfo(dtype)
    return math.ceil(log2_max - math.log2(float(finfo.max)) + _ROOM[finfo.bits])


def freeze_scales(tree: Any) -> Any:
    """Make each scalar scale of concrete state static: a Python float in the tree's structure.

    A step that is traced with static scales has no arithmetic for these scales. Scales with axes
    stay dynamic. A step returns a leaf of the state at its static scale if the leaf is unchanged,
    is stored by `jsa.optim` or `match_scales`, or is a float32 or bfloat16 sum of the old leaf and
    an update.

    The data keeps room to grow: 10 octaves below the largest float16, or 3 octaves below the
    largest FP8 number. If a leaf has less room, powers of two move from its data into its scale, so
    a second moment can be frozen after a few steps. All other leaves share their data with `tree`.

    A leaf of scale 0 takes the scale of its first value, and the step then compiles again. Freeze a
    state of zeros after its first steps.

    Raises:
        TypeError: if a scale is traced or packed for storage.
        ValueError: if a scale is not a power of two or does not fit its data.

    Example:
        >>> state = jsa.as_scaled_array({"w": jnp.ones(2)}, scale=4.0)
        >>> print(jsa.freeze_scales(state)["w"].scale)
        4.0
    """
    check_scaled(tree)
    return map_leaves(with_static_scale, tree)


def with_static_scale(leaf: Any, path: tuple, of_zero: float = 0.0) -> Any:
    """Make the scale of a leaf static, if it is scalar. `of_zero` replaces a scale of 0."""
    if not is_array_of_ours(leaf) or leaf.is_static or np.ndim(leaf.scale):
        return leaf
    if _compat.is_traced(leaf.scale):
        raise TypeError(
            f"`tree{tree_util.keystr(path)}.scale` must be concrete: what is traced has no value "
            "yet. Make scales static outside of `jit`, on the state between two steps. For shapes "
            "without values, take `jsa.ScaledArray(shape_dtype_struct, 1.0)`."
        )
    scale = float(leaf.scale) or of_zero
    if is_scaled(leaf) and dtypes.is_narrow(leaf.dtype) and scale:
        return _with_room(leaf, scale)
    return dataclasses.replace(leaf, scale=scale)


def _with_room(leaf: ScaledArray, scale: float) -> ScaledArray:
    """Return a leaf with a static scale at which its data has room to grow."""
    if _compat.is_traced(leaf.data):
        return ScaledArray(leaf.data, scale)
    largest = float(largest_finite(leaf.data))
    above = octaves_too_high(math.log2(largest), leaf.dtype) if largest else -math.inf
    above = min(above, pow2.MAX_EXPONENT - pow2.floor_exponent(scale))
    if above <= 0:
        return ScaledArray(leaf.data, scale)
    exponent = int(above)
    return ScaledArray(times_power(leaf.data, -exponent), math.ldexp(scale, exponent))


@jax.jit
def largest_finite(data: jax.Array) -> jax.Array:
    """Return the largest absolute value of finite elements; 0 if there is no finite element."""
    size = jnp.abs(data.astype(dtypes.compute_dtype(data.dtype)))
    return jnp.max(jnp.where(jnp.isfinite(size), size, 0), initial=0)


def times_power(data: jax.Array, exponent: int) -> jax.Array:
    """Return `data * 2**exponent`.

    In narrow dtypes, nonzero elements do not become 0, because optimizers divide by moments.
    """
    powers = []
    while exponent:  # float32 does not hold the ratio of the largest to the smallest scale
        part = max(-pow2.MAX_EXPONENT, min(pow2.MAX_EXPONENT, exponent))
        powers.append(2.0**part)
        exponent -= part
    return _times(data, powers)


@jax.jit
def _times(data: jax.Array, powers: list[Any]) -> jax.Array:
    wide = data.astype(dtypes.compute_dtype(data.dtype))
    new = functools.reduce(dtypes.times, powers, wide)
    return keep_nonzero(dtypes.cast(new, data.dtype), data, data.dtype)


def thaw_scales(tree: Any, scale_dtype: Any = None) -> Any:
    """Make each static scale of a tree dynamic: an array, a leaf of the tree.

    Example:
        >>> state = jsa.freeze_scales(jsa.as_scaled_array({"w": jnp.ones(2)}, scale=4.0))
        >>> jsa.thaw_scales(state)["w"].scale
        Array(4., dtype=float32)
    """
    check_scaled(tree)

    def thaw(leaf: Any, path: tuple) -> Any:
        if is_array_of_ours(leaf) and leaf.is_static:
            scale = jnp.array(leaf.scale, scale_dtype or jnp.float32)
            return dataclasses.replace(leaf, scale=scale)
        return leaf

    return map_leaves(thaw, tree)
