"""Optimization barriers that are lowered for CPUs only.

XLA's CPU backend recomputes a cheap operand in every kernel that reads it. It compiles each kernel
separately, which takes most of the compile time. Other backends make better kernels without
barriers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    the array is divided by a 1 that XLA cannot fold, because it would be 2 if the array were nan.
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


def slices(array: jax.Array, starts: Sequence[int], sizes: Sequence[int]) -> list[jax.Array]:
    """Return slices along the first axis.

    On CPUs the start is an operand of the kernel that reads a slice. If it were a constant, XLA
    would compile a kernel for each slice.
    """
    return _slices(array, tuple(starts), tuple(sizes))


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _slices(array: jax.Array, starts: Sequence[int], sizes: Sequence[int]) -> list[jax.Array]:
    if len(starts) < 2 or not _compat.keeps_barriers():
        pairs = zip(starts, sizes, strict=True)
        return [lax.slice_in_dim(array, start, start + size) for start, size in pairs]
    (array,), places = pin_p.bind(array), pin_p.bind(*np.array(starts, np.uint32))
    rest, rest_starts = array.shape[1:], [np.uint32(0)] * (array.ndim - 1)
    pairs = zip(places, sizes, strict=True)
    return [lax.dynamic_slice(array, (i, *rest_starts), (size, *rest)) for i, size in pairs]


def elements(array: jax.Array) -> list[jax.Array]:
    """Return the elements along the first axis, as `slices` does."""
    return _elements(array)


@functools.partial(jax.jit, inline=True)
def _elements(array: jax.Array) -> list[jax.Array]:
    size = array.shape[0]
    return [lax.squeeze(x, (0,)) for x in slices(array, range(size), [1] * size)]
