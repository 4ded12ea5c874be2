"""Primitives that have no floating-point operand, or never meet one that is scaled."""

from __future__ import annotations

from typing import Any

from jax_scalify.interpreter.registry import RuleContext, register_scale_rule


@register_scale_rule("and", "or", "not", "xor", elements="new", elementwise=True)
@register_scale_rule("reduce_and", "reduce_or", elements="picked")
@register_scale_rule(
    "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "clz", "population_count", "mulhi", "reduce_xor", "iota", "empty2",
    "axis_index", "after_all", "create_token", "lu_pivots_to_permutation", "rng_bit_generator",
    "threefry2x32", "random_bits", "random_seed", "random_split", "random_fold_in", "random_wrap",
    "random_unwrap", "random_clone", elements="new",
)  # fmt: skip
def plain_rule(ctx: RuleContext, *args: Any, **params: Any) -> Any:
    """Integers, bools, keys and tokens: evaluated as it is."""
    return ctx.bind(*args, **params)
