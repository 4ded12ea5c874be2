"""Functions that the layers for Flax linen and Flax NNX share."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

from jax_scalify import nn

# The functions of `jax.nn` that linen and NNX re-export, and that have scale rules in `jsa.nn`.
FUNCTIONS = (
    "elu gelu glu leaky_relu log_softmax logsumexp relu sigmoid silu softmax softplus swish tanh"
).split()


def namespace(flax: ModuleType, own: dict[str, Any]) -> tuple[Callable, Callable]:
    """Return `__getattr__` and `__dir__` of a module with the names of `jsa.nn`, then of Flax."""

    def get(name: str) -> Any:
        return getattr(nn if name in FUNCTIONS else flax, name)

    return get, lambda: sorted({*own, *FUNCTIONS, *dir(flax)})


def is_plain(module: Any, x: jax.Array, mask: Any) -> bool:
    """Return whether a norm is over the last axis only, without a mask or an axis name."""
    last = (-1, x.ndim - 1, (-1,), (x.ndim - 1,))
    axes = module.reduction_axes in last and module.feature_axes in last
    return axes and mask is None and module.axis_name is None


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    is_causal: bool = False,
    **_: Any,
) -> jax.Array:
    """`jsa.nn.dot_product_attention` with Flax's arguments, and any number of batch axes.

    Scores and softmax are computed in at least float32, and nothing is sown. `precision` and
    `module` are accepted, because Flax's layers pass them, and ignored.
    """
    if dtype is not None:
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    batch = query.shape[:-3]

    def flat(x: Any) -> Any:
        """Merge all batch axes into one. A mask may have fewer axes, and may broadcast."""
        if x is None or len(batch) <= 1:
            return x
        x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
        x = jax.numpy.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape(math.prod(batch), *x.shape[-3:])

    out = nn.dot_product_attention(
        *map(flat, (query, key, value, bias)),
        mask=None if mask is None else flat(mask.astype(bool)),
        is_causal=is_causal,
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_key=dropout_rng,
        broadcast_dropout=broadcast_dropout,
    )
    return out.reshape((*query.shape[:-1], value.shape[-1]))
