"""Eight small models of different kinds, with nothing about scales in them.

Their building blocks come in through `layers`, so that other implementations of the same functions
can be put in: `PLAIN` has those of Flax, JAX and optax. Text is bytes of the documentation that
comes with Python, images are scikit-learn's digits.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from examples.gpt.data import load_corpus, train_batch

PyTree = Any

WIDTH, HEADS, CONTEXT, VOCABULARY, TEXT_BATCH = 64, 4, 64, 256, 8
PADDING, MASK = 0, 1  # bytes that no English text has
LSTM_CONTEXT = 32  # unrolled: every step is in the program
IMAGE_WIDTH, PATCH, CLASSES, IMAGE_BATCH = 32, 2, 10, 32


def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False):
    """Attend as `jax.nn.dot_product_attention` does: einsum, mask, softmax, einsum.

    Args:
        query: `(batch, time, heads, channels)`.
        key: `(batch, source, groups, channels)`, where `groups` divides `heads`.
        value: like `key`.
        bias: added to the scores, broadcast to `(batch, heads, time, source)`.
        mask: false where a position must not be seen, broadcast likewise.
        scale: factor of the scores, by default `1 / sqrt(channels)`.
        is_causal: whether a position sees only itself and those before it.
    """
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = causal if mask is None else jnp.logical_and(mask, causal)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """What the models are made of.

    The first six are called with the arguments of the Flax modules, `dtype` and `param_dtype`
    among them, and return a module.
    """

    Dense: Callable[..., Any] = linen.Dense
    Embed: Callable[..., Any] = linen.Embed
    Conv: Callable[..., Any] = linen.Conv
    LayerNorm: Callable[..., Any] = linen.LayerNorm
    RMSNorm: Callable[..., Any] = linen.RMSNorm
    BatchNorm: Callable[..., Any] = linen.BatchNorm
    gelu: Callable[..., jax.Array] = jax.nn.gelu
    silu: Callable[..., jax.Array] = jax.nn.silu
    relu: Callable[..., jax.Array] = jax.nn.relu
    dot_product_attention: Callable[..., jax.Array] = dot_product_attention
    softmax_cross_entropy: Callable[..., jax.Array] = (
        optax.softmax_cross_entropy_with_integer_labels
    )


PLAIN = Layers()


class Block(linen.Module):
    """A module with the two fields that all of the models' parts share."""

    layers: Layers
    dtype: Any

    def make(self, kind: str, *args, **kwargs):
        """Make a building block in the dtype of this module."""
        cls = getattr(self.layers, kind)
        return cls(*args, dtype=self.dtype, param_dtype=self.dtype, **kwargs)


# Transformers


class Attention(Block):
    """Self-attention, `(batch, time, width)` to the same shape."""

    heads: int = HEADS
    groups: int = HEADS
    use_bias: bool = True
    is_causal: bool = False
    rotary: bool = False

    @linen.compact
    def __call__(self, x, mask=None):
        channels = x.shape[-1] // self.heads

        def project(name, heads, use_bias):
            out = self.make("Dense", heads * channels, use_bias=use_bias, name=name)(x)
            return out.reshape(*x.shape[:2], heads, channels)

        query = project("query", self.heads, self.use_bias)
        # A bias of the keys moves all scores of a query alike: its gradient is only rounding.
        key = project("key", self.groups, False)
        value = project("value", self.groups, self.use_bias)
        if self.rotary:
            query, key = rotate(query), rotate(key)
        out = self.layers.dot_product_attention(
            query, key, value, mask=mask, is_causal=self.is_causal
        )
        return self.make("Dense", x.shape[-1], use_bias=self.use_bias, name="out")(
            out.reshape(x.shape)
        )


def rotate(x):
    """Turn pairs of channels by an angle that grows with the position (RoPE)."""
    _, time, _, channels = x.shape
    frequencies = 10000.0 ** (-np.arange(0, channels, 2) / channels)
    angles = (np.arange(time)[:, None] * frequencies)[:, None]  # (time, 1, channels / 2)
    cos, sin = (jnp.asarray(table, x.dtype) for table in (np.cos(angles), np.sin(angles)))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class FeedForward(Block):
    """Two linear layers with a GELU between them."""

    @linen.compact
    def __call__(self, x):
        hidden = self.make("Dense", 4 * x.shape[-1], name="up")(x)
        return self.make("Dense", x.shape[-1], name="down")(self.layers.gelu(hidden))


class GatedFeedForward(Block):
    """SwiGLU: one linear layer gates another."""

    @linen.compact
    def __call__(self, x):
        hidden = 8 * x.shape[-1] // 3
        gate = self.make("Dense", hidden, use_bias=False, name="gate")(x)
        up = self.make("Dense", hidden, use_bias=False, name="up")(x)
        down = self.make("Dense", x.shape[-1], use_bias=False, name="down")
        return down(self.layers.silu(gate) * up)


class PreNormBlock(Block):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    is_causal: bool = False
    llama: bool = False

    @linen.compact
    def __call__(self, x):
        norm = "RMSNorm" if self.llama else "LayerNorm"
        options = {"groups": HEADS // 2, "use_bias": False, "rotary": True} if self.llama else {}
        attention = Attention(
            self.layers, self.dtype, is_causal=self.is_causal, name="attention", **options
        )
        feed_forward = (GatedFeedForward if self.llama else FeedForward)(
            self.layers, self.dtype, name="feed_forward"
        )
        x = x + attention(self.make(norm, name="attention_norm")(x))
        return x + feed_forward(self.make(norm, name="feed_forward_norm")(x))


class PostNormBlock(Block):
    """Attention and feed-forward, each added to its input and then normalised, as in BERT."""

    @linen.compact
    def __call__(self, x, mask):
        attention = Attention(self.layers, self.dtype, name="attention")
        feed_forward = FeedForward(self.layers, self.dtype, name="feed_forward")
        x = self.make("LayerNorm", name="attention_norm")(x + attention(x, mask))
        return self.make("LayerNorm", name="feed_forward_norm")(x + feed_forward(x))


class LanguageModel(Block):
    """GPT, or Llama without learned positions: tokens `(batch, time)` to logits."""

    depth: int
    llama: bool = False
    width: int = WIDTH

    @linen.compact
    def __call__(self, tokens):
        x = self.make("Embed", VOCABULARY, self.width, name="tokens")(tokens)
        if not self.llama:
            positions = self.make("Embed", CONTEXT, self.width, name="positions")
            x = x + positions(jnp.arange(tokens.shape[1]))
        for i in range(self.depth):
            block = PreNormBlock(
                self.layers, self.dtype, is_causal=True, llama=self.llama, name=f"block_{i}"
            )
            x = block(x)
        x = self.make("RMSNorm" if self.llama else "LayerNorm", name="norm")(x)
        return self.make("Dense", VOCABULARY, use_bias=False, name="head")(x)


class Bert(Block):
    """Tokens `(batch, time)`, some masked and some padding, to logits."""

    depth: int

    @linen.compact
    def __call__(self, tokens):
        mask = (tokens != PADDING)[:, None, None]  # (batch, head, query, key)
        positions = self.make("Embed", CONTEXT, WIDTH, name="positions")
        x = self.make("Embed", VOCABULARY, WIDTH, name="tokens")(tokens)
        x = x + positions(jnp.arange(tokens.shape[1]))
        x = self.make("LayerNorm", name="norm")(x)
        for i in range(self.depth):
            x = PostNormBlock(self.layers, self.dtype, name=f"block_{i}")(x, mask)
        x = self.layers.gelu(self.make("Dense", WIDTH, name="transform")(x))
        x = self.make("LayerNorm", name="head_norm")(x)
        return self.make("Dense", VOCABULARY, name="head")(x)


class ViT(Block):
    """Images `(batch, height, width, 1)` as patches behind a class token, to logits."""

    depth: int

    @linen.compact
    def __call__(self, images):
        patch = (PATCH, PATCH)
        x = self.make("Conv", IMAGE_WIDTH, patch, strides=patch, padding="VALID", name="patches")(
            images
        )
        x = x.reshape(len(x), -1, IMAGE_WIDTH)
        init = linen.initializers.normal(0.02)
        token = self.param("class", init, (1, 1, IMAGE_WIDTH), self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, IMAGE_WIDTH)), x], axis=1)
        x = x + self.param("positions", init, (1, *x.shape[1:]), self.dtype)
        for i in range(self.depth):
            x = PreNormBlock(self.layers, self.dtype, name=f"block_{i}")(x)
        x = self.make("LayerNorm", name="norm")(x[:, 0])
        return self.make("Dense", CLASSES, name="head")(x)


# Others


class ResMLP(Block):
    """A residual perceptron on all pixels at once."""

    depth: int

    @linen.compact
    def __call__(self, images):
        x = self.make("Dense", WIDTH, name="pixels")(images.reshape(len(images), -1))
        for i in range(self.depth):
            y = self.make("LayerNorm", name=f"norm_{i}")(x)
            x = x + FeedForward(self.layers, self.dtype, name=f"feed_forward_{i}")(y)
        x = self.make("LayerNorm", name="norm")(x)
        return self.make("Dense", CLASSES, name="head")(x)


class ConvBlock(Block):
    """Two convolutions with batch norm, added to a projection of the input where shapes differ."""

    width: int
    stride: int = 1

    @linen.compact
    def __call__(self, x):
        conv = functools.partial(self.make, "Conv", self.width, use_bias=False)
        norm = functools.partial(self.make, "BatchNorm", use_running_average=False)
        strides = (self.stride, self.stride)
        y = norm(name="norm_0")(conv(kernel_size=(3, 3), strides=strides, name="conv_0")(x))
        y = norm(name="norm_1")(conv(kernel_size=(3, 3), name="conv_1")(self.layers.relu(y)))
        if x.shape != y.shape:
            x = conv(kernel_size=(1, 1), strides=strides, name="projection")(x)
            x = norm(name="projection_norm")(x)
        return self.layers.relu(x + y)


class ResNet(Block):
    """Two stages of two blocks, with the statistics of the batch."""

    @linen.compact
    def __call__(self, images):
        x = self.make("Conv", 16, (3, 3), use_bias=False, name="stem")(images)
        x = self.make("BatchNorm", use_running_average=False, name="stem_norm")(x)
        x = self.layers.relu(x)
        for i, (width, stride) in enumerate([(16, 1), (16, 1), (32, 2), (32, 1)]):
            x = ConvBlock(self.layers, self.dtype, width, stride, name=f"block_{i}")(x)
        return self.make("Dense", CLASSES, name="head")(x.mean(axis=(1, 2)))


class LSTM(Block):
    """Two recurrent layers, unrolled over time: tokens `(batch, time)` to logits."""

    @linen.compact
    def __call__(self, tokens):
        x = self.make("Embed", VOCABULARY, WIDTH, name="tokens")(tokens)
        steps = [x[:, t] for t in range(x.shape[1])]
        for i in range(2):
            # `param_dtype` stays float32: the orthogonal initialiser has no float16, and is traced
            # even where the parameters are given.
            cell = linen.OptimizedLSTMCell(WIDTH, dtype=self.dtype, name=f"cell_{i}")
            zeros = jnp.zeros((len(x), WIDTH), self.dtype)
            carry, outputs = (zeros, zeros), []
            for step in steps:
                carry, out = cell(carry, step)
                outputs.append(out)
            steps = outputs
        return self.make("Dense", VOCABULARY, name="head")(jnp.stack(steps, axis=1))


# Batches: they depend on (seed, step) only


@functools.cache
def corpus():
    """Read the text once."""
    return load_corpus(None, context=CONTEXT)


def text_batch(seed: int, step: int, context: int, held_out: bool) -> np.ndarray:
    """Return pieces of the text, `(batch, context + 1)`; of its held-out part if so asked."""
    text = corpus()
    if held_out:
        text = dataclasses.replace(text, train=text.held_out)
    return train_batch(text, seed=seed, step=step, batch=TEXT_BATCH, context=context)


def next_byte_batch(
    seed: int, step: int, held_out: bool = False, *, context: int = CONTEXT
) -> dict:
    """Return bytes and those that follow them, `(batch, context)` each."""
    tokens = text_batch(seed, step, context, held_out)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def masked_batch(seed: int, step: int, held_out: bool = False) -> dict:
    """Return texts of different lengths, some bytes masked, and the weight 1 where one is."""
    rng = np.random.default_rng((seed, step, 1))
    tokens = text_batch(seed, step, CONTEXT, held_out)[:, :-1]
    lengths = rng.integers(CONTEXT // 2, CONTEXT, size=(TEXT_BATCH, 1), endpoint=True)
    present = np.arange(CONTEXT) < lengths
    masked = present & (rng.random(tokens.shape) < 0.15)
    inputs = np.where(present, np.where(masked, MASK, tokens), PADDING).astype(np.int32)
    return {"inputs": inputs, "labels": tokens, "weights": masked.astype(np.float32)}


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images `(N, 8, 8, 1)` of mean 0 and variance 1, and labels `(N,)`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("The image models need scikit-learn: pip install scikit-learn") from error
    data = load_digits()
    images = (data.images - data.images.mean()) / data.images.std()
    return images[..., None].astype(np.float32), data.target.astype(np.int32)


def image_batch(seed: int, step: int) -> dict:
    """Return images `(batch, 8, 8, 1)` and their labels."""
    images, labels = digits()
    chosen = np.random.default_rng((seed, step)).integers(len(images), size=IMAGE_BATCH)
    return {"inputs": images[chosen], "labels": labels[chosen]}


# The table


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its data.

    Attributes:
        name: what the command line calls it.
        init: `init(seed) -> (params, other_state)`, in float32.
        loss: `loss(params, other_state, batch, layers, dtype) -> (loss, new_other_state)`.
        batch: `batch(seed, step) -> batch`, a tree of NumPy arrays; that of a text model takes
            `held_out`, for text that it is not trained on.
    """

    name: str
    init: Callable[[int], tuple[PyTree, PyTree]]
    loss: Callable[..., tuple[jax.Array, PyTree]]
    batch: Callable[..., PyTree]


def make_model(name: str, module: Callable[..., Block], batch: Callable) -> Model:
    """Make a model of `module(layers, dtype)` that is trained on the cross-entropy."""
    first = jax.jit(lambda *args: module(PLAIN, jnp.float32).init(*args))

    def init(seed):
        state = dict(first(jax.random.key(seed), batch(0, 0)["inputs"]))  # only its shape counts
        return state.pop("params"), state

    def loss(params, other_state, batch, layers, dtype):
        inputs = batch["inputs"]
        if jnp.issubdtype(inputs.dtype, jnp.floating):
            inputs = inputs.astype(dtype)
        logits, other_state = module(layers, dtype).apply(
            {"params": params, **other_state}, inputs, mutable=list(other_state)
        )
        losses = layers.softmax_cross_entropy(logits, batch["labels"])
        if "weights" not in batch:
            return losses.mean(), other_state
        weights = batch["weights"].astype(dtype)
        return (losses * weights).sum() / weights.sum(), other_state

    return Model(name, init, loss, batch)


MODELS = {
    name: make_model(name, module, batch)
    for name, module, batch in [
        ("gpt4", functools.partial(LanguageModel, depth=4), next_byte_batch),
        ("gpt12", functools.partial(LanguageModel, depth=12), next_byte_batch),
        ("llama", functools.partial(LanguageModel, depth=4, llama=True), next_byte_batch),
        ("bert", functools.partial(Bert, depth=4), masked_batch),
        ("vit", functools.partial(ViT, depth=4), image_batch),
        ("resmlp", functools.partial(ResMLP, depth=8), image_batch),
        ("resnet", ResNet, image_batch),
        ("lstm", LSTM, functools.partial(next_byte_batch, context=LSTM_CONTEXT)),
    ]
}
