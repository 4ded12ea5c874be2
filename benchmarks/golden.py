"""What the library does today, exactly, beside what it did when the golden file was written.

    python -m benchmarks.golden                           # all of it: about an hour
    python -m benchmarks.golden --models gpt4 --parts steps
    python -m benchmarks.golden --accept                  # what was measured is golden from now on

It is for changes of the core that should change nothing. It prints what has moved, and exits with 1
if anything has. Numbers are compared exactly, so the golden file holds on one kind of machine: on
another one, write it before the change.

Parts, of the eight models of `scale_quality`:

- scales: at initialisation, RMS of the data and scale of each activation and gradient, in octaves;
- steps: of training by the README's recipe, in float32, in float16 and with FP8 matmuls, dynamic
  and frozen after ten steps: the losses of 50 steps, and how many equations, lines of StableHLO and
  HLO instructions the step has;
- accelerators: launches, tiny ones among them and bytes of a GPT's steps on an H100 and a TPU v5p.
  It needs their compilers: `make golden-accelerators`.

What is measured is kept under `runs/golden` as long as no source of the library changes.
"""

import argparse
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import jax_scalify as jsa
from benchmarks.accuracy import scale_quality
from benchmarks.accuracy.scale_models import MODELS, PLAIN, Model
from benchmarks.cells import Cells, Store
from benchmarks.cost import training
from benchmarks.cost.programs import count_hlo, count_stablehlo
from benchmarks.paths import RESULTS, ROOT
from examples.gpt.train import write_text
from jax_scalify.base.jaxprs import all_equations

PARTS = ("scales", "steps", "accelerators")
DTYPES = ("float32", "float16")
STEPS, FROZEN_AFTER, TOLD_EVERY = 50, 10, 10
FORMATS = ("float32", "float16", "fp8")
TARGETS, COUNTS = ("h100", "v5p"), ("launches", "tiny", "bytes")
SOURCES = [*(ROOT / "jax_scalify").rglob("*.py"), Path(__file__), Path(scale_quality.__file__)]


# Measuring. -----------------------------------------------------------------------------------


def measure_scales(model: Model, dtype: str) -> dict[str, Any]:
    """For each tensor the RMS of its data and its scale, in octaves."""
    variant = scale_quality.VARIANTS["rules"]
    octaves, _ = scale_quality.measure(model, variant, *model.init(0), jnp.dtype(dtype))
    return {
        f"{kind}/{name}": [round(data, 4), scale]
        for kind, tensors in octaves.items()
        for name, (data, scale, _) in tensors.items()
    }


def _recipe(model: Model, kind: str, frozen: bool) -> training.Step:
    """The step of a model that is trained by the recipe."""
    compared = training.Model(
        init=lambda key: model.init(0),
        loss=functools.partial(_loss, model),
        batch=model.batch(0, 0),
    )
    if kind != "float32":
        return training.scaled_step(compared, fp8=kind == "fp8", dynamic=True, frozen=frozen)
    optimizer = training.make_optimizer()

    @jsa.scalify
    def update(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, other, opt_state = state
        loss = functools.partial(_loss, model, dtype=jnp.float32)
        (value, other), grads = jax.value_and_grad(loss, has_aux=True)(params, other, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), other, opt_state
        return (jsa.match_scales(new, state) if frozen else new), value

    def make(key: jax.Array) -> Any:
        params, other = model.init(0)
        state = jsa.as_scaled_array(params, scale="rms"), other, optimizer.init(params)
        return jsa.as_scaled_array(state)

    return training.Step(update, None, compared.batch, make)


def _loss(model: Model, params: Any, other: Any, batch: Any, dtype: Any) -> Any:
    return model.loss(params, other, batch, PLAIN, dtype)


def measure_steps(model: Model, kind: str, frozen: bool) -> dict[str, Any]:
    """Train, and count what the step has."""
    step = _recipe(model, kind, False)
    state = step.init(jax.random.key(0))
    update, losses = jax.jit(step.update), []
    for k in range(STEPS):
        if frozen and k == FROZEN_AFTER:
            state, update = jsa.freeze_scales(state), jax.jit(_recipe(model, kind, True).update)
        state, loss = update(state, model.batch(0, k))
        if k % TOLD_EVERY == TOLD_EVERY - 1:
            losses.append(float(loss))
    traced = update.trace(state, model.batch(0, 0))
    lowered = traced.lower()
    return {
        "losses": losses,
        "equations": sum(1 for _ in all_equations(traced.jaxpr.jaxpr)),
        "stablehlo": count_stablehlo(lowered.as_text())["stablehlo"],
        "hlo": count_hlo(str(lowered.compile().as_text()))["hlo"],
    }


def make_tasks(parts: Sequence[str], models: Sequence[str]) -> Iterator[tuple[str, Callable]]:
    """Every cell, by its name."""
    for name in models:
        model = MODELS[name]
        for dtype in DTYPES if "scales" in parts else ():
            yield f"scales/{name}/{dtype}", functools.partial(measure_scales, model, dtype)
        for kind in FORMATS if "steps" in parts else ():
            for frozen in (False, True):
                key = f"steps/{name}/{kind}/{'frozen' if frozen else 'dynamic'}"
                yield key, functools.partial(measure_steps, model, kind, frozen)
    if "accelerators" in parts:
        from benchmarks.cost import accelerators  # it needs more than the others

        for name, task in accelerators.make_tasks(TARGETS):
            if name.split("/")[1] == "gpt":
                yield f"accelerators/{name}", functools.partial(_counted, task)


def _counted(task: Callable[[], dict]) -> dict[str, Any]:
    found = task()
    return {name: found[name] for name in COUNTS}


# Comparing. -----------------------------------------------------------------------------------


def moved(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say in sentences what of a cell has moved: numbers, or lists of them, by name."""
    lines = [f"{name} is gone" for name in before if name not in now]
    lines += [f"{name} is new" for name in now if name not in before]
    pairs = {name: (before[name], now[name]) for name in before if name in now}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    tensors = {name: pair for name, pair in changed.items() if "/" in name}
    if tensors:
        lines.append(_moved_tensors(tensors, len(pairs)))
    return lines + [
        f"{n}: {_told(a)} -> {_told(b)}" for n, (a, b) in changed.items() if "/" not in n
    ]


def _moved_tensors(tensors: dict[str, tuple], total: int) -> str:
    """How many tensors have moved, and which ones the farthest."""

    def distance(name: str) -> float:
        (data, scale), (new_data, new_scale) = tensors[name]
        return max(abs(new_data - data), abs(new_scale - scale))

    farthest = sorted(tensors, key=distance, reverse=True)[:3]
    told = "; ".join(f"{n} {_told(tensors[n][0])} -> {_told(tensors[n][1])}" for n in farthest)
    return f"{len(tensors)} of {total} tensors (log2 of the data's RMS, of the scale): {told}"


def _told(number: Any) -> str:
    if isinstance(number, list):
        return "[" + ", ".join(map(_told, number)) + "]"
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print what has moved."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS[:2]))
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--accept", action="store_true", help="write what was measured to the golden file")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    add("--runs", type=Path, default=ROOT / "runs" / "golden", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console(width=140)
    name = f"golden-jax{jax.__version__}.json"
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES)))
    options.runs.mkdir(parents=True, exist_ok=True)
    cells = Cells(Store(options.runs / name), False, console)
    cells.add(dict(make_tasks(options.parts, options.models)), {"of": sources.hexdigest()[:12]})
    results = cells.run()
    path = options.out / name
    golden = json.loads(path.read_text()) if path.exists() else {}
    differences = {key: moved(golden.get(key, {}), cell) for key, cell in results.items()}
    for key, lines in differences.items():
        for line in lines if key in golden else ["not in the golden file"]:
            console.print(f"{key}: {line}", markup=False, highlight=False, soft_wrap=True)
    count = sum(map(bool, differences.values()))
    console.print(f"{len(results) - count} of {len(results)} cells are as they were.")
    if options.accept:
        golden |= results
        rows = (f"{json.dumps(key)}: {json.dumps(golden[key])}" for key in sorted(golden))
        write_text(path, "{\n" + ",\n".join(rows) + "\n}\n")
        return 0
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
