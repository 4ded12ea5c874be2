"""A tiny Mistral of transformers' Flax models learns the next token."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import optax
from transformers import FlaxMistralForCausalLM, MistralConfig

from benchmarks.integrations.programs.training import Problem

VOCABULARY, LENGTH = 64, 24
CONFIG = MistralConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    sliding_window=8,
)


def problem() -> Problem:
    model = FlaxMistralForCausalLM(CONFIG, seed=0)

    def loss_fn(params, batch, key):
        module = model.module.clone(dtype=params["lm_head"]["kernel"].dtype)
        inputs = batch["tokens"][:, :-1]
        mask, positions = jnp.ones_like(inputs), jnp.broadcast_to(jnp.arange(LENGTH), inputs.shape)
        logits = module.apply({"params": params}, inputs, mask, positions).logits
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["tokens"][:, 1:]
        ).mean()

    def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        following = rng.permutation(VOCABULARY)
        for _ in range(steps):
            tokens = rng.integers(VOCABULARY, size=(8, LENGTH + 1))
            for i in range(1, LENGTH + 1):
                known = rng.random(8) < 0.9
                tokens[:, i] = np.where(known, following[tokens[:, i - 1]], tokens[:, i])
            yield {"tokens": tokens.astype(np.int32)}

    return Problem(loss_fn, model.params, batches, optax.adamw(3e-3))
