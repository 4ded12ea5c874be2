"""How long whole training steps take on a GPU: by our recipes, next to bfloat16.

    python -m benchmarks.cost.gpu_steps               # on an H100
    python -m benchmarks.cost.gpu_steps --models llama --sizes small
    python -m benchmarks.cost.gpu_steps --sizes tiny  # anywhere: a test of this script

The models are those of `make accelerators`, the Llama with scanned, rematerialised layers and the
GPT of Flax linen, small as there and large: 8 layers of width 2,048, 4 sequences of 2,048 tokens.
Variants: `bfloat16`, with weights and AdamW in float32; the README's recipe, `float16` and `fp8`,
and the same with dynamic scales of the weights, `-dynamic`; FP8 in the gradients' matmuls alone,
`fp8-gradients`; and each of ours with static scales, `-frozen`: those that it has after some steps
of the recipe, if that is measured as well.

All variants of a model are compiled first, and run in turn: a time is the median over rounds of
some steps each, with the batch on the device and the state donated. The last times are kept in
`benchmarks/results/gpu_steps-<device>-jax<version>.json`.
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.parity import commit
from benchmarks.cells import Store
from benchmarks.cost.decoder import SIZES as DECODER
from benchmarks.cost.decoder import make_decoder
from benchmarks.cost.flax_models import GptSizes, make_gpt
from benchmarks.cost.training import Model, Step, freeze, plain_step, scaled_step
from benchmarks.paths import RESULTS, device_slug
from examples.llama.model import Sizes

PyTree = Any

LARGE = {"layers": 8, "width": 2048}
DECODERS: dict[str, tuple[Sizes, int]] = {
    "tiny": (dataclasses.replace(DECODER, layers=2, width=64, hidden=96, context=32), 2),
    "small": (DECODER, 2),
    "large": (
        dataclasses.replace(DECODER, **LARGE, heads=16, groups=8, hidden=5632, context=2048),
        4,
    ),
}
GPTS = {
    "tiny": GptSizes(layers=2, width=64, vocabulary=256, tokens=32),
    "small": GptSizes(),
    "large": GptSizes(**LARGE, sequences=4, tokens=2048),
}
MODELS: dict[str, Callable[[str], Model]] = {
    "llama": lambda size: make_decoder(sizes=DECODERS[size][0], sequences=DECODERS[size][1]),
    "gpt": lambda size: make_gpt(GPTS[size]),
}
# A forward pass in float16, and both operands of the gradients in FP8.
GRADIENTS = {
    "forward_dtype": jnp.float16,
    "backward_dtype": (jnp.float8_e5m2, jnp.float8_e4m3fn),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {},
    "float16-dynamic": {"dynamic": True},
    "float16-frozen": {"frozen": True},
    "fp8": {"fp8": True},
    "fp8-dynamic": {"fp8": True, "dynamic": True},
    "fp8-frozen": {"fp8": True, "frozen": True},
    "fp8-gradients": {"fp8": True, **GRADIENTS},
    "fp8-gradients-frozen": {"fp8": True, "frozen": True, **GRADIENTS},
}
FP8_KERNEL = 'custom_call_target="__cublas$lt$matmul$f8"'
WARM = 8  # steps before any is timed


def make_step(model: Model, variant: str) -> Step:
    """Make the step of a variant."""
    if variant == "bfloat16":
        return plain_step(model)
    return scaled_step(model, **VARIANTS[variant])


@dataclasses.dataclass
class Run:
    """A compiled step, and the state that it is at."""

    program: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array]]
    state: PyTree
    batch: PyTree

    def go(self, steps: int) -> float:
        """Run some steps, and return the seconds that one took."""
        start = time.perf_counter()
        loss = jnp.zeros(())
        for _ in range(steps):
            self.state, loss = self.program(self.state, self.batch)
        jax.block_until_ready((self.state, loss))
        return (time.perf_counter() - start) / steps


def compile_step(step: Step, state: PyTree, batch: PyTree) -> tuple[Run, dict[str, Any]]:
    """Compile a step, and return it with what is known of it."""
    start = time.perf_counter()
    compiled = step.jitted().lower(state, batch).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    found = {
        "compile_seconds": round(seconds, 1),
        "temporary_bytes": memory.temp_size_in_bytes if memory is not None else None,
        "fp8_kernels": (compiled.as_text() or "").count(FP8_KERNEL),
    }
    return Run(compiled, state, batch), found


def make_batch(model: Model) -> PyTree:
    """Draw tokens at random."""
    return jax.tree.map(
        lambda x: jax.random.randint(jax.random.key(1), x.shape, 0, 256, x.dtype), model.batch
    )


def measure(
    model: Model,
    variants: Sequence[str],
    *,
    steps: int,
    rounds: int,
    minutes: float,
    profile: Path | None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compile the variants, run them in turn, and yield what was found of each.

    Args:
        model: what is trained.
        variants: of the step.
        steps: that are timed together.
        rounds: how often they are.
        minutes: after which no other variant is compiled.
        profile: where to write what the device did in two steps of each, or None.
    """
    started = time.monotonic()
    batch = make_batch(model)
    runs: dict[str, Run] = {}
    found: dict[str, dict[str, Any]] = {}
    for variant in variants:
        if time.monotonic() - started > 60 * minutes:
            print(f"  {variant} and what follows are left out: {minutes} minutes are over")
            break
        step = make_step(model, variant)
        recipe, is_frozen, _ = variant.partition("-frozen")
        if is_frozen and recipe in runs:
            state = jsa.freeze_scales(jax.tree.map(jnp.copy, runs[recipe].state))
        else:
            state = jax.jit(step.init)(jax.random.key(0))
            state = jsa.tree.map(freeze, state) if is_frozen else state
            if variant != "bfloat16" and not variant.endswith("dynamic"):
                state = jsa.as_scaled_array(state[0], scale="rms", static=True), *state[1:]
        runs[variant], found[variant] = compile_step(step, state, batch)
        runs[variant].go(WARM)
        print(f"  {variant}: {found[variant]}", flush=True)
    times: dict[str, list[float]] = {variant: [] for variant in runs}
    for number in range(rounds):
        for variant in list(runs)[:: 1 if number % 2 else -1]:
            times[variant].append(1e3 * runs[variant].go(steps))
    for variant in runs:
        if profile is not None:
            with jax.profiler.trace(str(profile / variant)):
                runs[variant].go(2)
        quartiles = statistics.quantiles(times[variant], n=4, method="inclusive")
        yield variant, found[variant] | dict(zip(("q1_ms", "median_ms", "q3_ms"), quartiles))


def summarise(device: str, cells: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Compare each variant with bfloat16, by model and size."""
    table = Table(box=box.SIMPLE, title=f"{device}, JAX {jax.__version__}")
    for column in ("model", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("ms a step", "quartiles", "to bfloat16", "temporary MB", "FP8", "compile s"):
        table.add_column(column, justify="right")
    for name, variants in cells.items():
        base = variants.get("bfloat16", {}).get("median_ms")
        for variant, row in variants.items():
            table.add_row(
                name,
                variant,
                f"{row['median_ms']:.4g}",
                f"{row['q1_ms']:.4g}-{row['q3_ms']:.4g}",
                f"{row['median_ms'] / base:.2f}" if base else "",
                f"{(row['temporary_bytes'] or 0) / 1e6:,.0f}",
                str(row["fp8_kernels"]),
                f"{row['compile_seconds']:.0f}",
            )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, store and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--sizes", nargs="+", choices=GPTS, default=["small", "large"])
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--steps", type=int, default=10, help="of a round (default: %(default)s)")
    add("--rounds", type=int, default=10, help="at least 2 (default: %(default)s)")
    add("--minutes", type=float, default=10.0, help="compile no variant later, of each model")
    add("--profile", type=Path, help="where to write a profile of each step")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.rounds < 2:
        parser.error(f"got --steps {options.steps} --rounds {options.rounds}: too few")

    console = Console(width=120)
    options.out.mkdir(parents=True, exist_ok=True)
    store = Store(options.out / f"gpu_steps-{device_slug()}-jax{jax.__version__}.json")
    settings = {"xla_flags": os.environ.get("XLA_FLAGS", ""), "commit": commit()}
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for model, size in itertools.product(options.models, options.sizes):
        name = f"{model}/{size}"
        console.print(f"{name}: compiling {len(options.variants)} steps")
        profile = options.profile and options.profile / name
        made = MODELS[model](size)
        rows = measure(
            made,
            options.variants,
            steps=options.steps,
            rounds=options.rounds,
            minutes=options.minutes,
            profile=profile,
        )
        for variant, row in rows:
            store.put(f"{name}/{variant}", settings, row)
            cells.setdefault(name, {})[variant] = row
        jax.clear_caches()
    console.print(summarise(jax.devices()[0].device_kind, cells))


if __name__ == "__main__":
    main()
