"""What `unit_scale` has done to a function, as a table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from jax_scalify import _compat
from jax_scalify.unit_scaling.automatic.groups import Group, moves
from jax_scalify.unit_scaling.automatic.planning import Factors, Plan
from jax_scalify.unit_scaling.automatic.program import Op, Scope, Value

_LONGEST = 40  # name of a function that is many equations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One operation.

    Attributes:
        operation: its name: a primitive, or what a function consists of.
        kind: "product", "lookup", "sum", "residual sum", "function", "body" or "opaque".
        scope: modules and transforms around it.
        line: of the user's code, `file:line (function)`.
        shape: of its result.
        alpha: factor of the result, in the forward pass.
        weights: of a sum, those of its terms, in the forward pass; otherwise empty.
        operands: names of the operands that have gradients; their shapes, where they have none.
        betas: factors of their gradients.
        cut_edges: which of them are at cut-edges.
        note: more about it.
    """

    operation: str
    kind: str
    scope: str
    line: str
    shape: tuple[int, ...]
    alpha: float
    weights: tuple[float, ...]
    operands: tuple[str, ...]
    betas: tuple[float, ...]
    cut_edges: tuple[bool, ...]
    note: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The operations of a function that is unit-scaled, in order; its `str` is a table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        head = (
            "scope",
            "operation",
            "result",
            "forward",
            "gradients, * at cut-edges",
            "line",
            "note",
        )
        table = [head, *map(_cells, self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in table)
        return "\n".join(lines)


def explain(plan: Plan, names: dict[Value, str]) -> Explanation:
    """Return the table of a plan; `names` are those of the program's arguments."""
    return Explanation(tuple(_rows(plan, plan.scope, names)))


def rows_of(plan: Plan) -> dict[Value, Row]:
    """Return the row of the operation that makes each value."""
    return {
        value: _row(group, factors, {})
        for group, factors in plan.factors.items()
        for value in group.outputs
    }


def _rows(plan: Plan, scope: Scope, names: dict[Value, str]) -> Iterator[Row]:
    for value in scope.inputs:
        if value.source in names and not value.is_carry:
            names[value] = names[value.source]
    group_of = {group.root: group for group in plan.groups[scope]}
    for op in scope.ops:
        if moves(op.name) and op.inputs[0] in names:
            names[op.outputs[0]] = names[op.inputs[0]]
        if op in group_of:
            yield _row(group_of[op], plan.factors[group_of[op]], names)
        for body in op.bodies:
            yield from _rows(plan, body, names)


def _row(group: Group, factors: Factors, names: dict[Value, str]) -> Row:
    root = group.root
    notes = [factors.note] if factors.note else []
    if factors.delayed is not None:
        notes.append("branch's gradient weighted where it starts")
    elif group.split is not None:
        notes.append("branch connected elsewhere: gradient weighted at its end")
    if factors.result_grad != 1:
        notes.append(f"gradients of the loss by {factors.result_grad:.4g}")
    shape = root.outputs[0].shape if root.outputs else ()
    return Row(
        operation=_name(group),
        kind="residual sum" if group.split is not None else group.kind,
        scope=_compat.name_stack(root.eqn),
        line=_compat.layer_line(root.eqn),
        shape=shape,
        alpha=factors.output,
        weights=tuple(factors.weights) if group.kind == "sum" else (),
        operands=tuple(names.get(v, str(list(v.shape))) for v in group.operands),
        betas=tuple(factors.grads),
        cut_edges=tuple(factors.is_cut),
        note="; ".join(notes),
    )


def _name(group: Group) -> str:
    if group.kind != "function":
        return group.root.name
    calls = [op.around.callers[0] if op.around.callers else _call_name(op) for op in group.ops]
    names = dict.fromkeys(c for c in calls if not moves(c))
    text = " ".join(names) or group.root.name
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _call_name(op: Op) -> str:
    """The primitive, or of a function with a derivative of its own, the function."""
    called = op.eqn.params.get("call_jaxpr")
    about = getattr(getattr(called, "jaxpr", called), "debug_info", None)
    return str(getattr(about, "func_name", op.name))


def _cells(row: Row) -> tuple[str, ...]:
    forward = " + ".join(f"{w:.4g}" for w in row.weights) or f"{row.alpha:.4g}"
    betas = [
        f"{_short(name)} {beta:.4g}{'*' if cut else ''}"
        for name, beta, cut in zip(row.operands, row.betas, row.cut_edges)
        if row.kind != "body" or beta != 1
    ]
    line = row.line.rpartition("/")[2]
    operation = f"{row.operation} ({row.kind})" if row.kind == "residual sum" else row.operation
    scope = "/".join(row.scope.split("/")[-2:])
    return scope, operation, str(list(row.shape)), forward, ", ".join(betas), line, row.note


def _short(name: str) -> str:
    """The last two keys of a long path."""
    keys = re.findall(r"[^\[\].']+", name)
    return ".".join(keys[-2:]) if len(keys) > 3 else name
