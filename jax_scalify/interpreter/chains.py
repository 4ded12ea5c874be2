"""Chains of alignments, and where they are cut.

XLA fuses a chain of elementwise equations into every kernel that reads its end, so each reader of a
residual stream would recompute the stream from the first layer on. Therefore a barrier cuts the
chain after 2 alignments, at a value with several readers. The size of the program that is compiled
for a CPU is then linear in the number of layers.

Example: in `h1 = h0 + f(h0)`, `h2 = h1 + f(h1)`, `h3 = h2 + f(h2)` with dynamic scales, the depths
of `h1` and `h2` are 1 and 2. `h2` has two readers and is pinned, so its depth becomes 0. The depth
of `h3` is then 1.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import is_var
from jax_scalify.base.pins import pin
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.value import Value

_MAX_DEPTH = 2 if _compat.keeps_barriers() else 8  # without barriers, a cut costs a division


def count_uses(jaxpr: Any, equations: Sequence[Any]) -> collections.Counter:
    """Count how often each variable is read. A result counts twice: the caller may reuse it."""
    atoms = itertools.chain(*(eqn.invars for eqn in equations), jaxpr.outvars, jaxpr.outvars)
    return collections.Counter(v for v in atoms if is_var(v))


def depth(eqn: Any, inputs: Sequence[Value], out: Any) -> int:
    """Return the number of alignments that XLA may fuse into each kernel that reads a result.

    Sums of wide dtypes at static scales do not count, because they need no alignment.
    """
    traits = traits_of(eqn.primitive.name)
    fuses = traits.elementwise or traits.is_view
    if not fuses or not isinstance(out, ScaledArray) or not out.shape:
        return 0
    aligns = traits.aligns and not (out.scale.is_static and dtypes.is_wide(out.dtype))
    return max(v.depth for v in inputs) + aligns


def cut(value: Value) -> Value:
    """Pin a value at the end of a long chain, so that it is computed once."""
    if not isinstance(value, Operand) or value.depth < _MAX_DEPTH:
        return value
    pinned = value.moved(pin(value.source), value.scale)
    return pinned.as_result(value.facts, home=value.home)
