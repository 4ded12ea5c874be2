"""Leaves of a state in few bits, with the scales of all leaves chosen together.

Small leaves lie in arenas, so that XLA makes one kernel for an arena instead of one for each leaf.
A few operations on vectors choose the scales of all leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays import scaled_array as array_lib
from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.base.pins import elements, slices
from jax_scalify.optim.arena import SMALL, Arena, rank, row_of
from jax_scalify.optim.copies import Copies, stored_number
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


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a leaf is stored.

    Attributes:
        wide: whether its elements spread over a wide range, as squares do.
        degree: the scale is a constant times the gradient's scale to this power, and the salt is
            the gradient. None if the scale is chosen by statistic.
        fades: whether it is a first moment. Without a step count, it is rounded towards 0 where its
            gradient is 0.
        is_root: whether it is a square root. Rounding then keeps the mean of its square.
        adds: whether `x` is added to the old leaf, in float32.
        keeps_scale: whether it keeps the scale that the rules of `scalify` give it.
    """

    wide: bool = False
    degree: int | None = None
    fades: bool = False
    is_root: bool = False
    adds: bool = False
    keeps_scale: bool = False


class Leaf(NamedTuple):
    """A leaf to store, and the stored leaf that it replaces; or an arena of leaves.

    Attributes:
        x: float32 array.
        like: the stored leaf, which gives the result its dtype and the shape of its scale. For an
            arena, a list of stored leaves.
        salt: array of the shape of `x`. Random bits are made from both.
        bits: random bits. With neither salt nor bits, rounding is to nearest even.
    """

    x: Any
    like: Any
    salt: Any = None
    bits: Any = None


def likes_of(leaf: Leaf) -> list[Any]:
    """Return the `like` of each leaf of an arena, or of the single leaf."""
    return leaf.like if isinstance(leaf.like, list) else [leaf.like]


def split(leaf: Leaf) -> list[Leaf]:
    """Return the leaves of an arena as single leaves."""
    arena = Arena.of([like.shape for like in leaf.like])
    none = [None] * len(leaf.like)
    parts = [none if x is None else arena.unpack(x) for x in (leaf.x, leaf.salt, leaf.bits)]
    return [Leaf(x, *rest) for x, *rest in zip(parts[0], leaf.like, *parts[1:], strict=True)]


def joined_scales(likes: Sequence[ScaledArray]) -> Any:
    """Return scalar scales as a vector, of NumPy if all of them are static."""
    scales = [like.scale for like in likes]
    if all(like.is_static for like in likes):
        return np.asarray(scales, np.float32)
    return jnp.stack([jnp.asarray(scale, jnp.float32) for scale in scales])


def added(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """Return the sum of an update and a leaf, in their promoted dtype, at least float32."""
    dtype = jnp.promote_types(x.dtype, dtypes.compute_dtype(leaf.dtype))
    return x.astype(dtype) + leaf.astype(dtype)


def store_leaf(x: jax.Array, like: ScaledArray) -> ScaledArray:
    """Return `x` as `like` is stored, rounded to nearest even."""
    return stored([Leaf(x, like)], [Kind()], None)[0]


def own_scale(x: ScaledArray) -> ScaledArray:
    """Return a large leaf with its scale in memory of its own: see `stored_number`."""
    if x.is_static or jnp.ndim(x.scale) or x.size <= SMALL:
        return x
    return ScaledArray(x.data, stored_number(x.scale))


def is_fixed(like: ScaledArray) -> bool:
    """Return whether a leaf keeps its scale: static and nonzero (0 means "no scale yet")."""
    return bool(like.is_static and like.scale)


def stored(leaves: Sequence[Leaf], kinds: Sequence[Kind], count: jax.Array | None) -> list[Any]:
    """Store each leaf at its static scale, or at a newly chosen scale."""
    groups = [_Group.of(leaves, kinds, which) for which in _alike(leaves, kinds)]
    by_statistic = [g for g in groups if g.is_scalar and not g.is_fixed and g.kind.degree is None]
    scales = dict(zip(map(id, by_statistic), _chosen_scales(by_statistic), strict=True))
    new: list[Any] = [None] * len(leaves)
    copies = Copies()
    for group in groups:
        own_count = count if count is None or group.arena else copies.of(count)
        found = group.stored(scales.get(id(group)), own_count)
        if isinstance(leaves[group.which[0]].like, list):
            found = [found]
        for i, x in zip(group.which, found, strict=True):
            new[i] = x
    return new


def _alike(leaves: Sequence[Leaf], kinds: Sequence[Kind]) -> list[list[int]]:
    """Group the positions of leaves: each group is one arena, or a single leaf."""
    groups: dict[Any, list[int]] = {}
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        parts = [part for part in (leaf.salt, leaf.bits) if part is not None]
        is_arena = isinstance(leaf.like, list)
        if (
            is_arena
            or not has_one_scale(leaf.like, kind)
            or leaf.x.size > SMALL
            or any(jnp.shape(part) != leaf.x.shape for part in parts)
        ):
            groups[i] = [i]
            continue
        types = [None if part is None else part.dtype for part in (leaf.salt, leaf.bits)]
        alike = (row_of(leaf.x.shape), leaf.x.dtype, leaf.like.dtype, kind, is_fixed(leaf.like))
        groups.setdefault((*alike, *types), []).append(i)
    for which in groups.values():
        which.sort(key=lambda i: rank(jnp.shape(leaves[i].x)))
    return list(groups.values())


def has_one_scale(like: ScaledArray, kind: Kind) -> bool:
    """Return whether a leaf has a scalar scale that does not follow a gradient."""
    return not jnp.ndim(like.scale) and kind.degree is None


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Leaves of one dtype and kind in one array: one leaf, or an arena of several.

    Attributes:
        which: the positions of the leaves.
        leaf: all leaves as one `Leaf`, with the first leaf's `like`.
        likes: the `like` of each leaf.
        kind: the kind of all leaves.
        old: the old scales: one per leaf, or of a single leaf in a shape that broadcasts to it.
        arena: where the leaves lie; None for a single leaf.
    """

    which: list[int]
    leaf: Leaf
    likes: list[ScaledArray]
    kind: Kind
    old: Any
    arena: Arena | None = None

    @classmethod
    def of(cls, leaves: Sequence[Leaf], kinds: Sequence[Kind], which: list[int]) -> _Group:
        """Pack leaves. A barrier keeps XLA from packing them again for each reader."""
        first, kind = leaves[which[0]], kinds[which[0]]
        likes = [like for i in which for like in likes_of(leaves[i])]
        if len(likes) == 1 and not isinstance(first.like, list):
            old = array_lib.align_scale(jnp.asarray(likes[0].scale, jnp.float32), first.x.ndim)
            wide = dtypes.compute_dtype(likes[0].dtype)
            x = added(first.x, own_scale(likes[0]).to_array(wide)) if kind.adds else first.x
            return cls(which, first._replace(x=x), likes, kind, old)
        arena = Arena.of([like.shape for like in likes])
        if len(which) == 1:
            x, _, salt, bits = first
        else:
            parts = [[leaves[i][n] for i in which] for n in (0, 2, 3)]
            x, salt, bits = (None if part[0] is None else arena.pack(part) for part in parts)
            assert x is not None
        old = joined_scales(likes)
        if kind.adds:
            data = arena.pack([like.data for like in likes])
            data, rows = data.astype(dtypes.compute_dtype(data.dtype)), arena.spread(old)
            x = added(x, jnp.where(rows == 0, 0, data * rows))
        x, salt = lax.optimization_barrier((x, salt))
        return cls(which, Leaf(x, likes[0], salt, bits), likes, kind, jnp.asarray(old), arena)

    def spread(self, scale: Any) -> jax.Array:
        """Return scales in a shape that broadcasts to the array."""
        return self.arena.spread(scale) if self.arena else scale

    def reduced(self, unit: Any) -> tuple[jax.Array, jax.Array]:
        """Return for each scale the largest size and the sum of squares of its elements."""
        largest, total = reduced(self.leaf.x, self.spread(unit))
        if self.arena is None:
            return largest, total
        rows = largest.reshape(-1), total.reshape(-1)
        return (
            self.arena.reduced(rows[0], lambda x: lax.reduce_max(x, (1,)), -np.inf),
            self.arena.reduced(rows[1], lambda x: lax.reduce_sum(x, (1,)), 0),
        )

    @property
    def is_scalar(self) -> bool:
        """Whether each leaf has a scalar scale."""
        return not jnp.ndim(self.likes[0].scale)

    @property
    def is_fixed(self) -> bool:
        """Whether the leaves keep their scales."""
        return is_fixed(self.likes[0])

    @property
    def by_rms(self) -> bool:
        """Whether the scale is chosen by RMS. Wide leaves and FP8 use the maximum."""
        return not (self.kind.wide or dtypes.is_fp8(self.leaf.like.dtype))

    def stored(
        self, found: tuple[jax.Array, jax.Array] | None, count: jax.Array | None
    ) -> list[ScaledArray]:
        """Return each leaf at the given scales, or at its own scale.

        Args:
            found: the scales, and their inverses; at the scale 0, the inverse 0 makes the data 0.
            count: the step count for random bits.
        """
        if found is None:
            scale = self._own_scale()
            found = scale, inverse(scale, 0.0)
        scale, unit = (part.reshape(self.old.shape) for part in found)
        (x, like, salt, bits), kind = self.leaf, self.kind
        data = x * self.spread(unit).astype(x.dtype)
        salt = salt.data if is_scaled(salt) else salt
        bits = bits_to_round(x, salt, bits, count, like.dtype, fades=kind.fades)
        data = saturate(data, like.dtype, wide=kind.wide, bits=bits, is_root=kind.is_root)
        if self.arena is None:
            parts = [(data, scale)]
        else:
            # XLA:GPU makes a kernel for each slice that is a result, but fuses casts of slices.
            data = lax.optimization_barrier(data.astype(x.dtype))
            rows = [leaf.astype(like.dtype) for leaf in self.arena.unpack(data)]
            parts = list(zip(rows, elements(scale), strict=True))
        return list(map(self._leaf, parts, self.likes))

    def _own_scale(self) -> jax.Array:
        if self.is_fixed:
            return self.old
        if self.kind.degree is not None:
            scale = scale_of_gradient(self.leaf.salt, self.old, self.kind.degree)
            return jnp.broadcast_to(scale, self.old.shape)
        largest, total = self.reduced(inverse(self.old))
        sizes = jnp.maximum(largest, 0), total * self.shares
        return scale_by_statistic(sizes, self.old, top_exponent(self.leaf.like.dtype), self.by_rms)

    @property
    def shares(self) -> Any:
        """`1 / n`, where `n` is the number of elements that share a scale; for each leaf."""
        if self.arena is None:
            return max(1, self.old.size) / max(1, self.leaf.x.size)
        sizes = [max(1, math.prod(shape)) for shape in self.arena.shapes]
        return 1 / np.array(sizes, np.float32)

    def _leaf(self, part: tuple[jax.Array, jax.Array], like: ScaledArray) -> ScaledArray:
        data, scale = part
        if is_fixed(like):
            return ScaledArray(data, like.scale)
        scale = stored_number(scale) if self.arena else scale
        return ScaledArray(data, scale.reshape(jnp.shape(like.scale)))


def _chosen_scales(groups: Sequence[_Group]) -> list[tuple[jax.Array, jax.Array]]:
    """Choose scalar scales by statistic. Return for each group its scales and their inverses.

    The scales are computed from two vectors, of maxima and of sums. Devices that share the leaves
    exchange only these.
    """
    if not groups:
        return []
    olds = jnp.concatenate([g.old.reshape(-1) for g in groups])
    units = _by_group(groups, inverse(olds))
    largest, total = (
        jnp.concatenate([x.astype(jnp.float32) for x in part])
        for part in zip(*_reduced_together(groups, units), strict=True)
    )
    counts = [len(g.likes) for g in groups]
    top = np.repeat([top_exponent(g.leaf.like.dtype) for g in groups], counts)
    by_rms = np.repeat([g.by_rms for g in groups], counts)
    shares = np.concatenate([np.ravel(g.shares) for g in groups]).astype(np.float32)
    sizes = jnp.maximum(largest, 0), total * shares
    scales = scale_by_statistic(sizes, olds, top, by_rms)
    inverses = _by_group(groups, inverse(scales, 0.0))
    return list(zip(_by_group(groups, scales), inverses, strict=True))


def _by_group(groups: Sequence[_Group], vector: jax.Array) -> list[jax.Array]:
    """Split a vector of non-negative numbers, one for each leaf, into the part of each group."""
    counts = [len(g.likes) for g in groups]
    if len(vector) > 1:  # otherwise each leaf's kernel computes all of them again
        vector = lax.optimization_barrier(vector)
    parts = slices(vector, tuple(np.cumsum(counts) - counts), tuple(counts))
    return [part if g.arena else stored_number(part) for g, part in zip(groups, parts, strict=True)]


def _reduced_together(
    groups: Sequence[_Group], units: Sequence[jax.Array]
) -> list[tuple[jax.Array, jax.Array]]:
    """Return two vectors for each group: the largest elements and the sums of squares by leaf."""
    found: list[Any] = [None] * len(groups)
    by_rows: dict[int, dict[int, tuple[jax.Array, jax.Array]]] = {}
    for i, (g, unit) in enumerate(zip(groups, units, strict=True)):
        x = g.leaf.x
        if len(g.likes) == 1 and x.ndim > 1 and x.size > SMALL:
            rows = reduced_by_rows(x, unit)
            by_rows.setdefault(rows[0].size, {})[i] = rows
        else:
            parts = g.reduced(unit.reshape(g.old.shape))
            found[i] = tuple(part.reshape(-1) for part in parts)
    for members in by_rows.values():
        largest, total = map(jnp.stack, zip(*members.values(), strict=True))
        largest, total = jnp.max(largest, 1), jnp.sum(total, 1)
        for n, i in enumerate(members):
            found[i] = largest[n : n + 1], total[n : n + 1]
    return found
