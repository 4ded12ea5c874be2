"""`jax.tree` with `ScaledArray` and `BlockScaledArray` as leaves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.arrays import scaled_array as array_lib
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.blocks.array import is_array_of_ours, is_block_scaled
from jax_scalify.conversions import trees
from jax_scalify.storage.placement import check_blocks_fit, check_shardings

__all__ = [
    "all",
    "astype",
    "check_same_structure",
    "check_shardings",
    "flatten",
    "leaves",
    "map",
    "shardings",
    "size",
    "structure",
    "unflatten",
]


def _is_leaf(is_leaf: Callable | None) -> Callable[[Any], bool]:
    return lambda x: is_array_of_ours(x) or (is_leaf is not None and is_leaf(x))


def map(f: Callable, tree: Any, *rest: Any, is_leaf: Callable | None = None) -> Any:
    """Map over the leaves of trees. A `ScaledArray` is one leaf.

    Example:
        >>> state = {"w": jsa.as_scaled_array(jnp.ones(2)), "step": 3}
        >>> jsa.tree.map(lambda leaf: type(leaf).__name__, state)
        {'step': 'int', 'w': 'ScaledArray'}
    """
    return jax.tree.map(f, tree, *rest, is_leaf=_is_leaf(is_leaf))


def leaves(tree: Any, is_leaf: Callable | None = None) -> list[Any]:
    """Return the leaves of a tree."""
    return jax.tree.leaves(tree, is_leaf=_is_leaf(is_leaf))


def flatten(tree: Any, is_leaf: Callable | None = None) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a tree."""
    return jax.tree.flatten(tree, is_leaf=_is_leaf(is_leaf))


def unflatten(treedef: Any, leaves: Any) -> Any:
    """Build a tree from a structure and leaves."""
    return jax.tree.unflatten(treedef, leaves)


def flatten_like(structure: Any, tree: Any, name: str, like: str) -> list[Any]:
    """Return the subtrees of a tree at the leaves of a structure.

    Raises:
        ValueError: if the tree does not have the structure. The message names both arguments.
    """
    try:
        return structure.flatten_up_to(tree)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must have the structure of `{like}`: {error}") from None


def structure(tree: Any, is_leaf: Callable | None = None) -> Any:
    """Return the structure of a tree."""
    return jax.tree.structure(tree, is_leaf=_is_leaf(is_leaf))


def all(tree: Any, is_leaf: Callable | None = None) -> bool:
    """Return whether every leaf is true."""
    return jax.tree.all(tree, is_leaf=_is_leaf(is_leaf))


def astype(tree: Any, dtype: Any) -> Any:
    """Cast the data of scaled leaves, and floating plain leaves. Scales are unchanged.

    Complex leaves keep their dtype unless `dtype` is complex.

    Example:
        >>> state = {"w": jsa.as_scaled_array(jnp.ones(2), scale=4.0)}
        >>> small = jsa.tree.astype(state, jnp.float16)["w"]
        >>> print(small.dtype, small.scale)
        float16 4.0
    """

    def cast(leaf: Any) -> Any:
        if is_block_scaled(leaf):  # stored elements are unchanged
            return dataclasses.replace(leaf, dtype=jnp.dtype(dtype))
        if array_lib.is_scaled(leaf):
            return leaf.astype(dtypes.of_leaf(leaf.dtype, dtype))
        return trees.asarray(leaf, dtype)

    return map(cast, tree)


def size(tree: Any) -> int:
    """Return the number of elements of a tree's arrays, such as the parameters of a model.

    Scales do not count. Arrays may be abstract, as from `jax.eval_shape`.

    Example:
        >>> params = jsa.as_scaled_array({"w": jnp.ones((3, 4)), "b": jnp.ones(4)})
        >>> jsa.tree.size(params)
        16
    """
    return sum(math.prod(jnp.shape(leaf)) for leaf in leaves(tree) if hasattr(leaf, "shape"))


def shardings(tree: Any, data_shardings: Any) -> Any:
    """Return the shardings of a state whose data is sharded. Scales are replicated.

    Block scales are sharded as their elements are, so that each device has whole blocks.

    Args:
        tree: state with `ScaledArray` leaves, or its shapes from `jax.eval_shape`.
        data_shardings: a `NamedSharding` or `PartitionSpec` for all leaves, or a tree of these, one
            for each leaf or subtree. The tree of the plain state's shardings fits.

    Returns:
        Shardings for `in_shardings` and `out_shardings` of `jax.jit`, and for `jax.device_put`.

    Raises:
        ValueError: if a device would have a part of a block of a `BlockScaledArray`.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> found = jsa.tree.shardings({"w": jsa.as_scaled_array(jnp.ones(2))}, rows)
        >>> print(found["w"].data.spec, found["w"].scale.spec)
        P('data',) P()

        A state that is made under `jit`. JAX would refuse the shardings of the plain state, because
        a scale has no axes to shard:

        >>> import optax
        >>> params = {"w": jnp.ones(2)}
        >>> plain, opt = optax.sgd(0.1, 0.9), jsa.optim.low_precision(optax.sgd(0.1, 0.9))
        >>> layout = jax.tree.map(lambda _: rows, jax.eval_shape(plain.init, params))
        >>> layout = jsa.tree.shardings(jax.eval_shape(opt.init, params), layout)
        >>> state = jax.jit(opt.init, out_shardings=layout)(params)
    """

    def replicated(sharding: Any) -> Any:
        if isinstance(sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        is_spec = isinstance(sharding, jax.sharding.PartitionSpec)
        return jax.sharding.PartitionSpec() if is_spec else sharding

    def of_leaf(leaf: Any, sharding: Any) -> Any:
        if not is_array_of_ours(leaf):
            return sharding
        scale = leaf.scale if leaf.is_static else replicated(sharding)
        if not is_block_scaled(leaf):
            return ScaledArray(sharding, scale)
        check_blocks_fit(leaf, sharding)
        return dataclasses.replace(leaf, data=sharding, block_scales=sharding, scale=scale)

    def of_part(sharding: Any, part: Any) -> Any:
        return map(lambda leaf: of_leaf(leaf, sharding), part)

    return jax.tree.map(of_part, data_shardings, tree, is_leaf=lambda x: x is None)


def check_same_structure(new: Any, like: Any) -> Any:
    """Return `new`, if a function compiled for `like` takes it without compiling again.

    A training step should return its state with the structure, shapes, dtypes and kinds of scales
    that it got. Otherwise the next step compiles again. In a jitted step, outside of `scalify`, the
    check runs while tracing, and costs nothing afterwards.

    Args:
        new: the tree to check.
        like: the tree that it is compared with.

    Raises:
        ValueError: if the trees differ. The message lists each leaf that differs, or the first node
            whose type, keys or static fields differ, and a remedy.

    Example:
        >>> state = {"w": jsa.freeze_scales(jsa.as_scaled_array(jnp.ones(2)))}
        >>> jsa.tree.check_same_structure({"w": jsa.as_scaled_array(jnp.ones(2))}, state)
        Traceback (most recent call last):
        ValueError: `new` differs from `like`, so that it compiles again:
          ['w']: float32[2], scale [], was float32[2], static 1.0
        `jsa.match_scales(new, like)` brings scales to those of `like`.
    """
    after, before = (_leaves_by_path(tree) for tree in (new, like))
    lines, advice = [], []
    for path in {**before, **after}:
        one, other = after.get(path, _MISSING), before.get(path, _MISSING)
        found, was = _described(one), _described(other)
        if found != was:
            lines.append(f"  {path or 'the leaf'}: {found}, was {was}")
            advice.append(_leaf_advice(one, other))
    if not lines and structure(new) != structure(like):
        line, what = _differing_node(new, like)
        lines, advice = [f"  {line}"], [what]
    if lines:
        message = ["`new` differs from `like`, so that it compiles again:", *lines]
        raise ValueError("\n".join([*message, *dict.fromkeys(advice)]))
    return new


_MISSING = object()


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=array_lib.is_scaled)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def _described(leaf: Any) -> str:
    """Describe dtype, shape and scale of a leaf, on which a compiled function is specialised."""
    if leaf is _MISSING:
        return "missing"
    if not array_lib.is_scaled(leaf):
        return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
    scale = f"static {leaf.scale}" if leaf.is_static else f"scale {list(jnp.shape(leaf.scale))}"
    return f"{leaf.dtype}{list(leaf.shape)}, {scale}"


def _leaf_advice(new: Any, like: Any) -> str:
    if new is _MISSING or like is _MISSING:
        return "Return every leaf that was given, where it was, and no other."
    if jnp.shape(new) != jnp.shape(like):
        return "Return each leaf in the shape that it was given in."
    if jnp.result_type(new) != jnp.result_type(like):
        return "Return each leaf in the dtype that it was given in: `jsa.tree.astype` casts."
    if array_lib.is_scaled(new) and array_lib.is_scaled(like):
        return "`jsa.match_scales(new, like)` brings scales to those of `like`."
    if array_lib.is_scaled(like):
        return (
            "To have scales: `jsa.match_scales(new, like)` inside of `scalify`, or "
            "`jsa.as_scaled_array` outside."
        )
    return "To have none: `jsa.match_scales(new, like)` inside of `scalify`, or `jsa.asarray`."


def _differing_node(new: Any, like: Any, path: str = "") -> tuple[str, str]:
    """Describe the first difference between trees of different structures, and a remedy."""
    containers = "Return the containers that were given."
    place, kinds = path or "the tree", [type(tree).__name__ for tree in (new, like)]
    if type(new) is not type(like):
        return f"{place}: {kinds[0]}, was {kinds[1]}", containers
    after, before = _children(new), _children(like)
    if list(after) != list(before):
        found, was = (
            ", ".join(jax.tree_util.keystr(key) for key in keys) or "nothing"
            for keys in (after, before)
        )
        return f"{place}: {kinds[0]} with {found}, was {was}", containers
    for key, child in after.items():
        if structure(child) != structure(before[key]):
            return _differing_node(child, before[key], path + jax.tree_util.keystr(key))
    return _static_difference(new, like, path), (
        "Static fields are compared by `==`: make such an object (an optimizer, a function) once, "
        "and give the same one to every state."
    )


def _children(tree: Any) -> dict[Any, Any]:
    """Return the children of a node by key."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is not tree)
    return dict(flat)


def _static_difference(new: Any, like: Any, path: str) -> str:
    """Describe the static field that differs between nodes with children of equal structure."""
    place, pair = path or "the tree", (new, like)
    if not dataclasses.is_dataclass(new):
        pair = _static_data(new), _static_data(like)
    elif (field := _differing_field(new, like)) is not None:
        name, *pair = field
        place = f"{path}.{name}"
    found, was = (_shortened(repr(value)) for value in pair)
    if found == was:
        return f"{place}: another static {type(pair[0]).__name__} than it was"
    return f"{place}: static {found}, was {was}"


def _static_data(node: Any) -> Any:
    return jax.tree.structure(node, is_leaf=lambda child: child is not node).node_data()[1]


def _differing_field(new: Any, like: Any) -> tuple[str, Any, Any] | None:
    """Return the first static field that differs, with both values; None if all are equal."""
    children = {jax.tree_util.keystr(key, simple=True) for key in _children(new)}
    for name in (field.name for field in dataclasses.fields(new)):
        found, was = (getattr(tree, name, None) for tree in (new, like))
        if name not in children and found is not was and found != was:
            return name, found, was
    return None


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."
