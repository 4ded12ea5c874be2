"""What a run shows: a progress line, a table, a plot."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from examples.gpt.presets import PRESETS, describe
from examples.gpt.train import Result

# Okabe and Ito's colours, which colour-blind readers can tell apart; a line style besides, because
# most of the curves lie on top of each other.
STYLES = {
    "fp32": ("#000000", "-"),
    "fp32-scaled": ("#999999", "--"),
    "fp16-1": ("#56B4E9", "-"),
    "fp16-2": ("#0072B2", "--"),
    "fp16-all": ("#009E73", "-"),
    "fp8-3": ("#E69F00", "--"),
    "fp8-4": ("#CC79A7", "-"),
    "fp8-all": ("#D55E00", "-"),
    "fp16-plain": ("#B8A800", ":"),
}
DIFFERENCE_SHOWN = 3.0  # in %


class ProgressLine:
    """A live line with loss, speed and time left; plain lines where there is no terminal.

    Args:
        title: what is running.
        steps: the last step.
        console: where to write.
        later: how many runs are to follow, and the seconds of one; None while that is not known.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        console: Console,
        later: tuple[int, float | None] = (0, None),
    ):
        self._title, self._steps, self._console = title, steps, console
        self._first: tuple[int, float] | None = None
        self._next_line = 0.0
        self._bar = Progress(
            TextColumn("{task.description:<15}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
        )
        count, each = later
        self._all = f"   {clock(count * each)} for the others" if count and each else ""
        first = f"starting ...{self._all}"
        self._task = self._bar.add_task(title, total=steps, text=first)

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        if not self._console.is_terminal:
            self._console.print(f"{self._title:<15} starting ...{self._all}")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show the loss and the speed at `step`."""
        now = time.perf_counter()
        if self._first is None:  # the time to compile says nothing about the time left
            self._first = (step, now)
        done = step - self._first[0]
        left = "-"
        if done:
            left = clock((now - self._first[1]) / done * (self._steps - step))
        text = f"loss {loss:.3f}   {tokens_per_second:,.0f} tokens/s   {left} left{self._all}"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, text=text)
        elif now >= self._next_line or step == self._steps:
            self._console.print(f"{self._title:<15} {step:>5}/{self._steps}   {text}")
            self._next_line = now + 5.0


def clock(seconds: float) -> str:
    """Return a duration as `m:ss` or `h:mm:ss`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def meaning(preset: str) -> str:
    """Return a preset with the dtypes of weights, Adam's moments and matmuls."""
    known = PRESETS[preset]
    dtypes = describe(known)
    text = f"{preset}: {dtypes['weights']}, {dtypes['moments']}, {dtypes['matmuls']}"
    if not known.scaled:
        return f"{text}; no scales"
    if known.rescale_gradients:
        return f"{text}; gradients rescaled"
    return f"{text}; norms' gradients rescaled" if known.rescale_norm_gradient else text


def gap(loss: float, reference: float | None) -> str:
    """Return how far `loss` is above or below the reference, in %."""
    if reference is None or not math.isfinite(loss):
        return "-"
    return f"{100 * (loss / reference - 1):+.2f}%"


def result_table(results: Sequence[Result], *, title: str) -> Table:
    """Return the final table.

    The gap is that of the validation loss to the preset `fp32`, if it is among the results; the
    bytes a parameter are those of the whole state: weights, moments and scales; the last column is
    the first step that left a value in the state that is not finite.
    """
    reference = next((r.validation_loss for r in results if r.preset == "fp32"), None)
    # Narrow enough for a terminal of 80 columns.
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0
    )
    for name in ("preset", "weights", "grads", "Adam\nstate", "matmuls"):
        table.add_column(name, no_wrap=True)
    numbers = ("val.\nloss", "bits/\nbyte", "gap", "bytes/\nparam", "ms/\nstep", "first\nnan")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.preset,
            *describe(PRESETS[result.preset]).values(),
            f"{result.validation_loss:.4f}",
            f"{result.bits_per_byte:.3f}",
            gap(result.validation_loss, reference),
            f"{result.state_bytes_per_parameter:.2f}",
            "-" if result.step_seconds is None else f"{1000 * result.step_seconds:.0f}",
            "never" if result.first_bad_step is None else str(result.first_bad_step),
        )
    return table


def plot_losses(metrics: Mapping[str, Sequence[dict]], path: Path, *, title: str) -> None:
    """Draw the training losses, and beside them their distance from float32.

    Args:
        metrics: for each preset the lines of its `metrics.jsonl`.
        path: the PNG to write.
        title: above the picture.
    """
    from matplotlib.figure import Figure  # slow to import; no global state, no display

    curves = {}
    for preset, lines in metrics.items():
        points = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        curves[preset] = np.array(points, dtype=float).reshape(-1, 2).T
    steps = max(curve.shape[1] for curve in curves.values())
    window = max(1, steps // 20)
    reference = curves.get("fp32")
    compare = reference is not None and len(curves) > 1

    figure = Figure(figsize=(11 if compare else 6.5, 5.2), layout="constrained")
    axes = figure.subplots(1, 2 if compare else 1, squeeze=False)[0]
    for preset, (step, loss) in curves.items():
        color, style = STYLES[preset]
        line = {"color": color, "linestyle": style, "linewidth": 1.6, "label": meaning(preset)}
        step_shown, shown = _smooth(step, loss, window)
        wide = {"linewidth": 6, "alpha": 0.25} if compare and preset == "fp32" else {}
        axes[0].plot(step_shown, shown, **line | wide)  # seen below those that lie on it
        finite = np.isfinite(shown)
        if not finite.all():  # mark where the curve ends in nan
            end = np.flatnonzero(finite)[-1:]
            axes[0].plot(step_shown[end], shown[end], marker="X", markersize=8, color=color)
        if compare and preset != "fp32":
            common = min(len(loss), reference.shape[1])
            distance = 100 * (loss[:common] / reference[1, :common] - 1)
            axes[1].plot(*_smooth(step[:common], distance, window), **line)
    axes[0].set(xlabel="step", ylabel="training loss (nats per byte)")
    if compare:
        axes[1].axhline(0, color="black", linewidth=1.2)
        axes[1].set(xlabel="step", ylabel="training loss, difference from fp32 (%)")
        # A run that breaks down must not flatten the others, nor one in FP8 those in float16.
        axes[1].set_yscale("symlog", linthresh=0.01)
        ticks = (0.01, 0.1, 1)
        axes[1].set_yticks([-t for t in ticks[::-1]] + [0, *ticks])
        axes[1].yaxis.set_major_formatter("{x:g}")
        axes[1].set_ylim(-DIFFERENCE_SHOWN, DIFFERENCE_SHOWN)
    for ax in axes:
        ax.grid(color="#dddddd", linewidth=0.6)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        title="preset: dtypes of weights, Adam's moments and matmuls",
        loc="outside lower center",
        ncols=3 if compare else 1,
        fontsize=8,
        frameon=False,
    )
    smoothed = f", running mean over {window} steps" if window > 1 else ""
    figure.suptitle(title + smoothed)
    figure.savefig(path, dpi=150)


def _smooth(step: np.ndarray, loss: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    if len(loss) < window:
        return step, loss
    # Not `cumsum`: one nan would blot out everything after it.
    windows = np.lib.stride_tricks.sliding_window_view(loss, window)
    return step[window - 1 :], windows.mean(axis=-1)
