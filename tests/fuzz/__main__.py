"""`python -m tests.fuzz --programs N --seed S`: run random programs, and keep those that fail.

Progress and failures are files under `.fuzz/`, one folder a seed and version of JAX: a run that
was stopped goes on where it was. `--only INDEX` repeats one program. With `--steps` programs are
losses, which are trained for some steps: see `tests/fuzz/steps.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax

from tests.fuzz.programs import DTYPES, FLOATS, Discarded, Program, generate
from tests.fuzz.running import Failure, check
from tests.fuzz.shrinking import shrink
from tests.fuzz.steps import Training, check_training, generate_training, shrink_training

ROOT = Path(".fuzz")
CHUNK = 20
# Chunks of a worker after which it forgets what it has compiled.
CLEAR_EVERY = 20


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many, from number 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--only", type=int, metavar="INDEX", help="repeat one program")
    parser.add_argument("--steps", action="store_true", help="repeat random training steps")
    parser.add_argument("--fresh", action="store_true", help="forget the progress of earlier runs")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    configure()
    if options.only is not None:
        return repeat(options.seed, options.only, options.steps)
    folder = ROOT / f"{'steps-' * options.steps}seed{options.seed}-jax{jax.__version__}"
    if options.fresh and folder.exists():
        for file in folder.iterdir():
            file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    if options.shard is not None:
        run_shard(folder, options)
        return 0
    return run_all(folder, options)


def configure() -> None:
    """Compile cheaply, keep nothing on disk, and do not warn of what is tried on purpose."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", None)
    warnings.simplefilter("ignore")


def report(seed: int, index: int, program: Program | Training, failure: Failure) -> str:
    """What is printed and stored of a failure."""
    if isinstance(program, Training):
        return (
            f"# Training {index} of seed {seed}, {FLOATS[index % 3]}: {failure.kind}\n"
            f"# {_in_one_line(failure.detail)}\n\n{program.code()}"
        )
    return (
        f"# Program {index} of seed {seed}, {DTYPES[index % 4]}, {program.wrapper}, result "
        f"{failure.leaf}: {failure.kind}\n# {_in_one_line(failure.detail)}\n\n{program.code()}"
    )


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def repeat(seed: int, index: int, steps: bool = False) -> int:
    """Run one program and print it and, if it fails, what it shrinks to."""
    program = (generate_training if steps else generate)(seed, index)
    print(program.code())
    try:
        failure = _check(program)
    except Discarded as reason:
        print(f"# is not compared: {_in_one_line(str(reason)) or 'see tests/fuzz/running.py'}")
        return 0
    if failure is None:
        print("# passes")
        return 0
    print(f"# fails: {failure.kind}: {failure.detail}\n# shrinking ...\n")
    print(report(seed, index, *_shrink(program, failure)))
    return 1


def _check(program: Program | Training) -> Failure | None:
    return check_training(program) if isinstance(program, Training) else check(program)


def _shrink(program: Program | Training, failure: Failure) -> tuple[Any, Failure]:
    if isinstance(program, Training):
        return shrink_training(program, failure)
    return shrink(program, failure)


def run_shard(folder: Path, options: argparse.Namespace) -> None:
    """Run each chunk that is this worker's and was not run before."""
    for number, chunk in enumerate(_chunks(options.programs)):
        done = _file_of(folder, chunk)
        if number % options.workers != options.shard or done.exists():
            continue
        counts = {"programs": len(chunk), "failures": 0, "discarded": 0}
        for index in chunk:
            program = (generate_training if options.steps else generate)(options.seed, index)
            try:
                text = _failure_of(program, options.seed, index)
            except Discarded:
                counts["discarded"] += 1
                continue
            if text:
                (folder / f"failure{index}.py").write_text(text)
                print(f"{text}\n", flush=True)
                counts["failures"] += 1
        done.write_text(json.dumps(counts))
        if (number // options.workers + 1) % CLEAR_EVERY == 0:
            jax.clear_caches()


def _failure_of(program: Program | Training, seed: int, index: int) -> str:
    """What to say of a program that fails, or that the fuzzer itself could not check."""
    try:
        failure = _check(program)
        return "" if failure is None else report(seed, index, *_shrink(program, failure))
    except Discarded:
        raise
    except Exception:
        return (
            f"# The check of program {index} of seed {seed} raised:\n"
            f"{textwrap.indent(traceback.format_exc(), '# ')}\n\n{program.code()}"
        )


def _chunks(programs: int) -> list[range]:
    return [range(s, min(s + CHUNK, programs)) for s in range(0, programs, CHUNK)]


def _file_of(folder: Path, chunk: range) -> Path:
    return folder / f"chunk{chunk.start}-{chunk.stop}.json"


def run_all(folder: Path, options: argparse.Namespace) -> int:
    """Start the workers, tell how far they are, and return 1 if a program failed."""
    command = [sys.executable, "-m", "tests.fuzz"]
    command += [c for c in sys.argv[1:] if c != "--fresh"]
    workers = [subprocess.Popen([*command, "--shard", str(k)]) for k in range(options.workers)]
    before = _progress(folder, options.programs)["programs"]
    begin = told = time.monotonic()
    while any(w.poll() is None for w in workers):
        time.sleep(1)
        if time.monotonic() - told > 30:
            told = time.monotonic()
            now = _progress(folder, options.programs)
            rate = (now["programs"] - before) / (told - begin)
            print(
                f"{now['programs']} programs, {now['failures']} failures, {rate:.1f}/s", flush=True
            )
    died = [k for k, w in enumerate(workers) if w.returncode]
    if died:
        print(f"Of the workers, {died} died: run the command again to check what they left.")
    end = _progress(folder, options.programs)
    print(
        f"{end['programs']} programs, {end['failures']} failures, seed {options.seed}, "
        f"jax {jax.__version__} ({end['discarded']} that plain JAX could not run)"
    )
    return int(bool(died) or end["failures"] > 0 or end["programs"] < options.programs)


def _progress(folder: Path, programs: int) -> dict[str, int]:
    """Sums of what the chunks counted."""
    files = [_file_of(folder, chunk) for chunk in _chunks(programs)]
    found = [json.loads(f.read_text()) for f in files if f.exists()]
    return {k: sum(f[k] for f in found) for k in ("programs", "failures", "discarded")}


if __name__ == "__main__":
    sys.exit(main())
