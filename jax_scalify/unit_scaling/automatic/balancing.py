"""Factors of gradients that belong to values: no edge is constrained, and every gradient is right.

A gradient may be multiplied by any constant as long as all uses of a value agree on it. With `c(v)`
the constant of a value, an operand `x` of an operation with the result `y`, which the forward pass
multiplies by `w`, has the factor `w * c(x) / c(y)`. Constants are the inverses of the sizes of
gradients, which are measured on an example; where they cannot be, in branches say, they are
estimated from the results back to the arguments, as if what is added up were independent.

In `x + f(norm(x)) / 2` the gradient inside of f has twice the constant of that of x, which is the
factor at the end of the branch: at its start is the factor 1/2, as *Unit Scaling* has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_scalify.unit_scaling.automatic.collectives import count_devices_without
from jax_scalify.unit_scaling.automatic.groups import Group
from jax_scalify.unit_scaling.automatic.observing import measure_sizes
from jax_scalify.unit_scaling.automatic.planning import Plan, make_plan
from jax_scalify.unit_scaling.automatic.program import Op, Scope, Value, loop_counts

_ROUNDING = 2.0**-12  # of what is estimated: a gradient that is smaller is 0, but for rounding


def measure_example(scope: Scope, operands: Sequence[Any]) -> list[float]:
    """Return the sizes of gradients of a program's values, in order; 0 of what is not seen."""
    plan = make_plan(scope, None)
    for own in plan.factors.values():  # gradients are those of the function that is computed
        own.grads = [own.output * weight for weight in own.weights]
    found = measure_sizes(plan, operands)
    sizes = {**found.backward, **found.arguments}
    start = _start(plan)
    return [sizes.get(v, 0.0) / start for v in _values(plan)]


def make_balanced_plan(scope: Scope, sizes: Sequence[float]) -> Plan:
    """Choose the factors of a program by the sizes of its gradients.

    Raises:
        ValueError: if the program is not the one that was measured.
    """
    plan = make_plan(scope, None)
    values = _values(plan)
    if len(values) != len(sizes):
        raise ValueError(
            f"The function has {len(values)} values for these arguments, and {len(sizes)} on the "
            "`example`: give `unit_scale` an example of the same structure."
        )
    gains = {
        group: [
            own.output * weight / (grad * own.result_grad)
            for weight, grad in zip(own.weights, own.grads, strict=True)
        ]
        for group, own in plan.factors.items()
    }
    balancing = Balancing(plan.groups, gains, dict(zip(values, sizes, strict=True)))
    balancing.run(scope, dict.fromkeys(plan.results, _start(plan)))
    for group, own in plan.factors.items():
        made = next((v for v in group.outputs if v.is_inexact), None)
        if made is not None and not group.root.bodies:
            own.grads = [
                own.output * weight * balancing.constant(v) / balancing.constant(made)
                for v, weight in zip(group.operands, own.weights, strict=True)
            ]
    return plan


def _values(plan: Plan) -> list[Value]:
    groups = (group for members in plan.groups.values() for group in members)
    return [*plan.scope.inputs, *(v for group in groups for v in group.outputs)]


def _start(plan: Plan) -> float:
    """The factor that the gradient of the loss starts with."""
    return next((f.result_grad for f in plan.factors.values() if f.result_grad != 1), 1.0)


class Balancing:
    """Sizes of gradients, and the constants that follow.

    Args:
        groups: of each scope.
        gains: for each operand of a group, the size of its gradient if that of the result is 1,
            with the factor of the forward pass.
        measured: sizes, as far as they are known and not 0.
    """

    def __init__(
        self,
        groups: dict[Scope, list[Group]],
        gains: Mapping[Group, Sequence[float]],
        measured: Mapping[Value, float],
    ):
        self._groups, self._gains, self._measured = groups, gains, measured
        self._same: dict[Value, Value] = {}
        self._squares: dict[Value, float] = {}
        self._fixed: dict[Value, float] = {}

    def run(self, scope: Scope, results: dict[Value, float]) -> None:
        """Estimate from the results back, whose gradients have size 1, and constants are given."""
        for value, constant in results.items():
            self._squares[value] = 1.0
            self._fixed[self._class(value)] = constant
        self._visit(scope)
        self._fixed = {self._class(v): c for v, c in self._fixed.items()}
        for value in list(self._squares):  # of a class whose first one has none
            first = self._class(value)
            self._squares[first] = self._square(first) or self._square(value)

    def constant(self, value: Value) -> float:
        """Return what the gradient of a value is multiplied by; of one without gradient, 1."""
        value = self._class(value)
        if value in self._fixed:
            return self._fixed[value]
        square = self._square(value)
        return 1 / math.sqrt(square) if square > 0 and math.isfinite(square) else 1.0

    def _square(self, value: Value) -> float:
        estimate, found = self._squares.get(value, 0.0), self._measured.get(value, 0.0)
        is_real = math.isfinite(found) and found > _ROUNDING * math.sqrt(estimate)
        return found**2 if is_real and estimate > 0 else estimate

    def _class(self, value: Value) -> Value:
        while value in self._same:
            value = self._same[value]
        return value

    def _unite(self, kept: Value, *others: Value) -> None:
        """Give values one constant, of the size that the first one's gradient has."""
        for other in others:
            kept_class, other_class = self._class(kept), self._class(other)
            if kept_class is not other_class:
                self._same[other_class] = kept_class

    def _visit(self, scope: Scope) -> None:
        for group in reversed(self._groups[scope]):
            if group.root.bodies:
                self._visit_bodies(group)
                continue
            outputs = [v for v in group.outputs if v.is_inexact]
            if not outputs:
                continue
            size = sum(v.size for v in outputs)
            square = sum(v.size * self._square(v) for v in outputs) / max(size, 1)
            self._squares[outputs[0]] = square
            self._unite(*outputs)
            for value, gain in zip(group.operands, self._gains[group], strict=True):
                self._add(value, square * gain**2)

    def _add(self, value: Value, square: float) -> None:
        self._squares[value] = self._squares.get(value, 0.0) + square

    def _visit_bodies(self, group: Group) -> None:
        op = group.root
        carried = {last for _, last in op.carries}
        for body in op.bodies:
            for value, inside in zip(op.outputs, body.outputs, strict=True):
                self._add(inside, self._square(value))
                self._unite(value, inside)
            self._visit(body)
            if any(not self._square(v) for v in carried):  # only what each step leaves counts
                self._again(op, body)
        for first, last in op.carries:
            self._unite(last, first)
        repeats = _repeats(op)
        for (value, insides), count in zip(op.passed, repeats, strict=True):
            squares = [self._square(v) for v in insides]
            self._add(value, count * max(squares, default=0.0))
            self._unite(value, *insides)

    def _again(self, op: Op, body: Scope) -> None:
        """Visit a loop's body with gradients that come from the next step."""
        first = {last: self._square(first) for first, last in op.carries}
        _forget(self._squares, self._groups, body)
        for value, inside in zip(op.outputs, body.outputs, strict=True):
            square = max(self._square(value), first.get(inside, 0.0))
            self._squares[value] = square
            self._squares[inside] = square
        self._visit(body)


def _repeats(op: Op) -> list[int]:
    """How many gradients are added up, for each operand that may have one."""
    counts, params = [1] * len(op.inputs), op.eqn.params
    if op.name == "scan":
        consts, _ = loop_counts(op.name, params, len(op.inputs))
        counts[:consts] = [params["length"]] * consts
    elif op.name == "shard_map" and not params["check_vma"]:
        counts = [count_devices_without(spec, params) for spec in params["in_specs"]]
    return [n for v, n in zip(op.inputs, counts, strict=True) if not v.is_known]


def _forget(squares: dict[Value, float], groups: dict[Scope, list[Group]], body: Scope) -> None:
    inside: Iterable[Value] = (
        *body.inputs,
        *body.outputs,
        *(v for g in groups[body] for v in (*g.operands, *g.outputs)),
    )
    for value in inside:
        squares.pop(value, None)
