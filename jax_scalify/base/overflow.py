"""Data that is infinite where its value is: a `select` that XLA fuses on every platform."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

unless_infinite_p = Primitive("unless_infinite")


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
    tiny = jnp.finfo(y.dtype).tiny
    return x + y * tiny * tiny


def _jvp(primals: Any, tangents: Any) -> Any:
    return unless_infinite(*primals), ad.instantiate_zeros(tangents[0])


def _batch(arrays: Any, dims: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    arrays = [batching.bdim_at_front(a, d, size) for a, d in zip(arrays, dims, strict=True)]
    return unless_infinite(*arrays), 0


unless_infinite_p.def_abstract_eval(lambda x, y: x)
unless_infinite_p.def_impl(_selected)
mlir.register_lowering(unless_infinite_p, mlir.lower_fun(_selected, multiple_results=False))
mlir.register_lowering(
    unless_infinite_p, mlir.lower_fun(_added, multiple_results=False), platform="cuda"
)
ad.primitive_jvps[unless_infinite_p] = _jvp
batching.primitive_batchers[unless_infinite_p] = _batch
