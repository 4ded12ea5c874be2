"""The training step, in bfloat16 as people train, and by the recipe of the README."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_scalify as jsa
from examples.llama.layout import Layout
from examples.llama.model import Sizes, init, loss_fn

PyTree = Any
RECIPES = ("bfloat16", "float16", "fp8", "fp8-frozen")
WARMUP = 0.1  # share of the steps
STATIC_SCALE = 2.0**-5  # of every leaf of an abstract frozen state: the program is the same for all


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, where and how.

    Attributes:
        sizes: of the model.
        layout: on the mesh.
        recipe: "bfloat16": weights and moments in float32, activations in bfloat16; "float16":
            everything in float16, by `scalify`; "fp8": that with FP8 matmuls; "fp8-frozen": and
            with the scales that the state has, made static.
        steps: of the schedule of learning rates.
        learning_rate: its peak.
    """

    sizes: Sizes
    layout: Layout
    recipe: str
    steps: int = 100
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        """Refuse what does not fit together, before anything is computed."""
        if self.recipe not in RECIPES:
            raise ValueError(f"`recipe` must be one of {', '.join(RECIPES)}, got {self.recipe!r}.")
        sizes, tensor, rows = self.sizes, self.layout.size("tensor"), self.layout.size("fsdp")
        for name, parts, axis in (
            ("groups", tensor, "tensor"),
            ("hidden", tensor, "tensor"),
            ("vocabulary", tensor, "tensor"),
            ("context", tensor, "tensor"),
            ("width", rows, "fsdp"),
        ):
            number = getattr(sizes, name)
            if number % parts:
                raise ValueError(
                    f"`mesh`: {axis}={parts} does not divide `{name}` of this size, {number}."
                )

    @property
    def scaled(self) -> bool:
        """Whether the state has scales."""
        return self.recipe != "bfloat16"

    def optimizer(self) -> Any:
        """AdamW behind clipping, with a warm-up and a cosine decay."""
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=math.ceil(WARMUP * self.steps),
            decay_steps=self.steps + 1,
            end_value=0.1 * self.learning_rate,
        )
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
        )
        return jsa.optim.low_precision(optimizer) if self.scaled else optimizer

    def init_state(self, key: jax.Array) -> PyTree:
        """Weights and the optimizer's state: the weights of all recipes are the same, rounded."""
        params = init(self.sizes, key)
        if not self.scaled:
            return params, self.optimizer().init(params)
        params = jsa.as_scaled_array(params, scale="rms", dtype="float16")
        return params, jsa.as_scaled_array(self.optimizer().init(params))

    def abstract_state(self) -> PyTree:
        """The state in shapes and shardings only; no array is made."""
        state = jax.eval_shape(self.init_state, jax.random.key(0))
        if self.recipe == "fp8-frozen":
            state = jsa.tree.map(_frozen, state)
        shardings = self.layout.shardings(state)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
        )

    def make_state(self, seed: int) -> PyTree:
        """Make the state where it belongs: no device, and no process, ever holds all of it."""
        shapes = jax.eval_shape(self.init_state, jax.random.key(seed))
        init_state = jax.jit(self.init_state, out_shardings=self.layout.shardings(shapes))
        return init_state(jax.random.key(seed))

    def make_loss(self) -> Callable[[PyTree, jax.Array], jax.Array]:
        """`loss(params, tokens)`, in nats a token."""
        if self.scaled:

            def loss(params: PyTree, tokens: jax.Array) -> jax.Array:
                return loss_fn(params, tokens, self.sizes, self.layout)

            return jsa.fp8_matmuls(loss) if self.recipe.startswith("fp8") else loss

        def narrow(params: PyTree, tokens: jax.Array) -> jax.Array:
            params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
            return loss_fn(params, tokens, self.sizes, self.layout)

        return narrow

    def make_update(self, state: PyTree) -> Any:
        """The jitted `update(state, tokens) -> (state, loss)`; the state is donated.

        Args:
            state: that it is for, of arrays or shapes: the new one lies where it does.
        """
        loss_fn, optimizer = self.make_loss(), self.optimizer()

        def update(state: PyTree, tokens: jax.Array) -> tuple[PyTree, jax.Array]:
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            if not self.scaled:
                return (optax.apply_updates(params, updates), opt_state), loss
            new = jsa.optim.apply_updates(params, updates), opt_state
            if self.recipe == "fp8-frozen":
                new = jsa.match_scales(new, state)
            return new, loss

        step = jsa.scalify(update) if self.scaled else update
        if self.layout.mesh is None:
            return jax.jit(step, donate_argnums=0)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def _frozen(leaf: Any) -> Any:
    return jsa.ScaledArray(leaf.data, STATIC_SCALE) if isinstance(leaf, jsa.ScaledArray) else leaf
