"""Attention in one cuDNN kernel: `jax.nn.dot_product_attention(..., implementation="cudnn")`.

The result is linear in the value operand, and the gradients are linear in the value operand and in
the cotangent. So the kernel takes the data of these two, and their scales multiply its results.
Queries, keys and the bias are inside an `exp`, so they are dequantised.
"""

from __future__ import annotations

from typing import Any

from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule
from jax_scalify.rules.shared.along_axes import uniform_over
from jax_scalify.scales.algebra import ONE

# The forward operands are query, key, value, bias, and six arrays of sequence lengths and pages.
# The backward operands are these ten, the softmax statistics, the result and its cotangent.
_VALUE, _RESULT, _COTANGENT = 2, 11, 12


@register_scale_rule("dot_product_attention_fwd_wrapper", elements="new")
def fused_attention_rule(ctx: RuleContext, *args: Any, **params: Any) -> list[Operand]:
    """`scale = value.scale`; the softmax statistics have the static scale 1."""
    value = uniform_over(args[_VALUE])
    arrays = [ctx.dequantise(x, x.dtype) for x in args]
    arrays[_VALUE] = value.data
    out, *statistics = ctx.bind(*arrays, **params)
    return [Operand(out, value.scale), *(Operand(x, ONE) for x in statistics)]


@register_scale_rule("dot_product_attention_bwd_wrapper", elements="new")
def fused_attention_gradients_rule(ctx: RuleContext, *args: Any, **params: Any) -> list[Operand]:
    """`scale = cotangent.scale * value.scale`; the value's gradient has `cotangent.scale`."""
    value, result, cotangent = (uniform_over(args[i]) for i in (_VALUE, _RESULT, _COTANGENT))
    arrays = [ctx.dequantise(x, x.dtype) for x in args]
    arrays[_VALUE], arrays[_COTANGENT] = value.data, cotangent.data
    # The kernel computes `cotangent @ value.T - sum(cotangent * result)` for each query, so value
    # and result must have the same unit.
    arrays[_RESULT] = result.at_unit(value.scale, result.dtype)
    gradients = ctx.bind(*arrays, **params)
    scales = [cotangent.scale * value.scale] * len(gradients)
    scales[_VALUE] = cotangent.scale
    return [Operand(x, scale) for x, scale in zip(gradients, scales, strict=True)]
