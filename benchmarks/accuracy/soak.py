"""20,000 steps of AdamW with everything in float16: does any part of the state leave its range?

    python -m benchmarks.accuracy.soak  # the GPT of `small_problems`, 5 ways, ...
    python -m benchmarks.accuracy.soak --ways float32 gradient --problems digits --steps 2000

Weights, activations, gradients and both moments are float16; weights are rounded stochastically,
since an update of less than half their spacing is lost otherwise, weight decay first of all (a way
`nearest` shows it). The ways differ in who chooses the scales of the state:

* `gradient`: nobody looks at it. Moments follow the scale of their gradient, weights keep theirs.
* `gradient+rescale`: besides, `dynamic_rescale` of the weights every 100 steps.
* `rescale`: AdamW's arithmetic in float32 and no `jsa.optim`; `dynamic_rescale` of the whole state
  every 100 steps, weights and first moments to RMS 1, second moments to a maximum of 2^10. From one
  rescale to the next the state keeps its scales (`match_scales`): the larger of two scales, which
  `scalify` gives a sum, would lift moments to where their gradients' scales are. Moments begin as
  zeros, which have no scale to keep, so the first 100 steps are free.
* `statistic`: the default of `jsa.optim.low_precision`, moments are rescaled at every step.
* `average`: `gradient`, and an average of the weights in float16, `jsa.optim.ema(0.9999)`, beside
  one of the same weights in float32: how far apart are they, and their losses?

Each step's state is looked at on the device: the first value that is not finite is reported. RMS
and maximum of the data of every leaf are stored every 500 steps, before they are rescaled, in
`benchmarks/results/soak-jax<version>.json`, with the rest of the finished cells; the plot is
`soak-<problem>.png` beside it. What else may happen to a state is in
`benchmarks/accuracy/situations.py`, with frozen scales in `tails.py`, and is run at the end:

    python -m benchmarks.accuracy.soak --ways --situations loss-spike dead-layer  # these alone
"""

import argparse
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy import frozen_runs, situations, tails
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
from examples.gpt.report import ProgressLine
from examples.gpt.step import astype

WAYS = ("float32", "nearest", "gradient", "gradient+rescale", "rescale", "statistic", "average")
LIMIT = 1.0  # how far the loss may be from float32, in %
EVERY = 100  # steps from one rescale to the next
LOOK_EVERY = 500  # steps from one line of the history to the next
NU_TARGET = 2.0**10
LEARNING_RATES = {"digits": 1e-3, "gpt": 3e-3}
WEIGHT_DECAY = 0.1
B2 = 0.999
DECAY = 0.9999  # of the average
PyTree = Any


def make_optimizer(problem: Problem, steps: int) -> optax.GradientTransformation:
    """Return AdamW with a warm-up from 0 and a cosine decay to a tenth."""
    rate = LEARNING_RATES[problem.name]
    warm_up = max(steps // 40, 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm_up, steps, rate / 10)
    return optax.adamw(schedule, b2=B2, weight_decay=WEIGHT_DECAY)


class Averages(NamedTuple):
    """An average of the weights in float16, and what it ought to be."""

    average: PyTree
    reference: PyTree


class Way(NamedTuple):
    """How a state is made, trained and rescaled; `first_update` is the step up to a rescale."""

    first_state: Callable
    update: Callable
    rescale: Callable = lambda state: state
    first_update: Callable | None = None


def make_way(way: str, problem: Problem, steps: int) -> Way:
    """Return the `Way` of a name."""
    plain = make_optimizer(problem, steps)
    compute = jnp.float32 if way == "float32" else jnp.float16
    loss_fn = problem.make_loss(compute)
    policy = "statistic" if way == "statistic" else "gradient"
    optimizer = jsa.optim.low_precision(plain, policy=policy)
    apply_updates = functools.partial(
        jsa.optim.apply_updates,
        policy=policy,
        rounding="nearest" if way in ("float32", "nearest") else "stochastic",
    )

    def key_of(state: TrainState) -> jax.Array:
        return jax.random.fold_in(jax.random.key(0), state.opt_state[0].count)

    def ours(state: TrainState, grads: PyTree) -> TrainState:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(apply_updates(state.params, updates, key=key_of(state)), opt_state)

    narrow_average = jsa.optim.ema(DECAY)
    wide_average = jsa.optim.ema(DECAY, jnp.float32)

    def averaging(state: TrainState, grads: PyTree) -> TrainState:
        averages = state.opt_state[-1]
        params, opt_state = ours(state._replace(opt_state=state.opt_state[:-1]), grads)
        average = narrow_average.update(params, averages.average)[1]
        reference = wide_average.update(params, averages.reference)[1]
        return TrainState(params, (*opt_state, Averages(average, reference)))

    def wide(state: TrainState, grads: PyTree) -> TrainState:
        grads, (params, opt_state) = astype((grads, state), jnp.float32)
        updates, opt_state = plain.update(grads, opt_state, params)
        params = apply_updates(state.params, updates, key=key_of(state))
        return TrainState(params, astype(opt_state, compute))

    apply = {"float32": wide, "rescale": wide, "average": averaging}.get(way, ours)

    def update(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return apply(state, grads), loss, jnp.int32(0)

    def hold(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array, jax.Array]:
        new, loss, skipped = update(state, batch)
        return jsa.match_scales(new, state), loss, skipped

    if way == "float32":
        return Way(lambda params: TrainState(params, plain.init(params)), update)
    if way == "rescale":

        def first_state(params: PyTree) -> TrainState:
            return jsa.as_scaled_array(scaled_state(plain, params), dtype=jnp.float16)

        return Way(first_state, jsa.scalify(hold), rescale, jsa.scalify(update))
    first_state = functools.partial(scaled_state, optimizer)
    if way == "average":

        def with_averages(params: PyTree) -> TrainState:
            state = first_state(params)
            made = Averages(narrow_average.init(state.params), wide_average.init(state.params))
            return state._replace(opt_state=(*state.opt_state, made))

        return Way(with_averages, jsa.scalify(update))
    if way == "gradient+rescale":
        return Way(first_state, jsa.scalify(update), rescale_weights)
    return Way(first_state, jsa.scalify(update))


def rescale_weights(state: TrainState) -> TrainState:
    """Rescale the weights to RMS 1."""
    return state._replace(params=jsa.dynamic_rescale(state.params))


def rescale(state: TrainState) -> TrainState:
    """Rescale a whole state: RMS 1, but for second moments, whose maximum comes near the top."""

    def by_role(path: tuple, leaf: Any) -> Any:
        if is_second_moment(path):
            return jsa.dynamic_rescale(leaf, "max", NU_TARGET)
        return jsa.dynamic_rescale(leaf)

    return jax.tree_util.tree_map_with_path(by_role, state, is_leaf=is_scaled)


def is_second_moment(path: tuple) -> bool:
    """Tell whether a leaf of the state belongs to `nu`."""
    return any(getattr(key, "name", None) == "nu" for key in path)


def is_scaled(leaf: Any) -> bool:
    """Tell whether a leaf is a `ScaledArray`."""
    return isinstance(leaf, jsa.ScaledArray)


# What is looked at


@jax.jit
def _sizes(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    wide = [x.astype(jnp.float32) for x in arrays]
    powers = [jnp.maximum(jnp.abs(x).max(), 1e-30) for x in wide]  # squares may not underflow
    rms = [jnp.sqrt(jnp.mean((x / p) ** 2)) * p for x, p in zip(wide, powers, strict=True)]
    return rms, [jnp.abs(x).max() for x in wide]


def look(state: TrainState) -> dict[str, tuple[float, float]]:
    """Return log2 of RMS and maximum of the data of each leaf with a shape; of zeros, -inf."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_scaled)
    names, arrays = [], []
    for path, leaf in leaves:
        data = leaf.data if is_scaled(leaf) else leaf
        if data.ndim and jnp.issubdtype(data.dtype, jnp.floating):
            names.append(name_of(path))
            arrays.append(data)
    rms, largest = _sizes(arrays)
    log = lambda x: round(math.log2(x), 2) if 0 < x < math.inf else float(x or -math.inf)  # noqa: E731
    return {
        name: (log(float(r)), log(float(m))) for name, r, m in zip(names, rms, largest, strict=True)
    }


def name_of(path: tuple) -> str:
    """Return a leaf's name: `weights`, `mu`, `nu` or `average` and where it is in the model."""
    keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in path]
    kinds = ("mu", "nu", *Averages._fields)
    kind = next((key for key in kinds if key in keys), "weights")
    first = {"weights": "params"} | dict.fromkeys(Averages._fields, "ema")
    start = keys.index(first.get(kind, kind)) + 1
    return "/".join([kind, *keys[start:]])


def soak(way: str, problem: Problem, seed: int, steps: int, console: Console) -> dict[str, Any]:
    """Train one cell.

    Returns:
        The held-out loss, the mean training loss of the last chunk, the first bad step or -1, bytes
        per parameter, and for each leaf log2 of RMS and maximum of its data every `LOOK_EVERY`
        steps. If weights are averaged, what `compare_averages` says.
    """
    made = make_way(way, problem, steps)
    run, rescale_state = make_run(made.update), jax.jit(made.rescale)
    first_run = make_run(made.first_update) if made.first_update else run
    state = made.first_state(problem.init(seed))
    size = bytes_per_parameter(without_reference(state))
    batches = problem.batches(seed, steps)
    history: dict[str, list] = {}
    bad, losses, started = -1, np.zeros(1), time.monotonic()
    with ProgressLine(f"{way} {problem.name}", steps, console) as progress:
        for start in range(0, steps, EVERY):
            chunk = jax.tree.map(lambda x: x[start : start + EVERY], batches)  # noqa: B023
            state, chunk_losses, chunk_bad, _ = (run if start else first_run)(state, chunk)
            if bad < 0 <= int(chunk_bad):
                bad = start + int(chunk_bad)
            losses = np.asarray(chunk_losses)
            done = start + len(losses)
            if done % LOOK_EVERY == 0 or done == steps:
                for name, sizes in look(without_reference(state)).items():
                    history.setdefault(name, []).append(sizes)
            state = rescale_state(state)
            tokens = done * next(iter(jax.tree.leaves(batches)))[0].size
            progress(done, float(losses.mean()), tokens / (time.monotonic() - started))
    compute = jnp.float32 if way == "float32" else jnp.float16
    return {
        "loss": evaluate(problem, state.params, compute),
        "train_loss": float(losses.mean()),
        "first_bad_step": bad,
        "bytes": size,
        "history": history,
    } | compare_averages(state, problem)


def without_reference(state: TrainState) -> TrainState:
    """Return a state less the average in float32, which is there to compare with."""
    averages = averages_of(state)
    if averages is None:
        return state
    kept = averages._replace(reference=())
    return state._replace(opt_state=(*state.opt_state[:-1], kept))


def averages_of(state: TrainState) -> Averages | None:
    """Return the averages of a state, if it has any."""
    last = state.opt_state[-1] if isinstance(state.opt_state, tuple) else None
    return last if isinstance(last, Averages) else None


def compare_averages(state: TrainState, problem: Problem) -> dict[str, Any]:
    """Return the held-out losses of the averages in float16 and float32, and their distance.

    It is the RMS of the differences over that of the weights.
    """
    averages = averages_of(state)
    if averages is None:
        return {}
    average, reference = (jsa.asarray(a.ema, jnp.float32) for a in averages)
    loss = evaluate(problem, average, jnp.float32)
    pairs = list(zip(jax.tree.leaves(average), jax.tree.leaves(reference), strict=True))
    distance = sum(float(jnp.sum((a - r) ** 2)) for a, r in pairs)
    size = sum(float(jnp.sum(r**2)) for _, r in pairs)
    return {
        "average": {
            "loss": loss,
            "reference_loss": evaluate(problem, reference, jnp.float32),
            "distance": math.sqrt(distance / size),
        }
    }


# Results


def spread(history: dict[str, list], kind: str, column: int, skip: int) -> tuple[float, float]:
    """Return the least and the largest log2 of a kind of leaf, less zeros and the first lines."""
    rows = itertools.chain.from_iterable(
        sizes[skip:] for name, sizes in history.items() if name.startswith(kind + "/")
    )
    values = [row[column] for row in rows if math.isfinite(row[column])]
    return (min(values), max(values)) if values else (math.nan, math.nan)


def summarise(cells: dict[str, dict], problem: str, ways: Sequence[str]) -> Table:
    """Compare the ways with float32, and say where their states have been."""
    table = Table(box=box.SIMPLE, title=f"{problem}: log2 of the data's RMS and maximum")
    table.add_column("way", no_wrap=True)
    columns = ("loss", "gap", "", "bytes", "not finite", "weights RMS", "mu RMS", "mu max")
    for column in (*columns, "nu RMS", "nu max"):
        table.add_column(column, justify="right", no_wrap=True)
    reference = cells.get(f"float32/{problem}")
    for way in ways:
        cell = cells[f"{way}/{problem}"]
        gap = math.nan if reference is None else 100 * (cell["loss"] / reference["loss"] - 1)
        good = abs(gap) <= LIMIT and cell["first_bad_step"] < 0
        ranges = [
            "{:.1f} .. {:.1f}".format(*spread(cell["history"], kind, column, 1))
            for kind, column in (("weights", 0), ("mu", 0), ("mu", 1), ("nu", 0), ("nu", 1))
        ]
        table.add_row(
            way,
            f"{cell['loss']:.4f}",
            f"{gap:+.2f}%",
            "pass" if good else "FAIL",
            f"{cell['bytes']:.2f}",
            "never" if cell["first_bad_step"] < 0 else f"step {cell['first_bad_step']}",
            *ranges,
        )
    return table


def average_line(cell: dict[str, Any]) -> str:
    """Say how far the average in float16 is from that in float32."""
    found = cell["average"]
    gap = 100 * (found["loss"] / found["reference_loss"] - 1)
    return (
        f"average of the weights in float16: loss {found['loss']:.4f}, {gap:+.3f}% from that of "
        f"the average in float32, which is {100 * found['distance']:.3f}% away"
    )


def leaf_table(history: dict[str, list], title: str) -> Table:
    """One line a leaf: the range of log2 RMS and of log2 maximum, and where they ended."""
    table = Table(box=box.SIMPLE, title=title)
    table.add_column("leaf", no_wrap=True)
    for column in ("RMS", "at the end", "max", "at the end", "largest drift"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, sizes in history.items():
        rms, largest = (
            [x for x in values if math.isfinite(x)] for values in zip(*sizes, strict=True)
        )
        if not rms:
            table.add_row(name, "0", "", "0", "", "")
            continue
        table.add_row(
            name,
            f"{min(rms):+.1f} .. {max(rms):+.1f}",
            f"{rms[-1]:+.1f}",
            f"{min(largest):+.1f} .. {max(largest):+.1f}",
            f"{largest[-1]:+.1f}",
            f"{max(map(abs, rms[1:]), default=0):.1f}",
        )
    return table


def plot(cells: dict[str, dict], problem: str, ways: Sequence[str], path: Path) -> None:
    """Draw log2 RMS and log2 maximum of every leaf over time: a row a way, a column a kind."""
    from matplotlib.figure import Figure

    kinds = ("weights", "mu", "nu")
    figure = Figure(figsize=(13, 2.6 * len(ways)), layout="constrained")
    axes = figure.subplots(len(ways), len(kinds), sharex=True, squeeze=False)
    for row, way in zip(axes, ways, strict=True):
        history = cells[f"{way}/{problem}"]["history"]
        for ax, kind in zip(row, kinds, strict=True):
            for name, sizes in history.items():
                if name.startswith(kind + "/"):
                    rms, largest = np.array(sizes).T
                    steps = LOOK_EVERY * np.arange(1, len(rms) + 1)
                    ax.plot(steps, rms, color="#0072B2", linewidth=0.7)
                    ax.plot(steps, largest, color="#D55E00", linewidth=0.7)
            if way != "float32":
                ax.axhspan(-24, -14, color="#eeeeee")  # subnormal
                ax.axhline(math.log2(65504), color="black", linewidth=1)
                ax.set_ylim(-26, 18)
            ax.set_title(f"{way}: {kind}", fontsize=9)
            ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("step")
    figure.suptitle(
        f"{problem}: log2 of the data of every leaf, RMS (blue) and maximum (red); "
        "grey is subnormal in float16, the line its largest number"
    )
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, store it, print the tables and draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ways", nargs="*", choices=WAYS, metavar="WAY", default=list(WAYS))
    add("--problems", nargs="+", choices=PROBLEMS, default=["gpt"])
    add(
        "--situations",
        nargs="*",
        choices=[*situations.SITUATIONS, *tails.TAILS],
        metavar="NAME",
        default=[*situations.SITUATIONS, *tails.TAILS],
    )
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=20_000, help="(default: %(default)s)")
    add("--leaves", action="store_true", help="print a line for every leaf")
    add("--fresh", action="store_true", help="train what was trained before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be positive, got {options.steps}")

    console = Console() if sys.stdout.isatty() else Console(width=160)
    store = Store(options.out / f"soak-jax{jax.__version__}.json")
    cells = Cells(store, options.fresh, console)
    for way, name in itertools.product(options.ways, options.problems):
        task = functools.partial(soak, way, PROBLEMS[name], options.seed, options.steps, console)
        settings = {
            "steps": options.steps,
            "seed": options.seed,
            "learning_rate": LEARNING_RATES[name],
            "weight_decay": WEIGHT_DECAY,
            "b2": B2,
            "rounding": "stochastic",
        }
        cells.add({f"{way}/{name}": task}, settings)
    for name in options.situations:
        if name in situations.SITUATIONS:
            ways = {policy: situations.SITUATIONS[name] for policy in ("statistic", "gradient")}
            settings: dict[str, Any] = {"steps": situations.STEPS}
        else:
            ways, settings = dict.fromkeys(frozen_runs.WAYS, tails.TAILS[name]), tails.settings()
        for way, situation in ways.items():
            task = functools.partial(situation, way)
            cells.add({f"situations/{name}/{way}": task}, settings)
    results = cells.run()
    for name in options.problems if options.ways else ():
        if options.leaves:
            for way in options.ways:
                title = f"{way}/{name}: log2 of the data"
                console.print(leaf_table(results[f"{way}/{name}"]["history"], title))
        console.print(summarise(results, name, options.ways))
        if "average" in options.ways:
            console.print(average_line(results[f"average/{name}"]))
        plot(results, name, options.ways, options.out / f"soak-{name}.png")
    if options.situations:
        console.print(situations.summarise(results))


if __name__ == "__main__":
    main()
