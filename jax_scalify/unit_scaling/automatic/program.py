"""A jaxpr whose calls are inlined, with the bodies of loops and of `jax.checkpoint` inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_scalify import _compat
from jax_scalify.base.jaxprs import evaluate

_INLINED = frozenset("jit pjit closed_call core_call".split())
_REMAT = frozenset("checkpoint remat remat2".split())


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
    """An equation; `body` is that of a scan or a `jax.checkpoint`, `callers` the jits around."""

    eqn: Any
    inputs: list[Value]
    outputs: list[Value]
    callers: tuple[str, ...]
    body: Scope | None = None

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def is_scan(self) -> bool:
        """Whether the body is run once for each slice."""
        return self.name == "scan"


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
    return _scope(closed, inputs)


def all_scopes(scope: Scope) -> list[Scope]:
    """Return a scope and all within it."""
    bodies = [s for op in scope.ops if op.body is not None for s in all_scopes(op.body)]
    return [scope, *bodies]


def _scope(closed: Any, inputs: list[Value], repeats: int = 1) -> Scope:
    ops: list[Op] = []
    outputs = _inline(closed, inputs, ops, (), repeats)
    used = set(map(id, outputs))
    live = []
    for op in reversed(ops):
        if op.eqn.effects or any(id(v) in used for v in op.outputs):
            live.append(op)
            used.update(map(id, op.inputs))
    return Scope(inputs, live[::-1], outputs, repeats)


def _inline(
    closed: Any,
    inputs: Sequence[Value],
    ops: list[Op],
    callers: tuple[str, ...],
    repeats: int,
) -> list[Value]:
    def literal(atom: Any) -> Value:
        return Value(atom.aval, is_known=True, constant=atom.val)

    def constant(var: Any, const: Any) -> Value:
        known = not (_compat.is_traced(const) and jnp.issubdtype(var.aval.dtype, jnp.inexact))
        return Value(var.aval, is_known=known, constant=const)

    def equation(eqn: Any, operands: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in _INLINED and "jaxpr" in params:
            names = (*callers, str(params.get("name", name)))
            return _inline(params["jaxpr"], operands, ops, names, repeats)
        body = _body(name, params, operands, repeats)
        known = all(v.is_known for v in operands) and not eqn.effects
        op = Op(eqn, operands, [], callers, body)
        op.outputs = [Value(v.aval, op, known) for v in eqn.outvars]
        ops.append(op)
        return op.outputs

    return evaluate(closed, inputs, equation, literal, constant)


def _body(name: str, params: Any, operands: Sequence[Value], repeats: int) -> Scope | None:
    if all(v.is_known for v in operands):
        return None
    if name in _REMAT:
        jaxpr = params["jaxpr"]
        inputs = [
            Value(v.aval, is_known=x.is_known, source=x) for v, x in zip(jaxpr.invars, operands)
        ]
        return _scope(jaxpr, inputs, repeats)
    if name != "scan":
        return None
    closed = params["jaxpr"]
    consts, carries = _compat.scan_counts(params)
    inputs = []
    for i, (var, x) in enumerate(zip(closed.jaxpr.invars, operands, strict=True)):
        value = Value(var.aval, is_known=x.is_known, source=x, is_slice=i >= consts + carries)
        if consts <= i < consts + carries and value.is_inexact:
            value.is_known, value.is_carry = False, True
        inputs.append(value)
    return _scope(closed, inputs, repeats * params["length"])


def run_op(op: Op, args: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an equation as it is; user's derivative rules stay."""
    primitive = op.eqn.primitive
    with _compat.equation_context(op.eqn):
        out = primitive.bind(*args, **primitive.get_bind_params(op.eqn.params))
    return out if primitive.multiple_results else [out]
