"""Homes: the scales that the leaves of a state come back to.

Scales feed back from step to step: a weight's into its gradient's, into the moments', into the
update's, and from there into the weight's again. Were the scale of `w + u` the larger one of both,
an estimate that is one octave too large would be 50 octaves too large after 50 steps. Data of
float32 or bfloat16 has room for any value beside any scale. There a sum leaves the function at the
scale of the leaf that it replaces, its *home*, and no estimate gets into the next step. Inside of
the function it has the larger scale, which a cast to float16 asks for.

Example: a weight `0.5 * 2**0` and an update `2**-9 * 2**6`, whose scale is 9 octaves too large.
The larger scale would give `0.0098 * 2**6`, which the next update finds. At home the sum is
`0.625 * 2**0`, whatever the update's scale is.

A leaf of scale 0, as moments have before the first step, has no home yet. It takes that of what is
added to it: see `rules/shared/holding.py`.

In float16 a sum has the larger scale, since its data has no such room. But where the leaf has one
scale, the sum has one too: a scan over layers gives the update of stacked weights a scale for each
layer, and a step whose result has other shapes than its argument would be compiled twice.
"""

from __future__ import annotations

from typing import Any

from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.value import Value
from jax_scalify.scales.algebra import Scale

_IN_PLACE = ("same", "cast", "negated", "rescaled")


def leaf_home(data: Any, scale: Scale) -> Scale | None:
    """The home of an argument: its dynamic scale, if its data has 16 bits or more."""
    return None if scale.is_static or dtypes.is_narrow_float(data.dtype) else scale


def with_home(eqn: Any, inputs: list[Value], out: Operand) -> Operand:
    """An equation's result with the home of the operand that it is a multiple of.

    A rule gives that of a sum.
    """
    if dtypes.is_narrow_float(out.dtype):
        return out.at_home(None)
    traits = traits_of(eqn.primitive.name)
    if traits.degree == "sum":
        return out
    owners = [v for v in inputs if isinstance(v, Operand) and v.home is not None]
    if len(owners) != 1 or not _is_multiple(eqn, owners[0], inputs, out):
        return out.at_home(None)
    (x,) = owners
    assert x.home is not None
    returns = x.returns and traits.elements != "rescaled"
    returns &= not dtypes.has_short_range(out.dtype)  # float16 has no room for it
    if x.home == x.scale and traits.degree not in ("product", "quotient"):
        return out.at_home(out.scale, returns)
    moves = x.home.ndim and not traits.elementwise
    return out.at_home(None if moves else x.home, returns and not moves)


def _is_multiple(eqn: Any, x: Operand, inputs: list[Value], out: Operand) -> bool:
    """Tell whether a result has the elements of an operand, times a number."""
    traits = traits_of(eqn.primitive.name)
    if traits.degree in ("product", "quotient") and traits.elementwise:
        is_dividend = traits.degree == "product" or x is inputs[0]
        return is_dividend and all(v is x or v.number is not None or not v.shape for v in inputs)
    if traits.elements == "moved":
        return x.size == out.size
    return traits.elements in _IN_PLACE
