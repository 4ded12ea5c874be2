"""Activation functions that a backward pass computes again, in a function as it is.

A derivative by JAX keeps several arrays of `gelu(x)`, and `silu(gate) * up` keeps four. What makes
them is cheap, so that their input is all that has to be kept.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import jax

from jax_scalify import _compat
from jax_scalify.base.jaxprs import all_equations, applied, is_var
from jax_scalify.interpreter.traits import traits_of

# Between elementwise equations, and as cheap as they are.
_SHAPED = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze")
# Calls whose derivative is another one than that of their body.
_DERIVED = ("remat2", "custom_vjp_call")
# What tells an activation function. No `exp`: of softmax, which is to be kept as it is.
_TELLING = frozenset("erf erfc expm1 log1p logistic tanh".split())


def with_recomputed_activations(closed: Any) -> Any:
    """Return a closed jaxpr of the same values, its activation functions in `jax.checkpoint`.

    Elementwise equations wait until another one needs one of them. What has waited by then is
    computed together, and again in the backward pass if there is an activation function in it:
    of `silu(x @ v) * (x @ w)` both products come first, and are all that is kept. The matmul that
    alone takes an activation belongs to it: its operand is made again, for the gradient of the
    other one, and its product is not, since nothing in the backward pass needs it.

    Example:
        >>> import jax.numpy as jnp
        >>> f = lambda x: jnp.exp(jnp.dot(jnp.tanh(x) * 2, x))
        >>> new = with_recomputed_activations(jax.make_jaxpr(f)(jnp.ones(3)))
        >>> [eqn.primitive.name for eqn in new.jaxpr.eqns][1:]  # after tanh, mul and the matmul
        ['exp']
    """
    if not any(e.primitive.name in _TELLING for e in all_equations(closed.jaxpr)):
        return closed
    used = _uses(closed.jaxpr.eqns)
    used.update(v for v in closed.jaxpr.outvars if is_var(v))
    groups = _with_matmuls(_grouped(closed.jaxpr), used)

    def flat(*args: Any) -> list[Any]:
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(closed.jaxpr.invars, args, strict=True))
        for group in groups:
            _evaluate(group, used, known)
        return [known[v] if is_var(v) else v.val for v in closed.jaxpr.outvars]

    with _compat.no_name_stack():
        return jax.make_jaxpr(flat)(*closed.in_avals)


def _grouped(jaxpr: Any) -> list[list[Any]]:
    """The equations in an order in which elementwise ones come as late as they can, together."""
    groups: list[list[Any]] = []
    waiting: list[Any] = []
    results: set[Any] = set()  # of those that wait
    for eqn in jaxpr.eqns:
        if _is_elementwise(eqn):
            waiting.append(eqn)
            results.update(eqn.outvars)
            continue
        if eqn.effects or any(is_var(v) and v in results for v in eqn.invars):
            groups.append(waiting)
            waiting, results = [], set()
        groups.append([eqn])
    return [group for group in (*groups, waiting) if group]


def _with_matmuls(groups: list[list[Any]], used: collections.Counter) -> list[list[Any]]:
    """The groups, each matmul in that of the activation that it alone takes."""
    merged: list[list[Any]] = []
    for group in groups:
        before, taker = merged[-1] if merged else [], group[0]
        if any(map(_is_activation, before)) and _is_matmul(taker):
            uses = _uses([*before, taker])
            made = [v for eqn in before for v in eqn.outvars if v in taker.invars]
            if made and all(used[v] == uses[v] for v in made):
                merged[-1] = [*before, taker]
                continue
        merged.append(group)
    return merged


def _uses(eqns: Iterable[Any]) -> collections.Counter:
    """How often equations take each variable."""
    return collections.Counter(v for eqn in eqns for v in eqn.invars if is_var(v))


def _is_matmul(eqn: Any) -> bool:
    """Whether an equation is a matmul, or a call of one that moves its operands or its product."""
    body = applied(eqn)
    if body is None or eqn.primitive.name in _DERIVED:
        return traits_of(eqn.primitive.name).is_matmul
    eqns = getattr(body, "jaxpr", body).eqns
    rest = [e for e in eqns if not _is_matmul(e)]
    moves = (traits_of(e.primitive.name).elements in ("same", "moved") for e in rest)
    return len(eqns) == len(rest) + 1 and all(moves)


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation computes each element from those in its place, or is a call of such."""
    body = applied(eqn)
    if body is None:
        name = eqn.primitive.name
        return not eqn.effects and (name in _SHAPED or traits_of(name).elementwise)
    if eqn.primitive.name in _DERIVED:
        return False
    return all(map(_is_elementwise, getattr(body, "jaxpr", body).eqns))


def _evaluate(group: list[Any], used: collections.Counter, known: dict[Any, Any]) -> None:
    """Evaluate a group of equations, as one that is computed again if it is an activation."""
    inside = _uses(group)
    made = [v for eqn in group for v in eqn.outvars]
    needed = [v for v in inside if v not in set(made)]
    given = [v for v in made if used[v] > inside[v]]

    def call(*operands: Any) -> list[Any]:
        values = dict(zip(needed, operands, strict=True))
        for eqn in group:
            xs = [values[v] if is_var(v) else v.val for v in eqn.invars]
            with _compat.equation_context(eqn):
                params = eqn.primitive.get_bind_params(eqn.params)
                out = eqn.primitive.bind(*xs, **params)
            values.update(zip(eqn.outvars, out if eqn.primitive.multiple_results else [out]))
        return [values[v] for v in given]

    if any(map(_is_activation, group)):
        call = jax.checkpoint(call)
    known.update(zip(given, call(*(known[v] for v in needed)), strict=True))


def _is_activation(eqn: Any) -> bool:
    """Whether an elementwise equation tells an activation function, or calls one that does."""
    body = applied(eqn)
    if body is None or not _is_elementwise(eqn):
        return eqn.primitive.name in _TELLING
    return any(map(_is_activation, getattr(body, "jaxpr", body).eqns))
