"""Functions that set or read scales. They bind the primitives of `primitives/definitions.py`.

Applied to a `ScaledArray` outside of `scalify`, each function scalifies itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays import scaled_array as array_lib
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.statistics import STATISTICS
from jax_scalify.blocks.array import is_array_of_ours
from jax_scalify.config import current_config
from jax_scalify.interpreter.operand import Operand
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
from jax_scalify.rules.shared.along_axes import uniform_over
from jax_scalify.scales.algebra import Scale
from jax_scalify.transform import scalify


def checked_array(x: Any, name: str = "x") -> Any:
    """Return `x` as a JAX array; raise a `TypeError` if it is not an array or a number."""
    kind = dtypes.leaf_dtype(x)
    if array_lib.is_scaled(x):
        raise TypeError(
            f"`{name}` must be an array, got ScaledArray: call the function inside `jsa.scalify`, "
            "where arrays have scales, or convert with `jsa.asarray` first."
        )
    if kind is None and not hasattr(x, "__jax_array__"):
        raise TypeError(f"`{name}` must be an array or a ScaledArray, got {type(x).__name__}.")
    return jnp.asarray(x)


def _checked_scale(scale: Any, x: Any, name: str) -> jax.Array:
    """Return a scale as an array of the dtype of scales."""
    array_lib.check_scale(scale, x, name)
    return jnp.asarray(scale, current_config().scale_dtype)


def _check_written(scale: Any, name: str) -> None:
    """Raise if a scale that is written as a number is not a power of two."""
    if isinstance(scale, jax.Array) or dtypes.leaf_dtype(scale) is None:
        return
    if np.all(np.isfinite(scale)) and not array_lib.may_be_powers_of_two(np.abs(scale)):
        raise ValueError(
            f"`{name}` must be a power of two, got {scale!r}. (One that is computed, a "
            "`jax.Array`, is rounded down.)"
        )


def cast(x: jax.Array, dtype: Any, key: Any = None) -> jax.Array:
    """Cast a floating array as `dtypes.cast` does.

    It is one primitive, so that inside `scalify` the data saturates, and not the value.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if key is None:
        return cast_p.bind(x, dtype=dtype)
    bits = jax.random.bits(key, x.shape, jnp.uint32)
    return stochastic_cast_p.bind(x, bits, dtype=dtype)


def set_scaling(x: Any, scale: Any) -> Any:
    """Return the same value with a given scale.

    Inside `scalify`, `data = x / scale`, computed in at least float32 and cast once. Outside, the
    result is `x`.

    Args:
        x: array of a floating dtype, or a `ScaledArray`. Other arrays are returned unchanged.
        scale: power of two; a `jax.Array` is rounded down to one. Its shape is `()`, or the rank of
            `x` with each dim 1 or equal, or a lower rank along the leading axes.

    Raises:
        ValueError: if a number is not a power of two; if a concrete `scale` is negative, nan or
            infinite; or if its shape does not fit.

    Example:
        >>> f = jsa.scalify(lambda x: jsa.set_scaling(x, 4.0))
        >>> print(f(jsa.as_scaled_array(jnp.float32(2.0))).data)
        0.5
    """
    _check_written(scale, "scale")
    if isinstance(x, ScaledArray):
        return _outside(set_scaling, x, scale)
    x = checked_array(x)
    if not dtypes.is_scalable(x.dtype):
        return x
    return set_scaling_p.bind(x, _checked_scale(scale, x, "scale"))


def rebalance_scale(x: Any, factor: Any) -> Any:
    """Multiply the scale of a value by a power of two, and divide its data by it.

    Inside `scalify`, the result is `(data / factor, scale * factor)`. A factor of 0 counts as 1. A
    `jax.Array` is rounded down to a power of two. Outside, the result is `x`.

    Raises:
        ValueError: if a number is not a power of two; if a concrete `factor` is negative, nan or
            infinite; or if its shape does not fit.

    Example:
        >>> f = jsa.scalify(lambda x: jsa.rebalance_scale(x, 8.0))
        >>> print(f(jsa.as_scaled_array(jnp.ones(3))).scale)
        8.0
    """
    _check_written(factor, "factor")
    if isinstance(x, ScaledArray):
        return _outside(rebalance_scale, x, factor)
    x = checked_array(x)
    if not dtypes.is_scalable(x.dtype):
        return x
    return rebalance_scale_p.bind(x, _checked_scale(factor, x, "factor"))


def get_data_and_scale(x: Any) -> tuple[Any, Any]:
    """Return `(data, scale)` of a value as plain arrays; outside of `scalify`, `(x, 1)`.

    Inside `scalify`, a scale with axes is first made uniform, so `scale` has shape `()`. A scale
    rule can do this to its operands. `scale` is then the `scale` of an operand, and not an array.

    Example:
        >>> def f(x):
        ...     data, scale = jsa.get_data_and_scale(x)
        ...     return data
        >>> print(jsa.scalify(f)(jsa.as_scaled_array(jnp.float32(6.0), scale=4.0)))
        1.5
    """
    if isinstance(x, ScaledArray):
        if isinstance(x.scale, Scale):  # an operand of a rule
            x = uniform_over(Operand.of(x))
        return x.data, x.scale
    x = checked_array(x)
    dtype = current_config().scale_dtype
    if not dtypes.is_scalable(x.dtype):
        return x, jnp.ones((), dtype)
    return tuple(get_data_and_scale_p.bind(x, scale_dtype=np.dtype(dtype)))


def stop_scaling(tree: Any, dtype: Any = None) -> Any:
    """Return values as plain arrays. Results stay plain until they meet a scaled value.

    Args:
        tree: pytree of arrays inside `scalify`, or with `ScaledArray` leaves outside. Leaves that
            are not floating point are unchanged.
        dtype: dtype of the results; by default each leaf's own. `data * scale` is computed in at
            least float32 and cast once. Complex leaves keep their dtype unless `dtype` is complex.

    Raises:
        ValueError: if a concrete scale is not a power of two or 0.

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

    array_lib.check_scaled(tree, scales="powers")
    return jax.tree.map(stop, tree, is_leaf=is_array_of_ours)


def rescale_leaf(x: Any, stat: str = "rms", target: float = 1.0) -> Any:
    """Apply `dynamic_rescale` to one array, without the check of `stat` and `target`."""
    array_lib.check_scaled(x, "x")
    return _rescale_leaf(checked_array(x) if not array_lib.is_scaled(x) else x, stat, target)[0]


def _rescale_leaf(x: Any, stat: str, target: float) -> tuple[Any, Any]:
    """Return the rescaled array, and whether its statistic is finite."""
    if isinstance(x, ScaledArray):
        new, finite = _rescale_outside(x, stat, target)
        return (_still_static(x, new) if x.is_static else new), finite
    kind = dtypes.leaf_dtype(x)
    if kind is None or not dtypes.is_scalable(kind):
        return x, True
    out = dynamic_rescale_p.bind(jnp.asarray(x), stat=stat, target=target, batch_ndim=0)
    return tuple(out)


@functools.partial(jax.jit, static_argnums=(1, 2))  # one program for all leaves of a shape
def _rescale_outside(x: ScaledArray, stat: str, target: float) -> tuple[Any, Any]:
    return _outside(_rescale_leaf, x, stat, target)


def _still_static(x: ScaledArray, new: ScaledArray) -> ScaledArray:
    """Return a rescaled leaf with a static scale, if it has a value; zeros keep the old one."""
    if _compat.is_traced(new.scale):
        return new
    scale = float(new.scale)
    return ScaledArray(new.data, scale if scale else x.scale)


def dynamic_rescale(
    tree: Any, stat: str = "rms", target: float = 1.0, *, return_finite: bool = False
) -> Any:
    """Rescale each scaled leaf so that a statistic of its data is about `target`.

    The statistic is computed in at least float32, over the whole leaf or for each index of a scale
    with axes. It is rounded to a power of two, so moving it between data and scale is exact unless
    an element becomes subnormal. A nonzero element never becomes 0: optimizers divide by second
    moments. A leaf of zeros gets the scale 0 ("any scale"). A leaf with a non-finite statistic is
    unchanged. Between steps a static scale stays static; a step compiles again if it has changed.

    Args:
        tree: pytree with `ScaledArray` leaves outside `scalify`, or arrays inside it. Other leaves
            are unchanged.
        stat: "rms" (or "l2"), "l1" (mean absolute value) or "max".
        target: power of two to which the statistic is brought.
        return_finite: whether to return also whether all statistics were finite.

    Returns:
        The tree; with `return_finite`, also a 0-d bool array: False if a scaled leaf has a
        non-finite statistic.

    Raises:
        ValueError: if `stat` is unknown, or `target` is not a power of two.

    Example:
        >>> x = jsa.ScaledArray(jnp.full(4, 64.0, jnp.float16), jnp.float32(1.0))
        >>> print(jsa.dynamic_rescale(x).scale)
        64.0
        >>> state = {"w": x, "b": jsa.as_scaled_array(jnp.array([1.0, jnp.inf]))}
        >>> state, finite = jsa.dynamic_rescale(state, return_finite=True)
        >>> print(state["w"].scale, finite)
        64.0 False
    """
    if stat not in STATISTICS:
        raise ValueError(f"`stat` must be one of {list(STATISTICS)}, got {stat!r}.")
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

    Leaves are arrays inside `scalify`, and of type `ScaledArray` outside. Use it at the end of a
    step that would change scales, so that the state is returned with the structure that it had. If
    a partner has the scale 0, the leaf keeps its own scale.

    Raises:
        ValueError: if the structures of the two trees differ.

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
    """Return `x`, and replace its cotangent by `function(cotangent, *operands)`, of equal aval."""
    x = checked_array(x)
    if not dtypes.is_scalable(x.dtype):
        return x
    return on_backward_p.bind(x, *operands, function=function)


def _outside(function: Callable, x: ScaledArray, *args: Any) -> Any:
    """Run a scale function on a `ScaledArray` outside `scalify`."""
    if args and dtypes.leaf_dtype(args[0]) is not None and np.ndim(args[0]):
        return scalify(function)(x, *args)  # an array argument must not become a constant
    return scalify(lambda leaf: function(leaf, *args))(x)
