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
from jax_scalify.interpreter.operand import Operand, settled
from jax_scalify.interpreter.registry import (
    RuleContext,
    register_body_rule,
    rules_version,
)
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.rules.bodies.bits import call_in_place
from jax_scalify.rules.bodies.form import Form, numbered, pack, unpack
from jax_scalify.scales.algebra import Atom, Scale
from jax_scalify.scales.rounds import round_p
from jax_scalify.scales.table import ScaleTable

# Into a body of no more equations, as that of `jax.nn.relu`, an array goes before it is multiplied.
_SMALL_BODY = 8


def _wholes(numbers: dict[Atom, int], start: int = 0) -> dict[int, Scale]:
    """For each atom from number `start` on that was kept to a limit, the scale without it.

    The atoms of these scales get numbers too.
    """
    wholes = {i: a.whole() for a, i in numbers.items() if i >= start and a.whole}
    return {
        i: numbered(whole if _can_cross(whole) else whole.bounded()[0], numbers)
        for i, whole in wholes.items()
    }


def _known_of(atom: Atom) -> dict[str, Any]:
    """What is known of an atom on either side of a call."""
    return dict(
        nonzero=atom.nonzero, extent=atom.extent, is_number=atom.is_number, limit=atom.limit
    )


@dataclasses.dataclass(frozen=True)
class _Interpreted:
    """A body: its jaxpr, the forms of its results, and what is known of the atoms that it makes."""

    jaxpr: Any
    consts: list[Any]
    forms: list[Form]
    # Of each atom: what is known of it, the members of a maximum, the scale without limits.
    made: list[tuple[dict[str, Any], list[Scale], Scale | None]]


_interpreted: weakref.WeakKeyDictionary[Any, dict[Any, _Interpreted]] = weakref.WeakKeyDictionary()


def _interpret(
    ctx: RuleContext,
    jaxpr: Any,
    forms: list[Form],
    atoms: list[Atom],
    wholes: dict[int, Scale],
    operands: list[Any],
) -> _Interpreted:
    out_forms: list[Form] = []
    made: list[tuple[dict[str, Any], list[Scale], Scale | None]] = []

    def flat(table: ScaleTable, *arrays: Any) -> list[Any]:
        scales: list[Scale] = []
        for i, (array, atom) in enumerate(
            zip(arrays[len(arrays) - len(atoms) :], atoms, strict=True)
        ):
            whole = _whole(wholes.get(i), scales)
            scales.append(table.atom(array, **_known_of(atom), whole=whole))
        inputs = unpack(forms, arrays, table, scales)
        outputs = ctx.scale_jaxpr(jaxpr, inputs, table, wide=ctx.wide)
        outputs = [_crossing(o) for o in outputs]
        numbers = {s.factors[0][0]: i for i, s in enumerate(scales)}
        out_forms[:] = [Form.of_call(o, numbers, o.depth) for o in outputs]
        packed = pack(out_forms, outputs, table)
        new_wholes = _wholes(numbers, len(atoms)) if table.narrow else {}
        new = list(numbers)[len(atoms) :]
        for position, atom in enumerate(new, start=len(atoms)):
            members, parts = [], [a for factors, _ in atom.members for a, _ in factors]
            if all(numbers.get(a, position) < position for a in parts):  # made before it
                members = [numbered(Scale(e, factors), numbers) for factors, e in atom.members]
            made.append((_known_of(atom), members, new_wholes.get(position)))
        return [*packed, *(atom.array for atom in new)]

    with _compat.no_name_stack():
        closed = ctx.trace(flat, operands)
    opened = _compat.close_jaxpr(_compat.open_jaxpr(closed), ())
    return _Interpreted(opened, list(closed.consts), out_forms, made)


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
    inputs = [_constrain(v, s) for v, s in zip(args, params["in_shardings"], strict=True)]
    if any(v.known_scale is not None for v in inputs):  # a scale that was taken out stays symbolic
        outputs = ctx.scale_jaxpr(jaxpr, inputs, wide=ctx.wide)
    else:
        outputs = _call(ctx, inputs, jaxpr, params)
    return [_constrain(v, s) for v, s in zip(outputs, params["out_shardings"], strict=True)]


@register_body_rule(round_p)
def round_rule(ctx: RuleContext, *args: Value, **params: Any) -> list[Value]:
    """The scales of a `scalify` inside this one: numbers as they are."""
    plain = [ctx.dequantise(v) if isinstance(v, Operand) else v.whole() for v in args]
    return [Plain.of(out) for out in ctx.bind(*plain, **params)]


def _can_cross(scale: Scale) -> bool:
    """Tell whether a scale is made of atoms that arrays can hold."""
    return all(atom.limit < math.inf for atom, _ in scale.factors)


def _whole(scale: Scale | None, atoms: Sequence[Scale]) -> Callable[[], Scale] | None:
    """How to make a scale of numbers, when all atoms are there."""
    return None if scale is None else functools.cache(lambda: scale.renamed(atoms.__getitem__))


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
    inputs = [_crossing(v) for v in inputs]
    numbers: dict[Atom, int] = {}
    forms = [Form.of_call(v, numbers) for v in inputs]
    wholes = _wholes(numbers) if ctx.table.narrow else {}
    atoms = list(numbers)
    operands = pack(forms, inputs, ctx.table) + [atom.array for atom in atoms]
    key = (
        tuple(form.key() for form in forms),
        tuple(tuple(_known_of(atom).values()) for atom in atoms),
        tuple(wholes.items()),
        tuple(map(jax.typeof, operands)),
        ctx.wide,
        *_settings(ctx),
    )
    bodies = _interpreted.setdefault(jaxpr, {})
    if key not in bodies:
        body = _interpret(ctx, jaxpr, forms, atoms, wholes, operands)
        if any(map(_compat.is_traced, body.consts)):
            return ctx.scale_jaxpr(jaxpr, inputs, wide=ctx.wide)
        bodies[key] = body
    body = bodies[key]
    arrays = _compat.bind_jit(ctx.primitive, body.jaxpr, [*body.consts, *operands], params)
    scales = [Scale.of_factor(atom) for atom in atoms]
    _take_in(scales, body.made, arrays[len(arrays) - len(body.made) :], ctx.table)
    depth = max((v.depth for v in inputs), default=0)
    results = [dataclasses.replace(f, depth=f.depth + depth) for f in body.forms]
    return unpack(results, arrays, ctx.table, scales)


def _settings(ctx: RuleContext) -> tuple[Any, ...]:
    """What an interpretation depends on beside its operands."""
    table, corrections = ctx.table, ctx.corrections and ctx.corrections.key
    known = table.splits_scalars, table.narrow, is_observing(), rules_version()
    return ctx.config, corrections, *known


def _take_in(
    scales: list[Scale], made: Sequence[Any], arrays: Sequence[Any], table: ScaleTable
) -> None:
    """Append the atoms that a body has made, of their arrays."""
    for array, (known, members, whole) in zip(arrays, made, strict=True):
        terms = [m.renamed(scales.__getitem__) for m in members]
        known_members = frozenset((t.factors, t.exponent) for t in terms)
        facts = dict(known, members=known_members, whole=_whole(whole, scales))
        scales.append(table.atom(array, **facts))


@register_body_rule("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call", "call")
def call_rule(ctx: RuleContext, *args: Value, call_jaxpr: Any, **_: Any) -> list[Value]:
    """The body, in place: inside `scalify` derivatives have been taken already."""
    if not hasattr(call_jaxpr, "consts"):
        call_jaxpr = _compat.close_jaxpr(call_jaxpr, ())
    return call_in_place(ctx, call_jaxpr, list(args))


@register_body_rule("eval_jaxpr", "composite")
def body_rule(
    ctx: RuleContext, *args: Value, jaxpr: Any = None, call_jaxpr: Any = None, **_: Any
) -> list[Value]:
    """The body, in place."""
    return ctx.scale_jaxpr(jaxpr or call_jaxpr, list(args))


@register_body_rule("call_hi_primitive")
def call_hi_primitive_rule(ctx: RuleContext, *args: Value, _prim: Any) -> list[Value]:
    """What it expands to, in place: inside `scalify` derivatives have been taken already."""
    return call_in_place(ctx, _compat.expanded_jaxpr(_prim), list(args))


@register_body_rule(observe_p)
def observe_rule(ctx: RuleContext, *args: Value, observed: Observed) -> list[Value]:
    """The results, as they are: they belong to a `scalify` inside this one."""
    return [data for data, _ in observed.pairs(args)[: len(observed.results)]]
