"""A Bayesian neural network that NumPyro fits with its own `SVI.update`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_sample

import jax_scalify as jsa
from benchmarks.integrations.programs.training import Problem, PyTree, cast

POINTS, WIDTH = 512, 32


def network(hidden: jax.Array, bias: jax.Array, head: jax.Array, x: jax.Array) -> jax.Array:
    """Return the network's prediction."""
    return jnp.tanh(x @ hidden / np.sqrt(x.shape[-1]) + bias) @ head / np.sqrt(WIDTH)


def model(x: jax.Array, y: jax.Array, network: Callable = network) -> None:
    """Regress `y` on `x` with a network whose weights have normal priors."""

    def normal(*shape: int) -> dist.Distribution:
        return dist.Normal(jnp.zeros(shape, x.dtype), 1).to_event(len(shape))

    hidden = numpyro.sample("hidden", normal(x.shape[-1], WIDTH))
    bias = numpyro.sample("bias", normal(WIDTH))
    head = numpyro.sample("head", normal(WIDTH))
    noise = numpyro.sample("noise", dist.LogNormal(jnp.zeros((), x.dtype), 0.5))
    weights = (w.astype(x.dtype) for w in (hidden, bias, head))  # NumPyro samples in float32
    mean = network(*weights, x).astype(jnp.float32)
    with numpyro.plate("data", POINTS, subsample_size=len(x)):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def batches(steps: int):
    """Yield noisy values of a function."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(64, 8))
        yield np.float32(x), np.float32(np.sin(x[:, 0]) + x[:, 1] + 0.1 * rng.normal(size=64))


def problem() -> Problem:
    """Return the variational fit; its loss and parameters are those of `SVI`."""
    return Problem(None, None, batches, optax.adam(1e-2))


def train(problem: Problem, precision: str, steps: int) -> tuple[list[float], PyTree]:
    """Train with the `update` of NumPyro."""
    guide = AutoNormal(model, init_loc_fn=init_to_sample)
    optimizer, dtype = problem.optimizer, np.float32
    if precision != "plain":
        dtype = np.float32 if precision == "float32" else np.float16
        optimizer = jsa.optim.low_precision(optimizer, dtype, round_updates=True)
    static = {"network": jsa.fp8_matmuls(network)} if precision == "fp8" else {}
    svi = SVI(model, guide, optimizer, Trace_ELBO(), **static)
    state = svi.init(jax.random.key(0), *next(batches(1)))
    update = svi.update
    if precision != "plain":
        count, (params, _) = state.optim_state
        params = jsa.as_scaled_array(params, scale="rms", dtype=dtype, static=True)
        opt_state = jsa.as_scaled_array(optimizer.init(params))
        state = state._replace(optim_state=(count, (params, opt_state)))
        update = jsa.scalify(update)
    update, found = jax.jit(update), []
    for batch in problem.batches(steps):
        state, loss = update(state, *cast(batch, dtype))
        found.append(float(loss))
    return found, jsa.asarray(state.optim_state[1][0], jnp.float32)
