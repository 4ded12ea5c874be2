"""How float32 results become `ScaledArray`s of few bits: the choice of scales, and one cast.

All leaves of a tree are stored together. Small ones of one shape are stacked for it: a compiler
makes one kernel of the stack and not one of each leaf, and the rest of it is a few operations on
vectors of scales. Inside `scalify` this is the rule of a function that only casts; outside, the
same code makes the `ScaledArray`s itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays import scaled_array as array_lib
from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes, pow2
from jax_scalify.optim.random_bits import bits_to_round
from jax_scalify.optim.square_roots import moved_for_square
from jax_scalify.primitives.custom_scale import custom_scale
from jax_scalify.scales.algebra import Scale

# `j` in `scale = 2**j * s**d`, for a leaf of degree `d` in a gradient of scale `s`. The data of
# gradients has an RMS of 2**-9 to 2**4, and single elements are 2**4 times as large. So a second
# moment in float16 leaves the range at an element of 2**7, and has 8 bits at an RMS of 2**-9.
GRADIENT_EXPONENTS = {1: -6, 2: -2}


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a leaf is stored.

    Attributes:
        wide: whether its elements spread over a wide range, as squares do.
        degree: by which its scale follows that of the gradient, its salt; None for by statistic.
        fades: whether it is a first moment, rounded towards 0 where its gradient is 0.
        is_root: whether it is a square root, and it is the square that is right on average.
        keeps_scale: whether it has the scale of its own law inside `scalify`, without a statistic.
    """

    wide: bool = False
    degree: int | None = None
    fades: bool = False
    is_root: bool = False
    keeps_scale: bool = False


class Leaf(NamedTuple):
    """What is to be stored, and how it was stored so far.

    Attributes:
        x: array of float32.
        like: of its shape: the result has its dtype, and its shape of scale.
        salt: an array of its shape: random bits to round with are made of it and `x`.
        bits: the random bits themselves; with neither, rounding is to nearest even.
    """

    x: Any
    like: Any
    salt: Any = None
    bits: Any = None


_SMALLEST = math.ldexp(1.0, -pow2.MAX_EXPONENT)
# Squares that float32 flushes to 0 are less than 2**-26 of a mean square above this one.
_SMALLEST_MEAN_SQUARE = 2.0**-100
_SMALL = 2**16  # elements: of leaves of one shape that are no larger, statistics are taken at once


def saturate(
    x: jax.Array,
    dtype: Any,
    *,
    wide: bool = False,
    bits: jax.Array | None = None,
    is_root: bool = False,
) -> jax.Array:
    """Cast once: what is finite stays finite; in a `wide` leaf, what is not 0 does not become 0.

    A second moment is divided by: if it were rounded to 0, the step would be huge. With random
    `bits` (`uint32`, one an element) the rounding is stochastic, else to nearest even. Of a root it
    is the square that is right on average.
    """
    limit = np.array(jnp.finfo(dtype).max, x.dtype)
    x = jnp.where(jnp.isfinite(x), lax.clamp(-limit, x, limit), x)
    if wide and dtypes.has_short_range(dtype):
        smallest = np.array(jnp.finfo(dtype).smallest_subnormal, x.dtype)
        x = jnp.where((x != 0) & (jnp.abs(x) < smallest), jnp.copysign(smallest, x), x)
    if is_root and bits is not None:
        x = moved_for_square(x, dtype)
    return dtypes.cast(x, dtype) if bits is None else dtypes.round_stochastically(x, bits, dtype)


def reduced(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest element and the sum of squares over the old scale's, in one reading of `x`.

    Both are of the shape of the `old` scale, and infinite if an element is not finite. But of a
    leaf whose old scale is 0 the largest is that of the finite ones, since infinity at scale 0
    would be nan. Of no elements it is -inf.
    """
    axes = tuple(a for a in range(x.ndim) if not old.ndim or old.shape[a] == 1)
    finite, size = jnp.isfinite(x), jnp.abs(x)
    infinity = np.array(np.inf, x.dtype)
    beyond = jnp.where(old == 0, 0, infinity)
    unit = size * (1 / jnp.where(old == 0, 1, old)).astype(x.dtype)
    sizes, squares = jnp.where(finite, size, beyond), jnp.where(finite, unit * unit, infinity)
    largest, total = _largest_and_sum(sizes, squares, axes)
    return largest.reshape(old.shape), total.reshape(old.shape)


@functools.partial(jax.jit, static_argnames="axes", inline=True)
def _largest_and_sum(
    sizes: jax.Array, squares: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The maximum of the sizes and the sum of the squares.

    As one reduction, devices that share the array exchange both at once, and a GPU ends it with one
    kernel. XLA:CPU adds up in a row then: in float32 a sum of 2**24 squares is 2**24 at most.
    """

    def apart(sizes: jax.Array, squares: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.reduce_max(sizes, axes), lax.reduce_sum(squares, axes)

    def together(sizes: jax.Array, squares: jax.Array) -> tuple[jax.Array, jax.Array]:
        none = sizes.dtype.type(-np.inf), squares.dtype.type(0)
        return lax.reduce((sizes, squares), none, _larger_and_sum, axes)

    return lax.platform_dependent(sizes, squares, cpu=apart, default=together)


def _larger_and_sum(x: tuple, y: tuple) -> tuple[jax.Array, jax.Array]:
    return jnp.maximum(x[0], y[0]), x[1] + y[1]


def scale_by_statistic(
    sizes: tuple[jax.Array, jax.Array], old: jax.Array, top: Any, by_rms: Any
) -> jax.Array:
    """Choose scales for `data = x / scale` by what was `measured`, elementwise.

    By RMS that of the data is in [1, 2), or if an element would leave the range then, the maximum
    is near `2**top`, the top of the range. That is so, too, where values are 2**-50 or 2**64 times
    the old scale, whose squares leave the range of float32, and without `by_rms`. A zero has
    scale 0; what is not finite keeps the `old` scale.
    """
    largest, mean_square = sizes
    power = pow2.round_down(largest, old.dtype)
    scale = power * np.ldexp(np.float32(1), -np.asarray(top))
    in_range = (mean_square > _SMALLEST_MEAN_SQUARE) & jnp.isfinite(mean_square) & by_rms
    rms = pow2.round_down(jnp.sqrt(mean_square), old.dtype) * jnp.where(old == 0, 1, old)
    scale = jnp.maximum(scale, jnp.where(in_range, rms, 0))
    zero = jnp.isinf(mean_square).astype(old.dtype)  # then all others are 0
    scale = jnp.where(power == 0, zero, jnp.maximum(scale, _SMALLEST))
    return jnp.where(jnp.isfinite(largest), scale, old)


def _top(dtype: Any) -> int:
    """The exponent that the maximum of data gets, where it is the maximum that chooses."""
    return min(pow2.floor_exponent(jnp.finfo(dtype).max) - 1, 14)


def _is_fixed(like: ScaledArray) -> bool:
    """Tell whether a leaf keeps its scale: it is static, and not 0, which is none."""
    return bool(like.is_static and like.scale)


def scale_of_gradient(grad: ScaledArray, old: jax.Array, degree: int) -> jax.Array:
    """`2**j * s**degree` for a gradient of scale `s`; the `old` scale if it is 0 or not finite.

    A step that is refused for an infinite gradient then leaves every bit as it was. An `old` scale
    0 is none to keep.
    """
    scale = array_lib.align_scale(grad.scale, grad.ndim)
    if scale.ndim:  # one scale for what shares one in `old`
        fits = old.ndim == scale.ndim
        axes = tuple(a for a in range(scale.ndim) if not fits or old.shape[a] == 1)
        scale = jnp.max(scale, axes, keepdims=fits)
    exponent = GRADIENT_EXPONENTS[degree]
    limit = math.ldexp(1.0, (pow2.MAX_EXPONENT - abs(exponent)) // degree)
    followed = jnp.clip(scale, 1 / limit, limit) ** degree * math.ldexp(1.0, exponent)
    keeps = ~jnp.all(jnp.isfinite(grad.data)) & (old != 0)
    old = jnp.where(old == 0, 1, old)
    return jnp.where((scale == 0) | keeps, old, followed.astype(old.dtype))


def store_leaves(
    leaves: Sequence[Leaf], kinds: Sequence[Kind], count: jax.Array | None = None
) -> list[Any]:
    """Leaves in few bits: those like a `ScaledArray` as one, others as arrays of their dtype.

    Inside `scalify` the others are arrays that have scales, if what they are like has.

    Args:
        leaves: to be stored.
        kinds: one for each.
        count: that of `random_bits.count_of`, for the random bits.
    """
    new: list[Any] = [None] * len(leaves)
    for select, function in ((True, _stored), (False, _stored_inside)):
        which = [i for i, leaf in enumerate(leaves) if is_scaled(leaf.like) is select]
        if which:
            found = function([leaves[i] for i in which], [kinds[i] for i in which], count)
            for i, x in zip(which, found, strict=True):
                new[i] = x
    return new


def store_leaf(x: jax.Array, like: ScaledArray) -> ScaledArray:
    """Return `x` as `like` is stored, rounded to nearest even."""
    return _stored([Leaf(x, like)], [Kind()], None)[0]


def _stored(
    leaves: Sequence[Leaf], kinds: Sequence[Kind], count: jax.Array | None
) -> list[ScaledArray]:
    """Every leaf at its scale: a static one that it has, or one that is chosen."""
    groups = [_Group.of(leaves, kinds, which) for which in _alike(leaves, kinds)]
    by_statistic = [g for g in groups if g.is_scalar and not g.is_fixed and g.kind.degree is None]
    scales = dict(zip(map(id, by_statistic), _chosen_scales(by_statistic), strict=True))
    new: list[Any] = [None] * len(leaves)
    for group in groups:
        found = group.stored(scales.get(id(group)), count)
        for i, x in zip(group.which, found, strict=True):
            new[i] = x
    return new


def _alike(leaves: Sequence[Leaf], kinds: Sequence[Kind]) -> list[list[int]]:
    """The positions of the leaves that are stored in one stack."""
    groups: dict[Any, list[int]] = {}
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if jnp.ndim(leaf.like.scale) or kind.degree is not None or leaf.x.size > _SMALL:
            groups[i] = [i]
            continue
        types = [None if part is None else jax.typeof(part) for part in (leaf.salt, leaf.bits)]
        alike = (jax.typeof(leaf.x), leaf.like.dtype, kind, _is_fixed(leaf.like), *types)
        groups.setdefault(alike, []).append(i)
    return list(groups.values())


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
        first, likes = leaves[which[0]], [leaves[i].like for i in which]
        if len(which) == 1:
            old = array_lib.align_scale(jnp.asarray(likes[0].scale, jnp.float32), first.x.ndim)
            return cls(which, first, likes, kinds[which[0]], old)
        x, salt, bits = (
            None if part is None else jnp.stack([leaves[i][place] for i in which])
            for place, part in enumerate(first)
            if place != 1
        )
        x, salt = lax.optimization_barrier((x, salt))
        scales = [like.scale for like in likes]
        is_static = all(like.is_static for like in likes)
        old = np.asarray(scales, np.float32) if is_static else jnp.stack(scales)
        old = jnp.asarray(old, jnp.float32).reshape(len(which), *(1,) * first.x.ndim)
        return cls(which, Leaf(x, likes[0], salt, bits), likes, kinds[which[0]], old)

    @property
    def is_scalar(self) -> bool:
        """Whether each leaf has one scale."""
        return not jnp.ndim(self.likes[0].scale)

    @property
    def is_fixed(self) -> bool:
        """Whether the leaves keep their scales."""
        return _is_fixed(self.likes[0])

    @property
    def by_rms(self) -> bool:
        """Whether the RMS chooses: not of leaves of a wide range, and not in FP8."""
        return not (self.kind.wide or dtypes.is_narrow_float(self.leaf.like.dtype))

    def stored(self, scale: jax.Array | None, count: jax.Array | None) -> list[ScaledArray]:
        """Each leaf, at scales that have been chosen together, or at its own."""
        scale = self._own_scale() if scale is None else scale.reshape(self.old.shape)
        (x, like, salt, bits), kind = self.leaf, self.kind
        inverse = (1 / jnp.where(scale == 0, 1, scale)).astype(x.dtype)
        data = jnp.where((scale == 0) & jnp.isfinite(x), 0, x * inverse)
        salt = salt.data if is_scaled(salt) else salt
        bits = bits_to_round(x, salt, bits, count, like.dtype, fades=kind.fades)
        data = saturate(data, like.dtype, wide=kind.wide, bits=bits, is_root=kind.is_root)
        if len(self.which) == 1:
            parts = [(data, scale)]
        else:
            data = lax.optimization_barrier(data)
            parts = [(data[i], scale[i]) for i in range(len(self.which))]
        return list(map(self._leaf, parts, self.likes))

    def _own_scale(self) -> jax.Array:
        if self.is_fixed:
            return self.old
        if self.kind.degree is not None:
            scale = scale_of_gradient(self.leaf.salt, self.old, self.kind.degree)
            return jnp.broadcast_to(scale, self.old.shape)
        largest, total = reduced(self.leaf.x, self.old)
        sizes = jnp.maximum(largest, 0), total * self.share
        return scale_by_statistic(sizes, self.old, _top(self.leaf.like.dtype), self.by_rms)

    @property
    def share(self) -> float:
        """One over the number of elements that share a scale."""
        return max(1, self.old.size) / max(1, self.leaf.x.size)

    def _leaf(self, part: tuple[jax.Array, jax.Array], like: ScaledArray) -> ScaledArray:
        data, scale = part
        if _is_fixed(like):
            return ScaledArray(data, like.scale)
        # A scale is not negative. On GPUs a slice that is a result is a kernel of its own; what is
        # computed of slices, if only this, is one kernel for many.
        return ScaledArray(data, jnp.maximum(scale, 0).reshape(jnp.shape(like.scale)))


def _chosen_scales(groups: Sequence[_Group]) -> list[jax.Array]:
    """The scales by statistic of leaves that have one each, a vector for each group.

    They are found together, on vectors: devices that share the leaves exchange two of them.
    """
    if not groups:
        return []
    counts = [len(g.which) for g in groups]
    found = [reduced(g.leaf.x, g.old) for g in groups]
    largest, total = (
        jnp.concatenate([x.reshape(-1).astype(jnp.float32) for x in part])
        for part in zip(*found, strict=True)
    )
    top = np.repeat([_top(g.leaf.like.dtype) for g in groups], counts)
    by_rms = np.repeat([g.by_rms for g in groups], counts)
    shares = np.repeat(np.array([g.share for g in groups], np.float32), counts)
    olds = jnp.concatenate([g.old.reshape(-1) for g in groups])
    sizes = jnp.maximum(largest, 0), total * shares
    scales = scale_by_statistic(sizes, olds, top, by_rms)
    if len(top) > 1:  # or each leaf's kernel computes all of them again
        scales = lax.optimization_barrier(scales)
    ends = np.cumsum(counts)
    return [scales[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _stored_inside(
    leaves: Sequence[Leaf], kinds: Sequence[Kind], count: jax.Array | None
) -> list[jax.Array]:
    xs, likes, salts, bits = map(list, zip(*leaves, strict=True))
    return _store(xs, likes, salts, bits, count, kinds=tuple(kinds))


@custom_scale(static_argnames=("kinds",), keeps_plain=True)
def _store(
    xs: list[Any],
    likes: list[Any],
    salts: list[Any],
    bits: list[Any],
    count: Any,
    *,
    kinds: tuple[Kind, ...],
) -> list[jax.Array]:
    """Cast to the dtypes of others; inside `scalify` what has a scale gets a new one."""
    leaves = map(Leaf, xs, likes, salts, bits)
    return [_cast(leaf, kind, count) for leaf, kind in zip(leaves, kinds, strict=True)]


def _cast(leaf: Leaf, kind: Kind, count: jax.Array | None) -> jax.Array:
    """A leaf without a scale, in the dtype of another one."""
    x, like, salt, bits = leaf
    bits = bits_to_round(x, salt, bits, count, like.dtype, fades=kind.fades)
    return saturate(x, like.dtype, wide=kind.wide, bits=bits, is_root=kind.is_root)


@_store.defscale
def _store_scale(
    xs: list[Any],
    likes: list[Any],
    salts: list[Any],
    bits: list[Any],
    count: Any,
    *,
    kinds: tuple[Kind, ...],
) -> list[Any]:
    leaves = list(map(Leaf, xs, likes, salts, bits))
    new: list[Any] = [None] * len(leaves)
    scaled = []
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if not any(map(is_scaled, leaf)):
            new[i] = _cast(leaf, kind, count)
        elif kind.keeps_scale:
            new[i] = _at_own_scale(leaf, count)
        else:
            scaled.append(i)
    which = [_with_values(leaves[i], kinds[i]) for i in scaled]
    for i, x in zip(scaled, _stored(which, [kinds[i] for i in scaled], count), strict=True):
        new[i] = x
    return new


def _at_own_scale(leaf: Leaf, count: jax.Array | None) -> ScaledArray:
    x = leaf.x if is_scaled(leaf.x) else ScaledArray(leaf.x, 1.0)
    dtype = leaf.like.dtype
    bits = bits_to_round(_value(x), _value(leaf.salt), leaf.bits, count, dtype)
    return ScaledArray(saturate(x.data, dtype, bits=bits), x.scale)


def _with_values(leaf: Leaf, kind: Kind) -> Leaf:
    """A leaf of values, whose scales are numbers if they are static, or arrays."""
    salt = _with_array(leaf.salt) if kind.degree is not None else _value(leaf.salt)
    return Leaf(_value(leaf.x), _with_array(leaf.like), salt, leaf.bits)


def _value(x: Any) -> Any:
    return x.to_array(dtypes.compute_dtype(x.dtype)) if is_scaled(x) else x


def _with_array(x: Any) -> ScaledArray:
    """The scale of a rule's operand as a number, if it is known while tracing, or an array."""
    if not is_scaled(x):
        return ScaledArray(x, 1.0)
    scale = x.scale
    if isinstance(scale, Scale):
        scale = scale.value if scale.is_static else jnp.asarray(scale)
    return ScaledArray(x.data, scale)
