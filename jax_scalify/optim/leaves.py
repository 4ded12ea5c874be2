"""Leaves of a state in few bits: the scales of all of them are chosen together.

Small leaves of one shape are stacked: a compiler makes one kernel of the stack and not one of each
leaf, and the rest is a few operations on vectors of scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays import scaled_array as array_lib
from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.optim.random_bits import bits_to_round
from jax_scalify.optim.scale_choice import (
    inverse,
    reduced,
    reduced_by_rows,
    saturate,
    scale_by_statistic,
    scale_of_gradient,
    top_exponent,
)

# Leaves that have no more elements are stacked.
SMALL = 2**16


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a leaf is stored.

    Attributes:
        wide: whether its elements spread over a wide range, as squares do.
        degree: by which its scale follows that of the gradient, its salt; None for by statistic.
        fades: whether it is a first moment, rounded towards 0 where its gradient is 0.
        is_root: whether it is a square root, and it is the square that is right on average.
        adds: whether it is what is added to the leaf, in float32.
        keeps_scale: whether it has the scale of its own law inside `scalify`, without a statistic.
    """

    wide: bool = False
    degree: int | None = None
    fades: bool = False
    is_root: bool = False
    adds: bool = False
    keeps_scale: bool = False


class Leaf(NamedTuple):
    """What is to be stored, and how it was stored so far; or several leaves of one shape.

    Attributes:
        x: array of float32, or a stack of leaves.
        like: of its shape: the result has its dtype, and its shape of scale. Of a stack a list.
        salt: an array of its shape: random bits to round with are made of it and `x`.
        bits: the random bits themselves; with neither, rounding is to nearest even.
    """

    x: Any
    like: Any
    salt: Any = None
    bits: Any = None


def likes_of(leaf: Leaf) -> list[Any]:
    """How each leaf was stored so far."""
    return leaf.like if isinstance(leaf.like, list) else [leaf.like]


def split(leaf: Leaf) -> list[Leaf]:
    """The leaves of a stack, one by one."""
    return [
        Leaf(*(part[i] if part is not None else None for part in leaf))
        for i in range(len(likes_of(leaf)))
    ]


def added(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """The sum of an update and a leaf, in the wider of their dtypes, float32 at least."""
    dtype = jnp.promote_types(x.dtype, dtypes.compute_dtype(leaf.dtype))
    return x.astype(dtype) + leaf.astype(dtype)


def store_leaf(x: jax.Array, like: ScaledArray) -> ScaledArray:
    """Return `x` as `like` is stored, rounded to nearest even."""
    return stored([Leaf(x, like)], [Kind()], None)[0]


def is_fixed(like: ScaledArray) -> bool:
    """Tell whether a leaf keeps its scale: it is static, and not 0, which is none."""
    return bool(like.is_static and like.scale)


def stored(leaves: Sequence[Leaf], kinds: Sequence[Kind], count: jax.Array | None) -> list[Any]:
    """Every leaf at its scale: a static one that it has, or one that is chosen."""
    groups = [_Group.of(leaves, kinds, which) for which in _alike(leaves, kinds)]
    by_statistic = [g for g in groups if g.is_scalar and not g.is_fixed and g.kind.degree is None]
    scales = dict(zip(map(id, by_statistic), _chosen_scales(by_statistic), strict=True))
    new: list[Any] = [None] * len(leaves)
    for group in groups:
        found = group.stored(scales.get(id(group)), count)
        if isinstance(leaves[group.which[0]].like, list):
            found = [found]
        for i, x in zip(group.which, found, strict=True):
            new[i] = x
    return new


def _alike(leaves: Sequence[Leaf], kinds: Sequence[Kind]) -> list[list[int]]:
    """The positions of the leaves that are stored in one stack."""
    groups: dict[Any, list[int]] = {}
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        is_stack = isinstance(leaf.like, list)
        if is_stack or not has_one_scale(leaf.like, kind) or leaf.x.size > SMALL:
            groups[i] = [i]
            continue
        types = [None if part is None else jax.typeof(part) for part in (leaf.salt, leaf.bits)]
        alike = (jax.typeof(leaf.x), leaf.like.dtype, kind, is_fixed(leaf.like), *types)
        groups.setdefault(alike, []).append(i)
    return list(groups.values())


def has_one_scale(like: ScaledArray, kind: Kind) -> bool:
    """Whether a leaf has one scale, which no gradient gives."""
    return not jnp.ndim(like.scale) and kind.degree is None


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Leaves of one shape, dtype and kind, in one array: one leaf, or a stack.

    Attributes:
        which: their numbers.
        leaf: of all of them; its `like` has no data.
        likes: as each was stored so far.
        kind: of each.
        old: the scales that they were stored at, which lie along the array.
    """

    which: list[int]
    leaf: Leaf
    likes: list[ScaledArray]
    kind: Kind
    old: jax.Array

    @classmethod
    def of(cls, leaves: Sequence[Leaf], kinds: Sequence[Kind], which: list[int]) -> _Group:
        """Stack some leaves; an array that several operations read is made once."""
        first, kind = leaves[which[0]], kinds[which[0]]
        likes = [like for i in which for like in likes_of(leaves[i])]
        is_stack = len(likes) > 1 or isinstance(first.like, list)
        if not is_stack:
            old = array_lib.align_scale(jnp.asarray(likes[0].scale, jnp.float32), first.x.ndim)
            wide = dtypes.compute_dtype(likes[0].dtype)
            x = added(first.x, likes[0].to_array(wide)) if kind.adds else first.x
            return cls(which, first._replace(x=x), likes, kind, old)
        x, _, salt, bits = first if len(which) == 1 else _joined([leaves[i] for i in which])
        scales = [like.scale for like in likes]
        is_static = all(like.is_static for like in likes)
        old = np.asarray(scales, np.float32) if is_static else jnp.stack(scales)
        old = jnp.asarray(old, jnp.float32).reshape(len(likes), *(1,) * (x.ndim - 1))
        if kind.adds:
            data = jnp.stack([like.data for like in likes])
            data = data.astype(dtypes.compute_dtype(data.dtype))
            x = added(x, jnp.where(old == 0, 0, data * old))
        x, salt = lax.optimization_barrier((x, salt))
        return cls(which, Leaf(x, likes[0], salt, bits), likes, kind, old)

    @property
    def is_scalar(self) -> bool:
        """Whether each leaf has one scale."""
        return not jnp.ndim(self.likes[0].scale)

    @property
    def is_fixed(self) -> bool:
        """Whether the leaves keep their scales."""
        return is_fixed(self.likes[0])

    @property
    def by_rms(self) -> bool:
        """Whether the RMS chooses: not of leaves of a wide range, and not in FP8."""
        return not (self.kind.wide or dtypes.is_narrow_float(self.leaf.like.dtype))

    def stored(self, scale: jax.Array | None, count: jax.Array | None) -> list[ScaledArray]:
        """Each leaf, at scales that have been chosen together, or at its own."""
        scale = self._own_scale() if scale is None else scale.reshape(self.old.shape)
        (x, like, salt, bits), kind = self.leaf, self.kind
        data = x * inverse(scale, 0.0).astype(x.dtype)  # what has a scale 0 is 0
        salt = salt.data if is_scaled(salt) else salt
        bits = bits_to_round(x, salt, bits, count, like.dtype, fades=kind.fades)
        data = saturate(data, like.dtype, wide=kind.wide, bits=bits, is_root=kind.is_root)
        if data.ndim == like.ndim:
            parts = [(data, scale)]
        else:
            # On GPUs a slice that is a result is a kernel of its own; casts of slices are one.
            data = lax.optimization_barrier(data.astype(x.dtype))
            parts = [(data[i].astype(like.dtype), scale[i]) for i in range(len(self.likes))]
        return list(map(self._leaf, parts, self.likes))

    def _own_scale(self) -> jax.Array:
        if self.is_fixed:
            return self.old
        if self.kind.degree is not None:
            scale = scale_of_gradient(self.leaf.salt, self.old, self.kind.degree)
            return jnp.broadcast_to(scale, self.old.shape)
        largest, total = reduced(self.leaf.x, self.old, inverse(self.old))
        sizes = jnp.maximum(largest, 0), total * self.share
        return scale_by_statistic(sizes, self.old, top_exponent(self.leaf.like.dtype), self.by_rms)

    @property
    def share(self) -> float:
        """One over the number of elements that share a scale."""
        return max(1, self.old.size) / max(1, self.leaf.x.size)

    def _leaf(self, part: tuple[jax.Array, jax.Array], like: ScaledArray) -> ScaledArray:
        data, scale = part
        if is_fixed(like):
            return ScaledArray(data, like.scale)
        # A scale is not negative. On GPUs a slice that is a result is a kernel of its own; what is
        # computed of slices, if only this, is one kernel for many.
        return ScaledArray(data, jnp.maximum(scale, 0).reshape(jnp.shape(like.scale)))


def _joined(leaves: Sequence[Leaf]) -> Leaf:
    """The stack of some leaves."""
    xs, likes, salts, bits = zip(*leaves, strict=True)
    salt, drawn = (None if part[0] is None else jnp.stack(part) for part in (salts, bits))
    return Leaf(jnp.stack(xs), list(likes), salt, drawn)


def _chosen_scales(groups: Sequence[_Group]) -> list[jax.Array]:
    """The scales by statistic of leaves that have one each, a vector for each group.

    They are found together, on vectors: devices that share the leaves exchange two of them.
    """
    if not groups:
        return []
    counts = [len(g.likes) for g in groups]
    ends = np.cumsum(counts)
    olds = jnp.concatenate([g.old.reshape(-1) for g in groups])
    units = inverse(olds)
    if len(olds) > 1:  # or a GPU has a kernel for each
        units = lax.optimization_barrier(units)
    units = [units[end - count : end] for count, end in zip(counts, ends, strict=True)]
    largest, total = (
        jnp.concatenate([x.astype(jnp.float32) for x in part])
        for part in zip(*_reduced_together(groups, units), strict=True)
    )
    top = np.repeat([top_exponent(g.leaf.like.dtype) for g in groups], counts)
    by_rms = np.repeat([g.by_rms for g in groups], counts)
    shares = np.repeat(np.array([g.share for g in groups], np.float32), counts)
    sizes = jnp.maximum(largest, 0), total * shares
    scales = scale_by_statistic(sizes, olds, top, by_rms)
    if len(top) > 1:  # or each leaf's kernel computes all of them again
        scales = lax.optimization_barrier(scales)
    return [scales[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _reduced_together(
    groups: Sequence[_Group], units: Sequence[jax.Array]
) -> list[tuple[jax.Array, jax.Array]]:
    """Vectors of the largest elements and of the sums of squares, of the leaves of each group."""
    found: list[Any] = [None] * len(groups)
    by_rows: dict[int, dict[int, tuple[jax.Array, jax.Array]]] = {}
    for i, (g, unit) in enumerate(zip(groups, units, strict=True)):
        x = g.leaf.x
        if len(g.likes) == 1 and x.ndim > 1 and x.size > SMALL:
            rows = reduced_by_rows(x, g.old, unit)
            by_rows.setdefault(rows[0].size, {})[i] = rows
        else:
            parts = reduced(x, g.old, unit.reshape(g.old.shape))
            found[i] = tuple(part.reshape(-1) for part in parts)
    for members in by_rows.values():
        largest, total = map(jnp.stack, zip(*members.values(), strict=True))
        largest, total = jnp.max(largest, 1), jnp.sum(total, 1)
        for n, i in enumerate(members):
            found[i] = largest[n : n + 1], total[n : n + 1]
    return found
