"""What months of training bring a state whose scales are frozen: a part of `soak.py`.

Each situation is that of a small network; `frozen_runs.py` trains it for some steps with dynamic
scales, calibrates once, freezes, and goes on through what is unusual; float32 does the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_scalify as jsa
from benchmarks.accuracy.frozen_runs import WARM, Problem, compare, held_out_loss
from benchmarks.accuracy.situations import Checks, adamw
from examples.gpt.step import astype

STEPS = 300  # with frozen scales
DEAD = 1000  # steps in which a layer is dead
UNSEEN = 10_000  # steps in which rows of an embedding do not occur
ACCUMULATED = 4  # batches a step
PyTree = Any

# A network 64-64-10 that learns from a network; its hidden layer has a gate


INPUTS, HIDDEN, CLASSES, BATCH = 64, 64, 10, 128


def init_network() -> PyTree:
    """The parameters of a network of two layers."""
    rng = np.random.default_rng(0)
    shapes = {"hidden": (INPUTS, HIDDEN), "out": (HIDDEN, CLASSES)}
    return {
        name: {
            "kernel": jnp.float32(rng.normal(size=shape) / np.sqrt(shape[0])),
            "bias": jnp.zeros(shape[1], jnp.float32),
        }
        for name, shape in shapes.items()
    }


def network_loss(params: PyTree, batch: PyTree, dtype: Any) -> jax.Array:
    """The mean cross-entropy of what has a weight."""
    params = astype(params, dtype)
    hidden = batch["inputs"].astype(dtype) @ params["hidden"]["kernel"]
    hidden = jax.nn.relu(hidden + params["hidden"]["bias"]) * batch["gate"].astype(dtype)
    logits = (hidden @ params["out"]["kernel"] + params["out"]["bias"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.sum(losses * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1)


def taught_batch(number: int, size: int = BATCH) -> PyTree:
    """Inputs, labels of a fixed random network, of which a fifth are wrong, and weights."""
    teacher = np.random.default_rng(1)
    first, second = (teacher.normal(size=(INPUTS, n)) for n in (16, CLASSES))
    rng = np.random.default_rng((2, number))
    inputs = rng.normal(size=(size, INPUTS))
    labels = np.argmax(np.tanh(inputs @ first / 4) @ second[:16], axis=1)
    labels = np.where(rng.random(size) < 0.2, rng.integers(0, CLASSES, size), labels)
    return {
        "inputs": np.float32(inputs),
        "labels": np.int32(labels),
        "weights": np.ones(size, np.float32),
        "gate": np.ones(HIDDEN, np.float32),
        "rate": np.ones(1, np.float32),
        "number": np.int32(number),
    }


def stack(batches: list[PyTree]) -> PyTree:
    """Batches, one behind the other."""
    return jax.tree.map(lambda *x: np.stack(x), *batches)


NETWORK = Problem(
    init_network,
    network_loss,
    lambda steps: stack([taught_batch(i) for i in range(steps)]),
    lambda: taught_batch(-1 % 2**31, 8192),
)
ACCUMULATING = dataclasses.replace(
    NETWORK,
    optimizer=optax.MultiSteps(adamw(), ACCUMULATED).gradient_transformation(),
    moments=optax.MultiSteps(optax.scale_by_adam(), ACCUMULATED).gradient_transformation(),
)


def loss_spike(way: str) -> Checks:
    """One batch is corrupt: inputs 64 times as large, every label wrong."""

    def change(batches: PyTree) -> None:
        batches["inputs"][STEPS // 3] *= 64
        batches["labels"][STEPS // 3] = (batches["labels"][STEPS // 3] + 1) % CLASSES

    return compare(NETWORK, way, STEPS, change)[0]


def rate_jump(way: str) -> Checks:
    """The learning rate is 10 times as large in the middle third of the steps."""

    def change(batches: PyTree) -> None:
        batches["rate"][STEPS // 3 : 2 * STEPS // 3] = 10

    return compare(NETWORK, way, STEPS, change)[0]


def padding(way: str) -> Checks:
    """Every tenth batch is padding, and so are 50 in a row: inputs 0, weights 0."""

    def change(batches: PyTree) -> None:
        empty = np.arange(STEPS) % 10 == 9
        empty[STEPS // 3 :][:50] = True
        for name in ("inputs", "weights"):
            batches[name][empty] = 0

    return compare(NETWORK, way, STEPS, change)[0]


def dead_layer(way: str) -> Checks:
    """The hidden layer is dead, its gate shut, for a thousand steps, then alive again."""

    def change(batches: PyTree) -> None:
        batches["gate"][STEPS // 3 :][:DEAD] = 0

    return compare(NETWORK, way, STEPS + DEAD, change)[0]


def accumulation(way: str) -> Checks:
    """Gradients of 4 batches a step, by `optax.MultiSteps`, and averages of the weights."""
    checks, ours, _ = compare(ACCUMULATING, way, ACCUMULATED * STEPS)
    pair = (ours.state.average.ema, ours.state.wide_average.ema)
    average, wanted = (jsa.asarray(x, jnp.float32) for x in pair)
    errors = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.sqrt(jnp.mean(b**2))), average, wanted
    )
    losses = [held_out_loss(ACCUMULATING, x, "float32") for x in (average, wanted)]
    return checks | {
        "(average's gap, %)": 100 * (losses[0] / losses[1] - 1),
        "(average's worst element, of its RMS)": max(jax.tree.leaves(errors)),
    }


# A small table of embeddings

ROWS, SEEN_ROWS, CHANNELS, TOKENS, KINDS = 16, 8, 8, 4, 4


def init_table() -> PyTree:
    """A table, and what reads four rows of it."""
    rng = np.random.default_rng(1)
    shapes = {"rows": (ROWS, CHANNELS), "head": (TOKENS * CHANNELS, KINDS)}
    return {n: jnp.float32(rng.normal(size=s) / np.sqrt(s[-1])) for n, s in shapes.items()}


def table_loss(params: PyTree, batch: PyTree, dtype: Any) -> jax.Array:
    """The mean cross-entropy of the class of four tokens."""
    params = astype(params, dtype)
    found = params["rows"][batch["tokens"]]
    logits = (found.reshape(found.shape[0], -1) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def token_batch(number: int, size: int = 16) -> PyTree:
    """Four tokens, whose class is that of the first, but of every fifth line another."""
    rng = np.random.default_rng((3, number))
    tokens = rng.integers(0, ROWS, size=(size, TOKENS))
    wrong = rng.random(size) < 0.2
    labels = np.where(wrong, rng.integers(0, KINDS, size), tokens[:, 0] % KINDS)
    return {
        "tokens": np.int32(tokens),
        "labels": np.int32(labels),
        "rate": np.ones(1, np.float32),
        "number": np.int32(number),
    }


TABLE = Problem(
    init_table,
    table_loss,
    lambda steps: stack([token_batch(i) for i in range(steps)]),
    lambda: token_batch(-1 % 2**31, 8192),
)


def unseen_rows(way: str) -> Checks:
    """Half of the rows of a table do not occur for 10,000 steps, then they do again."""

    def change(batches: PyTree) -> None:
        batches["tokens"][:UNSEEN] %= SEEN_ROWS

    return compare(TABLE, way, UNSEEN + STEPS, change)[0]


TAILS: dict[str, Callable[[str], Checks]] = {
    "loss-spike": loss_spike,
    "rate-jump": rate_jump,
    "padding": padding,
    "dead-layer": dead_layer,
    "unseen-rows": unseen_rows,
    "accumulation": accumulation,
}


def settings() -> dict[str, int]:
    """Return what the results depend on."""
    return {"warm": WARM, "steps": STEPS, "dead": DEAD, "unseen": UNSEEN}
