"""What can be told of a jaxpr's results from facts about its operands, without any values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex_core

from jax_scalify import _compat

# Equations that apply the function that they hold to all of their operands.
CALLS = frozenset(
    """jit pjit custom_jvp_call custom_vjp_call closed_call core_call custom_scale remat2
    checkpoint""".split()
)
_MAX_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class Interpretation:
    """Facts of some kind, and how equations make them.

    Attributes:
        equation: the facts about the results of an equation, given those about its operands.
        constant: the fact about a literal.
        join: what is still known of a value that may be either of two.
        unknown: the fact that says nothing.
    """

    equation: Callable[[Any, list[Any]], list[Any]]
    constant: Callable[[Any], Any]
    join: Callable[[Any, Any], Any]
    unknown: Any

    def results(self, jaxpr: Any, facts: Sequence[Any]) -> list[Any]:
        """Return the facts about the results of a jaxpr, through calls, branches and loops."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, facts, strict=True))

        def read(atom: Any) -> Any:
            literal = isinstance(atom, jex_core.Literal)
            return self.constant(atom) if literal else known.get(atom, self.unknown)

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._results(eqn, [read(v) for v in eqn.invars])))
        return [read(v) for v in jaxpr.outvars]

    def _results(self, eqn: Any, facts: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            return self.results(params.get("jaxpr", params.get("call_jaxpr")), facts)
        if name == "cond":
            branches = [self.results(branch, facts[1:]) for branch in params["branches"]]
            return [self._join_all(outs) for outs in zip(*branches, strict=True)]
        if name == "while":
            start = params["cond_nconsts"] + params["body_nconsts"]
            consts = facts[params["cond_nconsts"] : start]
            return self._loop(params["body_jaxpr"], consts, facts[start:], [])
        if name == "scan":
            num_consts, num_carry = _compat.scan_counts(params)
            start = num_consts + num_carry
            carry = facts[num_consts:start]
            return self._loop(params["jaxpr"], facts[:num_consts], carry, facts[start:])
        return self.equation(eqn, facts)

    def _loop(self, body: Any, consts: list[Any], carry: list[Any], xs: list[Any]) -> list[Any]:
        """The facts about carries that each step keeps, and about what it stacks."""
        for _ in range(_MAX_ROUNDS):
            out = self.results(body, [*consts, *carry, *xs])
            joined = [self.join(a, b) for a, b in zip(carry, out, strict=False)]
            if joined == carry:
                return [*carry, *out[len(carry) :]]
            carry = joined
        return [self.unknown] * len(out)

    def _join_all(self, facts: Sequence[Any]) -> Any:
        joined = facts[0]
        for fact in facts[1:]:
            joined = self.join(joined, fact)
        return joined
