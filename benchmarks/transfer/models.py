"""One Llama-like decoder under three parametrisations, and the steps that train it.

Standard parametrisation: weights of the variance 1/fan_in, one learning rate for all. µP: the same
at the base width, from there on learning rates of hidden weights and the readout fall as 1/width
(Yang et al., *Tensor Programs V*, 2022, table 8). u-µP: `jax_scalify.unit_scaling`. All are trained
by Adam on the bytes of a text.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.gpt import data
from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling import nnx as us_nnx
from jax_scalify.unit_scaling import optim as us_optim
from jax_scalify.unit_scaling.functional import rope

VOCABULARY = 256
LAYERS = 4
HEAD = 16  # features of a head, at all widths
BASE_WIDTH = 64  # where µP is the standard parametrisation
BATCH, CONTEXT = 16, 32
WARMUP = 0.1  # share of the steps
HELD_OUT_BATCHES = 16
EMBEDDING_STD = 0.02
# What a sweep tunes beside the learning rate (Blake et al., table 3). Those of µP: of the standard
# deviation of all weights, of the embedding, of attention's scores, of the logits, and of the
# embedding's learning rate.
MULTIPLIERS = {
    "mup": ("init_std", "embedding", "scores", "logits", "embedding_rate"),
    "umup": tuple(field.name for field in dataclasses.fields(us.UmupConfig)),
}
PyTree = Any
Multipliers = tuple[tuple[str, int], ...]  # names, and exponents of 2


class Model(NamedTuple):
    """A parametrised decoder.

    Attributes:
        init: `init(key) -> params`.
        loss: `loss(params, tokens) -> loss`, tokens `(batch, context + 1)`.
        optimizer: Adam with the learning rate 1 and the factors of the parametrisation.
    """

    init: Callable[[jax.Array], PyTree]
    loss: Callable[[PyTree, jax.Array], jax.Array]
    optimizer: optax.GradientTransformation


def make_model(name: str, width: int, layers: int = LAYERS, multipliers: Multipliers = ()) -> Model:
    """Return `standard`, `mup`, `umup` or `umup-fp8`; multipliers that are not named are 1."""
    factors = {n: 2.0**exponent for n, exponent in multipliers}
    if name in ("standard", "mup"):
        return _plain_model(width, layers, name == "mup", factors)
    return _unit_scaled_model(width, layers, name == "umup-fp8", us.UmupConfig(**factors))


# Standard parametrisation, and µP


def _plain_model(width: int, depth: int, is_mup: bool, factors: dict[str, float]) -> Model:
    ratio = BASE_WIDTH / width if is_mup else 1.0
    factors = dict.fromkeys(MULTIPLIERS["mup"], 1.0) | factors
    hidden = _hidden_width(width)
    shapes = {
        **dict.fromkeys(("query", "key", "value", "out"), (width, width)),
        **dict.fromkeys(("up", "gate"), (width, hidden)),
        "down": (hidden, width),
    }

    def init(key: jax.Array) -> PyTree:
        def normal(number: int, shape: tuple[int, int], std: float) -> jax.Array:
            std *= factors["init_std"]
            return std * jax.random.normal(jax.random.fold_in(key, number), shape)

        layers = [
            {
                name: normal(10 * layer + i, shape, 1 / math.sqrt(shape[0]))
                for i, (name, shape) in enumerate(shapes.items())
            }
            for layer in range(depth)
        ]
        # In µP the readout's weights stay of the variance of the base width, and a factor follows.
        readout = 1 / math.sqrt(BASE_WIDTH if is_mup else width)
        return {
            "embedding": normal(1000, (VOCABULARY, width), EMBEDDING_STD),
            "layers": layers,
            "readout": normal(1001, (width, VOCABULARY), readout),
        }

    def loss(params: PyTree, tokens: jax.Array) -> jax.Array:
        x = factors["embedding"] * params["embedding"][tokens[:, :-1]]
        scale = factors["scores"] / math.sqrt(HEAD)
        for layer in params["layers"]:
            h = _rms_norm(x)
            heads = (*h.shape[:-1], width // HEAD, HEAD)
            q, k, v = ((h @ layer[name]).reshape(heads) for name in ("query", "key", "value"))
            mixed = jax.nn.dot_product_attention(rope(q), rope(k), v, scale=scale, is_causal=True)
            x = x + mixed.reshape(h.shape) @ layer["out"]
            h = _rms_norm(x)
            x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
        logits = factors["logits"] * ratio * (_rms_norm(x) @ params["readout"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def scale(updates: PyTree, state: Any, params: PyTree = None) -> Any:
        layers = jax.tree.map(lambda u: u * ratio, updates["layers"])
        embedding = factors["embedding_rate"] * updates["embedding"]
        return {**updates, "layers": layers, "embedding": embedding}, state

    by_width = optax.GradientTransformation(lambda params: optax.EmptyState(), scale)
    return Model(init, loss, optax.chain(optax.scale_by_adam(), by_width, optax.scale(-1.0)))


def _rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def _hidden_width(width: int) -> int:
    """That of an MLP: the multiple of 16 next to 8/3 of the width."""
    return 16 * round(width * 8 / 3 / 16)


# u-µP


def _unit_scaled_model(width: int, depth: int, fp8: bool, config: us.UmupConfig) -> Model:
    def make(key: jax.Array) -> us_nnx.TransformerDecoder:
        return us_nnx.TransformerDecoder(
            VOCABULARY,
            width,
            depth,
            width // HEAD,
            hidden=_hidden_width(width),
            config=config,
            fp8=fp8,
            rngs=nnx.Rngs(params=key),
        )

    graph = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))), nnx.Param, ...)[0]
    rest = nnx.split(make(jax.random.key(0)), nnx.Param, ...)[2]

    def init(key: jax.Array) -> PyTree:
        return nnx.split(make(key), nnx.Param, ...)[1]

    def loss(params: PyTree, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, rest).loss(tokens[:, :-1], tokens[:, 1:])

    return Model(init, loss, us_optim.adam(1.0))


# Training


@functools.cache
def corpus() -> data.Corpus:
    """The text of the GPT example."""
    return data.load_corpus(None, context=CONTEXT)


def batch_of(seed: int, step: int, batch: int = BATCH) -> np.ndarray:
    """Tokens of one step, `(batch, CONTEXT + 1)`."""
    return data.train_batch(corpus(), seed=seed, step=step, batch=batch, context=CONTEXT)


class Trainer:
    """A model's compiled step, which takes the learning rate as an operand.

    Args:
        name: of the parametrisation.
        width: of the model.
        layers: of the model.
        batch: number of sequences of a step.
        multipliers: of the parametrisation, as `make_model` takes them.
    """

    def __init__(
        self,
        name: str,
        width: int,
        layers: int = LAYERS,
        batch: int = BATCH,
        multipliers: Multipliers = (),
    ):
        self.model, self._batch = make_model(name, width, layers, multipliers), batch
        params = jax.eval_shape(self.model.init, jax.random.key(0))
        state = jax.eval_shape(self.model.optimizer.init, params)
        tokens = jax.ShapeDtypeStruct((batch, CONTEXT + 1), jnp.int32)
        held_out = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), jnp.int32)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        # What is compiled ahead of time outlives `jax.clear_caches`.
        step = jax.jit(self.update, donate_argnums=(0, 1))
        self._step = step.lower(params, state, tokens, rate).compile()
        self._evaluate = jax.jit(self.model.loss).lower(params, held_out).compile()

    def update(self, params: PyTree, state: Any, tokens: Any, rate: Any) -> Any:
        """Return the next weights and state, and the loss."""
        loss, grads = jax.value_and_grad(self.model.loss)(params, tokens)
        updates, state = self.model.optimizer.update(grads, state, params)
        updates = jax.tree.map(lambda u: rate * u, updates)
        return optax.apply_updates(params, updates), state, loss

    def start(self, seed: int) -> tuple[PyTree, Any]:
        """Return the first weights and state."""
        params = jax.jit(self.model.init)(jax.random.key(seed))
        # What is donated must not be shared.
        return jax.tree.map(jnp.copy, (params, self.model.optimizer.init(params)))

    def train(self, rate: float, seed: int, steps: int) -> tuple[PyTree, Any]:
        """Train with warmup and cosine decay to a tenth; return the last weights and state."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, rate, max(1, round(WARMUP * steps)), steps, rate / 10
        )
        params, state = self.start(seed)
        for step in range(steps):
            tokens = jnp.asarray(batch_of(seed, step, self._batch))
            params, state, _ = self._step(params, state, tokens, jnp.float32(schedule(step + 1)))
        return params, state

    def held_out_loss(self, params: PyTree) -> float:
        """Return the mean loss of the held-out text, in nats a byte."""
        batches = data.held_out_batches(
            corpus(), batches=HELD_OUT_BATCHES, batch=BATCH, context=CONTEXT
        )
        return float(np.mean([self._evaluate(params, jnp.asarray(b)) for b in batches]))


@functools.lru_cache(maxsize=1)
def trainer(
    name: str,
    width: int,
    layers: int = LAYERS,
    batch: int = BATCH,
    multipliers: Multipliers = (),
) -> Trainer:
    """The last trainer, for cells that differ in learning rate or seed only."""
    return Trainer(name, width, layers, batch, multipliers)
