"""A tiny ViT of transformers' Flax models, with dropout, learns the digits of scikit-learn."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from transformers import FlaxViTForImageClassification, ViTConfig

from benchmarks.integrations.programs.training import Problem

CONFIG = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_labels=10,
    hidden_dropout_prob=0.1,
    initializer_range=0.3,
)


def problem() -> Problem:
    model = FlaxViTForImageClassification(CONFIG, input_shape=(1, 8, 8, 1), seed=0)
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16).reshape(-1, 8, 8, 1)

    def loss_fn(params, batch, key):
        images, labels = batch
        module = model.module.clone(dtype=params["classifier"]["kernel"].dtype)
        logits = module.apply(
            {"params": params}, images, deterministic=False, rngs={"dropout": key}
        ).logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(0)
        for _ in range(steps):
            chosen = rng.integers(len(labels), size=64)
            yield images[chosen], labels[chosen]

    return Problem(loss_fn, model.params, batches, optax.adamw(1e-3), r"key.*bias")
