"""What steps cost on GPUs and TPUs, by the compilers of these, with no such device at hand.

    python -m benchmarks.cost.accelerators                   # all of it: about an hour
    python -m benchmarks.cost.accelerators --targets h100    # one device

It needs the plugins of JAX, 6 GB (`make accelerators` installs them into an environment of their
own), and no device. All counts are exact. Finished cells are kept in
`benchmarks/results/accelerators-jax<version>.json`, the tables in `docs/accelerators.md`.

Variants of a transformer layer (forward and backward; Flax, width 1,024, 4 x 1,024 tokens): as it
is, through `scalify` with static scales and with dynamic ones, each in bfloat16, in float16, and
with `fp8_matmuls` in bfloat16; on the H100 also with what Flax and Qwix have for FP8. Variants of
training steps (a Llama, a mixture of experts, a GPT and a ResNet; clipping and AdamW): bfloat16
with weights and state in float32; the recipe of the README in float16, and with FP8 matmuls; each
with dynamic scales of the weights too; and with frozen scales. On the B200 also the matmuls of a
linear layer in block formats.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import Dense, fp8_ops
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.fp8 import import_qwix, qwix_provider
from benchmarks.accuracy.scale_models import PLAIN
from benchmarks.cells import Cells, Store
from benchmarks.cost import accelerators_page as pages
from benchmarks.cost.decoder import make_decoder, mixture
from benchmarks.cost.flax_models import GptSizes, ResNetSizes, make_gpt, make_resnet
from benchmarks.cost.fp8_forms import LINEAR
from benchmarks.cost.gpu_fp8 import TransformerLayer, forward_and_backward
from benchmarks.cost.training import Model, plain_step, scaled_step
from benchmarks.paths import RESULTS, ROOT
from examples.gpt.train import write_text

PAGE = ROOT / "docs" / "accelerators.md"
WIDTH, BATCH, TOKENS = 1024, 4, 1024  # of the layer
LAYERS = ("bfloat16", "float16", "fp8")
LAYER_VARIANTS = ("plain", "static", "dynamic")
OTHERS = ("flax", "qwix", "qwix-static")
OURS = {"plain": "fp8_matmuls", "static": "in scalify, static", "dynamic": "in scalify, dynamic"}
STEPS = ("plain", "float16", "float16-dynamic", "fp8", "fp8-dynamic", "fp8-frozen")
MODELS: dict[str, Callable[[int], Model]] = {
    "llama": make_decoder,
    "gpt": lambda devices: make_gpt(GptSizes(), devices),
    "resnet": lambda devices: make_resnet(ResNetSizes(), devices),
    "moe": lambda devices: make_decoder(devices, mixture(8)),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """A target, and what its makers say of one device.

    Attributes:
        target: as `compile_report` takes it.
        steps_on: how many devices share a training step; layers are compiled for one.
        flops: dense, in 16 bits and in FP8, a second.
        bandwidth: of its memory, bytes a second.
        others: whether to compare with other libraries.
        blocks: whether it is said to multiply block formats.
    """

    target: str | None
    steps_on: int
    flops: tuple[float, float] = (0.0, 0.0)
    bandwidth: float = 0.0
    others: bool = False
    blocks: bool = False


# Data sheets of NVIDIA's H100 SXM and HGX B200, Google Cloud's pages of TPU v5p, v6e and TPU7x; a
# TPU7x chip is two devices. Of v5p and v6e no rate of FP8 is published: that of bfloat16.
_H100 = {"flops": (989e12, 1979e12), "bandwidth": 3.35e12}
DEVICES = {
    "h100": Device("h100", 1, **_H100, others=True),
    "h100:8": Device("h100:8", 8, **_H100),
    "b200": Device("b200", 1, (2250e12, 4500e12), 8e12, blocks=True),
    "v5p": Device("v5p:2x2x1", 1, (459e12, 459e12), 2.765e12),
    "v6e": Device("v6e:2x2", 1, (918e12, 918e12), 1.64e12),
    "tpu7x": Device("tpu7x:2x2x1", 1, (1153.5e12, 2307e12), 3.69e12),
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


def other(variant: str) -> tuple[Callable, tuple]:
    """The same layer in bfloat16, with FP8 as another library does it."""
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.bfloat16)
    if variant == "flax":
        dense = functools.partial(Dense, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
        module: Any = TransformerLayer(dataclasses.replace(PLAIN, Dense=dense), jnp.bfloat16)
    else:
        provider = qwix_provider(act_static_scale=variant == "qwix-static")
        plain = TransformerLayer(PLAIN, jnp.bfloat16)
        module = import_qwix().quantize_model(plain, provider)
    variables = dict(jax.eval_shape(module.init, jax.random.key(0), x))
    # What changes from step to step and is not trained by a gradient.
    statistics = {name: variables.pop(name) for name in list(variables) if name == "quant_stats"}

    def fun(cotangent: jax.Array, variables: Any, statistics: Any, x: jax.Array) -> Any:
        def apply(variables: Any, x: jax.Array) -> Any:
            return module.apply(variables | statistics, x, mutable=list(statistics))

        out, pullback, new = jax.vjp(apply, variables, x, has_aux=True)
        return out, pullback(cotangent), new

    return fun, (x, variables, statistics, x)


def step(model: str, variant: str, devices: int) -> tuple[Callable, tuple]:
    """A training step, and its arguments' shapes."""
    made = MODELS[model](devices)
    if variant == "plain":
        compared = plain_step(made, devices)
    else:
        kind, _, scales = variant.partition("-")
        options = {scales: True} if scales else {}
        compared = scaled_step(made, devices, fp8=kind == "fp8", **options)
    return compared.jitted(), (compared.state, compared.batch)


def measure(
    target: str | None, devices: int, make: Callable[[], tuple[Callable, tuple]]
) -> dict[str, Any]:
    """Compile, and keep what is counted."""
    fun, args = make()
    report = jsa.numerics.compile_report(fun, *args, target=target)
    memory = report.memory and dataclasses.asdict(report.memory)
    rows = report.matmuls.rows
    flop = {
        narrow: sum(
            2.0 * row.sizes.batch * row.sizes.m * row.sizes.k * row.sizes.n * (row.runs or 1)
            for row in rows
            if row.has_fp8_operands is narrow
        )
        for narrow in (False, True)
    }
    return {
        "launches": report.launches,
        "tiny": report.tiny,
        "bytes": report.bytes_moved,
        "memory": memory,
        "seconds": round(report.processor_seconds, 2),
        "collectives": [dataclasses.asdict(c) for c in report.collectives],
        "matmuls": len(rows),
        "kernels": sorted({name for row in rows for name in row.kernel.split(" or ")}),
        "fp8": sum(row.is_fp8 is True for row in rows),
        "flop": flop[False] / devices,
        "flop_fp8": flop[True] / devices,
    }


def _installed(others: Sequence[str]) -> list[str]:
    """Those of other libraries that are there; Qwix is none of the project's dependencies."""
    has_qwix = importlib.util.find_spec("qwix") is not None
    return [variant for variant in others if has_qwix or not variant.startswith("qwix")]


def make_tasks(names: Sequence[str]) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Every cell of some devices: `device/layer/dtype/variant` or `device/model/variant`."""
    for name in names:
        device = DEVICES[name]

        def task(
            make: Callable[[], tuple[Callable, tuple]], count: int, device: Device = device
        ) -> Callable[[], dict]:
            return functools.partial(measure, device.target, count, make)

        if device.steps_on == 1:
            for kind in LAYERS:
                for variant in LAYER_VARIANTS:
                    make = functools.partial(layer, kind, variant)
                    yield f"{name}/layer/{kind}/{variant}", task(make, 1)
        for variant in _installed(OTHERS) if device.others else ():
            yield f"{name}/others/{variant}", task(functools.partial(other, variant), 1)
        for kind, make in LINEAR.items() if device.blocks else ():
            yield f"{name}/linear/{kind}", task(make, 1)
        for model in MODELS:
            for variant in STEPS:
                make = functools.partial(step, model, variant, device.steps_on)
                yield f"{name}/{model}/{variant}", task(make, device.steps_on)


def tables(results: pages.Results) -> Iterator[tuple[str, tuple, pages.Rows]]:
    """Title, header and rows of each table."""
    for name in DEVICES:
        if f"{name}/layer/bfloat16/plain" in results:
            rows = []
            for kind in LAYERS:
                base = f"{name}/layer/{'bfloat16' if kind == 'fp8' else kind}/plain"
                keys = {f"{kind}, {v}": f"{name}/layer/{kind}/{v}" for v in LAYER_VARIANTS}
                rows += pages.rows_of(results, base, keys)
            title = f"{name}: one layer, against the same dtype without scales (FP8: bfloat16)"
            yield title, pages.HEADER, rows
        base = f"{name}/layer/bfloat16/plain"
        if any(f"{name}/others/{variant}" in results for variant in OTHERS) and base in results:
            keys = {variant: f"{name}/others/{variant}" for variant in OTHERS}
            keys |= {title: f"{name}/layer/fp8/{variant}" for variant, title in OURS.items()}
            title = f"{name}: one layer, our FP8 matmuls and others, against bfloat16"
            yield title, pages.HEADER, pages.rows_of(results, base, keys)
        keys = {kind: f"{name}/linear/{kind}" for kind in LINEAR}
        if keys["bfloat16"] in results:
            title = (
                f"{name}: the three matmuls of a linear layer in block formats, against bfloat16"
            )
            yield title, *pages.kernel_rows(results, keys["bfloat16"], keys)
        for model in MODELS:
            base, keys = f"{name}/{model}/plain", {v: f"{name}/{model}/{v}" for v in STEPS}
            if base not in results:
                continue
            title = (
                f"{name}: training step of {model}, against bfloat16 with float32 weights and AdamW"
            )
            yield title, pages.HEADER, pages.rows_of(results, base, keys)
            if any(results[key]["collectives"] for key in keys.values() if key in results):
                yield f"{name}: collectives, MB ({model})", *pages.collective_rows(results, keys)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile what is missing, store and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--targets", nargs="+", choices=DEVICES, default=list(DEVICES))
    add("--only", help="cells whose names match this regular expression")
    add("--fresh", action="store_true", help="compile what was compiled before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    add("--docs", type=Path, help="write the tables and a picture to this page")
    options = parser.parse_args(arguments)
    console = Console(width=140)
    cells = Cells(
        Store(options.out / f"accelerators-jax{jax.__version__}.json"), options.fresh, console
    )
    tasks = dict(make_tasks(options.targets))
    if options.only:
        tasks = {key: task for key, task in tasks.items() if re.search(options.only, key)}
    cells.add(tasks, {})
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
        picture = options.out / "accelerators.png"
        pages.draw(results, picture)
        rates = {k: (*d.flops, d.bandwidth) for k, d in DEVICES.items() if d.bandwidth}
        limits = pages.limit_rows(results, rates)
        name = os.path.relpath(picture, options.docs.parent)
        write_text(options.docs, pages.markdown(tables(results), limits, name))


if __name__ == "__main__":
    main()
