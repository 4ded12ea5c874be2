"""Choices that are clips: `where(x > 1, 1, x)` is `min(x, 1)`, and gets the scale of `min`.

By its elements alone a choice has at least the scale of `x`, although no element is larger than 1.
At the scale `2**8`, the fourth power of the result would underflow in float16.
"""

from __future__ import annotations

import dataclasses

from jax import lax

from jax_scalify.interpreter.context import RuleContext
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.value import Value


def as_clip(ctx: RuleContext) -> RuleContext:
    """Return the context of `min(x, c)` for `where(x > c, c, x)`, and of `max` for `x < c`.

    `x` may be clipped on its other side already. nan stays nan in both forms. Any other context is
    unchanged.
    """
    if ctx.primitive is not lax.select_n_p or len(ctx.inputs) != 3:
        return ctx
    # `where(c, a, b)` is `select_n(c, b, a)`: the first case is that of a False condition.
    condition, x, constant = ctx.inputs
    bound = condition.facts.bound
    if bound is None or constant.constant != bound.number:
        return ctx
    own = x.facts.bound  # of a clip on the other side
    whole = own.x if own is not None and own.number * bound.number < 0 else None
    if not (_is_same(x, bound.x) or _is_same(whole, bound.x)):
        return ctx
    primitive = lax.min_p if bound.number > 0 else lax.max_p
    eqn = ctx.eqn.replace(primitive=primitive, params={}, invars=ctx.eqn.invars[1:])
    return dataclasses.replace(ctx, eqn=eqn, inputs=(x, constant))


def _is_same(x: Value | None, y: Operand | None) -> bool:
    if not isinstance(x, Operand) or y is None:
        return False
    return x.source is y.source and (x.scale, x.unit) == (y.scale, y.unit)
