"""Store the leaves of a state: as `ScaledArray` arrays, or inside `scalify` as arrays with scales.

Inside `scalify`, the scale rule of a `custom_scale` function stores them. The function itself only
casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.base.pins import elements
from jax_scalify.interpreter.operand import Operand
from jax_scalify.ops.custom_scale import custom_scale
from jax_scalify.optim.arena import Arena
from jax_scalify.optim.leaves import (
    Kind,
    Leaf,
    added,
    has_one_scale,
    is_fixed,
    joined_scales,
    likes_of,
    own_scale,
    split,
    stored,
)
from jax_scalify.optim.random_bits import bits_to_round
from jax_scalify.optim.scale_choice import saturate
from jax_scalify.scales.algebra import Scale


def store_leaves(
    leaves: Sequence[Leaf], kinds: Sequence[Kind], count: jax.Array | None = None
) -> list[Any]:
    """Store leaves in few bits, each like its `Leaf.like`.

    A leaf like a `ScaledArray` becomes a `ScaledArray`. Others become arrays of the dtype of
    `like`, which inside `scalify` have scales if `like` has a scale.

    Args:
        leaves: the leaves to store.
        kinds: the kind of each leaf.
        count: the step count from `random_bits.count_of`, for the random bits.
    """
    new: list[Any] = [None] * len(leaves)
    for select, function in ((True, stored), (False, _stored_inside)):
        which = [i for i, leaf in enumerate(leaves) if is_scaled(likes_of(leaf)[0]) is select]
        if which:
            found = function([leaves[i] for i in which], [kinds[i] for i in which], count)
            for i, x in zip(which, found, strict=True):
                new[i] = x
    return new


def _stored_inside(
    leaves: Sequence[Leaf], kinds: Sequence[Kind], count: jax.Array | None
) -> list[Any]:
    return _store(list(leaves), count, kinds=tuple(kinds))


def _stored_types(leaves: list[Leaf], count: Any, *, kinds: tuple[Kind, ...]) -> list[Any]:
    return [leaf.like for leaf in leaves]


@custom_scale(static_argnames=("kinds",), keeps_plain=True, result_types=_stored_types)
def _store(leaves: list[Leaf], count: Any, *, kinds: tuple[Kind, ...]) -> list[Any]:
    """Cast leaves to the dtypes of their `like`. Inside `scalify`, the rule chooses scales."""
    return [_cast(leaf, kind, count) for leaf, kind in zip(leaves, kinds, strict=True)]


def _cast(leaf: Leaf, kind: Kind, count: jax.Array | None) -> Any:
    """Return a leaf without a scale, in the dtype of its `like`; for a stack, a list of leaves."""
    x, like, salt, bits = leaf
    is_stack = isinstance(like, list)
    arena = Arena.of([one.shape for one in like]) if is_stack else None
    if kind.adds:
        x = added(x, arena.pack(like) if arena else like)
    dtype = likes_of(leaf)[0].dtype
    bits = bits_to_round(x, salt, bits, count, dtype, fades=kind.fades)
    out = saturate(x, dtype, wide=kind.wide, bits=bits, is_root=kind.is_root)
    return arena.unpack(out) if arena else out


@_store.defscale
def _store_scale(leaves: list[Leaf], count: Any, *, kinds: tuple[Kind, ...]) -> list[Any]:
    new: list[Any] = [None] * len(leaves)
    scaled: list[tuple[int, int | None, Leaf]] = []
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if not any(map(is_scaled, jax.tree.leaves(leaf, is_leaf=is_scaled))):
            new[i] = _cast(leaf, kind, count)
        elif kind.keeps_scale:
            new[i] = _at_own_scale(leaf, count)
        elif isinstance(leaf.like, list) and not _is_of_one_kind(leaf.like, kind):
            new[i] = [None] * len(leaf.like)
            scaled += [(i, part, one) for part, one in enumerate(split(leaf))]
        else:
            scaled.append((i, None, leaf))
    which = [_with_values(leaf, kinds[i]) for i, _, leaf in scaled]
    found = stored(which, [kinds[i] for i, _, _ in scaled], count)
    for (i, part, leaf), x in zip(scaled, found, strict=True):
        if part is not None:
            new[i][part] = _replacing(leaf.like, x) if is_scaled(leaf.like) else x.data
        elif isinstance(leaf.like, list):
            new[i] = list(map(_replacing, leaf.like, x))
        else:
            new[i] = _replacing(leaf.like, x)
    return new


def _replacing(like: Any, x: ScaledArray) -> ScaledArray:
    """Return a stored leaf. At a static scale, it leaves `scalify` as `like` came in."""
    home = like.home if isinstance(like, Operand) else None
    return Operand(x.data, Scale.of(x.scale), home=home) if x.is_static else x


def _is_of_one_kind(likes: list[Any], kind: Kind) -> bool:
    """Return whether all leaves of a stack have scales of one kind."""
    if not all(map(is_scaled, likes)):
        return False
    likes = list(map(with_array, likes))
    return all(has_one_scale(x, kind) for x in likes) and len(set(map(is_fixed, likes))) == 1


def _at_own_scale(leaf: Leaf, count: jax.Array | None) -> ScaledArray:
    x = leaf.x if is_scaled(leaf.x) else ScaledArray(leaf.x, 1.0)
    dtype = leaf.like.dtype
    bits = bits_to_round(_value(x), _value(leaf.salt), leaf.bits, count, dtype)
    return ScaledArray(saturate(x.data, dtype, bits=bits), x.scale)


def _with_values(leaf: Leaf, kind: Kind) -> Leaf:
    """Return a leaf of values. The scales of `like` are floats if static, arrays if dynamic."""
    salt = with_array(leaf.salt) if kind.degree is not None else _value(leaf.salt)
    is_stack = isinstance(leaf.like, list)
    like = list(map(with_array, leaf.like)) if is_stack else with_array(leaf.like)
    return Leaf(_value(leaf.x), like, salt, leaf.bits)


def _value(x: Any) -> Any:
    return x.to_array(dtypes.compute_dtype(x.dtype)) if is_scaled(x) else x


def with_array(x: Any) -> ScaledArray:
    """Return a rule's operand with its `Scale` as a float if static, as an array if dynamic."""
    if not is_scaled(x):
        return ScaledArray(x, 1.0)
    scale = x.scale
    if isinstance(scale, Scale):
        scale = scale.value if scale.is_static else jnp.asarray(scale)
    return ScaledArray(x.data, scale)


def load_arena(leaves: Sequence[Any]) -> jax.Array:
    """Return the arena of the values of leaves of one dtype, in at least float32."""
    if any(map(is_scaled, leaves)):
        return _loaded(list(leaves))
    return _load(list(leaves))


@custom_scale(keeps_plain=True)
def _load(leaves: list[Any]) -> jax.Array:
    data = Arena.of([x.shape for x in leaves]).pack(leaves)
    return data.astype(dtypes.compute_dtype(data.dtype))


@_load.defscale
def _loaded(leaves: list[Any]) -> jax.Array:
    arena = Arena.of([x.shape for x in leaves])
    if all(map(is_scaled, leaves)):
        leaves = list(map(with_array, leaves))
        if not any(jnp.ndim(x.scale) for x in leaves):
            data = _load.__wrapped__([x.data for x in leaves])
            return data * arena.spread(joined_scales(leaves)).astype(data.dtype)
    return arena.pack(list(map(_value, leaves)))


def read_together(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return leaves whose dynamic scalar scales are read at once, as slices of one array.

    A new scale takes the buffer of a donated old scale. If the old scale is read after that, XLA
    copies it first, and each copy is a kernel on a GPU.

    Returns:
        The leaves, and the leaves to compute with: see `own_scale`.
    """
    if any(map(is_scaled, leaves)):
        return _with_one_array_of_scales(list(leaves))
    return _read(list(leaves))


@custom_scale(keeps_plain=True)
def _read(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    return leaves, leaves


@_read.defscale
def _with_one_array_of_scales(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    leaves, values = list(leaves), list(leaves)
    which = [
        i
        for i, x in enumerate(leaves)
        if is_scaled(x) and not x.is_static and not jnp.ndim(x.scale)
    ]
    if len(which) > 1:
        scales = jnp.stack([jnp.asarray(leaves[i].scale, jnp.float32) for i in which])
        scales = lax.optimization_barrier(scales)
        for i, scale in zip(which, elements(scales), strict=True):
            leaves[i] = ScaledArray(leaves[i].data, scale)
            values[i] = own_scale(leaves[i])
    return leaves, values
