"""Evaluate values with equal elements once, as a number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.base import dtypes, pow2
from jax_scalify.interpreter.constants import fold_constants
from jax_scalify.interpreter.facts import facts_of
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.value import Plain, Value, in_dtype
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import Scale


def uniform(eqn: Any, inputs: list[Value]) -> Value | None:
    """Evaluate an equation on 0-d numbers if each operand has equal elements.

    Constants are evaluated while tracing. Return None if elements of an operand may differ, or if
    the primitive must see the arrays.
    """
    name = eqn.primitive.name
    if name == "empty2" and dtypes.is_scalable(eqn.outvars[0].aval.dtype):
        # JAX fills a branch's unused residuals with `empty`. Zeros take any scale.
        aval = eqn.outvars[0].aval
        return Plain.filled(aval, np.zeros((), aval.dtype)[()])
    if (
        name in ("optimization_barrier", "pin", "store")
        and len(inputs) == 1
        and inputs[0].constant is not None
    ):
        return inputs[0]
    if eqn.primitive.multiple_results or not inputs:
        return None
    if any(v.number is None or v.is_scaled for v in inputs):
        return None
    if name == "reduce_sum" and not eqn.params["axes"]:
        return inputs[0]
    if traits_of(name).is_view and len(inputs) == 1:
        return _moved(eqn, inputs[0])
    return _computed(eqn, inputs) if traits_of(name).elementwise else None


def _moved(eqn: Any, value: Value) -> Value | None:
    """Return the result of an equation that moves, repeats or picks equal elements."""
    aval = eqn.outvars[0].aval
    if not value.shape and not aval.shape:
        return value
    if eqn.primitive.name.startswith(("reduce", "cum")) and 0 in value.shape:
        return None
    return Plain.filled(aval, value.number, facts=value.facts)


def _computed(eqn: Any, inputs: list[Value]) -> Value | None:
    """Return the result of an elementwise equation; None if it cannot be a number."""
    aval, name = eqn.outvars[0].aval, eqn.primitive.name
    if all(v.constant is not None for v in inputs):
        out = _of_constants(eqn, inputs)
    elif any(v.is_beyond for v in inputs):
        out = None
    elif aval.dtype == inputs[0].dtype and (
        traits_of(name).elements == "same" or name == "convert_element_type"
    ):
        out = inputs[0].number  # the same tracer, so that it is split only once
    else:
        out = _bind_uniform(eqn, inputs)
    if out is None:
        return None
    facts = facts_of(eqn, inputs)
    if aval.shape or out.dtype != aval.dtype:
        return Plain.filled(aval, out, facts=facts)
    return Plain.of(out, facts=facts, known_scale=_symbolic_scale(eqn, inputs))


def _of_constants(eqn: Any, inputs: list[Value]) -> Any:
    """Return the result of an equation of constants; None if XLA's dtypes do not hold them."""
    out = fold_constants(eqn, [v.constant for v in inputs])
    if out is not None or any(v.is_beyond for v in inputs):
        return out
    with jax.ensure_compile_time_eval():
        return np.asarray(_bind_uniform(eqn, inputs))[()]


def _bind_uniform(eqn: Any, inputs: list[Value]) -> Any:
    if eqn.primitive.name == "convert_element_type" and dtypes.is_fp8(eqn.params["new_dtype"]):
        return dtypes.cast(jnp.asarray(inputs[0].number), eqn.params["new_dtype"])
    return eqn.primitive.bind(*(in_dtype(v.number, v.dtype) for v in inputs), **eqn.params)


def _symbolic_scale(eqn: Any, inputs: list[Value]) -> Scale | None:
    """Return the symbolic result of arithmetic on scales from `get_data_and_scale`, or None."""
    name = eqn.primitive.name
    if not any(v.known_scale is not None for v in inputs):
        return None
    known = [v.known_scale if v.known_scale is not None else _constant_scale(v) for v in inputs]
    scales = [s for s in known if s is not None]
    if len(scales) < len(known):
        return None
    if name == "mul":
        return scales[0] * scales[1]
    if name == "div":
        return scales[0] / scales[1]
    if name == "max":
        return algebra.join(*scales)
    if name in ("integer_pow", "square"):
        return scales[0] ** eqn.params.get("y", 2)
    if name in ("convert_element_type", "copy", "stop_gradient"):
        return scales[0] if eqn.outvars[0].aval.dtype == inputs[0].dtype else None
    return None


def _constant_scale(value: Value) -> Scale | None:
    number = value.constant
    if number is None or number.dtype.kind not in "fiu" or not pow2.is_power_of_two(number):
        return None
    return Scale.of(number)
