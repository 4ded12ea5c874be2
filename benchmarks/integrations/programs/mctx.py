"""An AlphaZero-like step: the policy's targets come from a Gumbel MuZero search."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import mctx
import numpy as np
import optax

from benchmarks.integrations.programs.training import Problem, PyTree

ACTIONS, FEATURES = 4, 16


class Network(nn.Module):
    """A representation that a step of the model changes, with a policy, a value and a reward."""

    def setup(self) -> None:
        self.encoder, self.dynamics = nn.Dense(64), nn.Dense(64)
        self.policy_head, self.value_head = nn.Dense(ACTIONS), nn.Dense(1)

    def __call__(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, value = self.policy_head(hidden), jnp.tanh(self.value_head(hidden))[..., 0]
        return logits.astype(jnp.float32), value.astype(jnp.float32)  # the search is in float32

    def encode(self, observations: jax.Array) -> jax.Array:
        return jnp.tanh(self.encoder(observations))

    def move(self, hidden: jax.Array, action: jax.Array) -> jax.Array:
        actions = jax.nn.one_hot(action, ACTIONS, dtype=hidden.dtype)
        return jnp.tanh(hidden + self.dynamics(jnp.concatenate([hidden, actions], -1)))

    def everything(self, observations: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self(self.move(self.encode(observations), jnp.zeros(len(observations), int)))


def problem() -> Problem:
    """Return the loss of a search of 8 simulations."""
    net = Network()

    def recurrent_fn(params: PyTree, key: jax.Array, action: jax.Array, hidden: jax.Array):
        hidden = net.apply(params, hidden, action, method="move")
        logits, value = net.apply(params, hidden)
        step = mctx.RecurrentFnOutput(
            reward=0.1 * hidden[:, 0].astype(jnp.float32),
            discount=jnp.full_like(value, 0.9),
            prior_logits=logits,
            value=value,
        )
        return step, hidden

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        observations, returns = batch
        hidden = net.apply(params, observations, method="encode")
        logits, value = net.apply(params, hidden)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=hidden)
        search = mctx.gumbel_muzero_policy(
            params, key, jax.lax.stop_gradient(root), recurrent_fn, num_simulations=8
        )
        targets = jax.lax.stop_gradient(search.action_weights)
        policy = optax.softmax_cross_entropy(logits, targets)
        return jnp.mean(policy + optax.l2_loss(value, returns))

    def batches(steps: int):
        rng = np.random.default_rng(0)
        for _ in range(steps):
            observations = np.float32(rng.normal(size=(64, FEATURES)))
            yield observations, np.tanh(observations[:, 0])

    params = net.init(jax.random.key(0), jnp.zeros((1, FEATURES)), method="everything")
    return Problem(loss_fn, params, batches)
