"""Optimization barriers that are lowered for some platforms only.

`pin` is a barrier on CPUs. XLA's CPU backend recomputes a cheap operand in every kernel that reads
it. It compiles each kernel separately, which takes most of the compile time. Other backends make
better kernels without this barrier. `store` is a barrier on GPUs, where XLA would store some arrays
in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_scalify import _compat


def _barrier(name: str, *platforms: str) -> Primitive:
    """Define the identity on arrays. It is an optimization barrier on some platforms."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays: list(arrays))
    primitive.def_abstract_eval(lambda *avals: list(avals))
    mlir.register_lowering(primitive, lambda ctx, *arrays: list(arrays))
    barrier = mlir.lower_fun(
        lambda *arrays: lax.optimization_barrier(arrays), multiple_results=True
    )
    for platform in platforms:
        mlir.register_lowering(primitive, barrier, platform=platform)
    ad.primitive_jvps[primitive] = lambda primals, tangents: (primitive.bind(*primals), [*tangents])
    batching.primitive_batchers[primitive] = lambda arrays, dims: (primitive.bind(*arrays), dims)
    return primitive


pin_p = _barrier("pin", "cpu")
store_p = _barrier("store", "cuda", "rocm")


def pin(scale: jax.Array) -> jax.Array:
    """Keep XLA from duplicating the operations that compute an array into every reader's fusion.

    The CPU pipeline of JAX 0.10 drops barriers before fusion, but never duplicates a division. So
    the array is divided by a 1 that XLA cannot fold, because it would be 2 if the array were nan.
    """
    if _compat.keeps_barriers():
        return pin_p.bind(scale)[0]
    is_number = lax.eq(scale, scale)
    return lax.div(scale, lax.select(is_number, jnp.ones_like(scale), jnp.full_like(scale, 2)))


def store(array: jax.Array) -> jax.Array:
    """Keep XLA for GPUs from storing a float32 copy: see `interpreter/survey.py`."""
    return store_p.bind(array)[0]


def pin_constant(value: Any) -> Any:
    """Make a constant an operand of the kernels that use it.

    Kernels that differ only in the constant are then compiled once.
    """
    return pin_p.bind(value)[0] if _compat.keeps_barriers() else value


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def slices(array: jax.Array, starts: tuple[int, ...], sizes: tuple[int, ...]) -> list[jax.Array]:
    """Return slices along the first axis.

    On CPUs the start is an operand of the kernel that reads a slice. If it were a constant, XLA
    would compile a kernel for each slice.
    """
    if len(starts) < 2 or not _compat.keeps_barriers():
        pairs = zip(starts, sizes, strict=True)
        return [lax.slice_in_dim(array, start, start + size) for start, size in pairs]
    # The starts are unsigned, because JAX adds a comparison and a select to each signed start.
    (array,), places = pin_p.bind(array), pin_p.bind(*np.array(starts, np.uint32))
    rest, rest_starts = array.shape[1:], [np.uint32(0)] * (array.ndim - 1)
    pairs = zip(places, sizes, strict=True)
    return [lax.dynamic_slice(array, (i, *rest_starts), (size, *rest)) for i, size in pairs]


@functools.partial(jax.jit, inline=True)
def elements(array: jax.Array) -> list[jax.Array]:
    """Return the elements along the first axis, as `slices` does."""
    size = array.shape[0]
    return [lax.squeeze(x, (0,)) for x in slices(array, tuple(range(size)), (1,) * size)]
