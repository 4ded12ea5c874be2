"""Primitives whose results do not depend on a scale, and primitives of integers, bools and keys."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_elementwise, register_scale_rule
from jax_scalify.rules.shared.along_axes import comparable
from jax_scalify.rules.shared.joining import aligned, same_dtype, shared_scale
from jax_scalify.scales.algebra import ONE


@register_scale_rule(lax.argmax_p, lax.argmin_p, elements="new")
def argmax_rule(ctx: RuleContext, x: Operand, **params: Any) -> Any:
    """`out = f(data)`, plain; elements of the searched axes are compared at one scale."""
    return ctx.bind(comparable(x, params["axes"]).source, **params)


@register_elementwise(lax.is_finite_p)
def is_finite_rule(ctx: RuleContext, x: Operand, **params: Any) -> Any:
    """`out = f(data)`, plain; `f(data * scale)` if the scale could make finite data infinite."""
    return ctx.bind(_infinite_as_value(ctx, x), **params)


def _infinite_as_value(ctx: RuleContext, x: Operand) -> Any:
    """Return an array that is infinite where the value is, in the dtype of computation."""
    finfo = jnp.finfo(dtypes.compute_dtype(x.dtype))
    # float16 data is below 2**16. Up to a scale of 2**112, its values are finite in float32.
    may_overflow = x.unit.span + min(0, jnp.finfo(x.dtype).maxexp - finfo.maxexp) > 0
    return ctx.dequantise(x) if may_overflow else x.source


@register_elementwise(lax.sign_p, nonnegative="keeps", degree=0)
def sign_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`out = sign(data)`, scale 1."""
    return ctx.result(ctx.bind(x.source, **params), ONE)


def _together(lhs: Operand, rhs: Operand) -> list[Any]:
    if not dtypes.is_narrow(lhs.dtype):
        return [lhs.value, rhs.value]
    # At the scale of the other operand, float16 may hold a constant in few digits only.
    has_constant = any(x.constant is not None for x in (lhs, rhs))
    compute = dtypes.compute_dtype(lhs.dtype) if has_constant else None
    return aligned(shared_scale(lhs, rhs, additive=True), lhs, rhs, dtype=compute)


@register_elementwise(lax.eq_p, lax.ne_p, lax.lt_p, lax.le_p, lax.gt_p, lax.ge_p)
@register_scale_rule("eq_to", "lt_to", "le_to", elements="new")
def comparison_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> Any:
    """Align, then compare in at least float32; the output is plain."""
    numbers = [x.constant for x in (lhs, rhs)]
    if any(n is not None and n == 0 for n in numbers):  # a sign does not depend on the scale
        return ctx.bind(*same_dtype(lhs.source, rhs.source), **params)
    if any(n is not None and not np.isfinite(np.complex128(n)) for n in numbers):
        # `x < inf` is about the value, which may be infinite although the data is finite.
        return ctx.bind(*same_dtype(*(_infinite_as_value(ctx, x) for x in (lhs, rhs))), **params)
    return ctx.bind(*_together(lhs, rhs), **params)


@register_elementwise(lax.atan2_p)
def atan2_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> Operand:
    """`scale = 1`; the operands are aligned, and evaluated in at least float32."""
    compute = dtypes.compute_dtype(ctx.out_dtype)
    data = (dtypes.cast(d, compute) for d in _together(lhs, rhs))
    return ctx.result(ctx.bind(*data, **params), ONE)


@register_elementwise("and", "or", "not", "xor")
@register_scale_rule("reduce_and", "reduce_or", elements="picked")
@register_scale_rule(
    "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "clz", "population_count", "mulhi", "reduce_xor", "iota", "empty2",
    "axis_index", "after_all", "create_token", "lu_pivots_to_permutation", "rng_bit_generator",
    "threefry2x32", "random_bits", "random_seed", "random_split", "random_fold_in", "random_wrap",
    "random_unwrap", "random_clone", elements="new",
)  # fmt: skip
def plain_rule(ctx: RuleContext, *args: Any, **params: Any) -> Any:
    """Evaluate the primitive unchanged: integers, bools, keys and tokens have no scale."""
    return ctx.bind(*args, **params)
