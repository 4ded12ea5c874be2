"""Primitives whose results have no one scale: evaluated on dequantised values, and reported."""

from __future__ import annotations

from typing import Any

from jax import lax

from jax_scalify import dtypes
from jax_scalify.algebra import ONE
from jax_scalify.array import ScaledArray
from jax_scalify.jaxprs import sub_jaxprs
from jax_scalify.registry import RuleContext, register_scale_rule
from jax_scalify.rules.common import filled
from jax_scalify.rules.scattering import scatter


def _evaluate(ctx: RuleContext, args: tuple[Any, ...], params: dict[str, Any], wide: bool) -> list:
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
    """`scale = 1`, on plain values: in at least float32, where the primitive takes it."""
    if sub_jaxprs(params):  # which expects the dtypes that it was made for
        return _evaluate(ctx, args, params, wide=False)
    try:
        return _evaluate(ctx, args, params, wide=True)
    except TypeError:  # a parameter may fix a dtype as well
        return _evaluate(ctx, args, params, wide=False)


def own_dtype_rule(ctx: RuleContext, *args: Any, **params: Any) -> list[Any]:
    """`scale = 1`, on plain values of the operands' own dtype."""
    if ctx.primitive is lax.bitcast_convert_type_p and ctx.out_dtype == args[0].dtype:
        return [args[0]]  # as they were
    return _evaluate(ctx, args, params, wide=False)


def _register(reason: str, *primitives: Any, **traits: Any) -> None:
    traits = {"elements": "new", **traits}
    register_scale_rule(*primitives, dequantises=reason, **traits)(dequantising_rule)


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
register_scale_rule(lax.nextafter_p, dequantises=_BITS, elements="new", elementwise=True)(
    own_dtype_rule
)
register_scale_rule(lax.bitcast_convert_type_p, dequantises=_BITS, elements="new")(own_dtype_rule)


@register_scale_rule(
    lax.scatter_mul_p,
    dequantises="an element is multiplied by any number of updates",
    elements="new",
    nonnegative="keeps",
)
def scatter_mul_rule(
    ctx: RuleContext, x: ScaledArray, indices: Any, updates: ScaledArray, **params: Any
) -> ScaledArray:
    """The operand's scale; updates are plain numbers."""
    compute = dtypes.compute_dtype(x.dtype)
    plain = dtypes.cast(ctx.dequantise(updates), compute)
    data = [dtypes.cast(x.data, compute), plain]
    avals = ctx.in_avals[0], ctx.in_avals[2]
    data = [filled(d, aval) for d, aval in zip(data, avals, strict=True)]
    out = scatter(ctx, data[0], indices, data[1], params)
    return ScaledArray(dtypes.cast(out, ctx.out_dtype), x.scale)
