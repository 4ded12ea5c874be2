"""A GPT of Flax linen whose feed-forward layers are experts, with nothing about FP8 in it.

Each token goes to the best two of eight experts, as long as these have room: the rows of an expert
are multiplied together, by `jax.lax.ragged_dot`. A second loss keeps the router from sending all
tokens to the same (Fedus et al., "Switch Transformers", 2022).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax import lax

from benchmarks.accuracy.scale_models import CONTEXT, VOCABULARY, WIDTH, Attention, Block

EXPERTS, CHOSEN = 8, 2
CAPACITY = 1.25  # times the rows that an expert has if all have the same
BALANCE = 0.01  # weight of the router's loss


class Experts(Block):
    """A router and the experts, two linear layers with a GELU between them."""

    @linen.compact
    def __call__(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        router = self.make("Dense", EXPERTS, use_bias=False, name="router")
        probabilities = jax.nn.softmax(router(tokens).astype(jnp.float32))
        weights, chosen = lax.top_k(probabilities, CHOSEN)
        expert = chosen.reshape(-1)
        first_come = jnp.cumsum(jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32), 0) - 1
        place = first_come[np.arange(len(expert)), expert]
        room = int(CAPACITY * len(expert) / EXPERTS)
        expert = jnp.where(place < room, expert, EXPERTS)  # behind the last: in no group
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.bincount(expert, length=EXPERTS)
        out = self._grouped(tokens[order // CHOSEN], sizes)
        out = out * weights.reshape(-1)[order][:, None].astype(out.dtype)
        share = jnp.mean(jax.nn.one_hot(chosen, EXPERTS), (0, 1))
        balance = EXPERTS * jnp.sum(share * jnp.mean(probabilities, 0))
        return jnp.zeros_like(tokens).at[order // CHOSEN].add(out).reshape(x.shape), balance

    def _grouped(self, rows, sizes):
        width = rows.shape[-1]
        init = linen.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        up = self.param("up", init, (EXPERTS, width, 2 * width), self.dtype)
        down = self.param("down", init, (EXPERTS, 2 * width, width), self.dtype)
        hidden = self.layers.gelu(lax.ragged_dot(rows, up.astype(rows.dtype), sizes))
        return lax.ragged_dot(hidden, down.astype(rows.dtype), sizes)


class ExpertLanguageModel(Block):
    """Tokens `(batch, time)` to logits, and the mean loss of the routers."""

    depth: int

    @linen.compact
    def __call__(self, tokens):
        x = self.make("Embed", VOCABULARY, WIDTH, name="tokens")(tokens)
        x = x + self.make("Embed", CONTEXT, WIDTH, name="positions")(np.arange(tokens.shape[1]))
        losses = []
        for i in range(self.depth):
            attention = Attention(self.layers, self.dtype, is_causal=True, name=f"attention_{i}")
            x = x + attention(self.make("LayerNorm", name=f"attention_norm_{i}")(x))
            experts = Experts(self.layers, self.dtype, name=f"experts_{i}")
            y, balance = experts(self.make("LayerNorm", name=f"experts_norm_{i}")(x))
            x, losses = x + y, [*losses, balance]
        x = self.make("LayerNorm", name="norm")(x)
        return self.make("Dense", VOCABULARY, name="head")(x), sum(losses) / self.depth
