"""u-µP against µP and the standard parametrisation: do learning rates transfer across widths?

    python -m benchmarks.transfer.umup  # everything: hours on two CPU cores
    python -m benchmarks.transfer.umup --parts sweep --widths 64 128 --steps 100
    python -m benchmarks.transfer.umup --parts fp8

Part `sweep` trains a Llama-like decoder of four layers at every width, learning rate (a grid of
factor 2) and parametrisation, on the bytes of the GPT example's text. Part `axes` trains µP and
u-µP for longer, along length, width, depth and batch size (`benchmarks/transfer/axes.py`). Part
`rms` looks at what the matmuls of all weights multiply (`benchmarks/transfer/operands.py`), at the
start and at the end of training at u-µP's best learning rate. Part `fp8` trains u-µP with the
matmuls in FP8 that are not critical, by plain casts. Part `figure4` trains small regular and
unit-scaled models in float32 and float16 (`benchmarks/transfer/figure4.py`), at the best of three
learning rates in float32.

What was cut for two CPU cores: the paper's models are 100 times larger; batches here have 16
sequences of 32 bytes, and 240 steps make 1% of its tokens; `sweep` has one seed, and at widths
above 256 only the learning rates around the best. Every finished cell is kept in
`benchmarks/results/umup-jax<version>.json`: a run that was stopped goes on with the next.
"""

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cells import Cells, Store
from benchmarks.paths import RESULTS
from benchmarks.transfer import axes, figure4
from benchmarks.transfer.models import batch_of, make_model, trainer
from benchmarks.transfer.operands import rms_of_operands

WIDTHS = (64, 128, 256, 512)
FULL_SWEEP = 256  # wider models are trained at the rates next to the best of the width before only
RATES = {  # exponents of 2
    "standard": range(-11, -4),
    "mup": range(-10, -3),
    "umup": range(-4, 3),
}
TITLES = {"standard": "standard parametrisation"} | axes.TITLES
SEEDS = (0, 1, 2)
OUTSIDE = 2.0  # octaves around 1
LIMIT = 0.5  # how far FP8 may be from float32, in %
PARTS = ("sweep", "axes", "rms", "fp8", "figure4")


def train_cell(name: str, width: int, exponent: int, seed: int, steps: int) -> dict:
    """Train once, and return the held-out loss."""
    taught = trainer(name, width)
    params, _ = taught.train(2.0**exponent, seed, steps)
    return {"loss": taught.held_out_loss(params)}


def rms_cell(width: int, exponent: int, steps: int) -> dict:
    """Return the RMS of what all matmuls of weights multiply, before and after training."""
    taught = trainer("umup", width)
    moments = {"start": taught.start(0)[0], "end": taught.train(2.0**exponent, 0, steps)[0]}
    loss = make_model("umup", width).loss
    tokens = jnp.asarray(batch_of(0, steps))
    return {
        moment: rms_of_operands(lambda params: loss(params, tokens), params)
        for moment, params in moments.items()
    }


# Tables and pictures


def key_of(name: str, width: int, exponent: int) -> str:
    """Return the key of a cell of the sweep."""
    return f"sweep/{name}/{width}/{exponent}"


def best(cells: dict[str, dict], name: str, width: int) -> tuple[int, float]:
    """Return the exponent of the best learning rate, and its loss."""
    losses = losses_of(cells, name, width)
    finite = {e: loss for e, loss in losses.items() if math.isfinite(loss)}
    exponent = min(finite, key=finite.__getitem__)
    return exponent, finite[exponent]


def losses_of(cells: dict[str, dict], name: str, width: int) -> dict[int, float]:
    """Return the losses of all learning rates that were tried."""
    keys = {e: key_of(name, width, e) for e in RATES[name]}
    return {e: cells[key]["loss"] for e, key in keys.items() if key in cells}


def next_rates(cells: dict[str, dict], name: str, width: int, start: int | None) -> list[int]:
    """Return the learning rates that are to be tried next; none if the best is known.

    All at once at a small width; at others from `start`, until both neighbours of the best have
    been tried.
    """
    tried = losses_of(cells, name, width)
    if start is None:
        wanted = list(RATES[name])
    else:
        centre = best(cells, name, width)[0] if tried else start
        wanted = [e for e in (centre, centre - 1, centre + 1) if e in RATES[name]]
    return [e for e in wanted if e not in tried]


def sweep_table(cells: dict[str, dict], name: str, widths: Sequence[int]) -> Table:
    """Losses by learning rate and width, the best of each width marked."""
    table = Table(box=box.SIMPLE, title=f"{TITLES[name]}: held-out loss, nats a byte")
    table.add_column("learning rate", justify="right")
    for width in widths:
        table.add_column(f"width {width}", justify="right")
    for exponent in RATES[name]:
        row = []
        for width in widths:
            loss = losses_of(cells, name, width).get(exponent)
            mark = " *" if exponent == best(cells, name, width)[0] else "  "
            row.append("" if loss is None else f"{loss:.4f}{mark}")
        table.add_row(f"2^{exponent}", *row)
    return table


def transfer_table(cells: dict[str, dict], widths: Sequence[int]) -> Table:
    """Where the best learning rate is, and what the one of the smallest width costs the largest."""
    table = Table(box=box.SIMPLE, title="does the learning rate transfer?")
    for column in ("parametrisation", *(f"best at {w}" for w in widths), "moves", "loss falls"):
        table.add_column(column, justify="right")
    for name in RATES:
        found = [best(cells, name, width) for width in widths]
        exponents, losses = zip(*found, strict=True)
        moves = "no" if len(set(exponents)) == 1 else "yes"
        falls = "yes" if all(b < a for a, b in zip(losses, losses[1:])) else "no"
        table.add_row(TITLES[name], *(f"2^{e}: {x:.4f}" for e, x in found), moves, falls)
    return table


def fp8_table(cells: dict[str, dict], width: int) -> Table:
    """Losses in float32 and in FP8, seed by seed."""
    table = Table(box=box.SIMPLE, title=f"u-µP in FP8, width {width}: held-out loss")
    for column in ("seed", "float32", "FP8", "gap", ""):
        table.add_column(column, justify="right")
    rows = [[cells[f"fp8/{n}/{width}/{s}"]["loss"] for n in ("umup", "umup-fp8")] for s in SEEDS]
    for seed, losses in (*zip(SEEDS, rows), ("mean", np.mean(rows, 0))):
        gap = 100 * (losses[1] / losses[0] - 1)
        verdict = "pass" if abs(gap) <= LIMIT else "FAIL"
        table.add_row(str(seed), *(f"{x:.4f}" for x in losses), f"{gap:+.2f}%", verdict)
    return table


def rms_table(cell: dict, width: int) -> Table:
    """Least, median and largest log2 RMS of each kind of tensor."""
    table = Table(box=box.SIMPLE, title=f"u-µP, width {width}: log2 RMS, least, median, largest")
    for column in ("tensors", "number", "at the start", "at the end"):
        table.add_column(column, justify="right")
    for kind, values in cell["start"].items():
        row = []
        for moment in ("start", "end"):
            logs = list(logs_of(cell[moment][kind]).values())
            row.append(f"{min(logs):+.1f} {statistics.median(logs):+.1f} {max(logs):+.1f}")
        table.add_row(kind, str(len(values)), *row)
    return table


def outside_table(cell: dict, moment: str, limit: float = OUTSIDE) -> Table:
    """Every tensor outside of 2^±limit, those of all layers together."""
    table = Table(box=box.SIMPLE, title=f"log2 RMS outside of ±{limit:g} at the {moment}")
    for column in ("tensors", "of", "log2 RMS, layer by layer"):
        table.add_column(column)
    for kind, values in cell[moment].items():
        rows: dict[str, list[str]] = {}
        for name, log in logs_of(values).items():
            if abs(log) > limit:
                rows.setdefault(module_of(name), []).append(f"{log:+.1f}")
        for name, logs in rows.items():
            table.add_row(kind, name, " ".join(logs))
    return table


def growth_of(cell: dict, kind: str) -> dict[str, float]:
    """By how many octaves the tensors of a kind have grown, on average over the layers."""
    start, end = (logs_of(cell[moment][kind]) for moment in ("start", "end"))
    grown: dict[str, list[float]] = {}
    for name in start:
        grown.setdefault(module_of(name), []).append(end[name] - start[name])
    means = {name: statistics.mean(octaves) for name, octaves in grown.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def growth_table(cell: dict) -> Table:
    """What grows in training: those that grow most are critical."""
    table = Table(box=box.SIMPLE, title="octaves by which tensors grow, mean over layers")
    table.add_column("tensors")
    for kind in cell["start"]:
        grown = growth_of(cell, kind)
        table.add_row(kind, ", ".join(f"{name} {octaves:+.1f}" for name, octaves in grown.items()))
    return table


def logs_of(values: dict[str, float]) -> dict[str, float]:
    """Return the log2 of those that are not 0."""
    return {name: math.log2(x) for name, x in values.items() if x > 0}


def module_of(name: str) -> str:
    """Return the name of a parameter's module, without the number of its layer."""
    keys = [k for k in name.removesuffix("/value").split("/") if not k.isdigit() and k != "layers"]
    return "/".join(keys[:-1])


def plot_sweep(cells: dict[str, dict], widths: Sequence[int], path: Path) -> None:
    """Draw loss against learning rate, a line for each width."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, len(RATES), sharey=True, squeeze=False)[0]
    colours = colormaps["viridis"](np.linspace(0.05, 0.85, len(widths)))
    for ax, name in zip(axes, RATES, strict=True):
        for width, colour in zip(widths, colours, strict=True):
            losses = losses_of(cells, name, width)
            ax.plot(
                list(losses),
                list(losses.values()),
                "o-",
                color=colour,
                markersize=3,
                label=f"width {width}",
            )
            exponent, loss = best(cells, name, width)
            ax.plot([exponent], [loss], "*", color=colour, markersize=13)
        ax.set_title(TITLES[name])
        ax.set_xlabel("log2 of the learning rate")
        ax.spines[["top", "right"]].set_visible(False)
    lowest = min(best(cells, name, width)[1] for name in RATES for width in widths)
    axes[0].set_ylim(lowest - 0.05, lowest + 1.2)
    axes[0].set_ylabel("held-out loss, nats a byte")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=144)


def plot_rms(cell: dict, path: Path) -> None:
    """Draw the distribution of log2 RMS, at the start and at the end of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.0), layout="constrained")
    axes = figure.subplots(1, len(cell["start"]), sharex=True)
    for ax, kind in zip(axes, cell["start"], strict=True):
        for moment, colour in (("start", "#0072B2"), ("end", "#D55E00")):
            logs = list(logs_of(cell[moment][kind]).values())
            ax.hist(logs, np.arange(-5, 5, 0.25), color=colour, alpha=0.6, label=moment)
        ax.set_title(kind, fontsize=10)
        ax.set_xlabel("log2 RMS")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=144)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--widths", nargs="+", type=int, default=list(WIDTHS))
    add("--steps", type=int, default=240, help="of training (default: %(default)s)")
    add("--axes", nargs="+", choices=list(axes.AXES), default=list(axes.STORED))
    add("--figure4-steps", type=int, default=120, help="(default: %(default)s)")
    add("--fp8-width", type=int, default=128, help="(default: %(default)s)")
    add("--fresh", action="store_true", help="run cells again that were finished before")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, store it, print the tables, draw the pictures."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.steps < 1 or min(options.widths) < 16 or any(w % 16 for w in options.widths):
        parser.error("--steps must be positive, and --widths multiples of 16")
    console = Console() if sys.stdout.isatty() else Console(width=140)
    store = Store(options.out / f"umup-jax{jax.__version__}.json")

    def run(tasks: dict, steps: int = options.steps) -> dict[str, dict]:
        cells = Cells(store, options.fresh, console)
        cells.add(tasks, {"steps": steps})
        return cells.run()

    if "figure4" in options.parts:
        steps = options.figure4_steps
        cells = run(figure4.reference_tasks(steps), steps)
        cells |= run(figure4.float16_tasks(cells, steps), steps)
        cells |= run(figure4.seed_tasks(cells, steps), steps)
        console.print(figure4.make_table(cells))
    if "axes" in options.parts:
        # Their steps are in their keys.
        cells = axes.search(lambda tasks: run(tasks, 0), options.axes)
        for axis in options.axes:
            console.print(axes.axis_table(cells, axis))
        if "width" in options.axes:
            console.print(axes.seeds_table(cells))
        axes.plot(cells, options.axes, options.out / "umup-axes.png")
    if not {"sweep", "rms", "fp8"} & set(options.parts):
        return

    # The other parts train at the best learning rate of the smallest width.
    widths = options.widths if "sweep" in options.parts else options.widths[:1]
    names = RATES if "sweep" in options.parts else ["umup"]
    sweep: dict[str, dict] = {}
    for narrower, width in zip([None, *widths], widths):
        is_full = narrower is None or width <= FULL_SWEEP
        starts = {n: None if is_full else best(sweep, n, narrower)[0] for n in names}
        while tasks := {
            key_of(name, width, e): functools.partial(train_cell, name, width, e, 0, options.steps)
            for name in names
            for e in next_rates(sweep, name, width, starts[name])
        }:
            sweep |= run(tasks)
    rate = best(sweep, "umup", widths[0])[0]
    if "sweep" in options.parts:
        for name in RATES:
            console.print(sweep_table(sweep, name, widths))
        console.print(transfer_table(sweep, widths))
        plot_sweep(sweep, widths, options.out / "umup-sweep.png")
    width = options.fp8_width
    if "rms" in options.parts:
        key = f"rms/{width}"
        cell = run({key: functools.partial(rms_cell, width, rate, options.steps)})[key]
        console.print(rms_table(cell, width))
        console.print(outside_table(cell, "start"))
        console.print(outside_table(cell, "end"))
        console.print(growth_table(cell))
        plot_rms(cell, options.out / "umup-rms.png")
    if "fp8" in options.parts:
        tasks = {
            f"fp8/{name}/{width}/{seed}": functools.partial(
                train_cell, name, width, rate, seed, options.steps
            )
            for name in ("umup", "umup-fp8")
            for seed in SEEDS
        }
        console.print(fp8_table(run(tasks), width))


if __name__ == "__main__":
    main()
