"""Which equations are scaled as one operation.

Products, convolutions, look-ups and sums of independent values are operations of their own. All
others are taken together as far as nothing but their last result is used outside (a maximal
fanout-free cone): a normalisation, a softmax, an activation, a loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from jax_scalify.interpreter.traits import traits_of
from jax_scalify.unit_scaling.automatic.collectives import (
    is_collective,
    is_copied_to_devices,
    is_sum_over_devices,
)
from jax_scalify.unit_scaling.automatic.program import Op, Scope, Value


def moves(primitive: str) -> bool:
    """Whether a primitive passes all elements on, and their gradients."""
    ends = ("slice", "stop_gradient", "on_backward")
    return traits_of(primitive).elements in ("same", "cast", "moved") and primitive not in ends


_PRODUCTS = frozenset("dot_general conv_general_dilated".split())


@dataclasses.dataclass(eq=False)
class Group:
    """Equations that are scaled as one operation.

    Attributes:
        kind: "product", "lookup", "sum", "function", "body" (of a loop, a branch, a checkpoint or a
            `shard_map`) or "opaque".
        ops: in order; the last one makes the results.
        operands: that have, or may have, a gradient.
        split: of a residual sum, the value at which skip and branch part; the branch is
            `operands[branch]`.
        is_tail: it comes after the last product, before the loss.
    """

    kind: str
    ops: list[Op]
    operands: list[Value] = dataclasses.field(default_factory=list)
    split: Value | None = None
    branch: int = 1
    is_tail: bool = False

    @property
    def root(self) -> Op:
        """The last equation."""
        return self.ops[-1]

    @property
    def outputs(self) -> list[Value]:
        """What is used outside."""
        return self.root.outputs


def partition(scope: Scope, has_loss: bool) -> list[Group]:
    """Return the groups of a scope, in order; equations of known values belong to none."""
    consumers = _consumers(scope.ops)
    unknown = [op for op in scope.ops if op.has_effects or not all(v.is_known for v in op.inputs)]
    leads = _leads_to_product(unknown, scope, consumers, has_loss)
    splits: dict[Op, tuple[Value, int]] = {}
    kinds = _kinds(unknown, leads, splits)
    groups: list[Group] = []
    of: dict[Op, Group] = {}
    for op in reversed(unknown):
        is_root = op in kinds or any(v in scope.outputs for v in op.outputs)
        group = None if is_root else _function_that_uses(op, consumers, of)
        if group is None:
            group = Group(kinds.get(op, "function"), [])
            group.is_tail = has_loss and group.kind == "function" and op not in leads
            if op in splits:
                group.split, group.branch = splits[op]
            groups.append(group)
        group.ops.insert(0, op)
        of[op] = group
    for group in groups:
        group.operands = _operands(group)
    return groups[::-1]


def _consumers(ops: list[Op]) -> dict[Value, list[Op]]:
    """The equations that use each value."""
    consumers: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.inputs:
            consumers.setdefault(value, []).append(op)
    return consumers


def _function_that_uses(
    op: Op, consumers: Mapping[Value, list[Op]], of: Mapping[Op, Group]
) -> Group | None:
    """The function that is the only one to use the results of an equation, if there is one."""
    users = {of[c] for v in op.outputs for c in consumers.get(v, ())}
    group = users.pop() if len(users) == 1 else None
    return group if group is not None and group.kind == "function" else None


def _operands(group: Group) -> list[Value]:
    values = [v for op in group.ops for v in op.inputs if not v.is_known]
    if group.kind != "function":
        return values  # x * x has two
    made = {v for op in group.ops for v in op.outputs}
    return [v for v in dict.fromkeys(values) if v not in made]


def _kinds(ops: list[Op], leads: set[Op], splits: dict[Op, tuple[Value, int]]) -> dict[Op, str]:
    """Kinds of the operations that stand alone."""
    kinds: dict[Op, str] = {}
    sources: dict[Value, frozenset] = {}

    def of(value: Value) -> frozenset:
        if value.is_known:
            return frozenset()
        return sources.get(value, frozenset([value]))

    for op in ops:
        if op.bodies:
            kinds[op] = "body"
        elif op.has_effects:
            kinds[op] = "opaque"
        elif op.name in _PRODUCTS:
            kinds[op] = "product"
        elif op.name == "gather" and parameter(op.inputs[0]) is not None:
            kinds[op] = "lookup"
        elif op.name in ("add", "add_any") and _is_independent(op, of):
            split = _split(op)
            if split is not None:
                splits[op] = split
            if split is not None or op in leads:
                kinds[op] = "sum"
        elif _is_own_collective(op, of):
            kinds[op] = "function"
        alone = frozenset([op]) if op in kinds else None
        for value in op.outputs:
            sources[value] = alone or frozenset().union(*map(of, op.inputs))
    return kinds


def _is_own_collective(op: Op, sources: Callable[[Value], frozenset]) -> bool:
    """Return whether a collective is of independent numbers, not of statistics of a function.

    Those are smaller than what they are made of.
    """
    if is_copied_to_devices(op.eqn):
        return parameter(op.inputs[0]) is not None
    if not is_sum_over_devices(op.eqn):
        return False
    made_of = [x.outputs[0] if isinstance(x, Op) else x for x in sources(op.inputs[0])]
    return op.inputs[0].size >= max((x.size for x in made_of), default=1) > 1


def _is_independent(op: Op, sources: Callable[[Value], frozenset]) -> bool:
    left, right = op.inputs
    if left.is_known or right.is_known or min(left.size, right.size) == 1:
        return False
    if is_bias(left, right, op) or is_bias(right, left, op):
        return False
    return not sources(left) & sources(right)


def _split(op: Op) -> tuple[Value, int] | None:
    """Find at which value the skip and the branch of a residual sum part, and which is which."""
    for branch in (1, 0):
        for start in _copies(op.inputs[1 - branch]):
            if _depends_on(op.inputs[branch], start):
                return start, branch
    return None


def _depends_on(value: Value, start: Value) -> bool:
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        if value is start:
            return True
        if value not in seen:
            seen.add(value)
            pending += value.op.inputs if value.op is not None else []
    return False


def are_alike(group: Group) -> bool:
    """Return whether devices count as alike: in a function that does more than to move data."""
    return not all(moves(op.name) or is_collective(op.eqn) for op in group.ops)


def through_movement(value: Value) -> Value:
    """Return what a value is a copy of, up to its shape and dtype."""
    *_, value = _copies(value)
    return value


def _copies(value: Value) -> Iterator[Value]:
    """A value, and all that it is a copy of."""
    yield value
    while value.op is not None and moves(value.op.name):
        value = value.op.inputs[0]
        yield value


def parameter(value: Value) -> Value | None:
    """Return the argument of the program that a value is a copy or a slice of, if it is one."""
    while True:
        value = through_movement(value)
        if value.op is not None or value.is_known or value.is_carry:
            return None
        if value.source is None:
            return value
        value = value.source


def is_bias(value: Value, other: Value, op: Op) -> bool:
    """Return whether a value is a parameter that is repeated to be added to another value.

    A bias has one axis, or is added to a product, or to what a gain of its shape multiplies; what
    else is repeated may be an embedding.
    """
    start = through_movement(value)
    if parameter(value) is None or start.size >= op.outputs[0].size:
        return False
    if sum(n > 1 for n in start.shape) <= 1:
        return True
    origin = through_movement(other).op
    if origin is None or origin.name in _PRODUCTS:
        return origin is not None
    gains = [v for v in origin.inputs if origin.name == "mul" and parameter(v) is not None]
    return any(through_movement(v).shape == start.shape for v in gains)


def _leads_to_product(
    ops: list[Op], scope: Scope, consumers: Mapping[Value, list[Op]], has_loss: bool
) -> set[Op]:
    """The equations from which a product is reached: the others belong to the loss."""
    found: set[Op] = set()
    for op in reversed(ops):
        after = [c for v in op.outputs for c in consumers.get(v, ())]
        if any(c in found or c.name in _PRODUCTS or c.bodies for c in after) or (
            not has_loss and any(v in scope.outputs for v in op.outputs)
        ):
            found.add(op)
    return found
