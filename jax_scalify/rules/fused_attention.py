"""Attention as one kernel of cuDNN: `jax.nn.dot_product_attention(..., implementation="cudnn")`.

Results are linear in the values, and gradients in the values and the cotangent: their scales go
around the kernel. Queries, keys and the bias stand inside an `exp`, as the numbers that they are.
"""

from __future__ import annotations

from typing import Any

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.base.filling import filled
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule
from jax_scalify.rules.shared.along_axes import uniform_over
from jax_scalify.scales.algebra import ONE

# The operands: query, key, value, bias, six of lengths and pages; backward these, the statistics
# of the softmax, the result and its cotangent.
_VALUE, _RESULT, _COTANGENT = 2, 11, 12


def _number(ctx: RuleContext, x: Any) -> Any:
    """An operand as the number that it is, in its own dtype, as the kernel takes it."""
    return dtypes.cast(ctx.dequantise(x), x.dtype) if isinstance(x, Operand) else x


@register_scale_rule("dot_product_attention_fwd_wrapper", elements="new")
def fused_attention_rule(ctx: RuleContext, *args: Any, **params: Any) -> list[ScaledArray]:
    """`scale = value.scale`; the statistics of the softmax have a static 1."""
    value = uniform_over(args[_VALUE])
    arrays = [_number(ctx, x) for x in args]
    arrays[_VALUE] = filled(value.data, ctx.in_avals[_VALUE])
    out, *statistics = ctx.bind(*arrays, **params)
    return [ScaledArray(out, value.scale), *(ScaledArray(x, ONE) for x in statistics)]


@register_scale_rule("dot_product_attention_bwd_wrapper", elements="new")
def fused_attention_gradients_rule(
    ctx: RuleContext, *args: Any, **params: Any
) -> list[ScaledArray]:
    """`cotangent.scale * value.scale`, of the value's gradient `cotangent.scale`."""
    value, result, cotangent = (uniform_over(args[i]) for i in (_VALUE, _RESULT, _COTANGENT))
    arrays = [_number(ctx, x) for x in args]
    aligned = result.at_unit(value.scale, result.dtype)
    data = {_VALUE: value.data, _RESULT: aligned, _COTANGENT: cotangent.data}
    for i, x in data.items():
        arrays[i] = filled(x, ctx.in_avals[i])
    gradients = ctx.bind(*arrays, **params)
    scales = [cotangent.scale * value.scale] * len(gradients)
    scales[_VALUE] = cotangent.scale
    return [ScaledArray(x, scale) for x, scale in zip(gradients, scales, strict=True)]
