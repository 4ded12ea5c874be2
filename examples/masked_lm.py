"""A masked language model in Flax linen, a small BERT, on the help texts that come with Python.

    python -m examples.masked_lm

Its tokens are bytes. The model and `loss_fn` know nothing of scales: their layers are those of
`flax.linen`. `make` has all that another precision takes: `low_precision` around AdamW,
`fp8_matmuls` around the loss, `as_scaled_array` on weights and optimizer state, `scalify` around
the step.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jax_scalify as jsa
from examples import common
from examples.gpt.data import held_out_batches, load_corpus, train_batch

WIDTH, LAYERS, HEADS = 64, 2, 4
CONTEXT, BATCH, HELD_OUT = 64, 32, 128  # HELD_OUT: sequences
MASK, VOCABULARY = 256, 257  # bytes, and the token that stands for a hidden one
SELECTED = 0.15
LEARNING_RATE = 4e-3


class Text:
    """Sequences of bytes, of which 15% are to be told: BERT's task.

    Attributes:
        held_out: what `batch` returns, for sequences that are never trained on.
    """

    def __init__(self):
        self._corpus = load_corpus(None, context=CONTEXT)
        sizes = dict(batches=1, batch=HELD_OUT, context=CONTEXT)
        (tokens,) = held_out_batches(self._corpus, **sizes)
        self.held_out = hide(tokens[:, :-1], np.random.default_rng(0))

    def batch(self, seed, step):
        """Return tokens, the bytes that they were and which are to be told: `(batch, time)`."""
        tokens = train_batch(self._corpus, seed=seed, step=step, batch=BATCH, context=CONTEXT)
        return hide(tokens[:, :-1], np.random.default_rng((seed, step, 1)))


def hide(tokens, rng):
    """Of the selected bytes hide 80% behind MASK, replace 10% and leave 10% as they are."""
    selected = rng.random(tokens.shape) < SELECTED
    kind = rng.random(tokens.shape)
    shown = np.where(selected & (kind < 0.8), MASK, tokens)
    replaced = selected & (0.8 <= kind) & (kind < 0.9)
    shown = np.where(replaced, rng.integers(0, 256, tokens.shape), shown)
    return shown.astype(np.int32), tokens, selected


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input and then normalised."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(x))
        hidden = nn.gelu(nn.Dense(4 * WIDTH, name="up")(x))
        return nn.LayerNorm()(x + nn.Dense(WIDTH, name="down")(hidden))


class Bert(nn.Module):
    """Map tokens `(batch, time)` to logits `(batch, time, 257)`."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, name="tokens")(tokens)
        x = x + nn.Embed(CONTEXT, WIDTH, name="positions")(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm()(x)
        for i in range(LAYERS):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(VOCABULARY, name="head")(x)


def loss_fn(params, tokens, targets, selected):
    """Return cross-entropy and accuracy, both of them the mean over the selected bytes."""
    logits = Bert().apply({"params": params}, tokens).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = jnp.argmax(logits, axis=-1) == targets
    return jnp.mean(losses, where=selected), jnp.mean(right, where=selected)


def make(precision, seed, steps):
    """Return state, training step and evaluation, all of them in a precision."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 10, steps)
    optimizer, loss = optax.adamw(schedule, b2=0.98, eps=1e-6), loss_fn
    if precision != "float32":
        optimizer = jsa.optim.low_precision(optimizer)  # its state in float16
    if precision == "fp8":
        # Every matmul with a weight but the head: queries, keys, values, out, up and down.
        loss = jsa.fp8_matmuls(loss_fn)

    def update(state, *batch):
        params, opt_state = state
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        # Adds, and rounds once to the weights' dtype: at random, so that small updates count too.
        return (jsa.optim.apply_updates(params, updates), opt_state), value

    def evaluate(state, *batch):
        return loss(state[0], *batch)

    params = jax.jit(Bert().init)(jax.random.key(seed), jnp.zeros((1, CONTEXT), int))["params"]
    state = params, jax.jit(optimizer.init)(params)
    if precision != "float32":
        state = jsa.as_scaled_array(state, scale="rms", dtype=jnp.float16)
        update, evaluate = jsa.scalify(update), jsa.scalify(evaluate)
    return state, jax.jit(update, donate_argnums=0), jax.jit(evaluate)


def main(arguments=None):
    """Run the example."""
    title = "Masked language model (BERT-like) in Flax linen"
    return common.main("masked_lm", title, make, Text, steps=400, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
