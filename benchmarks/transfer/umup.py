"""u-µP against µP and the standard parametrisation: do learning rates transfer across widths?

    python -m benchmarks.transfer.umup  # everything: hours on two CPU cores
    python -m benchmarks.transfer.umup --parts sweep --widths 64 128 --steps 100
    python -m benchmarks.transfer.umup --parts fp8

Part `sweep` trains a Llama-like decoder of four layers at every width, learning rate (a grid of
factor 2) and parametrisation, on the bytes of the GPT example's text. Part `axes` trains µP and
u-µP for longer, along length, width, depth and batch size (`benchmarks/transfer/axes.py`). Part
`independent` tunes the multipliers of both, one by one (`benchmarks/transfer/independent.py`). Part
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
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cells import Cells, Store
from benchmarks.paths import RESULTS
from benchmarks.transfer import axes, figure4, independent
from benchmarks.transfer.models import batch_of, make_model, trainer
from benchmarks.transfer.operands import rms_of_operands
from benchmarks.transfer.search import (
    TITLES,
    Results,
    Run,
    Setting,
    best,
    find_best,
    key_of,
    losses_of,
    tasks_of,
)

WIDTHS = (64, 128, 256, 512)
FULL_SWEEP = 256  # wider models are trained at the rates next to the best of the width before only
RATES = {  # exponents of 2
    "standard": range(-11, -4),
    "mup": range(-10, -3),
    "umup": range(-4, 3),
}
SEEDS = (0, 1, 2)
FP8_RUNS = ("umup", "umup-fp8")
OUTSIDE = 2.0  # octaves around 1
LIMIT = 0.5  # how far FP8 may be from float32, in %
PARTS = ("sweep", "axes", "independent", "rms", "fp8", "figure4")


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


def sweep(run: Run, names: Iterable[str], settings: Sequence[Setting]) -> Results:
    """Train the whole grid of rates at the smaller widths, and around the best at the others."""
    found: Results = {}
    for name in names:
        start = None
        for setting in settings:
            if start is None or setting.width <= FULL_SWEEP:
                found |= run(tasks_of(name, setting, RATES[name]))
            else:
                found = find_best(run, name, setting, start, found)
            start = best(found, name, setting)[0]
    return found


# Tables and pictures


def sweep_table(cells: Results, name: str, settings: Sequence[Setting]) -> Table:
    """Losses by learning rate and width, the best of each width marked."""
    table = Table(box=box.SIMPLE, title=f"{TITLES[name]}: held-out loss, nats per byte")
    table.add_column("learning rate", justify="right")
    for setting in settings:
        table.add_column(f"width {setting.width}", justify="right")
    for exponent in sorted({e for s in settings for e in losses_of(cells, name, s)}):
        row = []
        for setting in settings:
            loss = losses_of(cells, name, setting).get(exponent)
            mark = " *" if exponent == best(cells, name, setting)[0] else "  "
            row.append("" if loss is None else f"{loss:.4f}{mark}")
        table.add_row(f"2^{exponent}", *row)
    return table


def transfer_table(cells: Results, settings: Sequence[Setting]) -> Table:
    """Where the best learning rate is, and what the one of the smallest width costs the largest."""
    table = Table(box=box.SIMPLE, title="does the learning rate transfer?")
    for column in (
        "parametrisation",
        *(f"best at {s.width}" for s in settings),
        "moves",
        "loss falls",
    ):
        table.add_column(column, justify="right")
    for name in RATES:
        found = [best(cells, name, setting) for setting in settings]
        exponents, losses = zip(*found, strict=True)
        moves = "no" if len(set(exponents)) == 1 else "yes"
        falls = "yes" if all(b < a for a, b in zip(losses, losses[1:])) else "no"
        table.add_row(TITLES[name], *(f"2^{e}: {x:.4f}" for e, x in found), moves, falls)
    return table


def fp8_table(cells: Results, setting: Setting, rate: int) -> Table:
    """Losses in float32 and in FP8, seed by seed."""
    table = Table(box=box.SIMPLE, title=f"u-µP in FP8, width {setting.width}: held-out loss")
    for column in ("seed", "float32", "FP8", "gap", ""):
        table.add_column(column, justify="right")
    rows = [[cells[key_of(n, setting, rate, s)]["loss"] for n in FP8_RUNS] for s in SEEDS]
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


def plot_sweep(cells: Results, settings: Sequence[Setting], path: Path) -> None:
    """Draw loss against learning rate, a line for each width."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, len(RATES), sharey=True, squeeze=False)[0]
    colours = colormaps["viridis"](np.linspace(0.05, 0.7, len(settings)))
    for ax, name in zip(axes, RATES, strict=True):
        for setting, colour in zip(settings, colours, strict=True):
            losses = losses_of(cells, name, setting)
            ax.plot(
                list(losses),
                list(losses.values()),
                "o-",
                color=colour,
                markersize=3,
                label=f"width {setting.width}",
            )
            exponent, loss = best(cells, name, setting)
            ax.plot([exponent], [loss], "*", color=colour, markersize=13)
        ax.set_title(TITLES[name])
        ax.set_xlabel("log2 of the learning rate")
        ax.spines[["top", "right"]].set_visible(False)
    lowest = min(best(cells, name, setting)[1] for name in RATES for setting in settings)
    axes[0].set_ylim(lowest - 0.05, lowest + 1.2)
    axes[0].set_ylabel("held-out loss, nats per byte")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=144)


def plot_rms(cell: dict, path: Path) -> None:
    """Draw the distribution of log2 RMS, at the start and at the end of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.0), layout="constrained")
    axes = figure.subplots(1, len(cell["start"]), sharex=True)
    for ax, kind in zip(axes, cell["start"], strict=True):
        for moment, colour, label in (
            ("start", "#0072B2", "at the start"),
            ("end", "#D55E00", "after training"),
        ):
            logs = list(logs_of(cell[moment][kind]).values())
            ax.hist(logs, np.arange(-5, 5, 0.25), color=colour, alpha=0.6, label=label)
        ax.set_title(kind, fontsize=10)
        ax.set_xlabel("log2 RMS")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("number of tensors")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=144)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--widths", nargs="+", type=int, default=list(WIDTHS))
    add("--steps", type=int, default=240, help="of training (default: %(default)s)")
    add("--axes", nargs="+", choices=list(axes.AXES), default=list(axes.AXES))
    add("--independent-widths", nargs="+", type=int, default=[64], help="(default: 64)")
    add("--figure4-steps", type=int, default=120, help="(default: %(default)s)")
    add("--fp8-width", type=int, default=128, help="(default: %(default)s)")
    add("--fresh", action="store_true", help="run cells again that were finished before")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, store it, print the tables, draw the pictures."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    widths = [*options.widths, *options.independent_widths, options.fp8_width]
    if options.steps < 1 or min(widths) < 16 or any(w % 16 for w in widths):
        parser.error("--steps must be positive, and all of --widths multiples of 16")
    console = Console() if sys.stdout.isatty() else Console(width=140)
    store = Store(options.out / f"umup-jax{jax.__version__}.json")

    def run(tasks: dict, steps: int = 0) -> Results:
        """Run tasks, of which most have their number of steps in their keys."""
        asked = Cells(store, options.fresh, console)
        asked.add(tasks, {"steps": steps})
        return asked.run()

    if "figure4" in options.parts:
        steps = options.figure4_steps
        found = run(figure4.reference_tasks(steps), steps)
        found |= run(figure4.float16_tasks(found, steps), steps)
        found |= run(figure4.seed_tasks(found, steps), steps)
        console.print(figure4.make_table(found))
    if "axes" in options.parts:
        found = axes.search(run, options.axes)
        for axis in options.axes:
            console.print(axes.axis_table(found, axis))
        if "width" in options.axes:
            console.print(axes.seeds_table(found))
        axes.plot(found, options.axes, options.out / "umup-axes.png")
    if "independent" in options.parts:
        for width in options.independent_widths:
            setting = Setting(width)
            console.print(independent.make_table(independent.search(run, setting), setting))
    if not {"sweep", "rms", "fp8"} & set(options.parts):
        return

    # The other parts train at the best learning rate of the smallest width.
    whole = "sweep" in options.parts
    settings = [Setting(w, steps=options.steps) for w in options.widths]
    found = sweep(run, RATES if whole else ["umup"], settings if whole else settings[:1])
    rate = best(found, "umup", settings[0])[0]
    if whole:
        for name in RATES:
            console.print(sweep_table(found, name, settings))
        console.print(transfer_table(found, settings))
        plot_sweep(found, settings, options.out / "umup-sweep.png")
    setting = Setting(options.fp8_width, steps=options.steps)
    if "rms" in options.parts:
        key = f"rms/{setting.width}"
        task = functools.partial(rms_cell, setting.width, rate, options.steps)
        cell = run({key: task}, options.steps)[key]
        console.print(rms_table(cell, setting.width))
        console.print(outside_table(cell, "start"))
        console.print(outside_table(cell, "end"))
        console.print(growth_table(cell))
        plot_rms(cell, options.out / "umup-rms.png")
    if "fp8" in options.parts:
        tasks = [tasks_of(name, setting, [rate], SEEDS) for name in FP8_RUNS]
        console.print(fp8_table(run(tasks[0]) | run(tasks[1]), setting, rate))


if __name__ == "__main__":
    main()
