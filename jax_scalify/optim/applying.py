"""`apply_updates`: add updates to parameters of few bits."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_scalify import tree as tree_lib
from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base import dtypes
from jax_scalify.ops.scaling import stop_scaling
from jax_scalify.optim.leaves import Kind, Leaf
from jax_scalify.optim.storing import read_together, store_leaves

_POLICIES = ("statistic", "gradient")
_ROUNDINGS = ("stochastic", "nearest")


def apply_updates(
    params: Any,
    updates: Any,
    *,
    key: Any = None,
    policy: Literal["statistic", "gradient"] = "statistic",
    rounding: Literal["stochastic", "nearest"] = "stochastic",
) -> Any:
    """Add updates to parameters in float32, and round once to the parameters' dtype.

    float16 parameters are their own master weights: no float32 copy is kept.

    Args:
        params: tree of arrays, or of `ScaledArray` arrays outside `scalify`.
        updates: tree of the same structure.
        key: `jax.random` key for stochastic rounding. By default the random bits are made from the
            numbers, and a step is reproducible. If a parameter and its update are the same in every
            step, so is the rounding. With the same batch in every step and updates smaller than the
            spacing of the dtype, training stalls. Give `jax.random.fold_in(key, step)` in this
            case.
        policy: how dynamic scales of parameters are chosen. "statistic": the RMS of the data is 1,
            or less if an element would leave the range. "gradient": inside `scalify`, the larger
            scale of parameter and update, without statistics. This scale never decreases. If an
            optimizer divides by almost 0, its updates have a huge scale, and the parameters
            underflow.
        rounding: "stochastic", so that updates smaller than the spacing of the parameters' dtype
            count on average, or "nearest", which loses them, weight decay first.

    Raises:
        ValueError: if `policy` or `rounding` is unknown, or structures or shapes do not match.

    Example:
        >>> params = {"w": jnp.ones(1000, jnp.float16)}
        >>> updates = {"w": jnp.full(1000, 1e-4)}
        >>> new = jsa.optim.apply_updates(params, updates, key=jax.random.key(0))
        >>> print(jnp.unique(new["w"]), new["w"].dtype)
        [1.    1.001] float16
    """
    check_policy(policy)
    if rounding not in _ROUNDINGS:
        raise ValueError(f"`rounding` must be one of {list(_ROUNDINGS)}, got {rounding!r}.")
    each, tree = _weights_and_updates(params, updates)
    keys = [None] * len(each) if key is None else list(jax.random.split(key, len(each)))
    nearest = rounding == "nearest"
    return tree.unflatten(_applied(each, keys, policy, nearest))


def _weights_and_updates(params: Any, updates: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the leaves of both trees in pairs, and their structure."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_scaled)
    steps = tree_lib.flatten_like(tree, updates, "updates", "params")
    return list(zip(leaves, steps, strict=True)), tree


def check_policy(policy: str) -> None:
    """Raise a `ValueError` if a policy is unknown."""
    if policy not in _POLICIES:
        raise ValueError(f"`policy` must be one of {list(_POLICIES)}, got {policy!r}.")


def widen(tree: Any, *, plain: bool = False) -> Any:
    """Cast floating leaves to at least float32; if `plain`, remove scales inside `scalify`."""

    def wide(leaf: Any) -> Any:
        if is_scaled(leaf):
            return leaf.to_array(dtypes.compute_dtype(leaf.dtype))
        kind = dtypes.leaf_dtype(leaf)
        if kind is None or not dtypes.is_scalable(kind):
            return leaf
        dtype = dtypes.compute_dtype(kind)
        return stop_scaling(jnp.asarray(leaf), dtype) if plain else jnp.asarray(leaf, dtype)

    return jax.tree.map(wide, tree, is_leaf=is_scaled)


def rounded(params: Any, updates: Any, policy: str, factor: jax.Array) -> Any:
    """Return the updates that lead from parameters to the rounded results of `_applied`."""
    each, tree = _weights_and_updates(params, updates)
    few = [i for i, (param, update) in enumerate(each) if _is_narrow(param, update)]
    salts = [widen(each[i][1]) * factor for i in few]
    new = _applied([each[i] for i in few], [None] * len(few), policy, False, salts)
    steps = [update for _, update in each]
    for i, leaf in zip(few, new, strict=True):
        steps[i] = widen(leaf) - widen(each[i][0])
    return tree.unflatten(steps)


def _is_narrow(param: Any, update: Any) -> bool:
    """Return whether a parameter is updated, and has a floating dtype of less than 32 bits."""
    kind = param.dtype if is_scaled(param) else dtypes.leaf_dtype(param)
    return _is_float(param, update) and dtypes.compute_dtype(kind) != kind


def _is_float(param: Any, update: Any) -> bool:
    """Return whether a parameter is updated, and has a floating dtype."""
    kind = param.dtype if is_scaled(param) else dtypes.leaf_dtype(param)
    return update is not None and kind is not None and dtypes.is_scalable(kind)


def _plain_sum(param: Any, update: Any) -> Any:
    """Return the sum of an integer or boolean parameter and its update, as in optax."""
    # The gradient of such a parameter has the dtype float0, and is 0.
    if jax.dtypes.result_type(update) == jax.dtypes.float0:
        return param
    return jnp.asarray(param + update, param.dtype)


def _applied(
    pairs: list[tuple[Any, Any]],
    keys: list[Any],
    policy: str,
    nearest: bool,
    salts: list[Any] | None = None,
) -> list[Any]:
    """Return new parameters, given pairs of a parameter and its update."""
    new: list[Any] = [p if is_scaled(p) or u is None else jnp.asarray(p) for p, u in pairs]
    follows = policy == "gradient"  # the sums keep the scales that `scalify` gives them
    floats = [i for i, (param, update) in enumerate(pairs) if _is_float(param, update)]
    updated = [] if follows else floats
    for i, x in zip(updated, read_together([new[i] for i in updated])[0], strict=True):
        new[i] = x
    kind = Kind(keeps_scale=follows, adds=not follows)
    leaves, which = [], []
    for i, (param, (_, update)) in enumerate(zip(new, pairs, strict=True)):
        if update is None:
            continue
        if jnp.shape(update) != param.shape:
            raise ValueError(
                "`updates` must have the shapes of `params`, got "
                f"{jnp.shape(update)} for {param.shape}."
            )
        if i not in floats:
            new[i] = _plain_sum(param, update)
            continue
        step = widen(update)
        x = widen(param) + step if follows else step
        salt = bits = None
        if not nearest and keys[i] is None:
            salt = step if salts is None else salts[i]
        elif not nearest:
            bits = jax.random.bits(keys[i], param.shape, jnp.uint32)
        which.append(i)
        leaves.append(Leaf(x, param, salt, bits))
    for i, x in zip(which, store_leaves(leaves, [kind] * len(leaves)), strict=True):
        new[i] = x
    return new
