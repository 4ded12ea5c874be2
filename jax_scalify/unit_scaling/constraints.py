"""Which factors of an operation have to be equal.

With factors of their own, results and gradients all have unit scale, but where the forward graph
branches the gradients that meet are off by different constants. An operand whose edge is no
cut-edge of the graph therefore needs the factor of the result: a constraint says which one that is.

Source: Blake et al., *Unit Scaling* (2023), sections 5.1 and 5.2 and theorem 5.2; *u-µP* (2024),
appendices B and H.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = [
    "Constraint",
    "amean",
    "apply_constraint",
    "gmean",
    "hmean",
    "to_grad_input_scale",
    "to_left_grad_scale",
    "to_output_scale",
    "to_right_grad_scale",
]

Constraint = str | Callable[..., float] | None
"""The name of a function of this module, a function like them, or None for none."""


def gmean(*factors: float) -> float:
    """Return the geometric mean.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.constraints.gmean(1.0, 16.0)
        4.0
    """
    return math.prod(factors) ** (1 / len(factors))


def hmean(*factors: float) -> float:
    """Return the harmonic mean, which is nearest to the smallest factor.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.constraints.hmean(1.0, 3.0)
        1.5
    """
    return len(factors) / sum(1 / f for f in factors)


def amean(*factors: float) -> float:
    """Return the arithmetic mean.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.constraints.amean(1.0, 3.0)
        2.0
    """
    return sum(factors) / len(factors)


def to_output_scale(output: float, *grad_inputs: float) -> float:
    """Return the factor of the result: the forward pass has unit scale.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.constraints.to_output_scale(1.0, 2.0, 3.0)
        1.0
    """
    return output


def to_grad_input_scale(output: float, *grad_inputs: float) -> float:
    """Return the factor of the only gradient.

    Raises:
        ValueError: if there are several.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.constraints.to_grad_input_scale(1.0, 2.0)
        2.0
    """
    if len(grad_inputs) != 1:
        raise ValueError(
            "The constraint `to_grad_input_scale` is for one operand, got "
            f"{len(grad_inputs)}: use `to_left_grad_scale` or `to_right_grad_scale`."
        )
    return grad_inputs[0]


def to_left_grad_scale(output: float, left: float, right: float) -> float:
    """Return the factor of the left operand's gradient.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.constraints.to_left_grad_scale(1.0, 2.0, 3.0)
        2.0
    """
    return left


def to_right_grad_scale(output: float, left: float, right: float) -> float:
    """Return the factor of the right operand's gradient.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.constraints.to_right_grad_scale(1.0, 2.0, 3.0)
        3.0
    """
    return right


_BY_NAME = {
    f.__name__: f
    for f in (
        gmean,
        hmean,
        amean,
        to_output_scale,
        to_grad_input_scale,
        to_left_grad_scale,
        to_right_grad_scale,
    )
}


def apply_constraint(
    constraint: Constraint, output: float, *grad_inputs: float
) -> tuple[float, ...]:
    """Return the factors of the result and of the operands' gradients under a constraint.

    Args:
        constraint: the name of a function of this module, or any function of the factors that
            returns the one for all; None leaves each as it is.
        output: factor of the result.
        grad_inputs: factors of the gradients, one for each operand that is constrained.

    Returns:
        As many factors as were given.

    Raises:
        ValueError: if the name is not known, or the constraint does not fit the operands.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.constraints.apply_constraint("gmean", 1.0, 16.0)
        (4.0, 4.0)
        >>> us.constraints.apply_constraint(None, 1.0, 16.0)
        (1.0, 16.0)
    """
    factors = (output, *grad_inputs)
    if constraint is None:
        return factors
    if isinstance(constraint, str):
        if constraint not in _BY_NAME:
            known = ", ".join(map(repr, _BY_NAME))
            raise ValueError(f"`constraint` must be None, one of {known}, got {constraint!r}.")
        constraint = _BY_NAME[constraint]
    elif not callable(constraint):
        raise ValueError(
            f"`constraint` must be None, a name or a function, got {type(constraint).__name__}."
        )
    try:
        factor = float(constraint(*factors))
    except TypeError as error:
        raise ValueError(
            f"The constraint {getattr(constraint, '__name__', constraint)!r} does not fit an "
            f"operation with {len(grad_inputs)} constrained operands: {error}."
        ) from None
    return (factor,) * len(factors)
