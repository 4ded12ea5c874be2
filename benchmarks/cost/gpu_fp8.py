"""How fast FP8 matmuls are on a GPU: ours, next to bfloat16, alone and in a transformer layer.

    python -m benchmarks.cost.gpu_fp8              # about 8 minutes on an H100
    python -m benchmarks.cost.gpu_fp8 --parts matmul --sizes 4096 8192x4096x14336
    python -m benchmarks.cost.gpu_fp8 --allow-cpu  # tiny sizes: a test of this script

It needs an NVIDIA GPU with FP8 units and a JAX that finds it (`pip install 'jax[cuda13]'`). Every
timed call is a loop on the device, so that launches do not count; the variants of a cell run in
turn, and medians are compared. Operands are bfloat16 and normally distributed, and `fp8` casts them
in every turn. `fp8-bfloat16` asks XLA for bfloat16 results in place of float32 ones that are cast,
and `fp8-operands`, a matmul of arrays that are FP8 already, is the limit. Of the layer, `scaled` is
`scalify` of `fp8` with dynamic scales in its operands, and `scaled-static` has them frozen. The
table of `jsa.numerics.check_fp8` is that of the timed program. Every finished cell is kept in
`benchmarks/results/gpu_fp8-<device>-jax<version>.json`: a run that was stopped goes on with the
next one.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.scale_models import PLAIN, Attention, Block, FeedForward
from benchmarks.paths import RESULTS, device_slug
from examples.gpt.report import clock
from examples.gpt.train import write_text

PARTS = ("matmul", "layer")
PASSES = ("forward", "forward+backward")
HEAD_CHANNELS = 128
FP8_CAPABILITY = 8.9  # the first that has FP8 units
Size = tuple[int, int, int]
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What is measured if the command line does not say."""

    sizes: Sequence[Size]
    widths: Sequence[int]
    sequence: int
    batch: int
    work: float
    repeats: int


# The last two are the feed-forward layer of a Llama of 8 billion weights.
GPU = Defaults(
    [(n, n, n) for n in (2048, 4096, 8192)] + [(8192, 4096, 14336), (8192, 14336, 4096)],
    widths=(2048, 4096),
    sequence=2048,
    batch=4,
    work=20.0,
    repeats=20,
)
CPU = Defaults([(32, 32, 32), (32, 16, 64)], (32,), sequence=16, batch=2, work=1e-6, repeats=3)


@dataclasses.dataclass(frozen=True)
class Cell:
    """Variants of one computation, which are compared.

    Attributes:
        name: what tells it from the others.
        flop: operations of its matmuls.
        settings: with other ones it is measured again.
        make: returns the variants, each a function and its arguments; the first is the reference.
    """

    name: str
    flop: float
    settings: dict[str, Any]
    make: Callable[[], dict[str, tuple[Callable, tuple]]]


class TransformerLayer(Block):
    """Causal attention and feed-forward behind norms, with heads of 128 channels."""

    @linen.compact
    def __call__(self, x):
        heads = max(1, x.shape[-1] // HEAD_CHANNELS)
        attention = Attention(
            self.layers, self.dtype, heads=heads, groups=heads, is_causal=True, name="attention"
        )
        feed_forward = FeedForward(self.layers, self.dtype, name="feed_forward")
        x = x + attention(self.make("LayerNorm", name="attention_norm")(x))
        return x + feed_forward(self.make("LayerNorm", name="feed_forward_norm")(x))


# What is measured


def forward_and_backward(fun: Callable) -> Callable:
    """Return `both(cotangent, *args)`: the result of `fun` and its gradients."""

    def both(cotangent: jax.Array, *args: PyTree) -> PyTree:
        out, pullback = jax.vjp(fun, *args)
        return out, pullback(cotangent)

    return both


def normal(seed: int, *shape: int) -> jax.Array:
    """Random numbers: the clock of a GPU depends on them."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def matmul_variants(size: Size, passes: str) -> dict[str, tuple[Callable, tuple]]:
    """One matmul; its backward pass is two more."""
    m, k, n = size
    lhs, rhs = normal(0, m, k), normal(1, k, n)
    functions = {
        "bfloat16": jnp.matmul,
        "fp8": jsa.nn.matmul,
        "fp8-bfloat16": functools.partial(jsa.nn.matmul, accumulation_dtype=jnp.bfloat16),
    }
    if passes == "forward+backward":
        args = normal(2, m, n), lhs, rhs
        return {name: (forward_and_backward(fun), args) for name, fun in functions.items()}
    narrow = lhs.astype(jnp.float8_e4m3fn), rhs.astype(jnp.float8_e4m3fn)
    kernel = functools.partial(jnp.matmul, preferred_element_type=jnp.bfloat16)
    variants = {name: (fun, (lhs, rhs)) for name, fun in functions.items()}
    return {**variants, "fp8-operands": (kernel, narrow)}


def layer_variants(width: int, batch: int, sequence: int) -> dict[str, tuple[Callable, tuple]]:
    """The passes of a transformer layer, with the gradients of weights and input."""
    layer = TransformerLayer(PLAIN, jnp.bfloat16)
    x, cotangent = normal(0, batch, sequence, width), normal(1, batch, sequence, width)
    args = cotangent, jax.jit(layer.init)(jax.random.key(2), x), x
    scaled = jsa.as_scaled_array(args, scale="rms")
    fp8 = forward_and_backward(jsa.fp8_matmuls(layer.apply))
    return {
        "bfloat16": (forward_and_backward(layer.apply), args),
        "fp8": (fp8, args),
        "scaled": (jsa.scalify(fp8), scaled),
        "scaled-static": (jsa.scalify(fp8), jsa.freeze_scales(scaled)),
    }


def make_cells(options: argparse.Namespace) -> Iterator[Cell]:
    """List what the command line asks for."""
    settings = {"repeats": options.repeats, "work": options.work}
    # They change what is compiled.
    settings["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    if "matmul" in options.parts:
        for size, passes in itertools.product(options.sizes, PASSES):
            m, k, n = size
            flop = 2.0 * m * k * n * (1 if passes == "forward" else 3)
            make = functools.partial(matmul_variants, size, passes)
            yield Cell(f"matmul/{m}x{k}x{n}/{passes}", flop, settings, make)
    if "layer" in options.parts:
        batch, sequence = options.batch, options.sequence
        settings = {**settings, "batch": batch, "sequence": sequence}
        for width in options.widths:
            tokens = batch * sequence
            # Four matmuls of the attention, two that are four times as large; scores and values.
            flop = 3.0 * (2 * tokens * 12 * width**2 + 4 * tokens * sequence * width)
            make = functools.partial(layer_variants, width, batch, sequence)
            yield Cell(f"layer/{width}/forward+backward", flop, settings, make)


# Measuring


def repeat(fun: Callable, turns: int) -> Any:
    """Jit a loop that calls `fun` with the same arguments, and returns the last results."""

    def loop(*args: PyTree) -> PyTree:
        def turn(_: Any, state: PyTree) -> PyTree:
            # With a barrier that the count goes through, no turn is like another: else XLA would
            # move all of the work out of the loop.
            inputs, count = lax.optimization_barrier((args, state[0]))
            return count + 1, fun(*inputs)

        shapes = jax.eval_shape(fun, *args)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, turns, turn, (jnp.int32(0), zeros))

    return jax.jit(loop)


def measure(cell: Cell, work: float, repeats: int, console: Console) -> dict[str, Any]:
    """Compile the variants of a cell, look at their kernels and time them in turn.

    A variant that fails has an "error" in place of its times.
    """
    turns = max(1, round(1e12 * work / cell.flop))
    found: dict[str, dict[str, Any]] = {}
    loops, times = {}, {}
    for name, (fun, args) in cell.make().items():
        console.print(f"{cell.name}: {name}: compiling")
        loop = repeat(fun, turns)
        try:
            report = jsa.numerics.check_fp8(loop, *args)
            jax.block_until_ready(loop(*args))
        except jax.errors.JaxRuntimeError as error:
            found[name] = {"error": str(error).partition("\n")[0]}
            console.print(f"{cell.name}: {name}: failed: {found[name]['error']}", markup=False)
            continue
        print(report)
        found[name] = {"kernels": kernels(report), "check_fp8": str(report).splitlines()}
        loops[name], times[name] = (loop, args), []
    console.print(f"{cell.name}: timing, {turns:,} in a call")
    for number in range(-1, repeats):  # the first round warms up
        for name in list(loops) if number % 2 else reversed(loops):
            loop, args = loops[name]
            start = time.perf_counter()
            jax.block_until_ready(loop(*args))
            if number >= 0:
                times[name].append(1e3 * (time.perf_counter() - start) / turns)
    for name, taken in times.items():
        quartiles = statistics.quantiles(taken, n=4)
        found[name] |= dict(zip(("q1_ms", "median_ms", "q3_ms"), quartiles))
        found[name]["tflops"] = cell.flop / (1e9 * quartiles[1])
    return {"flop": cell.flop, "turns": turns, "settings": cell.settings, "variants": found}


def kernels(report: jsa.numerics.Fp8Report) -> dict[str, Any]:
    """Count the matmuls that run as FP8, and say of each other one why it does not."""
    others = [
        {
            "name": row.name,
            "pass": row.phase,
            "sizes": list(dataclasses.astuple(row.sizes)),  # batch, M, K, N
            "kernel": row.kernel,
            "reason": "; ".join(row.notes),
        }
        for row in report.rows
        if not row.is_fp8
    ]
    return {"matmuls": len(report.rows), "fp8": len(report.rows) - len(others), "others": others}


# Results


def summarise(results: dict[str, Any], names: Sequence[str]) -> Table:
    """Compare each variant with the first of its cell."""
    title = f"{results['device']}, JAX {results['jax']}"
    if results["emulated"]:
        title += ": FP8 is emulated, the times mean nothing"
    table = Table(box=box.SIMPLE, title=title)
    for column in ("cell", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("ms", "quartiles", "TFLOP/s", "speedup", "FP8"):
        table.add_column(column, justify="right")
    for cell in names:
        variants = results["cells"].get(cell, {}).get("variants", {})
        base = next(iter(variants.values()), {}).get("median_ms")
        for name, row in variants.items():
            if "error" in row:
                table.add_row(cell, name, "failed")
                continue
            median = row["median_ms"]
            table.add_row(
                cell,
                name,
                f"{median:.4g}",
                f"{row['q1_ms']:.4g}-{row['q3_ms']:.4g}",
                f"{row['tflops']:.4g}",
                f"{base / median:.2f}x" if base else "",
                f"{row['kernels']['fp8']}/{row['kernels']['matmuls']}",
            )
    return table


def has_fp8_units(device: jax.Device) -> bool:
    """Whether a device multiplies FP8 numbers itself: NVIDIA's Ada, Hopper and later ones."""
    # "9.0"; AMD's are called "gfx942".
    capability = str(getattr(device, "compute_capability", ""))
    found = re.fullmatch(r"\d+\.\d+", capability)
    return bool(found) and float(capability) >= FP8_CAPABILITY


def parse_size(text: str) -> Size:
    """Read `N` or `MxKxN`."""
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be N or MxKxN, each positive, got {text!r}")
    m, k, n = found.groups()
    return int(m), int(k or m), int(n or m)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, store and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--sizes", nargs="+", type=parse_size, metavar="N|MxKxN", help="of the matmuls")
    add("--widths", nargs="+", type=int, help="of the layers")
    add("--sequence", type=int, help="length, of the layers' input")
    add("--batch", type=int, help="sequences in the layers' input")
    add("--repeats", type=int, help="calls that are timed")
    add("--work", type=float, help="TFLOP of a call, about")
    add("--minutes", type=float, default=8.0, help="start no cell later (default: %(default)s)")
    add("--fresh", action="store_true", help="measure what was measured before again")
    add("--allow-cpu", action="store_true", help="tiny sizes where there is no FP8, as a test")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    emulated = not has_fp8_units(device)
    for field in dataclasses.fields(Defaults):
        if getattr(options, field.name) is None:
            setattr(options, field.name, getattr(CPU if emulated else GPU, field.name))
    for name in ("widths", "sequence", "batch", "work", "minutes"):
        value = getattr(options, name)
        for number in value if name == "widths" else [value]:
            if not number > 0:
                parser.error(f"--{name} must be positive, got {number}")
    for width in options.widths:
        if width > HEAD_CHANNELS and width % HEAD_CHANNELS:
            parser.error(f"--widths must be multiples of {HEAD_CHANNELS}, got {width}")
    if options.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {options.repeats}")
    if emulated and not options.allow_cpu:
        parser.error(
            f"needs an NVIDIA GPU with FP8 units, such as an H100; JAX {jax.__version__} found "
            f"{device.device_kind} ({device.platform}). --allow-cpu tests this script without."
        )

    console = Console(width=120)
    start = time.monotonic()
    path = options.out / f"gpu_fp8-{device_slug()}-jax{jax.__version__}.json"
    results = json.loads(path.read_text()) if path.exists() else {"cells": {}}
    results |= {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "jax": jax.__version__,
        "emulated": emulated,
    }
    cells = list(make_cells(options))

    def is_done(cell: Cell) -> bool:
        stored = results["cells"].get(cell.name, {})
        failed = any("error" in row for row in stored.get("variants", {}).values())
        return stored.get("settings") == cell.settings and not failed

    missing = [cell for cell in cells if options.fresh or not is_done(cell)]
    for number, cell in enumerate(missing, start=1):
        seconds = time.monotonic() - start
        if seconds > 60 * options.minutes:
            left = len(missing) - number + 1
            console.print(f"{left} cells left after {clock(seconds)}: run again to go on")
            break
        console.print(f"{cell.name}: {number} of {len(missing)}, after {clock(seconds)}")
        found = measure(cell, options.work, options.repeats, console)
        results["cells"][cell.name] = found
        write_text(path, json.dumps(results, indent=1) + "\n")
    console.print(summarise(results, [cell.name for cell in cells]))


if __name__ == "__main__":
    main()
