"""What `scalify` costs on the GPT example: compile time, size of the compiled step, step time.

    python benchmarks/gpt_cost.py [--layers 4 8] [--repeats 3] [--steps 60]

Plain and scaled steps run in turn in one process, and medians are compared: a shared machine is
noisy, a ratio less so. First calls are measured in processes of their own, without a compilation
cache, also in turn. Results go to `benchmarks/results/gpt_cost-jax<version>.json`.
"""

import argparse
import dataclasses
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from examples.gpt import step  # noqa: E402
from examples.gpt.config import get_size  # noqa: E402
from examples.gpt.presets import get_preset  # noqa: E402

PRESETS = ("fp32", "fp32-scaled", "fp16-all")


def setting(preset: str, layers: int):
    """The jitted step, its state and a batch."""
    config = dataclasses.replace(get_size("tiny"), layers=layers)
    tokens = np.random.default_rng(0).integers(0, 256, (config.batch, config.context + 1), np.int32)
    state = step.init_state(config, get_preset(preset), seed=0)
    return step.make_update(config, get_preset(preset)), state, tokens


def first_call(preset: str, layers: int) -> dict:
    """Time tracing, lowering and compiling, and count instructions."""
    update, state, tokens = setting(preset, layers)
    times = [time.perf_counter()]
    traced = update.trace(state, tokens)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    text = compiled.as_text()
    return {
        "trace_s": times[1] - times[0],
        "lower_s": times[2] - times[1],
        "compile_s": times[3] - times[2],
        "first_call_s": times[3] - times[0],
        "stablehlo": len(re.findall(r"^\s+%\S+ = ", lowered.as_text(), re.M)),
        "hlo": len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", text, re.M)),
        "fusions": text.count(" fusion("),
    }


def measure_first_calls(presets, layers: int, repeats: int, console: Console) -> dict:
    """Medians over fresh processes, the presets in turn."""
    samples: dict[str, list[dict]] = {preset: [] for preset in presets}
    for number in range(repeats):
        for preset in presets:
            console.print(f"first call {number + 1}/{repeats}: {preset}, {layers} layers")
            command = [sys.executable, __file__, "--first-call", preset, "--layers", str(layers)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            samples[preset].append(json.loads(out.splitlines()[-1]))
    return {
        preset: {key: statistics.median(s[key] for s in taken) for key in taken[0]}
        for preset, taken in samples.items()
    }


def measure_steps(presets, layers: int, steps: int, console: Console) -> dict:
    """Median step times in milliseconds, one step of each preset in turn."""
    running = {}
    for preset in presets:
        update, state, tokens = setting(preset, layers)
        running[preset] = [update, update(state, tokens)[0], tokens]
    times: dict[str, list[float]] = {preset: [] for preset in presets}
    for number in range(steps):
        for preset in presets if number % 2 else reversed(presets):
            update, state, tokens = running[preset]
            started = time.perf_counter()
            running[preset][1], loss = update(state, tokens)
            jax.block_until_ready(loss)
            jax.block_until_ready(running[preset][1])
            times[preset].append(1e3 * (time.perf_counter() - started))
        if number % 20 == 19:
            console.print(f"steps {number + 1}/{steps}")
    return {
        preset: dict(
            zip(("q1_ms", "median_ms", "q3_ms"), statistics.quantiles(taken, n=4), strict=True)
        )
        for preset, taken in times.items()
    }


def main() -> None:
    """Measure, print tables, store JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--first-call", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_call:
        print(json.dumps(first_call(args.first_call, args.layers[0])))
        return

    console = Console()
    results = {}
    for layers in args.layers:
        first = measure_first_calls(PRESETS, layers, args.repeats, console)
        results[layers] = {preset: dict(row) for preset, row in first.items()}
    timed = args.layers[0]
    for preset, row in measure_steps(PRESETS, timed, args.steps, console).items():
        results[timed][preset] |= row

    table = Table(title=f"JAX {jax.__version__}, tiny GPT update; ratios are to fp32")
    for name in ("layers", "preset", "trace s", "lower s", "compile s", "first call", "StableHLO"):
        table.add_column(name, justify="right")
    for name in ("HLO", "HLO a layer", "fusions", "step ms"):
        table.add_column(name, justify="right")
    for layers, rows in results.items():
        plain = rows["fp32"]

        def ratio(row: dict, key: str, form: str, plain: dict = plain) -> str:
            if key not in row:
                return ""
            return f"{format(row[key], form)} ({row[key] / plain[key]:.2f}x)"

        for preset, row in rows.items():
            table.add_row(
                str(layers),
                preset,
                *(f"{row[k]:.2f}" for k in ("trace_s", "lower_s", "compile_s")),
                ratio(row, "first_call_s", ".2f"),
                ratio(row, "stablehlo", ",.0f"),
                ratio(row, "hlo", ",.0f"),
                f"{row['hlo'] / layers:,.0f}",
                ratio(row, "fusions", ",.0f"),
                ratio(row, "median_ms", ".1f"),
            )
    Console(width=160).print(table)
    out = ROOT / "benchmarks" / "results" / f"gpt_cost-jax{jax.__version__}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "cpus": os.cpu_count()}
    out.write_text(json.dumps({"jax": jax.__version__, **machine, "layers": results}, indent=2))
    console.print(f"stored {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
