"""Static and dynamic scales: state whose scales the compiler knows."""

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
from jax_scalify.arrays.conversions import map_leaves
from jax_scalify.arrays.scaled_array import ScaledArray, check_scaled, is_scaled
from jax_scalify.base import dtypes, pow2
from jax_scalify.blocks.array import is_array_of_ours

# By how many octaves state may grow when its scale is frozen, by the bits of its dtype. A second
# moment is a hundred times as large after a thousand steps as after ten.
_ROOM = {8: 3, 16: 10}


def octaves_too_high(log2_max: float, dtype: Any) -> float:
    """By how many octaves the largest element of state is too near the top of its dtype.

    Negative if there is more room than state needs; -inf for dtypes of the range of float32.
    """
    if not dtypes.has_short_range(dtype) or not math.isfinite(log2_max):
        return -math.inf
    finfo = jnp.finfo(dtype)
    return math.ceil(log2_max - math.log2(float(finfo.max)) + _ROOM[finfo.bits])


def freeze_scales(tree: Any) -> Any:
    """Make every scalar scale of concrete state static: a Python float in the tree's structure.

    A step that is traced with static scales has no scale arithmetic left for them. Scales that
    are not scalar stay dynamic; a step of both gives back dynamic ones, unless it has a
    `calibration`.

    Data keeps room to grow: where the largest element of a leaf is within ten octaves of the top of
    float16, or within three of that of an FP8 dtype, powers of two move from the data into the
    scale first. So a second moment can be frozen after a few steps. All other arrays of data are
    those of `tree`, not copies. A leaf of scale 0 has no scale to keep: it takes that of its first
    value, so freeze a state of zeros after its first steps, or the step compiles once more.

    Raises:
        TypeError: for a scale that is traced or packed for storage.
        ValueError: for a scale that is no power of two or does not fit its data.

    Example:
        >>> state = jsa.as_scaled_array({"w": jnp.ones(2)}, scale=4.0)
        >>> print(jsa.freeze_scales(state)["w"].scale)
        4.0
    """
    check_scaled(tree)

    def freeze(leaf: Any, path: tuple) -> Any:
        if not is_array_of_ours(leaf) or leaf.is_static or np.ndim(leaf.scale):
            return leaf
        if _compat.is_traced(leaf.scale):
            raise TypeError(
                f"`tree{tree_util.keystr(path)}.scale` must be concrete: what is traced has no "
                "value yet. Call `freeze_scales` outside of `jit`, on the state between two steps."
            )
        scale = float(leaf.scale)
        if is_scaled(leaf) and dtypes.has_short_range(leaf.dtype) and scale:
            return _with_room(leaf, scale)
        return dataclasses.replace(leaf, scale=scale)

    return map_leaves(freeze, tree)


def _with_room(leaf: ScaledArray, scale: float) -> ScaledArray:
    """A leaf with the static scale at which its data has room to grow."""
    if _compat.is_traced(leaf.data):
        return ScaledArray(leaf.data, scale)
    largest = largest_finite(leaf.data)
    above = octaves_too_high(math.log2(largest), leaf.dtype) if largest else -math.inf
    above = min(above, pow2.MAX_EXPONENT - pow2.floor_exponent(scale))
    if above <= 0:
        return ScaledArray(leaf.data, scale)
    exponent = int(above)
    return ScaledArray(times_power(leaf.data, -exponent), math.ldexp(scale, exponent))


@jax.jit
def _largest(data: jax.Array) -> jax.Array:
    size = jnp.abs(data.astype(dtypes.compute_dtype(data.dtype)))
    return jnp.max(jnp.where(jnp.isfinite(size), size, 0), initial=0)


def largest_finite(data: jax.Array) -> float:
    """The size of the largest element that is finite; 0 if there is none."""
    return float(_largest(data))


def times_power(data: jax.Array, exponent: int) -> jax.Array:
    """Data times `2**exponent`.

    In dtypes of few exponents, what is not 0 does not become 0: optimizers divide by moments.
    """
    powers = []
    while exponent:  # no number of float32 holds the ratio of the smallest to the largest scale
        part = max(-pow2.MAX_EXPONENT, min(pow2.MAX_EXPONENT, exponent))
        powers.append(2.0**part)
        exponent -= part
    return _times(data, powers)


@jax.jit
def _times(data: jax.Array, powers: list[Any]) -> jax.Array:
    wide = data.astype(dtypes.compute_dtype(data.dtype))
    new = functools.reduce(dtypes.times, powers, wide)
    if not dtypes.has_short_range(data.dtype):
        return dtypes.cast(new, data.dtype)
    smallest = np.array(jnp.finfo(data.dtype).smallest_subnormal, wide.dtype)
    kept = jnp.copysign(jnp.maximum(jnp.abs(new), smallest), wide)
    return dtypes.cast(jnp.where(jnp.isfinite(wide) & (wide != 0), kept, new), data.dtype)


def thaw_scales(tree: Any, scale_dtype: Any = None) -> Any:
    """Make every static scale dynamic again: an array, a leaf of the tree.

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
