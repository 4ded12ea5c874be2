"""The scalar scales of a trace, computed together.

A training step has thousands of dynamic scales. Computed one by one, they would be most of the
operations of the compiled program, each on a single number. While a function is traced, a scale
that multiplies data is therefore a placeholder, an equation without operands. When the trace is
over, the placeholders are replaced by the results of a few operations on vectors of exponents
(`scales/rounds.py`).

A program identifies each scale by a number. Computed scales are described by `Scale` objects
whose factors are such numbers instead of atoms.

Example: `x * y + z` with sources `a`, `b`, `c` (numbers 0, 1, 2) defines number 3 as
`Computed((a * b, c))`, the maximum of two monomials. The data of `x * y` is multiplied by the
placeholder of `a * b / 3`. With exponents 2, -5 and -1, number 3 has the exponent
`max(2 - 5, -1) = -1`, and the placeholder becomes `2**(-3 + 1) = 0.25`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core as jex_core

from jax_scalify.scales.algebra import Computed, Scale, without_smaller

# `max(max(a, b), c)` is computed as `max(a, b, c)` if it has at most this many monomials.
_MAX_TERMS = 32
# A norm over all leaves of a tree takes the maximum with one scale after the other. Such a chain is
# computed as one maximum if it has at most this many terms.
_MAX_CHAIN = 128

placeholder_p = jex_core.Primitive("scale_placeholder")


@placeholder_p.def_abstract_eval
def _placeholder_aval(*, monomial: Scale, most: float | None, dtype: Any) -> Any:
    return ShapedArray((), dtype)


class ScaleProgram:
    """The computation of the scalar scales of one trace."""

    def __init__(self, dtype: Any):
        """Make an empty program for scales of this dtype."""
        self.dtype: Any = jnp.dtype(dtype)
        self.sources: list[Any] = []  # the arrays that scales are computed from
        self.scales: list[Any] = []  # by number: the position of a source, or a `Computed`
        self._numbers: dict[Computed, int] = {}
        self._chains: set[int] = set()  # the numbers of maxima whose terms were not multiplied out
        self._needs: list[int] = []  # by number: the sources that it depends on, as bits
        self._placeholders: dict[tuple[Scale, float | None], Any] = {}

    def source(self, array: Any) -> int:
        """Add a scale that is an array. Return its number."""
        self.sources.append(array)
        self._needs.append(1 << len(self.sources) - 1)
        self.scales.append(len(self.sources) - 1)
        return len(self.scales) - 1

    def define(self, computed: Computed) -> int:
        """Return the number of a computed scale. Equal scales have one number."""
        is_chain = False
        if computed.is_maximum:
            terms, is_chain = self._multiplied_out(computed.terms)
            computed = Computed(tuple(without_smaller(terms)))
        if computed not in self._numbers:
            self._numbers[computed] = len(self.scales)
            self._needs.append(functools.reduce(operator.or_, map(self.needs, computed.terms)))
            self.scales.append(computed)
        number = self._numbers[computed]
        if is_chain:
            self._chains.add(number)
        return number

    def _multiplied_out(self, terms: Sequence[Scale]) -> tuple[Sequence[Scale], bool]:
        """Return the terms of a maximum, and whether they may hold factors that are maxima."""
        choices = [self._choices(term) for term in terms]
        chain = [part for term in terms for part in self._chain(term)]
        # A maximum of more than `_MAX_TERMS` products starts a chain. `max(chain, x)` takes over
        # the terms of the chain, so that it need not wait for the chain.
        goes_on = len(terms) < len(chain) <= _MAX_CHAIN
        if goes_on or sum(math.prod(map(len, c)) for c in choices) > _MAX_TERMS:
            return chain if goes_on else terms, True
        # max(a, b) * c = max(a * c, b * c). The right side need not wait for max(a, b). With terms
        # `max(a, b) * c` and `d`, the choices are `[[a, b], [c]]` and `[[d]]`, and the products are
        # `a * c`, `b * c` and `d`.
        products = [
            math.prod(chosen, start=Scale(term.exponent))
            for term, factors in zip(terms, choices, strict=True)
            for chosen in itertools.product(*factors)
        ]
        return products, False

    def _chain(self, term: Scale) -> list[Scale]:
        """Return the monomials of a term that is a maximum of many; otherwise the term itself."""
        number = term.only_factor
        if number not in self._chains:
            return [term]
        return [Scale(term.exponent) * t for t in self.scales[number].terms]

    def _choices(self, term: Scale) -> list[list[Scale]]:
        """Return for each factor the monomials that it is the maximum of, raised to its power."""
        choices = []
        for number, power in term.factors:
            scale = self.scales[number]
            # `1 / max(a, b)` is a minimum, so it stays one factor.
            is_maximum = isinstance(scale, Computed) and scale.is_maximum and power > 0
            terms = scale.terms if is_maximum else [Scale.of_factor(number)]
            choices.append([t**power for t in terms])
        return choices

    def needs(self, monomial: Scale) -> int:
        """Return the sources that a monomial depends on, as bits."""
        needs = 0
        for number, _ in monomial.factors:
            needs |= self._needs[number]
        return needs

    def placeholder(self, monomial: Scale, most: float | None = math.inf) -> Any:
        """Return a tracer that `resolve` replaces by `2**min(exponent, most)` of a monomial.

        If `most` is None, it is replaced by the exponent, as float32.
        """
        request = monomial, most
        if request not in self._placeholders:
            dtype = self.dtype if most is not None else np.float32
            made = placeholder_p.bind(monomial=monomial, most=most, dtype=dtype)
            self._placeholders[request] = made
        return self._placeholders[request]
