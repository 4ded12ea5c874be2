"""Primitives without a scale law. They are evaluated on dequantised values, and reported."""

from __future__ import annotations

from typing import Any

from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import (
    RuleContext,
    dequantising_rule,
    evaluate_plain,
    register_elementwise,
    register_scale_rule,
)
from jax_scalify.rules.scattering import scatter


def own_dtype_rule(ctx: RuleContext, *args: Any, **params: Any) -> list[Any]:
    """`scale = 1`; evaluated on dequantised values in the operands' own dtype."""
    if ctx.primitive is lax.bitcast_convert_type_p and ctx.out_dtype == args[0].dtype:
        return [args[0]]  # a bitcast to the same dtype is the identity: it keeps the scale
    return evaluate_plain(ctx, args, params, wide=False)


def _register(reason: str, *primitives: Any, **traits: Any) -> None:
    register = register_scale_rule(*primitives, dequantises=reason, elements="new", **traits)
    register(dequantising_rule)


_register(
    "a product of n elements has the scale to the power of n",
    lax.reduce_prod_p,
    nonnegative="keeps",
)
_register("the k-th product has the scale to the power of k", lax.cumprod_p, nonnegative="keeps")
_register("a logarithm of sums of exponentials shifts by the scale", lax.cumlogsumexp_p)
_register("its computation is arbitrary", lax.reduce_p, lax.reduce_window_p, "select_and_scatter")
_register("L, of degree 0, and U, of degree 1, are packed into one array", "lu")
_register(
    "Householder vectors, of degree 0, are packed with factors of degree 1",
    "geqrf", "geqp3", "householder_product", "ormqr", "hessenberg", "tridiagonal",
)  # fmt: skip
_register("a product and a sum of matrices in one", "symmetric_product")
_register("the ends of the interval are plain numbers", lax.rng_uniform_p)


_BITS = "it is about the bits of the value"
register_elementwise(lax.nextafter_p, dequantises=_BITS)(own_dtype_rule)
register_scale_rule(lax.bitcast_convert_type_p, dequantises=_BITS, elements="new")(own_dtype_rule)


@register_scale_rule(
    lax.scatter_mul_p,
    dequantises="an element is multiplied by any number of updates",
    elements="new",
    nonnegative="keeps",
)
def scatter_mul_rule(
    ctx: RuleContext, x: Operand, indices: Any, updates: Operand, **params: Any
) -> Operand:
    """`scale = operand.scale`; the updates are dequantised."""
    if ctx.holds_values:
        return ctx.on_values(x.scale, x, indices, updates, **params)
    plain = ctx.dequantise(updates)
    data = dtypes.cast(x.data, plain.dtype)
    out = scatter(ctx.primitive, data, indices, plain, params)
    return ctx.result(out, x.scale, saturates=False)
