"""A normalising flow of masked couplings with splines, as in Distrax's example."""

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.integrations.programs.training import Problem, PyTree

DIMS, BINS = 4, 6


def conditioner() -> hk.Sequential:
    """Return the network that computes a coupling's spline from the other half of its input."""
    width = 3 * BINS + 1
    return hk.Sequential(
        [
            hk.nets.MLP([32, 32], activate_final=True),
            hk.Linear(DIMS * width, w_init=jnp.zeros, b_init=jnp.zeros, name="head"),
            hk.Reshape((DIMS, width), preserve_dims=-1),
        ]
    )


def spline(params: jax.Array) -> distrax.Bijector:
    """Return a spline between -4 and 4, the identity elsewhere."""
    return distrax.RationalQuadraticSpline(params, -4.0, 4.0, boundary_slopes="identity")


def log_prob(x: jax.Array) -> jax.Array:
    """Return the log-density of a flow of four couplings."""
    mask = np.arange(DIMS) % 2 == 0
    layers = []
    for _ in range(4):
        layers.append(distrax.MaskedCoupling(mask, conditioner(), spline))
        mask = ~mask
    flow = distrax.Inverse(distrax.Chain(layers))
    base = distrax.MultivariateNormalDiag(jnp.zeros(DIMS, x.dtype), jnp.ones(DIMS, x.dtype))
    return distrax.Transformed(base, flow).log_prob(x)


def problem() -> Problem:
    """Return the maximum likelihood fit of a curved density."""
    model = hk.without_apply_rng(hk.transform(log_prob))

    def loss_fn(params: PyTree, batch: jax.Array, key: jax.Array) -> jax.Array:
        return -jnp.mean(model.apply(params, batch).astype(jnp.float32))

    def batches(steps: int):
        rng = np.random.default_rng(0)
        for _ in range(steps):
            x = rng.normal(size=(128, DIMS))
            x[:, 1::2] = 0.5 * x[:, ::2] ** 2 - 0.5 + 0.3 * x[:, 1::2]
            yield np.float32(x)

    params = model.init(jax.random.key(0), jnp.zeros((1, DIMS)))
    return Problem(loss_fn, params, batches, optax.adam(3e-3))
