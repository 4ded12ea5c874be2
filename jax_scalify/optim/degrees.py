"""The degree of an optimizer's state in the gradient: how it grows if all gradients do.

A first moment has degree 1 and a second one 2. What is not known, such as parameters, scalars and
constants, has the degree `None`, and takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_scalify.base.jaxprs import Interpretation, is_var
from jax_scalify.interpreter.traits import traits_of

Degree = float | None


def join(lhs: Degree, rhs: Degree) -> Degree:
    """The degree of a sum: the larger one of those that are known."""
    known = [d for d in (lhs, rhs) if d is not None]
    return max(known, default=None)


def _product(lhs: Degree, rhs: Degree, sign: int = 1) -> Degree:
    return None if lhs is rhs is None else (lhs or 0) + sign * (rhs or 0)


def _exponent(eqn: Any) -> float | None:
    """The number to whose power an equation raises its operand."""
    name = eqn.primitive.name
    if name == "integer_pow":
        return eqn.params["y"]
    if name == "pow" and not is_var(eqn.invars[1]):
        return float(np.asarray(eqn.invars[1].val))
    degree = traits_of(name).degree
    return degree if isinstance(degree, (int, float)) else None


def _result(eqn: Any, degrees: list[Degree]) -> Degree:
    exponent = _exponent(eqn)
    if not any(v.aval.shape for v in eqn.outvars):
        return None
    if exponent is not None:
        return None if degrees[0] is None else degrees[0] * exponent
    traits = traits_of(eqn.primitive.name)
    if traits.degree in ("product", "quotient"):
        return _product(degrees[0], degrees[1], 1 if traits.degree == "product" else -1)
    if traits.degree == "sum" or traits.elements in ("joined", "placed"):
        known: Degree = None
        for degree in degrees:
            known = join(known, degree)
        return known
    return degrees[0] if traits.is_given or traits.is_view else None


_DEGREES = Interpretation(
    equation=lambda eqn, degrees: [_result(eqn, degrees)] * len(eqn.outvars),
    constant=lambda literal: None,
    join=join,
    unknown=None,
)


def degrees_of_results(jaxpr: Any, degrees: Sequence[Degree]) -> list[Degree]:
    """Return the degree of each result of a jaxpr, given those of its operands."""
    return _DEGREES.results(jaxpr, degrees)
