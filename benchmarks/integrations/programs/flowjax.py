"""A neural spline flow of FlowJAX, fitted by maximum likelihood."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import Normal
from flowjax.flows import coupling_flow
from flowjax.train.losses import MaximumLikelihoodLoss
from paramax import NonTrainable

from benchmarks.integrations.programs.training import Problem, PyTree

DIMS = 4


def problem() -> Problem:
    """Return the maximum likelihood fit of a curved density."""
    flow = coupling_flow(
        jax.random.key(0),
        base_dist=Normal(jnp.zeros(DIMS)),
        transformer=RationalQuadraticSpline(knots=6, interval=4),
        flow_layers=3,
        nn_width=32,
    )
    params, static = eqx.partition(
        flow, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, NonTrainable)
    )
    likelihood = MaximumLikelihoodLoss()  # computes in float32: `log_prob` casts its input

    def loss_fn(params: PyTree, batch: jax.Array, key: jax.Array) -> jax.Array:
        return likelihood(params, static, batch, key=key)

    def batches(steps: int):
        rng = np.random.default_rng(0)
        for _ in range(steps):
            x = rng.normal(size=(128, DIMS))
            x[:, 1::2] = 0.5 * x[:, ::2] ** 2 - 0.5 + 0.3 * x[:, 1::2]
            yield np.float32(x)

    return Problem(loss_fn, params, batches, optax.adam(3e-3))
