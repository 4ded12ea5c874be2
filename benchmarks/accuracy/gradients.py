"""What does the format cost in which gradients travel between eight devices?

    make gradients
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.accuracy.gradients

The GPT of `small_problems`, with everything in float16, its weights cut over eight devices: they
are gathered in a `shard_map`, whose backward pass adds the gradients of all devices up and leaves
to each its part. Their sum is one of float32, of float16, which is the default, or of E5M2
(`ScalifyConfig(sum_dtype=...)`); the loss is that of held-out text. Finished cells are kept in
`benchmarks/results/gradients-jax<version>.json`.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

import jax_scalify as jsa
from benchmarks.accuracy.small_problems import (
    PROBLEMS,
    TrainState,
    evaluate,
    make_run,
    scaled_state,
)
from benchmarks.cells import Cells, Store
from benchmarks.paths import RESULTS

DEVICES = 8
LEARNING_RATE = 3e-3
SUM_DTYPES = {"float32": jnp.float32, "float16": None, "float8_e5m2": jnp.float8_e5m2}
PROBLEM = PROBLEMS["gpt"]
PyTree = Any


def cut(leaf: Any) -> P:
    """How a weight is cut: its first axis that can be."""
    if len(leaf.shape) < 2:
        return P()
    axis = next((a for a, n in enumerate(leaf.shape) if n % DEVICES == 0), None)
    return P() if axis is None else P(*[None] * axis, "fsdp")


def make_loss(specs: PyTree) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Return `loss(params, tokens)` of weights that lie as `specs` say."""
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])
    loss = PROBLEM.make_loss(jnp.float16)

    def gather(leaf: jax.Array, spec: P) -> jax.Array:
        if not spec:
            return leaf
        return lax.all_gather(leaf, "fsdp", axis=len(spec) - 1, tiled=True)

    def body(params: PyTree, tokens: jax.Array) -> jax.Array:
        return lax.pmean(loss(jax.tree.map(gather, params, specs), tokens), "fsdp")

    return jax.shard_map(body, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=P())


def make_update(sum_dtype: Any, specs: PyTree, steps: int) -> tuple[Any, Callable]:
    """Return the optimizer and the step `(state, batch) -> (state, loss, skipped)`."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, max(steps // 40, 1), steps, LEARNING_RATE / 10
    )
    optimizer = jsa.optim.low_precision(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    )
    loss_fn = make_loss(specs)

    def update(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jsa.optim.apply_updates(state.params, updates)
        return TrainState(params, opt_state), loss, jnp.int32(0)

    config = jsa.ScalifyConfig(sum_dtype=sum_dtype)
    return optimizer, jsa.scalify(update, config=config)


def train(sum_dtype: Any, seed: int, steps: int) -> dict:
    """Train one cell: its held-out loss, and the first step whose state was not finite, or -1."""
    params = PROBLEM.init(seed)
    optimizer, update = make_update(sum_dtype, jax.tree.map(cut, params), steps)
    state = scaled_state(optimizer, params)
    outcome = make_run(update)(state, PROBLEM.batches(seed, steps))
    return {
        "loss": evaluate(PROBLEM, outcome.state.params, jnp.float16),
        "first_bad_step": int(outcome.first_bad_step),
    }


def summarise(cells: dict[str, dict], seeds: Sequence[int]) -> Table:
    """Compare each format with sums in float32, seed by seed."""
    table = Table(box=box.SIMPLE)
    for column in ("gradients travel in", "loss", "gap", "worst seed", "state"):
        table.add_column(column, justify="right" if column != "gradients travel in" else "left")
    for name in SUM_DTYPES:
        found = [cells[f"{name}/{seed}"] for seed in seeds]
        reference = [cells[f"float32/{seed}"] for seed in seeds]
        gaps = [100 * (a["loss"] / b["loss"] - 1) for a, b in zip(found, reference, strict=True)]
        finite = all(cell["first_bad_step"] < 0 for cell in found)
        table.add_row(
            name,
            f"{statistics.fmean(cell['loss'] for cell in found):.4f}",
            f"{statistics.fmean(gaps):+.2f}%",
            f"{max(gaps, key=abs):+.2f}%",
            "finite" if finite else "NOT FINITE",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, store it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument("--fresh", action="store_true", help="run finished cells again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    options = parser.parse_args(arguments)
    for name in ("seeds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(options, name)}")
    if jax.device_count() < DEVICES:
        parser.error(
            f"needs {DEVICES} devices, and there are {jax.device_count()}: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES}"
        )
    console = Console()
    seeds = range(options.seeds)
    cells = Cells(
        Store(options.out / f"gradients-jax{jax.__version__}.json"), options.fresh, console
    )
    tasks = {
        f"{name}/{seed}": functools.partial(train, dtype, seed, options.steps)
        for seed in seeds
        for name, dtype in SUM_DTYPES.items()
    }
    settings = {"steps": options.steps, "learning_rate": LEARNING_RATE, "devices": DEVICES}
    cells.add(tasks, settings | {"jax": jax.__version__})
    console.print(summarise(cells.run(), seeds))


if __name__ == "__main__":
    main()
