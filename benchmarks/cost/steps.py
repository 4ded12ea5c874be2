"""What `scalify` costs: time to compile, size of the program, time of a step, memory.

    python -m benchmarks.cost.steps  # every model
    python -m benchmarks.cost.steps --models mlp-8x64 gpt-4x128 --repeats 3 --steps 100

Each model (`benchmarks/cost/models.py`) is trained in float32 by three steps: `plain`; `dynamic`,
through `scalify` with scales that are arrays; and `frozen`, the same with static scales
(`jsa.freeze_scales`), which the step keeps (`jsa.match_scales`). The README's recipe is measured as
README has it too, `static-weights`: the weights' scales static, those of the moments arrays. The
GPTs of width 512 see 4 sequences of 32 tokens, the others 8 of 64, so two CPU cores are enough.

Tracing, lowering and compiling are measured in processes of their own, without a compilation cache,
the variants in turn, in seconds of processor time: XLA compiles on all cores, and what else runs on
a shared machine must not count. Steps are timed in one process, one of each variant in turn, in all
orders; for at most a minute a model. Times are first quartile, median and third quartile: a shared
machine is noisy, a ratio of medians less so. Every finished model is kept in
`benchmarks/results/cost-jax<version>.json`: a run that was stopped goes on with the next one.
"""

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402

from benchmarks.cells import Cells, Store  # noqa: E402
from benchmarks.cost import page as cost_page  # noqa: E402
from benchmarks.cost.models import MODELS, VARIANTS, Recipe  # noqa: E402
from benchmarks.cost.programs import count_hlo, count_stablehlo  # noqa: E402
from benchmarks.paths import RESULTS, ROOT  # noqa: E402

STEP_SECONDS = 60
MIN_STEPS = 12
TIMES = ("trace", "lower", "compile", "first_call")


def first_call(model: str, variant: str, scales: Sequence[float]) -> dict:
    """Measure tracing, lowering and compiling in processor time, and look at what came out."""
    problem = MODELS[model]()
    update, state = problem.setting(variant, scales)
    jax.block_until_ready(state)
    moments = [time.process_time()]
    traced = update.trace(state, problem.batch)
    moments.append(time.process_time())
    lowered = traced.lower()
    moments.append(time.process_time())
    compiled = lowered.compile()
    moments.append(time.process_time())
    memory = compiled.memory_analysis()
    seconds = [*np.diff(moments), moments[-1] - moments[0]]
    return {
        **dict(zip(TIMES, seconds, strict=True)),
        **count_stablehlo(lowered.as_text()),
        **count_hlo(compiled.as_text()),
        "temporary": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes + memory.output_size_in_bytes,
    }


def first_call_in_new_process(model: str, variant: str, scales: Sequence[float]) -> dict:
    """Run `first_call` where nothing was traced or compiled before.

    Raises:
        RuntimeError: with what the process said, if it fails.
    """
    command = [sys.executable, "-m", "benchmarks.cost.steps", "--first-call", model, variant]
    done = subprocess.run(
        command, input=json.dumps(scales), capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_steps(
    model: str, variants: Sequence[str], scales: Sequence[float], steps: int
) -> dict[str, list[float]]:
    """Return seconds of steps, one of each variant in turn."""
    problem = MODELS[model]()
    running = {variant: problem.setting(variant, scales) for variant in variants}

    def run(variant: str) -> float:
        update, state = running[variant]
        started = time.perf_counter()
        state, loss = jax.block_until_ready(update(state, problem.batch))
        running[variant] = update, state
        return time.perf_counter() - started

    for variant in (*variants, *variants):  # the first call compiles
        run(variant)
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    started = time.perf_counter()
    orders = itertools.cycle(itertools.permutations(variants))
    for number, order in zip(range(steps), orders):
        if number >= MIN_STEPS and time.perf_counter() - started > STEP_SECONDS:
            break
        for variant in order:
            times[variant].append(run(variant))
    return times


def quartiles(values: Sequence[float]) -> list[float]:
    """Return first quartile, median and third quartile."""
    return [float(f"{q:.5g}") for q in np.percentile(values, [25, 50, 75])]


def measure(model: str, variants: Sequence[str], repeats: int, steps: int) -> dict[str, dict]:
    """Return all that is known of a model, a dictionary for each variant."""
    problem = MODELS[model]()
    scales = problem.find_scales() if "frozen" in variants else []
    if not isinstance(problem, Recipe):
        variants = [variant for variant in variants if variant != "static-weights"]
    samples: dict[str, list[dict]] = {variant: [] for variant in variants}
    for _ in range(repeats):
        for variant in variants:
            samples[variant].append(first_call_in_new_process(model, variant, scales))
    steps_of = measure_steps(model, variants, scales, steps)
    return {
        variant: taken[0]
        | {key: quartiles([sample[key] for sample in taken]) for key in TIMES}
        | {"step": quartiles(steps_of[variant])}
        for variant, taken in samples.items()
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--repeats", type=int, default=3, help="processes of each variant (default: %(default)s)")
    add("--steps", type=int, default=30, help="of each variant, at most (default: %(default)s)")
    add("--fresh", action="store_true", help="measure what was measured before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    add("--docs", type=Path, metavar="FILE", help="write the page of all that is in --out")
    add("--first-call", nargs=2, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, store it, print the tables."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.first_call:
        print(json.dumps(first_call(*options.first_call, json.load(sys.stdin))))
        return
    for name in ("repeats", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(options, name)}")
    variants = [v for v in VARIANTS if v in options.variants or v == "plain"]

    console = Console() if sys.stdout.isatty() else Console(width=160)
    store = Store(options.out / f"cost-jax{jax.__version__}.json")
    cells = Cells(store, options.fresh, console)
    settings = {"variants": variants, "repeats": options.repeats, "steps": options.steps}
    tasks = {
        model: functools.partial(measure, model, variants, options.repeats, options.steps)
        for model in options.models
    }
    cells.add(tasks, settings)
    results = cells.run()
    for table in cost_page.make_tables(jax.__version__, results):
        console.print(table.for_terminal())
    if options.docs:
        cost_page.write_page(options.docs, options.out)
        console.print(f"wrote {options.docs}")


if __name__ == "__main__":
    main()
