"""A small vision transformer of equimo, with DropPath, learns the digits of scikit-learn."""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equimo.vision.models.vit import VisionTransformer
from sklearn.datasets import load_digits

from benchmarks.integrations.programs.training import Problem


def problem() -> Problem:
    model = VisionTransformer(
        img_size=8,
        in_channels=1,
        dim=32,
        patch_size=2,
        num_heads=2,
        depths=[2],
        reg_tokens=1,
        drop_path_rate=0.1,
        num_classes=10,
        key=jax.random.key(0),
    )
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16).reshape(-1, 1, 8, 8)

    def loss_fn(params, batch, key):
        images, labels = batch
        model = eqx.combine(params, rest)
        keys = jax.random.split(key, len(images))
        logits = jax.vmap(lambda x, k: model(x, key=k))(images, keys).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(0)
        for _ in range(steps):
            chosen = rng.integers(len(labels), size=64)
            yield images[chosen], labels[chosen]

    return Problem(loss_fn, params, batches, optax.adamw(3e-3), r"qkv\.bias")  # the keys' third
