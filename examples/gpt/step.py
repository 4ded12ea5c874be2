"""The training step, the same for every precision.

Scales appear in three places: `scalify` around the step, `as_scaled_array` on the first state, and
`keep_moments`, which says at which scale Adam's moments are stored. All that the presets change
besides are dtypes, and the rescales that the paper names. A run may also freeze its scales: then
`match_scales` takes the place of `keep_moments`, and `rescale` moves them now and then.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_scalify as jsa
from examples.gpt.config import Config
from examples.gpt.model import GPT, identity
from examples.gpt.presets import Preset

PyTree = Any

B1 = 0.9
EPSILON = 1e-6
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
WARMUP = 0.1  # share of the steps
FINAL_LEARNING_RATE = 0.1  # as a share of the peak
NU_TARGET = 2.0**10  # where a rescale puts the largest second moment: far below it they underflow


class TrainState(NamedTuple):
    """What lives from step to step: plain arrays, or `ScaledArray` under `scalify`."""

    params: PyTree
    opt_state: PyTree


Update = Callable[[TrainState, np.ndarray], tuple[TrainState, jax.Array]]


def make_model(config: Config, preset: Preset, *, rngs: nnx.Rngs) -> GPT:
    """Build the transformer with the casts and hooks of a preset."""
    dot_general = jax.lax.dot_general
    if preset.matmul_dtypes is not None:
        forward_dtype, backward_dtype = preset.matmul_dtypes
        dot_general = functools.partial(
            jsa.nn.dot_general, forward_dtype=forward_dtype, backward_dtype=backward_dtype
        )
    return GPT(
        config,
        dtype=preset.compute_dtype,
        dot_general=dot_general,
        norm=jsa.ops.dynamic_rescale_l2_grad if preset.rescale_norm_gradient else identity,
        rngs=rngs,
    )


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Return gradient clipping and AdamW, with a warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=math.ceil(WARMUP * config.steps),
        decay_steps=config.steps + 1,
        end_value=FINAL_LEARNING_RATE * config.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(schedule, b1=B1, b2=config.b2, eps=EPSILON, weight_decay=WEIGHT_DECAY),
    )


def make_loss(config: Config, preset: Preset) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Return `loss(params, tokens)`, the mean cross-entropy of the next token in nats."""
    model = nnx.eval_shape(lambda: make_model(config, preset, rngs=nnx.Rngs(0)))
    graph, _ = nnx.split(model)

    def loss_fn(params: PyTree, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        losses = jsa.nn.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        )
        return losses.mean()

    return loss_fn


def init_state(config: Config, preset: Preset, *, seed: int) -> TrainState:
    """Return the first state; the weights of all presets are those of float32, rounded."""
    model = make_model(config, preset, rngs=nnx.Rngs(seed))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = TrainState(params, make_optimizer(config).init(params))
    if preset.scaled:
        state = jsa.as_scaled_array(state, scale="rms")
    return _store(state, preset)


@functools.lru_cache
def make_update(config: Config, preset: Preset, *, frozen: bool = False) -> Update:
    """Return the jitted step `update(state, tokens) -> (state, loss)`; the state is donated.

    Args:
        config: the size.
        preset: the precision.
        frozen: whether the new state keeps the scales of the old one. With static scales
            (`jsa.freeze_scales`) it has the same structure then, and the step compiles only where
            a scale has another value.
    """
    loss_fn = make_loss(config, preset)
    optimizer = make_optimizer(config)

    def update(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
        if preset.rescale_gradients:
            grads = jsa.dynamic_rescale(grads)
        if preset.gradient_dtype is not None:
            grads = astype(grads, preset.gradient_dtype)

        # AdamW's constants (epsilon, 1 - learning rate x weight decay) become 0 and 1 in float16.
        # So its arithmetic is in float32, in registers; what is stored keeps its dtype.
        grads, state = astype((grads, state), jnp.float32)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), opt_state)
        if frozen:
            new = jsa.match_scales(new, state)
        elif preset.moment_dtype == jnp.float16:
            moments = keep_moments(new.opt_state, grads, preset.moment_exponents)
            new = new._replace(opt_state=moments)
        return _store(new, preset), loss

    # The whole difference that scales make:
    if preset.scaled:
        update = jsa.scalify(update)
    return jax.jit(update, donate_argnums=0)


@functools.lru_cache
def make_evaluate(config: Config, preset: Preset) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Return the jitted `loss(params, tokens)`, computed as the preset computes it in training."""
    loss_fn = make_loss(config, preset)
    return jax.jit(jsa.scalify(loss_fn) if preset.scaled else loss_fn)


def keep_moments(opt_state: PyTree, grads: PyTree, exponents: tuple[int, int]) -> PyTree:
    """Store Adam's moments at scales that follow the gradient's, before they are cast to float16.

    `scale(mu) = 2^j * s` and `scale(nu) = 2^k * s^2` for a gradient of scale `s`. Left alone, the
    scale of a moving average is the largest that it ever had, and the data ends up far from it.
    """
    first, second = (2.0**exponent for exponent in exponents)

    def keep(node):
        if not isinstance(node, optax.ScaleByAdamState):
            return node
        scales = jax.tree.map(lambda g: jsa.get_data_and_scale(g)[1], grads)
        return node._replace(
            mu=jax.tree.map(lambda m, s: jsa.set_scaling(m, s * first), node.mu, scales),
            nu=jax.tree.map(lambda v, s: jsa.set_scaling(v, s * s * second), node.nu, scales),
        )

    return jax.tree.map(keep, opt_state, is_leaf=lambda n: isinstance(n, optax.ScaleByAdamState))


@functools.partial(jax.jit, donate_argnums=0)
def rescale(state: TrainState) -> TrainState:
    """Bring the data of a state with dynamic scales to RMS 1, second moments to a high maximum.

    Squares have twice the dynamic range of what was squared: in float16 they need all of it.
    """

    def move(path: tuple, leaf: Any) -> Any:
        if any(getattr(key, "name", None) == "nu" for key in path):
            return jsa.dynamic_rescale(leaf, "max", NU_TARGET)
        return jsa.dynamic_rescale(leaf)

    is_scaled = lambda x: isinstance(x, jsa.ScaledArray)  # noqa: E731
    return jax.tree_util.tree_map_with_path(move, state, is_leaf=is_scaled)


def astype(tree: PyTree, dtype: jnp.dtype) -> PyTree:
    """Cast the floating leaves of a tree (of a `ScaledArray` the data); others stay."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        tree,
        is_leaf=lambda x: isinstance(x, jsa.ScaledArray),
    )


def _store(state: TrainState, preset: Preset) -> TrainState:
    return TrainState(
        astype(state.params, preset.param_dtype), astype(state.opt_state, preset.moment_dtype)
    )


@jax.jit
def state_is_finite(state: PyTree) -> jax.Array:
    """Return whether every floating leaf, data and scales, is finite."""
    leaves = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()


@jax.jit
def first_bad_step(known: jax.Array, state: PyTree, step: jax.Array) -> jax.Array:
    """Return `known` if it is a step (0 or more), else `step` if the state is not finite, else -1.

    A loss can stay finite while weights freeze, so each step's state is looked at. The answer stays
    on the device: nothing waits for it.
    """
    return jnp.where((known < 0) & ~state_is_finite(state), step, known)


def count_parameters(state: TrainState) -> int:
    """Return the number of trained parameters: embeddings, positions and head included."""
    is_scaled = lambda x: isinstance(x, jsa.ScaledArray)  # noqa: E731
    return sum(math.prod(x.shape) for x in jax.tree.leaves(state.params, is_leaf=is_scaled))


def count_bytes(state: TrainState) -> int:
    """Return the bytes that the whole state takes, scales and counters included."""
    return sum(x.nbytes for x in jax.tree.leaves(state))
