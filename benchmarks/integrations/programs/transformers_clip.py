"""A tiny CLIP of transformers' Flax models learns which digit is described by which tokens."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from transformers import CLIPConfig, FlaxCLIPModel

from benchmarks.integrations.programs.training import Problem

LAYERS = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
CONFIG = CLIPConfig(
    text_config=dict(vocab_size=32, max_position_embeddings=8, eos_token_id=31, **LAYERS),
    vision_config=dict(image_size=8, patch_size=2, num_channels=3, **LAYERS),
    projection_dim=16,
)


def problem() -> Problem:
    model = FlaxCLIPModel(CONFIG, input_shape=((1, 6), (1, 8, 8, 3)), seed=0)
    images, labels = load_digits(return_X_y=True)
    images = np.repeat(np.float32(images / 16).reshape(-1, 8, 8, 1), 3, axis=-1)

    def loss_fn(params, batch, key):
        module = model.module.clone(dtype=params["text_projection"]["kernel"].dtype)
        logits = module.apply({"params": params}, **batch).logits_per_text.astype(jnp.float32)
        targets = jnp.arange(len(logits))
        text, image = (
            optax.softmax_cross_entropy_with_integer_labels(x, targets).mean()
            for x in (logits, logits.T)
        )
        return (text + image) / 2

    def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        for _ in range(steps):
            chosen = rng.integers(len(labels), size=16)
            tokens = np.stack([labels[chosen] + i for i in range(5)] + [np.full(16, 31)], axis=1)
            yield {
                "input_ids": tokens,
                "pixel_values": images[chosen],
                "attention_mask": np.ones_like(tokens),
                "position_ids": np.broadcast_to(np.arange(6), tokens.shape),
            }

    # CLIP's initial kernels of 0.01 are for large widths: here all images would look alike.
    params = jax.tree.map(lambda x: 10 * x if x.ndim == 2 else x, model.params)
    return Problem(loss_fn, params, batches, optax.adamw(1e-3), r"k_proj.*bias")
