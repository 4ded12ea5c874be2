"""The degree of an optimizer's state in the gradient: how it grows if all gradients do.

A first moment has degree 1 and a second one 2. What is not known, such as parameters, scalars and
constants, has the degree `None`, and takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex_core

from jax_scalify.abstract import Interpretation
from jax_scalify.values import MOVEMENT

Degree = float | None

_POWERS = {"square": 2, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3, "sign": 0}
_PRODUCTS = ("mul", "dot_general", "ragged_dot_general", "conv_general_dilated")
_SUMS = frozenset(
    """add add_any sub max min select_n clamp concatenate stack pad dynamic_update_slice scatter
    scatter-add scatter_add""".split()
)
_KEEPS = MOVEMENT | frozenset(
    """neg abs real convert_element_type copy copy_p reduce_precision stop_gradient name
    optimization_barrier device_put sharding_constraint reduce_sum cumsum reduce_window_sum sort
    gather dynamic_slice split unstack transpose set_scaling rebalance_scale stop_scaling
    dynamic_rescale match_scale on_backward saturating_cast stochastic_cast""".split()
)


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
    if name == "pow" and isinstance(eqn.invars[1], jex_core.Literal):
        return float(np.asarray(eqn.invars[1].val))
    return _POWERS.get(name)


def _result(eqn: Any, degrees: list[Degree]) -> Degree:
    name, exponent = eqn.primitive.name, _exponent(eqn)
    if not any(v.aval.shape for v in eqn.outvars):
        return None
    if exponent is not None:
        return None if degrees[0] is None else degrees[0] * exponent
    if name in _PRODUCTS:
        return _product(degrees[0], degrees[1])
    if name == "div":
        return _product(degrees[0], degrees[1], -1)
    if name in _SUMS:
        known: Degree = None
        for degree in degrees:
            known = join(known, degree)
        return known
    return degrees[0] if name in _KEEPS else None


_DEGREES = Interpretation(
    equation=lambda eqn, degrees: [_result(eqn, degrees)] * len(eqn.outvars),
    constant=lambda literal: None,
    join=join,
    unknown=None,
)


def degrees_of_results(jaxpr: Any, degrees: Sequence[Degree]) -> list[Degree]:
    """Return the degree of each result of a jaxpr, given those of its operands."""
    return _DEGREES.results(jaxpr, degrees)
