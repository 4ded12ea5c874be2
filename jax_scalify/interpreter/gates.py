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

JAX divides a `jit` or `scan` that is differentiated into a body for each pass. The backward body
gets the gate, and other functions of `x`, as arguments. The fact `of_gate` says what they are.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_scalify.base.jaxprs import applied, is_var, makers
from jax_scalify.interpreter.operand import OfGate, Operand
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.value import Value

# Functions `f` with `0 <= f <= 2 * scale`, and functions `f` for which this holds for `1 + f`.
_BOUNDED, _FROM_MINUS_ONE = ("logistic", "erfc"), ("tanh", "erf")
_MULTIPLES = ("mul", "div", "neg", "convert_element_type", "copy")
_LARGEST = 8  # a larger constant factor may make the second term of an activation exceed the first
_MAX_LENGTH = 64  # the most equations of an activation and its derivative


# What a body knows of an argument: the number of its source, its bound, and whether it is constant
# for large sources. A scan gets constants as arguments too.
Given = tuple[int, int, bool]
_CONSTANT: Given = (-1, 0, False)


@dataclasses.dataclass(frozen=True)
class Gates:
    """What is known of the gates of a jaxpr, without those in jaxprs of its equations.

    Attributes:
        gates: factors that are bounded by twice their scale and depend on the value that they
            multiply.
        leading: terms that give a sum their scale, whatever the other term's scale is.
        leaving: results that are elementwise functions of the source of a gate, each with the
            source, and what `Given` says of them. The source is a variable.
    """

    gates: set[Any]
    leading: set[Any]
    leaving: dict[Any, tuple[Any, int, bool]]

    def marked(self, var: Any, x: Value) -> Value:
        """Return the value of a variable with the facts `gate` and `leads`."""
        gate, leads = var in self.gates, var in self.leading
        if not (gate or leads) or not isinstance(x, Operand):
            return x
        return x.known(facts=dataclasses.replace(x.facts, gate=gate, leads=leads))

    def known_outside(
        self, jaxpr: Any, inputs: Sequence[Value], results: list[Value]
    ) -> list[Value]:
        """Return the results of the jaxpr with the fact `of_gate`."""
        if not self.leaving:
            return results
        arguments = dict(zip(jaxpr.invars, inputs, strict=True))
        found = list(results)
        for i, (var, x) in enumerate(zip(jaxpr.outvars, results, strict=True)):
            if is_var(var) and var in self.leaving and isinstance(x, Operand):
                source = arguments.get(self.leaving[var][0])
                array = source.origin if isinstance(source, Operand) else None
                of_gate = OfGate(*self.leaving[var], array=array)
                found[i] = x.known(facts=dataclasses.replace(x.facts, of_gate=of_gate))
        return found


def given_of(inputs: Sequence[Value]) -> tuple[Given | None, ...]:
    """Return what is known of the arguments of a body; `()` if nothing is known of any."""
    gates = [x.facts.of_gate for x in inputs if x.facts.of_gate and x.facts.of_gate.bound]
    given = tuple(_given(x, gates) for x in inputs)
    return given if any(given) else ()


def _given(x: Value, gates: list[OfGate]) -> Given | None:
    if x.number is not None and x.shape:
        return _CONSTANT
    own = x.facts.of_gate
    for number, gate in enumerate(gates):
        if own is not None and own.has_source_of(gate):
            return number, own.bound, own.ends
        # JAX gives an argument of the forward body to the backward body as it is.
        if isinstance(x, Operand) and x.origin is gate.array:
            return number, 0, False
    return None


def gates_of(jaxpr: Any, given: Sequence[Given | None] = ()) -> Gates:
    """Return the gates of a jaxpr. `given` says what is known of each argument, or is empty."""
    made = makers(jaxpr)
    known = {v: g for v, g in zip(jaxpr.invars, given, strict=False) if g is not None}
    sources: dict[Any, Any] = {}  # of each bounded factor, the variable that it is a function of
    for eqn in jaxpr.eqns:
        # Either operand may be the gate. In `(0.5 * x) * (1 + tanh(x))` the other operand is a
        # multiple of the source `x`.
        for factor, gate in _factors(eqn):
            source = _multiplied(factor, made)
            # `gate * gate` is no activation. A gate of an LSTM fails in `_passed`: it is no
            # elementwise function of the cell state that it multiplies.
            if gate is not source and _bound(gate, made):
                of_source = (
                    _passed(gate, {x}, made, known) for x in _with_other_half(source, made)
                )
                if any(passed is not None for passed in of_source):
                    sources[gate] = source
    leading, of_derivatives = _leading(jaxpr, made, sources, known)
    bounded = {*sources, *of_derivatives}
    gates = {v for v in bounded if (known[v][1] if v in known else _bound(v, made)) == 2}
    return Gates(gates, leading, _leaving(jaxpr, made, sources, known))


def _leaving(
    jaxpr: Any, made: dict[Any, Any], sources: dict[Any, Any], known: dict[Any, Given]
) -> dict[Any, tuple[Any, int, bool]]:
    """Return the results that are elementwise functions of the source of what may be a gate."""
    results = [v for v in jaxpr.outvars if is_var(v)]
    # Of a gate whose product with the source is not computed here, the farthest source.
    # An argument that is returned keeps the fact that it came with.
    own = [v for v in results if v not in known]
    starts = [s for v in own for s in _sources(v, made, sources, known)[-1:]]
    leaving = {}
    for source in dict.fromkeys([*sources.values(), *starts]):
        for var in results:
            passed = _passed(var, {source}, made, known)
            # The backward body does not see the numbers that a residual was multiplied by.
            if passed is not None and _has_small_numbers(passed, made):
                leaving[var] = source, _bound(var, made), _is_of_gate(passed, made, known)
    return leaving


def _factors(eqn: Any) -> list[tuple[Any, Any]]:
    """Return the two factors of a product of variables, in both orders."""
    if eqn.primitive.name != "mul" or not all(map(is_var, eqn.invars)):
        return []
    return [tuple(eqn.invars), tuple(eqn.invars[::-1])]


def _ancestors(var: Any, made: dict[Any, Any]) -> list[Any]:
    """Return the variables of which `var` may be an elementwise function, the nearest first."""
    found = [var]
    for v in found:  # the list grows on the way
        eqn = made.get(v)
        if eqn is not None and len(found) < _MAX_LENGTH and _is_elementwise(eqn):
            found += [x for x in dict.fromkeys(_variables(eqn)) if x not in found]
    return found[1:]


def _with_other_half(var: Any, made: dict[Any, Any]) -> list[Any]:
    """Return a variable; if it is half of an array, as in `glu`, both halves."""
    eqn = made.get(var)
    if eqn is None or eqn.primitive.name != "split" or len(eqn.outvars) != 2:
        return [var]
    return list(eqn.outvars)


def _leading(
    jaxpr: Any, made: dict[Any, Any], sources: dict[Any, Any], known: dict[Any, Given]
) -> tuple[set[Any], set[Any]]:
    """Return the leading terms: `cotangent * gate`, and sums that contain such a term.

    Also return their gates. `jax.checkpoint` computes a gate again in the backward pass, but not
    its product with the source.
    """
    leading: set[Any] = set()
    gates: set[Any] = set()
    if all(eqn.primitive.name != "add_any" for eqn in jaxpr.eqns):
        return leading, gates
    count = collections.Counter(v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v))
    count.update(v for v in jaxpr.outvars if is_var(v))
    led: dict[Any, list[Any]] = {}  # for each variable: source of the gate, cotangent, gate
    for eqn in jaxpr.eqns:
        # This may be `cotangent * gate(x)`, the first term of the derivative.
        for x, gate in _factors(eqn):
            terms = [(s, _multiplied(x, made), gate) for s in _sources(gate, made, sources, known)]
            led.setdefault(eqn.outvars[0], []).extend(terms)
        if eqn.primitive.name != "add_any" or not all(map(is_var, eqn.invars)):
            continue
        for x, other in (eqn.invars, eqn.invars[::-1]):
            start = x if x in led else _multiplied(x, made)
            # The fact `leads` is read by every sum of `x`, so `x` must have no other reader.
            terms = led.get(start, []) if count[x] == 1 else []
            term = next((t for t in terms if _adds(other, t[0], t[1], made, known)), None)
            if term is not None:
                leading.add(x)
                gates.add(term[2])
                led[eqn.outvars[0]] = [term]
                break
    return leading, gates


def _sources(
    gate: Any, made: dict[Any, Any], sources: dict[Any, Any], known: dict[Any, Given]
) -> list[Any]:
    """Return what may be the source of a gate; `[]` if the variable is no gate."""
    if gate in sources:
        return [sources[gate]]
    if gate in known:
        return [known[gate][0]] if known[gate][1] else []
    if not _bound(gate, made):
        return []
    return [v for v in _ancestors(gate, made) if _passed(gate, {v}, made, known) is not None]


def _adds(
    other: Any, source: Any, cotangent: Any, made: dict[Any, Any], known: dict[Any, Given]
) -> bool:
    """Return whether a term is the smaller one beside `cotangent * gate(source)`."""
    # `x * gate(x)` has the source in the place of a cotangent: it is the activation itself.
    if source is cotangent:
        return False
    passed = _passed(other, {source, cotangent}, made, known)
    return passed is not None and _is_of_gate(passed, made, known)


def _passed(
    var: Any, sources: set[Any], made: dict[Any, Any], known: dict[Any, Given]
) -> set[Any] | None:
    """Return the variables that `var` is computed from, down to `sources`.

    An argument that is `known` to be a function of a source elsewhere stands for this source.
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
        if known.get(var) == _CONSTANT:
            continue
        if var in known and known[var][0] in sources:
            seen.add(known[var][0])
            continue
        if eqn is None or len(seen) > _MAX_LENGTH or not _is_elementwise(eqn):
            return None
        to_do += _variables(eqn)
    return seen if sources <= seen else None


def _is_of_gate(variables: set[Any], made: dict[Any, Any], known: dict[Any, Given]) -> bool:
    """Return whether variables come from a bounded function, without large constant factors.

    In `x * gate(x) + 1e6 * gate(x)` the second term is larger.
    """
    ends = any(known[v][2] if v in known else v in made and _ends(made[v], made) for v in variables)
    return ends and _has_small_numbers(variables, made)


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


def _has_small_numbers(variables: set[Any], made: dict[Any, Any]) -> bool:
    """Return whether all numbers that these variables were multiplied by are known and small."""
    return all(_multiplies_little(made[v]) for v in variables if v in made)


def _multiplies_little(eqn: Any) -> bool:
    if eqn.primitive.name not in ("mul", "div"):
        return True
    numbers = [v for v in eqn.invars if not v.aval.shape]
    known = [abs(float(v.val)) for v in numbers if not is_var(v)]
    # A division by 0.01 multiplies by 100.
    is_divided = eqn.primitive.name == "div" and numbers == [eqn.invars[1]]
    small = [n > 1 / _LARGEST if is_divided else n < _LARGEST for n in known]
    return len(known) == len(numbers) and all(small)


def _bound(var: Any, made: dict[Any, Any]) -> int:
    """Return how many times its scale a variable is at most; 0 if it is not bounded.

    This is 2 for multiples of `logistic`, `erfc`, `1 + tanh` and `1 + erf`, which are gates, and 1
    for multiples of `tanh` and `erf`. The latter are gates too if they cannot be negative, as in
    `mish`, but have the scale 1.
    """
    var = _multiplied(var, made)
    eqn = made.get(var)
    if eqn is None:
        return 0
    body = _body(eqn)
    if body is not None:
        # The gate may be the result of a user's jitted function.
        result = body.outvars[eqn.outvars.index(var)]
        return _bound(result, makers(body)) if is_var(result) else 0
    if eqn.primitive.name == "add":
        # Of `1 + tanh(x)`, `_variables` leaves out the 1.
        names = [_name(_multiplied(v, made), made) for v in _variables(eqn)]
        return 2 if len(names) == 1 and names[0] in _FROM_MINUS_ONE else 0
    return 2 if eqn.primitive.name in _BOUNDED else int(eqn.primitive.name in _FROM_MINUS_ONE)


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
    # A number that is broadcast has no variable.
    return traits.elementwise or traits.elements in ("same", "cast") or not _variables(eqn)


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
