"""A GPT and a ResNet of Flax at sizes that a GPU is for, as training steps take them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen

from benchmarks.accuracy.scale_models import PLAIN, Block, ConvBlock
from benchmarks.cost.gpu_fp8 import TransformerLayer
from benchmarks.cost.training import Model

PyTree = Any


@dataclasses.dataclass(frozen=True)
class GptSizes:
    """Of the model and of one device's part of a batch."""

    layers: int = 4
    width: int = 1024
    vocabulary: int = 8192
    sequences: int = 2
    tokens: int = 1024


@dataclasses.dataclass(frozen=True)
class ResNetSizes:
    """Of the model, two blocks a stage, and of one device's part of a batch."""

    widths: tuple[int, ...] = (64, 128, 256, 512)
    classes: int = 1000
    images: int = 32
    pixels: int = 224


class Gpt(Block):
    """Tokens `(batch, time)` to logits; layers are not scanned, the embedding is used twice."""

    sizes: GptSizes
    remat: Callable[[Any], Any] = lambda layer: layer

    @linen.compact
    def __call__(self, tokens):
        sizes = self.sizes
        embed = self.make("Embed", sizes.vocabulary, sizes.width, name="tokens")
        positions = self.make("Embed", sizes.tokens, sizes.width, name="positions")
        x = embed(tokens) + positions(jnp.arange(sizes.tokens))
        for i in range(sizes.layers):
            x = self.remat(TransformerLayer)(self.layers, self.dtype, name=f"layer_{i}")(x)
        return embed.attend(self.make("LayerNorm", name="norm")(x))


class ResNet(Block):
    """Images `(batch, height, width, 3)` to logits: ResNet-18, with the statistics of the batch."""

    sizes: ResNetSizes

    @linen.compact
    def __call__(self, images):
        sizes = self.sizes
        conv = self.make("Conv", sizes.widths[0], (7, 7), strides=(2, 2), use_bias=False)
        x = self.make("BatchNorm", use_running_average=False)(conv(images))
        x = linen.max_pool(self.layers.relu(x), (3, 3), strides=(2, 2), padding="SAME")
        for i, width in enumerate(sizes.widths):
            for j in range(2):
                stride = 2 if i and not j else 1
                x = ConvBlock(self.layers, self.dtype, width, stride, name=f"block_{i}_{j}")(x)
        return self.make("Dense", sizes.classes, name="head")(x.mean(axis=(1, 2)))


def make_gpt(
    sizes: GptSizes, devices: int = 1, remat: Callable[[Any], Any] = lambda layer: layer
) -> Model:
    """The GPT that a training step takes; a batch is `(sequences, tokens + 1)`.

    `remat` goes around the class of a layer, as `linen.remat` does.
    """
    batch = jax.ShapeDtypeStruct((sizes.sequences * devices, sizes.tokens + 1), jnp.int32)

    def init(key: jax.Array) -> tuple[PyTree, PyTree]:
        tokens = jnp.zeros((1, sizes.tokens), jnp.int32)
        return Gpt(PLAIN, jnp.float32, sizes, remat).init(key, tokens)["params"], ()

    def loss(params: PyTree, other: PyTree, tokens: jax.Array, dtype: Any) -> Any:
        logits: Any = Gpt(PLAIN, dtype, sizes, remat).apply({"params": params}, tokens[:, :-1])
        return _cross_entropy(logits, tokens[:, 1:]), other

    return Model(init, loss, batch)


def make_resnet(sizes: ResNetSizes, devices: int = 1) -> Model:
    """The ResNet that a training step takes; a batch is images in float32 and labels."""
    count, shape = sizes.images * devices, (sizes.pixels, sizes.pixels, 3)
    images = jax.ShapeDtypeStruct((count, *shape), jnp.float32)
    labels = jax.ShapeDtypeStruct((count,), jnp.int32)

    def init(key: jax.Array) -> tuple[PyTree, PyTree]:
        state = ResNet(PLAIN, jnp.float32, sizes).init(key, jnp.zeros((1, *shape)))
        return state["params"], state["batch_stats"]

    def loss(params: PyTree, other: PyTree, batch: PyTree, dtype: Any) -> Any:
        images, labels = batch
        state = {"params": params, "batch_stats": other}
        model = ResNet(PLAIN, dtype, sizes)
        logits, new = model.apply(state, images.astype(dtype), mutable=["batch_stats"])
        return _cross_entropy(logits, labels), new["batch_stats"]

    return Model(init, loss, (images, labels))


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(losses)
