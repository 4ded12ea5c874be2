"""What the examples share: the digits, the command line, the loop, the table and the picture.

Nothing here knows about scales. An example hands over `make(precision, seed, steps)`, which returns
the first state, the training step `update(state, *batch) -> (state, loss)` and
`evaluate(state, *batch) -> (loss, accuracy)`, both jitted.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

PyTree = Any
Batch = tuple[np.ndarray, ...]
Make = Callable[[str, int, int], tuple[PyTree, Callable, Callable]]

PRECISIONS = ("float32", "float16", "fp8")
LAST = 20  # the training loss in the table is the mean of so many steps
EVALUATIONS = 12  # points of the curve of held-out accuracy
# Okabe and Ito's colours, which everyone can tell apart. The curves lie on top of each other, so
# the first one is broad and pale, and the last one dashed.
STYLES = {
    "float32": {"color": "#BBBBBB", "linewidth": 5.0},
    "float16": {"color": "#0072B2", "linewidth": 1.8},
    "fp8": {"color": "#D55E00", "linewidth": 1.6, "linestyle": (0, (4, 2))},
}


class Data(Protocol):
    """What an example trains on."""

    held_out: Batch

    def batch(self, seed: int, step: int) -> Batch:
        """Return the batch of a step; it depends on (seed, step) only."""
        ...


class Digits:
    """Scikit-learn's 1,797 digits of 8 x 8 pixels, from -1 to 1; 900 of them are held out.

    The loss of fewer hangs on single images.

    Attributes:
        held_out: images `(900, 8, 8)` float32 and labels `(900,)` int32.
        batch_size: images in a batch.
    """

    def __init__(self, batch_size: int = 128):
        found = load_digits()
        images = (found.images / 8.0 - 1.0).astype(np.float32)
        labels = found.target.astype(np.int32)
        order = np.random.default_rng(0).permutation(len(labels))
        self.held_out = images[order[:900]], labels[order[:900]]
        self._images, self._labels = images[order[900:]], labels[order[900:]]
        self.batch_size = batch_size

    def batch(self, seed: int, step: int) -> Batch:
        """Return images and labels, drawn at random."""
        rng = np.random.default_rng((seed, step))
        chosen = rng.choice(len(self._labels), self.batch_size, replace=False)
        return self._images[chosen], self._labels[chosen]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run in one precision leaves.

    Attributes:
        precision: one of `PRECISIONS`.
        losses: of every batch, `(steps,)`.
        evaluated: steps after which the held-out part was looked at.
        held_out: loss and accuracy there, `(evaluations, 2)`.
        state_bytes: of all that lives from step to step: weights, optimizer, scales.
        seconds: that the run took, compiling included.
    """

    precision: str
    losses: np.ndarray
    evaluated: np.ndarray
    held_out: np.ndarray
    state_bytes: int
    seconds: float

    @property
    def loss(self) -> float:
        """Held-out loss at the end."""
        return float(self.held_out[-1, 0])

    @property
    def accuracy(self) -> float:
        """Held-out accuracy at the end."""
        return float(self.held_out[-1, 1])

    def gap(self, reference: "Result | None") -> str:
        """Return how far the loss is above or below that of `reference`, in %."""
        if reference is None or reference is self or not math.isfinite(self.loss):
            return "-"
        return f"{100 * (self.loss / reference.loss - 1):+.2f}%"


def main(
    name: str,
    title: str,
    make: Make,
    data: Callable[[], Data],
    *,
    steps: int,
    arguments: Sequence[str] | None = None,
) -> int:
    """Train in each precision that was asked for, print and draw; return the exit status.

    Args:
        name: of the example's module.
        title: above the table and the picture.
        make: see the top of this file.
        data: makes what to train on.
        steps: unless told.
        arguments: of the command line, by default those of the process.
    """
    options = make_parser(name, title, steps).parse_args(arguments)
    try:
        check(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(f"{title}, {options.steps} steps", highlight=False)
    results: list[Result] = []
    found = data()
    for precision in dict.fromkeys(options.precision):
        results.append(train(precision, make, found, options, console))
        console.print(result_line(results), highlight=False, soft_wrap=True)
    console.print(result_table(results))
    path = options.out / "training.png"
    plot(results, path, title=title)
    console.print(f"picture: {path}", highlight=False, soft_wrap=True)
    return 0


def make_parser(name: str, title: str, steps: int) -> argparse.ArgumentParser:
    """Return the parser of the command line, the same for every example."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=f"{title}.")
    add = parser.add_argument
    help_ = f"any of {', '.join(PRECISIONS)} (default: all)"
    add("--precision", nargs="+", default=list(PRECISIONS), metavar="NAME", help=help_)
    add("--steps", type=int, default=steps, help="training steps (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    out = Path("runs") / name
    add("--out", type=Path, default=out, help="directory of the picture (default: %(default)s)")
    return parser


def check(options: argparse.Namespace) -> None:
    """Raise a `ValueError` for options that cannot be used, and make the directory."""
    for precision in options.precision:
        if precision not in PRECISIONS:
            raise ValueError(f"`precision` must be of {', '.join(PRECISIONS)}, got {precision!r}.")
    if options.steps < 1:
        raise ValueError(f"`steps` must be positive, got {options.steps}.")
    if options.seed < 0:
        raise ValueError(f"`seed` must not be negative, got {options.seed}.")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`out` must be a directory that can be made, got {str(options.out)!r}: "
            f"{error.strerror}."
        ) from None


def train(
    precision: str, make: Make, data: Data, options: argparse.Namespace, console: Console
) -> Result:
    """Train in one precision."""
    start = time.perf_counter()
    state, update, evaluate = make(precision, options.seed, options.steps)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state) if hasattr(x, "nbytes"))
    every = max(1, options.steps // EVALUATIONS)
    losses, evaluated, held_out = [], [], []
    shown = track(
        range(1, options.steps + 1),
        description=f"{precision:<8}",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    for step in shown:
        state, loss = update(state, *data.batch(options.seed, step))
        losses.append(float(loss))
        if step % every == 0 or step == options.steps:
            evaluated.append(step)
            held_out.append([float(x) for x in evaluate(state, *data.held_out)])
    return Result(
        precision,
        np.array(losses),
        np.array(evaluated),
        np.array(held_out),
        state_bytes,
        time.perf_counter() - start,
    )


def result_line(results: Sequence[Result]) -> str:
    """Return one line about the last of the results."""
    last, reference = results[-1], reference_of(results)
    gap = "" if last.gap(reference) == "-" else f" ({last.gap(reference)} from float32)"
    return (
        f"{last.precision:<8} held-out loss {last.loss:.4f}{gap}, accuracy "
        f"{100 * last.accuracy:.1f}%, state {last.state_bytes / 1000:,.1f} kB, "
        f"{last.seconds:.0f} s"
    )


def reference_of(results: Sequence[Result]) -> Result | None:
    """Return the float32 run, if there is one."""
    return next((r for r in results if r.precision == "float32"), None)


def result_table(results: Sequence[Result]) -> Table:
    """Return the final table."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("precision", no_wrap=True)
    columns = ("training loss", "held-out loss", "gap", "accuracy", "state, kB", "finite")
    for column in columns:
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.precision,
            f"{result.losses[-LAST:].mean():.4f}",
            f"{result.loss:.4f}",
            result.gap(reference_of(results)),
            f"{100 * result.accuracy:.1f}%",
            f"{result.state_bytes / 1000:,.1f}",
            "yes" if np.isfinite(result.losses).all() else "NO",
        )
    return table


def plot(results: Sequence[Result], path: Path, *, title: str) -> None:
    """Draw the training loss, and beside it the held-out accuracy."""
    from matplotlib.figure import Figure  # no global state, no display

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for result in results:
        style = STYLES[result.precision]
        steps = np.arange(1, len(result.losses) + 1)
        window = max(1, len(steps) // 40)
        left.plot(*smooth(steps, result.losses, window), label=result.precision, **style)
        label = f"{result.precision}: {100 * result.accuracy:.1f}%"
        right.plot(result.evaluated, 100 * result.held_out[:, 1], label=label, **style)
    lowest, highest = left.dataLim.intervaly
    scale = "log" if highest > 10 * lowest else "linear"
    left.set(xlabel="step", ylabel=f"training loss, mean of {window} steps", yscale=scale)
    right.set(xlabel="step", ylabel="held-out accuracy (%)")
    left.legend(frameon=False)
    right.legend(frameon=False, loc="lower right")
    for ax in (left, right):
        ax.grid(color="#dddddd", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def smooth(steps: np.ndarray, losses: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return running means; not by `cumsum`: one nan would blot out everything after it."""
    means = np.lib.stride_tricks.sliding_window_view(losses, window).mean(axis=-1)
    return steps[window - 1 :], means
