"""A tiny Whisper of transformers' Flax models learns which sequence of tones it hears."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import optax
from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

from benchmarks.integrations.programs.training import Problem

MELS, FRAMES, LENGTH = 16, 40, 8
CONFIG = WhisperConfig(
    vocab_size=MELS + 1,
    num_mel_bins=MELS,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_source_positions=FRAMES // 2,
    max_target_positions=16,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
    decoder_start_token_id=0,
    begin_suppress_tokens=None,
    dropout=0.1,
)


def problem() -> Problem:
    model = FlaxWhisperForConditionalGeneration(CONFIG, input_shape=(1, MELS, FRAMES), seed=0)

    def loss_fn(params, batch, key):
        features, tokens = batch
        dtype = params["model"]["decoder"]["layer_norm"]["scale"].dtype
        logits = (
            model.module.clone(dtype=dtype)
            .apply(
                {"params": params},
                input_features=features,
                decoder_input_ids=tokens[:, :-1],
                decoder_attention_mask=jnp.ones_like(tokens[:, :-1]),
                decoder_position_ids=jnp.broadcast_to(jnp.arange(LENGTH), tokens[:, :-1].shape),
                deterministic=False,
                rngs={"dropout": key},
            )
            .logits.astype(jnp.float32)
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(0)
        for _ in range(steps):
            tokens = rng.integers(1, MELS + 1, size=(16, LENGTH + 1))
            tokens[:, 0] = 0
            loud = np.repeat(np.eye(MELS)[tokens[:, 1:] - 1], FRAMES // LENGTH, axis=1)
            features = np.swapaxes(loud, 1, 2) + 0.1 * rng.normal(size=(16, MELS, FRAMES))
            yield np.float32(features), tokens

    return Problem(loss_fn, model.params, batches, optax.adamw(3e-3))
