"""An MLP from scratch, in plain JAX, with an SGD of its own.

    python -m examples.digits_mlp

`init`, `mlp` and `loss_fn` know nothing of scales. `make` has all that another precision takes:
`fp8_matmuls` around the loss, `as_scaled_array` on the weights, `scalify` around the step.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import jax_scalify as jsa
from examples import common

SIZES = (64, 256, 256, 10)
LEARNING_RATE = 0.1


def init(seed):
    """Return weights and biases, in float32."""
    params = []
    keys = jax.random.split(jax.random.key(seed), len(SIZES) - 1)
    for key, rows, columns in zip(keys, SIZES[:-1], SIZES[1:]):
        weight = jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5
        params.append({"weight": weight, "bias": jnp.zeros(columns)})
    return params


def mlp(params, images):
    """Map images `(batch, 8, 8)` to logits `(batch, 10)`."""
    x = images.reshape(len(images), -1)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ params[-1]["weight"] + params[-1]["bias"]


def loss_fn(params, images, labels):
    """Return the mean cross-entropy, and the accuracy."""
    logits = mlp(params, images.astype(params[0]["weight"].dtype)).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, jnp.mean(jnp.argmax(logits, axis=-1) == labels)


def make(precision, seed, steps):
    """Return weights, training step and evaluation, all of them in a precision."""
    params, loss = init(seed), loss_fn
    if precision == "fp8":
        # Every matmul but that of the last layer, forward and backward.
        loss = jsa.fp8_matmuls(loss_fn, jsa.fp8.min_size(16))

    def update(params, images, labels):
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, images, labels)
        updates = jax.tree.map(lambda g: -LEARNING_RATE * g, grads)
        # Adds, and rounds once to the weights' dtype: at random, so that small updates count too.
        return jsa.optim.apply_updates(params, updates), value

    evaluate = loss
    if precision != "float32":
        params = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
        update, evaluate = jsa.scalify(update), jsa.scalify(evaluate)
    return params, jax.jit(update, donate_argnums=0), jax.jit(evaluate)


def main(arguments=None):
    """Run the example."""
    title = "Digits with an MLP in plain JAX"
    return common.main("digits_mlp", title, make, common.Digits, steps=500, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
