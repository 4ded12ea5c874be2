"""Results of rules: multiplied by a ratio of scales, corrected, and rounded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand, ratio_of
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.scales.algebra import ONE, Scale
from jax_scalify.scales.multiplying import multiply


def made(raw: Any, unit: Scale, scale: Scale, dtype: Any) -> Operand:
    """Return the operand of values `raw * unit` in `dtype`, multiplied and cast once."""
    if dtypes.is_narrow(dtype):
        return Operand(multiply(raw, ratio_of(unit, scale), dtype), scale)
    return Operand(multiply(raw, unit, dtype), scale, unit=ONE)


def widened(ctx: RuleContext, data: Sequence[Any], scale: Scale = ONE) -> list[Any]:
    """Return the operands of an elementwise equation, widened if its result is rounded later.

    Widened operands are in at least float32. Given the `scale` of the result, operands are also
    widened if the scale may be below 1. Data may then overflow where values do not, so `narrowed`
    must saturate it.
    """
    compute = dtypes.compute_dtype(ctx.out_dtype)
    is_wide = ctx.pending.exponent or ctx.stays_wide or any(x.dtype == compute for x in data)
    may_be_below_one = not scale.is_static or scale.exponent < 0
    if not is_wide and not (dtypes.is_narrow(ctx.out_dtype) and may_be_below_one):
        return list(data)
    return [lax.convert_element_type(x, compute) for x in data]


def bind_product(
    ctx: RuleContext,
    operands: Sequence[Operand],
    scale: Scale,
    params: Mapping[str, Any],
    spread: Scale = ONE,
    *,
    fits: bool = False,
) -> Operand:
    """Bind an equation whose result is a product of powers of its operands, at `scale * spread`."""
    if ctx.holds_values:
        return ctx.on_values(scale * spread, *operands, **params)
    data = [x.data for x in operands]
    raw = ctx.bind(*widened(ctx, data, scale), **params)
    return ctx.result(raw, scale * spread, scale, fits=fits)
