"""A convolutional network in Flax linen, trained as Flax's own examples are: with a `TrainState`.

    python -m examples.digits_cnn

`CNN` and `loss_fn` know nothing of scales. `make` has all that another precision takes:
`low_precision` around AdamW, `fp8_matmuls` around the loss, `as_scaled_array` on the `TrainState`,
`scalify` around the step. `fp8_matmuls` is for matmuls: the convolutions stay in float16.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import jax_scalify as jsa
from examples import common

LEARNING_RATE = 2e-3


class CNN(nn.Module):
    """Map images `(batch, 8, 8)` to logits `(batch, 10)`."""

    @nn.compact
    def __call__(self, images):
        x = images[..., None]
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(len(x), -1)  # (batch, 512)
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10, name="head")(x)


def loss_fn(params, images, labels):
    """Return the mean cross-entropy, and the accuracy."""
    dtype = params["head"]["bias"].dtype
    logits = CNN().apply({"params": params}, images.astype(dtype)).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, jnp.mean(jnp.argmax(logits, axis=-1) == labels)


def make(precision, seed, steps):
    """Return state, training step and evaluation, all of them in a precision."""
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    optimizer, loss = optax.adamw(schedule), loss_fn
    if precision != "float32":
        # Its state in float16; `apply_gradients` adds updates that are rounded already.
        optimizer = jsa.optim.low_precision(optimizer, round_updates=True)
    if precision == "fp8":
        loss = jsa.fp8_matmuls(loss_fn, jsa.fp8.skip_head)

    params = jax.jit(CNN().init)(jax.random.key(seed), jnp.zeros((1, 8, 8)))["params"]
    state = TrainState.create(apply_fn=CNN().apply, params=params, tx=optimizer)

    def update(state, images, labels):
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(state.params, images, labels)
        return state.apply_gradients(grads=grads), value

    def evaluate(state, images, labels):
        return loss(state.params, images, labels)

    if precision != "float32":
        state = jsa.as_scaled_array(state, scale="rms", dtype=jnp.float16)
        update, evaluate = jsa.scalify(update), jsa.scalify(evaluate)
    return state, jax.jit(update, donate_argnums=0), jax.jit(evaluate)


def main(arguments=None):
    """Run the example."""
    title = "Digits with a convolutional network in Flax linen"
    return common.main("digits_cnn", title, make, common.Digits, steps=200, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
