"""An optimizer's update, evaluated on arenas of small leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base import dtypes
from jax_scalify.optim import stacking
from jax_scalify.optim.applying import widen
from jax_scalify.optim.arena import SMALL, rank, row_of
from jax_scalify.optim.leaves import Kind, Leaf
from jax_scalify.optim.square_roots import is_leaf, is_root
from jax_scalify.optim.stacking import Item
from jax_scalify.optim.storing import load_arena


def updated(
    update: Callable[..., Any],
    grads: Any,
    state: Any,
    params: Any,
    owners: Sequence[int | None],
    *,
    plain: bool,
) -> tuple[list[Any], Any, Any, Any]:
    """Call an optimizer's `update` on the float32 values of stored leaves.

    Args:
        update: `update(grads, state, params) -> (updates, state)`.
        grads: gradients, in few bits.
        state: state, in few bits. Some leaves may be square roots.
        params: parameters in few bits, or None.
        owners: for each leaf of the state, the number of its parameter, or None.
        plain: whether values are computed without scales, also inside `scalify`.

    Returns:
        The leaves of gradients, updates, the new state, and the jaxpr of the update (None if it was
        not traced). A leaf is an array or an `Item`.
    """
    leaves, tree = jax.tree.flatten((grads, state, params), is_leaf=is_leaf)
    count, size = len(jax.tree.leaves(grads, is_leaf=is_leaf)), len(owners)
    of_param = [*range(count), *owners, *range(len(leaves) - count - size)]
    tags = [0] * count + [1] * size + [2] * (len(leaves) - count - size)
    arenas = _arenas(leaves, of_param, tags) if plain else None
    found = None if arenas is None else _on_stacks(update, leaves, tree, arenas)
    if found is not None:
        items, results, jaxpr = found
        return items[:count], *results, jaxpr
    wide = [_wide(leaf, plain) for leaf in leaves]
    return wide[:count], *update(*tree.unflatten(wide)), None


def _on_stacks(
    update: Callable[..., Any],
    leaves: Sequence[Any],
    tree: Any,
    arenas: Sequence[dict[int, int]],
) -> tuple[list[Item], Any, Any] | None:
    """Evaluate the update on stacks. Return items, results and jaxpr, or None if it has effects."""
    items: list[Any] = [None] * len(leaves)
    params = {param: jnp.shape(_array(leaves[param])) for which in arenas for param in which}
    in_order = sorted(params, key=lambda param: (*rank(params[param]), param))
    shapes = [params[param] for param in in_order]
    for which in arenas:
        places = [place for place, param in enumerate(in_order) if param in which]
        members = [which[in_order[place]] for place in places]
        roots = [leaves[i].root if is_root(leaves[i]) else leaves[i] for i in members]
        array = load_arena(roots)
        array = jnp.square(array) if is_root(leaves[members[0]]) else array
        found = stacking.given_stack(array, shapes, places)
        for i, item in zip(members, found, strict=True):
            items[i] = item
    for i, leaf in enumerate(leaves):
        if items[i] is None:
            items[i] = stacking.given(jnp.asarray(_wide(leaf, True)))
    types = [item.aval if item.known is None else item.known for item in items]
    closed, out = stacking.trace(update, types, tree)
    if closed.effects:
        return None
    return items, jax.tree.unflatten(out, stacking.call(closed, items)), closed.jaxpr


def _wide(leaf: Any, plain: bool) -> Any:
    """Return the float32 value of a stored leaf."""
    if is_root(leaf):
        return jnp.square(widen(leaf.root, plain=plain))
    return widen(leaf, plain=plain)


def _arenas(
    leaves: Sequence[Any], of_param: Sequence[int | None], tags: Sequence[int]
) -> list[dict[int, int]] | None:
    """Return the positions of small leaves that share an arena, by the number of their parameter.

    An arena holds gradients, or parameters, or one slot of the state such as first moments. Return
    None if a leaf is not an array.
    """
    if any(dtypes.leaf_dtype(_array(leaf)) is None for leaf in leaves):
        return None
    groups: dict[Any, dict[int, int]] = {}
    for i, (leaf, param, tag) in enumerate(zip(leaves, of_param, tags, strict=True)):
        array = _array(leaf)
        if param is None or not _may_be_stacked(array):
            continue
        like, shape = _array(leaves[param]), jnp.shape(array)
        if jnp.shape(like) != shape:
            continue
        kinds = dtypes.leaf_dtype(array), dtypes.leaf_dtype(like)
        key = (tag, row_of(shape), *kinds, is_root(leaf), is_scaled(leaf))
        slot = 0
        while param in groups.get((*key, slot), {}):
            slot += 1
        groups.setdefault((*key, slot), {})[param] = i
    return [group for group in groups.values() if len(group) > 1]


def _array(leaf: Any) -> Any:
    leaf = leaf.root if is_root(leaf) else leaf
    return leaf.data if is_scaled(leaf) else leaf


def _may_be_stacked(array: Any) -> bool:
    kind = dtypes.leaf_dtype(array)
    if not jnp.ndim(array) or jnp.size(array) > SMALL or not jnp.issubdtype(kind, jnp.floating):
        return False
    if not isinstance(array, jax.Array):
        return False
    kind = jax.typeof(array)
    return _compat.explicit_sharding(kind) is None and not _compat.varying_axes(kind)


def array_of(x: Any) -> Any:
    """Return the array of an item; return anything else unchanged."""
    return x.array if isinstance(x, Item) else x


def stacked_leaves(leaves: Sequence[Leaf], kinds: Sequence[Kind]) -> list[tuple[list[int], Leaf]]:
    """Merge leaves whose new values are one stack into one `Leaf`, with the leaves' positions."""
    groups: dict[Any, dict[int, int]] = {}
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        x, salt, stack = leaf.x, leaf.salt, None
        if isinstance(x, Item) and isinstance(salt, Item) and x.stack and salt.stack:
            stack = x.stack if x.known is None or x.stack.array is not None else None
        if stack is None:
            groups[i] = {0: i}
            continue
        key, slot = (id(stack), id(salt.stack), kind, leaf.like.dtype), 0
        while x.place in groups.get((*key, slot), {}):  # two leaves may have the same value
            slot += 1
        groups.setdefault((*key, slot), {})[x.place] = i
    merged = []
    for group in groups.values():
        which = [group[place] for place in sorted(group)]
        first = leaves[which[0]]
        if len(which) > 1 and first.x.stack.places == first.salt.stack.places == sorted(group):
            likes = [leaves[i].like for i in which]
            merged.append((which, Leaf(first.x.stack.array, likes, first.salt.stack.array)))
            continue
        for i in which:
            leaf = leaves[i]
            merged.append(([i], Leaf(array_of(leaf.x), leaf.like, array_of(leaf.salt))))
    return merged
