"""The training steps of `parity`: what is in which dtype.

Usual are `float32`; `bfloat16`, the model in bfloat16 with weights and AdamW in float32; `float16`,
weights, activations, gradients and both moments; and `fp8-hidden`, that with the matmuls of linear
layers and experts in E4M3 and E5M2, but the last layer, whose results become probabilities, and a
router in float16, as is the default of `fp8_matmuls`. The others are run if they are named.

`fp8` has the last layer and routers in FP8 too; `fp8-moment` is that with the first moment in E4M3;
`fp8-hidden-e4m3` has cotangents in E4M3. These tell which pass it is that costs, `fp8-hidden` in
one: `fp8-forward` has operands in E4M3 and cotangents in float16, `fp8-backward` the other way
round, in E5M2, and `fp8-gradients` that with both operands of the two gradients in FP8. These tell
which layer: `fp8-attention-in` has the queries', keys' and values' layers in FP8 alone, and so on.

`fp8-finish-10` and `fp8-finish-20` are `fp8-hidden`, and `float16` in the last 10 or 20% of the
steps: the state is the same. `float16-fp8-moments` is `float16` with both moments in E4M3, four
bytes a parameter.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_scalify as jsa
from benchmarks.accuracy.scale_models import PLAIN, Model

PyTree = Any

USUAL = ("float32", "bfloat16", "float16", "fp8-hidden")
FINISHES = {"fp8-finish-10": 0.9, "fp8-finish-20": 0.8}  # after this share of the steps: float16
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
MOMENTS = {
    "fp8-moment": {"first_moment_dtype": E4M3},
    "float16-fp8-moments": {"first_moment_dtype": E4M3, "second_moment_dtype": E4M3},
}


def only(pattern: str) -> jsa.fp8.Predicate:
    """Make the predicate of the hidden layers whose module's path a regular expression matches."""
    return jsa.fp8.all_of(jsa.fp8.hidden_layers, lambda m: bool(re.search(pattern, m.scope)))


ALL, HIDDEN = {"select": jsa.fp8.linear_layers}, {"select": jsa.fp8.hidden_layers}
FP8_OPTIONS: dict[str, dict[str, Any]] = {
    "fp8": ALL,
    "fp8-hidden": HIDDEN,
    "fp8-hidden-e4m3": {**HIDDEN, "backward_dtype": E4M3},
    "fp8-moment": ALL,
    "fp8-forward": {**HIDDEN, "backward_dtype": jnp.float16},
    "fp8-backward": {**HIDDEN, "forward_dtype": jnp.float16},
    "fp8-gradients": {**HIDDEN, "forward_dtype": jnp.float16, "backward_dtype": (E5M2, E4M3)},
    "fp8-attention-in": {"select": only(r"attention/(query|key|value)")},
    "fp8-attention-out": {"select": only(r"attention/out")},
    "fp8-up": {"select": only(r"feed_forward/(gate|up)")},
    "fp8-down": {"select": only(r"feed_forward/down")},
}
VARIANTS = (*dict.fromkeys((*USUAL, *FP8_OPTIONS, *FINISHES, "float16-fp8-moments")),)
# How far the loss may be, in %.
GOALS = {"float16": 0.05, "float16-fp8-moments": 0.1} | dict.fromkeys(
    (*FP8_OPTIONS, *FINISHES), 0.15
)


def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW behind clipping, with a warm-up and a cosine decay to 0.

    Where the rate ends at a tenth of its peak, two runs of the Llama that differ by rounding alone
    end 1% apart; where it ends at 0, up to 0.4%.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, math.ceil(steps / 10), steps + 1)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.1)
    )


def is_narrow(variant: str) -> bool:
    """Whether a variant's weights and moments are scaled arrays."""
    return variant not in ("float32", "bfloat16")


def phases(variant: str, steps: int) -> list[tuple[int, str]]:
    """Return what a run's steps are, as `(first step, variant)` each."""
    if variant in FINISHES:
        return [(0, "fp8-hidden"), (round(FINISHES[variant] * steps), "float16")]
    return [(0, variant)]


@functools.lru_cache(maxsize=2)
def make_step(model: Model, variant: str, steps: int, rate: float) -> tuple[Callable, Callable]:
    """Return `first_state(seed)` and `update(state, batch) -> (state, loss)`, the same of seeds."""
    optimizer = make_optimizer(rate, steps)
    narrow = is_narrow(variant)
    if narrow:
        optimizer = jsa.optim.low_precision(optimizer, **MOMENTS.get(variant, {}))
    dtypes = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    dtype = dtypes.get(variant, jnp.float16)

    def loss_of(params: PyTree, other: PyTree, batch: dict) -> tuple[jax.Array, PyTree]:
        if variant == "bfloat16":
            params = jax.tree.map(lambda w: w.astype(dtype), params)
        loss, other = model.loss(params, other, batch, PLAIN, dtype)
        return loss.astype(jnp.float32), other

    if variant.startswith("fp8"):
        loss_of = jsa.fp8_matmuls(loss_of, **FP8_OPTIONS[variant])

    def update(state: PyTree, batch: dict) -> tuple[PyTree, jax.Array]:
        params, other, opt_state = state
        grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, new_other), grads = grad(params, other, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        apply_updates = jsa.optim.apply_updates if narrow else optax.apply_updates
        new_other = jsa.match_scales(new_other, other) if narrow else new_other
        return (apply_updates(params, updates), new_other, opt_state), loss

    def first_state(seed: int) -> PyTree:
        params, other = model.init(seed)
        opt_state = optimizer.init(params)
        if not narrow:
            return params, other, opt_state
        params = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
        return params, *jsa.as_scaled_array((other, opt_state))

    return first_state, update
