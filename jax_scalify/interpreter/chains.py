"""Chains of alignments, and where they are cut.

XLA computes a chain of elementwise equations again in every kernel that uses its end, and would
follow a residual stream through all layers. A chain is cut after some alignments, where it has
several readers, which keeps the compiled program of a CPU linear in depth.
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

_MAX_DEPTH = 2 if _compat.keeps_barriers() else 8  # without barriers a cut costs a division


def count_uses(jaxpr: Any, equations: Sequence[Any]) -> collections.Counter:
    """Count how often each variable is read; a result may be read repeatedly by the caller."""
    atoms = itertools.chain(*(eqn.invars for eqn in equations), jaxpr.outvars, jaxpr.outvars)
    return collections.Counter(v for v in atoms if is_var(v))


def depth(eqn: Any, inputs: Sequence[Value], out: Any) -> int:
    """Count the alignments that XLA may fuse into the kernels of everything that uses a result.

    Those of wide dtypes at static scales are sums as in plain JAX.
    """
    traits = traits_of(eqn.primitive.name)
    fuses = traits.elementwise or traits.is_view
    if not fuses or not isinstance(out, ScaledArray) or not out.shape:
        return 0
    aligns = traits.aligns and not (out.scale.is_static and dtypes.has_wide_range(out.dtype))
    return max(v.depth for v in inputs) + aligns


def cut(value: Value) -> Value:
    """Compute a value once, if it has come through too many alignments."""
    if not isinstance(value, Operand) or value.depth < _MAX_DEPTH:
        return value
    pinned = value.moved(pin(value.source), value.scale)
    return pinned.as_result(value.facts, home=value.home)
