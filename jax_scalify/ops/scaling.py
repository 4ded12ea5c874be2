"""Functions that speak about scales: they bind the primitives of `primitives/definitions.py`.

On a `ScaledArray` outside of `scalify`, each runs itself through the transform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.arrays import scaled_array as array_lib
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.statistics import check_statistic
from jax_scalify.base.stochastic_rounding import random_bits
from jax_scalify.blocks.array import is_array_of_ours
from jax_scalify.config import current_config
from jax_scalify.primitives.definitions import (
    cast_p,
    dynamic_rescale_p,
    get_data_and_scale_p,
    match_scale_p,
    on_backward_p,
    rebalance_scale_p,
    set_scaling_p,
    stochastic_cast_p,
    stop_scaling_p,
)
from jax_scalify.transform import scalify


def checked_array(x: Any, name: str = "x") -> Any:
    """Return `x` as a JAX array; refuse what is neither an array nor a `ScaledArray`."""
    kind = dtypes.leaf_dtype(x)
    if kind is None and not hasattr(x, "__jax_array__"):
        raise TypeError(f"`{name}` must be an array or a ScaledArray, got {type(x).__name__}.")
    return jnp.asarray(x)


def _checked_scale(scale: Any, x: Any) -> jax.Array:
    array_lib.check_scale(scale, x)
    return jnp.asarray(scale, current_config().scale_dtype)


def cast(x: jax.Array, dtype: Any, key: Any = None) -> jax.Array:
    """Cast a floating array as `dtypes.cast` does.

    One primitive, so that inside `scalify` it is the data that saturates, not the value.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if key is None:
        return cast_p.bind(x, dtype=dtype)
    return stochastic_cast_p.bind(x, random_bits(key, x.shape), dtype=dtype)


def set_scaling(x: Any, scale: Any) -> Any:
    """Give a value a scale of your choice; the value stays the same.

    Inside `scalify`: `data = x / scale` in at least float32 and cast once. Without: `x`.

    Args:
        x: array of a floating dtype (others are returned as they are), or a `ScaledArray`.
        scale: not negative, finite, of shape `()`, of the rank of `x` with dims 1 or equal, or of
            a lower rank along the leading axes; rounded down to a power of two.

    Raises:
        ValueError: if a concrete `scale` is negative, nan or infinite, or its shape does not fit.

    Example:
        >>> f = jsa.scalify(lambda x: jsa.set_scaling(x, 4.0))
        >>> print(f(jsa.as_scaled_array(jnp.float32(2.0))).data)
        0.5
    """
    if isinstance(x, ScaledArray):
        return _outside(set_scaling, x, scale)
    x = checked_array(x)
    return set_scaling_p.bind(x, _checked_scale(scale, x)) if dtypes.is_scalable(x.dtype) else x


def rebalance_scale(x: Any, factor: Any) -> Any:
    """Multiply the scale of a value by a power of two and divide its data by it.

    Inside `scalify`: `(data / factor, scale * factor)`, a factor 0 being read as 1. Without: `x`.

    Raises:
        ValueError: if a concrete `factor` is negative, nan or infinite, or its shape does not fit.

    Example:
        >>> f = jsa.scalify(lambda x: jsa.rebalance_scale(x, 8.0))
        >>> print(f(jsa.as_scaled_array(jnp.ones(3))).scale)
        8.0
    """
    if isinstance(x, ScaledArray):
        return _outside(rebalance_scale, x, factor)
    x = checked_array(x)
    if not dtypes.is_scalable(x.dtype):
        return x
    return rebalance_scale_p.bind(x, _checked_scale(factor, x))


def get_data_and_scale(x: Any) -> tuple[Any, Any]:
    """Return `(data, scale)` of a value, as plain arrays; without `scalify`, `(x, 1)`.

    A scale that is not scalar is first made uniform, so `scale` always has shape `()`.

    Example:
        >>> def f(x):
        ...     data, scale = jsa.get_data_and_scale(x)
        ...     return data
        >>> print(jsa.scalify(f)(jsa.as_scaled_array(jnp.float32(6.0), scale=4.0)))
        1.5
    """
    if isinstance(x, ScaledArray):
        return x.data, x.scale
    x = checked_array(x)
    dtype = current_config().scale_dtype
    if not dtypes.is_scalable(x.dtype):
        return x, jnp.ones((), dtype)
    return tuple(get_data_and_scale_p.bind(x, scale_dtype=np.dtype(dtype)))


def stop_scaling(tree: Any, dtype: Any = None) -> Any:
    """Return values as plain arrays: what follows is not scaled until it meets a scaled value.

    Args:
        tree: pytree of arrays inside `scalify`, with `ScaledArray` leaves outside. Leaves that are
            not of a floating dtype pass through unchanged.
        dtype: dtype of the results; by default each leaf's own. The product `data * scale` is made
            in at least float32 and cast once. Complex leaves keep their dtype unless this one is
            complex.

    Example:
        >>> f = jsa.scalify(lambda x: jsa.stop_scaling(x, jnp.float32))
        >>> print(f(jsa.as_scaled_array(jnp.float16(6.0))))
        6.0
    """

    def stop(leaf: Any) -> Any:
        if is_array_of_ours(leaf):
            return leaf.to_array(None if dtype is None else dtypes.of_leaf(leaf.dtype, dtype))
        if dtypes.leaf_dtype(leaf) is None and not hasattr(leaf, "__jax_array__"):
            return leaf
        x = jnp.asarray(leaf)
        if not dtypes.is_scalable(x.dtype):
            return leaf
        return stop_scaling_p.bind(x if dtype is None else x.astype(dtypes.of_leaf(x.dtype, dtype)))

    array_lib.check_scaled(tree, any_scale=True)
    return jax.tree.map(stop, tree, is_leaf=is_array_of_ours)


def rescale_leaf(x: Any, stat: str = "rms", target: float = 1.0) -> Any:
    """Move the data's statistic to `target`: the rule of `dynamic_rescale` for one array."""
    array_lib.check_scaled(x, "x")
    return _rescale_leaf(checked_array(x) if not array_lib.is_scaled(x) else x, stat, target)[0]


def _rescale_leaf(x: Any, stat: str, target: float) -> tuple[Any, Any]:
    """The array rescaled, and whether its statistic is finite."""
    if isinstance(x, ScaledArray):
        return _rescale_outside(x, stat, target)
    kind = dtypes.leaf_dtype(x)
    if kind is None or not dtypes.is_scalable(kind):
        return x, True
    out = dynamic_rescale_p.bind(jnp.asarray(x), stat=stat, target=target, batch_ndim=0)
    return tuple(out)


@functools.partial(jax.jit, static_argnums=(1, 2))  # one program for all leaves of a shape
def _rescale_outside(x: ScaledArray, stat: str, target: float) -> tuple[Any, Any]:
    return _outside(_rescale_leaf, x, stat, target)


def dynamic_rescale(
    tree: Any, stat: str = "rms", target: float = 1.0, *, return_finite: bool = False
) -> Any:
    """Rescale every scaled leaf so that a statistic of its data is about `target`.

    The statistic is taken in float32 over the whole leaf (for each index of a scale that is not
    scalar) and rounded to a power of two, so that moving it between data and scale is exact as
    long as no element becomes subnormal. A nonzero element never becomes 0: optimizers divide by
    second moments. A leaf that is all zero gets scale 0 ("any scale"); a leaf with a non-finite
    statistic is left unchanged.

    Args:
        tree: pytree with `ScaledArray` leaves outside `scalify`, or arrays inside it. Other leaves
            pass through unchanged.
        stat: "rms" (or "l2"), "l1" (mean absolute value) or "max".
        target: power of two that the statistic is brought to.
        return_finite: whether to tell if every statistic was finite.

    Returns:
        The tree; with `return_finite`, also a 0-d bool array, False if a leaf was left alone. Plain
        leaves have no say.

    Raises:
        ValueError: for an unknown `stat`, or a `target` that is not a power of two.

    Example:
        >>> x = jsa.ScaledArray(jnp.full(4, 64.0, jnp.float16), jnp.float32(1.0))
        >>> print(jsa.dynamic_rescale(x).scale)
        64.0
        >>> state = {"w": x, "b": jsa.as_scaled_array(jnp.array([1.0, jnp.inf]))}
        >>> state, finite = jsa.dynamic_rescale(state, return_finite=True)
        >>> print(state["w"].scale, finite)
        64.0 False
    """
    check_statistic(stat)
    if not pow2.is_power_of_two(target):
        raise ValueError(f"`target` must be a power of two, got {target!r}.")
    array_lib.check_scaled(tree)
    leaves, structure = jax.tree.flatten(tree, is_leaf=array_lib.is_scaled)
    leaves = [_rescale_leaf(leaf, stat, float(target)) for leaf in leaves]
    tree = structure.unflatten(leaf for leaf, _ in leaves)
    if not return_finite:
        return tree
    return tree, functools.reduce(jnp.logical_and, (flag for _, flag in leaves), jnp.bool_(True))


def match_scales(tree: Any, like: Any) -> Any:
    """Bring each leaf to the scale of its partner in `like`: its value, shape and kind.

    Inside `scalify` the leaves are arrays, outside of type `ScaledArray`. Use it at the end of a
    step that would change scales, so that the state has the structure that it was given. A partner
    of scale 0 takes any: the leaf keeps its own.

    Raises:
        ValueError: if the two trees differ in structure.

    Example:
        >>> x = jsa.as_scaled_array(jnp.ones(2), scale=4.0)
        >>> y = jsa.as_scaled_array(jnp.ones(2), scale=2.0)
        >>> print(jsa.match_scales(x, y).scale)
        2.0
    """

    def match(leaf: Any, partner: Any) -> Any:
        if array_lib.is_scaled(leaf) and array_lib.is_scaled(partner):
            if partner.is_static and not partner.scale:
                return leaf
            data = _outside(set_scaling, leaf, partner.scale).data
            scale = partner.scale if partner.is_static else jnp.array(partner.scale)
            return ScaledArray(data, scale)
        kind = dtypes.leaf_dtype(leaf)
        if kind is None or not dtypes.is_scalable(kind) or array_lib.is_scaled(partner):
            return leaf
        return match_scale_p.bind(checked_array(leaf), checked_array(partner))

    array_lib.check_scaled(tree)
    array_lib.check_scaled(like, "like")
    return jax.tree.map(match, tree, like, is_leaf=array_lib.is_scaled)


def on_backward(x: Any, function: Hashable, *operands: jax.Array) -> Any:
    """Return `x`; send its cotangent through `function(cotangent, *operands)`, of the same aval."""
    x = checked_array(x)
    if not dtypes.is_scalable(x.dtype):
        return x
    return on_backward_p.bind(x, *operands, function=function)


def _outside(function: Callable, x: ScaledArray, *args: Any) -> Any:
    """Run a scale function on a `ScaledArray` outside `scalify`."""
    if args and dtypes.leaf_dtype(args[0]) is not None and np.ndim(args[0]):
        return scalify(function)(x, *args)  # an array is an argument: its values are not constants
    return scalify(lambda leaf: function(leaf, *args))(x)
