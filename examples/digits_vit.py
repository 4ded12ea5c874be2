"""A vision transformer in Flax NNX, trained with AdamW.

    python -m examples.digits_vit

The model and `loss_fn` know nothing of scales: their layers are those of `flax.nnx`. `make` has all
that another precision takes: `low_precision` around AdamW, `fp8_matmuls` around the loss,
`as_scaled_array` on weights and optimizer state, `scalify` around the step.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_scalify as jsa
from examples import common

PATCH = 2
TOKENS = (8 // PATCH) ** 2
WIDTH, LAYERS, HEADS = 64, 2, 4
LEARNING_RATE = 2e-3


class Attention(nnx.Module):
    """Self-attention, `(batch, tokens, width)` to the same shape."""

    def __init__(self, rngs):
        # Not nnx.MultiHeadAttention: under `jit`, JAX's attention has no float16 on CPUs.
        self.query, self.key, self.value, self.out = (
            nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x):
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (f(x).reshape(heads) for f in (self.query, self.key, self.value))
        scores = jnp.einsum("bthc,bshc->bhts", query, key) * (HEADS / WIDTH) ** 0.5
        mixed = jnp.einsum("bhts,bshc->bthc", nnx.softmax(scores), value)
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a LayerNorm and added to its input."""

    def __init__(self, rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = Attention(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class ViT(nnx.Module):
    """Map images `(batch, 8, 8)` to logits `(batch, 10)`."""

    def __init__(self, rngs):
        self.patches = nnx.Conv(1, WIDTH, (PATCH, PATCH), strides=PATCH, rngs=rngs)
        self.positions = nnx.Param(0.5 * jax.random.normal(rngs.params(), (TOKENS, WIDTH)))
        self.blocks = nnx.List(Block(rngs) for _ in range(LAYERS))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images[..., None]).reshape(len(images), TOKENS, WIDTH)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def loss_fn(model, images, labels):
    """Return the mean cross-entropy, and the accuracy."""
    logits = model(images.astype(model.head.bias.dtype)).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, jnp.mean(jnp.argmax(logits, axis=-1) == labels)


def make(precision, seed, steps):
    """Return state, training step and evaluation, all of them in a precision."""
    graph, params = nnx.split(ViT(nnx.Rngs(seed)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 10, steps)
    optimizer = optax.adamw(schedule, eps=1e-6)

    def loss(params, images, labels):
        return loss_fn(nnx.merge(graph, params), images, labels)

    if precision != "float32":
        optimizer = jsa.optim.low_precision(optimizer)  # its state in float16
    if precision == "fp8":
        # Every matmul with a weight but the head: queries, keys, values, out, up and down.
        loss = jsa.fp8_matmuls(loss)

    def update(state, images, labels):
        params, opt_state = state
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        # Adds, and rounds once to the weights' dtype: at random, so that small updates count too.
        return (jsa.optim.apply_updates(params, updates), opt_state), value

    def evaluate(state, images, labels):
        return loss(state[0], images, labels)

    state = params, jax.jit(optimizer.init)(params)
    if precision != "float32":
        state = jsa.as_scaled_array(state, scale="rms", dtype=jnp.float16)
        update, evaluate = jsa.scalify(update), jsa.scalify(evaluate)
    return state, jax.jit(update, donate_argnums=0), jax.jit(evaluate)


def main(arguments=None):
    """Run the example."""
    data = functools.partial(common.Digits, batch_size=64)
    title = "Digits with a vision transformer in Flax NNX"
    return common.main("digits_vit", title, make, data, steps=300, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
