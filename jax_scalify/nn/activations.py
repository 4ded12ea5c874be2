"""Activation functions and gated linear units.

What is `x` for large `x` keeps the input's scale, and that of the cotangent, so that outliers stay
in range (Balanca et al., "Scalify", 2024, section 3.2.1). Of others the scale of the result is the
input's times the RMS of the function of a unit Gaussian, rounded to a power of two (Blake et al.,
"Unit Scaling", 2023, table A.2); that of the gradient is the cotangent's times the RMS of the
derivative. These are estimates that move powers of two between data and scale, and no value.
Without `scalify` each is the function of `jax.nn`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_scalify.nn._rules import elementwise, fixed, of_input
from jax_scalify.scales.algebra import ONE, join, meet


@elementwise(of_input(0), fixed(0))
def relu(x: jax.Array) -> jax.Array:
    """`max(x, 0)`, as `jax.nn.relu`.

    Scales: that of `x`, and of the cotangent. Half of the elements are 0, so both RMS are
    `sqrt(1/2)`: rounded, 1.

    Args:
        x: array of a floating dtype, any shape.

    Example:
        >>> x = jsa.as_scaled_array(jnp.float16([-2.0, 4.0]), scale=2.0)
        >>> print(jsa.scalify(jsa.nn.relu)(x).data)
        [0. 2.]
    """
    return jax.nn.relu(x)


@elementwise(of_input(0), fixed(0))
def leaky_relu(x: jax.Array, negative_slope: float = 1e-2) -> jax.Array:
    """`where(x >= 0, x, negative_slope * x)`, as `jax.nn.leaky_relu`. Scales as of `relu`."""
    return jax.nn.leaky_relu(x, negative_slope)


@elementwise(of_input(0), fixed(0))
def gelu(x: jax.Array, approximate: bool = True) -> jax.Array:
    """`x * Phi(x)`, or its approximation by tanh, as `jax.nn.gelu`.

    Scales: that of `x` (RMS 0.65), and the cotangent's (0.68), so that outliers stay in range.
    """
    return jax.nn.gelu(x, approximate)


@elementwise(of_input(0), fixed(0))
def silu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(x)`, as `jax.nn.silu`.

    Scales: that of `x` (RMS 0.60), and the cotangent's (0.62), so that outliers stay in range.
    """
    return jax.nn.silu(x)


swish = silu


@elementwise(of_input(0), fixed(0))
def elu(x: jax.Array, alpha: float = 1.0) -> jax.Array:
    """`where(x > 0, x, alpha * expm1(x))`, as `jax.nn.elu`.

    Scales: that of `x` (RMS 0.80), and the cotangent's (0.82).
    """
    return jax.nn.elu(x, alpha)


@elementwise(lambda s: s**2, lambda s: s)
def squared_relu(x: jax.Array) -> jax.Array:
    """`max(x, 0)**2` (So et al., "Primer", 2021).

    Scales: the square of that of `x` (RMS 1.23), and the cotangent's times that of `x` (1.41).
    """
    return jnp.square(jax.nn.relu(x))


@elementwise(fixed(-1), fixed(-2))
def sigmoid(x: jax.Array) -> jax.Array:
    """`1 / (1 + exp(-x))`, as `jax.nn.sigmoid`.

    Scales: a static 1/2 (RMS 0.54), and a quarter of the cotangent's (0.21).
    """
    return jax.nn.sigmoid(x)


@elementwise(lambda s: meet(ONE, s), fixed(0))
def tanh(x: jax.Array) -> jax.Array:
    """`tanh(x)`, as `jax.numpy.tanh`.

    Scales: `min(1, scale of x)` (RMS 0.63), as it is `x` near 0; the cotangent's (0.68).
    """
    return jnp.tanh(x)


@elementwise(lambda s: join(ONE, s), fixed(0))
def softplus(x: jax.Array) -> jax.Array:
    """`log(1 + exp(x))`, as `jax.nn.softplus`.

    Scales: `max(1, scale of x)` (RMS 0.96), as it is `log(2)` at 0; the cotangent's (0.54).
    """
    return jax.nn.softplus(x)


def glu(x: jax.Array, axis: int = -1) -> jax.Array:
    """`a * sigmoid(b)` of the two halves of `x`, as `jax.nn.glu` (Dauphin et al., 2016)."""
    a, b = _halves(x, axis)
    return a * sigmoid(b)


def swiglu(x: jax.Array, axis: int = -1) -> jax.Array:
    """`a * silu(b)` of the two halves of `x` (Shazeer, 2020)."""
    a, b = _halves(x, axis)
    return a * silu(b)


def geglu(x: jax.Array, axis: int = -1, approximate: bool = True) -> jax.Array:
    """`a * gelu(b)` of the two halves of `x` (Shazeer, 2020)."""
    a, b = _halves(x, axis)
    return a * gelu(b, approximate)


def _halves(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    if x.shape[axis] % 2:
        raise ValueError(f"`x` must have an even size along axis {axis}, got {x.shape}.")
    a, b = jnp.split(x, 2, axis)
    return a, b
