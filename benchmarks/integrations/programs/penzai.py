"""A small Llama of penzai learns the next token.

Penzai's named arrays are leaves of the parameters, its variables are bound inside the loss, as in
its `basic_training`.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

from benchmarks.integrations.programs.training import Problem

VOCABULARY, LENGTH = 64, 24
CONFIG = llamalike_common.LlamalikeTransformerConfig(
    num_kv_heads=2,
    query_head_multiplier=2,
    embedding_dim=32,
    projection_dim=8,
    mlp_hidden_dim=64,
    num_decoder_blocks=2,
    vocab_size=VOCABULARY,
    mlp_variant="swiglu",
    tie_embedder_and_logits=False,
)


def problem() -> Problem:
    model = llamalike_common.build_llamalike_transformer(CONFIG, jax.random.key(0))
    unbound, variables = pz.unbind_params(model)

    def loss_fn(params, batch, key):
        bound = pz.bind_variables(unbound, [v.unfreeze_as_copy() for v in params])
        inputs = pz.nx.wrap(batch["tokens"][:, :-1]).tag("batch", "seq")
        logits = bound(inputs, token_positions=pz.nx.wrap(jnp.arange(LENGTH)).tag("seq"))
        logits = logits.unwrap("batch", "seq", "vocabulary").astype(jnp.float32)
        targets = batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        following = rng.permutation(VOCABULARY)
        for _ in range(steps):
            tokens = rng.integers(VOCABULARY, size=(8, LENGTH + 1))
            for i in range(1, LENGTH + 1):
                known = rng.random(8) < 0.9
                tokens[:, i] = np.where(known, following[tokens[:, i - 1]], tokens[:, i])
            yield {"tokens": tokens.astype(np.int32)}

    return Problem(loss_fn, pz.freeze_params(variables), batches, optax.adamw(3e-3))
