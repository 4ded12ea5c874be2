"""Walks over jaxprs: nested equations, and evaluations of any kind."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend import core as jex_core

from jax_scalify import _compat

_CALLS = frozenset(
    """jit closed_call call custom_jvp_call custom_vjp_call custom_scale remat2 eval_jaxpr
    composite""".split()
)
# This file defines the functions of `jax.nn`. `unwrap` looks through their decorators.
_OF_JAX_NN = inspect.getfile(inspect.unwrap(jax.nn.relu))


Result = TypeVar("Result")


class LazyJaxpr:
    """A closed jaxpr that is traced on first use. Until then, its equations are unknown.

    Attributes:
        in_avals, out_avals: the types of the operands and results.
        effects: empty.
    """

    effects: frozenset[Any] = frozenset()

    def __init__(self, fun: Callable, operands: Sequence[Any], results: Sequence[Any]):
        self._fun = fun
        self.in_avals = [ShapedArray(x.shape, x.dtype) for x in operands]
        self.out_avals = [ShapedArray(x.shape, x.dtype) for x in results]

    @functools.cached_property
    def closed(self) -> Any:
        """The closed jaxpr."""
        return jax.make_jaxpr(self._fun)(*self.in_avals)


def closed_jaxpr(jaxpr: Any) -> Any:
    """Return a closed jaxpr or the closed jaxpr of a `LazyJaxpr`."""
    return jaxpr.closed if isinstance(jaxpr, LazyJaxpr) else jaxpr


def as_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """Return a closed jaxpr or a `LazyJaxpr` as a function of arrays."""
    return jex_core.jaxpr_as_fun(closed_jaxpr(jaxpr))


def replaced(items: Sequence[Any], some: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return the items, with new items at positions `some`."""
    full = list(items)
    for i, x in zip(some, new, strict=True):
        full[i] = x
    return full


def of_some(fun: Callable, operands: Sequence[Any], some: Sequence[int]) -> Callable:
    """Return `fun` as a function of the operands at positions `some`. The others are fixed."""
    return lambda *xs: fun(*replaced(operands, some, xs))


def is_var(atom: Any) -> bool:
    """Return whether an atom of an equation is a variable, not a literal."""
    return not isinstance(atom, jex_core.Literal)


def sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    """Return the jaxprs among the parameters of an equation."""
    values = [
        item
        for value in params.values()
        for item in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    jaxprs = [getattr(v, "jaxpr", v) for v in [*values, *_compat.hi_jaxprs(params)]]
    return [j for j in jaxprs if hasattr(j, "eqns")]


def memoised(function: Callable[..., Result]) -> Callable[..., Result]:
    """Memoise a function of an open jaxpr, and of other hashable arguments, while the jaxpr lives.

    The result must not hold the jaxpr.
    """
    # An entry goes with its jaxpr. A result that held the jaxpr would keep it alive for ever.
    known: weakref.WeakKeyDictionary[Any, dict[Any, Result]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def of(jaxpr: Any, *rest: Any) -> Result:
        results = known.setdefault(jaxpr, {})
        if rest not in results:
            results[rest] = function(jaxpr, *rest)
        return results[rest]

    return of


@memoised
def all_equations(jaxpr: Any) -> list[jex_core.JaxprEqn]:
    """Return the equations of a jaxpr and of the jaxprs in them."""
    return [eqn for eqn, _ in nested_equations(jaxpr)]


def nested_equations(
    jaxpr: Any, around: tuple[jex_core.JaxprEqn, ...] = ()
) -> Iterator[tuple[jex_core.JaxprEqn, tuple[jex_core.JaxprEqn, ...]]]:
    """Yield the equations of a jaxpr and of the jaxprs in them, with their enclosing equations."""
    for eqn in jaxpr.eqns:
        yield eqn, around
        for sub in sub_jaxprs(eqn.params):
            yield from nested_equations(sub, (*around, eqn))


def function_of_jax_nn(*equations: jex_core.JaxprEqn) -> str:
    """Return the function of `jax.nn` that the innermost equation is a part of; otherwise "".

    Each equation encloses the next. `jax.nn.glu` calls `jax.nn.sigmoid`, and all equations of both
    are a part of "glu".
    """
    for eqn in equations:
        frames = getattr(eqn.source_info.traceback, "frames", ())
        called = [f.function_name for f in frames if f.file_name == _OF_JAX_NN]
        if called and hasattr(jax.nn, called[-1]):
            return called[-1]
    return ""


@memoised
def makers(jaxpr: Any) -> dict[Any, Any]:
    """Return the equation that computes each variable of a jaxpr."""
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def applied(eqn: Any) -> Any:
    """Return the jaxpr that a call applies to all its operands; None for other equations.

    A call of a `LazyJaxpr` counts as an equation of a primitive.
    """
    if eqn.primitive.name not in _CALLS:
        return None
    held = eqn.params.get("jaxpr")
    held = eqn.params.get("call_jaxpr") if held is None else held
    return None if isinstance(held, LazyJaxpr) else held


def scan_operands(params: dict[str, Any], operands: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Divide the operands of a `scan` into constants, carry and scanned arrays."""
    consts, carry = _compat.scan_counts(params)
    start = consts + carry
    return operands[:consts], operands[consts:start], operands[start:]


def while_operands(params: dict[str, Any], operands: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Divide the operands of a `while` into condition constants, body constants and carry."""
    first = params["cond_nconsts"]
    start = first + params["body_nconsts"]
    return operands[:first], operands[first:start], operands[start:]


def evaluate(
    jaxpr: Any,
    operands: Sequence[Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any] = lambda atom: atom.val,
    constant: Callable[[Any, Any], Any] = lambda var, value: value,
) -> list[Any]:
    """Evaluate a jaxpr on objects of any kind: arrays, facts, names.

    An object is dropped after its last use, so that arrays are freed.

    Args:
        jaxpr: an open or closed jaxpr. The constants of an open jaxpr are None.
        operands: one object for each operand.
        equation: `(eqn, objects of its operands)` -> the objects of its results.
        literal: `(literal)` -> its object; by default its number.
        constant: `(variable, number)` -> the object of a constant; by default its number.

    Example:
        >>> closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
        >>> def count(eqn, used):
        ...     return [1 + max(used)] * len(eqn.outvars)
        >>> evaluate(closed, [0], count, literal=lambda atom: 0)  # how deep each result is
        [2]
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = getattr(jaxpr, "consts", [None] * len(inner.constvars))
    known = {v: constant(v, c) for v, c in zip(inner.constvars, consts, strict=True)}
    known.update(zip(inner.invars, operands, strict=True))
    steps, used = _last_uses(inner)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [literal(a) if isinstance(a, jex_core.Literal) else known[a] for a in atoms]

    for eqn, ends in steps:
        results = equation(eqn, read(eqn.invars))
        for var, result in zip(eqn.outvars, results, strict=True):
            if var in used:
                known[var] = result
        for var in ends:
            del known[var]
    return read(inner.outvars)


@memoised
def _last_uses(jaxpr: Any) -> tuple[list[tuple[Any, list[Any]]], set[Any]]:
    """Return each equation with the variables that it reads last, and all variables that are read.

    The results of the jaxpr are read after all equations.
    """
    used, steps = set(filter(is_var, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        ends = {v for v in eqn.invars if is_var(v)} - used
        used |= ends
        steps.append((eqn, list(ends)))
    return steps[::-1], used


_MAX_ROUNDS = 8  # the most passes over a loop's body; facts that still change are then unknown


@dataclasses.dataclass(frozen=True)
class Interpretation:
    """An abstract interpretation: a kind of facts, and how equations propagate them.

    Attributes:
        equation: `(eqn, facts of its operands)` -> the facts of its results.
        constant: `(literal)` -> its fact.
        join: `(fact, fact)` -> the fact of a value that may be either of two.
        unknown: the fact that says nothing.
        captured: the fact of captured constants; by default `unknown`.
        chosen: `(fact, decision)` -> the fact of a value that was chosen, given the fact of the
            branch index or the loop condition that decided.
    """

    equation: Callable[[Any, list[Any]], list[Any]]
    constant: Callable[[Any], Any]
    join: Callable[[Any, Any], Any]
    unknown: Any
    captured: Any = None
    chosen: Callable[[Any, Any], Any] = lambda fact, decision: fact

    def results(self, jaxpr: Any, facts: Sequence[Any]) -> list[Any]:
        """Return the facts of the results of a jaxpr, through calls, branches and loops."""
        captured = self.unknown if self.captured is None else self.captured
        return evaluate(jaxpr, facts, self._results, self.constant, lambda var, value: captured)

    def _results(self, eqn: Any, facts: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        call = applied(eqn)
        if call is not None:
            return self.results(call, facts)
        if name == "cond":
            branches = [self.results(branch, facts[1:]) for branch in params["branches"]]
            joined = [functools.reduce(self.join, outs) for outs in zip(*branches, strict=True)]
            return [self.chosen(fact, facts[0]) for fact in joined]
        if name == "while":
            tested, consts, carry = while_operands(params, facts)
            carry = self._loop(params["body_jaxpr"], consts, carry, [])
            [condition] = self.results(params["cond_jaxpr"], [*tested, *carry])
            return [self.chosen(fact, condition) for fact in carry]
        if name == "scan":
            return self._loop(params["jaxpr"], *scan_operands(params, facts))
        return self.equation(eqn, facts)

    def _loop(self, body: Any, consts: list[Any], carry: list[Any], xs: list[Any]) -> list[Any]:
        """Return the facts of carries that hold in every step, and the facts of stacked results."""
        # In a body `a, b = x, a`, a fact of `x` reaches `b` in the second pass.
        for _ in range(_MAX_ROUNDS):
            out = self.results(body, [*consts, *carry, *xs])
            joined = [self.join(a, b) for a, b in zip(carry, out, strict=False)]
            if joined == carry:
                return [*carry, *out[len(carry) :]]
            carry = joined
        return [self.unknown] * len(out)


def depends(jaxpr: Any, on: Sequence[bool]) -> list[bool]:
    """Return for each result of a jaxpr whether it depends on the marked operands.

    Example:
        >>> closed = jax.make_jaxpr(lambda x, y: (x * y, y + 1))(1.0, 2.0)
        >>> depends(closed, [True, False])
        [True, False]

    A result depends on the operand that chooses a branch:

        >>> f = lambda x, y: jax.lax.cond(x, jnp.sin, jnp.cos, y)
        >>> depends(jax.make_jaxpr(f)(True, 2.0), [True, False])
        [True]
    """
    interpretation = Interpretation(
        equation=lambda eqn, facts: [any(facts)] * len(eqn.outvars),
        constant=lambda atom: False,
        join=lambda a, b: a or b,
        unknown=True,
        captured=False,
        chosen=lambda fact, decision: fact or decision,
    )
    return interpretation.results(jaxpr, on)
