"""Flax NNX with layers whose scales are static: `from jax_scalify.nn import nnx`.

It has all names of `flax.nnx`. `LayerNorm`, `RMSNorm`, `Embed` and `MultiHeadAttention` are
replaced by layers with the same arguments and parameters, and activation functions by those of
`jsa.nn`. All other layers (`Linear`, `Conv`, ...) need only the rules of their primitives.
"""

from __future__ import annotations

from typing import Any

import jax

try:
    from flax import nnx as _nnx
except ImportError as error:  # pragma: no cover
    raise ImportError("`jax_scalify.nn.nnx` needs Flax: `pip install flax`.") from error

from jax_scalify.nn._flax import dot_product_attention, is_plain, namespace
from jax_scalify.nn.layers import embed
from jax_scalify.nn.normalization import layer_norm, rms_norm

__all__ = ["Embed", "LayerNorm", "MultiHeadAttention", "RMSNorm", "dot_product_attention"]

__getattr__, __dir__ = namespace(_nnx, globals())


class LayerNorm(_nnx.LayerNorm):
    """`flax.nnx.LayerNorm` through `jsa.nn.layer_norm`.

    With a mask, an axis name, or axes other than the last, it is Flax's layer unchanged.
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise the last axis of `x`."""
        if not is_plain(self, x, mask):
            return super().__call__(x, mask=mask)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        return layer_norm(x, scale, bias, epsilon=self.epsilon)


class RMSNorm(_nnx.RMSNorm):
    """`flax.nnx.RMSNorm` through `jsa.nn.rms_norm`, under the same conditions as `LayerNorm`."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalise the last axis of `x`."""
        if not is_plain(self, x, mask):
            return super().__call__(x, mask=mask)
        scale = None if self.scale is None else self.scale[...]
        x, scale = self.promote_dtype((x, scale), dtype=self.dtype)
        return rms_norm(x, scale, epsilon=self.epsilon)


class Embed(_nnx.Embed):
    """`flax.nnx.Embed` through `jsa.nn.embed`; with `out_sharding` it is Flax's layer unchanged."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Look up the rows of the table."""
        if out_sharding is not None:
            return super().__call__(inputs, out_sharding)
        (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
        return embed(table, inputs)


class MultiHeadAttention(_nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with `jsa.nn.dot_product_attention`."""

    def __init__(self, *args: Any, attention_fn: Any = dot_product_attention, **kwargs: Any):
        super().__init__(*args, attention_fn=attention_fn, **kwargs)
