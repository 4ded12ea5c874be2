"""Numbers in memory of their own: XLA for GPUs then compiles equal kernels of large leaves once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base.pins import store


class Copies:
    """Copies of scalars that the kernels of several large leaves read.

    XLA for GPUs compiles equal kernels once. But it merges kernels that read the same array, into
    large kernels of which no two are equal. A copy is the same memory behind one more barrier, so
    it costs nothing.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[Any, Any]] = {}

    def of(self, scalar: Any) -> Any:
        """Return a new copy; a NumPy number unchanged."""
        if isinstance(scalar, np.ndarray | np.generic):
            return scalar
        _, last = self._last.get(id(scalar), (scalar, scalar))
        copy = store(last)
        self._last[id(scalar)] = scalar, copy  # keeps the scalar alive, so its id is not reused
        return copy


def stored_number(x: jax.Array) -> jax.Array:
    """Store a slice of a vector of non-negative numbers in memory of its own, on GPUs.

    Kernels of several leaves that read one number each are then equal: see `Copies`. XLA for GPUs
    makes a kernel for each slice that is stored, but one kernel for computations on slices, such
    as this maximum, which is the identity.
    """
    return store(lax.max(x, jnp.zeros_like(x)))
