"""The command line: `python -m examples.gpt`."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.gpt import tracking
from examples.gpt.config import SIZES, get_size
from examples.gpt.data import load_corpus
from examples.gpt.presets import PRESETS, get_preset
from examples.gpt.records import read_lines
from examples.gpt.report import ProgressLine, plot_losses, result_table
from examples.gpt.train import Result, Run


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the presets that were asked for; return the exit status."""
    options = make_parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal and console.width < 110:
        console = Console(width=110)  # a table in a log file needs no wrapping
    try:
        runs = make_runs(options)
    except (TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    results = []
    if len(runs) > 1:
        console.print(f"{len(runs)} runs of {runs[0].config.steps} steps, one after the other.")
    started = time.perf_counter()
    try:
        for i, run in enumerate(runs):
            # What the runs so far have taken, the others will: most of it is compiling.
            each = (time.perf_counter() - started) / i if i else None
            later = (len(runs) - i - 1, each)
            title = f"{i + 1}/{len(runs)} {run.preset}" if len(runs) > 1 else run.preset
            with ProgressLine(title, run.config.steps, console, later) as progress:
                results.append(run.train(resume=options.resume, progress=progress))
    except KeyboardInterrupt:
        print(f"\nstopped; go on with --resume --out {options.out}", file=sys.stderr)
        return 130
    report(runs, results, options, console)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.gpt",
        description="Train a GPT on the bytes of a text, in one precision or in several in turn.",
    )
    add = parser.add_argument
    add(
        "--preset",
        nargs="+",
        default=["fp16-all"],
        metavar="NAME",
        help=f"precisions: {', '.join(PRESETS)}, or `all` (default: %(default)s)",
    )
    add("--size", default="tiny", help=f"one of {', '.join(SIZES)} (default: %(default)s)")
    add("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    add("--text", nargs="+", metavar="FILE", help="what to learn (default: Python's help texts)")
    add("--out", type=Path, help="directory for results (default: a new one in runs/)")
    add("--resume", action="store_true", help="continue the runs in --out, exactly")
    add("--learning-rate", type=float, help="peak of the schedule (default: depends on the size)")
    add("--b2", type=float, help="decay of Adam's second moment (default: 0.95)")
    tied = parser.add_mutually_exclusive_group()
    tied.add_argument(
        "--tied", action="store_true", default=None, help="let the head reuse the embedding"
    )
    tied.add_argument("--untied", action="store_false", dest="tied", help="give it its own weights")
    add("--checkpoint-every", type=int, metavar="STEPS", help="(default: a fifth of the run)")
    add(
        "--freeze-after",
        type=int,
        metavar="STEPS",
        help="make scales static after so many steps; the step is compiled once more",
    )
    add(
        "--rescale-every",
        type=int,
        metavar="STEPS",
        help="bring the state's data back to RMS 1; frozen scales that change compile again",
    )
    add(
        "--track",
        type=int,
        metavar="STEPS",
        help="record scales and ranges of the state each so many steps, in track.jsonl and, if "
        "tensorboardX is installed, for TensorBoard",
    )
    add(
        "--track-select",
        nargs="+",
        metavar="NAME",
        help="record these values instead: (parts of) names as `jsa.numerics.track` takes them",
    )
    return parser


def make_runs(options: argparse.Namespace) -> list[Run]:
    """Check all that can be checked before the first step, and return the runs.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if an option has a value that cannot be used.
    """
    names = list(PRESETS) if options.preset == ["all"] else list(dict.fromkeys(options.preset))
    for name in names:
        get_preset(name)
    if options.seed < 0:
        raise ValueError(f"`seed` must not be negative, got {options.seed}.")
    changes = {
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "b2": options.b2,
        "tie_embeddings": options.tied,
    }
    config = dataclasses.replace(
        get_size(options.size), **{k: v for k, v in changes.items() if v is not None}
    )
    every = options.checkpoint_every
    if every is None:
        every = max(1, config.steps // 5)
    if every < 1:
        raise ValueError(f"`checkpoint_every` must be positive, got {every}.")
    if options.track_select and options.track is None:
        raise ValueError("`track_select` needs `track`, the steps from one record to the next.")
    corpus = load_corpus(options.text, context=config.context)
    if options.resume and not (options.out and options.out.is_dir()):
        raise ValueError(f"`resume` needs `out`, the directory of a run, got {options.out}.")
    if options.out is None:
        options.out = Path("runs") / time.strftime(f"{options.size}-%Y%m%d-%H%M%S")
    runs = [
        Run(
            preset=name,
            config=config,
            seed=options.seed,
            corpus=corpus,
            directory=options.out / name,
            evaluate_every=every,
            checkpoint_every=every,
            freeze_after=options.freeze_after,
            rescale_every=options.rescale_every,
            track_every=options.track,
            track_select=options.track_select,
        )
        for name in names
    ]
    for run in runs:
        run.check_directory(resume=options.resume)
    return runs


def report(
    runs: Sequence[Run], results: Sequence[Result], options: argparse.Namespace, console: Console
) -> None:
    """Print the table and draw the plot."""
    title = f"GPT {options.size}, {results[0].parameters:,} parameters, {options.steps} steps"
    console.print()
    console.print(result_table(results, title=title))
    metrics = {run.preset: read_lines(run.directory / "metrics.jsonl") for run in runs}
    path = options.out / "loss.png"
    plot_losses(metrics, path, title=title)
    console.print(f"loss curves: {path}\nmetrics and checkpoints: {options.out}/PRESET/")
    if options.track is not None:
        console.print(f"scales and ranges: {options.out}/PRESET/track.jsonl")
        events = f"TensorBoard events: {options.out}/PRESET/tensorboard/"
        console.print(tracking.NO_TENSORBOARD if tracking.tensorboardX is None else events)
