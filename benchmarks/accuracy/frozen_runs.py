"""Runs with scales that were frozen once, and what the state's worst element does in them.

A problem is trained for some steps with dynamic scales; then they are calibrated and frozen, and
it is trained on: with frozen scales, with dynamic ones, and in float32. Two ways: `float16`,
weights, gradients and both moments; `fp8`, and matmuls in E4M3 and E5M2, both moments in E4M3.

Moments in float32 are kept of the same gradients, and at every step the update that Adam would make
of either is compared, element by element: the `step error` is the largest difference, in learning
rates (an ordinary update is at most about 1). It sees what is stuck, lost and out of range alike.
The `headroom` is the least number of octaves between an element and the largest number of its
dtype; 0 is saturated.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_scalify as jsa
from benchmarks.accuracy.situations import Checks, adamw
from benchmarks.accuracy.small_problems import TrainState, finite_leaves, scaled_leaves
from examples.gpt.step import astype

WAYS = ("float16", "fp8")
WARM = 100  # steps with dynamic scales
CHUNK = 50  # steps in one program
LOOKS = 4  # steps of the calibration
DECAY = 0.999  # of the average
PyTree = Any


class Watched(NamedTuple):
    """A state, Adam's moments in float32 of the same gradients, and averages of the weights.

    Attributes:
        state: the one that is trained.
        moments: of an optimizer in float32 that sees the same gradients.
        average: of the weights, in the dtype of the state.
        wide_average: of the same weights, in float32.
    """

    state: TrainState
    moments: PyTree
    average: PyTree
    wide_average: PyTree


class Outcome(NamedTuple):
    """What a run leaves: the state, and of each step what was looked at, `(steps,)`.

    Attributes:
        state: the last one.
        finite: whether all of the state was.
        step_error: see the module.
        headroom: see the module.
    """

    state: Watched
    finite: np.ndarray
    step_error: np.ndarray
    headroom: np.ndarray


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
        init: `init() -> params`, in float32.
        loss: `loss(params, batch, dtype)`.
        draw: `draw(steps) -> batches`, stacked; the first ones are the same for any `steps`.
        held_out: `held_out() -> batch`.
        optimizer: in float32.
        moments: the part of it that has Adam's moments.
    """

    init: Callable[[], PyTree]
    loss: Callable[[PyTree, PyTree, Any], jax.Array]
    draw: Callable[[int], PyTree]
    held_out: Callable[[], PyTree]
    optimizer: Any = adamw()
    moments: Any = optax.scale_by_adam()


# The step and the loop


def make_step(problem: Problem, way: str) -> tuple[Callable, Callable]:
    """Return `first_state()` and `step(watched, batch) -> (watched, loss)`, in "float32" too."""
    dtype = jnp.float32 if way == "float32" else jnp.float16
    narrow = jnp.float8_e4m3fn if way == "fp8" else None
    optimizer = problem.optimizer
    if way != "float32":
        optimizer = jsa.optim.low_precision(
            optimizer, first_moment_dtype=narrow, second_moment_dtype=narrow
        )
    average, wide_average = (jsa.optim.ema(DECAY, d) for d in (dtype, jnp.float32))

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return problem.loss(params, batch, dtype)

    loss_fn = jsa.fp8_matmuls(loss_fn, jsa.fp8.linear_layers) if way == "fp8" else loss_fn

    def first_state() -> Watched:
        params = problem.init()
        moments = problem.moments.init(params)
        if way != "float32":
            params = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
        state = TrainState(params, optimizer.init(params))
        wide = jsa.asarray(params, jnp.float32)
        averages = average.init(params if way != "float32" else wide), wide_average.init(wide)
        return Watched(state, moments, averages[0], jsa.asarray(averages[1], jnp.float32))

    def step(watched: Watched, batch: PyTree) -> tuple[Watched, jax.Array]:
        params, opt_state = watched.state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads = astype(grads, jnp.float32)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        updates = jax.tree.map(lambda x: x * batch["rate"].reshape((1,) * x.ndim), updates)
        key = jax.random.fold_in(jax.random.key(0), batch["number"])
        params = jsa.optim.apply_updates(
            params, updates, key=key, rounding="nearest" if way == "float32" else "stochastic"
        )
        plain = jax.tree.map(plain_leaf, (grads, params))
        moments = problem.moments.update(plain[0], watched.moments)[1]
        averaged = average.update(params, watched.average)[1]
        wide = wide_average.update(plain[1], watched.wide_average)[1]
        moments, wide = jax.tree.map(plain_leaf, (moments, wide))
        return Watched(TrainState(params, opt_state), moments, averaged, wide), loss

    return first_state, step


def plain_leaf(leaf: jax.Array) -> jax.Array:
    """A leaf without a scale, inside of `scalify`."""
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jsa.stop_scaling(leaf, jnp.float32) if floating else leaf


@jax.jit
def look(watched: Watched) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether a state is finite, its step error, and its headroom."""
    ours, wide = (adam_updates(x) for x in (watched.state.opt_state, watched.moments))
    errors = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), ours, wide)
    room = [
        jnp.log2(jnp.float32(jnp.finfo(x.dtype).max))
        - jnp.log2(jnp.max(jnp.abs(x.data.astype(jnp.float32))))
        for x in scaled_leaves(watched.state)
        if isinstance(x, jsa.ScaledArray)
    ]
    largest = jnp.max(jnp.stack(jax.tree.leaves(errors)))
    least = jnp.min(jnp.stack(room)) if room else jnp.float32(jnp.inf)
    return finite_leaves(watched.state).all(), largest, least


def adam_updates(state: PyTree) -> PyTree:
    """The updates that Adam makes of the moments in a state, in learning rates."""
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731
    (adam,) = filter(is_adam, jax.tree.leaves(state, is_leaf=is_adam))
    mu, nu = (jax.tree.map(wide, x, is_leaf=is_stored) for x in (adam.mu, adam.nu))
    count = jnp.maximum(adam.count, 1).astype(jnp.float32)
    first, second = 1 - 0.9**count, 1 - 0.999**count
    return jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + 1e-8), mu, nu)


def is_stored(leaf: Any) -> bool:
    """Tell whether something is one leaf of a stored state."""
    return isinstance(leaf, (jsa.ScaledArray, jsa.optim.SquareRoot))


def wide(leaf: Any) -> jax.Array:
    """The value of a leaf of a state, in float32."""
    if isinstance(leaf, jsa.optim.SquareRoot):
        return jnp.square(jsa.asarray(leaf.root, jnp.float32))
    return jsa.asarray(leaf, jnp.float32)


def make_run(step: Callable) -> Callable[[Watched, PyTree], Outcome]:
    """Return `run(state, batches)` of a step: compiled once, for chunks of steps."""

    @jax.jit
    def chunk(state: Watched, batches: PyTree) -> tuple:
        def body(state: Watched, batch: PyTree) -> tuple:
            state, _ = step(state, batch)
            return state, look(state)

        return jax.lax.scan(body, state, batches)

    def run(state: Watched, batches: PyTree) -> Outcome:
        seen = []
        for start in range(0, len(batches["number"]), CHUNK):
            state, rows = chunk(state, part(batches, start, start + CHUNK))
            seen.append(rows)
        return Outcome(state, *(np.concatenate(rows) for rows in zip(*seen, strict=True)))

    return run


def part(batches: PyTree, start: int, stop: int | None = None) -> PyTree:
    """Some of the steps."""
    return jax.tree.map(lambda x: x[start:stop], batches)


class Ready(NamedTuple):
    """What all situations of a problem have in common: the first `WARM` steps, and two ways on.

    Attributes:
        run: `run(state, batches)` with dynamic scales, or in float32.
        state: after `WARM` steps.
        calibration: None in float32.
        run_frozen: `run(state, batches)` with frozen scales.
    """

    run: Callable[[Watched, PyTree], Outcome]
    state: Watched
    calibration: jsa.Calibration | None = None
    run_frozen: Callable[[Watched, PyTree], Outcome] | None = None


@functools.lru_cache(maxsize=4)
def prepare(problem: Problem, way: str) -> Ready:
    """Train with dynamic scales, and calibrate."""
    first_state, step = make_step(problem, way)
    run = make_run(step if way == "float32" else jsa.scalify(step))
    batches = problem.draw(WARM)
    warm = run(first_state(), batches)
    if way == "float32":
        return Ready(run, warm.state)
    last = (jax.tree.map(lambda x: x[i], batches) for i in range(WARM - LOOKS, WARM))  # noqa: B023
    calibration = jsa.calibrate(step, warm.state, last, steps=LOOKS)
    frozen = make_run(jsa.scalify(step, calibration=calibration))
    return Ready(run, warm.state, calibration, frozen)


def held_out_loss(problem: Problem, params: PyTree, way: str) -> float:
    """The loss of held-out data; that of weights in float16 through `scalify`, in float16."""
    dtype = jnp.float32 if way == "float32" else jnp.float16
    loss = lambda params, batch: problem.loss(params, batch, dtype)  # noqa: E731
    loss = loss if way == "float32" else jsa.scalify(loss)
    return float(jax.jit(loss)(params, problem.held_out()))


def compare(
    problem: Problem, way: str, steps: int, change: Callable[[PyTree], None] = lambda batches: None
) -> tuple[Checks, Outcome, Outcome]:
    """Train with frozen scales, and in float32.

    Args:
        problem: what is trained.
        way: one of `WAYS`.
        steps: after the first `WARM`.
        change: makes the batches of these steps, in place, what they are in a situation.

    Returns:
        What is said of every situation, and both outcomes.
    """
    batches = part(problem.draw(WARM + steps), WARM)
    change(batches)
    ready, wide = prepare(problem, way), prepare(problem, "float32")
    calibration, run_frozen = ready.calibration, ready.run_frozen
    assert calibration is not None and run_frozen is not None
    plain, dynamic = wide.run(wide.state, batches), ready.run(ready.state, batches)
    ours = run_frozen(calibration.freeze(ready.state), batches)
    losses = [held_out_loss(problem, x.state.state.params, way) for x in (ours, dynamic)]
    reference = held_out_loss(problem, plain.state.state.params, "float32")
    drifts = calibration.guard(ours.state)
    checks = {
        "gap": 100 * (losses[0] / reference - 1),
        "finite": bool(ours.finite.all()),
        "(dynamic gap, %)": 100 * (losses[1] / reference - 1),
        "(step error)": float(ours.step_error.max()),
        "(dynamic step error)": float(dynamic.step_error.max()),
        "(step error at the end)": float(ours.step_error[-1]),
        "(headroom)": float(ours.headroom.min()),
        "(left their band)": float(sum(d.kind != "zero" for d in drifts)),
    }
    return checks, ours, plain
