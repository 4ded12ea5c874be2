"""How a float32 result becomes a `ScaledArray` of few bits: the choice of a scale, and one cast.

Inside `scalify` these are the rules of functions that only cast; outside, the same code makes the
`ScaledArray`s themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays import scaled_array as array_lib
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes, pow2
from jax_scalify.optim.random_bits import bits_of_moment, drawn
from jax_scalify.optim.square_roots import moved_for_square
from jax_scalify.primitives.custom_scale import custom_scale
from jax_scalify.scales.algebra import Scale

# `j` in `scale = 2**j * s**d`, for a leaf of degree `d` in a gradient of scale `s`. The data of
# gradients has an RMS of 2**-9 to 2**4, and single elements are 2**4 times as large. So a second
# moment in float16 leaves the range at an element of 2**7, and has 8 bits at an RMS of 2**-9.
GRADIENT_EXPONENTS = {1: -6, 2: -2}


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a leaf of the state is stored.

    Attributes:
        wide: whether its elements spread over a wide range, as squares do.
        degree: by which its scale follows that of the gradient; None for by statistic.
        fades: whether it is a first moment.
        is_root: whether it is a square root.
        is_counted: whether the state counts the steps.
    """

    wide: bool
    degree: int | None = None
    fades: bool = False
    is_root: bool = False
    is_counted: bool = False


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


def measured(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the scale of a leaf is chosen by: largest element and mean square, see `reduced`."""
    largest, total = reduced(x, old)
    return jnp.maximum(largest, 0), total * _share(x, old)


def _share(x: jax.Array, old: jax.Array) -> float:
    """One over the number of elements that share a scale."""
    return max(1, old.size) / max(1, x.size)


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


def _by_rms(dtype: Any, wide: bool) -> bool:
    """Whether the RMS chooses: not of leaves of a wide range, and not in FP8."""
    return not (wide or dtypes.is_narrow_float(dtype))


def chosen_scales(
    xs: Sequence[jax.Array], likes: Sequence[ScaledArray], wide: Sequence[bool]
) -> list[jax.Array | None]:
    """The scales by statistic of all leaves that have one dynamic scale, None for the others.

    They are found together, on vectors: devices that share the leaves exchange two of them.
    """
    which = [i for i, y in enumerate(likes) if not _is_fixed(y) and not jnp.ndim(y.scale)]
    if not which:
        return [None] * len(xs)
    olds = {i: jnp.asarray(likes[i].scale, jnp.float32) for i in which}
    groups: dict[Any, list[int]] = {}
    for i in which:
        groups.setdefault(jax.typeof(xs[i]) if xs[i].size <= _SMALL else i, []).append(i)
    found = [_reduced_together([xs[i] for i in g], [olds[i] for i in g]) for g in groups.values()]
    largest, total = (jnp.concatenate(part) for part in zip(*found, strict=True))
    which = [i for group in groups.values() for i in group]
    top = np.array([_top(likes[i].dtype) for i in which])
    by_rms = np.array([_by_rms(likes[i].dtype, wide[i]) for i in which])
    shares = np.array([_share(xs[i], olds[i]) for i in which], np.float32)
    sizes = jnp.maximum(largest, 0), total * shares
    scales = scale_by_statistic(sizes, jnp.stack([olds[i] for i in which]), top, by_rms)
    numbers = {i: number for number, i in enumerate(which)}
    return [scales[numbers[i]] if i in numbers else None for i in range(len(xs))]


def _reduced_together(xs: Sequence[jax.Array], olds: Sequence[jax.Array]) -> list[jax.Array]:
    """Of leaves of one shape, each with one scale: what `reduced` finds, as two vectors."""
    ndim = xs[0].ndim
    if len(xs) == 1:
        found = reduced(xs[0], olds[0])
    else:
        found = reduced(jnp.stack(xs), jnp.stack(olds).reshape((len(xs), *(1,) * ndim)))
    return [x.reshape(len(xs)).astype(jnp.float32) for x in found]


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


def stored(
    x: jax.Array,
    like: ScaledArray,
    *,
    wide: bool = False,
    bits: jax.Array | None = None,
    grad: ScaledArray | None = None,
    degree: int | None = None,
    scale: jax.Array | None = None,
    is_root: bool = False,
) -> ScaledArray:
    """Return `x` as `like` is stored: in its dtype, with its shape of scale.

    Args:
        x: what is to be stored, in float32.
        like: as it was stored so far. A static scale is kept.
        wide: whether the elements spread over a wide range, as squares do.
        bits: random bits, for stochastic rounding; by default, to nearest even.
        grad: the gradient, if the scale follows it by `degree`; else a statistic is taken.
        degree: of `x` in the gradient.
        scale: if the statistic has been taken.
        is_root: whether it is the square of `x` that counts; see `saturate`.
    """
    old = array_lib.align_scale(jnp.asarray(like.scale, jnp.float32), like.ndim)
    if _is_fixed(like):
        scale = old
    elif grad is not None and degree is not None:
        scale = jnp.broadcast_to(scale_of_gradient(grad, old, degree), old.shape)
    elif scale is None:
        top, by_rms = _top(like.dtype), _by_rms(like.dtype, wide)
        scale = scale_by_statistic(measured(x, old), old, top, by_rms)
    inverse = (1 / jnp.where(scale == 0, 1, scale)).astype(x.dtype)
    data = jnp.where((scale == 0) & jnp.isfinite(x), 0, x * inverse)
    data = saturate(data, like.dtype, wide=wide, bits=bits, is_root=is_root)
    if _is_fixed(like):
        return ScaledArray(data, like.scale)
    # A scale is not negative. On GPUs a slice that is a result is a kernel of its own; what is
    # computed of slices, if only this, is one kernel for many.
    return ScaledArray(data, jnp.maximum(scale, 0).reshape(jnp.shape(like.scale)))


@custom_scale(static_argnames=("wide",))
def scales_of(
    xs: list[jax.Array], likes: list[jax.Array], *, wide: tuple[bool, ...]
) -> list[jax.Array]:
    """The bits of the scales that leaves are to be stored at; without `scalify` nothing.

    Bits, since a number in float32 would get a scale of its own.
    """
    return [jnp.zeros((), jnp.int32) for _ in xs]


@scales_of.defscale
def _scales_of_scale(
    xs: list[ScaledArray], likes: list[ScaledArray], *, wide: tuple[bool, ...]
) -> list[jax.Array]:
    likes = list(map(_with_array, likes))
    values = [x.to_array(dtypes.compute_dtype(x.dtype)) for x in xs]
    scales = chosen_scales(values, likes, wide)
    none = jnp.zeros((), jnp.int32)
    return [none if s is None else lax.bitcast_convert_type(s, jnp.int32) for s in scales]


def _from_bits(bits: jax.Array, like: ScaledArray) -> jax.Array | None:
    """A scale of `scales_of`, for a leaf of one scale."""
    return None if jnp.ndim(like.scale) else lax.bitcast_convert_type(bits, jnp.float32)


@custom_scale(static_argnames=("kind",))
def store(
    x: jax.Array,
    like: jax.Array,
    grad: jax.Array,
    scale: jax.Array,
    count: jax.Array,
    *,
    kind: Kind,
) -> jax.Array:
    """Cast `x` to the dtype of `like`; inside `scalify`, choose a scale.

    With a degree the scale follows that of the gradient, else it is one of `scales_of`.
    """
    return saturate(x, like.dtype, wide=kind.wide)


@store.defscale
def _store_scale(
    x: ScaledArray,
    like: ScaledArray,
    grad: ScaledArray,
    scale: jax.Array,
    count: jax.Array,
    *,
    kind: Kind,
) -> ScaledArray:
    like, grad = _with_array(like), _with_array(grad)
    values = x.to_array()
    counted = count if kind.is_counted else None
    bits = bits_of_moment(values, grad.data, counted, like.dtype, fades=kind.fades)
    return stored(
        values,
        like,
        wide=kind.wide,
        bits=bits,
        grad=grad,
        degree=kind.degree,
        scale=_from_bits(scale, like),
        is_root=kind.is_root,
    )


@custom_scale
def store_weight(
    x: jax.Array,
    like: jax.Array,
    bits: jax.Array | None,
    salt: jax.Array | None,
    scale: jax.Array | None,
) -> jax.Array:
    """Cast `x` to the dtype of `like`; inside `scalify`, at a scale of `scales_of` or its own.

    With a salt the bits to round with are made of it and `x`; with neither, to nearest even.
    """
    return saturate(x, like.dtype, bits=drawn(x, bits, salt))


@store_weight.defscale
def _store_weight_scale(
    x: ScaledArray, like: ScaledArray, bits: Any, salt: Any, scale: jax.Array | None
) -> ScaledArray:
    values = x.to_array()
    bits = drawn(values, bits, salt.to_array() if array_lib.is_scaled(salt) else salt)
    if scale is not None:
        like = _with_array(like)
        return stored(values, like, bits=bits, scale=_from_bits(scale, like))
    return ScaledArray(saturate(x.data, like.dtype, bits=bits), x.scale)


def _with_array(x: ScaledArray) -> ScaledArray:
    """The scale of a rule's operand as a number, if it is known while tracing, or an array."""
    scale = x.scale
    if isinstance(scale, Scale):
        scale = scale.value if scale.is_static else jnp.asarray(scale)
    return ScaledArray(x.data, scale)
