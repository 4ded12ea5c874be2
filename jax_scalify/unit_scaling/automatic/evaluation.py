"""Running a program with the factors of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify.base.jaxprs import while_operands
from jax_scalify.unit_scaling.automatic.groups import Group
from jax_scalify.unit_scaling.automatic.planning import Factors, Plan
from jax_scalify.unit_scaling.automatic.program import Op, Scope, Value, run_op
from jax_scalify.unit_scaling.scaling import scale_bwd, scale_fwd

Observer = Callable[[Value, Any], Any]


def run(plan: Plan, args: Sequence[Any], observe: Observer | None = None) -> list[Any]:
    """Evaluate the program of a plan.

    `observe` may replace the results of its groups. What is computed again in the backward pass is
    kept then and loops are unrolled, so that all results are of one trace; branches, loops of
    unknown length and what runs on a mesh are seen from outside.
    """
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
) -> Sequence[Any]:
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
        if group.root.bodies:
            return _run_bodies(plan, group, args, observe)
        results = run_op(group.root, args)
    results = [_leave(x, v, factors) for x, v in zip(results, group.outputs, strict=True)]
    return _observed(group, results, observe)


def _observed(group: Group, results: Sequence[Any], observe: Observer | None) -> Sequence[Any]:
    if observe is None:
        return results
    return [observe(v, x) for v, x in zip(group.outputs, results, strict=True)]


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


def _run_bodies(
    plan: Plan, group: Group, args: Sequence[Any], observe: Observer | None
) -> Sequence[Any]:
    op = group.root
    if op.name == "scan":
        return _run_scan(plan, op, args, observe)
    if op.name not in _FROM_OUTSIDE:
        return _run_checkpoint(plan, op, args, observe)
    return _observed(group, _FROM_OUTSIDE[op.name](plan, op, args), observe)


def _run_checkpoint(
    plan: Plan, op: Op, args: Sequence[Any], observe: Observer | None
) -> Sequence[Any]:
    (body,) = op.bodies
    if observe is not None:
        return _run_scope(plan, body, args, observe)
    params = op.eqn.params
    kept = jax.checkpoint(
        lambda *xs: _run_scope(plan, body, xs, None),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    return kept(*args)


def _run_scan(plan: Plan, op: Op, args: Sequence[Any], observe: Observer | None) -> list[Any]:
    (body,), params = op.bodies, op.eqn.params
    consts, count = _compat.scan_counts(params)

    def step(carry: Any, xs: Any) -> Any:
        out = _run_scope(plan, body, [*args[:consts], *carry, *xs], observe)
        return out[:count], out[count:]

    carry, xs = list(args[consts : consts + count]), list(args[consts + count :])
    length, reverse = params["length"], params["reverse"]
    if observe is None or not length:
        carry, ys = lax.scan(
            step, carry, xs, length=length, reverse=reverse, unroll=params["unroll"]
        )
        return [*carry, *ys]
    steps = []
    for i in reversed(range(length)) if reverse else range(length):
        carry, ys = step(carry, [x[i] for x in xs])
        steps.append(ys)
    stacked = [jnp.stack(ys[::-1] if reverse else ys) for ys in zip(*steps, strict=True)]
    return [*carry, *stacked]


def _run_while(plan: Plan, op: Op, args: Sequence[Any]) -> Any:
    """The condition is evaluated as it is, on what the body makes."""
    (body,), params = op.bodies, op.eqn.params
    tested, consts, carry = while_operands(params, args)
    condition = jex_core.jaxpr_as_fun(params["cond_jaxpr"])
    return lax.while_loop(
        lambda carry: condition(*tested, *carry)[0],
        lambda carry: _run_scope(plan, body, [*consts, *carry], None),
        list(carry),
    )


def _run_cond(plan: Plan, op: Op, args: Sequence[Any]) -> Any:
    def branch(body: Scope) -> Callable[..., list[Any]]:
        return lambda *xs: _run_scope(plan, body, xs, None)

    return lax.switch(args[0], [branch(body) for body in op.bodies], *args[1:])


def _run_shard_map(plan: Plan, op: Op, args: Sequence[Any]) -> Any:
    (body,), params = op.bodies, op.eqn.params
    sharded = jax.shard_map(
        lambda *xs: tuple(_run_scope(plan, body, xs, None)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return sharded(*args)


_FROM_OUTSIDE = {"while": _run_while, "cond": _run_cond, "shard_map": _run_shard_map}
