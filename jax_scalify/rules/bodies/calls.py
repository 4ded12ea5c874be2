"""Primitives that call a jaxpr, so that facts and scales flow through.

The body of a `jit` is interpreted once for all calls of which the same is known, and stays a
function of the compiled program. Other calls are evaluated in place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_scalify import _compat
from jax_scalify.interpreter.multiplying import within_range
from jax_scalify.interpreter.observing import Observed, is_observing, observe_p
from jax_scalify.interpreter.operand import Operand, defer, settled
from jax_scalify.interpreter.registry import (
    RuleContext,
    register_body_rule,
    rules_version,
)
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.rules.bodies.form import Form
from jax_scalify.scales.algebra import Atom, Scale
from jax_scalify.scales.rounds import CALL_NAME
from jax_scalify.scales.table import ScaleTable

# Into a body of no more equations, as that of `jax.nn.relu`, an array goes before it is multiplied.
_SMALL_BODY = 8


class _Slots:
    """Numbers for the atoms that scales are made of, so that a call can be described by itself."""

    def __init__(self, atoms: Sequence[Atom] = ()):
        self.numbers = {atom: i for i, atom in enumerate(atoms)}

    def describe(self, scale: Scale) -> tuple[float, tuple[tuple[int, int], ...]]:
        """A monomial of numbers instead of atoms."""
        factors = ((self.numbers.setdefault(a, len(self.numbers)), p) for a, p in scale.factors)
        return scale.exponent, tuple(factors)

    def describe_wholes(self, start: int = 0) -> dict[int, Any]:
        """For each atom from `start` on that was kept to a limit, the scale without it.

        The atoms of these scales get numbers too.
        """
        wholes = {i: a.whole() for a, i in self.numbers.items() if i >= start and a.whole}
        return {
            i: self.describe(whole if _can_cross(whole) else whole.bounded()[0])
            for i, whole in wholes.items()
        }


def _known_of(atom: Atom) -> dict[str, Any]:
    """What is known of an atom on either side of a call."""
    return dict(
        nonzero=atom.nonzero, extent=atom.extent, is_number=atom.is_number, limit=atom.limit
    )


def _monomial(description: Any, atoms: Sequence[Scale]) -> Scale:
    exponent, factors = description
    scale = Scale(exponent)
    for number, power in factors:
        scale = scale * atoms[number] ** power
    return scale


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known of a value that is passed to a call, or returned by it."""

    form: Form
    scale: Any = None  # a description of the scale, of a scaled value
    depth: int = 0
    exponent: int = 0  # of a power of two that the data has yet to be multiplied by

    @classmethod
    def of(cls, value: Value, slots: _Slots, depth: int = 0) -> _Known:
        form = Form.of(value)
        if not isinstance(value, Operand):
            return cls(form)
        form = dataclasses.replace(form, static=None, scale_shape=())
        return cls(form, slots.describe(value.scale), depth, value.exponent)

    def arrays(self, value: Value, table: ScaleTable) -> list[Any]:
        return [value.raw] if isinstance(value, Operand) else self.form.pack(value, table)

    def value(self, arrays: Sequence[Any], atoms: Sequence[Scale], depth: int = 0) -> Value:
        if not self.scale:
            return self.form.unpack(arrays, None)
        x = defer(arrays[0], self.exponent, _monomial(self.scale, atoms))
        return x.as_result(self.form.facts, self.depth + depth)


@dataclasses.dataclass(frozen=True)
class _Interpreted:
    """A body: its jaxpr, what is known of its results, and of the atoms that it makes."""

    jaxpr: Any
    consts: list[Any]
    results: list[_Known]
    # Of each atom: what is known of it, the members of a maximum, the scale without limits.
    made: list[tuple[dict[str, Any], Any, Any]]


_interpreted: weakref.WeakKeyDictionary[Any, dict[Any, _Interpreted]] = weakref.WeakKeyDictionary()


def _values(
    known: Sequence[_Known], arrays: Sequence[Any], atoms: Sequence[Scale], depth: int = 0
) -> list[Value]:
    rest = iter(arrays)
    return [k.value([next(rest) for _ in k.form.avals()], atoms, depth) for k in known]


def _interpret(
    ctx: RuleContext,
    jaxpr: Any,
    known: list[_Known],
    atoms: list[Atom],
    wholes: dict[int, Any],
    operands: list[Any],
) -> _Interpreted:
    results: list[_Known] = []
    made: list[tuple[dict[str, Any], Any, Any]] = []

    def flat(table: ScaleTable, *arrays: Any) -> list[Any]:
        scales: list[Scale] = []
        for i, (array, atom) in enumerate(
            zip(arrays[len(arrays) - len(atoms) :], atoms, strict=True)
        ):
            whole = _whole(wholes.get(i), scales)
            scales.append(table.atom(array, **_known_of(atom), whole=whole))
        outputs = ctx.scale_jaxpr(jaxpr, _values(known, arrays, scales), table)
        outputs = [_crossing(o) for o in outputs]
        slots = _Slots([s.factors[0][0] for s in scales])
        results[:] = [_Known.of(o, slots, o.depth) for o in outputs]
        packed = [a for k, o in zip(results, outputs, strict=True) for a in k.arrays(o, table)]
        new_wholes = slots.describe_wholes(len(atoms)) if table.narrow else {}
        new = list(slots.numbers)[len(atoms) :]
        for position, atom in enumerate(new, start=len(atoms)):
            members, parts = None, [a for factors, _ in atom.members for a, _ in factors]
            if all(slots.numbers.get(a, position) < position for a in parts):  # made before it
                members = [slots.describe(Scale(e, factors)) for factors, e in atom.members]
            made.append((_known_of(atom), members, new_wholes.get(position)))
        return [*packed, *(atom.array for atom in new)]

    with _compat.no_name_stack():
        closed = ctx.trace(flat, operands)
    opened = _compat.close_jaxpr(_compat.open_jaxpr(closed), ())
    return _Interpreted(opened, list(closed.consts), results, made)


def _constrain(value: Value, sharding: Any) -> Value:
    if _compat.is_unspecified_sharding(sharding):
        return value
    if isinstance(value, Operand):
        data = jax.lax.with_sharding_constraint(value.data, sharding)
        return Operand(data, value.scale, facts=value.facts)
    return Plain.of(jax.lax.with_sharding_constraint(value.whole(), sharding), facts=value.facts)


@register_body_rule("jit", "pjit")
def jit_rule(ctx: RuleContext, *args: Value, jaxpr: Any, **params: Any) -> list[Value]:
    """The body, interpreted once for its calls; shardings become constraints on the data."""
    if params["name"] == CALL_NAME:  # of a `scalify` inside this one
        plain = [ctx.dequantise(v) if isinstance(v, Operand) else v.whole() for v in args]
        return [Plain.of(out) for out in ctx.bind(*plain, jaxpr=jaxpr, **params)]
    inputs = [_constrain(v, s) for v, s in zip(args, params["in_shardings"], strict=True)]
    if any(v.known_scale is not None for v in inputs):  # a scale that was taken out stays symbolic
        outputs = ctx.scale_jaxpr(jaxpr, inputs)
    else:
        outputs = _call(ctx, inputs, jaxpr, params)
    return [_constrain(v, s) for v, s in zip(outputs, params["out_shardings"], strict=True)]


def _can_cross(scale: Scale) -> bool:
    """Tell whether a scale is made of atoms that arrays can hold."""
    return all(atom.limit < math.inf for atom, _ in scale.factors)


def _whole(description: Any, atoms: Sequence[Scale]) -> Callable[[], Scale] | None:
    """How to make the scale without limits, when all atoms are there."""
    return None if description is None else functools.cache(lambda: _monomial(description, atoms))


def _crossing(value: Value) -> Value:
    """A value whose scale is made of atoms that arrays can hold."""
    if not isinstance(value, Operand) or _can_cross(value.scale):
        return value
    return within_range(value)


def _settled(value: Value) -> Value:
    return settled(value) if isinstance(value, Operand) else value


def _call(ctx: RuleContext, inputs: list[Value], jaxpr: Any, params: dict[str, Any]) -> list[Value]:
    if len(jaxpr.eqns) > _SMALL_BODY:
        # Factors that are still to be applied differ from call to call; without them, calls share
        # one interpretation.
        inputs = [_settled(v) for v in inputs]
    slots, inputs = _Slots(), [_crossing(v) for v in inputs]
    known = [_Known.of(v, slots) for v in inputs]
    wholes = slots.describe_wholes() if ctx.table.narrow else {}
    atoms = list(slots.numbers)
    operands = [a for k, v in zip(known, inputs, strict=True) for a in k.arrays(v, ctx.table)]
    operands += [atom.array for atom in atoms]
    key = (
        tuple((k.form.key(), k.scale, k.exponent) for k in known),
        tuple(tuple(_known_of(atom).values()) for atom in atoms),
        tuple(wholes.items()),
        tuple(map(jax.typeof, operands)),
        *_settings(ctx),
    )
    bodies = _interpreted.setdefault(jaxpr, {})
    if key not in bodies:
        body = _interpret(ctx, jaxpr, known, atoms, wholes, operands)
        if any(map(_compat.is_traced, body.consts)):
            return ctx.scale_jaxpr(jaxpr, inputs)
        bodies[key] = body
    body = bodies[key]
    arrays = _compat.bind_jit(ctx.primitive, body.jaxpr, [*body.consts, *operands], params)
    scales = [Scale(0, ((atom, 1),)) for atom in atoms]
    _take_in(scales, body.made, arrays[len(arrays) - len(body.made) :], ctx.table)
    return _values(body.results, arrays, scales, max((v.depth for v in inputs), default=0))


def _settings(ctx: RuleContext) -> tuple[Any, ...]:
    """What an interpretation depends on beside its operands."""
    table = ctx.table
    return ctx.config, table.splits_scalars, table.narrow, is_observing(), rules_version()


def _take_in(
    scales: list[Scale], made: Sequence[Any], arrays: Sequence[Any], table: ScaleTable
) -> None:
    """Append the atoms that a body has made, of their arrays."""
    for array, (known, members, whole) in zip(arrays, made, strict=True):
        terms = [_monomial(m, scales) for m in members or ()]
        known_members = frozenset((t.factors, t.exponent) for t in terms)
        facts = dict(known, members=known_members, whole=_whole(whole, scales))
        scales.append(table.atom(array, **facts))


@register_body_rule("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call", "call")
def call_rule(ctx: RuleContext, *args: Value, call_jaxpr: Any, **_: Any) -> list[Value]:
    """The body, in place: inside `scalify` derivatives have been taken already."""
    if not hasattr(call_jaxpr, "consts"):
        call_jaxpr = _compat.close_jaxpr(call_jaxpr, ())
    return ctx.scale_jaxpr(call_jaxpr, list(args))


@register_body_rule("eval_jaxpr", "composite")
def body_rule(
    ctx: RuleContext, *args: Value, jaxpr: Any = None, call_jaxpr: Any = None, **_: Any
) -> list[Value]:
    """The body, in place."""
    return ctx.scale_jaxpr(jaxpr or call_jaxpr, list(args))


@register_body_rule("call_hi_primitive")
def call_hi_primitive_rule(ctx: RuleContext, *args: Value, _prim: Any) -> list[Value]:
    """What it expands to, in place: inside `scalify` derivatives have been taken already."""
    return ctx.scale_jaxpr(_compat.expanded_jaxpr(_prim), list(args))


@register_body_rule(observe_p)
def observe_rule(ctx: RuleContext, *args: Value, observed: Observed) -> list[Value]:
    """The results, as they are: they belong to a `scalify` inside this one."""
    return [data for data, _ in observed.pairs(args)[: len(observed.results)]]
