"""Table 3 of the Scalify paper, at a size for two CPU cores: what does low precision change.

    python -m benchmarks.accuracy.table3  # both parts
    python -m benchmarks.accuracy.table3 --parts short --only fp32 fp16-all

The short part trains every preset with several seeds, the long part a few of them for longer with
Adam's usual b2 = 0.999, which is harder on float16. Every finished cell (part, preset, seed) is a
file in `benchmarks/results/table3/`: a run that was stopped goes on with the next cell, and a cell
whose settings have changed is trained again.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import sys
import time
from pathlib import Path

import jax
import jaxlib
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.paths import RESULTS
from examples.gpt import step
from examples.gpt.config import Config, get_size
from examples.gpt.data import Corpus, load_corpus
from examples.gpt.presets import get_preset
from examples.gpt.report import ProgressLine, clock
from examples.gpt.train import Run, write_text

REFERENCE = "fp32"
# How far the final loss may be from float32, in %. No limit for `fp16-plain`: it is there to fail.
LIMITS = {
    "fp32": 0.0,
    "fp32-scaled": 0.1,
    "fp16-1": 0.5,
    "fp16-2": 0.5,
    "fp16-all": 0.5,
    "fp8-3": 1.0,
    "fp8-4": 1.0,
    "fp8-all": 1.0,
    "fp16-plain": None,
}
LONG_LIMITS = {"fp32": 0.0, "fp16-all": 1.0, "fp8-all": 1.0}
LONG_B2 = 0.999
OPTIMIZER_CONSTANTS = (
    "B1",
    "EPSILON",
    "WEIGHT_DECAY",
    "CLIP_NORM",
    "WARMUP",
    "FINAL_LEARNING_RATE",
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training run of the benchmark."""

    part: str
    run: Run

    @property
    def settings(self) -> dict:
        """What the result depends on: a stored result of other settings is not used."""
        return self.run.settings | {
            "jax": jax.__version__,
            "precision": repr(get_preset(self.run.preset)),
            "optimizer": {name: getattr(step, name) for name in OPTIMIZER_CONSTANTS},
        }


def make_cells(options: argparse.Namespace, corpus: Corpus) -> list[Cell]:
    """Return all runs of both parts, float32 first."""
    size = get_size("tiny")
    parts = {
        "short": (LIMITS, options.seeds, dataclasses.replace(size, steps=options.steps)),
        "long": (
            LONG_LIMITS,
            options.long_seeds,
            dataclasses.replace(size, steps=options.long_steps, b2=LONG_B2),
        ),
    }

    def cell(part: str, preset: str, seed: int, config: Config) -> Cell:
        return Cell(part, Run(preset=preset, config=config, seed=seed, corpus=corpus))

    return [
        cell(part, preset, seed, config)
        for part in parts
        for limits, seeds, config in [parts[part]]
        for preset in limits
        for seed in range(seeds)
    ]


def cell_path(results: Path, cell: Cell) -> Path:
    """Return the file of a finished cell."""
    return results / f"{cell.part}-{cell.run.preset}-{cell.run.seed}.json"


def read_cell(results: Path, cell: Cell) -> dict | None:
    """Return the stored outcome of a cell, if there is one of the same settings."""
    path = cell_path(results, cell)
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    return stored["result"] if stored["settings"] == cell.settings else None


def train_cells(
    cells: list[Cell], outcomes: dict[Cell, dict], results: Path, console: Console
) -> None:
    """Train the cells that have no outcome yet, and store and add it."""
    missing = [cell for cell in cells if cell not in outcomes]
    console.print(f"{len(cells)} cells, {len(cells) - len(missing)} of them finished before")
    steps_left = sum(cell.run.config.steps for cell in missing)
    steps_done, started = 0, time.perf_counter()
    for number, cell in enumerate(missing, 1):
        left = ""
        if steps_done:
            seconds = (time.perf_counter() - started) / steps_done * steps_left
            left = f", about {clock(seconds)} left"
        run = cell.run
        console.print(f"cell {number} of {len(missing)}: {cell.part}, seed {run.seed}{left}")
        with ProgressLine(run.preset, run.config.steps, console) as progress:
            outcomes[cell] = dataclasses.asdict(run.train(progress=progress))
        stored = {"settings": cell.settings, "result": outcomes[cell]}
        write_text(cell_path(results, cell), json.dumps(stored, indent=2) + "\n")
        steps_done += run.config.steps
        steps_left -= run.config.steps


def summarise(part: str, limits: dict, outcomes: dict[Cell, dict]) -> list[dict]:
    """Return a row for each preset of a part: means, gaps in %, and whether the limit is kept."""
    by_preset: dict[str, dict[int, dict]] = {}
    for cell, outcome in outcomes.items():
        if cell.part == part:
            by_preset.setdefault(cell.run.preset, {})[cell.run.seed] = outcome

    def gap(loss: float, reference: float) -> float:
        return 100 * (loss / reference - 1)

    reference = by_preset.get(REFERENCE, {})
    rows = []
    for preset in (name for name in limits if name in by_preset):
        seeds = by_preset[preset]
        losses = {seed: outcome["validation_loss"] for seed, outcome in seeds.items()}
        bad_steps = [o["first_bad_step"] for o in seeds.values() if o["first_bad_step"] is not None]
        mean = float(np.mean(list(losses.values())))
        gap_of_mean = worst_gap = math.nan
        if seeds.keys() <= reference.keys():
            pairs = [gap(loss, reference[s]["validation_loss"]) for s, loss in losses.items()]
            worst_gap = float(max(pairs, key=lambda g: math.inf if math.isnan(g) else abs(g)))
            same = [reference[seed]["validation_loss"] for seed in losses]
            gap_of_mean = gap(mean, float(np.mean(same)))
        limit = limits[preset]
        passed = None
        if limit is not None:
            # A comparison with nan is false: no reference, no pass.
            passed = not bad_steps and (preset == REFERENCE or abs(gap_of_mean) < limit)
        rows.append(
            {
                "part": part,
                "preset": preset,
                "seeds": len(losses),
                "steps": next(c.run.config.steps for c in outcomes if c.part == part),
                "mean_loss": mean,
                "worst_loss": float(np.max(list(losses.values()))),
                "gap_of_mean_percent": gap_of_mean,
                "worst_gap_percent": worst_gap,
                "limit_percent": limit,
                "first_bad_step": min(bad_steps, default=None),
                "step_milliseconds": 1000
                * float(np.median([o["step_seconds"] or math.nan for o in seeds.values()])),
                "state_bytes_per_parameter": next(iter(seeds.values()))[
                    "state_bytes_per_parameter"
                ],
                "passed": passed,
            }
        )
    return rows


def make_table(title: str, rows: list[dict]) -> Table:
    """Return the rows as a table to print.

    Columns: the final loss (mean of the seeds, worst seed), how far the mean and the worst seed are
    from float32, the limit for the mean, the first step with a value in the state that is not
    finite, the time of a step, the bytes of state for each parameter.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("preset", no_wrap=True)
    for name in ("mean", "worst", "gap", "worst gap", "limit", "nan or inf", "ms", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        limit, bad = row["limit_percent"], row["first_bad_step"]
        table.add_row(
            row["preset"],
            f"{row['mean_loss']:.4f}",
            f"{row['worst_loss']:.4f}",
            percent(row["gap_of_mean_percent"]),
            percent(row["worst_gap_percent"]),
            f"{limit}%" if limit else "-",
            "never" if bad is None else f"step {bad}",
            f"{row['step_milliseconds']:.0f}",
            f"{row['state_bytes_per_parameter']:.2f}",
            {True: "pass", False: "FAIL", None: ""}[row["passed"]],
        )
    return table


def percent(value: float) -> str:
    """Return a gap for the table."""
    return f"{value:+.3f}%" if math.isfinite(value) else "-"


def main() -> int:
    """Run the benchmark; the exit status is 1 if a limit was missed."""
    parser = argparse.ArgumentParser(description="Compare the presets of `examples.gpt`.")
    add = parser.add_argument
    add("--parts", nargs="+", choices=("short", "long"), default=["short", "long"])
    add("--only", nargs="+", metavar="PRESET", help="these presets (default: all of each part)")
    add("--steps", type=int, default=300, help="of the short part (default: %(default)s)")
    add("--seeds", type=int, default=3, help="of the short part (default: %(default)s)")
    add("--long-steps", type=int, default=3000, help="(default: %(default)s)")
    add("--long-seeds", type=int, default=1, help="(default: %(default)s)")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args()
    try:
        for name in options.only or []:
            get_preset(name)
        corpus = load_corpus(None, context=get_size("tiny").context)
        cells = make_cells(options, corpus)
    except ValueError as error:
        parser.error(str(error))

    console = Console()
    if not console.is_terminal and console.width < 110:
        console = Console(width=110)
    results = options.out / "table3"
    outcomes = {cell: outcome for cell in cells if (outcome := read_cell(results, cell))}
    chosen = [
        cell
        for cell in cells
        if cell.part in options.parts and cell.run.preset in (options.only or LIMITS)
    ]
    train_cells(chosen, outcomes, results, console)

    summary = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "cpus": os.cpu_count(),
        "rows": [],
    }
    for part, limits in (("short", LIMITS), ("long", LONG_LIMITS)):
        rows = summarise(part, limits, outcomes)
        if not rows:
            continue
        config = next(cell.run.config for cell in outcomes if cell.part == part)
        title = f"{part}: tiny, {config.steps} steps, b2 = {config.b2}"
        console.print(make_table(title, rows))
        summary["rows"] += rows
    write_text(options.out / "table3.json", json.dumps(summary, indent=2) + "\n")
    return 0 if all(row["passed"] is not False for row in summary["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
