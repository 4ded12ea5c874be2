"""Activation functions and gated linear units.

Functions that approach `x` for large `x` keep the scales of the input and of the cotangent, so that
outliers stay in range (Balanca et al., "Scalify", 2024, section 3.2.1). For other functions,
`out.scale = x.scale * RMS(f(unit Gaussian))`, rounded to a power of two (Blake et al., "Unit
Scaling", 2023, table A.2), and the gradient's scale is the cotangent's times the RMS of the
derivative. Scales are estimates: they move powers of two between data and scale, and change no
value. Outside of `scalify` each function is that of `jax.nn`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_scalify.nn._rules import axes_of, elementwise, fixed, of_input
from jax_scalify.scales.algebra import ONE, join, meet


@elementwise(of_input(0), fixed(0))
def relu(x: jax.Array) -> jax.Array:
    """`max(x, 0)`, as `jax.nn.relu`.

    Scales: `out.scale = x.scale`; the gradient has the cotangent's scale. Half of the elements are
    0, so both have the RMS `sqrt(1/2)`, which is rounded to 1.

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
    """`where(x >= 0, x, negative_slope * x)`, as `jax.nn.leaky_relu`. Scales as in `relu`."""
    return jax.nn.leaky_relu(x, negative_slope)


@elementwise(of_input(0), fixed(0))
def gelu(x: jax.Array, approximate: bool = True) -> jax.Array:
    """`x * Phi(x)`, or its approximation by tanh, as `jax.nn.gelu`.

    Scales: `out.scale = x.scale` (RMS 0.65); the gradient has the cotangent's scale (RMS 0.68).
    """
    return jax.nn.gelu(x, approximate)


@elementwise(of_input(0), fixed(0))
def silu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(x)`, as `jax.nn.silu`.

    Scales: `out.scale = x.scale` (RMS 0.60); the gradient has the cotangent's scale (RMS 0.62).
    """
    return jax.nn.silu(x)


swish = silu


@elementwise(of_input(0), fixed(0))
def elu(x: jax.Array, alpha: float = 1.0) -> jax.Array:
    """`where(x > 0, x, alpha * expm1(x))`, as `jax.nn.elu`.

    Scales: `out.scale = x.scale` (RMS 0.80); the gradient has the cotangent's scale (RMS 0.82).
    """
    return jax.nn.elu(x, alpha)


@elementwise(lambda s: s**2, lambda s: s)
def squared_relu(x: jax.Array) -> jax.Array:
    """`max(x, 0)**2` (So et al., "Primer", 2021).

    Scales: `out.scale = x.scale**2` (RMS 1.23); the gradient has `ct.scale * x.scale` (RMS 1.41).
    """
    return jnp.square(jax.nn.relu(x))


@elementwise(fixed(-1), fixed(-2))
def sigmoid(x: jax.Array) -> jax.Array:
    """`1 / (1 + exp(-x))`, as `jax.nn.sigmoid`.

    Scales: `out.scale = 1/2`, static (RMS 0.54); the gradient has `ct.scale / 4` (RMS 0.21).
    """
    return jax.nn.sigmoid(x)


@elementwise(lambda s: meet(ONE, s), fixed(0))
def tanh(x: jax.Array) -> jax.Array:
    """`tanh(x)`, as `jax.numpy.tanh`.

    Scales: `out.scale = min(1, x.scale)` (RMS 0.63), because `tanh(x)` is close to `x` near 0; the
    gradient has the cotangent's scale (RMS 0.68).
    """
    return jnp.tanh(x)


@elementwise(lambda s: join(ONE, s), fixed(0))
def softplus(x: jax.Array) -> jax.Array:
    """`log(1 + exp(x))`, as `jax.nn.softplus`.

    Scales: `out.scale = max(1, x.scale)` (RMS 0.96), because `softplus(0) = log(2)`; the gradient
    has the cotangent's scale (RMS 0.54).
    """
    return jax.nn.softplus(x)


def glu(x: jax.Array, axis: int = -1) -> jax.Array:
    """`a * sigmoid(b)` for the halves `a, b` of `x`, as `jax.nn.glu` (Dauphin et al., 2016)."""
    a, b = _halves(x, axis)
    return a * sigmoid(b)


def swiglu(x: jax.Array, axis: int = -1) -> jax.Array:
    """`a * silu(b)` for the halves `a, b` of `x` (Shazeer, 2020)."""
    a, b = _halves(x, axis)
    return a * silu(b)


def geglu(x: jax.Array, axis: int = -1, approximate: bool = True) -> jax.Array:
    """`a * gelu(b)` for the halves `a, b` of `x` (Shazeer, 2020)."""
    a, b = _halves(x, axis)
    return a * gelu(b, approximate)


def _halves(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    axes_of(x, axis)
    if x.shape[axis] % 2:
        raise ValueError(f"`x` must have an even size along axis {axis}, got {x.shape}.")
    a, b = jnp.split(x, 2, axis)
    return a, b
