"""Products: factors that are brought into range first, results that get their factor later."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.interpreter.constants import room
from jax_scalify.interpreter.facts import facts_of
from jax_scalify.interpreter.multiplying import (
    kept_wide,
    multiply,
    narrowed,
    within_range,
)
from jax_scalify.interpreter.operand import Operand, can_defer, defer
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import Scale

# What a product in float32 may put into its data, if the values are ordinary and the scales are
# not, and what the multiplication by one power of two can bring back.
_LARGEST_PRODUCT = 108
# A power has no partner that makes up for it: the square of a gradient of 1e-8 at a scale of 2**40,
# as in a second moment, would be 2**-132 in float32. The scale of a square is within 2**+-16 first.
_LARGEST_POWER = 64
_MARGIN = 0.5  # octaves below the largest number, for rounding


def factors_in_range(
    ctx: RuleContext, *operands: Operand, powers: Sequence[int] | None = None
) -> list[Operand]:
    """Bring factors nearer to their values where their product might leave the range of float32.

    The values may be ordinary where the scales are not: 1 is `2**-40 * 2**40`, and the data of its
    fourth power would be `2**-160`. Narrow data cannot be so far from 1.
    """
    powers = powers or (1,) * len(operands)
    if dtypes.has_short_range(ctx.out_dtype):
        return list(operands)
    extents = [
        0 if x.constant is not None else abs(p) * x.scale.extent
        for x, p in zip(operands, powers, strict=True)
    ]
    total = sum(map(abs, powers))
    if total < 2:
        return list(operands)
    share, limit = 2 * algebra.LARGEST_EXTENT // total, _LARGEST_PRODUCT
    is_same = all(v is ctx.eqn.invars[0] for v in ctx.eqn.invars[: len(operands)])
    is_power = is_same or _are_multiples(operands)
    # A cast to float16 has to find the scale without a limit: of a scalar scale it is known.
    followed = all(x.scale.factors and not x.scale.ndim for x in operands)
    if is_power and (followed or not ctx.table.narrow):
        share = _LARGEST_POWER // total**2
        limit = share * total
    if sum(extents) <= limit:
        return list(operands)
    return [
        within_range(x, share) if extent > share * abs(p) else x
        for x, extent, p in zip(operands, extents, powers, strict=True)
    ]


def _are_multiples(operands: Sequence[Operand]) -> bool:
    """Tell whether these are an array and its multiples, as in `0.001 * g * g`."""
    first, *others = operands
    is_one = first.number is None and all(x.source is first.source for x in others)
    return is_one and any(x.is_deferred or x.scale != first.scale for x in operands)


def times(raw: Any, factor: Scale, scale: Scale, dtype: Any) -> Operand:
    """Make an array with `data = raw * factor`, cast once; if the factor can wait, it does."""
    if factor.is_static and not factor.is_zero and can_defer(dtype):
        return defer(dtypes.cast(raw, dtype), factor.exponent, scale)
    if raw.dtype == dtype == jnp.bfloat16 and factor.is_static and not factor.may_leave_range:
        # Exact in bfloat16; on GPUs a constant behind a matmul is a parameter of its kernel.
        number = np.asarray(factor.value, dtype)
        return Operand(raw if factor.is_one else lax.mul(raw, number), scale)
    return Operand(multiply(raw, factor, dtype), scale)


def rounded(ctx: RuleContext, raw: Any, scale: Scale, exponent: int = 0) -> Operand:
    """Make a result of data `raw * 2**exponent`, of at least float32 where a correction waits.

    It is applied before the data is rounded, so that nothing overflows that is not to.
    """
    correction = ctx.pending.take()
    scale = scale * Scale(correction)
    if dtypes.has_short_range(ctx.out_dtype):
        raw = multiply(raw, Scale(exponent - correction))
        if raw.dtype == ctx.out_dtype:  # as another array has it
            return Operand(raw, scale)
        if ctx.stays_wide:
            return kept_wide(raw, scale, ctx.out_dtype)
        return Operand(narrowed(raw, scale, ctx.out_dtype), scale)
    if correction:
        return times(raw, Scale(exponent - correction), scale, ctx.out_dtype)
    return defer(dtypes.cast(raw, ctx.out_dtype), exponent, scale)


def for_constants(ctx: RuleContext, scale: Scale) -> Scale:
    """The scale at which constants among the elements fit, as in `(3 * where(mask, x, 1))**3`.

    Not if they are beyond the range of values: those of a mask, which may be gone by now, as in
    `square(relu(where(mask, x, -1e4)))`.
    """
    constant = facts_of(ctx.eqn, list(ctx.inputs)).constant
    is_narrow = dtypes.has_short_range(ctx.out_dtype)
    if not is_narrow or constant is None or constant >= jnp.finfo(ctx.out_dtype).maxexp:
        return scale
    return algebra.join(scale, Scale(math.floor(constant)) * room(ctx.out_dtype), narrow=True)


def widened(ctx: RuleContext, data: Sequence[Any]) -> list[Any]:
    """The operands of an elementwise equation, in at least float32 where it is rounded later."""
    compute = dtypes.compute_dtype(ctx.out_dtype)
    if not (ctx.pending.exponent or ctx.stays_wide or any(x.dtype == compute for x in data)):
        return list(data)
    return [lax.convert_element_type(x, compute) for x in data]


def bind_product(
    ctx: RuleContext, parts: Sequence[Any], scale: Scale, params: Mapping[str, Any]
) -> Operand:
    """Bind an equation whose result is a product of powers, given what `split_product` returns."""
    *data, exponent = parts
    arrays = [x for x in data if np.ndim(x)]
    overflows = not scale.is_static or scale.exponent < 0  # where the value does not
    if dtypes.has_short_range(ctx.out_dtype) and overflows and (len(data) == 1 or len(arrays) > 1):
        data = [lax.convert_element_type(x, dtypes.compute_dtype(x.dtype)) for x in data]
    raw = ctx.bind(*widened(ctx, data), **params)
    if raw.dtype == ctx.out_dtype or ctx.stays_wide:
        return rounded(ctx, raw, scale, exponent)
    holds = for_constants(ctx, scale)
    return rounded(ctx, multiply(raw, scale / holds), holds, exponent)
