"""The scalar scales of a trace, computed together.

A training step has thousands of scales that are known at run time only. One by one they would be
most of the operations of the compiled program, each on one number. While a function is traced, a
scale that data has to be multiplied by is therefore a placeholder, an equation without operands.
When the trace is over, the placeholders are replaced by the results of a few operations on vectors
of exponents: one round for all scales that can be computed of what is known by then.

A program knows each scale by a number. What is computed of scales is a `Scale` whose factors are
numbers in place of atoms.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core as jex_core

from jax_scalify.base.pow2 import MAX_EXPONENT
from jax_scalify.scales.algebra import Scale

# `max(max(a, b), c)` is computed as `max(a, b, c)`, if these are no more monomials than this.
_MAX_TERMS = 32
# A norm over all leaves of a tree takes the maximum of one scale after the other: of that many.
_MAX_CHAIN = 128

placeholder_p = jex_core.Primitive("scale_placeholder")


@placeholder_p.def_abstract_eval
def _placeholder_aval(*, number: int, dtype: Any) -> Any:
    return ShapedArray((), dtype)


@dataclasses.dataclass(frozen=True)
class Computed:
    """A scale made of others: the maximum of monomials, or (degree > 1) a root or its rest.

    The exponent of a maximum is at most `limit`; that of a single monomial, unless it is a 0, is
    brought within `+-limit`. `root**degree * rest` is the monomial, with a rest between 1 and
    `2**(degree - 1)`. What is held is the first of two terms, where it is not 0; else the second,
    within `+-limit`.
    """

    terms: tuple[Scale, ...]
    degree: int = 1
    is_rest: bool = False
    limit: float = MAX_EXPONENT
    is_held: bool = False

    @property
    def is_maximum(self) -> bool:
        """Whether it is the largest of several monomials."""
        return self.degree == 1 and len(self.terms) > 1 and not self.is_held

    def operands(self) -> list[int]:
        """The numbers of the scales that it is made of."""
        return list({n for term in self.terms for n, _ in term.factors})


class ScaleProgram:
    """What has to be computed of the scalar scales of one trace."""

    def __init__(self, dtype: Any):
        """Start an empty program for scales of the given dtype."""
        self.dtype = jnp.dtype(dtype)
        self.sources: list[Any] = []  # arrays that scales are made of
        self._scales: list[Any] = []  # a source's position, or how it is computed
        self._numbers: dict[Computed, int] = {}
        self._chains: set[int] = set()  # maxima whose terms are maxima of their own
        self._needs: list[int] = []  # the sources that a scale is computed of, as bits
        self._requests: list[Scale] = []
        self._placeholders: dict[Scale, Any] = {}

    def source(self, array: Any) -> int:
        """Take in a scale that is an array; return its number."""
        self.sources.append(array)
        self._needs.append(1 << len(self.sources) - 1)
        self._scales.append(len(self.sources) - 1)
        return len(self._scales) - 1

    def maximum(self, terms: Sequence[Scale]) -> int:
        """Define the maximum of some monomials; return its number."""
        choices = [self._choices(term) for term in terms]
        chain = [part for term in terms for part in self._chain(term)]
        goes_on = len(terms) < len(chain) <= _MAX_CHAIN
        if goes_on or sum(math.prod(map(len, c)) for c in choices) > _MAX_TERMS:
            number = self._define(Computed(_largest(chain if goes_on else terms)))
            self._chains.add(number)
            return number
        # max(a, b) * c is the maximum of a * c and b * c: no scale has to wait for another one.
        products = [
            math.prod(chosen, start=Scale(term.exponent))
            for term, factors in zip(terms, choices, strict=True)
            for chosen in itertools.product(*factors)
        ]
        return self._define(Computed(_largest(products)))

    def bounded(self, of: Scale, limit: float) -> int:
        """Define a monomial with its exponent brought within `+-limit`; return its number."""
        return self._define(Computed((of,), limit=limit))

    def held(self, first: Scale, second: Scale, limit: float) -> int:
        """Define `first`, or, where that is 0, `second` within `+-limit`; return its number."""
        return self._define(Computed((first, second), limit=limit, is_held=True))

    def _chain(self, term: Scale) -> list[Scale]:
        """The monomials of which a term is the maximum, if it is one of too many to multiply."""
        (number, power), *others = term.factors or ((-1, 0),)
        if others or power != 1 or number not in self._chains:
            return [term]
        return [Scale(term.exponent) * t for t in self._scales[number].terms]

    def _choices(self, term: Scale) -> list[list[Scale]]:
        """For each factor the monomials of which it is the maximum, by itself or to a power."""
        choices = []
        for number, power in term.factors:
            scale = self._scales[number]
            is_maximum = isinstance(scale, Computed) and scale.is_maximum
            alone = [Scale.of_factor(number) ** power]
            choices.append([t**power for t in scale.terms] if is_maximum and power > 0 else alone)
        return choices

    def root(self, of: Scale, degree: int) -> tuple[int, int]:
        """Define root and rest of a monomial; return their numbers."""
        root, rest = (Computed((of,), degree, is_rest) for is_rest in (False, True))
        return self._define(root), self._define(rest)

    def _define(self, computed: Computed) -> int:
        if computed in self._numbers:
            return self._numbers[computed]
        self._numbers[computed] = len(self._scales)
        needs = 0
        for term in computed.terms:
            needs |= self._needs_of(term)
        self._needs.append(needs)
        self._scales.append(computed)
        return len(self._scales) - 1

    def _needs_of(self, monomial: Scale) -> int:
        needs = 0
        for number, _ in monomial.factors:
            needs |= self._needs[number]
        return needs

    def placeholder(self, monomial: Scale) -> Any:
        """Return an array that will be a monomial's value."""
        if monomial not in self._placeholders:
            number = len(self._requests)
            self._requests.append(monomial)
            self._placeholders[monomial] = placeholder_p.bind(number=number, dtype=self.dtype)
        return self._placeholders[monomial]

    def is_ready(self, number: int, available: int) -> bool:
        """Whether the sources of a request are among those available."""
        return not self._needs_of(self._requests[number]) & ~available

    def request(self, number: int) -> Scale:
        """Return what was asked for."""
        return self._requests[number]

    def scale(self, number: int) -> Any:
        """Return the position of a scale's source, or how it is computed."""
        return self._scales[number]


def _largest(monomials: Sequence[Scale]) -> tuple[Scale, ...]:
    """Of monomials that differ in nothing but the static factor only the largest one."""
    largest: dict[tuple, float] = {}
    for m in monomials:
        largest[m.factors] = max(m.exponent, largest.get(m.factors, -math.inf))
    return tuple(Scale(e, f) for f, e in largest.items())
