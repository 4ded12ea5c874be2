"""Optimization barriers that are lowered for CPUs only.

XLA's CPU backend recomputes a cheap operand in every kernel that reads it, and compiles each kernel
separately, which is most of the compile time. Other backends make better kernels without barriers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_scalify import _compat

pin_p = Primitive("pin")
pin_p.multiple_results = True
pin_p.def_impl(lambda *arrays: list(arrays))
pin_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(pin_p, lambda ctx, *arrays: list(arrays))
mlir.register_lowering(
    pin_p,
    mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays), multiple_results=True),
    platform="cpu",
)


def _jvp(primals: Any, tangents: Any) -> Any:
    return pin_p.bind(*primals), list(tangents)


def _batch(arrays: Any, dims: Any) -> Any:
    return pin_p.bind(*arrays), dims


ad.primitive_jvps[pin_p] = _jvp
batching.primitive_batchers[pin_p] = _batch


def pin(scale: jax.Array) -> jax.Array:
    """Keep XLA from duplicating the operations that compute an array into every reader's fusion.

    The CPU pipeline of JAX 0.10 drops barriers before fusion, but never duplicates a division. So
    the array is divided by 1, a 1 that XLA cannot fold because the array might be nan.
    """
    if _compat.keeps_barriers():
        return pin_p.bind(scale)[0]
    is_number = lax.eq(scale, scale)
    return lax.div(scale, lax.select(is_number, jnp.ones_like(scale), jnp.full_like(scale, 2)))


def pin_constant(value: Any) -> Any:
    """Make a constant an operand of the kernels that use it.

    Kernels that differ only in the constant are then compiled once.
    """
    return pin_p.bind(value)[0] if _compat.keeps_barriers() else value
