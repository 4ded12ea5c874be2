"""What steps cost on GPUs and TPUs, by the compilers of these, with no such device at hand.

    python -m benchmarks.cost.accelerators                   # all of it: about 15 minutes
    python -m benchmarks.cost.accelerators --targets h100    # one device

It needs the plugins of JAX, 6 GB (`make accelerators` installs them into an environment of their
own), and no device. All counts are exact. Finished cells are kept in
`benchmarks/results/accelerators-jax<version>.json`, the tables in `docs/accelerators.md`.

Variants of a transformer layer (forward and backward; Flax, width 1,024, 4 x 1,024 tokens): as it
is, through `scalify` with static scales and with dynamic ones, each in bfloat16, in float16, and
with `fp8_matmuls` in bfloat16. Variants of a training step (a Llama-like decoder of 4 scanned,
rematerialised layers, clipping and AdamW): bfloat16 with weights and state in float32; the recipe
of the README in float16; with FP8 matmuls; and with frozen scales.
"""

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.scale_models import PLAIN
from benchmarks.cells import Cells, Store
from benchmarks.cost.decoder import Sizes, plain_step, scaled_step
from benchmarks.cost.gpu_fp8 import TransformerLayer, forward_and_backward
from benchmarks.paths import RESULTS, ROOT
from examples.gpt.train import write_text

PAGE = ROOT / "docs" / "accelerators.md"
WIDTH, BATCH, TOKENS = 1024, 4, 1024  # of the layer
LAYERS = ("bfloat16", "float16", "fp8")
LAYER_VARIANTS = ("plain", "static", "dynamic")
STEPS = ("plain", "float16", "fp8", "fp8-frozen")


@dataclasses.dataclass(frozen=True)
class Device:
    """A target, and how many devices of it share a training step."""

    target: str
    steps_on: int


DEVICES = {
    "h100": Device("h100", 1),
    "h100:8": Device("h100:8", 8),
    "b200": Device("b200", 1),
    "v5p": Device("v5p:2x2x1", 1),
    "v6e": Device("v6e:2x2", 1),
    "tpu7x": Device("tpu7x:2x2x1", 1),
}


def layer(kind: str, variant: str) -> tuple[Callable, tuple]:
    """The passes of a layer, and its arguments' shapes."""
    dtype = jnp.float16 if kind == "float16" else jnp.bfloat16
    module = TransformerLayer(PLAIN, dtype)
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), dtype)
    args = x, jax.eval_shape(module.init, jax.random.key(0), x), x
    apply = jsa.fp8_matmuls(module.apply) if kind == "fp8" else module.apply
    fun = forward_and_backward(apply)
    if variant == "plain":
        return fun, args
    scale: Any = 1.0 if variant == "static" else jax.ShapeDtypeStruct((), jnp.float32)
    return jsa.scalify(fun), jax.tree.map(lambda leaf: jsa.ScaledArray(leaf, scale), args)


def step(variant: str, devices: int) -> tuple[Callable, tuple]:
    """A training step, and its arguments' shapes."""
    sizes = Sizes()
    if variant == "plain":
        made = plain_step(sizes, devices)
    else:
        fp8, frozen = variant.startswith("fp8"), variant.endswith("frozen")
        made = scaled_step(sizes, devices, fp8=fp8, frozen=frozen)
    return made.jitted(), (made.state, made.tokens)


def measure(target: str, make: Callable[[], tuple[Callable, tuple]]) -> dict[str, Any]:
    """Compile, and keep what is counted."""
    fun, args = make()
    report = jsa.numerics.compile_report(fun, *args, target=target)
    memory = report.memory and dataclasses.asdict(report.memory)
    rows = report.matmuls.rows
    return {
        "launches": report.launches,
        "tiny": report.tiny,
        "bytes": report.bytes_moved,
        "memory": memory,
        "seconds": round(report.seconds, 2),
        "collectives": [dataclasses.asdict(c) for c in report.collectives],
        "matmuls": len(rows),
        "fp8": sum(row.is_fp8 is True for row in rows),
    }


def make_tasks(names: Sequence[str]) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Every cell of some devices: `device/layer/dtype/variant` or `device/step/variant`."""
    for name in names:
        device = DEVICES[name]
        if device.steps_on == 1:
            for kind in LAYERS:
                for variant in LAYER_VARIANTS:
                    make = functools.partial(layer, kind, variant)
                    task = functools.partial(measure, device.target, make)
                    yield f"{name}/layer/{kind}/{variant}", task
        for variant in STEPS:
            make = functools.partial(step, variant, device.steps_on)
            yield f"{name}/step/{variant}", functools.partial(measure, device.target, make)


# Tables


HEADER = ("what", "bytes", "launches", "tiny", "temporary", "compile", "FP8 matmuls", "GB moved")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def rows_of(results: dict[str, dict], title: str, base: str, keys: Sequence[str]) -> list[tuple]:
    """Rows of ratios to the cell `base`."""
    plain = results[base]
    rows = []
    for key in keys:
        cell = results[key]
        temporary = "-"
        if cell["memory"] and plain["memory"]["temporary"]:
            temporary = f"{cell['memory']['temporary'] / plain['memory']['temporary']:.2f}"
        rows.append(
            (
                f"{title}{key.rpartition('/')[2]}",
                f"{cell['bytes'] / plain['bytes']:.2f}",
                f"{cell['launches'] / plain['launches']:.2f}",
                f"{cell['tiny'] - plain['tiny']:+d}",
                temporary,
                f"{cell['seconds'] / plain['seconds']:.1f}",
                f"{cell['fp8']} of {cell['matmuls']}",
                f"{cell['bytes'] / 1e9:.2f}",
            )
        )
    return rows


def tables(results: dict[str, dict]) -> Iterator[tuple[str, tuple, list[tuple]]]:
    """Title, header and rows of each table."""
    for name, device in DEVICES.items():
        if device.steps_on == 1 and f"{name}/layer/bfloat16/plain" in results:
            rows = []
            for kind in LAYERS:
                base = f"{name}/layer/{'bfloat16' if kind == 'fp8' else kind}/plain"
                keys = [f"{name}/layer/{kind}/{variant}" for variant in LAYER_VARIANTS]
                rows += rows_of(results, f"{kind}, ", base, keys)
            yield f"{name}: a layer, to the plain one of its dtype (FP8: to bfloat16)", HEADER, rows
        if f"{name}/step/plain" in results:
            base, keys = f"{name}/step/plain", [f"{name}/step/{v}" for v in STEPS]
            title = f"{name}: a training step, to bfloat16 with float32 weights and AdamW"
            yield title, HEADER, rows_of(results, "", base, keys)
            if any(results[key]["collectives"] for key in keys):
                yield f"{name}: what travels, MB", *collective_rows(results, keys)


def collective_rows(results: dict[str, dict], keys: Sequence[str]) -> tuple[tuple, list[tuple]]:
    """What the collectives of each step carry, by dtype."""
    rows = []
    for key in keys:
        cells = []
        for kind in COLLECTIVES:
            found = [c for c in results[key]["collectives"] if c["kind"] == kind]
            parts = [f"{c['bytes'] / 1e6:.3g} {c['dtype']} ({c['count']})" for c in found]
            cells.append(", ".join(parts) or "-")
        rows.append((key.rpartition("/")[2], *cells))
    return ("step", *COLLECTIVES), rows


INTRO = """\
# On GPUs and TPUs

This page is written by `make accelerators`, with the compilers of the devices and without any of
them. Launches, bytes and memory are exact and the same on every machine; no time was measured. A
launch is a kernel, library call, copy or collective, as often as it runs; *tiny* ones move at most
4 KiB, and cost their launch. Bytes are those of the operands and results of all launches: caches
are not in them. On GPUs, matmuls are those of cuBLAS, and nothing is tuned. On TPUs, arrays that
stay in on-chip memory count nothing, and no matmul counts as FP8: the program does not tell.

The layer is a transformer's of width 1,024 on 4 × 1,024 tokens, forward and backward. The step
trains a Llama-like decoder of 4 scanned, rematerialised layers (2 × 1,024 tokens a device), with
clipping and AdamW: in bfloat16 with weights and moments in float32, or by the README's recipe.
`benchmarks/cost/accelerators.py` says more, `jsa.numerics.compile_report` does the same to a step
of yours.

**What float16 is there.** On GPUs a matmul reads float16 and writes it, its power of two applied to
the sums. The compilers of v5p, v6e and tpu7x hand float16 to the matmul as it is and take the sums
in float32, where one of bfloat16 writes bfloat16; with how many digits the hardware multiplies
float16 the program does not tell. E4M3 is an operand of all three. On TPUs we recommend activations
and weights in bfloat16 (`as_scaled_array(params, scale="rms", dtype="bfloat16")`), the optimizer's
state in float16 (`low_precision`), and `fp8_matmuls` where you measure that it is faster.
"""


def page(results: dict[str, dict]) -> str:
    """The tables in Markdown."""
    parts = [INTRO, f"\nJAX {jax.__version__}. Compile times are ratios on one machine.\n"]
    for title, header, rows in tables(results):
        rule = ("---", *["---:"] * (len(header) - 1))
        lines = (f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))
        parts.append(f"\n## {title}\n\n" + "".join(lines))
    return "".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile what is missing, store and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--targets", nargs="+", choices=DEVICES, default=list(DEVICES))
    add("--only", help="cells whose names match this regular expression")
    add("--fresh", action="store_true", help="compile what was compiled before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    add("--docs", type=Path, help="write the tables to this page")
    options = parser.parse_args(arguments)
    console = Console(width=140)
    cells = Cells(
        Store(options.out / f"accelerators-jax{jax.__version__}.json"), options.fresh, console
    )
    tasks = dict(make_tasks(options.targets))
    if options.only:
        tasks = {key: task for key, task in tasks.items() if re.search(options.only, key)}
    cells.add(tasks, {"version": jsa.__version__})
    results = cells.run()
    if options.only:
        for key, cell in results.items():
            console.print(f"{key}: {cell}", markup=False)
        return
    for title, header, rows in tables(results):
        table = Table(title=title, box=box.SIMPLE)
        for i, column in enumerate(header):
            table.add_column(column, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if options.docs:
        write_text(options.docs, page(results))


if __name__ == "__main__":
    main()
