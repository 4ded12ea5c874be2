"""Whether the numbers of a state are finite, leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base import dtypes
from jax_scalify.storage.names import name_of


def check_finite(tree: Any, name: str, after: str) -> None:
    """Refuse a tree of concrete arrays with nan or infinities in data or scales.

    The counts of all leaves are fetched at once.

    Raises:
        ValueError: if a leaf is not finite. The message lists all such leaves, with the numbers of
            their elements.
    """
    counts = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
        parts = {"": leaf}
        if is_scaled(leaf):
            parts = {"": leaf.data, ", its scale": leaf.scale}
        for part, array in parts.items():
            kind = dtypes.leaf_dtype(array)
            if kind is not None and dtypes.is_scalable(kind) and not _compat.is_traced(array):
                counts[f"{name_of(path)!r}{part}"] = _counts(array), np.size(array)
    lines = [
        f"  {place}: {' and '.join(f'{n} {kind}' for kind, n in _kinds(found))} of {size} elements"
        for place, (found, size) in jax.device_get(counts).items()
        if any(found)
    ]
    if lines:
        raise ValueError("\n".join([f"`{name}` is not finite, {after}:", *lines, _ADVICE]))


_ADVICE = (
    "`jsa.numerics.find_nonfinite(step)(state, batch)` tells which line makes the first one: give "
    "it the last state that was finite."
)


def _counts(array: Any) -> tuple[Any, Any]:
    """How many elements are nan, and how many infinite."""
    return _counted(array) if isinstance(array, jax.Array) else _counted_by(np, np.asarray(array))


def _counted_by(module: Any, array: Any) -> tuple[Any, Any]:
    if array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    return module.sum(module.isnan(array)), module.sum(module.isinf(array))


@jax.jit
def _counted(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _counted_by(jnp, array)


def _kinds(found: tuple[Any, Any]) -> list[tuple[str, int]]:
    return [(kind, int(n)) for kind, n in zip(("nan", "inf"), found, strict=True) if n]
