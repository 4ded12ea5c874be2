"""Flax linen with layers whose scales are static: `import jax_scalify.nn.linen as nn`.

It has all names of `flax.linen`. `LayerNorm`, `RMSNorm`, `Embed` and the attention layers are
replaced by layers with the same fields and parameters, and activation functions by those of
`jsa.nn`. All other layers (`Dense`, `Conv`, ...) need only the rules of their primitives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

try:
    from flax import linen as _linen
    from flax.linen.dtypes import promote_dtype
except ImportError as error:  # pragma: no cover
    raise ImportError("`jax_scalify.nn.linen` needs Flax: `pip install flax`.") from error

from jax_scalify.nn._flax import dot_product_attention, is_plain, namespace
from jax_scalify.nn.layers import embed
from jax_scalify.nn.normalization import layer_norm, rms_norm

__all__ = [
    "Embed",
    "LayerNorm",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "RMSNorm",
    "SelfAttention",
    "dot_product_attention",
]

__getattr__, __dir__ = namespace(_linen, globals())


def _promoted(module: Any, x: jax.Array, *params: Any) -> tuple[Any, ...]:
    return tuple(promote_dtype(x, *params, dtype=module.dtype))


class LayerNorm(_linen.LayerNorm):
    """`flax.linen.LayerNorm` through `jsa.nn.layer_norm`.

    With a mask, an axis name, or axes other than the last, it is Flax's layer unchanged.
    """

    @_linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise the last axis of `x`."""
        if not is_plain(self, x, mask):
            return super().__call__(x, mask=mask)
        shape, scale, bias = (x.shape[-1],), None, None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        return layer_norm(*_promoted(self, x, scale, bias), epsilon=self.epsilon)


class RMSNorm(_linen.RMSNorm):
    """`flax.linen.RMSNorm` through `jsa.nn.rms_norm`, under the same conditions as `LayerNorm`."""

    @_linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise the last axis of `x`."""
        if not is_plain(self, x, mask):
            return super().__call__(x, mask=mask)
        scale = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, (x.shape[-1],), self.param_dtype)
        return rms_norm(*_promoted(self, x, scale), epsilon=self.epsilon)


class Embed(_linen.Embed):
    """`flax.linen.Embed` through `jsa.nn.embed`."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Look up the rows of the table."""
        (table,) = promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
        return embed(table, inputs)


class MultiHeadDotProductAttention(_linen.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` with `jsa.nn.dot_product_attention`."""

    attention_fn: Callable[..., jax.Array] = dot_product_attention


class MultiHeadAttention(_linen.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention` with `jsa.nn.dot_product_attention`."""

    attention_fn: Callable[..., jax.Array] = dot_product_attention


class SelfAttention(_linen.SelfAttention):
    """`flax.linen.SelfAttention` with `jsa.nn.dot_product_attention`."""

    attention_fn: Callable[..., jax.Array] = dot_product_attention
