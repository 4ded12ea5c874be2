"""What else happens to the state of an optimizer in months of training: a part of `soak.py`.

Each situation is a short run of AdamW with everything in float16, next to float32, and a list of
what has to hold; an exact statement is checked for equality of bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.small_problems import (
    PROBLEMS,
    Outcome,
    Problem,
    TrainState,
    evaluate,
    finite_leaves,
    make_run,
    scaled_state,
)
from examples.gpt.step import astype

STEPS = 300
QUIET = 1000  # steps whose gradients are exactly 0
LIMIT = 1.0  # how far the loss may be from float32, in %
RATE = 3e-3
PyTree = Any
Checks = dict[str, Any]


def adamw(rate: Any = RATE) -> optax.GradientTransformation:
    """Return the optimizer of all situations."""
    return optax.adamw(rate, weight_decay=0.1)


def run_ours(
    problem: Problem,
    optimizer: Any,
    params: PyTree,
    batches: PyTree,
    *,
    state: Any = None,
    stochastic: bool = False,
) -> Outcome:
    """Train through `scalify` from `params`, or from a state."""
    run = make_run(jsa.scalify(make_update(problem, optimizer, jnp.float16, stochastic)))
    return run(scaled_state(optimizer, params) if state is None else state, batches)


def run_float32(problem: Problem, optimizer: Any, params: PyTree, batches: PyTree) -> Outcome:
    """Train in float32."""
    run = make_run(make_update(problem, optimizer, jnp.float32))
    return run(TrainState(params, optimizer.init(params)), batches)


def make_update(problem: Problem, optimizer: Any, dtype: Any, stochastic: bool = False) -> Callable:
    """Return the step, the same for both precisions.

    A batch comes with its number and a factor of its loss. Gradients are cast to float32 before
    the optimizer, since `apply_if_finite` wants updates of the dtype of gradients.
    """
    loss_fn = problem.make_loss(dtype)

    def update(state: TrainState, batch: tuple[PyTree, jax.Array, jax.Array]) -> tuple:
        batch, number, factor = batch
        scaled = lambda params: loss_fn(params, batch) * factor  # noqa: E731
        loss, grads = jax.value_and_grad(scaled)(state.params)
        grads = astype(grads, jnp.float32)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jsa.optim.apply_updates(
            state.params,
            updates,
            key=jax.random.fold_in(jax.random.key(0), number),
            rounding="stochastic" if stochastic else "nearest",
        )
        return TrainState(params, opt_state), loss, jnp.int32(0)

    return update


def low_precision(optimizer: Any, policy: str) -> Any:
    """Wrap an optimizer."""
    return jsa.optim.low_precision(optimizer, policy=policy)


def batches_of(problem: Problem, steps: int, factor: Any = 1.0) -> tuple:
    """Return batches, their numbers, and a factor of the loss of each."""
    factors = np.broadcast_to(np.asarray(factor, np.float32), steps)
    return problem.batches(0, steps), np.arange(steps), np.array(factors)


def gap(problem: Problem, ours: Outcome, plain: Outcome) -> float:
    """Return how far the held-out loss is from float32's, in %."""
    reference = evaluate(problem, plain.state.params, jnp.float32)
    return 100 * (evaluate(problem, ours.state.params, jnp.float16) / reference - 1)


def same_bits(a: PyTree, b: PyTree) -> bool:
    """Tell whether two trees hold the same data and scales."""
    return jax.tree.all(jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b))


def finite(outcome: Outcome) -> bool:
    """Tell whether the state was finite after every step, by the flag that the loop keeps."""
    return int(outcome.first_bad_step) < 0 and bool(finite_leaves(outcome.state).all())


def frozen_parameters(policy: str, problem: Problem = PROBLEMS["digits"]) -> Checks:
    """The first layer is frozen: its weights keep their bits, the other learns as in float32."""
    labels = {"hidden": "frozen", "out": "trained"}
    parts = {"frozen": optax.set_to_zero(), "trained": adamw()}
    masked = optax.partition(parts, labels)
    params, batches = problem.init(0), batches_of(problem, STEPS)
    optimizer = low_precision(masked, policy)
    ours = run_ours(problem, optimizer, params, batches)
    first = scaled_state(optimizer, params)
    plain = run_float32(problem, masked, params, batches)
    return {
        "gap": gap(problem, ours, plain),
        "frozen weights keep their bits": same_bits(
            first.params["hidden"], ours.state.params["hidden"]
        ),
        "finite": finite(ours),
    }


def rare_rows(policy: str, problem: Problem | None = None) -> Checks:
    """Rows of an embedding that never occur: no moments, and no change but by weight decay.

    Weight decay is 0.03% a step, less than half the spacing of float16: rounded to nearest it is
    lost, or counts double. So the weights are rounded stochastically.
    """
    problem = problem or embedding_problem()
    params, batches = problem.init(0), batches_of(problem, STEPS)
    optimizer = low_precision(adamw(), policy)
    plain = run_float32(problem, adamw(), params, batches)
    wanted = plain.state.params["embedding"][USED_ROWS:]
    checks: Checks = {}
    for rounding in ("nearest", "stochastic"):
        ours = run_ours(problem, optimizer, params, batches, stochastic=rounding == "stochastic")
        weights = ours.state.params["embedding"].to_array(jnp.float32)[USED_ROWS:]
        ratio = float(jnp.linalg.norm(weights) / jnp.linalg.norm(wanted))
        checks[f"(unused rows, {rounding}, %)"] = 100 * (ratio - 1)
    moments = ours.state.opt_state[0]
    unused = [moments.mu["embedding"].data[USED_ROWS:], moments.nu["embedding"].data[USED_ROWS:]]
    return {
        "gap": gap(problem, ours, plain),
        "moments of unused rows are 0": all(not np.any(np.asarray(x)) for x in unused),
        "unused rows have float32's norm within 1%": abs(100 * (ratio - 1)) < 1,
        "finite": finite(ours),
    } | checks


USED_ROWS, ROWS, CHANNELS = 17, 64, 8


def embedding_problem() -> Problem:
    """Digits again: each of the 64 pixels looks its grey level up in a table of 64 rows."""
    digits = PROBLEMS["digits"]

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        embedding = rng.normal(size=(ROWS, CHANNELS))
        head = rng.normal(size=(64 * CHANNELS, 10)) / np.sqrt(64 * CHANNELS)
        return {
            "embedding": jnp.asarray(embedding, jnp.float32),
            "head": jnp.asarray(head, jnp.float32),
        }

    def make_loss(dtype: Any) -> Callable:
        def loss(params: PyTree, batch: PyTree) -> jax.Array:
            levels, labels = batch
            rows = params["embedding"].astype(dtype)[levels]
            logits = rows.reshape(len(levels), -1) @ params["head"].astype(dtype)
            logits = logits.astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return loss

    def levels(batch: PyTree) -> PyTree:
        return np.asarray(8 * (batch[0] + 1), np.int32), batch[1]

    return Problem(
        "embedding",
        300,
        init,
        make_loss,
        lambda seed, steps: levels(digits.batches(seed, steps)),
        lambda: levels(digits.held_out()),
    )


def zero_gradients(policy: str, problem: Problem = PROBLEMS["digits"]) -> Checks:
    """The gradient is exactly 0 for a thousand steps, then training goes on.

    In these steps weight decay is all that happens: see `rare_rows`.
    """
    factors = np.ones(QUIET + 2 * STEPS)
    factors[STEPS : STEPS + QUIET] = 0
    params, batches = problem.init(0), batches_of(problem, len(factors), factors)
    optimizer = low_precision(adamw(), policy)
    plain = run_float32(problem, adamw(), params, batches)
    nearest, ours = (
        run_ours(problem, optimizer, params, batches, stochastic=stochastic)
        for stochastic in (False, True)
    )
    return {
        "gap": gap(problem, ours, plain),
        "finite": finite(ours) and finite(nearest),
        "(gap, nearest, %)": gap(problem, nearest, plain),
    }


def zero_learning_rate(policy: str, problem: Problem = PROBLEMS["digits"]) -> Checks:
    """The learning rate is 0 for as many steps as are trained after them."""
    schedule = optax.piecewise_constant_schedule(0.0, {})
    schedule = optax.join_schedules([schedule, optax.constant_schedule(RATE)], [STEPS])
    params, batches = problem.init(0), batches_of(problem, 2 * STEPS)
    optimizer = low_precision(adamw(schedule), policy)
    quiet = jax.tree.map(lambda x: x[:STEPS], batches)
    before = run_ours(problem, optimizer, params, quiet)
    ours = run_ours(problem, optimizer, params, batches)
    plain = run_float32(problem, adamw(schedule), params, batches)
    return {
        "gap": gap(problem, ours, plain),
        "weights keep their bits at rate 0": same_bits(
            scaled_state(optimizer, params).params, before.state.params
        ),
        "finite": finite(ours) and finite(before),
    }


def infinite_batch(policy: str, problem: Problem = PROBLEMS["digits"]) -> Checks:
    """Some batches hold an inf: `optax.apply_if_finite`, inside or outside, refuses them."""
    params, (data, numbers, factors) = problem.init(0), batches_of(problem, STEPS)
    images = data[0].copy()
    images[STEPS // 3 :: STEPS // 3, 0, 0] = np.inf
    batches = ((images, data[1]), numbers, factors)
    plain = run_float32(problem, optax.apply_if_finite(adamw(), 5), params, batches)
    inside = low_precision(optax.apply_if_finite(adamw(), 5), policy)
    outside = optax.apply_if_finite(low_precision(adamw(), policy), 5)
    checks: Checks = {}
    gaps = []
    for order, optimizer in (("inside", inside), ("outside", outside)):
        ours = run_ours(problem, optimizer, params, batches)
        gaps.append(gap(problem, ours, plain))
        refused = int(ours.state.opt_state.total_notfinite)
        checks[f"{order}: finite"] = finite(ours)
        checks[f"{order}: refused"] = refused == int(plain.state.opt_state.total_notfinite) > 0
        half = run_ours(
            problem, optimizer, params, jax.tree.map(lambda x: x[: STEPS // 4], batches)
        )
        bad = jax.tree.map(lambda x: x[STEPS // 3 : STEPS // 3 + 1], batches)
        after = run_ours(problem, optimizer, params, bad, state=half.state)
        checks[f"{order}: nothing changes"] = same_values(
            (half.state.params, half.state.opt_state.inner_state),
            (after.state.params, after.state.opt_state.inner_state),
        )
    return {"gap": max(gaps, key=abs)} | checks


def same_values(a: PyTree, b: PyTree) -> bool:
    """Tell whether two trees hold the same values, whatever the scales."""
    return same_bits(jsa.asarray(a, jnp.float32), jsa.asarray(b, jnp.float32))


SITUATIONS: dict[str, Callable[[str], Checks]] = {
    "frozen-parameters": frozen_parameters,
    "rare-rows": rare_rows,
    "zero-gradients": zero_gradients,
    "zero-learning-rate": zero_learning_rate,
    "infinite-batch": infinite_batch,
}


def passes(checks: Checks) -> bool:
    """Tell whether all holds and the loss is near float32's."""
    return abs(checks["gap"]) <= LIMIT and not failures(checks)


def failures(checks: Checks) -> list[str]:
    """Return what does not hold; figures in brackets are no checks."""
    return [k for k, v in checks.items() if v is False]


def summarise(cells: dict[str, Checks]) -> Table:
    """Return a line a situation and policy, or way."""
    table = Table(box=box.SIMPLE, title="situations")
    for column in ("situation", "way", "gap", "", "does not hold", "figures"):
        table.add_column(column, no_wrap=column != "figures")
    for key, checks in cells.items():
        kind, _, rest = key.partition("/")
        if kind != "situations":
            continue
        verdict = "pass" if passes(checks) else "FAIL"
        figures = [f"{k[1:-1]}: {v:+.2f}" for k, v in checks.items() if k.startswith("(")]
        failed = ", ".join(failures(checks))
        gap = f"{checks['gap']:+.2f}%"
        table.add_row(*rest.split("/"), gap, verdict, failed, "; ".join(figures))
    return table
