"""What Llamas of 8 to 405 billion parameters ask of each device, by the compilers of GPUs and TPUs.

    python -m benchmarks.cost.scale_out

It needs the plugins of JAX (`make scale-out` installs them) and no device: no array is made. Each
step is that of `examples/llama`, with sequences of 8,192 tokens, one for each part of the batch.
Finished cells are kept in `benchmarks/results/scale_out-jax<version>.json`, the table in
`docs/scale_out.md`.
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from rich.console import Console

from benchmarks.cells import Cells, Store
from benchmarks.paths import RESULTS, ROOT
from examples.gpt.train import write_text
from examples.llama.layout import Layout, abstract_mesh, parse_mesh
from examples.llama.model import SIZES
from examples.llama.plan import Plan, gigabytes, make_plan, plan_table
from examples.llama.step import Training

PAGE = ROOT / "docs" / "scale_out.md"
START, END = "<!-- table of make scale-out -->\n", "<!-- end -->\n"
# Size, target, mesh: as one would train, and where the state alone is too much in 12 bytes.
RUNS = (
    ("8b", "h100", "fsdp=1"),
    ("8b", "h100:8", "fsdp=8"),
    ("70b", "h100:2x8", "fsdp=16"),
    ("70b", "h100:16x8", "fsdp=16,tensor=8"),
    ("405b", "h100:8x8", "fsdp=8,tensor=8"),
    ("405b", "h100:128x8", "fsdp=128,tensor=8"),
    ("405b", "v5p:8x8x16", "fsdp=128,tensor=8"),
    ("405b", "tpu7x:8x8x8", "fsdp=128,tensor=8"),
)
RECIPES = ("bfloat16", "float16", "fp8", "fp8-frozen")


def plan(size: str, target: str, mesh: str, recipe: str) -> dict:
    """Compile one step."""
    layout = Layout(abstract_mesh(parse_mesh(mesh, None)))
    training = Training(SIZES[size], layout, recipe)
    return dataclasses.asdict(make_plan(training, layout.size("data", "fsdp"), target))


def rows(results: dict[str, dict]) -> Iterator[tuple[str, ...]]:
    """The rows of the page's table."""
    for size, target, mesh in RUNS:
        for recipe in RECIPES:
            cell = results.get(f"{size}/{target}/{recipe}")
            if cell is None:
                continue
            found = Plan(**cell)
            sent = {
                kind: sum(n for k, n in found.collectives.items() if k.startswith(kind))
                for kind in ("all-gather", "reduce-scatter", "all-reduce")
            }
            yield (
                f"{size}, {target}, {mesh}",
                recipe,
                *map(gigabytes, (found.state, found.temporary, found.peak)),
                {True: "yes", False: "**no**", None: "?"}[found.fits],
                gigabytes(sent["all-gather"]),
                gigabytes(sent["reduce-scatter"] + sent["all-reduce"]),
                f"{found.seconds:.0f} s",
            )


def markdown(results: dict[str, dict]) -> str:
    """The table."""
    header = (
        "model, devices, mesh",
        "recipe",
        "state",
        "temporary",
        "peak",
        "fits",
        "gathered",
        "reduced",
        "compile",
    )
    lines = [" | ".join(header), " | ".join(["---"] * 2 + ["---:"] * (len(header) - 2))]
    lines += [" | ".join(row) for row in rows(results)]
    return "\n".join(f"| {line} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile what is missing, store and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--targets", nargs="+", help="only these: h100, v5p, tpu7x")
    add("--fresh", action="store_true", help="compile what was compiled before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    add("--docs", type=Path, help="write the table into this page")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    console = Console(width=150)
    store = Store(options.out / f"scale_out-jax{jax.__version__}.json")
    cells = Cells(store, options.fresh, console)
    for size, target, mesh in RUNS:
        if options.targets and target.partition(":")[0] not in options.targets:
            continue
        tasks = {
            f"{size}/{target}/{recipe}": functools.partial(plan, size, target, mesh, recipe)
            for recipe in RECIPES
        }
        cells.add(tasks, {"mesh": mesh})
    results = cells.run()
    for size, target, mesh in RUNS:
        keys = {recipe: f"{size}/{target}/{recipe}" for recipe in RECIPES}
        plans = {r: Plan(**results[k]) for r, k in keys.items() if k in results}
        if plans:
            console.print(plan_table(f"Llama {size}, {target} ({mesh}); per device", plans))
    if options.docs:
        before, _, rest = options.docs.read_text().partition(START)
        after = rest.partition(END)[2]
        write_text(options.docs, f"{before}{START}{markdown(results)}\n{END}{after}")


if __name__ == "__main__":
    main()
