"""What can be told of a jaxpr's results from facts about its operands, without any values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax_scalify import jaxprs

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
        return jaxprs.evaluate(
            jaxpr, facts, self._results, self.constant, lambda var, value: self.unknown
        )

    def _results(self, eqn: Any, facts: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        call = jaxprs.applied(eqn)
        if call is not None:
            return self.results(call, facts)
        if name == "cond":
            branches = [self.results(branch, facts[1:]) for branch in params["branches"]]
            return [self._join_all(outs) for outs in zip(*branches, strict=True)]
        if name == "while":
            _, consts, carry = jaxprs.while_operands(params, facts)
            return self._loop(params["body_jaxpr"], consts, carry, [])
        if name == "scan":
            return self._loop(params["jaxpr"], *jaxprs.scan_operands(params, facts))
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
