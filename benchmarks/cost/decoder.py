"""A Llama-like decoder in plain JAX: scanned, rematerialised layers, and its training steps.

Nothing in it knows of scales. `plain_step` is what people train with in bfloat16: weights and
Adam's moments in float32. `scaled_step` is the README's recipe. States are made of shapes only.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa

PyTree = Any
STATIC_SCALE = 2.0**-5  # of every frozen leaf: which one it is makes no difference to the program


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and of one device's part of a batch."""

    layers: int = 4
    width: int = 1024
    heads: int = 8
    groups: int = 4
    vocabulary: int = 8192
    sequences: int = 2
    tokens: int = 1024

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer, a multiple of 256."""
        return -(-8 * self.width // 3 // 256) * 256


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


def loss_fn(params: PyTree, tokens: jax.Array, sizes: Sizes, rows: Any = None) -> jax.Array:
    """Mean cross-entropy of the next token; tokens are `(batch, time + 1)`.

    `rows` is the sharding of activations over the devices, if there are several.
    """

    @jax.checkpoint
    def layer(x: jax.Array, w: PyTree) -> tuple[jax.Array, None]:
        x = x if rows is None else lax.with_sharding_constraint(x, rows)
        x = x + _attention(_rms_norm(x, w["attention_norm"]), w, sizes)
        y = _rms_norm(x, w["feed_forward_norm"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    x = params["tokens"][tokens[:, :-1]]
    x, _ = lax.scan(layer, x, params["layers"])
    logits = _rms_norm(x, params["norm"]) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return jnp.mean(losses)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW behind clipping by the global norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step that can be compiled: `update(state, tokens) -> (state, loss)`."""

    update: Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]]
    state: PyTree
    tokens: jax.ShapeDtypeStruct

    def jitted(self) -> Any:
        """The step as it is run: its state donated, and where it was."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        if any(s is None for s in jax.tree.leaves(shardings, is_leaf=lambda s: s is None)):
            return jax.jit(self.update, donate_argnums=0)
        return jax.jit(self.update, donate_argnums=0, out_shardings=(shardings, None))


def plain_step(sizes: Sizes, devices: int = 1, dtype: Any = jnp.bfloat16) -> Step:
    """The step that is compared with: weights and state in float32, the model in bfloat16."""
    optimizer = make_optimizer()

    def loss(params: PyTree, tokens: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda w: w.astype(dtype), params)
        return loss_fn(cast, tokens, sizes, _rows(devices))

    def update(state: PyTree, tokens: jax.Array) -> tuple[PyTree, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    def make(key: jax.Array) -> PyTree:
        params = init(sizes, key)
        return params, optimizer.init(params)

    return _sharded(update, jax.eval_shape(make, jax.random.key(0)), sizes, devices)


def scaled_step(sizes: Sizes, devices: int = 1, *, fp8: bool = False, frozen: bool = False) -> Step:
    """The README's recipe: everything in float16, or with FP8 matmuls, or with static scales."""
    optimizer = jsa.optim.low_precision(make_optimizer())

    def loss(params: PyTree, tokens: jax.Array) -> jax.Array:
        return loss_fn(params, tokens, sizes, _rows(devices))

    loss = jsa.fp8_matmuls(loss) if fp8 else loss

    @jsa.scalify
    def update(state: PyTree, tokens: jax.Array) -> tuple[PyTree, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = jsa.optim.apply_updates(params, updates), opt_state
        return (jsa.match_scales(new, state) if frozen else new), value

    def make(key: jax.Array) -> PyTree:
        params = jsa.as_scaled_array(init(sizes, key), scale="rms", dtype="float16")
        return params, jsa.as_scaled_array(optimizer.init(params))

    state = jax.eval_shape(make, jax.random.key(0))
    if frozen:
        state = jsa.tree.map(_freeze, state)
    return _sharded(update, state, sizes, devices)


def _freeze(leaf: Any) -> Any:
    return jsa.ScaledArray(leaf.data, STATIC_SCALE) if isinstance(leaf, jsa.ScaledArray) else leaf


def _mesh(devices: int) -> AbstractMesh:
    return AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))


def _rows(devices: int) -> NamedSharding | None:
    return NamedSharding(_mesh(devices), P("data")) if devices > 1 else None


def _sharded(update: Callable, state: PyTree, sizes: Sizes, devices: int) -> Step:
    """Cut every array along its largest axis that the devices divide, as FSDP does."""
    shape = (sizes.sequences * devices, sizes.tokens + 1)
    if devices == 1:
        return Step(update, state, jax.ShapeDtypeStruct(shape, jnp.int32))

    def cut(leaf: Any) -> Any:
        axes = [a for a, n in enumerate(leaf.shape) if n % devices == 0 and leaf.size > 4096]
        largest = max(axes, key=lambda a: leaf.shape[a], default=None)
        spec = P(*("data" if a == largest else None for a in range(leaf.ndim)))
        sharding = NamedSharding(_mesh(devices), spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=_rows(devices))
    return Step(update, jax.tree.map(cut, state), tokens)
