"""Does the best learning rate stay, along length, width, depth and batch size?

A part of `umup.py`. Along each axis the search starts at the best rate of the setting before and
ends when the rates on both sides of the best are worse, so that µP and u-µP get as many runs, or
nearly. `best` means the least held-out loss; a rate that diverges is worse than any other.

Two CPU cores have trained all axes in six hours; wider models, where a run takes four times as long
at each doubling, are for larger machines.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

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

AXES = {
    "width": [Setting(w) for w in (64, 128, 256)],
    "steps": [Setting(128, steps=n) for n in (240, 1500, 3000)],
    "layers": [Setting(64, layers=n) for n in (2, 4, 8)],
    "batch": [Setting(64, batch=n) for n in (8, 16, 32, 64)],
}
STARTS = {"mup": -7, "umup": 0}  # exponents of 2
SEEDS = (0, 1, 2)  # of the width's best rates; all else has the first


def search(run: Run, axes: Sequence[str]) -> Results:
    """Find the best rate of every setting of some axes; `run` trains what is not stored."""
    cells: Results = {}
    for axis, name in itertools.product(axes, STARTS):
        start = STARTS[name]
        for setting in AXES[axis]:
            cells = find_best(run, name, setting, start, cells)
            start = best(cells, name, setting)[0]
            if axis == "width":
                cells |= run(tasks_of(name, setting, [start], SEEDS))
    return cells


# Tables and a picture


def axis_table(cells: Results, axis: str) -> Table:
    """The best rates along an axis, whether they stay within a factor of 2, and who is ahead."""
    settings = AXES[axis]
    first = settings[0]
    fixed = ", ".join(f"{n} {getattr(first, n)}" for n in first._fields[:4] if n != axis)
    table = Table(box=box.SIMPLE, title=f"best learning rate and its loss along {axis}; {fixed}")
    table.add_column("")
    for setting in settings:
        table.add_column(f"{getattr(setting, axis)}", justify="right")
    table.add_column("stays within 2x", justify="right")
    for name in STARTS:
        found = [best(cells, name, s) for s in settings]
        exponents = [e for e, _ in found]
        stays = "yes" if max(exponents) - min(exponents) <= 1 else "NO"
        table.add_row(TITLES[name], *(f"2^{e}: {loss:.4f}" for e, loss in found), stays)
    ahead = [best(cells, "umup", s)[1] - best(cells, "mup", s)[1] for s in settings]
    verdict = "u-µP <= µP" if max(ahead) <= 0 else "MISSED"
    table.add_row("u-µP - µP", *(f"{a:+.4f}" for a in ahead), verdict)
    numbers = [[len(losses_of(cells, n, s)) for n in STARTS] for s in settings]
    table.add_row("runs, µP and u-µP", *(f"{a} and {b}" for a, b in numbers), "")
    return table


def seeds_table(cells: Results) -> Table:
    """Losses at the best rate of each width: the mean of all seeds, and its standard error."""
    table = Table(box=box.SIMPLE, title=f"at the best rate, mean of {len(SEEDS)} seeds and error")
    table.add_column("")
    for setting in AXES["width"]:
        table.add_column(f"width {setting.width}", justify="right")
    for name in STARTS:
        row = []
        for setting in AXES["width"]:
            exponent = best(cells, name, setting)[0]
            losses = [cells[key_of(name, setting, exponent, s)]["loss"] for s in SEEDS]
            error = statistics.stdev(losses) / math.sqrt(len(losses))
            row.append(f"{statistics.fmean(losses):.4f} ± {error:.4f}")
        table.add_row(TITLES[name], *row)
    return table


def plot(cells: Results, axes: Sequence[str], path: Path) -> None:
    """Draw loss against learning rate, an axis in each column, a setting in each line."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 2 * len(axes), 5), layout="constrained")
    grid = figure.subplots(len(STARTS), len(axes), sharex="row", sharey=True, squeeze=False)
    for (i, name), (j, axis) in itertools.product(enumerate(STARTS), enumerate(axes)):
        ax, settings = grid[i][j], AXES[axis]
        colours = colormaps["viridis"](np.linspace(0.05, 0.7, len(settings)))
        for setting, colour in zip(settings, colours, strict=True):
            losses = losses_of(cells, name, setting)
            label = f"{axis} {getattr(setting, axis)}"
            ax.plot(
                list(losses), list(losses.values()), "o-", color=colour, markersize=3, label=label
            )
            exponent, loss = best(cells, name, setting)
            ax.plot([exponent], [loss], "*", color=colour, markersize=11)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(f"{TITLES[name]}: {axis}", fontsize=10)
        if not i:
            ax.legend(frameon=False, fontsize=8)
    for ax in grid[-1]:
        ax.set_xlabel("log2 of the learning rate")
    for row in grid:
        row[0].set_ylabel("held-out loss, nats per byte")
    figure.savefig(path, dpi=144)
