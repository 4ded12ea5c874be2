"""Arrays of narrow dtypes that a matmul and other equations read are stored once.

XLA for GPUs drops a rounding to float16 before a float32 equation (`xla_allow_excess_precision`).
If a matmul reads the same array, XLA stores it twice: in float32 for the other equations, and in
float16 for the matmul. A barrier (`base.pins.store`) keeps one float16 array for all readers.

Example: the cotangent of `x @ w + b` is read by two matmuls, and by the sum that gives the gradient
of `b`. Without the barrier, the sum reads a float32 array of twice the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import is_var
from jax_scalify.base.pins import store
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.value import Value

_MATMULS = ("dot_general", "conv_general_dilated")


def read_by_matmuls(equations: Sequence[Any]) -> set[Any]:
    """Return the variables that both a matmul and another equation read."""
    by_matmuls: set[Any] = set()
    by_others: set[Any] = set()
    for eqn in equations:
        readers = by_matmuls if eqn.primitive.name in _MATMULS else by_others
        readers.update(v for v in eqn.invars if is_var(v))
    return by_matmuls & by_others


def stored(value: Value) -> Value:
    """Return the value with a barrier, if its dtype is narrow and it is rounded already."""
    if not isinstance(value, Operand) or value.is_widened or not dtypes.is_narrow(value.dtype):
        return value
    x = value.moved(store(value.source), value.scale)
    return x.as_result(value.facts, depth=value.depth, home=value.home)
