"""Sums that keep the scale of a leaf of the state. `interpreter/homes.py` explains why."""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from jax_scalify.base.dtypes import is_wide
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.scales.algebra import ONE, Scale

# A leaf of scale 0 takes a scale within 2**+-16, computed from the term that is added to it. For
# non-negative terms, such as squares, the limit is 2**+-32: `m` and `sqrt(v)` then have the same
# range, and the scale of `m / sqrt(v)` fits its values, whatever the scale of the gradient is.
LARGEST_HOME = 16
# A multiple of a leaf may be the leaf's next value if its factor is from 2**-2 to 2**2. A smaller
# multiple is, for example, the weight decay that is added to a gradient.
_SMALLEST_SHARE = -2
# The log2 of the length of a random walk of a thousand steps: sqrt(1000) is about 2**5.
_WALK = 5


def at_its_home(out: Operand, home: Scale | None, *terms: Operand) -> Operand:
    """Return the sum `out` with its `home`, the result of `home_of_sum`.

    Without a home, as in float16, the sum has the larger scale of its terms. It is at home if this
    is the static scale of a term's leaf.
    """
    if home is not None:
        return out.known(home=home, returns=True)
    homes = (x.home for x in terms if x.shape == out.shape)
    is_home = out.scale.is_static and out.scale in homes
    return out.known(home=out.scale if is_home else None)


def home_of_sum(ctx: RuleContext, lhs: Operand, rhs: Operand) -> Scale | None:
    """Return the home of the leaf that a sum replaces; None if there is no such leaf."""
    aval = ctx.out_avals[0]
    # A sum of cotangents is a gradient, not a new leaf, even if one of them is `2 * w`.
    if ctx.primitive.name == "add_any" or not is_wide(aval.dtype):
        return None
    # Computed values of rank 0 are numbers too, and may be the update of such a leaf.
    if any(x.number is not None and (aval.shape or x.constant is not None) for x in (lhs, rhs)):
        return None
    found = [x for x in (lhs, rhs) if _may_keep(x, aval)]
    if len(found) > 1:  # in `w + 0.9 * v`, only `w` has no factor
        found = [x for x in found if x.mantissa == 1 and x.scale == x.home]
    if len(found) != 1:
        return None
    keeper = found[0]
    other = rhs if keeper is lhs else lhs
    return _held_scale(keeper, other, keeper is lhs or ctx.primitive is not lax.sub_p)


def in_unit(x: Operand, unit: Scale) -> Any:
    """Return the array `value / unit` of a term of a sum. The unit is 1, or the home of the sum.

    A sum that is computed in the unit in which it leaves the function is one kernel. A sum of
    values would need a second kernel for each leaf of the state, to divide it by the home. A leaf
    of scale 0 holds zeros, which are the same in every unit.
    """
    if unit.is_one:
        return x.value
    # Where the home of a leaf is not 0, the unit equals it, so the leaf is not multiplied.
    return x.at_unit(x.home if x.home is not None and _holds(unit, x.home) else unit)


def _may_keep(x: Operand, aval: Any) -> bool:
    if x.home is None or x.home.may_leave_range or x.shape != aval.shape or x.dtype != aval.dtype:
        return False
    share = x.scale / x.home
    return not share.is_static or _SMALLEST_SHARE <= share.exponent <= -_SMALLEST_SHARE


def of_leaf_shape(scale: Scale, *terms: Operand) -> Scale:
    """Return `scale`, made scalar if all leaves among the terms have scalar scales."""
    leaves = [x for x in terms if x.home is not None and x.home == x.scale]
    if scale.ndim and leaves and not any(x.scale.ndim for x in leaves):
        return scale.largest
    return scale


def _held_scale(keeper: Operand, other: Operand, is_sum: bool) -> Scale:
    """Return the scale of a sum: the keeper's home or, where it is 0, the leaf's expected size.

    A moment `b * m + (1 - b) * g` starts from 0 and becomes a sum of many terms. A difference
    `g - m` does not.
    """
    home, added = keeper.home, other.home
    assert home is not None
    if home.is_static:
        return home
    if added is not None and _holds(added, home):  # x + c * (y - x) converges to y
        return added
    grown = other.scale * _growth(keeper, other, is_sum)
    if not home.ndim:
        grown = grown.largest
    limit = 2 * LARGEST_HOME if other.facts.nonneg else LARGEST_HOME
    table = home.table
    # In `x + x @ w` the other term is 0 wherever the home is.
    vanishes = any(power > 0 and atom in grown.vanishes for atom, power in home.factors)
    if home.is_nonzero or grown.is_zero or (not table.narrow and vanishes):
        return home
    return table.held(home, grown, limit)


def _holds(scale: Scale, home: Scale) -> bool:
    """Return whether a scale equals a home wherever the home is not 0."""
    if scale == home or scale.is_static:
        return scale == home
    atom = scale.only_factor
    return atom is not None and scale.exponent == 0 and atom.holds == home


def _growth(keeper: Operand, other: Operand, is_sum: bool) -> Scale:
    """Return the size of `x` over the size of `y` after many steps of `x = b * x + y`.

    The ratio is `1 / (1 - b)` if `y` is non-negative, else `sqrt(1 / (1 - b**2))`. For `b = 0.999`,
    these round down to 2**9 and 2**4. For `b >= 1`, as for a weight that starts from 0, it is 2**5,
    the length of a random walk of a thousand steps.
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
