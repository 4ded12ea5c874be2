"""Do float16 and FP8 end where float32 ends, with dynamic scales and with static ones?

    python -m benchmarks.accuracy.parity  # 7 models, 4 variants, 2 modes, 3 seeds, 1,000 steps
    python -m benchmarks.accuracy.parity --models gpt4 --modes frozen --seeds 0 --steps 25000

Three seeds show that a model trains to its end and is calibrated once, each for itself; whether a
tenth of a percent is lost takes many, which is what `parity_seeds` is for. Variants, those that are
run if nothing else is asked and those that are only run if they are named, are in `parity_steps`.

Modes, of those that are scalified: `dynamic`; `frozen`, static scales: `jsa.calibrate` after the
first tenth of the steps, and the state has the scales that it gives from then on; `calibrated`, run
if it is named, has its corrections and a state of dynamic scales, which the step brings to those
scales: the same arithmetic in a larger program. A guard looks at the state 20 times and calibrates
again where it says so; how often that was is stored.

The loss is that of the same held-out text or images, computed as in training; "in float32" is that
of the same weights, computed in float32. So the gap without the latter is what rounding does to a
forward pass, and the rest is what it did to the training. A tenth of the images' labels are drawn
at random, and the images are shifted: else their loss ends near 0, where a percent says nothing.

Every finished cell (model, steps, variant, mode, seed) is kept in
`benchmarks/results/parity-jax<version>.json` with its settings, the commit and the time that it
took: a run that was stopped goes on with the next one.
"""

import argparse
import functools
import importlib.metadata
import itertools
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.parity_steps import (
    GOALS,
    USUAL,
    VARIANTS,
    is_narrow,
    make_step,
    phases,
)
from benchmarks.accuracy.scale_models import (
    CLASSES,
    CONTEXT,
    IMAGE_BATCH,
    LSTM,
    LSTM_CONTEXT,
    MODELS,
    PLAIN,
    LanguageModel,
    Model,
    ResNet,
    ViT,
    digits,
    make_model,
    next_byte_batch,
)
from benchmarks.cells import Cells, Store
from benchmarks.paths import RESULTS, ROOT
from examples.gpt.step import first_bad_step
from examples.llama.model import Sizes, init, loss_fn

PyTree = Any

MODES = ("dynamic", "calibrated", "frozen")
# Peaks of the schedules, chosen in float32.
LEARNING_RATES = {
    "vit": 2e-3,
    "resnet": 2e-3,
    "bert": 7e-4,
    "moe": 3e-3,
    "llama": 6e-3,
    "gpt4": 6e-3,
    "lstm": 6e-3,
    "gpt4-128": 4e-3,
    "gpt4-256": 2e-3,
}
WIDER = {"gpt4-128": 128, "gpt4-256": 256}  # widths; only run if they are named
ERROR = 0.05  # the standard error of a gap, in %, that tells whether a goal is met
HELD_OUT_BATCHES = 32
IMAGE_SIZE = 8  # rows and columns
TRAINING_IMAGES = 1400  # of 1,797 digits; the others are held out
RANDOM_LABELS = 0.1
LOOKS = 20
CALIBRATION_STEPS = 4
EXPERTS = Sizes(
    layers=2, width=64, heads=4, groups=2, hidden=96, vocabulary=256, context=CONTEXT, experts=4
)


# Models, the quickest first


def image_batch(seed: int, step: int, held_out: bool = False) -> dict:
    """Return images and labels, of those that nothing is trained on if so asked.

    Each image is shifted by up to a pixel, and a tenth of the labels are drawn at random.
    """
    images, labels = digits()
    part = slice(TRAINING_IMAGES, None) if held_out else slice(0, TRAINING_IMAGES)
    images, labels = images[part], labels[part]
    rng = np.random.default_rng((seed, step, held_out))
    chosen = rng.integers(len(images), size=IMAGE_BATCH)
    shifts = rng.integers(-1, 2, size=(IMAGE_BATCH, 2))
    places = (np.arange(IMAGE_SIZE) - shifts[..., None]) % IMAGE_SIZE  # (images, 2, size)
    rows, columns = places[:, 0, :, None], places[:, 1, None]
    drawn = rng.random(IMAGE_BATCH) < RANDOM_LABELS
    labels = np.where(drawn, rng.integers(CLASSES, size=IMAGE_BATCH), labels[chosen])
    inputs = images[chosen[:, None, None], rows, columns]
    return {"inputs": inputs, "labels": labels.astype(np.int32)}


def make_experts() -> Model:
    """The Llama of the examples with experts: its layers are scanned and rematerialised."""

    def loss(params: PyTree, other: PyTree, batch: dict, layers: Any, dtype: Any) -> Any:
        tokens = jnp.concatenate([batch["inputs"], batch["labels"][:, -1:]], axis=1)
        weights = jax.tree.map(lambda w: w.astype(dtype), params)
        return loss_fn(weights, tokens, EXPERTS), other

    return Model(
        "moe", lambda seed: (init(EXPERTS, jax.random.key(seed)), {}), loss, next_byte_batch
    )


def find_models() -> dict[str, Model]:
    """Return the models by name."""
    wider = {
        name: make_model(
            name, functools.partial(LanguageModel, depth=4, width=width), next_byte_batch
        )
        for name, width in WIDER.items()
    }
    return wider | {
        "vit": make_model("vit", functools.partial(ViT, depth=4), image_batch),
        "resnet": make_model("resnet", ResNet, image_batch),
        "bert": MODELS["bert"],
        "moe": make_experts(),
        "llama": MODELS["llama"],
        "gpt4": MODELS["gpt4"],
        "lstm": make_model("lstm", LSTM, functools.partial(next_byte_batch, context=LSTM_CONTEXT)),
    }


# Runs


@functools.lru_cache(maxsize=2)
def compiled(update: Callable, narrow: bool) -> Callable:
    """Return the compiled step, without a calibration: that of all seeds."""
    return jax.jit(jsa.scalify(update) if narrow else update)


@functools.lru_cache(maxsize=1)
def loss_in_float32(model: Model) -> Callable:
    """Return the compiled `loss(params, other, batch)`, without scales."""
    return jax.jit(lambda *args: model.loss(*args, PLAIN, jnp.float32)[0])


class Scales:
    """A scalified step that is calibrated once, and again when the guard says so."""

    def __init__(self, update: Callable, mode: str, batch: Callable[[int], dict]):
        self._update, self._mode, self._batch = update, mode, batch
        self._calibration: jsa.Calibration | None = None
        self.step = compiled(update, True)
        self.calibrations = 0

    def look(self, state: PyTree, step: int) -> PyTree:
        """Return the state with the scales that the next step takes."""
        if self._mode == "dynamic":
            return state
        if self._calibration is not None and not self._calibration.guard(state):
            return state
        batches = (self._batch(step + i) for i in range(CALIBRATION_STEPS))
        found = jsa.calibrate(self._update, state, batches, steps=CALIBRATION_STEPS)
        self.calibrations += 1
        self._calibration = found
        self.step = jax.jit(jsa.scalify(self._update, calibration=found))
        return found.freeze(state) if self._mode == "frozen" else state


def train(model: Model, variant: str, mode: str, seed: int, steps: int, rate: float) -> dict:
    """Train one cell: its held-out loss, the first step whose state was not finite, or -1."""
    started = time.monotonic()
    parts = phases(variant, steps)
    state, bad = make_step(model, parts[0][1], steps, rate)[0](seed), jnp.int32(-1)
    narrow, every, calibrations = is_narrow(variant), max(steps // LOOKS, 1), 0
    for (start, part), (end, _) in itertools.pairwise([*parts, (steps, "")]):
        _, update = make_step(model, part, steps, rate)
        scales = Scales(update, mode, lambda step: model.batch(seed, step)) if narrow else None
        step_of = compiled(update, narrow)
        for step in range(start, end):
            if scales is not None:
                if step >= max(steps // 10, 1) and step % every == 0:
                    state = scales.look(state, step)
                step_of = scales.step
            state, _ = step_of(state, model.batch(seed, step))
            bad = first_bad_step(bad, state, step)
        calibrations += 0 if scales is None else scales.calibrations
    held_out = [model.batch(0, i, held_out=True) for i in range(HELD_OUT_BATCHES)]
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), jsa.asarray(state[:2]))
    wide = loss_in_float32(model)
    return {
        "loss": statistics.fmean(float(step_of(state, batch)[1]) for batch in held_out),
        "loss_in_float32": statistics.fmean(float(wide(*weights, batch)) for batch in held_out),
        "first_bad_step": int(bad),
        "calibrations": calibrations,
        "seconds": round(time.monotonic() - started, 1),
        **provenance(),
    }


def provenance() -> dict[str, Any]:
    """Return what a cell was made with."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "optax", "flax")}
    return {"commit": commit(), "versions": versions}


@functools.cache
def commit() -> str:
    """Return the commit that is measured, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


# The table


def key_of(model: str, steps: int, variant: str, mode: str, seed: int) -> str:
    """Return the key of a cell; without scales there is no mode."""
    mode = "plain" if variant in ("float32", "bfloat16") else mode
    return f"{model}/{steps}/{variant}/{mode}/{seed}"


def find_gaps(cells: dict[str, dict], run: str, reference: str, loss: str = "loss") -> list[float]:
    """Return how far one run's loss is from another's in percent, of each seed that both have.

    Args:
        cells: those that there are.
        run: the key without the seed.
        reference: likewise.
        loss: which of a cell's losses; the reference's is the one in training.
    """
    gaps = []
    for key, cell in cells.items():
        head, _, seed = key.rpartition("/")
        other = cells.get(f"{reference}/{seed}")
        if head == run and other is not None:
            gaps.append(100 * (cell[loss] / other["loss"] - 1))
    return gaps


def summarise(cells: dict[str, dict], steps: int) -> Table:
    """Compare each variant and mode with float32, seed by seed, for the cells that there are."""
    table = Table(box=box.SIMPLE)
    names = ("model", "variant", "mode", "seeds", "loss", "gap", "error", "worst", "in float32")
    for name in (*names, "goal", "times"):
        table.add_column(name, justify="left" if name in names[:3] else "right")
    for model, variant in itertools.product(LEARNING_RATES, VARIANTS):
        for mode in MODES if variant in GOALS else ("plain",):
            run, reference = f"{model}/{steps}/{variant}/{mode}", f"{model}/{steps}/float32/plain"
            gaps = find_gaps(cells, run, reference)
            if gaps:
                found = [cell for key, cell in cells.items() if key.startswith(f"{run}/")]
                wide = find_gaps(cells, run, reference, "loss_in_float32")
                table.add_row(model, variant, mode, *_row(variant, gaps, wide, found))
    return table


def _row(variant: str, gaps: list[float], wide: list[float], found: list[dict]) -> list[str]:
    seeds, lost = len(gaps), sum(cell["first_bad_step"] >= 0 for cell in found)
    gaps, mean = list(filter(math.isfinite, gaps)), _mean(gaps)
    error = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    goal = GOALS.get(variant)
    return [
        str(seeds),
        f"{_mean(cell['loss'] for cell in found):.4f}",
        f"{mean:+.2f}%",
        "-" if math.isnan(error) else f"{error:.2f}",
        f"{lost} NOT FINITE" if lost else f"{max(gaps):+.2f}%",
        f"{_mean(wide):+.2f}%",
        "" if goal is None else f"{goal}% {_verdict(mean, error, goal)}",
        "" if goal is None else str(max(cell["calibrations"] for cell in found)),
    ]


def _mean(values: Iterable[float]) -> float:
    """The mean of those that are finite."""
    finite = list(filter(math.isfinite, values))
    return statistics.fmean(finite) if finite else math.nan


def _verdict(mean: float, error: float, goal: float) -> str:
    """Whether a gap is beyond its goal: open where too few seeds tell."""
    if mean - 2 * error > goal:
        return "MISSED"
    return "ok" if mean <= goal + ERROR and error <= ERROR else "open"


def make_parser(description: str, modes: Sequence[str]) -> argparse.ArgumentParser:
    """Make a parser of what is trained, in these modes by default."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    models = list(LEARNING_RATES)
    usual = [model for model in models if model not in WIDER]
    add("--models", nargs="+", choices=models, default=usual)
    add("--variants", nargs="+", choices=VARIANTS, default=list(USUAL))
    add("--modes", nargs="+", choices=MODES, default=list(modes))
    help = "print the table of a file of cells, by default of those made here, and train nothing"
    add("--table", nargs="?", type=Path, const=Path(), metavar="FILE", help=help)
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    return parser


def print_table(cells: dict[str, dict], steps: int, console: Console) -> None:
    """Print the table, at its width where there is no terminal."""
    wide = console if console.is_terminal else Console(width=130)  # it would be 80
    table = summarise(cells, steps)
    if not table.row_count:
        wide.print("No table: no cell has a float32 one to compare with; see --variants.")
        return
    wide.print(table)


def print_stored(options: argparse.Namespace, own: Path, console: Console) -> None:
    """Print the table of what is asked for in a file, by default in its own."""
    path = own if options.table == Path() else options.table
    if not path.exists():
        raise SystemExit(f"--table: there is no {path}")
    variants = ("float32", *options.variants)
    found = {}
    for key, cell in json.loads(path.read_text()).items():
        model, _, variant, mode, _ = key.split("/")
        if model in options.models and variant in variants and mode in ("plain", *options.modes):
            found[key] = cell["result"]
    print_table(found, options.steps, console)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, store it and print the table."""
    parser = make_parser(__doc__.splitlines()[0], ("dynamic", "frozen"))
    add = parser.add_argument
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, default=1000, help="(default: %(default)s)")
    add("--fresh", action="store_true", help="train what was trained before again")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be positive, got {options.steps}")

    console, path = Console(), options.out / f"parity-jax{jax.__version__}.json"
    if options.table is not None:
        print_stored(options, path, console)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    store = Store(path)
    cells = Cells(store, options.fresh, console)
    found, known = {}, find_models()
    variants = dict.fromkeys(("float32", *options.variants))  # others are compared with the first
    each = itertools.product(options.models, variants, options.modes, options.seeds)
    for name, variant, mode, seed in each:
        key = key_of(name, options.steps, variant, mode, seed)
        rate = LEARNING_RATES[name]
        task = functools.partial(train, known[name], variant, mode, seed, options.steps, rate)
        settings = {"learning_rate": rate}
        cell = store.get(key, settings)
        if cell is not None:
            found[key] = cell
        if variant in options.variants:
            cells.add({key: task}, settings)
    print_table(found | cells.run(), options.steps, console)


if __name__ == "__main__":
    main()
