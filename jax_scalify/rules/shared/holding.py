"""Sums that keep the scale of a state's leaf: why is told in `interpreter/homes.py`."""

from __future__ import annotations

import math
from typing import Any

from jax_scalify.base.dtypes import has_wide_range
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.rules.shared.along_axes import largest
from jax_scalify.scales.algebra import ONE, Scale

# A leaf whose scale is 0 takes one within 2**+-16 of what is added to it. Squares are at most 2**32
# (`products.py`), so that a quotient `m / sqrt(v)` has a scale of its own size however wrong that
# of the gradient is.
LARGEST_HOME = 16
# A term that is a smaller part of a leaf is no leaf's next value: weight decay in a gradient.
_SMALLEST_SHARE = -2
# The log2 of how far a thousand steps at random lead.
_WALK = 5


def at_its_home(
    ctx: RuleContext, out: Operand, *terms: Operand, negate_rhs: bool = False, sums: bool = True
) -> Operand:
    """A sum with the home of the leaf that it replaces, at which it leaves the function."""
    keeper = keeper_of(ctx, *terms) if sums else None
    if keeper is None:
        return out
    other = terms[1 - keeper]
    is_sum = keeper == 0 or not negate_rhs
    return out.at_home(held_scale(terms[keeper], other, is_sum), returns=True)


def keeper_of(ctx: RuleContext, *terms: Operand) -> int | None:
    """The position of the term whose leaf a sum replaces; None if it is not one of them alone."""
    aval = ctx.out_avals[0]
    if ctx.primitive.name == "add_any" or not has_wide_range(aval.dtype):
        return None
    if any(x.number is not None for x in terms):
        return None
    found = [i for i, x in enumerate(terms) if _may_keep(x, aval)]
    if len(found) > 1:  # w + 0.9 * v
        found = [i for i in found if terms[i].mantissa == 1 and terms[i].scale == terms[i].home]
    return found[0] if len(found) == 1 else None


def _may_keep(x: Operand, aval: Any) -> bool:
    if x.home is None or x.home.may_leave_range or x.shape != aval.shape or x.dtype != aval.dtype:
        return False
    share = x.scale / x.home
    return not share.is_static or _SMALLEST_SHARE <= share.exponent <= -_SMALLEST_SHARE


def of_leaf_shape(scale: Scale, *terms: Operand) -> Scale:
    """The scale of a sum: one for all elements, where each leaf among the terms has one."""
    leaves = [x for x in terms if x.home is not None and x.home == x.scale]
    if scale.ndim and leaves and not any(x.scale.ndim for x in leaves):
        return largest(scale)
    return scale


def held_scale(keeper: Operand, other: Operand, is_sum: bool = True) -> Scale:
    """The scale of a sum: the keeper's home or, where that is 0, what the leaf will grow to be.

    A moment `b * m + (1 - b) * g` has a sum of many terms in the end; a difference `g - m` has not.
    """
    home, added = keeper.home, other.home
    assert home is not None
    if added is not None and _holds(added, home):  # x + c * (y - x) is nearly y in the end
        return added
    grown = other.scale * _growth(keeper, other, is_sum)
    if not home.ndim:
        grown = largest(grown)
    limit = 2 * LARGEST_HOME if other.facts.nonneg else LARGEST_HOME
    table = home.factors[0][0].table
    if home.is_nonzero or grown.is_zero or (not table.narrow and _vanishes_with(grown, home)):
        return home
    return table.held(home, grown, limit)


def _holds(scale: Scale, home: Scale) -> bool:
    """Tell whether a scale is a home, wherever that is not 0."""
    (atom, power), *others = scale.factors
    is_atom = not others and power == 1 and scale.exponent == 0
    return scale == home or (is_atom and atom.holds == home)


def _vanishes_with(scale: Scale, home: Scale) -> bool:
    """Tell whether a scale is 0 wherever a home is, as in `x + x @ w`."""
    return any(power > 0 and atom in scale.vanishes for atom, power in home.factors)


def _growth(keeper: Operand, other: Operand, is_sum: bool) -> Scale:
    """By how much x outgrows y in `x = b * x + y`.

    If no y is negative by `1 / (1 - b)`, else by the root of `1 / (1 - b**2)`; where b is 1, as for
    a weight that starts from 0, as a walk of a thousand steps at random does.
    """
    if not is_sum:
        return ONE
    share = keeper.scale / keeper.home
    if not share.is_static or share.is_zero:
        return ONE
    kept = abs(math.ldexp(keeper.mantissa, int(share.exponent)))
    if kept >= 1:
        return Scale(_WALK)
    grown = 1 / (1 - kept) if other.facts.nonneg else 1 / math.sqrt(1 - kept**2)
    return Scale(math.floor(math.log2(grown)))
