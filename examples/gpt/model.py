"""A decoder-only transformer in Flax NNX: pre-norm, causal attention, GELU, learned positions.

Nothing here knows about scales; the layers are Flax's, through an import that gives those a rule
that need one. Precision comes in through the constructor, as in any Flax model: the dtypes, a
`dot_general` for the linear layers and a hook at the input of each LayerNorm.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from examples.gpt.config import Config
from jax_scalify.nn import nnx

Hook = Callable[[jax.Array], jax.Array]
DotGeneral = Callable[..., jax.Array]


def identity(x: jax.Array) -> jax.Array:
    """Return `x`: the hook that changes nothing."""
    return x


class Attention(nnx.Module):
    """Causal self-attention, `(batch, time, width)` to the same shape."""

    def __init__(self, config: Config, *, linear, attention_dot_general: DotGeneral, rngs):
        self.heads = config.heads
        self.qkv = linear(config.width, 3 * config.width, rngs=rngs)
        self.projection = linear(
            config.width, config.width, kernel_init=residual_init(config), rngs=rngs
        )
        self.dot_general = attention_dot_general

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        query, key, value = (
            # (batch, heads, time, channels)
            part.reshape(batch, time, self.heads, -1).swapaxes(1, 2)
            for part in jnp.split(self.qkv(x), 3, axis=-1)
        )
        query = query * (1 / math.sqrt(width // self.heads))
        scores = self.dot_general(query, key, (((3,), (3,)), ((0, 1), (0, 1))))
        mask = jnp.tril(jnp.ones((time, time), bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
        weights = nnx.softmax(scores).astype(x.dtype)  # (batch, heads, time, time)
        out = self.dot_general(weights, value, (((3,), (2,)), ((0, 1), (0, 1))))
        return self.projection(out.swapaxes(1, 2).reshape(x.shape))


class FeedForward(nnx.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: Config, *, linear, rngs):
        self.up = linear(config.width, 4 * config.width, rngs=rngs)
        self.down = linear(
            4 * config.width, config.width, kernel_init=residual_init(config), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Attention and feed-forward, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, config: Config, *, linear, layer_norm, norm, attention_dot_general, rngs):
        self.norm = norm
        self.attention_norm = layer_norm(config.width, rngs=rngs)
        self.attention = Attention(
            config, linear=linear, attention_dot_general=attention_dot_general, rngs=rngs
        )
        self.feed_forward_norm = layer_norm(config.width, rngs=rngs)
        self.feed_forward = FeedForward(config, linear=linear, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(self.norm(x)))
        return x + self.feed_forward(self.feed_forward_norm(self.norm(x)))


class GPT(nnx.Module):
    """Map tokens `(batch, time)` to logits `(batch, time, vocab_size)`.

    Args:
        config: the size.
        dtype: of the activations, and of the weights as the matmuls see them.
        param_dtype: of the weights as they are made.
        dot_general: used by the linear layers (not by the attention scores, embeddings and head).
        attention_dot_general: used for queries x keys and weights x values.
        norm: applied to the input of each LayerNorm.
        rngs: the random numbers for the initial weights.
    """

    def __init__(
        self,
        config: Config,
        *,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        dot_general: DotGeneral = lax.dot_general,
        attention_dot_general: DotGeneral = lax.dot_general,
        norm: Hook = identity,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}

        def linear(*args, **kwargs):
            return nnx.Linear(*args, dot_general=dot_general, **dtypes, **kwargs)

        def layer_norm(*args, **kwargs):
            return nnx.LayerNorm(*args, use_fast_variance=False, **dtypes, **kwargs)

        def embed(*args):
            init = nnx.initializers.normal(1 / math.sqrt(config.width))
            return nnx.Embed(*args, embedding_init=init, rngs=rngs, **dtypes)

        self.norm = norm
        self.tokens = embed(config.vocab_size, config.width)
        self.positions = embed(config.context, config.width)
        self.blocks = nnx.List(
            Block(
                config,
                linear=linear,
                layer_norm=layer_norm,
                norm=norm,
                attention_dot_general=attention_dot_general,
                rngs=rngs,
            )
            for _ in range(config.layers)
        )
        self.final_norm = layer_norm(config.width, rngs=rngs)
        if config.tie_embeddings:
            self.head = None  # the token embedding, transposed
        else:
            self.head = nnx.Linear(
                config.width,
                config.vocab_size,
                use_bias=False,
                rngs=rngs,
                **dtypes,
            )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{i}"):  # for profiles and `jsa.numerics.check_fp8`
                x = block(x)
        x = self.final_norm(self.norm(x))
        return self.tokens.attend(x) if self.head is None else self.head(x)


def residual_init(config: Config) -> nnx.Initializer:
    """Return the initialiser of a layer that writes to the residual stream.

    Its variance is `1 / (fan_in * 2 * layers)`, so that the sum of all `2 * layers` branches has
    the variance of one.
    """
    return nnx.initializers.variance_scaling(1 / (2 * config.layers), "fan_in", "normal")
