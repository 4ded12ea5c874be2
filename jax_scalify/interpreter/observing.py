"""What `jsa.numerics` sees of a scalified function: each value with its scale.

While a report is made, the transform puts an equation `observe` behind every equation of the user's
that it interprets: the identity on its results, with all operands at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_scalify.base.jaxprs import sub_jaxprs
from jax_scalify.interpreter.corrections import rounds
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.value import Value
from jax_scalify.primitives.custom_scale import custom_scale_p
from jax_scalify.scales.table import ScaleTable

# The name of the function that holds what was interpreted.
CALL_NAME = "jax_scalify_observed"

# The value of a `jax.make_user_context` is part of every `jax.jit` cache key.
_observing = jax.make_user_context(default_value=False)


def observing() -> Any:
    """A context in which `scalify` makes its values visible."""
    return _observing(True)


def is_observing() -> bool:
    """Tell whether values are to be made visible."""
    return bool(_observing.value)


@dataclasses.dataclass(frozen=True, eq=False)
class Observed:
    """An equation of the user's, and how the operands of `observe` belong to it.

    Attributes:
        eqn: the equation.
        results: for each operand pair of a result, its position among the equation's results.
        scaled: for each result, then for each operand of the equation, whether it has a scale,
            which then follows it.
        makers: of each variable of the same jaxpr the equation that makes it.
        names: of the equation's results, in a function with a calibration.
    """

    eqn: Any
    results: tuple[int, ...]
    scaled: tuple[bool, ...]
    makers: Mapping[Any, Any]
    names: tuple[str, ...] = ()

    @property
    def is_rounding(self) -> bool:
        """Whether it is a cast, known by name, whose operand tells what is lost."""
        return bool(self.names) and rounds(self.eqn)

    def pairs(self, arrays: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return results and operands as pairs of data and scale; None for no scale."""
        rest = iter(arrays)
        return [(next(rest), next(rest) if scaled else None) for scaled in self.scaled]


observe_p = jex_core.Primitive("observe")
observe_p.multiple_results = True


def _identity(*arrays: Any, observed: Observed) -> list[Any]:
    return [data for data, _ in observed.pairs(arrays)[: len(observed.results)]]


def _jvp(primals: Any, tangents: Any, *, observed: Observed) -> Any:
    moved = [ad.instantiate_zeros(t) for t in _identity(*tangents, observed=observed)]
    return observe_p.bind(*primals, observed=observed), moved


def _batch(args: Any, dims: Any, *, observed: Observed) -> Any:
    return observe_p.bind(*args, observed=observed), _identity(*dims, observed=observed)


observe_p.def_impl(_identity)
observe_p.def_abstract_eval(_identity)
ad.primitive_jvps[observe_p] = _jvp
batching.primitive_batchers[observe_p] = _batch
mlir.register_lowering(observe_p, mlir.lower_fun(_identity, multiple_results=True))


def observed(
    eqn: Any,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    table: ScaleTable,
    makers: Mapping[Any, Any],
    names: tuple[str, ...] = (),
) -> list[Value]:
    """Return an equation's results, as `observe` gives them back."""
    results = tuple(i for i, value in enumerate(outputs) if _is_array(value))
    # What an equation holds is observed inside of it; but a rule stands for a whole function.
    inside = eqn.primitive is not custom_scale_p and sub_jaxprs(eqn.params)
    if inside or not results:
        return list(outputs)
    pairs = [_pair(outputs[i], table) for i in results] + [_pair(v, table) for v in inputs]
    info = Observed(eqn, results, tuple(scale is not None for _, scale in pairs), makers, names)
    arrays = [jnp.asarray(a) for pair in pairs for a in pair if a is not None]
    values = list(outputs)
    for i, data in zip(results, observe_p.bind(*arrays, observed=info), strict=True):
        old = outputs[i]
        if isinstance(old, Operand):
            values[i] = old.as_pair(data, old.scale)
        else:
            number = data if old.number is not None else None
            values[i] = dataclasses.replace(old, array=data, number=number)
    return values


def _is_array(value: Value) -> bool:
    """Whether a value is floating point, computed, and has an array."""
    if isinstance(value, Operand):
        return True
    return value.is_scalable and value.array is not None and value.constant is None


def _pair(value: Value, table: ScaleTable) -> tuple[Any, Any]:
    if isinstance(value, Operand):
        scale = value.scale
        return value.data, np.float32(scale.value) if scale.is_static else table.output(scale)
    return (value.number if value.array is None else value.array), None


def as_call(function: Callable) -> Callable:
    """Mark a function as interpreted."""

    def call(*arrays: Any) -> Any:
        return function(*arrays)

    call.__name__ = CALL_NAME
    return jax.jit(call)
