"""PPO of Brax: its networks and loss on transitions of a random policy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from brax import envs
from brax.training.acme import running_statistics
from brax.training.acting import generate_unroll
from brax.training.agents.ppo import losses, networks
from brax.training.types import Transition

from benchmarks.integrations.programs.training import Problem, PyTree

ENVS, UNROLL = 64, 10


def unroll(ppo: networks.PPONetworks, params: losses.PPONetworkParams) -> tuple[PyTree, Transition]:
    """Return the statistics of the observations, and trajectories of the inverted pendulum."""
    env = envs.create("inverted_pendulum", episode_length=100, batch_size=ENVS)
    statistics = running_statistics.init_state(jax.ShapeDtypeStruct((env.observation_size,), float))
    policy = networks.make_inference_fn(ppo)((statistics, params.policy, params.value))
    state = jax.jit(env.reset)(jax.random.key(1))
    unroll = functools.partial(generate_unroll, env, unroll_length=UNROLL)
    unroll = functools.partial(unroll, extra_fields=("truncation",))
    _, data = jax.jit(lambda state, key: unroll(state, policy, key))(state, jax.random.key(2))
    data = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data)
    statistics = running_statistics.update(statistics, data.observation)
    return running_statistics.NestedMeanStd(statistics.mean, statistics.std), data


def problem() -> Problem:
    """Return the loss on minibatches of the same trajectories, as in one epoch of PPO."""
    ppo = networks.make_ppo_networks(
        4,
        1,
        preprocess_observations_fn=running_statistics.normalize,
        value_hidden_layer_sizes=(32,) * 4,
    )
    keys = jax.random.split(jax.random.key(0))
    params = losses.PPONetworkParams(
        policy=ppo.policy_network.init(keys[0]), value=ppo.value_network.init(keys[1])
    )
    statistics, data = jax.device_get(unroll(ppo, params))

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        loss, _ = losses.compute_ppo_loss(params, *batch, key, ppo, entropy_cost=1e-2)
        return loss

    def batches(steps: int):
        rng = np.random.default_rng(0)
        for _ in range(steps):
            chosen = rng.permutation(ENVS)[:32]
            yield statistics, jax.tree.map(lambda x, chosen=chosen: x[chosen], data)

    return Problem(loss_fn, params, batches, optax.adam(3e-4))
