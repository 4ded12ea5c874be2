"""Evaluate a primitive on plain values, where scales cannot be kept."""

from __future__ import annotations

from typing import Any

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.base.filling import filled
from jax_scalify.base.jaxprs import sub_jaxprs
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.scales.algebra import ONE


def evaluate_plain(
    ctx: RuleContext, args: tuple[Any, ...], params: dict[str, Any], wide: bool
) -> list:
    """Bind a primitive to plain values, in at least float32 if `wide`. Results have scale 1."""
    plain = []
    for x, aval in zip(args, ctx.in_avals, strict=True):
        if dtypes.is_scalable(aval.dtype):
            dtype = dtypes.compute_dtype(aval.dtype) if wide else aval.dtype
            x = filled(dtypes.cast(ctx.dequantise(x, dtype), dtype), aval)
        plain.append(x)
    out = ctx.bind(*plain, **params)
    out = out if ctx.primitive.multiple_results else [out]
    return [
        ScaledArray(dtypes.cast(o, aval.dtype), ONE) if dtypes.is_scalable(aval.dtype) else o
        for o, aval in zip(out, ctx.out_avals, strict=True)
    ]


def dequantising_rule(ctx: RuleContext, *args: Any, **params: Any) -> list[Any]:
    """`scale = 1`; evaluated on dequantised values, in at least float32 if the primitive can."""
    if not sub_jaxprs(params):  # a jaxpr only takes the dtypes that it was traced with
        try:
            return evaluate_plain(ctx, args, params, wide=True)
        except TypeError:  # a parameter may fix a dtype too
            pass
    return evaluate_plain(ctx, args, params, wide=False)
