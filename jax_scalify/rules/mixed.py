"""Primitives whose results have no one scale: evaluated on dequantised values, and reported."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_scalify import dtypes
from jax_scalify.array import ScaledArray
from jax_scalify.pow2 import ONE
from jax_scalify.registry import RuleContext, register_scale_rule, sub_jaxprs
from jax_scalify.rules.common import filled, uniform_over

_TYPED = frozenset(
    "pure_callback io_callback ffi_call call_exported get swap addupdate freeze new_ref".split()
)


def dequantising_rule(ctx: RuleContext, *args: Any, **params: Any) -> list[Any]:
    """`scale = 1`, on plain values: in at least float32, where the primitive takes it."""

    def plain(x: Any, aval: Any, wide: bool) -> Any:
        if not dtypes.is_scalable(aval.dtype):
            return x
        dtype = dtypes.compute_dtype(aval.dtype) if wide else aval.dtype
        return filled(dtypes.cast(ctx.dequantise(x, dtype), dtype), aval.shape)

    def bind(wide: bool) -> Any:
        return ctx.bind(*(plain(x, a, wide) for x, a in zip(args, ctx.in_avals)), **params)

    # A jaxpr, a `Ref` and what is outside the program expect the dtypes they were made for.
    if sub_jaxprs(params) or ctx.primitive.name in _TYPED:
        out = bind(wide=False)
    else:
        try:
            out = bind(wide=True)
        except TypeError:  # a parameter may fix a dtype as well
            out = bind(wide=False)
    return [
        ScaledArray(dtypes.cast(o, aval.dtype), ONE) if dtypes.is_scalable(aval.dtype) else o
        for o, aval in zip(
            out if ctx.primitive.multiple_results else [out], ctx.out_avals, strict=True
        )
    ]


def _register(reason: str, *primitives: Any) -> None:
    register_scale_rule(*primitives, dequantises=reason)(dequantising_rule)


_register("a product of n elements has the scale to the power of n", lax.reduce_prod_p)
_register("the k-th product has the scale to the power of k", lax.cumprod_p)
_register("a logarithm of sums of exponentials shifts by the scale", lax.cumlogsumexp_p)
_register("its computation is arbitrary", lax.reduce_p, lax.reduce_window_p, "select_and_scatter")
_register("L, of degree 0, and U, of degree 1, are packed into one array", "lu")
_register(
    "Householder vectors, of degree 0, are packed with factors of degree 1",
    "geqrf", "geqp3", "householder_product", "ormqr", "hessenberg", "tridiagonal",
)  # fmt: skip
_register("a product and a sum of matrices in one", "symmetric_product")
_register("the ends of the interval are plain numbers", lax.rng_uniform_p)


@register_scale_rule(
    lax.nextafter_p, lax.bitcast_convert_type_p, dequantises="it is about the bits of the value"
)
def bits_rule(ctx: RuleContext, *args: ScaledArray, **params: Any) -> Any:
    """`scale = 1`, on plain values of the operands' own dtype, whose bits count."""
    plain = [ctx.dequantise(x, x.dtype) for x in args]
    shapes = [aval.shape for aval in ctx.in_avals]
    out = ctx.bind(*(filled(jnp.asarray(p), s) for p, s in zip(plain, shapes)), **params)
    return ScaledArray(out, ONE) if dtypes.is_scalable(out.dtype) else out


@register_scale_rule(
    lax.scatter_mul_p, dequantises="an element is multiplied by any number of updates"
)
def scatter_mul_rule(
    ctx: RuleContext, x: ScaledArray, indices: Any, updates: ScaledArray, **params: Any
) -> ScaledArray:
    """The operand's scale, which must be uniform; updates are plain numbers."""
    x = uniform_over(x)
    compute = dtypes.compute_dtype(x.dtype)
    out = lax.scatter_mul(
        filled(dtypes.cast(x.data, compute), ctx.in_avals[0].shape),
        indices,
        filled(dtypes.cast(ctx.dequantise(updates), compute), ctx.in_avals[2].shape),
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    return ScaledArray(dtypes.cast(out, ctx.out_dtype), x.scale)
