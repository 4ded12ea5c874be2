"""The runs of `parity` with all of their seeds in one program: it takes many seeds to tell.

    python -m benchmarks.accuracy.parity_seeds --models gpt4 llama --seeds 128
    python -m benchmarks.accuracy.parity_seeds --models gpt4 --seeds 32 --steps 25000
    python -m benchmarks.accuracy.parity_seeds --modes dynamic frozen --table FILE  # anywhere

A step of these models takes a GPU as long as its launches do, whatever is in them: the step of all
seeds, which is `vmap` of the scalified step, takes little longer than one. Each seed has its own
weights, batches and scales; static scales are those of the first seed, which is calibrated once,
after a tenth of the steps. Whether its guard would have asked for another calibration is stored.

Matmuls of float32 with float32 are in float32, not in TF32, in the reference and where losses are
computed in float32; all others are as users have them. A cell is that of `parity`, of each seed
one, in `benchmarks/results/parity-<device>-jax<version>.json`.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich import progress
from rich.console import Console

import jax_scalify as jsa
from benchmarks.accuracy.parity import (
    CALIBRATION_STEPS,
    HELD_OUT_BATCHES,
    LEARNING_RATES,
    LOOKS,
    find_models,
    key_of,
    make_parser,
    print_stored,
    print_table,
    provenance,
)
from benchmarks.accuracy.parity_steps import is_narrow, make_step, phases
from benchmarks.accuracy.scale_models import PLAIN, Model
from benchmarks.cells import Store
from benchmarks.paths import device_slug
from examples.gpt.step import first_bad_step

PyTree = Any

CHUNK = 50  # steps of a call


def make_program(step: Callable) -> Callable:
    """Return `program(states, batches, trains) -> (states, losses)`.

    Args:
        step: `step(state, batch) -> (state, loss)` of one seed.

    Returns:
        A compiled function of states of all seeds, of batches `(steps, seeds, ...)`, and of whether
        the states are to be trained or stay as they are; the losses are `(steps, seeds)`.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def program(states: PyTree, batches: PyTree, trains: jax.Array) -> tuple[PyTree, jax.Array]:
        def turn(states: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
            new, losses = jax.vmap(step)(states, batch)
            return jax.tree.map(functools.partial(jnp.where, trains), new, states), losses

        return lax.scan(turn, states, batches)

    return program


@functools.lru_cache(maxsize=64)
def training_batches(model: Model, seeds: int, first: int, steps: int) -> PyTree:
    """Return what all seeds are trained on, `(steps, seeds, ...)` of each array."""
    batches = [model.batch(s, first + i) for i in range(steps) for s in range(seeds)]
    return jax.tree.map(lambda *x: np.stack(x).reshape(steps, seeds, *x[0].shape), *batches)


def held_out_batches(model: Model, seeds: int) -> PyTree:
    """Return what all seeds are judged on, the same for each, as many as a call takes."""
    batches = [model.batch(0, i % HELD_OUT_BATCHES, held_out=True) for i in range(CHUNK)]
    return jax.tree.map(
        lambda *x: np.broadcast_to(np.stack(x)[:, None], (CHUNK, seeds, *x[0].shape)), *batches
    )


first_bad_steps = jax.jit(jax.vmap(first_bad_step, in_axes=(0, 0, None)))


def calibrate(
    kept: Path | None, update: Callable, state: PyTree, batches: Iterable[PyTree]
) -> jsa.Calibration:
    """Calibrate, or take the calibration that was kept."""
    if kept is not None and kept.exists():
        return jsa.Calibration.load(kept)
    found = jsa.calibrate(update, state, batches, steps=CALIBRATION_STEPS)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        found.save(kept)
    return found


def train(
    model: Model,
    variant: str,
    mode: str,
    seeds: int,
    steps: int,
    rate: float,
    calibrations: Path | None = None,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[dict[str, Any]]:
    """Train all seeds, and return what `parity` stores of each.

    Args:
        model: what is trained.
        variant: of its step.
        mode: of its scales.
        seeds: how many, from 0.
        steps: a multiple of `CHUNK`.
        rate: the peak of the learning rate.
        calibrations: directory where calibrations are kept, or None.
        track: shows how far a run is, given the first steps of its calls.
    """
    started = time.monotonic()
    parts = [(first - first % CHUNK, part) for first, part in phases(variant, steps)]
    first_state, _ = make_step(model, parts[0][1], steps, rate)
    states = jax.jit(jax.vmap(first_state))(jnp.arange(seeds))
    narrow, times = is_narrow(variant), 0
    bad = jnp.full(seeds, -1, jnp.int32)
    for (first, part), (end, _) in itertools.pairwise([*parts, (steps, "")]):
        _, update = make_step(model, part, steps, rate)
        program = make_program(jsa.scalify(update) if narrow else update)
        calibration = None
        for start in track(range(first, end, CHUNK)):
            is_time_to_look = start >= steps // 10 and start % max(steps // LOOKS, CHUNK) == 0
            if narrow and mode != "dynamic" and is_time_to_look:
                state = jax.tree.map(lambda x: x[0], states)
                if calibration is None:
                    kept = calibrations and calibrations / f"{model.name}-{steps}-{part}.json"
                    each = (model.batch(0, start + i) for i in range(CALIBRATION_STEPS))
                    calibration = calibrate(kept, update, state, each)
                    times += 1
                    program = make_program(jsa.scalify(update, calibration=calibration))
                    if mode == "frozen":
                        match = functools.partial(jsa.match_scales, like=calibration.freeze(state))
                        states = jax.jit(jax.vmap(match))(states)
                elif calibration.guard(state):
                    times += 1
            batches = training_batches(model, seeds, start, CHUNK)
            states, _ = program(states, batches, True)
            bad = first_bad_steps(bad, states, start + CHUNK - 1)
    held_out = held_out_batches(model, seeds)
    states, found = program(states, held_out, False)
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), jsa.asarray(states[:2]))
    found = np.asarray(found, np.float64)[:HELD_OUT_BATCHES].mean(axis=0)
    wide = loss_in_float32(model, weights, held_out)[:HELD_OUT_BATCHES].mean(axis=0)
    seconds = (time.monotonic() - started) / seeds
    return [
        {
            "loss": round(float(found[seed]), 6),
            "loss_in_float32": round(float(wide[seed]), 6),
            "first_bad_step": int(bad[seed]),
            "calibrations": times,
            "seconds": round(seconds, 2),
            **provenance(),
        }
        for seed in range(seeds)
    ]


def loss_in_float32(model: Model, weights: PyTree, batches: PyTree) -> np.ndarray:
    """Return the losses of all batches and seeds, without scales, `(batches, seeds)`."""

    def step(weights: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        return weights, model.loss(*weights, batch, PLAIN, jnp.float32)[0]

    with jax.default_matmul_precision("highest"):
        return np.asarray(make_program(step)(weights, batches, False)[1], np.float64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, store it and print the table of `parity`."""
    parser = make_parser(__doc__.splitlines()[0], ["dynamic"])
    add = parser.add_argument
    add("--seeds", type=int, default=128, help="how many, from 0 (default: %(default)s)")
    add("--steps", type=int, default=1000, help="a multiple of 50 (default: %(default)s)")
    add("--calibrations", type=Path, help="where to keep them, those of other devices too")
    options = parser.parse_args(arguments)
    if options.steps < CHUNK or options.steps % CHUNK:
        parser.error(f"--steps must be a multiple of {CHUNK}, got {options.steps}")
    if options.steps == CHUNK and options.modes != ["dynamic"]:
        parser.error(
            f"--steps {CHUNK} are over before anything is calibrated: at least {2 * CHUNK}"
        )
    if options.seeds < 1:
        parser.error(f"--seeds must be positive, got {options.seeds}")

    console = Console()
    path = options.out / f"parity-{device_slug()}-jax{jax.__version__}.json"
    if options.table is not None:
        print_stored(options, path, console)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    store, known, found = Store(path), find_models(), {}
    variants = dict.fromkeys(("float32", *options.variants))  # others are compared with the first
    for name, variant, mode in itertools.product(options.models, variants, options.modes):
        settings = {"learning_rate": LEARNING_RATES[name], "together": options.seeds}
        keys = [key_of(name, options.steps, variant, mode, s) for s in range(options.seeds)]
        cells = {key: store.get(key, settings) for key in keys}
        if variant in options.variants and None in cells.values():
            run = keys[0].rpartition("/")[0]
            console.print(f"{run}: {options.seeds} seeds")
            shown = functools.partial(
                progress.track,
                description=run,
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
            precision = "highest" if variant == "float32" else "default"
            with jax.default_matmul_precision(precision):
                rate = LEARNING_RATES[name]
                what = (known[name], variant, mode, options.seeds, options.steps, rate)
                rows = train(*what, options.calibrations, shown)
            cells = dict(zip(keys, rows, strict=True))
            for key, cell in cells.items():
                store.put(key, settings, cell)
            console.print(f"  {sum(cell['seconds'] for cell in rows):.0f} s")
            jax.clear_caches()
        found |= {key: cell for key, cell in cells.items() if cell is not None}
    print_table(found, options.steps, console)


if __name__ == "__main__":
    main()
