"""AdamW in 16 bits, ours and as it is usually done: a part of `benchmarks/accuracy/optimizers.py`.

| variant | weights | optimizer state | activations | loss |
|---|---|---|---|---|
| `float32` | float32 | float32 | float32 | |
| `float16` | float16 | float16, and its arithmetic | float16 | not scaled |
| `float16-master` | float32 | float32 | float16 | not scaled |
| `static` | float32 | float32 | float16 | times 2^12 |
| `dynamic` | float32 | float32 | float16 | dynamic loss scale |
| `dynamic-float16` | float16 | float16, arithmetic in float32 | float16 | dynamic loss scale |
| `bfloat16` | bfloat16 | bfloat16, and its arithmetic | bfloat16 | not scaled |
| `bfloat16-master` | float32 | float32 | bfloat16 | not scaled |
| `ours` | scaled float16 | scaled float16 | float16 | not scaled |
| `ours-gradient` | the same, moments scaled as the gradients | | | |
| `ours-fp8` | the same, first moment in E4M3 | | | |

The dynamic loss scale begins at 2^15, doubles after 50 good steps in a row, and is halved by a step
whose gradients are not finite; that step changes nothing else.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich import box
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.small_problems import (
    Problem,
    TrainState,
    bytes_per_parameter,
    evaluate,
    finite_leaves,
    make_run,
    scaled_state,
)
from examples.gpt.step import astype

VARIANTS = (
    "float32",
    "float16",
    "float16-master",
    "static",
    "dynamic",
    "dynamic-float16",
    "bfloat16",
    "bfloat16-master",
    "ours",
    "ours-gradient",
    "ours-fp8",
)
LEARNING_RATES = {"digits": 1e-2, "gpt": 1e-2}
STATIC_SCALE = 2.0**12
FIRST_SCALE = 2.0**15
GOOD_STEPS = 50  # until the dynamic scale doubles; 2,000 is usual, of runs that are as much longer
PyTree = Any


def make_optimizer(problem: Problem, steps: int) -> optax.GradientTransformation:
    """Return AdamW with a warm-up and a cosine decay."""
    rate = LEARNING_RATES[problem.name]
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(steps // 10, 1), steps)
    return optax.adamw(schedule, weight_decay=0.01)


class LossScale(NamedTuple):
    """A dynamic loss scale and the number of good steps since it last changed."""

    scale: jax.Array
    good: jax.Array

    def adjust(self, finite: jax.Array) -> "LossScale":
        """Halve it after a bad step, double it after enough good ones."""
        good = jnp.where(finite, self.good + 1, 0)
        grows = good >= GOOD_STEPS
        factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
        return LossScale(self.scale * factor, jnp.where(grows, 0, good))


def usual_step(
    problem: Problem, optimizer: Any, compute: Any, arithmetic: Any, scaling: str | None
) -> Callable:
    """Return a step without `scalify`.

    Args:
        problem: what to train.
        optimizer: its update runs in `arithmetic`, and what is stored keeps its dtype.
        compute: dtype of the activations.
        arithmetic: dtype of the optimizer's arithmetic; `None` is that of the state.
        scaling: of the loss: `None`, "static" or "dynamic".
    """
    loss_fn = problem.make_loss(compute)

    def apply(state: TrainState, grads: PyTree) -> TrainState:
        params, opt_state = state
        if arithmetic is not None:
            grads, params, opt_state = astype((grads, params, opt_state), arithmetic)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = TrainState(optax.apply_updates(params, updates), opt_state)
        return jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)

    def update(carry: tuple[TrainState, LossScale], batch: PyTree) -> tuple:
        state, loss_scale = carry
        scale = {"static": STATIC_SCALE, "dynamic": loss_scale.scale}.get(scaling or "", 1.0)

        def scaled_loss(params: PyTree) -> tuple[jax.Array, jax.Array]:
            loss = loss_fn(params, batch)
            return loss * scale, loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(state.params)
        if scaling is not None:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        new = apply(state, grads)
        if scaling != "dynamic":
            return (new, loss_scale), loss, jnp.int32(0)
        finite = finite_leaves(grads).all()
        new = jax.tree.map(lambda x, old: jnp.where(finite, x, old), new, state)
        return (new, loss_scale.adjust(finite)), loss, (~finite).astype(jnp.int32)

    return update


def our_step(problem: Problem, optimizer: Any, policy: str) -> Callable:
    """Return the step through `scalify`."""
    loss_fn = problem.make_loss(jnp.float16)

    def update(carry: tuple[TrainState, None], batch: PyTree) -> tuple:
        state, _ = carry
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jsa.optim.apply_updates(state.params, updates, policy=policy)
        return (TrainState(params, opt_state), None), loss, jnp.int32(0)

    return jsa.scalify(update)


def make_variant(variant: str, problem: Problem, steps: int) -> tuple[Callable, Callable, Any]:
    """Return `first_state(params)`, the step and the dtype of the activations."""
    optimizer = make_optimizer(problem, steps)
    if variant.startswith("ours"):
        kind: dict[str, Any] = {
            "ours-gradient": {"policy": "gradient"},
            "ours-fp8": {"first_moment_dtype": jnp.float8_e4m3fn},
        }.get(variant, {})
        optimizer = jsa.optim.low_precision(optimizer, **kind)
        first = lambda params: (scaled_state(optimizer, params), None)  # noqa: E731
        return first, our_step(problem, optimizer, kind.get("policy", "statistic")), jnp.float16
    family = variant.partition("-")[0]
    compute = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}.get(family, jnp.float16)
    narrow = variant in ("float16", "bfloat16", "dynamic-float16")
    stored = compute if narrow else jnp.float32
    arithmetic = jnp.float32 if variant == "dynamic-float16" else None
    scaling = family if family in ("static", "dynamic") else None

    def first_state(params: PyTree) -> tuple[TrainState, LossScale]:
        params = astype(params, stored)
        state = TrainState(params, astype(optimizer.init(params), stored))
        return state, LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0))

    return first_state, usual_step(problem, optimizer, compute, arithmetic, scaling), compute


def train(variant: str, problem: Problem, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Train a variant with some seeds.

    Returns:
        Held-out losses, skipped steps of each seed, bytes of state per parameter, the first step
        that left something in the state that is not finite, or -1, and the number of such leaves
        after the last step.
    """
    first_state, step, compute = make_variant(variant, problem, steps)
    run = make_run(step)
    losses, skipped, bad, leaves, size = [], [], [], [], 0.0
    for seed in seeds:
        carry = first_state(problem.init(seed))
        size = bytes_per_parameter(carry[0])
        outcome = run(carry, problem.batches(seed, steps))
        state = outcome.state[0]
        losses.append(evaluate(problem, state.params, compute))
        skipped.append(int(outcome.skipped))
        bad.append(int(outcome.first_bad_step))
        leaves.append(int((~finite_leaves(state)).sum()))
    return {
        "losses": losses,
        "skipped": skipped,
        "bytes": size,
        "first_bad_step": max(bad),
        "bad_leaves": max(leaves),
    }


def summarise(cells: dict[str, dict], problem: str) -> Table:
    """Compare the variants with float32."""
    table = Table(box=box.SIMPLE, title=f"{problem}: AdamW, ours and the alternatives")
    table.add_column("variant", no_wrap=True)
    columns = ("loss", "gap", "worst seed", "skipped", "bytes", "first bad step", "bad leaves")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    reference = cells[f"alternatives/float32/{problem}"]["losses"]
    for variant in VARIANTS:
        cell = cells[f"alternatives/{variant}/{problem}"]
        pairs = zip(cell["losses"], reference, strict=True)
        gaps = [100 * (loss / best - 1) for loss, best in pairs]
        mean = statistics.fmean(cell["losses"])
        table.add_row(
            variant,
            f"{mean:.4f}",
            f"{100 * (mean / statistics.fmean(reference) - 1):+.2f}%",
            f"{max(gaps):+.2f}%",
            "/".join(map(str, cell["skipped"])),
            f"{cell['bytes']:.2f}",
            "never" if cell["first_bad_step"] < 0 else str(cell["first_bad_step"]),
            str(cell["bad_leaves"]),
        )
    return table
