"""Gates: bounded factors that are functions of what they multiply, as in `x * sigmoid(x)`.

The mean of a sigmoid is 1/2, and so is its scale: a gradient that has come through the gates of 32
steps of an LSTM is half as large after each. An activation is another matter. Where `x` is large,
`silu(x)` and `gelu(x)` are `x`, and their derivatives are 1: at half of the scale of `x` the data
of an outlier would leave the range of float16. A product with such a gate keeps the scale of the
other factor, in both passes (Balanca et al., "Scalify", 2024, section 3.2.1).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_scalify.base.jaxprs import applied, is_var, makers
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.value import Value

# Functions with results from 0 to twice their scale; and those that have them if 1 is added.
_BOUNDED, _FROM_MINUS_ONE = ("logistic", "erfc"), ("tanh", "erf")
_MULTIPLES = ("mul", "div", "neg", "convert_element_type")
_MAX_LENGTH = 32  # equations of an activation


def gates(jaxpr: Any) -> set[Any]:
    """Return the variables of a jaxpr that are bounded by twice their scale, and gate a factor."""
    made, found = makers(jaxpr), set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "mul" or not all(map(is_var, eqn.invars)):
            continue
        for factor, gate in (eqn.invars, eqn.invars[::-1]):
            if _is_bounded(gate, made) and _is_function_of(gate, _multiplied(factor, made), made):
                found.add(gate)
    return found


def as_gate(x: Value) -> Value:
    """The same value, known as a gate."""
    if not isinstance(x, Operand):
        return x
    return Operand.of(x, dataclasses.replace(x.facts, gate=True))


def _is_bounded(var: Any, made: dict[Any, Any]) -> bool:
    """Tell whether a variable is `logistic`, `erfc`, `1 + tanh`, `1 + erf` or a multiple."""
    var = _multiplied(var, made)
    eqn = made.get(var)
    if eqn is None:
        return False
    body = applied(eqn)
    if body is not None:
        body = getattr(body, "jaxpr", body)
        result = body.outvars[eqn.outvars.index(var)]
        return is_var(result) and _is_bounded(result, makers(body))
    if eqn.primitive.name == "add":
        terms = [made.get(_multiplied(v, made)) for v in _variables(eqn)]
        names = [e.primitive.name for e in terms if e is not None]
        return len(terms) == 1 and bool(names) and names[0] in _FROM_MINUS_ONE
    return eqn.primitive.name in _BOUNDED


def _multiplied(var: Any, made: dict[Any, Any]) -> Any:
    """The variable that a variable is a multiple of, by numbers of the program."""
    while (eqn := made.get(var)) is not None and eqn.primitive.name in _MULTIPLES:
        if len(_variables(eqn)) != 1:
            break
        (var,) = _variables(eqn)
    return var


def _is_function_of(var: Any, source: Any, made: dict[Any, Any]) -> bool:
    """Tell whether a variable is computed from another one alone, element by element."""
    to_do, seen = [var], set()
    while to_do:
        var = to_do.pop()
        if var is source or var in seen:
            continue
        seen.add(var)
        eqn = made.get(var)
        if eqn is None or len(seen) > _MAX_LENGTH or not _is_elementwise(eqn):
            return False
        to_do += _variables(eqn)
    return source not in seen and bool(seen)


def _is_elementwise(eqn: Any) -> bool:
    body = applied(eqn)
    if body is not None:
        return all(map(_is_elementwise, getattr(body, "jaxpr", body).eqns))
    traits = traits_of(eqn.primitive.name)
    return traits.elementwise or traits.elements == "cast"


def _variables(eqn: Any) -> list[Any]:
    """The operands of an equation that are arrays: not its numbers."""
    return [v for v in eqn.invars if is_var(v) and v.aval.shape]
