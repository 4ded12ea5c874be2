"""A jaxpr whose calls are inlined, with the bodies of loops, branches and others inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jax_scalify import _compat
from jax_scalify.base.jaxprs import evaluate

_INLINED = ("jit", "closed_call")


@dataclasses.dataclass(eq=False)
class Value:
    """An operand or a result.

    Attributes:
        aval: shape and dtype.
        op: that makes it; None for an input, a literal and a constant.
        is_known: made of constants, integers and booleans alone: it has no gradient.
        constant: what a literal or a constant is.
        source: of an input of a body, the operand it stands for.
        is_slice: it is one slice of its source.
        is_carry: it is what the last step of a loop has left.
    """

    aval: Any
    op: Op | None = None
    is_known: bool = False
    constant: Any = None
    source: Value | None = None
    is_slice: bool = False
    is_carry: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.aval.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.aval.size

    @property
    def is_inexact(self) -> bool:
        """Whether it may have a gradient."""
        return jnp.issubdtype(self.aval.dtype, jnp.inexact)


@dataclasses.dataclass(eq=False)
class Op:
    """An equation.

    Attributes:
        eqn: of the jaxpr.
        inputs: its operands.
        outputs: its results.
        around: the jits, loops and meshes that it lies in.
        bodies: of a loop, a `jax.checkpoint` or a `shard_map` one, of a `cond` its branches.
    """

    eqn: Any
    inputs: list[Value]
    outputs: list[Value]
    around: Around
    bodies: tuple[Scope, ...] = ()

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def has_effects(self) -> bool:
        """Whether it does more than to compute its results; to use a mesh's axis is no effect."""
        return any(type(e).__name__ != "NamedAxisEffect" for e in self.eqn.effects)

    @property
    def is_loop(self) -> bool:
        """Whether the body is run several times."""
        return self.name in ("scan", "while")

    @property
    def passed(self) -> list[tuple[Value, list[Value]]]:
        """The operands that may have a gradient, each with what it is in the bodies.

        That is nothing for the index of a `cond` and what only the condition of a `while` uses.
        """
        skipped = _count_skipped(self.name, self.eqn.params)
        insides = zip(*(body.inputs for body in self.bodies), strict=True)
        pairs = [(x, []) for x in self.inputs[:skipped]]
        pairs += [(x, list(i)) for x, i in zip(self.inputs[skipped:], insides, strict=True)]
        return [(x, inside) for x, inside in pairs if not x.is_known]

    @property
    def carries(self) -> list[tuple[Value, Value]]:
        """Inputs and outputs of the body of a loop that are the same value in the next step."""
        if not self.is_loop or not self.bodies:
            return []
        (body,) = self.bodies
        consts, count = loop_counts(self.name, self.eqn.params, len(body.inputs))
        pairs = zip(body.inputs[consts : consts + count], body.outputs[:count], strict=True)
        return [(first, last) for first, last in pairs if first.is_carry]


@dataclasses.dataclass(frozen=True)
class Around:
    """What equations lie in.

    Attributes:
        callers: names of the jits.
        repeats: how often loops of known length run them.
        axes: sizes of the axes of meshes, by name.
    """

    callers: tuple[str, ...] = ()
    repeats: int = 1
    axes: Mapping[Any, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Scope:
    """The equations of a function or a body, in order, without dead ones."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value]
    repeats: int = 1


def flatten(closed: Any) -> Scope:
    """Return the program of a closed jaxpr."""
    inputs = [Value(v.aval) for v in closed.jaxpr.invars]
    for value in inputs:
        value.is_known = not value.is_inexact
    return _scope(closed, inputs, Around())


def all_scopes(scope: Scope) -> list[Scope]:
    """Return a scope and all within it."""
    bodies = [s for op in scope.ops for body in op.bodies for s in all_scopes(body)]
    return [scope, *bodies]


def loop_counts(name: str, params: Any, inputs: int) -> tuple[int, int]:
    """Return the numbers of constants and of carries that the body of a loop takes."""
    if name == "scan":
        return _compat.scan_counts(params)
    return params["body_nconsts"], inputs - params["body_nconsts"]


def _count_skipped(name: str, params: Any) -> int:
    """How many of the first operands the bodies do not take."""
    return {"cond": 1, "while": params.get("cond_nconsts", 0)}.get(name, 0)


def _scope(closed: Any, inputs: list[Value], around: Around) -> Scope:
    ops: list[Op] = []
    outputs = _inline(closed, inputs, ops, around)
    used = set(map(id, outputs))
    live = []
    for op in reversed(ops):
        if op.has_effects or any(id(v) in used for v in op.outputs):
            live.append(op)
            used.update(map(id, op.inputs))
    return Scope(inputs, live[::-1], outputs, around.repeats)


def _inline(closed: Any, inputs: Sequence[Value], ops: list[Op], around: Around) -> list[Value]:
    def literal(atom: Any) -> Value:
        return Value(atom.aval, is_known=True, constant=atom.val)

    def constant(var: Any, const: Any) -> Value:
        known = not (_compat.is_traced(const) and jnp.issubdtype(var.aval.dtype, jnp.inexact))
        return Value(var.aval, is_known=known, constant=const)

    def equation(eqn: Any, operands: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in _INLINED and "jaxpr" in params:
            callers = (*around.callers, str(params.get("name", name)))
            inner = dataclasses.replace(around, callers=callers)
            return _inline(params["jaxpr"], operands, ops, inner)
        bodies = _bodies(name, params, operands, dataclasses.replace(around, callers=()))
        op = Op(eqn, operands, [], around, bodies)
        known = all(v.is_known for v in operands) and not op.has_effects
        op.outputs = [Value(v.aval, op, known) for v in eqn.outvars]
        ops.append(op)
        return op.outputs

    return evaluate(closed, inputs, equation, literal, constant)


def _bodies(name: str, params: Any, operands: Sequence[Value], around: Around) -> tuple[Scope, ...]:
    if all(v.is_known for v in operands):
        return ()
    operands = operands[_count_skipped(name, params) :]
    if name == "remat2":
        return (_body(params["jaxpr"], operands, around),)
    if name == "shard_map":
        axes = {**around.axes, **params["mesh"].shape}
        return (_body(params["jaxpr"], operands, dataclasses.replace(around, axes=axes)),)
    if name == "cond":
        return tuple(_body(branch, operands, around) for branch in params["branches"])
    if name == "while":
        return (_loop_body(name, params["body_jaxpr"], params, operands, around),)
    if name == "scan":
        around = dataclasses.replace(around, repeats=around.repeats * params["length"])
        return (_loop_body(name, params["jaxpr"], params, operands, around),)
    return ()


def _body(jaxpr: Any, operands: Sequence[Value], around: Around) -> Scope:
    variables = getattr(jaxpr, "jaxpr", jaxpr).invars
    inputs = [
        Value(v.aval, is_known=x.is_known, source=x)
        for v, x in zip(variables, operands, strict=True)
    ]
    return _scope(jaxpr, inputs, around)


def _loop_body(
    name: str, closed: Any, params: Any, operands: Sequence[Value], around: Around
) -> Scope:
    consts, carries = loop_counts(name, params, len(operands))
    inputs = []
    for i, (var, x) in enumerate(zip(closed.jaxpr.invars, operands, strict=True)):
        value = Value(var.aval, is_known=x.is_known, source=x, is_slice=i >= consts + carries)
        if consts <= i < consts + carries and value.is_inexact:
            value.is_known, value.is_carry = False, True
        inputs.append(value)
    return _scope(closed, inputs, around)


def run_op(op: Op, args: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an operation as it is; user's derivative rules stay."""
    return run_equation(op.eqn, args)


def run_equation(eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an equation as it is."""
    primitive = eqn.primitive
    with _compat.equation_context(eqn):
        out = primitive.bind(*args, **primitive.get_bind_params(eqn.params))
    return out if primitive.multiple_results else [out]
