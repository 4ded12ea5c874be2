"""The rules of this package's own primitives. Only the rescales read data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays.scaled_array import align_scale
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.statistics import statistic
from jax_scalify.base.stochastic_rounding import keep_nonzero, round_stochastically
from jax_scalify.blocks.dot import block_round_p
from jax_scalify.config import Pow2RoundMode
from jax_scalify.interpreter.operand import Facts, Operand
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule, register_value_rule
from jax_scalify.interpreter.rescaling import at_scale
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.primitives import definitions as primitives
from jax_scalify.primitives.straight_through import straight_through_p
from jax_scalify.rules.shared.along_axes import uniform_over
from jax_scalify.scales.algebra import ONE, ZERO, Scale


def _requested_scale(ctx: RuleContext) -> Scale:
    """Read the scale operand. A constant or a traced number is rounded down to a power of two."""
    value = ctx.inputs[1]
    if value.known_scale is not None:
        return value.known_scale
    if value.constant is not None:
        number, limit = float(value.constant), pow2.MAX_EXPONENT
        if not number:
            return ZERO
        return Scale(max(-limit, min(limit, pow2.floor_exponent(number))))
    # A scale of shape (2,) for data of shape (2, 3) lies along the leading axis: (2, 1).
    plain = jnp.abs(ctx.dequantise(value)).astype(ctx.table.dtype)
    return ctx.table.atom(pow2.round_down(align_scale(plain, ctx.out_avals[0].ndim)))


@register_scale_rule(primitives.set_scaling_p, elements="rescaled")
def set_scaling_rule(ctx: RuleContext, x: Operand, _: Any) -> Operand:
    """`data = x / scale`, at the given scale."""
    return _at_scale(ctx, x, _requested_scale(ctx))


@register_scale_rule(primitives.match_scale_p, elements="rescaled")
def match_scale_rule(ctx: RuleContext, x: Operand, like: Operand) -> Operand:
    """`scale = like.scale`, in value and shape; `data = x / scale`."""
    return _at_scale(ctx, x, like.scale)


def _at_scale(ctx: RuleContext, x: Operand, scale: Scale) -> Operand:
    if x.scale.is_zero:
        return Operand(x.source, scale)
    if not scale.is_nonzero:  # where the given scale is 0 ("any scale will do"), keep the value's
        asked = jnp.asarray(scale.array, ctx.table.dtype)
        own = jnp.asarray(x.scale.array, ctx.table.dtype)
        if own.ndim:  # elements that share a requested scale must share their own scale
            axes = tuple(a for a in range(own.ndim) if not asked.ndim or asked.shape[a] == 1)
            own = jnp.max(own, axes, keepdims=asked.ndim > 0, initial=0)
        scale = x.scale if scale.is_zero else ctx.table.atom(jnp.where(asked == 0, own, asked))
    return at_scale(x, scale)


@register_scale_rule(primitives.cast_p, elements="cast")
def cast_rule(ctx: RuleContext, x: Operand, *, dtype: Any) -> Operand:
    """Cast the data, saturating; scale unchanged."""
    return Operand(dtypes.cast(x.data, dtype), x.scale)


@register_scale_rule(block_round_p, elements="cast")
def block_round_rule(ctx: RuleContext, x: Operand, *, quantiser: Any, **dims: Any) -> Operand:
    """Round the data to a block format; scale unchanged."""
    if ctx.inputs[0].is_scaled:  # its data has unit size
        quantiser = quantiser.of_unit_data(0)
    return Operand(block_round_p.bind(x.data, quantiser=quantiser, **dims), x.scale)


@register_scale_rule(straight_through_p, elements="same")
def straight_through_rule(ctx: RuleContext, x: Operand, *_: Any, **params: Any) -> Operand:
    """Return `x` unchanged: inside `scalify`, derivatives have already been taken."""
    return x


@register_scale_rule(primitives.stochastic_cast_p, elements="cast")
def stochastic_cast_rule(ctx: RuleContext, x: Operand, bits: Any, *, dtype: Any) -> Operand:
    """Round the data stochastically, saturating; scale unchanged."""
    return Operand(round_stochastically(x.data, bits, dtype), x.scale)


@register_scale_rule(primitives.rebalance_scale_p, elements="rescaled")
def rebalance_scale_rule(ctx: RuleContext, x: Operand, _: Any) -> Operand:
    """`data = data / factor`, `scale = scale * factor`; a factor of 0 counts as 1."""
    factor = _requested_scale(ctx)
    if not factor.is_nonzero:
        array = jnp.asarray(factor.array, ctx.table.dtype)
        factor = ctx.table.atom(jnp.where(array == 0, 1, array)) if factor.factors else ONE
    return x.with_scale(x.scale * factor)


@register_value_rule(primitives.stop_scaling_p, elements="rescaled")
def stop_scaling_rule(ctx: RuleContext, value: Value) -> list[Value]:
    """Return the plain values, `data * scale`."""
    return [Plain.of(ctx.dequantise(value, value.dtype), facts=value.facts)]


@register_scale_rule(primitives.get_data_and_scale_p, elements="new")
def get_data_and_scale_rule(ctx: RuleContext, x: Operand, *, scale_dtype: Any) -> list[Value]:
    """Return data and scale as plain values."""
    x = uniform_over(x.as_pair(x.data, x.scale))
    scale = jnp.asarray(x.scale.array, scale_dtype)
    return [
        Plain.of(jnp.asarray(x.data), facts=x.facts),
        Plain.of(scale, facts=Facts(nonneg=True), known_scale=x.scale),
    ]


@register_value_rule(primitives.dynamic_rescale_p, elements="rescaled")
def dynamic_rescale_rule(
    ctx: RuleContext, value: Value, *, stat: str, target: float, batch_ndim: int
) -> list[Any]:
    """Move a statistic of the data, rounded to a power of two, into the scale.

    An array of zeros gets the scale 0. If the statistic is not finite, the value is unchanged. A
    nonzero element never becomes 0, because optimizers divide by second moments.
    """
    if not isinstance(value, Operand):
        return [value, Plain.filled(ctx.out_avals[-1], np.bool_(True))]
    x = value.as_pair(value.data, value.scale)
    wide = statistic(x.data, stat, _measured_axes(x, batch_ndim))
    finite = jnp.isfinite(wide)
    power = pow2.round_down(wide, ctx.table.dtype)
    if ctx.config.rounding_mode is Pow2RoundMode.UP:
        power = jnp.where(wide > power, 2 * power, power)
    power = lax.mul(power, jnp.asarray(1 / target, power.dtype))
    # The power of zeros is 0. The data is then multiplied by `0**-1`, which counts as 1 in the
    # algebra of scales, so zeros do not become nan.
    factor = ctx.table.atom(jnp.where(finite, power, jnp.ones_like(power)))
    flag = _of_examples(ctx, finite)
    out = at_scale(x, x.scale * factor)
    if dtypes.is_narrow(x.dtype):
        out = out.as_pair(keep_nonzero(out.source, x.source, x.dtype), out.scale)
    return [out, flag]


def _measured_axes(x: Operand, batch_ndim: int) -> tuple[int, ...] | None:
    """Return the axes along which elements share a scale; None for all axes."""
    if x.scale.ndim:
        return tuple(a for a in range(x.ndim) if x.scale.shape[a] == 1)
    return tuple(range(batch_ndim, x.ndim)) if batch_ndim else None


def _of_examples(ctx: RuleContext, finite: jax.Array) -> jax.Array:
    """Return for each example of a batch whether all its statistics are finite."""
    examples = ctx.out_avals[-1].shape
    rest = tuple(range(len(examples), finite.ndim))
    return jnp.broadcast_to(jnp.all(finite, rest), examples)


@register_value_rule(primitives.delayed_rescale_p, elements="rescaled")
def delayed_rescale_rule(
    ctx: RuleContext, value: Value, history: Plain, *, algorithm: str, top: int, batch_ndim: int
) -> list[Any]:
    """`scale = 2**(amax - top)`, where the history gives the exponent `amax`.

    The exponent of the current largest value enters the history, unless this value is not finite.
    An empty history leaves the scale unchanged.
    """
    if not isinstance(value, Operand):
        return [value, history, Plain.filled(ctx.out_avals[-1], np.bool_(True))]
    x = value.as_pair(value.data, value.scale)
    seen = history.whole()
    amax, finite = _amax_exponent(ctx, x, seen.shape[1:])
    expected = jnp.max(seen, 0) if algorithm == "max" else seen[0]
    scale = pow2.power(expected - top, ctx.table.dtype)
    # Where the requested scale is 0, `_at_scale` keeps the scale of the value.
    scale = jnp.where(expected == primitives.NOTHING_SEEN, jnp.zeros_like(scale), scale)
    entered = jnp.concatenate([amax[None], seen[:-1]])
    return [
        _at_scale(ctx, x, ctx.table.atom(scale)),
        Plain.of(jnp.where(finite, entered, seen)),
        _of_examples(ctx, finite),
    ]


def _amax_exponent(
    ctx: RuleContext, x: Operand, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return each scale's largest exponent, and whether it is finite, as entries of the history."""
    shared = [d == 1 for d in shape] or [True] * x.ndim
    own = [d == 1 for d in x.scale.shape] or [True] * x.ndim
    axes = tuple(a for a in range(x.ndim) if shared[a] and own[a])
    # Elements of one scale are compared as data. Maxima of different scales that share an entry
    # of the history are compared below, as exponents of values.
    largest = statistic(x.data, "max", axes)
    power = pow2.round_down(largest)
    if x.scale.is_static and not x.scale.is_zero:
        scale, nonzero = int(x.scale.exponent), power > 0
    else:
        array = jnp.asarray(x.scale.array, ctx.table.dtype)
        scale, nonzero = pow2.exponent(array), (power > 0) & (array > 0)
    amax = jnp.where(nonzero, pow2.exponent(power) + scale, primitives.NOTHING_SEEN)
    axes = tuple(a for a in range(x.ndim) if shared[a])
    amax = jnp.max(amax, axes, keepdims=True)
    finite = jnp.all(jnp.isfinite(largest), axes, keepdims=True)
    return amax.reshape(shape), finite.reshape(shape)
