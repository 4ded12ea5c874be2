"""Gradients as an optimizer reads them on a GPU: XLA then compiles one kernel for equal leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import pow2
from jax_scalify.base.pins import pin_constant, store
from jax_scalify.ops.custom_scale import custom_scale
from jax_scalify.optim.arena import SMALL
from jax_scalify.optim.copies import Copies, stored_number
from jax_scalify.optim.storing import with_array

# A static scale may be smaller than this, or larger than its inverse. It is then applied in steps.
_SMALLEST = 2.0**-pow2.MAX_EXPONENT


def read_gradients(grads: Any) -> Any:
    """Return gradients in the layout of their parameters, large ones with scales in memory.

    XLA keeps the layout in which a matmul wrote a gradient, which may be transposed. It would then
    transpose moments and parameters to this layout, in float32, and back.

    Equal weights of different layers have gradients with different static scales. Kernels that
    differ in a constant are compiled one by one, so the scale of a large gradient is a number in
    memory.
    """
    leaves, tree = jax.tree.flatten(grads, is_leaf=is_scaled)
    arrays = {i: x.data if is_scaled(x) else x for i, x in enumerate(leaves)}
    arrays = {i: x for i, x in arrays.items() if _compat.is_traced(x) and jnp.ndim(x) > 1}
    if not arrays:
        return grads
    found = lax.platform_dependent(
        list(arrays.values()), cuda=_in_row_major_layout, default=lambda xs: xs
    )
    for i, x in zip(arrays, found, strict=True):
        leaf = leaves[i]
        leaves[i] = dataclasses.replace(leaf, data=x) if is_scaled(leaf) else x
    which = [i for i in arrays if arrays[i].size > SMALL]
    read = _with_own_scales if any(map(is_scaled, leaves)) else _unchanged
    for i, x in zip(which, read([leaves[i] for i in which]), strict=True):
        leaves[i] = x
    return tree.unflatten(leaves)


def _in_row_major_layout(arrays: list[jax.Array]) -> list[jax.Array]:
    return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in arrays]


@custom_scale(keeps_plain=True)
def _unchanged(leaves: list[Any]) -> list[Any]:
    return leaves


@_unchanged.defscale
def _with_own_scales(leaves: list[Any]) -> list[Any]:
    copies, out = Copies(), []
    numbers: dict[float, jax.Array] = {}  # of static scales
    for leaf in leaves:
        scale = with_array(leaf).scale if is_scaled(leaf) else None
        if scale is None or jnp.ndim(scale):
            pass
        elif not isinstance(scale, float):
            leaf = ScaledArray(leaf.data, stored_number(scale))
        elif _SMALLEST <= scale <= 1 / _SMALLEST:
            if scale not in numbers:
                numbers[scale] = store(pin_constant(np.float32(scale)))
            leaf = ScaledArray(leaf.data, copies.of(numbers[scale]))
        out.append(leaf)
    return out
