"""A Llama-like decoder in plain JAX: scanned, rematerialised layers, with experts or without.

Nothing in it knows of scales.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.cost.training import Model, rows_sharding

PyTree = Any
CHOSEN = 2  # experts of a token


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and of one device's part of a batch; 0 experts are a dense model."""

    layers: int = 4
    width: int = 1024
    heads: int = 8
    groups: int = 4
    vocabulary: int = 8192
    sequences: int = 2
    tokens: int = 1024
    experts: int = 0

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer, a multiple of 256; experts share it."""
        whole = -(-8 * self.width // 3 // 256) * 256
        return whole // CHOSEN if self.experts else whole


def init(sizes: Sizes, key: jax.Array) -> PyTree:
    """Draw the weights, in float32; those of layers are stacked."""
    width, hidden, layers = sizes.width, sizes.hidden, sizes.layers
    keys_width = width * sizes.groups // sizes.heads
    shapes = {
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


def _rotate(x: jax.Array) -> jax.Array:
    _, time, _, channels = x.shape
    frequencies = 10000.0 ** (-np.arange(0, channels, 2) / channels)
    angles = (np.arange(time)[:, None] * frequencies)[:, None]
    cos, sin = (jnp.asarray(table, x.dtype) for table in (np.cos(angles), np.sin(angles)))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(x: jax.Array, w: PyTree, sizes: Sizes) -> jax.Array:
    batch, time, width = x.shape
    channels = width // sizes.heads
    query, key, value = (
        (x @ w[name]).reshape(batch, time, -1, channels) for name in ("query", "key", "value")
    )
    repeats = sizes.heads // sizes.groups
    key, value = (jnp.repeat(y, repeats, axis=2) for y in (_rotate(key), value))
    scores = jnp.einsum("btnh,bsnh->bnts", _rotate(query), key) * channels**-0.5
    causal = jnp.tril(jnp.ones((time, time), bool))
    probabilities = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bnts,bsnh->btnh", probabilities, value).reshape(x.shape) @ w["out"]


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


def loss_fn(params: PyTree, tokens: jax.Array, sizes: Sizes, rows: Any = None) -> jax.Array:
    """Mean cross-entropy of the next token; tokens are `(batch, time + 1)`.

    `rows` is the sharding of activations over the devices, if there are several.
    """

    @jax.checkpoint
    def layer(x: jax.Array, w: PyTree) -> tuple[jax.Array, None]:
        x = x if rows is None else lax.with_sharding_constraint(x, rows)
        x = x + _attention(_rms_norm(x, w["attention_norm"]), w, sizes)
        y = _rms_norm(x, w["feed_forward_norm"])
        return x + (_experts(y, w, sizes) if sizes.experts else _feed_forward(y, w)), None

    x = params["tokens"][tokens[:, :-1]]
    x, _ = lax.scan(layer, x, params["layers"])
    logits = _rms_norm(x, params["norm"]) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return jnp.mean(losses)


def make_decoder(sizes: Sizes, devices: int = 1) -> Model:
    """The model that a training step takes."""

    def loss(params: PyTree, other: PyTree, tokens: jax.Array, dtype: Any) -> Any:
        return loss_fn(params, tokens, sizes, rows_sharding(devices)), other

    tokens = jax.ShapeDtypeStruct((sizes.sequences * devices, sizes.tokens + 1), jnp.int32)
    return Model(lambda key: (init(sizes, key), ()), loss, tokens)
