"""Running a program with the factors of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_scalify import _compat
from jax_scalify.unit_scaling.automatic.groups import Group
from jax_scalify.unit_scaling.automatic.planning import Factors, Plan
from jax_scalify.unit_scaling.automatic.program import Op, Scope, Value, run_op
from jax_scalify.unit_scaling.scaling import scale_bwd, scale_fwd

Observer = Callable[[Group, Any], Any]


def run(plan: Plan, args: Sequence[Any], observe: Observer | None = None) -> list[Any]:
    """Evaluate the program of a plan; `observe` may replace the results of its groups."""
    return _run_scope(plan, plan.scope, args, observe)


def _run_scope(
    plan: Plan, scope: Scope, args: Sequence[Any], observe: Observer | None
) -> list[Any]:
    env: dict[Value, Any] = dict(zip(scope.inputs, args, strict=True))
    group_of = {group.root: group for group in plan.groups[scope]}
    members = {op for group in plan.groups[scope] for op in group.ops}
    for op in scope.ops:
        if op in group_of:
            results = _run_group(plan, group_of[op], env, observe)
        elif op not in members:
            results = run_op(op, [read(env, v) for v in op.inputs])
        else:
            continue
        env.update(zip(op.outputs, results, strict=True))
    return [read(env, v) for v in scope.outputs]


def read(env: dict[Value, Any], value: Value) -> Any:
    """Return a value, or the constant that it is."""
    return env[value] if value in env else value.constant


def _run_group(
    plan: Plan, group: Group, env: dict[Value, Any], observe: Observer | None
) -> list[Any]:
    factors = plan.factors[group]
    slots = iter(zip(factors.weights, factors.grads, strict=True))
    results: Sequence[Any]
    if group.kind == "function":
        local = dict(env)
        for value, (weight, grad) in zip(group.operands, slots, strict=True):
            local[value] = _enter(read(env, value), weight, grad)
        results = ()
        for op in group.ops:
            results = run_op(op, [read(local, v) for v in op.inputs])
            local.update(zip(op.outputs, results, strict=True))
    else:
        args = [
            read(env, v) if v.is_known else _enter(read(env, v), *next(slots))
            for v in group.root.inputs
        ]
        body = group.root.body
        if body is not None:
            return _run_body(plan, group.root, body, args, observe)
        results = run_op(group.root, args)
    results = [_leave(x, v, factors) for x, v in zip(results, group.outputs, strict=True)]
    return results if observe is None else [observe(group, x) for x in results]


def _enter(x: Any, weight: float, grad: float) -> Any:
    """Multiply an operand by a weight, and its gradient by a factor."""
    if weight != 1:
        x = scale_fwd(x, weight)
    return x if grad == 1 else scale_bwd(x, grad)


def _leave(x: Any, value: Value, factors: Factors) -> Any:
    if not value.is_inexact:
        return x
    if factors.output != 1:
        x = scale_fwd(x, factors.output)
    return x if factors.result_grad == 1 else scale_bwd(x, factors.result_grad)


def _run_body(
    plan: Plan, op: Op, body: Scope, args: Sequence[Any], observe: Observer | None
) -> list[Any]:
    params = op.eqn.params
    if not op.is_scan:

        def checkpointed(*xs: Any) -> list[Any]:
            return _run_scope(plan, body, xs, observe)

        kept = jax.checkpoint(
            checkpointed, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        return kept(*args)
    consts, count = _compat.scan_counts(params)

    def step(carry: Any, xs: Any) -> Any:
        out = _run_scope(plan, body, [*args[:consts], *carry, *xs], observe)
        return out[:count], out[count:]

    carry, ys = jax.lax.scan(
        step,
        list(args[consts : consts + count]),
        list(args[consts + count :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]
