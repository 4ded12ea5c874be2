"""Activation functions that a backward pass computes again, in a function as it is.

A derivative by JAX keeps several arrays of `gelu(x)`, and `silu(gate) * up` keeps four. What makes
them is cheap, so that their input is all that has to be kept.
"""

from __future__ import annotations

import collections
from typing import Any

import jax

from jax_scalify import _compat
from jax_scalify.base.jaxprs import all_equations, applied, is_var
from jax_scalify.interpreter.traits import traits_of

# Between elementwise equations, and as cheap as they are.
_SHAPED = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze")
# What tells an activation function. No `exp`: of softmax, which is to be kept as it is.
_TELLING = frozenset("erf erfc expm1 log1p logistic tanh".split())


def with_recomputed_activations(closed: Any) -> Any:
    """Return a closed jaxpr of the same values, its activation functions in `jax.checkpoint`.

    Elementwise equations wait until another one needs one of them. What has waited by then is
    computed together, and again in the backward pass if there is an activation function in it:
    of `silu(x @ v) * (x @ w)` both products come first, and are all that is kept.

    Example:
        >>> import jax.numpy as jnp
        >>> f = lambda x: jnp.dot(jnp.tanh(x) * 2, x)
        >>> new = with_recomputed_activations(jax.make_jaxpr(f)(jnp.ones(3)))
        >>> len(jax.make_jaxpr(f)(jnp.ones(3)).jaxpr.eqns), len(new.jaxpr.eqns)  # one is remat
        (3, 2)
    """
    if not any(e.primitive.name in _TELLING for e in all_equations(closed.jaxpr)):
        return closed
    groups = _grouped(closed.jaxpr)
    used = collections.Counter(v for eqn in closed.jaxpr.eqns for v in eqn.invars if is_var(v))
    used.update(v for v in closed.jaxpr.outvars if is_var(v))

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


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation computes each element from those in its place, or is a call of such."""
    body = applied(eqn)
    if body is None:
        name = eqn.primitive.name
        return not eqn.effects and (name in _SHAPED or traits_of(name).elementwise)
    if eqn.primitive.name in ("checkpoint", "remat2", "custom_vjp_call"):
        return False
    return all(map(_is_elementwise, getattr(body, "jaxpr", body).eqns))


def _evaluate(group: list[Any], used: collections.Counter, known: dict[Any, Any]) -> None:
    """Evaluate a group of equations, as one that is computed again if it is an activation."""
    inside = collections.Counter(v for eqn in group for v in eqn.invars if is_var(v))
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
