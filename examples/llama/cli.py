"""The command line: `python -m examples.llama`."""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from examples.gpt.data import load_corpus
from examples.gpt.report import ProgressLine
from examples.llama.layout import Layout, abstract_mesh, make_mesh, parse_mesh
from examples.llama.model import SIZES, Sizes
from examples.llama.plan import make_plan, plan_table
from examples.llama.step import RECIPES, Training
from examples.llama.train import Run, perplexity
from jax_scalify.numerics.targets import parse_target

RESTART = "Start all of them again with --resume: they go on from the last checkpoint."


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or compile only; return the exit status."""
    options = make_parser().parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    try:
        if options.compile_only:
            compile_only(options, console)
        else:
            train(options, console)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; go on with --resume and the same --out", file=sys.stderr)
        return 130
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        print(
            f"error: process {jax.process_index()} of {jax.process_count()} cannot go on, since "
            f"another one has ended or cannot be reached: {str(error).splitlines()[0]}\n{RESTART}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(3)  # an ordinary exit would wait for the others
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama",
        description="Train a Llama on bytes of text, on any mesh, or compile its step for one.",
    )
    add = parser.add_argument
    add("--size", default="tiny", help=f"one of {', '.join(SIZES)} (default: %(default)s)")
    add("--layers", type=int, help="in place of the size's own number")
    add("--context", type=int, help="in place of the size's own length of sequences")
    add(
        "--recipe",
        nargs="+",
        default=["float16"],
        metavar="NAME",
        help=f"of {', '.join(RECIPES)}; several with --compile-only (default: %(default)s)",
    )
    add("--mesh", help="such as data=4,fsdp=2,tensor=1 (default: fsdp over all devices)")
    add("--batch", type=int, help="sequences, of all devices (default: 8, or one for each part)")
    add("--steps", type=int, default=100, help="(default: %(default)s)")
    add("--learning-rate", type=float, default=3e-3, help="its peak (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    add("--text", nargs="+", metavar="FILE", help="what to learn (default: Python's help texts)")
    add("--out", type=Path, help="directory for metrics and checkpoints (default: none)")
    add("--resume", action="store_true", help="continue the run in --out, on any mesh")
    add("--checkpoint-every", type=int, default=50, metavar="STEPS", help="(default: %(default)s)")
    add("--compile-only", action="store_true", help="print what a step asks of each device")
    add("--target", help="for --compile-only: h100:8, h100:128x8 (hosts x GPUs), v5p:8x8x16")
    group = parser.add_argument_group("several processes, as `jax.distributed.initialize` has them")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--processes", type=int, help="how many")
    group.add_argument("--process", type=int, help="the number of this one")
    return parser


def find_sizes(options: argparse.Namespace) -> Sizes:
    """The sizes that were asked for.

    Raises:
        ValueError: for an unknown name, or a number that is not positive.
    """
    if options.size not in SIZES:
        raise ValueError(f"`size` must be one of {', '.join(SIZES)}, got {options.size!r}.")
    sizes = SIZES[options.size]
    for name in ("layers", "context"):
        number = getattr(options, name)
        if number is not None:
            if number < 1:
                raise ValueError(f"`{name}` must be positive, got {number}.")
            sizes = dataclasses.replace(sizes, **{name: number})
    if sizes.block and sizes.context % sizes.block:
        raise ValueError(
            f"`context` must be a multiple of {sizes.block} at this size, got {sizes.context}."
        )
    return sizes


def compile_only(options: argparse.Namespace, console: Console) -> None:
    """Compile a step of each recipe, and print what it needs."""
    if options.target is None:
        raise ValueError("`compile-only` needs `target`, such as h100:8 or v5p:8x8x16.")
    jax.config.update("jax_platforms", "cpu")  # no other device is looked for
    target = parse_target(options.target)
    mesh = parse_mesh(options.mesh, target.devices)
    layout, sizes = Layout(abstract_mesh(mesh)), find_sizes(options)
    batch = layout.size("data", "fsdp") if options.batch is None else options.batch
    trainings = [Training(sizes, layout, recipe) for recipe in dict.fromkeys(options.recipe)]
    plans = {}
    for training in trainings:
        with console.status(f"compiling {training.recipe} for {options.target} ..."):
            plans[training.recipe] = make_plan(training, batch, options.target)
    where = ", ".join(f"{name}={number}" for name, number in mesh.items() if number > 1)
    title = (
        f"Llama {options.size}, {sizes.parameters / 1e9:.4g} billion parameters, "
        f"{batch:,} sequences of {sizes.context:,}, {options.target} ({where or 'one device'}); "
        "per device"
    )
    console.print(plan_table(title, plans))


def train(options: argparse.Namespace, console: Console) -> None:
    """Train on the devices that are there, of this process or of several."""
    if options.coordinator is not None:
        # Where a process has ended, the others get an error at their next collective; JAX aborts
        # them where they only wait for it, as at the end of a checkpoint, after these seconds.
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process,
            heartbeat_timeout_seconds=10,
            shutdown_timeout_seconds=10,
        )
    if len(options.recipe) > 1:
        raise ValueError(f"`recipe` must be one unless `compile-only`, got {options.recipe}.")
    mesh = parse_mesh(options.mesh, jax.device_count())
    layout, sizes = Layout(make_mesh(mesh)), find_sizes(options)
    training = Training(
        sizes, layout, options.recipe[0], steps=options.steps, learning_rate=options.learning_rate
    )
    parts = layout.size("data", "fsdp")
    run = Run(
        training=training,
        batch=max(8, parts) // parts * parts if options.batch is None else options.batch,
        seed=options.seed,
        corpus=load_corpus(options.text, context=sizes.context),
        directory=options.out,
        checkpoint_every=options.checkpoint_every,
    )
    if jax.process_index():
        run.train(resume=options.resume)
        return
    if jax.process_count() > 1:
        console.print(f"{jax.process_count()} processes; if one ends, all do. {RESTART}")
    start = time.perf_counter()
    with ProgressLine(training.recipe, training.steps, console) as progress:
        losses = run.train(resume=options.resume, progress=progress)
    if losses:
        console.print(
            f"{training.recipe}: loss {losses[-1]:.4f}, perplexity {perplexity(losses):.3f}, "
            f"{time.perf_counter() - start:.0f} s"
        )
