"""Evaluate values with equal elements once, as a number."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.base import dtypes, pow2
from jax_scalify.interpreter.facts import facts_of
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.value import Plain, Value, in_dtype
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import Scale

# Primitives that NumPy evaluates on constants, because XLA would compile a program for each.
_IN_NUMPY = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "square": np.square,
    "sqrt": np.sqrt,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "select_n": lambda which, *cases: cases[int(which)],
}
_OF_EMPTY = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")
_ON_SCALES = {"mul": operator.mul, "div": operator.truediv, "max": algebra.join}


def uniform(eqn: Any, inputs: Sequence[Value]) -> Value | None:
    """Evaluate an equation on 0-d numbers if each operand has equal elements.

    Constants are evaluated while tracing. Return None if elements of an operand may differ, or if
    the primitive must see the arrays.
    """
    name = eqn.primitive.name
    if name == "empty2" and dtypes.is_scalable(eqn.outvars[0].aval.dtype):
        # JAX fills a branch's unused residuals with `empty`. Zeros take any scale.
        return Plain.filled(eqn.outvars[0].aval, np.zeros((), eqn.outvars[0].aval.dtype)[()])
    if name in _OF_EMPTY and 0 in inputs[0].shape and inputs[0].is_scalable:
        return _of_empty(eqn)
    if not inputs or any(v.number is None for v in inputs):
        return None
    value, traits = inputs[0], traits_of(name)
    if name in ("optimization_barrier", "pin", "store") and len(inputs) == 1:
        return value if value.constant is not None else None
    if eqn.primitive.multiple_results:
        return None
    if name == "reduce_sum" and not eqn.params["axes"]:
        return value
    if traits.is_view and len(inputs) == 1:  # equal elements are moved, repeated or picked
        aval = eqn.outvars[0].aval
        if not value.shape and not aval.shape:
            return value
        # The maximum of no elements is -inf, whatever the number is.
        is_empty = name.startswith(("reduce", "cum")) and 0 in value.shape
        return None if is_empty else Plain.filled(aval, value.number, facts=value.facts)
    return _computed(eqn, inputs) if traits.elementwise else None


def _of_empty(eqn: Any) -> Value | None:
    """Return a reduction of an empty array, such as the maximum -inf; None if it is empty too."""
    (given,), aval = (v.aval for v in eqn.invars), eqn.outvars[0].aval
    if 0 in aval.shape:
        return None
    with jax.ensure_compile_time_eval():
        out = eqn.primitive.bind(jnp.zeros(given.shape, given.dtype), **eqn.params)
    return Plain.filled(aval, np.asarray(out).reshape(-1)[0])


def _computed(eqn: Any, inputs: Sequence[Value]) -> Value | None:
    """Return the result of an elementwise equation; None if it cannot be a number."""
    aval, name = eqn.outvars[0].aval, eqn.primitive.name
    if all(v.constant is not None for v in inputs):
        out = _of_constants(eqn, inputs)
    # Float16 does not hold 2**24. The rule multiplies `2**24 * rate` as data and scales.
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


def _of_constants(eqn: Any, inputs: Sequence[Value]) -> Any:
    """Return the result of an equation of constants; None if XLA's dtypes do not hold them.

    If float16 does not hold the result as a normal number, such as `2**24` or `2**-20`, the result
    is returned in float32.
    """
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    constants, is_beyond = [v.constant for v in inputs], any(v.is_beyond for v in inputs)
    kinds = {c.dtype.kind for c in constants}
    if dtype == np.float16 or is_beyond:
        constants = [np.float64(c) if c.dtype.kind == "f" else c for c in constants]
    out = None
    with np.errstate(all="ignore"):
        if name == "convert_element_type":
            if kinds <= set("biuf") and np.dtype(dtype).kind == "f":
                (x,) = constants
                out = _held(np.float64(x), dtype) if dtype == np.float16 else x.astype(dtype)
        # NumPy's quotient of integers is a float, XLA's is an integer.
        elif name in _IN_NUMPY and (name != "div" or kinds == {"f"}):
            out = _held(_IN_NUMPY[name](*constants), dtype)
    if out is not None or is_beyond:
        return out
    # Any other function, such as `exp(0.5)`, is evaluated by JAX at once, outside the trace.
    with jax.ensure_compile_time_eval():
        return np.asarray(_bind_uniform(eqn, inputs))[()]


def _held(number: Any, dtype: Any) -> Any:
    """Return a number in a dtype, or in float32 if it does not fit; None if the kinds differ."""
    if number.dtype == dtype:
        return number
    if number.dtype.kind != np.dtype(dtype).kind:
        return None
    size, finfo = abs(np.float64(number)), np.finfo(dtype)
    # Comparisons with nan are False, so a dtype holds nan.
    holds = size == 0 or not size < finfo.tiny and (not size > finfo.max or np.isinf(size))
    return number.astype(dtype if holds else np.float32)


def _bind_uniform(eqn: Any, inputs: Sequence[Value]) -> Any:
    if eqn.primitive.name == "convert_element_type" and dtypes.is_fp8(eqn.params["new_dtype"]):
        return dtypes.cast(jnp.asarray(inputs[0].number), eqn.params["new_dtype"])
    return eqn.primitive.bind(*(in_dtype(v.number, v.dtype) for v in inputs), **eqn.params)


def _symbolic_scale(eqn: Any, inputs: Sequence[Value]) -> Scale | None:
    """Return the symbolic result of arithmetic on scales from `get_data_and_scale`, or None."""
    name = eqn.primitive.name
    if all(v.known_scale is None for v in inputs):
        return None
    scales: list[Any] = [v.known_scale or _constant_scale(v) for v in inputs]
    if None in scales:
        return None
    if name in _ON_SCALES:
        return _ON_SCALES[name](*scales)
    if name in ("integer_pow", "square"):
        return scales[0] ** eqn.params.get("y", 2)
    is_same = eqn.outvars[0].aval.dtype == inputs[0].dtype
    is_copy = is_same and name in ("convert_element_type", "copy", "stop_gradient")
    return scales[0] if is_copy else None


def _constant_scale(value: Value) -> Scale | None:
    number = value.constant
    if number is None or number.dtype.kind not in "fiu" or not pow2.is_power_of_two(number):
        return None
    return Scale.of(number)
