"""Barriers for the compiler of CPUs alone.

It computes what a kernel reads again in every kernel, and compiles each kernel by itself, which
takes most of its time. Other compilers make better kernels without these barriers.
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
    """Keep XLA from copying the chain that made an array into every consumer's fusion.

    The CPU pipeline of JAX 0.10 drops barriers before it fuses, but never copies a division. The
    divisor is 1, which the compiler cannot know of a float that might be nan.
    """
    if _compat.keeps_barriers():
        return pin_p.bind(scale)[0]
    is_number = lax.eq(scale, scale)
    return lax.div(scale, lax.select(is_number, jnp.ones_like(scale), jnp.full_like(scale, 2)))


def pin_constant(value: Any) -> Any:
    """Make a constant an operand of the kernels that use it.

    Kernels that differ in nothing but the constant are then compiled once.
    """
    return pin_p.bind(value)[0] if _compat.keeps_barriers() else value
