"""An Equinox MLP, trained with AdamW.

    python -m examples.digits_equinox

The model and `loss_fn` know nothing of scales. `make` has all that another precision takes:
`low_precision` around AdamW, `fp8_matmuls` around the loss, `as_scaled_array` on model and
optimizer state, `scalify` around the step.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jax_scalify as jsa
from examples import common

WIDTH = 128
LEARNING_RATE = 2e-3


def make_model(seed):
    """Return an MLP of three hidden layers that maps 64 pixels to 10 logits."""
    return eqx.nn.MLP(64, 10, WIDTH, depth=3, key=jax.random.key(seed))


def loss_fn(model, images, labels):
    """Return the mean cross-entropy, and the accuracy."""
    images = images.reshape(len(images), -1).astype(model.layers[0].weight.dtype)
    logits = jax.vmap(model)(images).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, jnp.mean(jnp.argmax(logits, axis=-1) == labels)


def make(precision, seed, steps):
    """Return state, training step and evaluation, all of them in a precision."""
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    optimizer, loss = optax.adamw(schedule), loss_fn
    if precision != "float32":
        optimizer = jsa.optim.low_precision(optimizer)  # its state in float16
    if precision == "fp8":
        loss = jsa.fp8_matmuls(loss_fn, jsa.fp8.min_size(16))  # all but the last layer

    # What a jitted step returns must be arrays: the activation function stays outside.
    params, static = eqx.partition(make_model(seed), eqx.is_array)
    state = params, jax.jit(optimizer.init)(params)

    def update(state, images, labels):
        params, opt_state = state
        model = eqx.combine(params, static)
        grad_fn = eqx.filter_value_and_grad(loss, has_aux=True)
        (value, _), grads = grad_fn(model, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        # Adds, and rounds once to the weights' dtype: at random, so that small updates count too.
        return (jsa.optim.apply_updates(params, updates), opt_state), value

    def evaluate(state, images, labels):
        return loss(eqx.combine(state[0], static), images, labels)

    if precision != "float32":
        state = jsa.as_scaled_array(state, scale="rms", dtype=jnp.float16)
        update, evaluate = jsa.scalify(update), jsa.scalify(evaluate)
    return state, jax.jit(update, donate_argnums=0), jax.jit(evaluate)


def main(arguments=None):
    """Run the example."""
    title = "Digits with an MLP in Equinox"
    return common.main("digits_equinox", title, make, common.Digits, steps=200, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
