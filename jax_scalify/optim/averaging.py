"""Averages of parameters in few bits: exponential, Polyak, snapshots, target networks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify import tree as tree_lib
from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.base.stochastic_rounding import mixed
from jax_scalify.ops.scaling import stop_scaling
from jax_scalify.optim.adding import add_stochastically
from jax_scalify.optim.applying import widen
from jax_scalify.optim.leaves import Kind, Leaf
from jax_scalify.optim.low_precision import Optimizer, checked_dtype
from jax_scalify.optim.storing import store_leaves


class EmaState(NamedTuple):
    """The state of `ema`.

    Attributes:
        count: the number of averaged values, an `int32`.
        ema: the average. With `debias` it is the unbiased average itself.
    """

    count: Any
    ema: Any


def ema(decay: float, dtype: Any = jnp.float16, *, debias: bool = True) -> Any:
    """Average parameters or updates exponentially: `optax.ema` with its state in few bits.

    The steps of a slow average are smaller than the spacing of float16 numbers. With rounding to
    nearest, they are lost and the average does not move. `ema` computes them in float32 and rounds
    stochastically, so that they count on average, at any decay. With `debias`, the state is the
    unbiased average `ema / (1 - decay**count)`, updated by

        ema += (1 - decay) / (1 - decay**count) * (x - ema)

    This state has the size of the averaged values from the first step on, so that static scales
    (`freeze_scales`) always fit. `ema` works in a plain step and inside `scalify`.

    Stochastic rounding adds noise of mean 0. If `x` stays at a distance `d` from the average, the
    standard deviation of the noise is at most `sqrt(d * spacing / 2)`. The spacing of float16
    numbers is `2**-10` of their size. A float32 state has no such noise, and takes two bytes more
    per element.

    Args:
        decay: weight of the old average, from 0 to less than 1.
        dtype: dtype of the state: float32, bfloat16, float16 or FP8.
        debias: whether to average only the values seen. Otherwise the average starts from zero.

    Returns:
        `init(params)`, which makes an `EmaState`, and `update(params, state)`, which returns the
        average in the dtypes of `params`, and the new state. A leaf that is not floating point has
        its newest value.

    Raises:
        TypeError: if `dtype` is not one of these dtypes. When called, if a leaf is complex.
        ValueError: if `decay` is out of range. When called, if the state has another structure.

    Example:
        >>> average = jsa.optim.ema(0.999)
        >>> params = {"w": jnp.ones(4, jnp.float16)}
        >>> state = average.init(params)
        >>> for _ in range(3):
        ...     out, state = jax.jit(average.update)(params, state)
        >>> print(out["w"], state.ema["w"].dtype, state.count)
        [1. 1. 1. 1.] float16 3
    """
    if not isinstance(decay, (int, float, np.number)) or not 0 <= decay < 1:
        raise ValueError(f"`decay` must be a number from 0 to less than 1, got {decay!r}.")
    dtype, decay = checked_dtype(dtype, "dtype"), float(decay)

    def init(params: Any) -> EmaState:
        _check_real(params, "params")
        new = jax.tree.map(lambda leaf: _zeros(leaf, dtype), params, is_leaf=is_scaled)
        return EmaState(jnp.zeros((), jnp.int32), new)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, EmaState]:
        del params
        count = jnp.minimum(state.count, np.int32(2**31 - 2)) + 1  # int32 does not overflow
        weight = _weight(decay, count) if debias else stop_scaling(jnp.float32(1 - decay))
        olds, tree = jax.tree.flatten(state.ema, is_leaf=is_scaled)
        bits = [_counted_bits(x, count, i) for i, x in enumerate(olds)]
        totals = _moved(updates, (olds, tree), weight, ("updates", "state.ema"), bits)
        new = _stored(totals, olds, bits)
        given = jax.tree.leaves(updates, is_leaf=is_scaled)
        return tree.unflatten(_stored(totals, given)), EmaState(count, tree.unflatten(new))

    return Optimizer(init, update)


def incremental_update(
    new_tensors: Any, old_tensors: Any, step_size: Any, *, key: Any = None
) -> Any:
    """Move old tensors towards new tensors: `optax.incremental_update` for few bits.

    `old + step_size * (new - old)` is computed in float32 and rounded once, stochastically, to the
    dtypes of the old tensors. Steps smaller than the spacing of the dtype then count on average.
    optax computes in float16, where such steps are lost.

    =======================================  ==============================================
    average                                  `step_size`
    =======================================  ==============================================
    exponential, with a decay                `1 - decay`
    target networks                          their own, such as 0.005
    Polyak-Ruppert, SWA: of all snapshots    `1 / (n + 1)`, for the snapshot of number `n`
    slow weights of Lookahead                their own, such as 0.5, every few steps
    =======================================  ==============================================

    Args:
        new_tensors: tree of arrays, or of `ScaledArray` arrays outside `scalify`.
        old_tensors: tree of the same structure.
        step_size: a number or a 0-d array.
        key: `jax.random` key for the random bits. By default they are made from the numbers. If the
            old and new numbers are the same in every call, so is the rounding, and small steps are
            lost. Give `jax.random.fold_in(key, step)` in this case.

    Returns:
        A tree like `old_tensors`. Static scales are kept. Dynamic scales are chosen by statistic.

    Raises:
        TypeError: if a leaf is complex. The message names it.
        ValueError: if structures or shapes of the trees differ, or `step_size` is not 0-d.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.

    Example:
        >>> old, new = jnp.ones(1000, jnp.float16), jnp.full(1000, 2, jnp.float16)
        >>> moved = jsa.optim.incremental_update(new, old, 1e-4, key=jax.random.key(0))
        >>> print(jnp.unique(moved))
        [1.    1.001]
    """
    if jnp.ndim(step_size):
        raise ValueError(f"`step_size` must be of rank 0, got the shape {jnp.shape(step_size)}.")
    size = stop_scaling(jnp.asarray(step_size, jnp.float32))
    olds, tree = jax.tree.flatten(old_tensors, is_leaf=is_scaled)
    names = "new_tensors", "old_tensors"
    if key is None:
        bits = [None] * len(olds)
        salts = [widen(x) for x in tree_lib.flatten_like(tree, new_tensors, *names)]
    else:
        keys = jax.random.split(key, len(olds))
        bits = [
            jax.random.bits(k, jnp.shape(x), jnp.uint32) for k, x in zip(keys, olds, strict=True)
        ]
        salts = [None] * len(olds)
    totals = _moved(new_tensors, (olds, tree), size, names, bits, salts)
    return tree.unflatten(_stored(totals, olds, bits, salts))


def _is_averaged(leaf: Any) -> bool:
    kind = leaf.dtype if is_scaled(leaf) else dtypes.leaf_dtype(leaf)
    return kind is not None and jnp.issubdtype(kind, jnp.floating)


def _check_real(tree: Any, name: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
        kind = leaf.dtype if is_scaled(leaf) else dtypes.leaf_dtype(leaf)
        if kind is not None and jnp.issubdtype(kind, jnp.complexfloating):
            place = f"{name}{jax.tree_util.keystr(path)}"
            raise TypeError(
                f"`{place}` is {kind}: only real numbers are averaged. Give its real and "
                "imaginary part."
            )


def _zeros(leaf: Any, dtype: Any) -> Any:
    """Return the first average: zeros of scale 0, in the shape of the leaf's scale."""
    if not _is_averaged(leaf):
        return jnp.array(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf
    shape = jnp.shape(leaf.scale) if is_scaled(leaf) else ()
    return ScaledArray(jnp.zeros(jnp.shape(leaf), dtype), jnp.zeros(shape, jnp.float32))


def _weight(decay: float, count: jax.Array) -> jax.Array:
    """Return the weight of the newest of `count` values: 1 at first, `1 - decay` in the end."""
    steps = stop_scaling(count.astype(jnp.float32))
    # `decay**count - 1`, without the cancellation of a decay close to 1.
    kept = jnp.expm1(steps * math.log(decay)) if decay else jnp.float32(-1)
    return stop_scaling(jnp.where(count <= 1, 1.0, (decay - 1) / kept))


def _moved(
    new: Any,
    old: tuple[list[Any], Any],
    weight: Any,
    names: tuple[str, str],
    bits: list[Any],
    salts: list[Any] | None = None,
) -> list[Any]:
    """Return each leaf moved from its old towards its new value, in float32.

    A leaf that is not floating point has its new value. Inside `scalify`, results are plain values,
    and `_stored` chooses their scales by statistic.
    """
    _check_real(new, names[0])
    olds, tree = old
    totals = tree_lib.flatten_like(tree, new, *names)
    for i, (x, y) in enumerate(zip(totals, olds, strict=True)):
        if x is None or not _is_averaged(y):
            continue
        if jnp.shape(x) != jnp.shape(y):
            raise ValueError(
                f"`{names[0]}` must have the shapes of `{names[1]}`, got {jnp.shape(x)} for "
                f"{jnp.shape(y)}."
            )
        start = widen(y, plain=True)
        step = weight * (widen(x, plain=True) - start)
        totals[i] = add_stochastically(start, step, bits[i], None if salts is None else salts[i])
    return totals


def _stored(
    totals: list[Any], likes: list[Any], bits: list[Any] | None = None, salts: Any = None
) -> list[Any]:
    """Store leaves like `likes`: rounded with the bits, with bits from the salts, or to nearest."""
    averaged = [i for i, y in enumerate(likes) if totals[i] is not None and _is_averaged(y)]
    likes = list(likes)
    for i in averaged:
        likes[i] = likes[i] if is_scaled(likes[i]) else jnp.asarray(likes[i])
    none = [None] * len(likes)
    bits, salts = bits or none, salts or none
    leaves = [Leaf(totals[i], likes[i], salts[i], bits[i]) for i in averaged]
    new = list(totals)
    for i, x in zip(averaged, store_leaves(leaves, [Kind()] * len(leaves)), strict=True):
        new[i] = x
    return new


def _counted_bits(x: Any, count: jax.Array, number: int) -> jax.Array | None:
    """Return random bits that depend on the count, the number of the leaf, and the element."""
    if not _is_averaged(x):
        return None
    like = jax.typeof(x.data if is_scaled(x) else jnp.asarray(x))
    start = mixed(count.astype(jnp.uint32) * np.uint32(0x85EBCA6B) + np.uint32(number))
    place, stride, sharding = start, 1, _compat.explicit_sharding(like)
    for axis in reversed(range(like.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, like.shape, axis, out_sharding=sharding)
        place = place + along * np.uint32(0x9E3779B1 * stride % 2**32)
        stride *= like.shape[axis]
    return mixed(place)
