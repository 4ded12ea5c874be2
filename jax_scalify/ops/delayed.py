"""Delayed scaling: the scale of a step is computed from the largest values of earlier steps.

A history holds, for each scaled leaf, the exponents of its largest value (its amax) in the last
steps. They are `int32`, so they are plain inside `scalify`. Outside of `scalify`, arrays are
unchanged.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import tree as tree_lib
from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes, pow2
from jax_scalify.primitives.definitions import NOTHING_SEEN, aligned_history, delayed_rescale_p
from jax_scalify.transform import scalify

_ALGORITHMS = ("max", "most_recent")


def top_exponent(dtype: Any) -> int:
    """Return the exponent to which an amax is brought: `2 * 2**exponent` is finite in the dtype.

    It is 0 for dtypes with the range of float32: there is no need to use their full range, and
    squares would overflow.
    """
    if not dtypes.is_narrow(dtype):
        return 0
    return pow2.floor_exponent(jnp.finfo(dtype).max) - 1


def amax_history(length: int = 16, scale_shape: Sequence[int] = ()) -> jax.Array:
    """Return an empty history for `delayed_rescale`.

    Args:
        length: number of steps to remember.
        scale_shape: shape of the value's scale, `()` for a scalar scale.

    Returns:
        An `int32` array of shape `(length, *scale_shape)`, the most recent step first.

    Raises:
        ValueError: if `length` is less than 1.

    Example:
        >>> print(jsa.ops.amax_history(2, (3, 1)).shape)
        (2, 3, 1)
    """
    if operator.index(length) < 1:
        raise ValueError(f"`length` must be at least 1, got {length!r}.")
    return jnp.full((length, *scale_shape), NOTHING_SEEN, jnp.int32)


def init_delayed_rescale(tree: Any, length: int = 16) -> Any:
    """Return empty histories for `delayed_rescale`, given the tree that it will rescale.

    Args:
        tree: any pytree. A `ScaledArray` gets a history for each of its scales, any other floating
            leaf gets one history, and other leaves get `None`.
        length: number of steps to remember.

    Raises:
        ValueError: if `length` is less than 1.

    Example:
        >>> state = {"w": jsa.as_scaled_array(jnp.ones((2, 3)), axis=0), "step": 0}
        >>> history = jsa.init_delayed_rescale(state, length=4)
        >>> print(history["w"].shape, history["step"])
        (4, 2, 1) None
    """

    def make(leaf: Any) -> Any:
        if is_scaled(leaf):
            return amax_history(length, np.shape(leaf.scale))
        kind = dtypes.leaf_dtype(leaf)
        return None if kind is None or not dtypes.is_scalable(kind) else amax_history(length)

    return jax.tree.map(make, tree, is_leaf=is_scaled)


def delayed_rescale(
    tree: Any,
    history: Any,
    algorithm: Literal["max", "most_recent"] = "max",
    margin: int = 0,
    *,
    dtype: Any = None,
    return_finite: bool = False,
) -> Any:
    """Rescale each scaled leaf by the amax that its history predicts, and record its own amax.

    If the prediction is right, the largest absolute value of the data is in `[t, 2t) / 2**margin`.
    `t` is the largest power of two whose double is finite in the dtype: 2**7 in E4M3, 2**14 in E5M2
    and float16. In bfloat16 and float32 `t` is 1. The scale does not depend on the current data, so
    the data may be measured and rescaled in one pass.

    A value that has outgrown the range saturates in FP8, and becomes infinite in float16. Choose a
    margin for float16, and a larger margin if it is multiplied in float16, as by a matmul. With an
    empty history the scale is unchanged. The derivative is the identity. A step of zeros predicts
    nothing, and an amax that is not finite is not recorded.

    Args:
        tree: pytree with `ScaledArray` leaves outside `scalify`, or arrays inside it; in a model, a
            single array. Other leaves and their histories are unchanged.
        history: the result of `init_delayed_rescale` or, for a single array,
            `jsa.ops.amax_history`.
        algorithm: "max" predicts the largest amax of the history, "most_recent" the last amax.
        margin: octaves of room above the predicted amax.
        dtype: the dtype whose range the data should fill; by default its own. The data is not cast.
            Use it if a cast follows, such as `jsa.ops.cast_on_forward`.
        return_finite: whether to return also whether all amaxes were finite.

    Returns:
        The tree and its histories; with `return_finite`, also a 0-d bool array.

    Raises:
        TypeError: if a history is not an `int32` array, or `margin` is not an integer.
        ValueError: if `algorithm` is unknown, or structure or shapes of the histories do not fit.

    Source: Micikevicius et al., "FP8 formats for deep learning", 2022; the delayed scaling of
    NVIDIA's Transformer Engine, with its names.

    Example:
        >>> x = jsa.as_scaled_array(jnp.float16([3.0, -5.0]))
        >>> history = jsa.init_delayed_rescale(x)
        >>> y, history = jsa.delayed_rescale(x, history)  # nothing seen: the scale stays
        >>> y, history = jsa.delayed_rescale(x, history, margin=4)
        >>> print(y.scale, history[:2])
        0.00390625 [2 2]
    """
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"`algorithm` must be one of {list(_ALGORITHMS)}, got {algorithm!r}.")
    options = algorithm, operator.index(margin), None if dtype is None else np.dtype(dtype)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_scaled)
    histories = tree_lib.flatten_like(structure, history, "history", "tree")
    out = [_rescale(x, h, *options) for x, h in zip(leaves, histories, strict=True)]
    result = (
        structure.unflatten(x for x, _, _ in out),
        structure.unflatten(h for _, h, _ in out),
    )
    if not return_finite:
        return result
    finite = functools.reduce(jnp.logical_and, (flag for _, _, flag in out), jnp.bool_(True))
    return *result, finite


def _rescale(x: Any, history: Any, *options: Any) -> tuple[Any, Any, Any]:
    """Return the rescaled array, its new history, and whether its amax is finite."""
    kind = x.dtype if is_scaled(x) else dtypes.leaf_dtype(x)
    if history is None or kind is None or not dtypes.is_scalable(kind):
        return x, history, True
    _check_history(history, np.shape(x.data) if is_scaled(x) else np.shape(x))
    if is_scaled(x):
        return _rescale_outside(x, history, *options)
    algorithm, margin, dtype = options
    x = jnp.asarray(x)
    y, aligned, finite = delayed_rescale_p.bind(
        x,
        aligned_history(jnp.asarray(history), x.ndim),
        algorithm=algorithm,
        top=top_exponent(dtype or x.dtype) - margin,
        batch_ndim=0,
    )
    return y, aligned.reshape(history.shape), finite


@functools.partial(jax.jit, static_argnums=(2, 3, 4))  # one program for all leaves of a shape
def _rescale_outside(x: ScaledArray, history: Any, *options: Any) -> tuple[Any, Any, Any]:
    return scalify(lambda x, history: _rescale(x, history, *options))(x, history)


def _check_history(history: Any, shape: tuple[int, ...]) -> None:
    if getattr(history, "dtype", None) != jnp.int32:
        raise TypeError(
            "`history` must be an int32 array as `jsa.init_delayed_rescale` makes it, got "
            f"{getattr(history, 'dtype', type(history).__name__)}."
        )
    length, *scale = np.shape(history) or (0,)
    if not length or len(scale) > len(shape) or any(s not in (1, d) for s, d in zip(scale, shape)):
        raise ValueError(
            f"`history` of shape {np.shape(history)} does not fit a value of shape {shape}: it "
            "must be (length,) or (length, *scale.shape), with a length of at least 1."
        )
