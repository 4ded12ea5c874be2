"""`python -m tests.fuzz --programs N --seed S`: run random programs, and keep those that fail.

Progress and failures are files under `.fuzz/`, one folder a seed and version of JAX: a run that
was stopped goes on where it was. `--only INDEX` repeats one program.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax

from tests.fuzz.programs import DTYPES, Discarded, Program, generate
from tests.fuzz.running import Failure, check
from tests.fuzz.shrinking import shrink

ROOT = Path(".fuzz")
CHUNK = 20
CLEAR_EVERY = 500


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many, from number 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--only", type=int, metavar="INDEX", help="repeat one program")
    parser.add_argument("--fresh", action="store_true", help="forget the progress of earlier runs")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    configure()
    if options.only is not None:
        return repeat(options.seed, options.only)
    folder = ROOT / f"seed{options.seed}-jax{jax.__version__}"
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


def report(seed: int, index: int, program: Program, failure: Failure) -> str:
    """What is printed and stored of a failure."""
    return (
        f"# Program {index} of seed {seed}, {DTYPES[index % 4]}, {program.wrapper}, result "
        f"{failure.leaf}: {failure.kind}\n# {failure.detail}\n\n{program.code()}"
    )


def repeat(seed: int, index: int) -> int:
    """Run one program and print it and, if it fails, what it shrinks to."""
    program = generate(seed, index)
    print(program.code())
    failure = check(program)
    if failure is None:
        print("# passes")
        return 0
    print(f"# fails: {failure.kind}: {failure.detail}\n# shrinking ...\n")
    print(report(seed, index, *shrink(program, failure)))
    return 1


def run_shard(folder: Path, options: argparse.Namespace) -> None:
    """Run each chunk that is this worker's and was not run before."""
    for start in range(0, options.programs, CHUNK):
        done = folder / f"chunk{start}.json"
        if start // CHUNK % options.workers != options.shard or done.exists():
            continue
        failed = []
        for index in range(start, start + CHUNK):
            program = generate(options.seed, index)
            try:
                failure = check(program)
            except Discarded:
                continue
            if failure is None:
                continue
            text = report(options.seed, index, *shrink(program, failure))
            (folder / f"failure{index}.py").write_text(text)
            print(f"{text}\n", flush=True)
            failed.append(index)
        done.write_text(json.dumps(failed))
        if (start // CHUNK // options.workers + 1) * CHUNK % CLEAR_EVERY == 0:
            jax.clear_caches()


def run_all(folder: Path, options: argparse.Namespace) -> int:
    """Start the workers, tell how far they are, and return 1 if a program failed."""
    command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
    command = [c for c in command if c != "--fresh"]
    workers = [subprocess.Popen([*command, "--shard", str(k)]) for k in range(options.workers)]
    starts = range(0, options.programs, CHUNK)
    before = sum((folder / f"chunk{s}.json").exists() for s in starts)
    begin = time.monotonic()
    while any(w.poll() is None for w in workers):
        time.sleep(5)
        done, failures = _progress(folder, starts)
        if int(time.monotonic() - begin) % 30 < 5:
            rate = (done - before) * CHUNK / (time.monotonic() - begin)
            print(f"{done * CHUNK} programs, {failures} failures, {rate:.1f}/s", flush=True)
    done, failures = _progress(folder, starts)
    total = done * CHUNK
    print(f"{total} programs, {failures} failures, seed {options.seed}, jax {jax.__version__}")
    return int(failures > 0 or done < len(starts))


def _progress(folder: Path, starts: range) -> tuple[int, int]:
    files = [folder / f"chunk{s}.json" for s in starts]
    found = [json.loads(f.read_text()) for f in files if f.exists()]
    return len(found), sum(map(len, found))


if __name__ == "__main__":
    sys.exit(main())
