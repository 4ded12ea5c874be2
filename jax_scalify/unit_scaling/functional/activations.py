"""Activation functions, with a `mult` that sets how far from linear they are.

`gelu`, `silu` and `silu_glu` are x/2 at a small `mult` and ReLU at a large one: their factors
interpolate between those of both.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.unit_scaling.constraints import Constraint
from jax_scalify.unit_scaling.factors import gaussian_rms, gaussian_std, logarithmic_interpolation
from jax_scalify.unit_scaling.functional._common import floating, positive, scaled

_DEFAULT = "to_output_scale"
_RELU = math.sqrt((1 - 1 / math.pi) / 2)  # standard deviation of max(z, 0)
_HALF = math.sqrt(1 / 2)  # RMS of a cotangent of which half is masked


def relu(x: Any, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Apply ReLU: the result by √(2 / (1 - 1/π)), the gradient by √2.

    Args:
        x: a floating array.
        constraint: on both factors.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not floating.

    Source: Blake et al., *Unit Scaling* (2023), table A.2.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.relu(jnp.array([-1.0, 1.0])).round(3)
        Array([0.   , 1.713], dtype=float32)
    """
    (x,) = floating("relu", x=x)
    return scaled(jax.nn.relu, [x], 1 / _RELU, [1 / _HALF], constraint)


def gelu(x: Any, mult: float = 1.0, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Apply GELU: `x * Φ(mult * x)`, with factors between those of x/2 and of ReLU.

    Args:
        x: a floating array.
        mult: of the operand of Φ.
        constraint: on the factors of the result and of the gradient.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not floating or `mult` is no number.
        ValueError: if `mult` is not positive and finite.

    Source: Blake et al., *u-µP* (2024), appendix B.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.gelu(jnp.array([-1.0, 1.0])).round(2)
        Array([-0.28,  1.49], dtype=float32)
    """
    (x,) = floating("gelu", x=x)
    mult = positive("mult", mult, "gelu")
    weight = 1 / (1 + 0.25 / mult**2)
    output, grad = _between_half_and_relu(weight)

    def function(x: Any) -> jax.Array:
        # erfc(-x) does not cancel where 1 + erf(x) does.
        return x * (0.5 * jax.lax.erfc(-(mult * math.sqrt(0.5)) * x))

    return scaled(function, [x], output, [grad], constraint)


def silu(x: Any, mult: float = 1.0, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Apply SiLU: `x * sigmoid(mult * x)`, with factors between those of x/2 and of ReLU.

    Args:
        x: a floating array.
        mult: of the operand of the sigmoid.
        constraint: on the factors of the result and of the gradient.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not floating or `mult` is no number.
        ValueError: if `mult` is not positive and finite.

    Source: Blake et al., *u-µP* (2024), appendix B.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.silu(jnp.array([-1.0, 1.0])).round(2)
        Array([-0.5 ,  1.35], dtype=float32)
    """
    (x,) = floating("silu", x=x)
    mult = positive("mult", mult, "silu")
    output, grad = _between_half_and_relu(1 / (1 + 1 / mult**2))
    return scaled(lambda x: x * jax.nn.sigmoid(mult * x), [x], output, [grad], constraint)


def silu_glu(x: Any, gate: Any, mult: float = 1.0, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Apply SwiGLU: `x * gate * sigmoid(mult * gate)`.

    Args:
        x: a floating array.
        gate: one of the same shape, independent of `x`.
        mult: of the operand of the sigmoid.
        constraint: on the factors of the result and of both gradients.

    Returns:
        An array of the shape of the operands.

    Raises:
        TypeError: if an operand is not floating or `mult` is no number.
        ValueError: if `mult` is not positive and finite, or the shapes differ.

    Source: Blake et al., *u-µP* (2024), appendix B: between 1/2 and 1/√2 with the weight
    1 / (1 + 1/mult²).

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.silu_glu(jnp.ones(1), jnp.ones(1)).round(2)
        Array([1.23], dtype=float32)
    """
    x, gate = floating("silu_glu", x=x, gate=gate)
    if x.shape != gate.shape:
        raise ValueError(f"`silu_glu` takes operands of one shape, got {x.shape}, {gate.shape}.")
    mult = positive("mult", mult, "silu_glu")
    factor = 1 / logarithmic_interpolation(1 / (1 + 1 / mult**2), 0.5, _HALF)

    def function(x: Any, gate: Any) -> jax.Array:
        return x * (gate * jax.nn.sigmoid(mult * gate))

    return scaled(function, [x, gate], factor, [factor, factor], constraint)


def tanh(x: Any, mult: float = 1.0, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Apply `tanh(mult * x)`, with factors from its standard deviation on unit Gaussians.

    Args:
        x: a floating array.
        mult: of the operand.
        constraint: on the factors of the result and of the gradient.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not floating or `mult` is no number.
        ValueError: if `mult` is not positive and finite.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> print(us.functional.tanh(jnp.array([-1.0, 1.0])).round(1))
        [-1.2  1.2]
    """
    (x,) = floating("tanh", x=x)
    mult = positive("mult", mult, "tanh")
    output, grad = _tanh_factors(mult)
    return scaled(lambda x: jnp.tanh(mult * x), [x], output, [grad], constraint)


def sigmoid(x: Any, mult: float = 1.0, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Apply `sigmoid(mult * x)`, with factors from its standard deviation on unit Gaussians.

    The mean of the result, half of the factor, stays.

    Args:
        x: a floating array.
        mult: of the operand.
        constraint: on the factors of the result and of the gradient.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: if `x` is not floating or `mult` is no number.
        ValueError: if `mult` is not positive and finite.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.sigmoid(jnp.array([-1.0, 1.0])).round(2)
        Array([1.29, 3.51], dtype=float32)
    """
    (x,) = floating("sigmoid", x=x)
    mult = positive("mult", mult, "sigmoid")
    # sigmoid(x) = (1 + tanh(x / 2)) / 2
    output, grad = (2 * factor for factor in _tanh_factors(mult / 2))
    return scaled(lambda x: jax.nn.sigmoid(mult * x), [x], output, [grad], constraint)


def _between_half_and_relu(weight: float) -> tuple[float, float]:
    """Factors of the result and of the gradient, by the weight of ReLU."""
    return (
        1 / logarithmic_interpolation(weight, 0.5, _RELU),
        1 / logarithmic_interpolation(weight, 0.5, _HALF),
    )


@functools.cache
def _tanh_factors(mult: float) -> tuple[float, float]:
    """Factors of the result and of the gradient, by the integral over a unit Gaussian."""

    def slope(z: np.ndarray) -> np.ndarray:
        return mult / np.cosh(np.minimum(np.abs(mult * z), 300.0)) ** 2

    return 1 / gaussian_std(lambda z: np.tanh(mult * z)), 1 / gaussian_rms(slope)
