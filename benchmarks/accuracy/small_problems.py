"""Two small real problems and one loop to train them, for the benchmarks of optimizers.

The problems are scikit-learn's digits (a network 64-64-10, all of the training set in each batch)
and bytes of English text (a GPT of `examples.gpt` with two layers). The loop is one `lax.scan` over
all steps, so that a step of a few milliseconds costs no Python; it looks at the whole state after
each step.
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
from sklearn.datasets import load_digits

import jax_scalify as jsa
from examples.gpt import data, step
from examples.gpt.config import get_size
from examples.gpt.presets import Preset

PyTree = Any
CONFIG = dataclasses.replace(get_size("tiny"), layers=2, width=32, heads=2, context=32, batch=16)
HIDDEN = 64
HELD_OUT_DIGITS = 897  # of 1,797: the loss of fewer hangs on single images
HELD_OUT_TEXTS = 256  # sequences


class TrainState(NamedTuple):
    """What lives from step to step."""

    params: PyTree
    opt_state: PyTree


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something to train.

    Attributes:
        name: as tables show it.
        steps: how long it is trained, if nothing else is asked for.
        init: `init(seed) -> params`, in float32.
        make_loss: `make_loss(compute_dtype) -> loss(params, batch)`.
        batches: `batches(seed, steps)`: all batches of a run, stacked.
        held_out: `held_out()`: one batch that is never trained on.
    """

    name: str
    steps: int
    init: Callable[[int], PyTree]
    make_loss: Callable[[Any], Callable[[PyTree, PyTree], jax.Array]]
    batches: Callable[[int, int], PyTree]
    held_out: Callable[[], PyTree]


# Digits


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    images = (images / 8.0 - 1.0).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    return images[order], labels[order].astype(np.int32)


def _init_digits(seed: int) -> PyTree:
    rng = np.random.default_rng(seed)
    params = {}
    for name, (rows, columns) in (("hidden", (64, HIDDEN)), ("out", (HIDDEN, 10))):
        kernel = rng.normal(size=(rows, columns)) / math.sqrt(rows)
        params[name] = {
            "kernel": jnp.asarray(kernel, jnp.float32),
            "bias": jnp.zeros(columns, jnp.float32),
        }
    return params


def _digits_loss(dtype: Any) -> Callable[[PyTree, PyTree], jax.Array]:
    def dense(layer: PyTree, x: jax.Array) -> jax.Array:
        return x @ layer["kernel"].astype(dtype) + layer["bias"].astype(dtype)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        images, labels = batch
        hidden = jax.nn.relu(dense(params["hidden"], images.astype(dtype)))
        logits = dense(params["out"], hidden).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


def _digits_batches(seed: int, steps: int, size: int = 256) -> PyTree:
    images, labels = (part[HELD_OUT_DIGITS:] for part in _digits())
    rng = np.random.default_rng((seed, 1))
    chosen = rng.integers(0, len(labels), size=(steps, size))
    return images[chosen], labels[chosen]


def _digits_held_out() -> PyTree:
    images, labels = _digits()
    return images[:HELD_OUT_DIGITS], labels[:HELD_OUT_DIGITS]


# Text


@functools.cache
def _corpus() -> data.Corpus:
    return data.load_corpus(None, context=CONFIG.context)


def _init_gpt(seed: int) -> PyTree:
    model = step.make_model(CONFIG, Preset(scaled=False), rngs=nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _gpt_loss(dtype: Any) -> Callable[[PyTree, PyTree], jax.Array]:
    return step.make_loss(CONFIG, Preset(compute_dtype=dtype))


def _gpt_batches(seed: int, steps: int) -> PyTree:
    size = {"batch": CONFIG.batch, "context": CONFIG.context}
    return np.stack([data.train_batch(_corpus(), seed=seed, step=i, **size) for i in range(steps)])


def _gpt_held_out() -> PyTree:
    size = {"batch": HELD_OUT_TEXTS, "context": CONFIG.context}
    return data.held_out_batches(_corpus(), batches=1, **size)[0]


PROBLEMS = {
    "digits": Problem("digits", 150, _init_digits, _digits_loss, _digits_batches, _digits_held_out),
    "gpt": Problem("gpt", 200, _init_gpt, _gpt_loss, _gpt_batches, _gpt_held_out),
}


# What is measured of a state


def scaled_leaves(tree: PyTree) -> list[Any]:
    """Return the leaves, a `ScaledArray` being one."""
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jsa.ScaledArray))


def finite_leaves(state: PyTree) -> jax.Array:
    """Return for each floating leaf (data and scales apart) whether all of it is finite."""
    leaves = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in leaves])


def bytes_per_parameter(state: TrainState) -> float:
    """Return the bytes of the whole state, scales and counters too, for each parameter."""
    parameters = sum(math.prod(x.shape) for x in scaled_leaves(state.params))
    return sum(x.nbytes for x in jax.tree.leaves(state)) / parameters


def scaled_state(optimizer: Any, params: PyTree) -> TrainState:
    """Return the first state of a step through `scalify`, with float16 weights."""
    weights = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
    return TrainState(weights, optimizer.init(params))


@functools.lru_cache(maxsize=8)
def _make_evaluate(problem: Problem, dtype: Any, scaled: bool) -> Callable:
    loss = problem.make_loss(dtype)
    return jax.jit(jsa.scalify(loss) if scaled else loss)


def evaluate(problem: Problem, params: PyTree, dtype: Any) -> float:
    """Return the loss of held-out data, computed in `dtype`, through `scalify` if scaled."""
    scaled = any(isinstance(x, jsa.ScaledArray) for x in scaled_leaves(params))
    return float(_make_evaluate(problem, dtype, scaled)(params, problem.held_out()))


# The loop


class Outcome(NamedTuple):
    """What a run leaves.

    Attributes:
        state: the last one.
        losses: of the batches, `(steps,)`.
        first_bad_step: the first step that left something in the state that is not finite, or -1.
        skipped: number of steps that changed nothing, as the step said.
    """

    state: PyTree
    losses: jax.Array
    first_bad_step: jax.Array
    skipped: jax.Array


def make_run(update: Callable) -> Callable[[PyTree, PyTree], Outcome]:
    """Return the jitted `run(state, batches)` of a step `(state, batch) -> (state, loss, skipped)`.

    The step is traced once; a loss is returned as a plain float32 number.
    """

    @jax.jit
    def run(state: PyTree, batches: PyTree) -> Outcome:
        def body(carry, batch):
            state, bad, number = carry
            state, loss, skipped = update(state, batch)
            bad = jnp.where((bad < 0) & ~finite_leaves(state).all(), number, bad)
            return (state, bad, number + 1), (jsa.asarray(loss, jnp.float32), skipped)

        first = (state, jnp.int32(-1), jnp.int32(0))
        (state, bad, _), (losses, skipped) = jax.lax.scan(body, first, batches)
        return Outcome(state, losses, bad, jnp.sum(skipped))

    return run
