"""The factors of every operation of a program."""

from __future__ import annotations

import dataclasses
import math
import warnings

from jax_scalify import _compat
from jax_scalify.unit_scaling.automatic import graph as graphs
from jax_scalify.unit_scaling.automatic.collectives import count_devices_without
from jax_scalify.unit_scaling.automatic.groups import Group, partition, through_movement
from jax_scalify.unit_scaling.automatic.measuring import Measuring
from jax_scalify.unit_scaling.automatic.products import count_terms
from jax_scalify.unit_scaling.automatic.program import Scope, Value, all_scopes
from jax_scalify.unit_scaling.constraints import Constraint, apply_constraint

_NEAR_ONE = 0.05  # octaves by which a factor may differ from 1 before it is worth an operation

_ROUNDING = 2.0**-16  # of the largest gradient: what is smaller is 0, but for rounding


@dataclasses.dataclass
class Factors:
    """What the values of one operation are multiplied by.

    Attributes:
        output: the result, in the forward pass.
        weights: each operand, in the forward pass: of sums, instead of `output`.
        grads: the gradient of each operand.
        result_grad: the gradient that arrives at the result: of the loss.
        is_cut: which operands' edges are cut-edges.
        delayed: of a residual sum, the branch's weight, by which gradients are multiplied where
            the branch starts.
        note: what could not be measured, and why.
    """

    output: float
    grads: list[float]
    weights: list[float]
    is_cut: list[bool]
    result_grad: float = 1.0
    delayed: float | None = None
    note: str = ""


@dataclasses.dataclass(eq=False)
class Plan:
    """A program, its groups scope by scope, and their factors.

    Attributes:
        scope: the program.
        groups: of each scope.
        factors: of each group.
        loss: the result that gradients are taken of, or None if it is all of them.
        results: those, within the bodies that make them.
    """

    scope: Scope
    groups: dict[Scope, list[Group]]
    factors: dict[Group, Factors]
    loss: Value | None
    results: list[Value]


def make_plan(scope: Scope, constraint: Constraint, residuals: bool = True) -> Plan:
    """Choose the factors of a program.

    Args:
        scope: the program.
        constraint: on the factors of an operation's result and of the operands whose edges are no
            cut-edges.
        residuals: whether the branches of residual sums have their factor where they start.
    """
    loss = next((v for v in scope.outputs if _is_loss(v)), None)
    results = [v for v in scope.outputs if v.is_inexact] if loss is None else [loss]
    scopes = all_scopes(scope)
    final = _final(loss) if loss is not None else None
    groups = {s: partition(s, final is not None and final in s.outputs) for s in scopes}
    graph = graphs.build(scope, groups, results)
    factors = _choose_factors(groups, graph, Measuring(scope), constraint, final)
    for group, own in factors.items():
        if group.split is not None and residuals and constraint is not None:
            _delay(group, own, graph, factors)
    return Plan(scope, groups, factors, loss, results if final is None else [final])


def _choose_factors(
    groups: dict[Scope, list[Group]],
    graph: graphs.Graph,
    measuring: Measuring,
    constraint: Constraint,
    loss: Value | None,
) -> dict[Group, Factors]:
    """Factors of the operations of all scopes, with those of branches at the branches' ends."""
    terms: dict[tuple[Value, bool], float] = {}
    factors: dict[Group, Factors] = {}
    for scope, members in groups.items():
        branches = scope.repeats * sum(group.split is not None for group in members)
        for group in members:
            own = factors[group] = _ones(group, graph)
            if group.kind == "sum":
                _weigh(group, own, terms, constraint, branches if scope.repeats > 1 else 0)
            elif group.kind == "body":
                _scale_body(group, own)
            elif group.kind != "opaque":
                _scale(group, own, measuring, constraint, loss)
    return factors


def _ones(group: Group, graph: graphs.Graph) -> Factors:
    """Factors that leave an operation as it is."""
    count = len(group.operands)
    cut = [graph.edge_of(group, slot).is_cut for slot in range(count)]
    return Factors(1.0, [1.0] * count, [1.0] * count, cut)


def _is_loss(value: Value) -> bool:
    return value.is_inexact and value.shape == () and not value.is_known


def _final(value: Value) -> Value:
    """Follow a value into the body, of a `jax.checkpoint` or a `shard_map`, that makes it."""
    op = value.op
    while op is not None and len(op.bodies) == 1 and not op.is_loop:
        value = op.bodies[0].outputs[op.outputs.index(value)]
        op = value.op
    return value


def _scale(
    group: Group, own: Factors, measuring: Measuring, constraint: Constraint, loss: Value | None
) -> None:
    try:
        rms, grads = _measured(group, measuring)
    except Exception as error:  # anything at all can be an operation of a user's program
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        own.note = f"not measured: {reason}"
        warnings.warn(
            f"`unit_scale` leaves `{group.root.name}` at {_compat.layer_line(group.root.eqn)} as "
            f"it is, for it cannot be run by itself: {reason}",
            stacklevel=2,
        )
        return
    noise = _ROUNDING * max(grads, default=0.0)  # as of a bias in front of a normalisation
    own.output, own.grads = _inverse(rms), [_inverse(g if g > noise else 0.0) for g in grads]
    is_loss = loss is not None and through_movement(loss).op in group.ops
    if is_loss:
        _move_to_result(group, own)
    bound = _bound(group, own)
    # What the loss is made of stays as it is; and a single number has no distribution.
    if is_loss or group.is_tail or all(v.size == 1 for v in group.outputs):
        own.output = 1.0
        if constraint is not None:
            for i in bound:
                own.grads[i] = 1.0
    elif bound:
        _constrain(group, own, bound, constraint)


def _measured(group: Group, measuring: Measuring) -> tuple[float, list[float]]:
    """The RMS of the result of an operation and those of its operands' gradients."""
    if group.kind == "function":
        return measuring.function(group)
    return _of_product(group, measuring)


def _move_to_result(group: Group, own: Factors) -> None:
    """Take a factor out of all gradients of a loss: the edge at its end is a cut-edge."""
    largest = max(
        range(len(own.grads)), key=lambda i: (group.operands[i].is_inexact, group.operands[i].size)
    )
    own.result_grad = own.grads[largest]
    own.grads = [beta / own.result_grad for beta in own.grads]


def _bound(group: Group, own: Factors) -> list[int]:
    """The operands whose gradients a constraint is on."""
    return [i for i, v in enumerate(group.operands) if v.is_inexact and not own.is_cut[i]]


def _constrain(group: Group, own: Factors, bound: list[int], constraint: Constraint) -> None:
    """Make the factors of the result and of the `bound` gradients what a constraint says."""
    try:
        own.output, *same = apply_constraint(constraint, own.output, *(own.grads[i] for i in bound))
    except ValueError as error:
        error.add_note(f"It was `{group.root.name}` at {_compat.layer_line(group.root.eqn)}.")
        raise
    for i, beta in zip(bound, same, strict=True):
        own.grads[i] = beta


def _of_product(group: Group, measuring: Measuring) -> tuple[float, list[float]]:
    op = group.root
    terms = count_terms(op)
    known = [measuring.known(v) for v in op.inputs if v.is_known and v.is_inexact]
    size = math.prod(known) if all(known) else 1.0
    grads = [
        size * math.sqrt(terms / max(v.size, 1)) if v.is_inexact else 1.0 for v in group.operands
    ]
    return size * math.sqrt(terms / max(op.outputs[0].size, 1)), grads


def _inverse(rms: float) -> float:
    if not (rms > 0 and math.isfinite(rms)) or abs(math.log2(rms)) < _NEAR_ONE:
        return 1.0
    return 1 / rms


def _weigh(
    group: Group,
    own: Factors,
    terms: dict[tuple[Value, bool], float],
    constraint: Constraint,
    branches: int,
) -> None:
    """Give each term of a sum the same share of its variance.

    Terms are counted along a chain of sums; of residual sums, the first skip is one term.
    The sums of a loop, `branches` in all its steps, have the same weights in every step.
    """
    is_residual = group.split is not None
    counts = [terms.get((through_movement(v), is_residual), 1.0) for v in group.operands]
    if is_residual:
        counts[group.branch] = 1.0
        if branches:
            counts[1 - group.branch] = float(branches)
    total = sum(counts)
    own.weights = [math.sqrt(count / total) for count in counts]
    size = group.outputs[0].size
    own.grads = [
        math.sqrt(v.size / size) if cut or constraint is None else weight
        for v, cut, weight in zip(group.operands, own.is_cut, own.weights)
    ]
    terms[group.outputs[0], is_residual] = total


def _delay(group: Group, own: Factors, graph: graphs.Graph, factors: dict[Group, Factors]) -> None:
    """Move the backward factor of a branch from its end to where it starts."""
    starts = graph.branch(group)
    if starts is None:
        return
    weight = own.weights[group.branch]
    own.delayed, own.grads[group.branch] = weight, 1.0
    for edge in starts:
        assert edge.user is not None
        factors[edge.user].grads[edge.slot] *= weight


def _scale_body(group: Group, own: Factors) -> None:
    """A parameter that every step of a loop, or every device, uses has the sum of their gradients.

    In a `shard_map` whose types are checked, the body itself says where that is.
    """
    params, counts = group.root.eqn.params, [1] * len(group.root.inputs)
    if group.root.name == "scan":
        consts, _ = _compat.scan_counts(params)
        counts[:consts] = [params["length"]] * consts
    elif group.root.name == "shard_map" and not params["check_vma"]:
        counts = [count_devices_without(spec, params) for spec in params["in_specs"]]
    unknown = [n for v, n in zip(group.root.inputs, counts, strict=True) if not v.is_known]
    own.grads = [
        1 / math.sqrt(max(n, 1)) if cut and v.is_inexact else 1.0
        for v, n, cut in zip(group.operands, unknown, own.is_cut, strict=True)
    ]
