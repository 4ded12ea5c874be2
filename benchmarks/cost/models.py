"""The training steps whose cost is measured, each plain, with dynamic scales and with frozen ones.

All are in float32, so that nothing but the scales makes a difference, but for those of the README's
recipe (`Recipe`). None of them knows of scales: the GPT is that of `examples.gpt`, with its loss
and its optimizer.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jax_scalify as jsa
from benchmarks.accuracy import scale_models
from examples.gpt import step as gpt_step
from examples.gpt.config import Config
from examples.gpt.model import Block, identity
from examples.gpt.presets import get_preset

PyTree = Any
VARIANTS = ("plain", "static-weights", "dynamic", "frozen")
FIRST_STEPS = 2  # the learning rate of the GPT's first step is 0, and its biases have no scale yet
MLP_BATCH = 128


class State(NamedTuple):
    """What lives from step to step; `other` has the statistics of batch norm."""

    params: PyTree
    opt_state: PyTree
    other: PyTree


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, its data and its optimizer.

    Attributes:
        init: `init() -> (params, other)`, in float32.
        loss: `loss(params, other, batch) -> (loss, new_other)`.
        batch: NumPy arrays.
        optimizer: of optax.
        stacked: a predicate on key paths: leaves whose first axis is that of scanned layers, each
            of which has a scale of its own, as its gradient has.
    """

    init: Callable[[], tuple[PyTree, PyTree]]
    loss: Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]
    batch: PyTree
    optimizer: optax.GradientTransformation
    stacked: Callable[[tuple], bool] = lambda path: False

    def update(self, state: State, batch: PyTree) -> tuple[State, jax.Array]:
        """Return the next state and the loss."""
        loss_fn = jax.value_and_grad(self.loss, has_aux=True)
        (loss, other), grads = loss_fn(state.params, state.other, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, other), loss

    def scaled_update(self, state: State, batch: PyTree) -> tuple[State, jax.Array]:
        """Return what `update` returns; it is scalified."""
        return self.update(state, batch)

    def hold(self, state: State, batch: PyTree) -> tuple[State, jax.Array]:
        """Return the next state at the scales of this one, and the loss."""
        new, loss = self.scaled_update(state, batch)
        return jsa.match_scales(new, state), loss

    def plain_state(self) -> State:
        """Return the first state."""
        params, other = self.init()
        return State(params, self.optimizer.init(params), other)

    def scaled_state(self) -> State:
        """Return the first state with dynamic scales."""

        def convert(path: tuple, leaf: Any) -> Any:
            axis = 0 if self.stacked(path) else None
            return jsa.as_scaled_array(leaf, "rms", axis=axis)

        return jax.tree_util.tree_map_with_path(convert, self.plain_state())

    def find_scales(self) -> list[float]:
        """Return the scale that every floating leaf has after the first steps, one a leaf."""
        state = self.scaled_state()
        update = jax.jit(jsa.scalify(self.scaled_update), donate_argnums=0)
        for _ in range(FIRST_STEPS):
            state, _ = update(state, self.batch)
        return [float(np.max(leaf.scale)) for leaf in jsa.tree.leaves(state) if is_scaled(leaf)]

    def frozen_state(self, scales: Sequence[float]) -> State:
        """Return the first state at static scales, one for each floating leaf."""
        state = self.scaled_state()
        remaining = iter(scales)
        like = jsa.tree.map(
            lambda leaf: jsa.ScaledArray(leaf.data, next(remaining)) if is_scaled(leaf) else leaf,
            state,
        )
        return jsa.match_scales(state, like)

    def setting(self, variant: str, scales: Sequence[float] = ()) -> tuple[Callable, State]:
        """Return the jitted step of a variant, which donates the state, and the first state."""
        if variant == "plain":
            step, state = self.update, self.plain_state()
        elif variant == "dynamic":
            step, state = jsa.scalify(self.scaled_update), self.scaled_state()
        elif variant == "static-weights":
            state = self.scaled_state()
            params = jsa.as_scaled_array(state.params, scale="rms", static=True)
            step, state = jsa.scalify(self.scaled_update), state._replace(params=params)
        else:
            step, state = jsa.scalify(self.hold), self.frozen_state(scales)
        # `init` may share buffers (zeros, for one), and none can be donated twice.
        return jax.jit(step, donate_argnums=0), jax.tree.map(jnp.copy, state)


@dataclasses.dataclass(frozen=True)
class Recipe(Problem):
    """Trained by the README's recipe, everything in float16; the plain step is in float32.

    Attributes:
        narrow_loss: `loss` of a model that computes in float16.
    """

    narrow_loss: Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]] | None = None

    @functools.cached_property
    def low_precision(self) -> optax.GradientTransformation:
        """The optimizer that makes the state and updates it, as in the README."""
        return jsa.optim.low_precision(self.optimizer)

    def scaled_update(self, state: State, batch: PyTree) -> tuple[State, jax.Array]:
        """Return the next state, rounded stochastically, and the loss."""
        narrow = jax.tree.map(lambda x: x.astype(np.float16) if x.dtype == np.float32 else x, batch)
        loss_fn = jax.value_and_grad(self.narrow_loss or self.loss, has_aux=True)
        (loss, other), grads = loss_fn(state.params, state.other, narrow)
        updates, opt_state = self.low_precision.update(grads, state.opt_state, state.params)
        return State(jsa.optim.apply_updates(state.params, updates), opt_state, other), loss

    def scaled_state(self) -> State:
        """Return the first state in float16, with dynamic scales."""
        params, other = self.init()
        params = jsa.as_scaled_array(params, scale="rms", dtype="float16")
        opt_state = self.low_precision.init(params)
        return State(params, *jsa.as_scaled_array((opt_state, other)))


def is_scaled(leaf: Any) -> bool:
    """Tell whether a leaf is a `ScaledArray`."""
    return isinstance(leaf, jsa.ScaledArray)


def without_state(loss: Callable) -> Callable:
    """Return `loss(params, batch)` as a `Problem` takes it."""
    return lambda params, other, batch: (loss(params, batch), other)


# Perceptrons


def make_mlp(sizes: Sequence[int]) -> Problem:
    """Linear layers with a ReLU between them, trained with SGD."""
    rng = np.random.default_rng(0)

    def init():
        rng = np.random.default_rng(1)
        weights = [rng.normal(size=pair) / np.sqrt(pair[0]) for pair in zip(sizes, sizes[1:])]
        return [(jnp.asarray(w, jnp.float32), jnp.zeros(w.shape[1])) for w in weights], ()

    def loss(params, batch):
        x, labels = batch
        *hidden, (last, bias) = params
        for w, b in hidden:
            x = jax.nn.relu(x @ w + b)
        return optax.softmax_cross_entropy(x @ last + bias, labels).mean()

    images = rng.normal(size=(MLP_BATCH, sizes[0])).astype(np.float32)
    labels = np.eye(sizes[-1], dtype=np.float32)[rng.integers(0, sizes[-1], MLP_BATCH)]
    return Problem(init, without_state(loss), (images, labels), optax.sgd(0.01))


# Transformers


def gpt_config(layers: int, width: int) -> Config:
    """Return a size that two CPU cores can step: the wider, the fewer tokens."""
    context, batch = (64, 8) if width <= 128 else (32, 4)
    return Config(
        layers=layers, width=width, heads=width // 32, context=context, batch=batch, steps=1000
    )


def gpt_tokens(config: Config) -> np.ndarray:
    """Return random tokens, `(batch, context + 1)`."""
    shape = config.batch, config.context + 1
    return np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)


def gpt_init(config: Config) -> tuple[PyTree, PyTree]:
    """Return the parameters of the GPT."""
    return gpt_step.init_state(config, get_preset("fp32"), seed=0).params, ()


def make_gpt(config: Config, preset: str = "fp32") -> Problem:
    """The GPT of the example, with AdamW and clipping."""
    loss = gpt_step.make_loss(config, get_preset(preset))
    optimizer = gpt_step.make_optimizer(config)
    init = functools.partial(gpt_init, config)
    return Problem(init, without_state(loss), gpt_tokens(config), optimizer)


def make_scanned_gpt(config: Config) -> Problem:
    """The same, its layers one `lax.scan` over stacked weights."""
    preset = get_preset("fp32")

    def make_block():
        return Block(
            config,
            linear=nnx.Linear,
            layer_norm=functools.partial(nnx.LayerNorm, use_fast_variance=False),
            norm=identity,
            attention_dot_general=lax.dot_general,
            rngs=nnx.Rngs(0),
        )

    def make_ends():
        one = dataclasses.replace(config, layers=1)
        return gpt_step.make_model(one, preset, rngs=nnx.Rngs(0))

    block_graph, _ = nnx.split(nnx.eval_shape(make_block))
    ends_graph, _ = nnx.split(nnx.eval_shape(make_ends))

    def init():
        params, other = gpt_init(config)
        blocks = [params["blocks"][i] for i in range(config.layers)]
        return params | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}, other

    def loss(params, tokens):
        first = jax.tree.map(lambda x: x[0], params["blocks"])  # only to have a whole model
        model = nnx.merge(ends_graph, params | {"blocks": {0: first}})
        x = model.tokens(tokens[:, :-1]) + model.positions(jnp.arange(config.context))
        x, _ = lax.scan(
            lambda x, weights: (nnx.merge(block_graph, weights)(x), None), x, params["blocks"]
        )
        logits = model.tokens.attend(model.final_norm(x))
        losses = jsa.nn.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def stacked(path):
        return any(getattr(key, "key", None) == "blocks" for key in path)

    optimizer = gpt_step.make_optimizer(config)
    return Problem(init, without_state(loss), gpt_tokens(config), optimizer, stacked)


# Convolutions


def make_resnet() -> Problem:
    """The ResNet of `scale_models`, with the statistics of the batch, trained with SGD."""
    model = scale_models.MODELS["resnet"]

    def loss(params, other, batch):
        return model.loss(params, other, batch, scale_models.PLAIN, jnp.float32)

    batch = model.batch(0, 0)
    return Problem(lambda: model.init(0), loss, batch, optax.sgd(0.01, momentum=0.9))


def make_recipe(
    make: Callable[..., Problem], optimizer: Any = None, preset: str | None = None
) -> Problem:
    """The same model, trained by the README's recipe; what has a `preset` computes by that."""
    problem = make()
    fields = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
    narrow = make(preset=preset).loss if preset else None
    return Recipe(**fields | ({"optimizer": optimizer} if optimizer else {}), narrow_loss=narrow)


MODELS: dict[str, Callable[[], Problem]] = {
    "mlp-784-512-512-10": functools.partial(make_mlp, (784, 512, 512, 10)),
    "mlp-8x512": functools.partial(make_mlp, (784, *[512] * 8, 10)),
    "mlp-8x64": functools.partial(make_mlp, (784, *[64] * 8, 10)),
    **{
        f"gpt-{layers}x{width}": functools.partial(make_gpt, gpt_config(layers, width))
        for width in (128, 512)
        for layers in (2, 4, 8, 12)
    },
    "gpt-12x128-scanned": functools.partial(make_scanned_gpt, gpt_config(12, 128)),
    "resnet": make_resnet,
    "recipe-mlp-784-512-512-10": functools.partial(
        make_recipe, functools.partial(make_mlp, (784, 512, 512, 10)), optax.adamw(1e-3)
    ),
    "recipe-gpt-4x128": functools.partial(
        make_recipe, functools.partial(make_gpt, gpt_config(4, 128)), preset="fp16-all"
    ),
}
