"""Which primitives `scalify` handles rightly: JAX's own test harnesses, swept and judged.

    python -m benchmarks.coverage.sweep  # sweep, store, write docs/coverage.md
    python -m benchmarks.coverage.sweep --match 'scatter|sort'  # some cases: nothing stored
    python -m benchmarks.coverage.sweep --page                  # only the page, from stored results

Cases are evaluated in worker processes: one that dies or hangs costs its case only. The exit status
is 1 if a case raised, a dtype is under 99.5% right, or a primitive of JAX is absent from the page.
"""

import argparse
import collections
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the workers use all cores already

import jax  # noqa: E402
from jax.extend.core import Primitive  # noqa: E402
from jax.extend.core import primitives as jax_primitives  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.coverage import harnesses  # noqa: E402
from benchmarks.coverage.harnesses import Outcome  # noqa: E402
from benchmarks.paths import RESULTS, ROOT  # noqa: E402
from jax_scalify.interpreter.registry import registered_rules  # noqa: E402

PAGE = ROOT / "docs" / "coverage.md"
TIME_LIMIT = 120.0  # seconds a case; the slowest takes a few
ENOUGH = 0.995  # share of right cases, in every dtype
COLUMNS = ("cases", "right", "wrong", "raised", "dequantised")


# --- The sweep


def _work(pipe: connection.Connection) -> None:
    """Evaluate the cases that come through the pipe."""
    cases = harnesses.load()
    pipe.send(None)
    while True:
        case = cases[pipe.recv()]
        try:
            pipe.send(harnesses.run(case))
        except Exception as error:  # noqa: BLE001  (of the judge: it must not pass as right)
            pipe.send(f"not judged: {type(error).__name__}: {error}")


class Worker:
    """A process, and the case it is busy with."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.name: str | None = None
        self.started = time.monotonic()

    def give(self, name: str) -> None:
        """Start a case."""
        self.name, self.started = name, time.monotonic()
        self.pipe.send(name)

    def result(self) -> Outcome | str | None:
        """Return the finished case (None: ready for the first), or why there will be no result."""
        if self.pipe.poll():
            try:
                return self.pipe.recv()
            except (EOFError, ConnectionResetError):
                self.process.join()
                return f"the process died with exit code {self.process.exitcode}"
        return f"no result within {TIME_LIMIT:.0f} s"

    def is_late(self) -> bool:
        """Tell whether the case has used up its time."""
        return time.monotonic() - self.started > TIME_LIMIT

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def sweep(cases: dict, count: int) -> Iterator[tuple[str, Outcome]]:
    """Evaluate cases in `count` processes; yields them as they finish."""
    waiting = collections.deque(cases)
    workers = [Worker() for _ in range(max(1, min(count, len(cases))))]
    try:
        while workers:
            ready = connection.wait([w.pipe for w in workers], timeout=1.0)
            for worker in [w for w in workers if w.pipe in ready or w.is_late()]:
                name, outcome = worker.name, worker.result()
                has_failed = isinstance(outcome, str)
                if isinstance(outcome, str):
                    outcome = _raised(cases, name, outcome)
                _go_on(worker, workers, waiting, has_failed)
                if name is not None and outcome is not None:
                    yield name, outcome
    finally:
        for worker in workers:
            worker.stop()


def _raised(cases: dict, name: str | None, reason: str) -> Outcome:
    """Return the outcome of a case without a result."""
    if name is None:
        raise RuntimeError(f"A worker did not start: {reason}")
    dtype = jax.numpy.dtype(cases[name].dtype).name
    return Outcome(cases[name].group_name, dtype, "raised", reason)


def _go_on(
    worker: Worker, workers: list[Worker], waiting: collections.deque[str], has_failed: bool
) -> None:
    """Give a worker its next case; replace one that has failed, and end one without a case."""
    if waiting and not has_failed:
        worker.give(waiting.popleft())
        return
    worker.stop()
    workers.remove(worker)
    if waiting:
        workers.append(Worker())


# --- Results


def count(outcomes: list[Outcome]) -> dict[str, int]:
    """Count outcomes by status."""
    statuses = collections.Counter(o.status for o in outcomes)
    row = {status: statuses[status] for status in ("right", "wrong", "raised", "skipped")}
    dequantised = sum(o.status == "right" and bool(o.dequantised) for o in outcomes)
    cases = len(outcomes) - statuses["skipped"]
    return {"cases": cases} | row | {"dequantised": dequantised}


def summarise(outcomes: dict[str, Outcome], seconds: float) -> dict:
    """Return what is stored: counts, and a row for each case that is not right."""
    groups, dtypes = collections.defaultdict(list), collections.defaultdict(list)
    for o in outcomes.values():
        groups[o.group].append(o)
        dtypes[o.dtype].append(o)
    reports = collections.Counter(pair for o in outcomes.values() for pair in o.dequantised)
    return {
        "jax": jax.__version__,
        "seconds": round(seconds),
        "totals": {d: count(dtypes[d]) for d in harnesses.DTYPES if d in dtypes},
        "references": collections.Counter(o.reference for o in outcomes.values() if o.reference),
        "groups": {group: count(groups[group]) for group in sorted(groups)},
        "remaining": [
            {"case": name} | {k: getattr(o, k) for k in ("dtype", "status", "scales", "reason")}
            for name, o in sorted(outcomes.items())
            if o.status in ("wrong", "raised")
        ],
        "dequantised": [
            {"primitive": primitive, "reason": reason, "cases": cases}
            for (primitive, reason), cases in sorted(reports.items())
        ],
        "skipped": collections.Counter(
            f"{o.group}: {o.reason}" for o in outcomes.values() if o.status == "skipped"
        ),
    }


def show(results: dict, console: Console) -> None:
    """Print the groups, the totals and every case that is not right."""
    table = Table(title=f"JAX {results['jax']}", box=box.SIMPLE)
    table.add_column("group")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for group, row in results["groups"].items():
        table.add_row(group, *(str(row[k] or "") for k in COLUMNS))
    table.add_section()
    for dtype, row in results["totals"].items():
        shares = (f"{row[k]} ({row[k] / max(row['cases'], 1):.1%})" for k in COLUMNS[1:])
        table.add_row(dtype, str(row["cases"]), *shares)
    console.print(table)
    for row in results["remaining"]:
        scales = ", ".join(row["scales"])
        console.print(
            f"{row['status']}: {row['case']} [{scales}]\n    {row['reason']}", markup=False
        )
    if results["skipped"]:
        number = sum(results["skipped"].values())
        console.print(f"{number} harnesses are not implemented by JAX here: {results['skipped']}")
    console.print(f"references: {results['references']}; {results['seconds']} s", markup=False)


def is_good(results: dict) -> bool:
    """Tell whether nothing raised and enough is right in every dtype."""
    rows = results["totals"].values()
    return all(not r["raised"] and r["right"] >= ENOUGH * r["cases"] for r in rows)


# --- The page

INTRO = """\
# Coverage

`make coverage` writes this page. Its first part counts test cases, the second lists the scale rule
of every primitive, and the third lists every case that is not right.

## Cases

A case is one of JAX's own test harnesses (`jax._src.internal_test_util.test_harnesses`): one use of
one primitive in one dtype. Its floating-point arguments become scaled arrays with scales 2⁻⁶, 1 and
2⁶. Arguments of two or more axes also get scales that differ along the last or the first axis. A
case is right if, under each of these scales,

- the values match the plain function in float64 on the same inputs, within a few units in the last
  place of the output's dtype (`benchmarks/coverage/judging.py` has the tolerances, with reasons);
- every output has the dtype and shape of the plain function's output;
- every scale is a power of two.

A function whose meaning depends on the dtype is compared with itself in its own dtype, and a
factorisation is compared by its product. *Dequantised* counts the right cases in which a primitive
dropped its scales, with a warning. Harnesses that JAX does not implement on CPUs are not counted.

"""


LAWS = """
## Primitives

A law says which scale a result gets. `scale` and `data` without an operand's name are the first
operand's. *Votes* are the scales among which the largest is shared: an array votes with its scale,
a constant with the smallest scale at which its dtype holds it. The constants 0, inf and nan do not
vote.
"""


def public_primitives() -> set[str]:
    """Names of the primitives that JAX makes public."""
    return {
        value.name
        for module in (jax_primitives, jax.lax, jax.lax.linalg)
        for key, value in vars(module).items()
        if key.endswith("_p") and isinstance(value, Primitive)
    }


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(c.replace("|", "\\|") for c in r) + " |\n" for r in lines)


def _remaining_rows(stored: list[dict]) -> list[list[str]]:
    rows = []
    for results in stored:
        for row in results["remaining"]:
            whys = [
                why for pattern, why in harnesses.REASONS.items() if re.search(pattern, row["case"])
            ]
            reason = f"{whys[0]} ({row['reason']})" if whys else row["reason"]
            scales = ", ".join(row["scales"])
            rows.append([results["jax"], f"`{row['case']}`", row["status"], scales, reason])
    return rows


def page() -> str:
    """The text of docs/coverage.md, from the registry and stored results."""
    files = sorted(RESULTS.glob("coverage-jax*.json"), reverse=True)
    stored = [json.loads(path.read_text()) for path in files]
    header = ["JAX", "dtype", *COLUMNS]
    totals = [
        [results["jax"], dtype, *(str(row[k]) for k in COLUMNS)]
        for results in stored
        for dtype, row in results["totals"].items()
    ]
    parts = [INTRO, _table(header, totals), LAWS]
    families = collections.defaultdict(list)
    for info in registered_rules():
        law = info.law + (f" **Dequantises:** {info.dequantises}." if info.dequantises else "")
        families[info.family].append([f"`{info.name}`", law])
    for family, rows in families.items():
        parts.append(f"\n### {family.capitalize()}\n\n" + _table(["primitive", "law"], rows))
    parts.append("\n## Remaining cases\n\n")
    remaining = _remaining_rows(stored)
    parts.append(
        _table(["JAX", "case", "outcome", "scales", "reason"], remaining)
        if remaining
        else "None.\n"
    )
    parts.append("\nNext: [Writing a scale rule](rules.md) shows how to add a rule.\n")
    return "".join(parts)


def choose(match: str, dtype: str | None, sample: int | None) -> dict:
    """Return the harnesses that were asked for, by name."""
    cases = {
        name: harness
        for name, harness in harnesses.load().items()
        if re.search(match, name) and dtype in (None, jax.numpy.dtype(harness.dtype).name)
    }
    if sample and sample < len(cases):
        names = list(cases)
        cases = {n: cases[n] for n in (names[i * len(names) // sample] for i in range(sample))}
    return cases


def main() -> int:
    """Sweep, print, store, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="regular expression on names of cases")
    parser.add_argument("--dtype", choices=harnesses.DTYPES)
    parser.add_argument("--sample", type=int, help="so many cases, evenly spread")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="where to store; by default only full sweeps are")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    console, good = Console(soft_wrap=True), True

    if not args.page:
        cases = choose(args.match, args.dtype, args.sample)
        started, outcomes = time.monotonic(), {}
        with Progress(console=console) as progress:
            bar = progress.add_task("cases", total=len(cases))
            for name, outcome in sweep(cases, args.workers):
                outcomes[name] = outcome
                progress.advance(bar)
        results = summarise(outcomes, time.monotonic() - started)
        show(results, console)
        good = is_good(results)
        is_full = not (args.match or args.dtype or args.sample)
        out = args.out or (RESULTS / f"coverage-jax{jax.__version__}.json" if is_full else None)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1))
            console.print(f"stored {out}")
        if not is_full:
            return 0 if good else 1

    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    absent = public_primitives() - {info.name for info in registered_rules()}
    console.print(f"wrote {PAGE.relative_to(ROOT)}")
    if absent:
        console.print(f"absent from the page: {', '.join(sorted(absent))}")
    return 0 if good and not absent else 1


if __name__ == "__main__":
    sys.exit(main())
