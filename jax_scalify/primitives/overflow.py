"""Data that is infinite where its value is: a `select` that XLA fuses on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jax_scalify.primitives.definitions import batch_all, define, first, jvp_of_first


def unless_infinite(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `x`, or `y` where `y` is not finite. `y` counts as a constant to derivatives.

    On NVIDIA's GPUs it is `x` plus a tiny multiple of `y`. If several equations read a `select`,
    XLA stores it instead of computing it in each of their kernels. The compilers for TPUs, and for
    CPUs in JAX 0.10, multiply the two tiny factors first, which gives 0, and infinity times 0 is
    nan.
    """
    return unless_infinite_p.bind(x, y)


def _selected(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.select(lax.is_finite(y), x, y)


def _added(x: jax.Array, y: jax.Array) -> jax.Array:
    # In float32, a finite `y` adds less than 2**128 * 2**-252 = 2**-124. inf and nan remain.
    tiny = jnp.finfo(y.dtype).tiny
    return x + y * tiny * tiny


unless_infinite_p = define("unless_infinite", _selected, first, jvp=jvp_of_first, batch=batch_all)
mlir.register_lowering(
    unless_infinite_p, mlir.lower_fun(_added, multiple_results=False), platform="cuda"
)
