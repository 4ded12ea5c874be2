"""Run the code of a page of `docs/integrations` in the environment of its framework.

    python -m benchmarks.integrations.page keras --precision fp8 --steps 30 --out row.json

A page is a program. Its blocks leave `plain_losses` and `plain_params`, which the framework's own
training step made in float32, and then `losses` and `params` of the scalified step. It runs to its
end only with `--whole`, which also compares what the blocks print with what the page says.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import monitoring

PAGES = Path(__file__).parents[2] / "docs" / "integrations"
BLOCK = re.compile(
    r"(?P<skipped><!-- not run[^\n]*-->\n)?```python\n(?P<code>.*?)```\n"
    r"(?:\n```text\n(?P<output>.*?)```)?",
    re.DOTALL,
)
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
# The names of parameters whose gradient is 0 up to rounding: they are not compared.
ZERO = re.compile(r"<!-- zero gradients: (.*) -->")
TRACE, LOWER, COMPILE = (
    f"/jax/core/compile/{event}_duration"
    for event in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)


@dataclasses.dataclass
class Compilations:
    """What JAX has traced and compiled since the last `take`, as `(event, function, seconds)`."""

    events: list[tuple[str, str, float]] = dataclasses.field(default_factory=list)

    def add(self, event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        """Keep an event, as `jax.monitoring` calls it."""
        self.events.append((event, fun_name, seconds))

    def take(self) -> dict[str, Any]:
        """Return the seconds of the largest function, the training step, and how often it compiled.

        The seconds are those of its first compilation.
        """
        compiled = [e for e in self.events if e[0] == COMPILE]
        # Frameworks jit the initialisation too. It may take longer than a small step.
        steps = [e for e in compiled if "step" in e[1]] or compiled
        name = max(steps, key=lambda e: e[2], default=("", "", 0.0))[1]
        first = next((e[2] for e in compiled if e[1] == name), 0.0)
        others = (
            max((e[2] for e in self.events if e[0] == k), default=0.0) for k in (TRACE, LOWER)
        )
        count = Counter(e[1] for e in compiled)[name]
        self.events.clear()
        return {"step": name, "seconds": round(first + sum(others), 2), "compilations": count}


def run(page: str, precision: str, steps: int, whole: bool) -> dict[str, Any]:
    """Run a page, and return losses, differences and what was compiled."""
    text = (PAGES / f"{page}.md").read_text()
    text = re.sub(r'^precision = "\w+"', f'precision = "{precision}"', text, flags=re.MULTILINE)
    text = re.sub(r"^steps = \d+", f"steps = {steps}", text, flags=re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": page}
    compilations, result = Compilations(), {"page": page, "precision": precision, "steps": steps}
    for block in BLOCK.finditer(text):
        if block["skipped"]:
            continue
        line = text[: block.start("code")].count("\n")
        code = compile("\n" * line + block["code"], f"{page}.md", "exec")
        monitoring.clear_event_listeners()  # as Tunix does too
        monitoring.register_event_duration_secs_listener(compilations.add)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if "plain" not in result and "plain_losses" in namespace:
            result["plain"] = compilations.take()
        if "scaled" not in result and "losses" in namespace:
            result["scaled"] = compilations.take() | differences(namespace, *ZERO.findall(text))
            if not whole:
                break
        if (
            whole
            and block["output"] is not None
            and _shape(printed.getvalue()) != _shape(block["output"])
        ):
            result.setdefault("printed", []).append([line + 1, printed.getvalue()])
    return result


def _shape(text: str) -> str:
    """Return what is printed without its numbers."""
    return re.sub(r"[\s-]+", " ", NUMBER.sub("#", text)).strip()


def differences(names: dict[str, Any], zero: str = "$^") -> dict[str, Any]:
    """Return the losses, and the RMS of the parameters' differences in units of their own RMS."""
    plain, found = names["plain_params"], names["params"]
    names_of = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(plain)]
    if names_of != [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]:
        raise ValueError(f"{names['__name__']}: `params` has not the leaves of `plain_params`.")
    largest = {}
    for (path, a), b in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        if re.search(zero, name) or not np.issubdtype(np.asarray(a).dtype, np.floating):
            continue
        a, b = np.float64(a), np.float64(b)
        rms = np.sqrt(np.mean(np.square(a))) if a.size else 0.0
        if rms > 0:
            largest[name] = float(np.sqrt(np.mean(np.square(a - b))) / rms)
    worst = sorted(largest, key=largest.__getitem__)[-3:]
    return {
        "plain_losses": [float(x) for x in names["plain_losses"]],
        "losses": [float(x) for x in names["losses"]],
        "params": {name: largest[name] for name in worst},
    }


def main() -> None:
    """Run a page and write what it gave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("page")
    add("--precision", choices=("float32", "float16", "fp8"), default="float16")
    add("--steps", type=int, default=30)
    add("--whole", action="store_true", help="run the whole page, and compare what it prints")
    add("--out", type=Path)
    options = parser.parse_args()
    result = run(options.page, options.precision, options.steps, options.whole)
    text = json.dumps(result, indent=1)
    options.out.write_text(text) if options.out else print(text)


if __name__ == "__main__":
    main()
