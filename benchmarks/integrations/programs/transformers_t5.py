"""A tiny T5 of transformers' Flax models, with dropout, learns to repeat its input."""

from collections.abc import Iterator
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
from transformers import FlaxT5ForConditionalGeneration, T5Config
from transformers.models.t5 import modeling_flax_t5

from benchmarks.integrations.programs.training import Problem

# transformers 4.57 calls `jnp.clip(x, a_max=...)`, which JAX has renamed.
modeling_flax_t5.jnp = SimpleNamespace(
    **vars(jnp) | {"clip": lambda x, a_min=None, a_max=None: jnp.clip(x, a_min, a_max)}
)

CONFIG = T5Config(
    vocab_size=64,
    d_model=32,
    d_kv=16,
    d_ff=64,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
)


def problem() -> Problem:
    model = FlaxT5ForConditionalGeneration(CONFIG, seed=0)

    def loss_fn(params, batch, key):
        # Flax's modules compute in their `dtype`: here in that of the weights.
        module = model.module.clone(dtype=params["lm_head"]["kernel"].dtype)
        logits = module.apply(
            {"params": params},
            **batch["inputs"],
            deterministic=False,
            rngs={"dropout": key},
        ).logits.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        mask = batch["inputs"]["decoder_attention_mask"]
        return jnp.sum(losses * mask) / jnp.sum(mask)

    def batches(steps: int) -> Iterator[dict]:
        rng = np.random.default_rng(0)
        for _ in range(steps):
            labels = rng.zipf(1.5, size=(8, 12)) % 62 + 1
            mask = np.int32(np.arange(12) < rng.integers(6, 13, size=(8, 1)))
            inputs = {
                "input_ids": labels * mask,
                "attention_mask": mask,
                "decoder_input_ids": np.pad(labels[:, :-1], ((0, 0), (1, 0))),
                "decoder_attention_mask": mask,
            }
            yield {"inputs": inputs, "labels": labels}

    return Problem(loss_fn, model.params, batches, optax.adamw(3e-3))
