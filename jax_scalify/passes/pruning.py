"""What only a derivative would need: dropped where derivatives have been taken already.

An FP8 matmul has a derivative of the arrays in 16 bits that its operands were (`straight_through`).
With these, a backward pass would seem to keep both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_scalify import _compat
from jax_scalify.base.jaxprs import all_equations, is_var, scan_operands
from jax_scalify.primitives.straight_through import straight_through_p


def pruned(closed: Any) -> Any:
    """Return a closed jaxpr of the same values, without what is there for their derivatives.

    Example:
        >>> import jax
        >>> from jax_scalify.primitives.straight_through import straight_through
        >>> f = lambda x: straight_through(2 * x, jax.numpy.sin, x + 1)
        >>> [eqn.primitive.name for eqn in pruned(jax.make_jaxpr(f)(1.0)).jaxpr.eqns]
        ['mul']
    """
    if all(e.primitive is not straight_through_p for e in all_equations(closed.jaxpr)):
        return closed
    known: dict[int, Any] = {}  # what is called several times stays one function

    def of_any(held: Any) -> Any:
        if isinstance(held, (tuple, list)):
            make = getattr(held, "_make", type(held))  # named, as those of a linear solve
            return make(map(of_any, held)) if any(map(_is_jaxpr, held)) else held
        if not _is_jaxpr(held):
            return held
        if id(held) not in known:
            is_closed = hasattr(held, "consts")
            jaxpr = of_jaxpr(held.jaxpr if is_closed else held)
            known[id(held)] = _compat.close_jaxpr(jaxpr, held.consts) if is_closed else jaxpr
        return known[id(held)]

    def of_jaxpr(jaxpr: Any) -> Any:
        same: dict[Any, Any] = {}

        def found(atom: Any) -> Any:
            return same.get(atom, atom) if is_var(atom) else atom

        equations = []
        for eqn in jaxpr.eqns:
            if eqn.primitive is straight_through_p:
                same[eqn.outvars[0]] = found(eqn.invars[0])
                continue
            params = {name: of_any(held) for name, held in eqn.params.items()}
            if eqn.primitive.name == "scan":
                same.update(_given_back(eqn, params, found))
            equations.append(eqn.replace(invars=list(map(found, eqn.invars)), params=params))
        return jaxpr.replace(eqns=equations, outvars=list(map(found, jaxpr.outvars)))

    return _compat.live_closed_jaxpr(of_any(closed))


def _given_back(eqn: Any, params: dict[str, Any], found: Callable[[Any], Any]) -> dict[Any, Any]:
    """The results of a scan that are what it goes over: FP8 weights, for a backward pass."""
    body, (_, carry) = params["jaxpr"].jaxpr, _compat.scan_counts(eqn.params)
    _, _, xs = scan_operands(eqn.params, eqn.invars)
    outer = dict(zip(body.invars[len(body.invars) - len(xs) :], xs, strict=True))
    pairs = list(zip(eqn.outvars, body.outvars, strict=True))[carry:]
    return {var: found(outer[inner]) for var, inner in pairs if is_var(inner) and inner in outer}


def _is_jaxpr(held: Any) -> bool:
    return hasattr(getattr(held, "jaxpr", held), "eqns")
