"""Tables of `benchmarks/cost/steps.py`: ratios, times and sizes; `docs/cost.md`."""

import dataclasses
import json
from pathlib import Path

from rich import box
from rich.table import Table

Results = dict[str, dict[str, dict]]  # by model, then by variant

NAMES = {
    "first_call": "trace + lower + compile",
    "hlo": "HLO instructions",
    "fusions": "fusions",
    "step": "step",
    "temporary": "temporary memory",
}

INTRO = """\
# What it costs

What `scalify` adds to the compile time, program size, step time and memory of a training step, on
two CPU cores. Each model is trained with several versions of its step:

- `plain`: the step itself, in float32. All ratios are to this row;
- `dynamic`: the step through `scalify`, with all scales dynamic;
- `static-weights`, for README's recipe only, and as README has it: the weights have static scales,
  the optimizer's state dynamic ones;
- `frozen`: all scales are static, from [`jsa.freeze_scales`](optimizers.md#frozen-scales) of a
  state that was trained for two steps.

In short, for steps in float32 with JAX 0.12:

- With dynamic scales, tracing and compiling take 1.4 to 2.2 times as long, with static scales up
  to 1.3 times. JAX 0.10 takes up to 4.1 and 2.0 times.
- A `lax.scan` over the 12 layers of a GPT shortens tracing and compiling to 5.6 s with dynamic
  scales (8.3 s without it), and to 3.4 s with static scales.
- Steps of more than 70 ms take up to 1.07 times as long as plain ones, shorter steps up to 1.3
  times.
- Temporary memory grows only for the ResNet with dynamic scales, to 1.3 times.

The rows `recipe-…` compare README's recipe (weights, activations and optimizer state in float16,
with the statistics and stochastic rounding of `low_precision`) with a float32 step and float32
AdamW. Tracing and compiling the GPT take 1.7 times as long, 2.3 with dynamic scales and 1.5 with
all scales static. The step times and the temporary memory (up to 7 times) of these rows do not
hold for a GPU: a CPU emulates float16. [On GPUs and TPUs](accelerators.md) has memory and compile
times of other compilers. A GPU's compiler takes longer than a CPU's for the same step.

An MLP is named by the widths of its layers (`784-512-512-10`), or by the number and the width of
its hidden layers (`8x512`). A GPT is named by its layers and width; `-scanned` is one `lax.scan`
over the layers. MLPs (batch 128) and the ResNet are trained with SGD, GPTs with AdamW and clipping;
the MLP of the recipe is trained with AdamW.

Tracing, lowering and compiling were measured in new processes without a cache, in seconds of CPU
time, three times with JAX 0.12 and once with 0.10. The steps were timed in turn in one process.
Ratios are those of medians. `make bench-cost` writes this page, and `benchmarks/cost/steps.py`
says more.
"""

NEXT = """
Next: [Frozen scales](optimizers.md#frozen-scales) shows how to make all scales of a state static.
"""


@dataclasses.dataclass(frozen=True)
class Rows:
    """A table as text."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def for_terminal(self) -> Table:
        """Return the table as `rich` prints it."""
        table = Table(title=self.title, box=box.SIMPLE)
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i < 2 else "right", no_wrap=i < 2)
        for row in self.rows:
            table.add_row(*row)
        return table

    def for_page(self) -> str:
        """Return the table in Markdown."""
        rule = ("---", "---", *["---:"] * (len(self.header) - 2))
        lines = (f"| {' | '.join(row)} |\n" for row in (self.header, rule, *self.rows))
        return f"\n### {self.title}\n\n" + "".join(lines)


def value(row: dict, column: str) -> float:
    """Return a number, of a time the median."""
    return row[column][1] if isinstance(row[column], list) else row[column]


def ratio(variants: dict[str, dict], variant: str, column: str) -> float:
    """Return how often the plain step's value a variant takes."""
    plain = value(variants["plain"], column)
    return value(variants[variant], column) / plain if plain else 1.0


def make_tables(version: str, results: Results) -> list[Rows]:
    """Return all tables of one version of JAX."""
    return [make(f"JAX {version}: ", results) for make in (ratio_rows, time_rows, size_rows)]


def _every(results: Results) -> list[tuple[str, str, dict[str, dict]]]:
    return [(model, variant, of) for model, of in results.items() for variant in of]


def ratio_rows(title: str, results: Results) -> Rows:
    """What people ask first: everything as a ratio to plain."""
    rows = [
        (model, variant, *(f"{ratio(of, variant, column):.2f}×" for column in NAMES))
        for model, variant, of in _every(results)
        if variant != "plain"
    ]
    return Rows(title + "ratios to the plain step", ("model", "variant", *NAMES.values()), rows)


def time_rows(title: str, results: Results) -> Rows:
    """Seconds, with quartiles."""

    def shown(quartiles: list[float], unit: float) -> str:
        first, median, third = (unit * q for q in quartiles)
        return f"{median:.3g} ({first:.3g}–{third:.3g})"

    columns = ("trace", "lower", "compile")
    rows = [
        (
            model,
            variant,
            *(shown(of[variant][column], 1) for column in columns),
            shown(of[variant]["step"], 1e3),
        )
        for model, variant, of in _every(results)
    ]
    header = ("model", "variant", *(f"{column}, s" for column in columns), "step, ms")
    return Rows(title + "median times (quartiles)", header, rows)


def size_rows(title: str, results: Results) -> Rows:
    """Instructions and bytes."""
    counts = ("stablehlo", "scalars", "hlo", "fusions")
    sizes = ("temporary", "arguments")
    rows = [
        (
            model,
            variant,
            *(f"{of[variant][column]:,}" for column in counts),
            *(f"{of[variant][column] / 1e6:,.2f}" for column in sizes),
        )
        for model, variant, of in _every(results)
    ]
    header = ("model", "variant", "StableHLO", "of them scalar", "HLO", "fusions")
    header += ("temporary, MB", "arguments + outputs, MB")
    return Rows(title + "sizes of the programs", header, rows)


def write_page(path: Path, results: Path) -> None:
    """Write the page from all results of a directory, the newest JAX first."""
    parts = [INTRO]
    for file in sorted(results.glob("cost-jax*.json"), reverse=True):
        version = file.stem.removeprefix("cost-jax")
        cells = json.loads(file.read_text())
        parts.append(f"\n## JAX {version}\n")
        tables = make_tables(version, {key: cell["result"] for key, cell in cells.items()})
        parts.extend(table.for_page() for table in tables)
    parts.append(NEXT)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(parts))
