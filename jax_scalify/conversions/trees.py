"""Conversions between trees of arrays and trees of scaled arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import (
    ScaledArray,
    align_scale,
    check_scale,
    check_scale_dtype,
    check_scaled,
    is_scaled,
    rescale_data,
)
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.statistics import statistic
from jax_scalify.blocks import rounding
from jax_scalify.blocks.array import (
    BlockScaledArray,
    block_scaled_array,
    is_array_of_ours,
    is_block_scaled,
)
from jax_scalify.conversions.freezing import with_static_scale
from jax_scalify.conversions.leaf_rules import Options
from jax_scalify.conversions.nnx_objects import map_leaves
from jax_scalify.storage.names import is_key

# The static scale of a leaf of zeros, such as a bias before the first step. Float16 data then holds
# values from 2**-20 to 2**10 with all its bits.
_OF_ZEROS = 2.0**-6


def _keepdims_axes(own: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Return the axes that share a scale, given the axes with one scale for each index."""
    own = tuple(a % ndim for a in own if -ndim <= a < ndim)
    return tuple(a for a in range(ndim) if a not in own)


def scaled_array(data: Any, scale: Any, dtype: Any = None, scale_dtype: Any = None) -> ScaledArray:
    """Return a `ScaledArray` of the value `data * scale`.

    Args:
        data: array-like of a floating dtype.
        scale: a finite, non-negative number or array. It is rounded down to a power of two, and the
            data is multiplied by the rest. A Python float makes a static scale, an array a dynamic
            scale.
        dtype: dtype of the data; by default its own.
        scale_dtype: dtype of a dynamic scale; by default float32.

    Raises:
        TypeError: if `data` or `dtype` is not floating point, if `data` is complex and `dtype` is
            real, or if `scale_dtype` is too narrow.
        ValueError: if `scale` is negative, nan or infinite, if its shape does not fit, or if it is
            0 and the data is not zero.

    Example:
        >>> print(scaled_array(jnp.ones(2), 6.0).to_array())
        [6. 6.]
    """
    dtype = None if dtype is None else dtypes.as_data_dtype(dtype, "dtype")
    if dtype is not None and dtype.kind != "c" and np.iscomplexobj(data):
        raise TypeError(
            f"`dtype` must be complex as `data` is, got {dtype}, which has no imaginary part. For "
            "the real part take `jnp.real(data)`."
        )
    data = jnp.asarray(data, dtype)
    if not dtypes.is_scalable(data.dtype):
        raise TypeError(f"`data` must have a floating dtype, got {data.dtype}.")
    check_scale(scale, data)
    static = type(scale) in (float, int)
    if static:
        power: Any = float(pow2.round_down_number(scale))
    else:
        power = _power_of(scale, check_scale_dtype(scale_dtype))
    if _compat.is_traced(scale):
        wide = scale.astype(dtypes.promoted(scale.dtype, power.dtype))
        rest = jnp.where(power == 0, 1, wide / power.astype(wide.dtype))
    else:
        powers = pow2.round_down_number(scale)
        compute = dtypes.real_dtype(dtypes.compute_dtype(data.dtype))
        with np.errstate(over="ignore"):  # the value is infinite then
            rest = np.asarray(scale, np.float64) / np.where(powers == 0, 1, powers)
            rest = np.where(powers == 0, 1, rest).astype(compute)
        if static and rest == 1:
            return ScaledArray(data, power)
    return ScaledArray(rescale_data(data, align_scale(rest, data.ndim)), power)


def _power_of(scale: Any, dtype: Any) -> jax.Array:
    """Round a given scale down to a power of two within the range of scales."""
    if not _compat.is_traced(scale):
        return jnp.array(pow2.round_down_number(scale).astype(dtype))
    wide = scale if jnp.issubdtype(scale.dtype, jnp.floating) else scale.astype(dtype)
    return pow2.round_down(wide, dtype)


def _choose_scale(data: jax.Array, options: Options) -> jax.Array:
    """Return the power of two (or 0) by which `as_scaled_array` divides a leaf."""
    scale, scale_dtype = options.scale, options.scale_dtype
    if scale is not None and not isinstance(scale, str):
        check_scale(scale, data)
        return _power_of(scale, scale_dtype)
    axes = _keepdims_axes(options.axis, data.ndim)
    per_axis = len(axes) < data.ndim
    if scale is not None:
        return _scale_of(data, scale, axes if per_axis else None, scale_dtype)
    is_zero = not _compat.is_traced(data) and not np.any(np.asarray(data))
    shape = tuple(1 if a in axes else d for a, d in enumerate(data.shape)) if per_axis else ()
    return jnp.full(shape, 0.0 if is_zero else 1.0, scale_dtype)


@functools.partial(jax.jit, static_argnames=("stat", "axes", "dtype"), inline=True)
def _scale_of(data: jax.Array, stat: str, axes: tuple[int, ...] | None, dtype: Any) -> jax.Array:
    """Return a statistic rounded down to a power of two; 1 if it is not finite."""
    size = statistic(data, stat, axes)
    power = pow2.round_down(size, dtype)
    return jnp.where(jnp.isfinite(size), power, jnp.ones_like(power))


def _convert(leaf: Any, path: tuple, options: Options) -> Any:
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "OUS":
        raise TypeError(
            f"`tree{tree_util.keystr(path)}` is an array of dtype {leaf.dtype}: only numbers have "
            "scales. Remove it from the tree or convert it to a numeric dtype."
        )
    if is_block_scaled(leaf):
        return leaf
    kind = leaf.dtype if is_scaled(leaf) else dtypes.leaf_dtype(leaf)
    if kind is None or not dtypes.is_scalable(kind) or _is_setting(leaf, path):
        return leaf
    found = options.of_leaf(path, leaf)
    if found is None:
        return leaf
    if found.block is not None:
        return _in_blocks(leaf, path, found)
    dtype = None if found.dtype is None else dtypes.of_leaf(kind, found.dtype)
    if is_scaled(leaf):
        return leaf if dtype is None else leaf.astype(dtype)
    data = jnp.asarray(leaf)
    power = _choose_scale(data, found)
    return ScaledArray(_divided(data, align_scale(power, data.ndim), dtype), power)


def _is_setting(leaf: Any, path: tuple) -> bool:
    """Whether a leaf of a tree is a Python number, such as a dropout rate: nothing to train."""
    return dtypes.is_python_number(leaf) and bool(path)


def _in_blocks(leaf: Any, path: tuple, options: Options) -> BlockScaledArray:
    """Quantise a leaf. A `ScaledArray` keeps its scale. An MX array needs only block scales."""
    format, block_axis = options.block
    key = options.key_of_leaf(path) if format.rounding == "stochastic" else None
    types = dict(
        axis=block_axis, dtype=leaf.dtype if options.dtype is None else options.dtype, key=key
    )
    if is_scaled(leaf):
        return block_scaled_array(leaf.data, format, scale=leaf.scale, **types)
    data = jnp.asarray(leaf)
    if options.scale is None and format.is_mx:
        return block_scaled_array(data, format, **types)
    if options.scale is None:
        axes = _keepdims_axes(options.axis, data.ndim)
        exponent = rounding.tensor_exponent(data.astype(jnp.float32), axes)
        exponent = exponent if len(axes) < data.ndim else jnp.squeeze(exponent)
        power = pow2.power(exponent, options.scale_dtype)
    else:
        power = _choose_scale(data, options)
    data = _divided(data, align_scale(power, data.ndim), jnp.float32)
    return block_scaled_array(data, format, scale=power, **types)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _divided(data: jax.Array, power: jax.Array, dtype: Any) -> jax.Array:
    """Return `data / power`, in at least float32 and cast once. A power of 0 counts as 1."""
    return rescale_data(data, jnp.where(power == 0, 1, 1 / power), dtype)


def as_scaled_array(
    tree: Any,
    scale: Any | Literal["rms", "max"] | None = None,
    *,
    dtype: Any = None,
    scale_dtype: Any = None,
    axis: int | Sequence[int] | None = None,
    block: Any = None,
    key: Any = None,
    static: bool = False,
) -> Any:
    """Convert each floating-point leaf of a tree to a `ScaledArray` of the same value.

    Integers, bools, PRNG keys, `None`, callables, strings and other non-arrays are unchanged, and
    so are Python numbers in a tree, such as the dropout rate of an Equinox module. A
    leaf that is a `ScaledArray` keeps its scale. Each leaf gets its own scale buffer, so that a
    state can be donated. An NNX object becomes a new object, in which shared variables stay shared.

    Args:
        tree: any pytree: a Flax `TrainState`, NNX state, optax state, Equinox module, array...
        scale: `None` for 1 (a concrete all-zero leaf gets 0, "any scale will do"); a number or
            array, rounded down to a power of two; or `"rms"` or `"max"`, computed for each leaf.
        dtype: dtype of the data, which is rounded *after* the division by the scale. By default
            each leaf's own. Complex leaves keep their dtype unless `dtype` is complex.
        scale_dtype: dtype of the scales; by default float32.
        axis: axis or axes along which each index has its own scale. The scale has shape
            `(..., n, ...)`, with 1 for the other axes. A leaf without this axis has one scale.
        block: a block format (a `jsa.BlockFormat` or its name), or a pair of a format and the axis
            along which blocks lie. The default axis is the axis before the last, the inputs of a
            kernel `(inputs, outputs)`. Leaves of rank 2 and more become `jsa.BlockScaledArray`.
            With `scale=None`, an MX array has the static scale 1, and an NVFP4 array has the
            smallest power of two with which all values are in range. Otherwise the leaf is first
            divided by `scale`.
        key: `jax.random` key, for a block format whose rounding is stochastic.
        static: whether scales are static, Python floats that the compiler knows. Use it for
            weights: the passes through the model then need no arithmetic for scales, and a step
            that stores its weights with `jsa.optim.apply_updates` or `match_scales` returns them
            at the same scales. Data has room to grow, as in `freeze_scales`. A leaf of zeros gets
            2**-6, or 1 with `scale=None`. Scales along axes stay dynamic.

    Each of `scale`, `dtype`, `axis` and `block` may be a rule: a function that takes a
    `jax.tree_util` key path and the floating leaf there, and returns the argument for this leaf. If
    `dtype` or `scale` returns `None`, the leaf is unchanged, without a scale. If `axis` returns
    `None`, the leaf has one scale. If `block` returns `None`, the leaf has no blocks.

    Returns:
        The tree with `ScaledArray` leaves, whose scales are dynamic unless `static`, or with
        `BlockScaledArray` leaves.

    Raises:
        TypeError: if a leaf is an array of objects or strings (the message names it), if `dtype` is
            not floating point, if `scale_dtype` cannot hold the exponents of float32, if `axis` is
            not an int, or if `static` and a leaf is traced.
        ValueError: if `scale` is negative, nan or infinite, if its shape does not fit, if it is 0
            and the leaf is not zero, if it is an unknown statistic, if a rule returns `None` for
            every leaf, or if a rule returns an axis that its leaf does not have.

    Example:
        >>> w = as_scaled_array({"w": jnp.full((2, 2), 0.03)}, scale="rms", dtype=jnp.float16)
        >>> print(w["w"].scale, w["w"].dtype)
        0.015625 float16
        >>> w = as_scaled_array({"w": jnp.full((2, 2), 0.03)}, scale="rms", static=True)
        >>> w["w"].scale
        0.015625
        >>> def rule(path, leaf):
        ...     return jnp.float8_e4m3fn if "kernel" in jax.tree_util.keystr(path) else leaf.dtype
        >>> params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
        >>> jsa.tree.map(lambda x: str(x.dtype), as_scaled_array(params, dtype=rule))
        {'bias': 'float32', 'kernel': 'float8_e4m3fn'}
        >>> jsa.tree.map(lambda x: type(x).__name__, as_scaled_array(params, block="mxfp8"))
        {'bias': 'ScaledArray', 'kernel': 'BlockScaledArray'}
    """
    options = Options.of(scale, dtype, axis, scale_dtype, block, key)
    if not isinstance(static, bool):
        raise TypeError(f"`static` must be a bool, got {static!r}.")
    check_scaled(tree)
    paths: list[str] = []

    def convert(leaf: Any, path: tuple) -> Any:
        found = _convert(leaf, path, options)
        if static:
            found = with_static_scale(found, path, of_zero=1.0 if scale is None else _OF_ZEROS)
        if options.rules and dtypes.is_scalable(getattr(found, "dtype", np.int32)):
            paths.append(tree_util.keystr(path))
        return found

    out = map_leaves(convert, tree)
    options.check_matches(paths)
    return out


def asarray(tree: Any, dtype: Any = None) -> Any:
    """Convert each `ScaledArray` of a tree to a plain array, `data * scale`.

    Each `BlockScaledArray` becomes a plain array too.

    Args:
        tree: any pytree. Plain leaves are unchanged, except that floating-point leaves are cast if
            `dtype` is given.
        dtype: dtype of the values; by default the data's. Use `jnp.float32` for evaluation:
            `data * scale` may be outside the range of float16. Complex leaves keep their dtype
            unless `dtype` is complex.

    Raises:
        TypeError: if `dtype` is not a dtype.
        ValueError: if a concrete scale is not a power of two or 0.

    Example:
        >>> x = ScaledArray(jnp.array([40000.0], jnp.float16), jnp.float32(2.0**-25))
        >>> print(asarray(x, jnp.float32))
        [0.00119209]
    """
    check_scaled(tree, scales="powers")
    if dtype is not None:
        try:
            jnp.dtype(dtype)
        except TypeError:
            raise TypeError(
                f'`dtype` must be a dtype, as jnp.float32 or "float32", got {dtype!r}.'
            ) from None

    def convert(leaf: Any, path: tuple) -> Any:
        is_ours = is_array_of_ours(leaf)
        kind = leaf.dtype if is_ours else dtypes.leaf_dtype(leaf)
        if kind is None or not dtypes.is_scalable(kind) or _is_setting(leaf, path):
            return leaf
        wanted = None if dtype is None else dtypes.of_leaf(kind, dtype)
        if is_ours:
            return leaf.to_array(wanted)
        return leaf if wanted is None else dtypes.cast(jnp.asarray(leaf), wanted)

    return map_leaves(convert, tree)


def to_numbers(tree: Any) -> Any:
    """Convert the arrays of a tree to Python numbers and NumPy arrays, for logs, JSON and printing.

    A 0-d array becomes a `float`, `int`, `bool` or `complex`. Other arrays become NumPy arrays.
    Floating-point arrays are cast to at least float32, because readers of NumPy arrays may not know
    bfloat16. All arrays are fetched at once, and the call waits for them. Strings, `None` and
    Python numbers are unchanged. `jax.random` keys become their data.

    Raises:
        TypeError: if a leaf is traced, since it has no value under `jit`. The message names it.
        ValueError: if a scale is not a power of two or 0.

    Example:
        >>> import json
        >>> metrics = {"loss": jsa.as_scaled_array(jnp.float16(0.5)), "step": jnp.int32(3)}
        >>> metrics["classes"] = jnp.ones(2)
        >>> print(json.dumps(jsa.to_numbers(metrics), default=np.ndarray.tolist))
        {"classes": [1.0, 1.0], "loss": 0.5, "step": 3}
    """
    check_scaled(tree, scales="powers")

    def check(leaf: Any, path: tuple) -> Any:
        if any(map(_compat.is_traced, jax.tree.leaves(leaf))):
            raise TypeError(
                f"`tree{tree_util.keystr(path)}` is traced and has no value yet: call `to_numbers` "
                "on what a jitted function returns, or inside of it in a function for "
                "`jax.debug.callback`."
            )
        return jax.random.key_data(leaf) if is_key(leaf) else leaf

    def convert(leaf: Any, path: tuple) -> Any:
        kind = getattr(leaf, "dtype", None)
        if kind is None or np.dtype(kind).kind in "OUS":
            return leaf
        wide = dtypes.compute_dtype(kind) if dtypes.is_scalable(kind) else kind
        values = leaf.__array__(wide) if is_array_of_ours(leaf) else np.asarray(leaf).astype(wide)
        return values if values.ndim else values.item()

    return map_leaves(convert, jax.device_get(map_leaves(check, tree)))
