"""How a float32 result becomes a `ScaledArray` of few bits: the choice of a scale, and one cast.

Inside `scalify` these are the rules of functions that only cast; outside, the same code makes the
`ScaledArray`s themselves.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays import scaled_array as array_lib
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.statistics import statistic
from jax_scalify.interpreter.multiplying import at_whole_scale
from jax_scalify.interpreter.operand import Operand
from jax_scalify.primitives.custom_scale import custom_scale
from jax_scalify.scales.algebra import Scale

# `j` in `scale = 2**j * s**d`, for a leaf of degree `d` in a gradient of scale `s`. The data of
# gradients has an RMS of 2**-9 to 2**4, and single elements are 2**4 times as large. So a second
# moment in float16 leaves the range at an element of 2**7, and has 8 bits at an RMS of 2**-9.
GRADIENT_EXPONENTS = {1: -6, 2: -2}

_SMALLEST, _LARGEST = math.ldexp(1.0, -pow2.MAX_EXPONENT), math.ldexp(1.0, pow2.MAX_EXPONENT)


def saturate(
    x: jax.Array, dtype: Any, *, wide: bool = False, bits: jax.Array | None = None
) -> jax.Array:
    """Cast once: what is finite stays finite; in a `wide` leaf, what is not 0 does not become 0.

    A second moment is divided by: if it were rounded to 0, the step would be huge. With random
    `bits` (`uint32`, one an element) the rounding is stochastic, else to nearest even.
    """
    limit = np.array(jnp.finfo(dtype).max, x.dtype)
    x = jnp.where(jnp.isfinite(x), lax.clamp(-limit, x, limit), x)
    if wide and dtypes.has_short_range(dtype):
        smallest = np.array(jnp.finfo(dtype).smallest_subnormal, x.dtype)
        x = jnp.where((x != 0) & (jnp.abs(x) < smallest), jnp.copysign(smallest, x), x)
    return dtypes.cast(x, dtype) if bits is None else dtypes.round_stochastically(x, bits, dtype)


def bits_of(x: jax.Array, salt: jax.Array) -> jax.Array:
    """Make random bits of the numbers that are rounded, and of others that change at each step.

    Rounded to nearest, the small steps of a moving average are lost or too large (0.999 x in
    float16, 0.9 x in E4M3). These bits need no key in the state, and a step repeats exactly.

    Source: the last steps of MurmurHash3 by Austin Appleby.
    """
    first, second = (lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32) for a in (x, salt))
    bits = first * np.uint32(0x9E3779B1) + second
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))


def scale_by_statistic(x: jax.Array, old: jax.Array, dtype: Any, *, wide: bool) -> jax.Array:
    """Choose a scale for `data = x / scale` in `dtype`, by looking at `x`.

    The data's RMS is in [1, 2), or if an element would leave the range then, its maximum near the
    top; so it is, too, in FP8 and in a `wide` leaf. A zero has scale 0; what is not
    finite keeps the `old` scale, whose shape the result has. If that is 0, the finite elements
    choose: infinity at scale 0 would be nan.
    """
    axes = tuple(a for a in range(x.ndim) if old.shape[a] == 1) if old.ndim else None
    finite = jnp.isfinite(x)
    zero = jnp.where(jnp.all(finite, axes, keepdims=bool(old.ndim)), 0, np.array(1, old.dtype))
    x = jnp.where(finite | (old != 0), x, 0)
    largest = statistic(x, "max", axes)
    top = min(pow2.floor_exponent(jnp.finfo(dtype).max) - 1, 14)
    power = pow2.round_down(largest, old.dtype)
    scale = power * math.ldexp(1.0, -top)
    if not (wide or dtypes.is_narrow_float(dtype)):
        rms = statistic(x, "rms", axes)
        scale = jnp.maximum(scale, pow2.round_down(rms, old.dtype))
    scale = jnp.where(power == 0, zero, jnp.maximum(scale, _SMALLEST))
    return jnp.where(jnp.isfinite(largest), scale, old)


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
) -> ScaledArray:
    """Return `x` as `like` is stored: in its dtype, with its shape of scale.

    Args:
        x: what is to be stored, in float32.
        like: as it was stored so far. A static scale is kept.
        wide: whether the elements spread over a wide range, as squares do.
        bits: random bits, for stochastic rounding; by default, to nearest even.
        grad: the gradient, if the scale follows it by `degree`; else a statistic is taken.
        degree: of `x` in the gradient.
    """
    old = array_lib.align_scale(jnp.asarray(like.scale, jnp.float32), like.ndim)
    if like.is_static and like.scale:
        scale = old
    elif grad is None or degree is None:
        scale = scale_by_statistic(x, old, like.dtype, wide=wide)
    else:
        scale = jnp.broadcast_to(scale_of_gradient(grad, old, degree), old.shape)
    inverse = (1 / jnp.where(scale == 0, 1, scale)).astype(x.dtype)
    data = jnp.where((scale == 0) & jnp.isfinite(x), 0, x * inverse)
    data = saturate(data, like.dtype, wide=wide, bits=bits)
    if like.is_static and like.scale:
        return ScaledArray(data, like.scale)
    return ScaledArray(data, scale.reshape(jnp.shape(like.scale)))


@custom_scale(static_argnames=("wide", "degree"))
def store(
    x: jax.Array, like: jax.Array, grad: jax.Array, *, wide: bool, degree: int | None
) -> jax.Array:
    """Cast `x` to the dtype of `like`; inside `scalify`, choose a scale.

    With a `degree` the scale follows that of the gradient, else it is found by a statistic.
    """
    return saturate(x, like.dtype, wide=wide)


@store.defscale
def _store_scale(
    x: ScaledArray, like: ScaledArray, grad: ScaledArray, *, wide: bool, degree: int | None
) -> ScaledArray:
    like, grad = _with_array(like), _with_array(grad)
    values = x.to_array()
    bits = bits_of(values, grad.data if grad.shape == x.shape else values)
    return stored(values, like, wide=wide, bits=bits, grad=grad, degree=degree)


def drawn(x: jax.Array, bits: jax.Array | None, salt: jax.Array | None) -> jax.Array | None:
    """The bits to round `x` with: those given, or made of it and a salt; None for to nearest."""
    return bits if salt is None else bits_of(x, salt)


@custom_scale(static_argnames=("by_statistic",))
def store_weight(
    x: jax.Array,
    like: jax.Array,
    bits: jax.Array | None,
    salt: jax.Array | None,
    *,
    by_statistic: bool,
) -> jax.Array:
    """Cast `x` to the dtype of `like`; inside `scalify`, at a scale found by statistic or its own.

    With a salt the bits to round with are made of it and `x`; with neither, to nearest even.
    """
    return saturate(x, like.dtype, bits=drawn(x, bits, salt))


@store_weight.defscale
def _store_weight_scale(
    x: ScaledArray, like: ScaledArray, bits: Any, salt: Any, *, by_statistic: bool
) -> ScaledArray:
    values = x.to_array()
    bits = drawn(values, bits, salt.to_array() if array_lib.is_scaled(salt) else salt)
    if by_statistic:
        return stored(values, _with_array(like), bits=bits)
    if isinstance(x, Operand):
        x = at_whole_scale(x)
    return ScaledArray(saturate(x.data, like.dtype, bits=bits), x.scale)


def _with_array(x: ScaledArray) -> ScaledArray:
    """The scale of a rule's operand as a number, if it is known while tracing, or an array."""
    scale = x.scale
    if isinstance(scale, Scale):
        scale = scale.value if scale.is_static else jnp.asarray(scale)
    return ScaledArray(x.data, scale)
