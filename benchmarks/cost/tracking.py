"""What `jsa.numerics.track` costs a training step of the GPT example.

    python -m benchmarks.cost.tracking [--presets fp32 fp16-all] [--steps 60]

Three kinds of steps are timed in turn: `plain`, the step alone; `other`, a call of the tracked step
that makes no record; `record`, one that does. With medians of these, a hundred calls of which one
makes a record cost `(99 * other + record) / (100 * plain) - 1` more; `other` is the same program as
`plain`, so what differs there is noise. `compile` is the first record, and so the compilation of
the second program, without a cache. What is recorded: the whole state, or the state and what the
backward pass of a block computes. Results go to `benchmarks/results/tracking-jax<version>.json`.
"""

import argparse
import json
import os
import statistics
import time

os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import jax_scalify as jsa  # noqa: E402
from benchmarks.paths import RESULTS  # noqa: E402
from examples.gpt import step  # noqa: E402
from examples.gpt.config import get_size  # noqa: E402
from examples.gpt.presets import get_preset  # noqa: E402
from examples.gpt.records import write_text  # noqa: E402

EVERY = 100
SELECTIONS = {"state": None, "state, backward of a block": ["args[0]*", "backward/block_0:*"]}


def measure(size: str, preset: str, select: list[str] | None, steps: int) -> dict:
    """Time the three kinds of steps in turn, and return medians in seconds."""
    config = get_size(size)
    update = step.make_update(config, get_preset(preset))
    tracked = jsa.numerics.track(update, select, every=10**9)
    state = step.init_state(config, get_preset(preset), seed=0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (config.batch, config.context + 1), np.int32)
    calls = {"plain": update, "other": tracked, "record": tracked.record}
    seconds, values, compile_seconds = {name: [] for name in calls}, 0, 0.0
    for number in range(steps + 2):
        # What follows a record finds other data in the caches: it is not timed.
        for name in ("plain", "other", "other", "plain", "record", ""):
            if not name:
                state = jax.block_until_ready(update(state, tokens))[0]
                continue
            started = time.perf_counter()
            out = jax.block_until_ready(calls[name](state, tokens))
            taken = time.perf_counter() - started
            if name == "record" and not values:
                values, compile_seconds = len(out[1].names), taken
            if number >= 2:
                seconds[name].append(taken)
            state = out[0] if name == "plain" else out[0][0]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    mixed = ((EVERY - 1) * medians["other"] + medians["record"]) / EVERY
    return {
        "values": values,
        **medians,
        "compile": compile_seconds,
        "cost": mixed / medians["plain"] - 1,
    }


def main() -> None:
    """Measure, print a table, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--presets", nargs="+", default=["fp32", "fp16-all"])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    results = {}
    table = Table(title=f"GPT {options.size}: a record each {EVERY} steps")
    names = ("preset", "recorded", "values", "plain", "other", "record", "compile", "cost")
    for name in names:
        table.add_column(name, justify="left" if name in names[:2] else "right")
    for preset in options.presets:
        for title, select in SELECTIONS.items():
            found = measure(options.size, preset, select, options.steps)
            results.setdefault(preset, {})[title] = found
            times = [f"{1000 * found[name]:.2f} ms" for name in ("plain", "other", "record")]
            last = [f"{found['compile']:.1f} s", f"{found['cost']:+.2%}"]
            table.add_row(preset, title, str(found["values"]), *times, *last)
    Console(width=110).print(table)
    stored = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "size": options.size}
    path = RESULTS / f"tracking-jax{jax.__version__}.json"
    text = json.dumps(stored | {"steps": options.steps, "presets": results}, indent=1)
    write_text(path, text + "\n")


if __name__ == "__main__":
    main()
