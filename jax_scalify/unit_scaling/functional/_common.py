"""What the functions share: checks of their arguments, and the form of an elementwise one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.unit_scaling.constraints import Constraint, apply_constraint
from jax_scalify.unit_scaling.scaling import scale_bwd, scale_fwd


def floating(name: str, **operands: Any) -> list[jax.Array]:
    """Return operands as arrays, and refuse integers."""
    arrays = []
    for argument, x in operands.items():
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(f"`{argument}` of `{name}` must be a floating array, got {x.dtype}.")
        arrays.append(x)
    return arrays


def positive(name: str, value: float, of: str) -> float:
    """Return a positive Python number, or refuse it."""
    try:
        number = float(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"`{name}` of `{of}` must be a Python number, got {type(value).__name__}."
        ) from None
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"`{name}` of `{of}` must be positive and finite, got {value}.")
    return number


def axis_of(x: Any, axis: int, of: str) -> int:
    """Return an axis counted from the front, or refuse it."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"`axis` of `{of}` must be one of the axes of {x.shape}, got {axis}.")
    return axis % x.ndim


def inverse(number: float) -> float:
    """Return 1 / number; of an empty sum, 1."""
    return 1 / number if number else 1.0


def scaled(
    function: Callable[..., Any],
    operands: list[Any],
    output: float,
    grads: list[float],
    constraint: Constraint,
    constrained: list[bool] | None = None,
) -> Any:
    """Apply a function with a factor for its result and one for each operand's gradient.

    Operands that are not constrained, by their cut-edges, keep their own factor.
    """
    constrained = constrained or [True] * len(operands)
    bound = [g for g, flag in zip(grads, constrained, strict=True) if flag]
    output, *bound = apply_constraint(constraint, output, *bound)
    rest = iter(bound)
    factors = [next(rest) if flag else g for g, flag in zip(grads, constrained, strict=True)]
    arrays = [scale_bwd(x, factor) for x, factor in zip(operands, factors, strict=True)]
    return scale_fwd(function(*arrays), output)
