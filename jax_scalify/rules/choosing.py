"""Choosing among multiples of one array, element by element, in float16.

`where(x < 0.03, 4096 * x, x)`, as in `hypot`, dodges an underflow. One scale for the result would
flush the elements that were not multiplied, or let the others overflow in the next square. The
data is that of `x` whatever was chosen; so only the scale is chosen, and mostly cancels later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.interpreter.value import filled
from jax_scalify.scales.algebra import Scale
from jax_scalify.scales.table import ScaleTable

# Multiples that are nearer than this have one scale.
_SPREAD = 4


def chosen_multiple(ctx: RuleContext, which: Any, cases: Sequence[Operand]) -> ScaledArray | None:
    """Return the choice among multiples of one array, if that is what they are, else None."""
    if not dtypes.has_short_range(ctx.out_dtype) or any(x.scale.is_zero for x in cases):
        return None
    kinds = {_kind(ctx, x) for x in cases}
    first = cases[0].scale
    multiples = [x.scale / first for x in cases]
    if len(kinds) > 1 or not _are_far_apart(multiples):
        return None
    degree = _common_degree(multiples)
    bases = tuple(_root(m, degree) for m in multiples)
    shape = ctx.out_avals[0].shape if np.ndim(which) or any(b.ndim for b in bases) else ()
    atom = _choice(ctx.table, which, bases, shape)
    data = filled(cases[0].data, ctx.out_avals[0])
    kind = kinds.pop()
    if isinstance(kind, float):
        ctx.table.mantissas[id(data)] = (data, kind)
    return ScaledArray(data, first * atom**degree)


def _are_far_apart(multiples: Sequence[Scale]) -> bool:
    """Tell whether multiples are known, but for choices, and need scales of their own."""
    if not all(atom.choices for m in multiples for atom, _ in m.factors):
        return False
    lowest, highest = zip(*(m.choice_range() for m in multiples), strict=True)
    return max(highest) - min(lowest) > _SPREAD


def _kind(ctx: RuleContext, x: Operand) -> float | int:
    """What the multiples of one array have in common: its identity, of a constant its mantissa."""
    if x.constant is not None:
        return float(np.asarray(x.data).flat[0])
    _, mantissa = ctx.table.mantissas.get(id(x.data), (None, None))
    return id(x.data) if mantissa is None else mantissa


def _common_degree(multiples: Sequence[Scale]) -> int:
    """The power that all multiples are; negative if the first that is not 1 is a reciprocal.

    So `where(c, 1, 1 / 4096)` is a power of the same choice as `where(c, x, 4096 * x)`.
    """
    powers = [int(n) for m in multiples for n in (m.exponent, *(p for _, p in m.factors))]
    degree = math.gcd(*powers)
    return degree if next(n for n in powers if n) > 0 else -degree


def _root(scale: Scale, degree: int) -> Scale:
    factors = tuple((atom, power // degree) for atom, power in scale.factors)
    return Scale(int(scale.exponent) // degree, factors)


def _choice(table: ScaleTable, which: Any, bases: tuple[Scale, ...], shape: Any) -> Scale:
    known = table.chosen.get((id(which), bases))
    if known is None:
        arrays = [jnp.broadcast_to(jnp.asarray(b.array, table.dtype), shape) for b in bases]
        lowest, highest = zip(*(b.choice_range() for b in bases), strict=True)
        limit = max(max(highest), -min(lowest))
        source = lax.select_n(which, *arrays)
        atom = table.atom(source, nonzero=True, extent=0, limit=limit, choices=bases)
        known = table.chosen[id(which), bases] = (which, atom)
    return known[1]
