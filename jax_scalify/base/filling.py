"""Arrays of equal elements."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat


def filled(data: Any, like: Any) -> Any:
    """Broadcast the data of a constant or scalar to the shape and the explicit sharding of `like`.

    `like` is an aval, a `Value` or an array.
    """
    shape, sharding = tuple(like.shape), _compat.explicit_sharding(like)
    if np.shape(data) == shape:
        return data
    if sharding is None:
        return jnp.broadcast_to(data, shape)
    dims = range(len(shape) - np.ndim(data), len(shape))
    return lax.broadcast_in_dim(jnp.asarray(data), shape, dims, out_sharding=sharding)
