"""Every optimizer of optax with its state and the master weights in scaled float16.

    python -m benchmarks.accuracy.optimizers  # all optimizers, then the alternatives
    python -m benchmarks.accuracy.optimizers --optimizers optax.adam contrib.muon --problems digits
    python -m benchmarks.accuracy.optimizers --parts alternatives

Part `optimizers` compares float32 with a step through `scalify` that computes in float16 and stores
float16: the weights and the whole state of `jsa.optim.low_precision(optimizer)`. Each optimizer has
a learning rate of its own, chosen in float32, and both end with the same cosine decay. The loss is
that of held-out data; `noise` is how far float32 is from itself when nothing but its initial
weights are rounded to float16. Part `alternatives` trains AdamW with what is usually done instead:
see `benchmarks/accuracy/alternatives.py`. Every finished cell is kept in
`benchmarks/results/optimizers-jax<version>.json`: a run that was stopped goes on with the next one.
"""

import argparse
import functools
import inspect
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy import alternatives
from benchmarks.accuracy.small_problems import (
    PROBLEMS,
    Problem,
    TrainState,
    bytes_per_parameter,
    evaluate,
    make_run,
    scaled_state,
)
from benchmarks.cells import Cells, Store
from benchmarks.paths import RESULTS

LIMIT = 1.0  # how far the loss may be from float32, in %
FIRST_RATES = (1e-3, 1e-2, 1e-1, 1.0)
NEAR_BEST = 1.1  # the smallest rate whose loss is this near to the best one's is taken
Make = Callable[[Any], optax.GradientTransformation]

SKIPPED = {
    "optax.scale_by_learning_rate": "a part of the others",
    "optax.scale_by_rprop": "a part of rprop",
    "optax.lookahead": "takes pairs of parameters; a wrapper",
    "contrib.scale_by_madgrad": "a part of madgrad",
    "contrib.schedule_free": "a wrapper: run as schedule_free_adamw and schedule_free_sgd",
    "contrib.dpsgd": "takes the gradient of every example by itself",
}
# Arguments that the optimizer cannot do without, or without which it is another one at this size.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "optax.adafactor": {"min_dim_size_to_factor": 32},
    "optax.lbfgs": {"linesearch": None},
    "contrib.galore": {"rank": 16, "update_proj_gap": 50},
    "contrib.acprop": {"eps": 1e-4},  # divides by the last step's moment, which begins at 0
}
# Optimizers without an argument `learning_rate`.
OTHERS: dict[str, Make] = {
    "optax.polyak_sgd": lambda rate: optax.polyak_sgd(max_learning_rate=rate),
    "contrib.mechanize": lambda rate: contrib.mechanize(optax.adam(rate)),
    "contrib.sam": lambda rate: contrib.sam(
        optax.adam(rate), optax.chain(contrib.normalize(), optax.sgd(0.05))
    ),
    # These begin with steps of 1e-6 of the weights, which float16 weights (2^-11) cannot take.
    "contrib.dog:1e-3": lambda rate: contrib.dog(rate, init_step=("heuristic", 1e-3)),
    "contrib.dowg:1e-3": lambda rate: contrib.dowg(rate, init_estim_sq_dist=1e-3),
    "contrib.mechanize:1e-2": lambda rate: contrib.mechanize(optax.adam(rate), s_init=1e-2),
    "contrib.prodigy:1e-3": lambda rate: contrib.prodigy(rate, estim_lr0=1e-3),
}
# What `update` takes besides gradients and parameters.
EXTRA = {
    "optax.polyak_sgd": "value",
    "contrib.momo": "value",
    "contrib.momo_adam": "value",
    "contrib.sophia": "obj_fn",
}
# These relate the parameters to what they did before: their updates may not be changed afterwards.
NO_DECAY = ("contrib.schedule_free_adamw", "contrib.schedule_free_sgd", "contrib.sam")


# The optimizers


@functools.cache
def find_optimizers() -> dict[str, Make]:
    """Return `make(rate)` of all functions of optax that take a `learning_rate`, less `SKIPPED`."""
    found = {}
    for module in (optax, contrib):
        for name in dir(module):
            function = getattr(module, name)
            key = f"{module.__name__.rpartition('.')[2]}.{name}"
            if not inspect.isfunction(function) or name.startswith("_") or key in SKIPPED:
                continue
            if "learning_rate" in inspect.signature(function).parameters:
                arguments = ARGUMENTS.get(key, {})
                found[key] = lambda rate, f=function, a=arguments: f(learning_rate=rate, **a)
    return found | OTHERS


def make_optimizer(name: str, rate: Any, steps: int) -> optax.GradientTransformation:
    """Return an optimizer whose updates fade out along a cosine."""
    optimizer = find_optimizers()[name](rate)
    if name in NO_DECAY:
        return optimizer
    return optax.chain(optimizer, optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, steps)))


# Training


def make_update(optimizer: Any, loss_fn: Callable, extra: str | None, apply: Callable) -> Callable:
    """Return the step `(state, batch) -> (state, loss, skipped)`, the same in both precisions."""
    optimizer = optax.with_extra_args_support(optimizer)

    def update(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        everything = {"value": loss, "obj_fn": lambda params: loss_fn(params, batch)}
        arguments = {name: value for name, value in everything.items() if name == extra}
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **arguments)
        return TrainState(apply(state.params, updates), opt_state), loss, jnp.int32(0)

    return update


def train_float32(name: str, problem: Problem, steps: int) -> Callable:
    """Return `train(params, batches, rate) -> held-out loss`, compiled once for all rates."""
    loss_fn = problem.make_loss(jnp.float32)
    held_out = problem.held_out()

    @jax.jit
    def train(params: Any, batches: Any, rate: jax.Array) -> jax.Array:
        optimizer = make_optimizer(name, rate, steps)
        update = make_update(optimizer, loss_fn, EXTRA.get(name), optax.apply_updates)
        run = make_run(update)
        state = run(TrainState(params, optimizer.init(params)), batches).state
        return loss_fn(state.params, held_out)

    return train


def choose_rate(train: Callable[[float], float]) -> float:
    """Return the smallest learning rate whose loss is near the best one's."""
    losses = {rate: train(rate) for rate in FIRST_RATES}

    def best() -> float:
        return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else 1e9)

    while best() in (min(losses), max(losses)) and len(losses) < len(FIRST_RATES) + 2:
        rate = best() / 10 if best() == min(losses) else best() * 10
        losses[rate] = train(rate)
    centre = best()
    losses |= {rate: train(rate) for rate in (centre / 3, centre * 3)}
    near = [rate for rate in losses if losses[rate] <= NEAR_BEST * losses[best()]]
    return float(f"{min(near):.1g}")


def train_ours(
    name: str, problem: Problem, rate: float, seeds: Sequence[int], steps: int
) -> dict[str, Any]:
    """Train with everything in float16: losses, the first bad step or -1, bytes per parameter."""
    loss_fn = problem.make_loss(jnp.float16)
    optimizer = jsa.optim.low_precision(make_optimizer(name, rate, steps))
    update = make_update(optimizer, loss_fn, EXTRA.get(name), jsa.optim.apply_updates)
    run = make_run(jsa.scalify(update))
    losses, bad, size = [], [], 0.0
    for seed in seeds:
        state = scaled_state(optimizer, problem.init(seed))
        size = bytes_per_parameter(state)
        outcome = run(state, problem.batches(seed, steps))
        losses.append(evaluate(problem, outcome.state.params, jnp.float16))
        bad.append(int(outcome.first_bad_step))
    return {"losses": losses, "first_bad_step": max(bad), "bytes": size}


def compare(name: str, problem: Problem, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Train one optimizer in float32 and in scaled float16."""
    train = train_float32(name, problem, steps)
    batches = {seed: problem.batches(seed, steps) for seed in seeds}
    trials = [(problem.init(seed), batches[seed]) for seed in seeds[:2]]
    rate = choose_rate(lambda rate: max(float(train(*trial, rate)) for trial in trials))
    first = trials[0]
    plain, noisy = [], []
    for seed in seeds:
        params = problem.init(seed)
        plain.append(float(train(params, batches[seed], rate)))
        rounded = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), params)
        noisy.append(float(train(rounded, batches[seed], rate)))
    untrained = float(jax.jit(problem.make_loss(jnp.float32))(first[0], problem.held_out()))
    state = make_optimizer(name, rate, steps).init(first[0])
    cell = {"rate": rate, "untrained": untrained, "float32": plain, "rounded": noisy}
    cell["float32_bytes"] = bytes_per_parameter(TrainState(first[0], state))
    try:
        return cell | train_ours(name, problem, rate, seeds, steps)
    except Exception as error:  # noqa: BLE001  (a row of the table that says so)
        return cell | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


# Results


def mean_gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return how far the mean of some losses is from that of others, in %."""
    return 100 * (statistics.fmean(losses) / statistics.fmean(reference) - 1)


def worst_gap(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest distance of a seed, in %."""
    gaps = [100 * (a / b - 1) for a, b in zip(losses, reference, strict=True)]
    return max(gaps, key=lambda gap: math.inf if math.isnan(gap) else abs(gap))


def passes(cell: dict[str, Any]) -> bool:
    """Tell whether a cell is within the limit and was finite at every step."""
    if "error" in cell or cell["first_bad_step"] >= 0:
        return False
    return abs(mean_gap(cell["losses"], cell["float32"])) <= LIMIT


def summarise(cells: dict[str, dict], problem: str) -> Table:
    """Compare float16 with float32, optimizer by optimizer."""
    table = Table(box=box.SIMPLE, title=f"{problem}: scaled float16 against float32")
    table.add_column("optimizer", no_wrap=True)
    for column in ("rate", "float32", "float16", "ratio", "worst", "noise", "bytes", "(f32)", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for key in sorted(cells):
        name, _, of = key.rpartition("/")
        if of != problem or name.startswith("alternatives"):
            continue
        cell = cells[key]
        row = [name, f"{cell['rate']:g}", f"{statistics.fmean(cell['float32']):.4f}"]
        if "error" in cell:
            table.add_row(*row, "", "", "", "", "", "", f"FAIL {cell['error'][:60]}")
            continue
        table.add_row(
            *row,
            f"{statistics.fmean(cell['losses']):.4f}",
            f"{1 + mean_gap(cell['losses'], cell['float32']) / 100:.4f}",
            f"{worst_gap(cell['losses'], cell['float32']):+.2f}%",
            f"{mean_gap(cell['rounded'], cell['float32']):+.2f}%",
            f"{cell['bytes']:.2f}",
            f"{cell['float32_bytes']:.2f}",
            "pass" if passes(cell) else "FAIL",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, store it and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = sorted(find_optimizers())
    parts = ("optimizers", "alternatives")
    add("--parts", nargs="+", choices=parts, default=list(parts))
    add("--optimizers", nargs="+", choices=names, default=names, metavar="NAME")
    add("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    add("--steps", type=int, help="(default: those of the problem)")
    add("--fresh", action="store_true", help="train what was trained before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be positive, got {options.steps}")

    console = Console() if sys.stdout.isatty() else Console(width=140)
    store = Store(options.out / f"optimizers-jax{jax.__version__}.json")
    cells = Cells(store, options.fresh, console)
    for part, name in itertools.product(options.parts, options.problems):
        problem = PROBLEMS[name]
        steps = options.steps or problem.steps
        arguments = problem, options.seeds, steps
        if part == "optimizers":
            tasks = {
                f"{key}/{name}": functools.partial(compare, key, *arguments)
                for key in options.optimizers
            }
        else:
            tasks = {
                f"alternatives/{variant}/{name}": functools.partial(
                    alternatives.train, variant, *arguments
                )
                for variant in alternatives.VARIANTS
            }
        settings = {"steps": steps, "seeds": options.seeds, "optax": optax.__version__}
        cells.add(tasks, settings)
    results = cells.run()
    for name in options.problems:
        if "optimizers" in options.parts:
            console.print(summarise(results, name))
    for name in options.problems:
        if "alternatives" in options.parts:
            console.print(alternatives.summarise(results, name))
    for name, reason in SKIPPED.items():
        console.print(f"not run: {name}: {reason}")


if __name__ == "__main__":
    main()
