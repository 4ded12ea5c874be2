"""Homes: the scales to which the leaves of a state return.

Scales feed back from step to step: from a weight to its gradient, its moments, its update, and back
to the weight. If `w + u` always had the larger scale, an estimate that is one octave too large
would be 50 octaves too large after 50 steps. A float32 or bfloat16 array holds any value at any
scale. So a sum in these dtypes leaves the function at the scale of the leaf that it replaces, its
*home*, and estimates do not reach the next step. Inside the function the sum has the larger scale,
and a cast to float16 uses it.

Example: a weight `0.5 * 2**0` and an update `2**-9 * 2**6`, whose scale is 9 octaves too large. At
the larger scale the sum is `0.0098 * 2**6`, and the next gradient, moments and update inherit
`2**6` from the weight. At home the sum is `0.625 * 2**0`, whatever the update's scale is.

A leaf with a static scale has a home too. A result at this home leaves `scalify` with the static
scale, even if other arguments have dynamic scales. So a step returns a state of the same structure.

`home_of_sum` in `rules/shared/holding.py` says which leaf a sum replaces, and `at_home` in
`interpreter/rescaling.py` brings the sum to its home. A leaf of scale 0, such as a moment before
the first step, has no home yet: it takes the scale of the term that is added to it.

In float16 a sum has the larger scale, because float16 data cannot hold every value at every scale.
If the leaf's scale is scalar, the sum's scale is made scalar too. Otherwise a step might be
compiled twice: a scan over layers gives the update of stacked weights one scale for each layer, and
the new weights would have a scale of another shape than the old weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.value import Value
from jax_scalify.scales.algebra import Scale

_IN_PLACE = ("same", "cast", "negated", "rescaled")


def home_of(eqn: Any, inputs: Sequence[Value], out: Operand) -> tuple[Scale | None, bool]:
    """Return `home` and `returns` of a result: those of the operand that it is a multiple of.

    The rules of `add`, `sub` and scatters set the home of a sum. A value that `match_scales` brings
    to the scale of a leaf is at home there.
    """
    if eqn.primitive.name == "match_scale":
        home = getattr(inputs[1], "home", None)
        return home if out.scale == home else None, False
    if dtypes.is_fp8(out.dtype):
        return None, False
    traits = traits_of(eqn.primitive.name)
    if traits.degree == "sum":
        return out.home, out.returns
    if traits.elements in ("joined", "placed"):
        return _home_of_choice(inputs, out)
    owners = [v for v in inputs if isinstance(v, Operand) and v.home is not None]
    # A product of two leaves, such as `w1 * w2`, is the next value of neither.
    if len(owners) != 1 or not _is_multiple(eqn, owners[0], inputs, out):
        return None, False
    (x,) = owners
    assert x.home is not None
    returns = x.returns and traits.elements != "rescaled"
    returns &= not dtypes.is_narrow(out.dtype)  # float16 data may not fit at home
    # The home moves with the scale: if `w` has a scale for each row, `w.T` has one for each column.
    if x.home == x.scale and traits.degree not in ("product", "quotient"):
        return out.scale, returns
    # A home that is not the scale was not moved by the rule.
    if x.home.ndim and not traits.elementwise:
        return None, False
    return x.home, returns


def _home_of_choice(inputs: Sequence[Value], out: Operand) -> tuple[Scale | None, bool]:
    """Return `home` and `returns` of a choice between next values of one leaf.

    In `where(ok, w - u, w)` and `clip(w - u, -4, 4)` every element belongs to the next `w`. But in
    `w - clip(w, -1, 1)` the clip is a term of the next `w`, and only `w` has a home.
    """
    arrays = [v for v in inputs if v.is_scalable and v.constant is None]
    cases = [v for v in arrays if isinstance(v, Operand) and v.shape == out.shape]
    home = cases[0].home if cases and len(cases) == len(arrays) else None
    if home is None or any(x.home != home for x in cases):
        return None, False
    if not any(x.facts.computed for x in cases):
        return None, False
    if out.scale == home:
        return home, False
    returns = not dtypes.is_narrow(out.dtype) and all(x.returns or x.scale == home for x in cases)
    return (home, True) if returns else (None, False)


def _is_multiple(eqn: Any, x: Operand, inputs: Sequence[Value], out: Operand) -> bool:
    """Return whether a result has the elements of an operand, times a number."""
    traits = traits_of(eqn.primitive.name)
    if traits.degree in ("product", "quotient") and traits.elementwise:
        is_dividend = traits.degree == "product" or x is inputs[0]
        return is_dividend and all(v is x or v.number is not None or not v.shape for v in inputs)
    # A transpose keeps all elements. A slice or a broadcast is no multiple of a leaf.
    if traits.elements == "moved":
        return x.size == out.size
    return traits.elements in _IN_PLACE
