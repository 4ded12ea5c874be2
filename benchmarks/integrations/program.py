"""Run a program of `programs/` in the environment of its library, as `page.py` runs a page.

python -m benchmarks.integrations.program mctx --precision fp8 --steps 30 --out row.json
"""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from jax import monitoring

from benchmarks.integrations.page import Compilations, differences
from benchmarks.integrations.programs import training


def run(name: str, precision: str, steps: int) -> dict[str, Any]:
    """Train plainly and in a precision, and return losses, differences and what was compiled."""
    program = importlib.import_module(f"benchmarks.integrations.programs.{name}")
    problem, train = program.problem(), getattr(program, "train", training.train)
    compilations = Compilations()
    monitoring.register_event_duration_secs_listener(compilations.add)
    losses, params = train(problem, "plain", steps)
    plain = compilations.take()
    names = {"__name__": name, "plain_losses": losses, "plain_params": params}
    names["losses"], names["params"] = train(problem, precision, steps)
    found = differences(names, problem.zero_gradients)
    result = {"program": name, "precision": precision, "steps": steps}
    return result | {"plain": plain, "scaled": compilations.take() | found}


def main() -> None:
    """Run a program and write what it gave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("program")
    add("--precision", choices=("float32", "float16", "fp8"), default="float16")
    add("--steps", type=int, default=30)
    add("--out", type=Path)
    options = parser.parse_args()
    text = json.dumps(run(options.program, options.precision, options.steps), indent=1)
    options.out.write_text(text) if options.out else print(text)


if __name__ == "__main__":
    main()
