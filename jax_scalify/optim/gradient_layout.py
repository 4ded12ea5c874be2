"""The memory layout of gradients on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import is_scaled


def row_major(grads: Any) -> Any:
    """Return gradients in row-major layout on GPUs, the layout of their parameters.

    XLA keeps the layout in which the matmul wrote a gradient, which may be transposed. It would
    then transpose moments and parameters to this layout, in float32, and back.
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
    return tree.unflatten(leaves)


def _in_row_major_layout(arrays: list[jax.Array]) -> list[jax.Array]:
    return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in arrays]
