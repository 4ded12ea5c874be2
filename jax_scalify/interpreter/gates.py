"""Gates: bounded factors that depend on the value that they multiply, as in `x * sigmoid(x)`.

The mean of a sigmoid is 1/2, and so is its scale. This scale suits the gates of an LSTM, which
halve a gradient in each step. In an activation it is wrong: for large `x`, `silu(x)` and `gelu(x)`
are `x`, and their derivatives are 1. At half of `x.scale`, the data of an outlier would leave the
range of float16. A product with a gate therefore has the scale of the other factor, in both passes
(Balanca et al., "Scalify", 2024, section 3.2.1).

A multiple of a gate is a gate too, and so is `1 - gate` (`interpreter/facts.py`). In `glu`, the
gate is computed from one half of an array and multiplies the other.

The derivative is `gate(x) + x * gate'(x)`. The second term is smaller, because a gate is constant
for large `x`, but its scale may be larger: the scale of gelu's second term contains `x**3`. So the
first term *leads*: the cotangent of `x` has the first term's scale.
"""

from __future__ import annotations

import collections
from typing import Any

from jax_scalify.base.jaxprs import applied, is_var, makers
from jax_scalify.interpreter.traits import traits_of

# Functions `f` with `0 <= f <= 2 * scale`, and functions `f` for which this holds for `1 + f`.
_BOUNDED, _FROM_MINUS_ONE = ("logistic", "erfc"), ("tanh", "erf")
_MULTIPLES = ("mul", "div", "neg", "convert_element_type", "copy")
_LARGEST = 8  # a larger constant factor may make the second term of an activation exceed the first
_MAX_LENGTH = 64  # the most equations of an activation and its derivative


def gates_of(jaxpr: Any) -> tuple[set[Any], set[Any]]:
    """Return the gates of a jaxpr and its leading terms, without those in jaxprs of its equations.

    A gate is a factor that is bounded by twice its scale and depends on the value that it
    multiplies. A leading term gives a sum its scale, whatever the other term's scale is.
    """
    made = makers(jaxpr)
    sources: dict[Any, Any] = {}  # of each gate, the variable that it is a function of
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "mul" or not all(map(is_var, eqn.invars)):
            continue
        # Either operand may be the gate. In `(0.5 * x) * (1 + tanh(x))` the other operand is a
        # multiple of the source `x`.
        for factor, gate in (eqn.invars, eqn.invars[::-1]):
            source = _multiplied(factor, made)
            # `gate * gate` is no activation. A gate of an LSTM fails in `_passed`: it is no
            # elementwise function of the cell state that it multiplies.
            if gate is not source and _is_bounded(gate, made):
                of_source = (_passed(gate, {x}, made) for x in _with_other_half(source, made))
                if any(passed is not None for passed in of_source):
                    sources[gate] = source
    return set(sources), _leading(jaxpr, made, sources) if sources else set()


def _with_other_half(var: Any, made: dict[Any, Any]) -> list[Any]:
    """Return a variable; if it is half of an array, as in `glu`, both halves."""
    eqn = made.get(var)
    if eqn is None or eqn.primitive.name != "split" or len(eqn.outvars) != 2:
        return [var]
    return list(eqn.outvars)


def _leading(jaxpr: Any, made: dict[Any, Any], sources: dict[Any, Any]) -> set[Any]:
    """Return the leading terms: `cotangent * gate`, and sums that contain such a term."""
    count = collections.Counter(v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v))
    count.update(v for v in jaxpr.outvars if is_var(v))
    led: dict[Any, tuple[Any, Any]] = {}  # the gate's source and the cotangent, by variable
    leading = set()
    for eqn in jaxpr.eqns:
        # This may be `cotangent * gate(x)`, the first term of the derivative.
        for x, gate in (eqn.invars, eqn.invars[::-1]) if eqn.primitive.name == "mul" else ():
            if is_var(x) and is_var(gate) and gate in sources:
                led[eqn.outvars[0]] = sources[gate], _multiplied(x, made)
        if eqn.primitive.name != "add_any":
            continue
        for x, other in (eqn.invars, eqn.invars[::-1]):
            start = x if x in led else _multiplied(x, made)
            # The fact `leads` is read by every sum of `x`, so `x` must have no other reader.
            if count[x] > 1 or start not in led:
                continue
            source, cotangent = led[start]
            passed = _passed(other, {source, cotangent}, made)
            # `x * gate(x)` has the source in the place of a cotangent: it is the activation itself.
            if source is not cotangent and passed and _is_of_gate(passed, made):
                leading.add(x)
                led[eqn.outvars[0]] = source, cotangent
                break
    return leading


def _passed(var: Any, sources: set[Any], made: dict[Any, Any]) -> set[Any] | None:
    """Return the variables that `var` is computed from, down to `sources`.

    Return None if an equation on the way is not elementwise, if `var` depends on another variable,
    or if it does not depend on all of `sources`.
    """
    to_do, seen = [var], set()
    while to_do:
        var = to_do.pop()
        if var in seen:
            continue
        seen.add(var)
        eqn = made.get(var)
        if var in sources:
            continue
        if eqn is None or len(seen) > _MAX_LENGTH or not _is_elementwise(eqn):
            return None
        to_do += _variables(eqn)
    return seen if sources <= seen else None


def _is_of_gate(variables: set[Any], made: dict[Any, Any]) -> bool:
    """Return whether variables come from a bounded function, without large constant factors.

    In `x * gate(x) + 1e6 * gate(x)` the second term is larger.
    """
    equations = [made[v] for v in variables if v in made]
    return all(map(_has_small_numbers, equations)) and any(_ends(e, made) for e in equations)


def _ends(eqn: Any, made: dict[Any, Any]) -> bool:
    """Return whether an equation computes a function that is constant for large arguments."""
    body = _body(eqn)
    if body is not None:
        return any(_ends(inner, makers(body)) for inner in body.eqns)
    if eqn.primitive.name == "exp":  # exp(-x**2), in the derivative of `erf`
        x = eqn.invars[0]
        is_negative = _name(x, made) == "neg"
        return is_negative and _name(made[x].invars[0], made) in ("square", "integer_pow")
    return eqn.primitive.name in (*_BOUNDED, *_FROM_MINUS_ONE)


def _has_small_numbers(eqn: Any) -> bool:
    """Return whether all numbers that an equation multiplies by are known and small."""
    if eqn.primitive.name not in ("mul", "div"):
        return True
    numbers = [v for v in eqn.invars if not v.aval.shape]
    known = [abs(float(v.val)) for v in numbers if not is_var(v)]
    # A division by 0.01 multiplies by 100.
    is_divided = eqn.primitive.name == "div" and numbers == [eqn.invars[1]]
    small = [n > 1 / _LARGEST if is_divided else n < _LARGEST for n in known]
    return len(known) == len(numbers) and all(small)


def _is_bounded(var: Any, made: dict[Any, Any]) -> bool:
    """Return whether a variable is a multiple of `logistic`, `erfc`, `1 + tanh` or `1 + erf`."""
    var = _multiplied(var, made)
    eqn = made.get(var)
    if eqn is None:
        return False
    body = _body(eqn)
    if body is not None:
        # The gate may be the result of a user's jitted function.
        result = body.outvars[eqn.outvars.index(var)]
        return is_var(result) and _is_bounded(result, makers(body))
    if eqn.primitive.name == "add":
        # Of `1 + tanh(x)`, `_variables` leaves out the 1.
        names = [_name(_multiplied(v, made), made) for v in _variables(eqn)]
        return len(names) == 1 and names[0] in _FROM_MINUS_ONE
    return eqn.primitive.name in _BOUNDED


def _multiplied(var: Any, made: dict[Any, Any]) -> Any:
    """Return the array that `var` is a multiple of, by 0-d factors. It may be `var` itself."""
    while (eqn := made.get(var)) is not None and eqn.primitive.name in _MULTIPLES:
        if len(_variables(eqn)) != 1:
            break
        (var,) = _variables(eqn)
    return var


def _is_elementwise(eqn: Any) -> bool:
    body = _body(eqn)
    if body is not None:
        return all(map(_is_elementwise, body.eqns))
    traits = traits_of(eqn.primitive.name)
    return traits.elementwise or traits.elements in ("same", "cast")


def _name(var: Any, made: dict[Any, Any]) -> str:
    """Return the name of the primitive that computes a variable."""
    return made[var].primitive.name if var in made else ""


def _variables(eqn: Any) -> list[Any]:
    """Return the operands of an equation that are arrays of one dim or more."""
    return [v for v in eqn.invars if is_var(v) and v.aval.shape]


def _body(eqn: Any) -> Any:
    """Return the open jaxpr of a call; None for other equations."""
    body = applied(eqn)
    return getattr(body, "jaxpr", body)
