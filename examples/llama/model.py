"""A Llama-like decoder in plain JAX: RMSNorm, RoPE, grouped queries, SwiGLU or experts.

Its layers are stacked, scanned and rematerialised, so that a model of 126 compiles like one of 2.
Nothing in it knows of scales.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from examples.llama.layout import Layout

PyTree = Any
CHOSEN = 2  # experts of a token


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    Attributes:
        layers: how many.
        width: of the residual stream.
        heads: of the queries.
        groups: heads of the keys and values; a divisor of `heads`.
        hidden: width of the feed-forward layer, or of each expert.
        vocabulary: number of tokens.
        context: length of a sequence.
        experts: of which each token has two; 0 is a dense feed-forward layer.
        block: queries whose scores, and tokens whose logits, are in memory at once; 0: all of them.
        theta: base of the rotary embedding's wavelengths.
    """

    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    context: int
    experts: int = 0
    block: int = 0
    theta: float = 500_000.0

    @property
    def parameters(self) -> int:
        """How many weights there are."""
        shapes = jax.eval_shape(lambda: init(self, jax.random.key(0)))
        return sum(x.size for x in jax.tree.leaves(shapes))


_LLAMA_3 = {"groups": 8, "vocabulary": 128_256, "context": 8192, "block": 1024}
SIZES = {
    "tiny": Sizes(2, 128, 4, 2, 384, 256, 128),
    "small": Sizes(4, 256, 8, 4, 768, 256, 256),
    "1b": Sizes(16, 2048, 32, hidden=8192, **_LLAMA_3),
    "8b": Sizes(32, 4096, 32, hidden=14_336, **_LLAMA_3),
    "70b": Sizes(80, 8192, 64, hidden=28_672, **_LLAMA_3),
    "405b": Sizes(126, 16_384, 128, hidden=53_248, **_LLAMA_3),
}


def init(sizes: Sizes, key: jax.Array) -> PyTree:
    """Draw the weights, in float32; those of layers are stacked."""
    width, hidden, layers = sizes.width, sizes.hidden, sizes.layers
    keys_width = width * sizes.groups // sizes.heads
    shapes: dict[str, tuple[int, ...]] = {
        "query": (width, width),
        "key": (width, keys_width),
        "value": (width, keys_width),
        "out": (width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    if sizes.experts:
        experts = {name: (sizes.experts, *shapes[name]) for name in ("gate", "up", "down")}
        shapes |= experts | {"router": (width, sizes.experts)}

    def normal(i: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, i), shape) * shape[-2] ** -0.5

    stacked = {name: normal(i, layers, *shape) for i, (name, shape) in enumerate(shapes.items())}
    norms = {name: jnp.ones((layers, width)) for name in ("attention_norm", "feed_forward_norm")}
    return {
        "tokens": normal(100, sizes.vocabulary, width),
        "layers": stacked | norms,
        "norm": jnp.ones(width),
        "head": normal(101, width, sizes.vocabulary),
    }


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + 1e-5)).astype(x.dtype) * weight


def _rotate(x: jax.Array, theta: float) -> jax.Array:
    _, time, _, channels = x.shape
    frequencies = theta ** (-np.arange(0, channels, 2) / channels)
    angles = (np.arange(time)[:, None] * frequencies)[:, None]
    cos, sin = (jnp.asarray(table, x.dtype) for table in (np.cos(angles), np.sin(angles)))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _in_blocks(fun: Callable, block: int, *arrays: jax.Array) -> jax.Array:
    """Call `fun` for a block of axis 1 after the other, rematerialised, and join the results."""
    batch, time = arrays[0].shape[:2]
    if block in (0, time):
        return fun(*arrays)
    blocks = [
        jnp.moveaxis(x.reshape(len(x), time // block, block, *x.shape[2:]), 1, 0) for x in arrays
    ]
    out = lax.map(lambda xs: jax.checkpoint(fun)(*xs), tuple(blocks))
    return jnp.moveaxis(out, 0, 1).reshape(batch, time, *out.shape[3:])


def _attention(x: jax.Array, w: PyTree, sizes: Sizes, layout: Layout) -> jax.Array:
    batch, time, width = x.shape
    channels = width // sizes.heads
    query, key, value = (
        layout.heads((x @ w[name]).reshape(batch, time, -1, channels))
        for name in ("query", "key", "value")
    )
    repeats = sizes.heads // sizes.groups
    key, value = (
        layout.heads(jnp.repeat(y, repeats, axis=2)) for y in (_rotate(key, sizes.theta), value)
    )

    def attend(query: jax.Array, position: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * channels**-0.5
        causal = position[0, :, None] >= np.arange(time)
        probabilities = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
        return jnp.einsum("bnts,bsnh->btnh", probabilities, value)

    positions = jnp.arange(time)[None]
    out = _in_blocks(attend, sizes.block, _rotate(query, sizes.theta), positions)
    return layout.heads(out).reshape(x.shape) @ w["out"]


def _feed_forward(x: jax.Array, w: PyTree) -> jax.Array:
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def _experts(x: jax.Array, w: PyTree, sizes: Sizes) -> jax.Array:
    """The experts that a router chooses for each token, as grouped matmuls."""
    tokens = x.reshape(-1, x.shape[-1])
    probabilities = jax.nn.softmax((tokens @ w["router"]).astype(jnp.float32))
    weights, chosen = lax.top_k(probabilities, CHOSEN)
    order = jnp.argsort(chosen.reshape(-1))
    counts = jnp.bincount(chosen.reshape(-1), length=sizes.experts)
    source = order // CHOSEN
    rows = tokens[source]
    gate, up = (lax.ragged_dot(rows, w[name], counts) for name in ("gate", "up"))
    out = lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], counts)
    out = out * weights.reshape(-1)[order][:, None].astype(out.dtype)
    return jnp.zeros_like(tokens).at[source].add(out).reshape(x.shape)


def loss_fn(
    params: PyTree,
    tokens: jax.Array,
    sizes: Sizes,
    layout: Layout | None = None,
    remat: Callable[[Callable], Callable] = jax.checkpoint,
) -> jax.Array:
    """Mean cross-entropy of the next token, in nats; tokens are `(batch, context + 1)`.

    `remat` goes around a layer, and says what is kept of it for the backward pass.
    """
    layout = layout or Layout(None)

    @remat
    def layer(x: jax.Array, w: PyTree) -> tuple[jax.Array, None]:
        x = layout.stream(x)
        y = layout.rows(_rms_norm(x, w["attention_norm"]))
        x = x + layout.stream(_attention(y, w, sizes, layout))
        y = layout.rows(_rms_norm(x, w["feed_forward_norm"]))
        y = _experts(y, w, sizes) if sizes.experts else _feed_forward(y, w)
        return x + layout.stream(y), None

    def losses(x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (x @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    x = layout.stream(params["tokens"][tokens[:, :-1]])
    x, _ = lax.scan(layer, x, params["layers"])
    x = layout.rows(_rms_norm(x, params["norm"]))
    return jnp.mean(_in_blocks(losses, sizes.block, x, tokens[:, 1:]))
