"""A training problem of another library, and its training, plain and through `jsa.scalify`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_scalify as jsa

PyTree = Any


@dataclass
class Problem:
    """What is trained.

    Attributes:
        loss_fn: `loss_fn(params, batch, key)`, a scalar.
        params: float32 arrays.
        batches: given a number of steps, an iterator over as many batches of NumPy arrays.
        optimizer: of optax.
        zero_gradients: a pattern of the parameters whose gradient is 0 up to rounding.
    """

    loss_fn: Callable[[PyTree, PyTree, jax.Array], jax.Array] | None
    params: PyTree
    batches: Callable[[int], Iterator[PyTree]]
    optimizer: optax.GradientTransformation = field(default_factory=lambda: optax.adamw(1e-3))
    zero_gradients: str = "$^"


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Return `tree` with its floating-point leaves in `dtype`."""

    def leaf(x: Any) -> Any:
        return np.asarray(x, dtype) if jnp.issubdtype(np.asarray(x).dtype, np.floating) else x

    return jax.tree.map(leaf, tree)


def train(problem: Problem, precision: str, steps: int) -> tuple[list[float], PyTree]:
    """Train, and return the losses and the float32 parameters.

    `precision` is "plain", without `scalify`, or "float32", "float16" or "fp8".
    """
    loss_fn, optimizer, params = problem.loss_fn, problem.optimizer, problem.params
    apply_updates, transform, dtype = optax.apply_updates, lambda step: step, jnp.float32
    if precision != "plain":
        dtype = jnp.float32 if precision == "float32" else jnp.float16
        if precision == "fp8":
            loss_fn = jsa.fp8_matmuls(loss_fn)
        optimizer = jsa.optim.low_precision(optimizer, dtype)
        apply_updates, transform = jsa.optim.apply_updates, jsa.scalify
        params = jsa.as_scaled_array(params, scale="rms", dtype=dtype, static=True)

    def step(params: PyTree, opt_state: PyTree, batch: PyTree, key: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return apply_updates(params, updates), opt_state, loss

    step = jax.jit(transform(step))
    opt_state = optimizer.init(params)
    if precision != "plain":
        opt_state = jsa.as_scaled_array(opt_state)
    losses = []
    for i, batch in enumerate(problem.batches(steps)):
        params, opt_state, loss = step(params, opt_state, cast(batch, dtype), jax.random.key(i))
        losses.append(float(loss))
    return losses, jsa.asarray(params, jnp.float32)
