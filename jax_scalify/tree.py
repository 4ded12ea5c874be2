"""`jax.tree` with `ScaledArray` as a leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import array as array_lib
from jax_scalify.array import ScaledArray

__all__ = [
    "all",
    "astype",
    "check_same_structure",
    "flatten",
    "leaves",
    "map",
    "shardings",
    "structure",
    "unflatten",
]


def _is_leaf(is_leaf: Callable | None) -> Callable[[Any], bool]:
    return lambda x: array_lib.is_scaled(x) or (is_leaf is not None and is_leaf(x))


def map(f: Callable, tree: Any, *rest: Any, is_leaf: Callable | None = None) -> Any:
    """Map over the leaves of trees, a `ScaledArray` being one leaf.

    Example:
        >>> state = {"w": jsa.as_scaled_array(jnp.ones(2)), "step": 3}
        >>> jsa.tree.map(lambda leaf: type(leaf).__name__, state)
        {'step': 'int', 'w': 'ScaledArray'}
    """
    return jax.tree.map(f, tree, *rest, is_leaf=_is_leaf(is_leaf))


def leaves(tree: Any, is_leaf: Callable | None = None) -> list[Any]:
    """Return the leaves."""
    return jax.tree.leaves(tree, is_leaf=_is_leaf(is_leaf))


def flatten(tree: Any, is_leaf: Callable | None = None) -> tuple[list[Any], Any]:
    """Return the leaves and the structure."""
    return jax.tree.flatten(tree, is_leaf=_is_leaf(is_leaf))


def unflatten(treedef: Any, leaves: Any) -> Any:
    """Build a tree from a structure and leaves."""
    return jax.tree.unflatten(treedef, leaves)


def flatten_like(structure: Any, tree: Any, name: str, like: str) -> list[Any]:
    """Return the parts of a tree at the leaves of a structure; an error names both arguments."""
    try:
        return structure.flatten_up_to(tree)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must have the structure of `{like}`: {error}") from None


def structure(tree: Any, is_leaf: Callable | None = None) -> Any:
    """Return the structure."""
    return jax.tree.structure(tree, is_leaf=_is_leaf(is_leaf))


def all(tree: Any, is_leaf: Callable | None = None) -> bool:
    """Tell whether every leaf is true."""
    return jax.tree.all(tree, is_leaf=_is_leaf(is_leaf))


def astype(tree: Any, dtype: Any) -> Any:
    """Cast the data of scaled leaves and the floating plain leaves; scales stay as they are.

    Example:
        >>> state = {"w": jsa.as_scaled_array(jnp.ones(2), scale=4.0)}
        >>> small = jsa.tree.astype(state, jnp.float16)["w"]
        >>> print(small.dtype, small.scale)
        float16 4.0
    """

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if array_lib.is_scaled(leaf) else array_lib.asarray(leaf, dtype)

    return map(cast, tree)


def shardings(tree: Any, data_shardings: Any) -> Any:
    """Return the shardings of a state whose data is sharded: every scale is replicated.

    Args:
        tree: state with `ScaledArray` leaves.
        data_shardings: a `NamedSharding` for all leaves, or a tree of them, one a leaf.

    Returns:
        What the `in_shardings`, `out_shardings` of `jax.jit` and `jax.device_put` take.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> found = jsa.tree.shardings({"w": jsa.as_scaled_array(jnp.ones(2))}, rows)
        >>> print(found["w"].data.spec, found["w"].scale.spec)
        P('data',) P()
    """
    flat, treedef = flatten(tree)
    if isinstance(data_shardings, jax.sharding.Sharding):
        specs = [data_shardings] * len(flat)
    else:
        specs = treedef.flatten_up_to(data_shardings)

    def replicated(sharding: Any) -> Any:
        if isinstance(sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        return sharding

    out = []
    for leaf, spec in zip(flat, specs, strict=True):
        if not array_lib.is_scaled(leaf):
            out.append(spec)
        else:
            scale = leaf.scale if leaf.is_static else replicated(spec)
            out.append(ScaledArray(spec, scale))
    return jax.tree.unflatten(treedef, out)


def _described(leaf: Any) -> str:
    """Dtype, shape and scale of a leaf: what a compiled function is specialised on."""
    if not array_lib.is_scaled(leaf):
        return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
    scale = f"static {leaf.scale}" if leaf.is_static else f"scale {list(jnp.shape(leaf.scale))}"
    return f"{leaf.dtype}{list(leaf.shape)}, {scale}"


def check_same_structure(new: Any, like: Any) -> Any:
    """Return a tree, if a function that was compiled for another one takes it as it is.

    The state that a training step returns should have the structure, shapes, dtypes and kinds of
    scales of the one that it was given: otherwise the next step compiles again. At the end of a
    jitted step, outside of `scalify`, this check costs nothing when it has been compiled.

    Args:
        new: the tree to be checked.
        like: the tree that it should be like.

    Raises:
        ValueError: listing every leaf that differs, and how.

    Example:
        >>> state = {"w": jsa.as_scaled_array(jnp.ones(2))}
        >>> jsa.tree.check_same_structure({"w": jnp.ones(2)}, state)
        Traceback (most recent call last):
        ValueError: `new` differs from `like`, so that it compiles again:
          ['w']: float32[2], was float32[2], scale []
        `jsa.match_scales(new, like)` brings scales to those of `like`.
    """
    trees = [
        {
            jax.tree_util.keystr(path): _described(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf(None))[0]
        }
        for tree in (new, like)
    ]
    after, before = trees
    lines = [
        f"  {path or 'the leaf'}: {after.get(path, 'missing')}, was {before.get(path, 'missing')}"
        for path in {**before, **after}
        if after.get(path) != before.get(path)
    ]
    if not lines and structure(new) != structure(like):
        lines = [f"  {structure(new)}, was {structure(like)}"]
    if lines:
        raise ValueError(
            "`new` differs from `like`, so that it compiles again:\n" + "\n".join(lines) + "\n"
            "`jsa.match_scales(new, like)` brings scales to those of `like`."
        )
    return new
