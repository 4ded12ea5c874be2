"""Does training with everything in float16 end where float32 ends, without any rescale?

    python -m benchmarks.accuracy.float16_training  # 3 models, 4 precisions, 3 seeds
    python -m benchmarks.accuracy.float16_training --models bert --seeds 0 --steps 200

Weights, activations, gradients and both of Adam's moments are stored in float16 (`float16`), and
the linear layers multiply in E4M3 and E5M2 besides, all of them (`fp8`) or all but the last one
(`fp8-body`, as is usual); the models are Flax's own layers, unmodified. The loss is that of
held-out text. Every finished cell (model, precision, seed) is kept in
`benchmarks/results/float16_training-jax<version>.json`: a run that was stopped goes on with the
next one.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.scale_models import (
    CONTEXT,
    MODELS,
    PLAIN,
    TEXT_BATCH,
    Model,
)
from benchmarks.paths import RESULTS
from examples.gpt.config import get_size
from examples.gpt.report import ProgressLine
from examples.gpt.step import (
    TrainState,
    first_bad_step,
    make_optimizer,
)
from examples.gpt.train import write_text

TEXT_MODELS = ("gpt4", "llama", "bert")
PRECISIONS = ("float32", "float16", "fp8-body", "fp8")
LIMITS = {"float16": 0.5, "fp8-body": 1.0, "fp8": 1.0}  # how far the loss may be from float32, in %
# Peaks of the schedules, chosen in float32: BERT's norms behind the residual adds want a small one.
LEARNING_RATES = {"gpt4": 6e-3, "llama": 6e-3, "bert": 7e-4}
HELD_OUT_BATCHES = 32
# Which matmuls are FP8, of a model that knows nothing of it.
FP8 = {
    "fp8": jsa.fp8.linear_layers,
    "fp8-body": jsa.fp8.all_of(jsa.fp8.linear_layers, jsa.fp8.skip_head),
}


def make_steps(
    model: Model, precision: str, steps: int
) -> tuple[optax.GradientTransformation, Callable, Callable]:
    """Return the optimizer, `update(state, batch) -> state` and `evaluate(params, batch)`."""
    config = dataclasses.replace(
        get_size("tiny"), steps=steps, learning_rate=LEARNING_RATES[model.name]
    )
    optimizer, apply_updates = make_optimizer(config), optax.apply_updates
    narrow = precision != "float32"
    if narrow:  # without statistics: the scales of moments follow those of their gradients
        optimizer = jsa.optim.low_precision(optimizer, policy="gradient")
        apply_updates = functools.partial(jsa.optim.apply_updates, policy="gradient")
    dtype = jnp.float16 if narrow else jnp.float32

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return model.loss(params, {}, batch, PLAIN, dtype)[0]

    if precision in FP8:
        loss_fn = jsa.fp8_matmuls(loss_fn, FP8[precision])

    def update(state: TrainState, batch: Any) -> TrainState:
        grads = jax.grad(loss_fn)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(apply_updates(state.params, updates), opt_state)

    transform = jsa.scalify if narrow else lambda fun: fun
    return optimizer, jax.jit(transform(update), donate_argnums=0), jax.jit(transform(loss_fn))


def train(model: Model, precision: str, seed: int, steps: int, progress: Callable) -> dict:
    """Train one cell: its held-out loss, and the first step whose state was not finite, or -1."""
    optimizer, update, evaluate = make_steps(model, precision, steps)
    params = model.init(seed)[0]
    state = TrainState(params, optimizer.init(params))
    if precision != "float32":
        weights = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
        state = TrainState(weights, state.opt_state)
    bad, start = jnp.int32(-1), time.monotonic()
    for step in range(steps):
        state = update(state, model.batch(seed, step))
        bad = first_bad_step(bad, state, step)
        if (step + 1) % 50 == 0:
            loss = float(evaluate(state.params, model.batch(seed, step)))
            tokens = (step + 1) * TEXT_BATCH * CONTEXT
            progress(step + 1, loss, tokens / (time.monotonic() - start))
    held_out = (model.batch(0, i, held_out=True) for i in range(HELD_OUT_BATCHES))
    losses = [float(evaluate(state.params, batch)) for batch in held_out]
    return {"loss": statistics.fmean(losses), "first_bad_step": int(bad)}


def summarise(cells: dict[str, dict], models: Sequence[str], seeds: Sequence[int]) -> Table:
    """Compare each precision with float32, seed by seed."""
    table = Table(box=box.SIMPLE)
    for column in ("model", "precision", "loss", "gap", "worst seed", "limit", "state"):
        table.add_column(column, justify="left" if column in ("model", "precision") else "right")
    for model, precision in itertools.product(models, PRECISIONS):
        found = [cells.get(f"{model}/{precision}/{seed}") for seed in seeds]
        reference = [cells.get(f"{model}/float32/{seed}") for seed in seeds]
        if None in found or None in reference:
            continue
        gaps = [100 * (a["loss"] / b["loss"] - 1) for a, b in zip(found, reference, strict=True)]
        mean, worst = statistics.fmean(gaps), max(gaps)
        limit = LIMITS.get(precision)
        finite = all(cell["first_bad_step"] < 0 for cell in found)
        table.add_row(
            model,
            precision,
            f"{statistics.fmean(cell['loss'] for cell in found):.4f}",
            f"{mean:+.2f}%",
            f"{worst:+.2f}%",
            "" if limit is None else f"{limit}% {'ok' if mean <= limit else 'MISSED'}",
            "finite" if finite else "NOT FINITE",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, store it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=TEXT_MODELS, default=list(TEXT_MODELS))
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, default=1000, help="(default: %(default)s)")
    add("--fresh", action="store_true", help="train what was trained before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be positive, got {options.steps}")

    console = Console()
    path = options.out / f"float16_training-jax{jax.__version__}.json"
    stored = json.loads(path.read_text()) if path.exists() else {}

    def settings_of(model: str) -> dict:
        rate = LEARNING_RATES[model]
        return {"steps": options.steps, "learning_rate": rate, "state": "low_precision"}

    for model, seed, precision in itertools.product(
        options.models, options.seeds, options.precisions
    ):
        key = f"{model}/{precision}/{seed}"
        if not options.fresh and stored.get(key, {}).get("settings") == settings_of(model):
            continue
        with ProgressLine(key, options.steps, console) as progress:
            cell = train(MODELS[model], precision, seed, options.steps, progress)
        stored[key] = cell | {"settings": settings_of(model)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(stored, indent=1, sort_keys=True) + "\n")
    current = {
        key: cell
        for key, cell in stored.items()
        if cell["settings"] == settings_of(key.partition("/")[0])
    }
    console.print(summarise(current, options.models, options.seeds))


if __name__ == "__main__":
    main()
