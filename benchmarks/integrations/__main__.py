"""Run the pages of `docs/integrations` and the programs of `programs/`, each in its environment.

    python -m benchmarks.integrations                 # all: `make integrations`
    python -m benchmarks.integrations keras --fresh   # one, again

A row is green if three steps in float32 are those of the framework, if 30 steps in float16 and FP8
end within 1% and 3% of its loss, if the step compiles once, and if the page prints what it says.
Finished rows are kept in `benchmarks/results/integrations.json`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cells import Cells, Store
from benchmarks.paths import RESULTS, ROOT

FRAMEWORKS = tomllib.loads((Path(__file__).parent / "frameworks.toml").read_text())
PROGRAMS = Path(__file__).parent / "programs"
# Precision: steps, the largest difference of the losses, and of the last five.
VARIANTS = {"float32": (3, 1e-5), "float16": (30, 0.01), "fp8": (30, 0.03)}


def installed(name: str) -> tuple[str, list[str]]:
    """Return the name of the environment of a framework, and what is installed there."""
    name = FRAMEWORKS[name].get("environment", name)
    return name, FRAMEWORKS[name]["install"]


def environment(name: str) -> Path:
    """Make the environment of a framework, if it is not there, and return its Python."""
    name, packages = installed(name)
    folder = ROOT / ".venv-integrations" / name
    python, done = folder / "bin" / "python", folder / ".installed"
    install = ["-e", f"{ROOT}[checkpoint]", *packages]
    if done.exists() and json.loads(done.read_text() or "[]") == install:
        return python
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--clear", "--python", sys.executable, folder], check=True)
    subprocess.run([*uv, "pip", "install", "-q", "--python", python, *install], check=True)
    done.write_text(json.dumps(install))
    return python


def run(name: str, precision: str) -> dict[str, Any]:
    """Run a page in one precision; with float16, to its end."""
    python = environment(name)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        steps = VARIANTS[precision][0]
        is_page = not (PROGRAMS / f"{name}.py").exists()
        module = f"benchmarks.integrations.{'page' if is_page else 'program'}"
        command = [python, "-m", module, name, "--precision", precision]
        command += ["--steps", str(steps), "--out", out]
        command += ["--whole"] if is_page and precision == "float16" else []
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            lines = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
            return {"error": lines[-1] if lines else done.stderr.strip()[-200:]}
        return json.loads(out.read_text())


def row(precision: str, result: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a result is green, and the cells of its row."""
    if "error" in result:
        return False, ["", "", "", "", result["error"]]
    scaled, bound = result["scaled"], VARIANTS[precision][1]
    plain, losses = (np.array(scaled[k]) for k in ("plain_losses", "losses"))
    if precision == "float32":
        difference = float(np.max(np.abs(losses - plain) / np.abs(plain)))
        largest = max([difference, *scaled["params"].values()])
    else:
        difference = float(np.mean(losses[-5:]) / np.mean(plain[-5:]) - 1)
        largest = abs(difference)
    count = scaled["compilations"]
    faults = [f"over {bound:g}"] * (not largest <= bound) + ["compiled again"] * (count > 1)
    faults += [f"line {line} prints otherwise" for line, _ in result.get("printed", [])]
    ratio = scaled["seconds"] / result["plain"]["seconds"]
    worst = f"{max(scaled['params'].values(), default=0.0):.0e}" if precision == "float32" else ""
    shown = f"{difference:.0e}" if precision == "float32" else f"{difference:+.2%}"
    return not faults, [shown, worst, str(count), f"{ratio:.1f}", ", ".join(faults) or "ok"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("names", nargs="*", metavar="name", help=f"of {', '.join(FRAMEWORKS)} (default: all)")
    add("--fresh", action="store_true", help="run what was run before again")
    add("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(FRAMEWORKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Choose from {', '.join(FRAMEWORKS)}.")
    console = Console(width=140)
    cells = Cells(Store(options.out / "integrations.json"), options.fresh, console)
    for name in options.names or FRAMEWORKS:
        tasks: dict[str, Callable[[], dict]] = {
            f"{name}/{precision}": lambda name=name, precision=precision: run(name, precision)
            for precision in VARIANTS
        }
        cells.add(tasks, {"install": installed(name)[1]})
    table = Table(box=box.SIMPLE)
    for title in ("", "loss", "parameters", "compilations", "compile ratio", ""):
        table.add_column(title, justify="right" if title else "left")
    green = True
    for key, result in cells.run().items():
        fine, shown = row(key.partition("/")[2], result)
        green &= fine
        table.add_row(key, *shown)
    console.print(table)
    sys.exit(not green)


if __name__ == "__main__":
    main()
