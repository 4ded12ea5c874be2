"""An IMPALA-like agent: V-trace targets, policy gradient and entropy of RLax."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax

from benchmarks.integrations.programs.training import Problem, PyTree

ACTIONS, FEATURES, LENGTH = 4, 16, 12


def network(observations: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the policy's logits and the values."""
    hidden = hk.nets.MLP([64, 64], activate_final=True)(observations)
    return hk.Linear(ACTIONS, name="policy_head")(hidden), hk.Linear(1, name="value_head")(hidden)[
        ..., 0
    ]


def problem() -> Problem:
    """Return the actor-critic loss of a behaviour policy that acts at random."""
    net = hk.without_apply_rng(hk.transform(network))

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        observations, actions, rewards, discounts, behaviour = batch
        logits, values = net.apply(params, observations)
        logits, values = logits.astype(jnp.float32), values.astype(jnp.float32)
        rhos = jax.vmap(rlax.categorical_importance_sampling_ratios)(
            logits[:, :-1], behaviour, actions
        )
        vtrace = jax.vmap(rlax.vtrace_td_error_and_advantage, in_axes=(0, 0, 0, 0, 0, None))
        found = vtrace(values[:, :-1], values[:, 1:], rewards, discounts, rhos, 0.9)
        weights = jnp.ones_like(found.errors[0])
        policy = jax.vmap(rlax.policy_gradient_loss, in_axes=(0, 0, 0, None))(
            logits[:, :-1], actions, found.pg_advantage, weights
        )
        entropy = jax.vmap(rlax.entropy_loss, in_axes=(0, None))(logits[:, :-1], weights)
        return jnp.mean(0.5 * jnp.sum(found.errors**2, 1) + policy + 0.01 * entropy)

    def batches(steps: int):
        rng = np.random.default_rng(0)
        best = rng.normal(size=(FEATURES, ACTIONS))
        for _ in range(steps):
            observations = np.float32(rng.normal(size=(32, LENGTH + 1, FEATURES)))
            actions = rng.integers(ACTIONS, size=(32, LENGTH))
            rewards = np.float32(1 + (np.argmax(observations[:, :-1] @ best, -1) == actions))
            discounts = np.float32(0.9 * (rng.uniform(size=(32, LENGTH)) > 0.05))
            yield observations, actions, rewards, discounts, np.zeros((32, LENGTH, 4), np.float32)

    params = net.init(jax.random.key(0), jnp.zeros((1, LENGTH + 1, FEATURES)))
    return Problem(loss_fn, params, batches, optax.rmsprop(1e-3, decay=0.99, eps=1e-3))
