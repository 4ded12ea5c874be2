"""A deep equilibrium model: Optimistix finds the fixed point, with implicit derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
from sklearn.datasets import load_digits

from benchmarks.integrations.programs.training import Problem, PyTree

WIDTH = 32


def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """Return the cross-entropy of a classifier whose features are a fixed point."""
    images, labels = batch
    inputs = jax.nn.gelu(images @ params["inputs"] + params["bias"])
    solver = optx.FixedPointIteration(rtol=1e-3, atol=1e-3)

    def cell(hidden: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        recurrent, inputs = weights
        return jnp.tanh(hidden @ recurrent + inputs)

    def features(inputs: jax.Array) -> jax.Array:
        weights = params["recurrent"].astype(jnp.float32), inputs.astype(jnp.float32)
        start = jnp.zeros(WIDTH)  # Optimistix solves in float32 only
        return optx.fixed_point(cell, solver, start, weights, max_steps=100).value

    hidden = jax.vmap(features)(inputs).astype(inputs.dtype)
    logits = (hidden @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def problem() -> Problem:
    """Return the classifier of digits."""
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16)

    def batches(steps: int):
        rng = np.random.default_rng(0)
        for _ in range(steps):
            chosen = rng.integers(len(labels), size=64)
            yield images[chosen], labels[chosen]

    keys = jax.random.split(jax.random.key(0), 3)
    normal = jax.nn.initializers.lecun_normal()
    params = {
        "inputs": normal(keys[0], (64, WIDTH)),
        "recurrent": 0.2 * normal(keys[1], (WIDTH, WIDTH)),
        "bias": jnp.zeros(WIDTH),
        "head": normal(keys[2], (WIDTH, 10)),
    }
    return Problem(loss_fn, params, batches, optax.adamw(3e-3))
