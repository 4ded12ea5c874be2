"""Run the tests on the newest pre-release of JAX that the registry has, and report what breaks.

    python scripts/test_nightly.py [--python python3.13] [--env .venv-nightly] [pytest options]

The bounds of pyproject.toml do not hold there. If nothing is newer than the JAX of this Python,
that is said, and nothing is installed. JAX's own nightly builds are in an index of theirs: name it
to pip as one does, in `PIP_EXTRA_INDEX_URL`.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def newest(python: str) -> Version:
    """Return the version of JAX that `pip install --pre` would install for a Python."""
    options = "--pre --dry-run --ignore-installed --no-deps --quiet --report -".split()
    command = [python, "-m", "pip", "install", *options, "jax"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Version(json.loads(done.stdout)["install"][0]["metadata"]["version"])


def requirements(extra: str) -> list[str]:
    """Return what an extra of pyproject.toml needs, with the extras that it names, less JAX."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [] if extra else project["dependencies"]
    for line in project["optional-dependencies"][extra] if extra else ():
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            found += [each for name in requirement.extras for each in requirements(name)]
        else:
            found.append(line)
    return [line for line in found if Requirement(line).name != "jax"]


def install(python: str, env: Path) -> Path:
    """Install the newest JAX and what the tests need; return the Python of that environment."""
    subprocess.run([python, "-m", "venv", env], check=True)
    inside = env / "bin" / "python"
    pip = [inside, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--pre", "--upgrade", "jax", "jaxlib"], check=True)
    subprocess.run([*pip, *requirements(""), *requirements("test")], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
    return inside


def breaks(output: str) -> dict[str, list[str]]:
    """Return the tests that failed, by the message of their error."""
    found = collections.defaultdict(list)
    for test, message in re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", output, re.MULTILINE):
        found[message or "no message"].append(test)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run, report; return the exit status: 1 if something would break."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="(default: this one)")
    parser.add_argument("--env", type=Path, default=ROOT / ".venv-nightly")
    options, rest = parser.parse_known_args(arguments)
    known, found = Version(metadata.version("jax")), newest(options.python)
    if found <= known:
        print(f"The registry has no JAX newer than {known}, which `make test` runs on.")
        return 0
    print(f"JAX {found}; `make test` runs on {known}.", flush=True)
    python = install(options.python, options.env)
    command = [python, "-m", "pytest", "-q", "-n", "2", "--tb=short", *rest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (options.env / "tests.log").write_text(done.stdout + done.stderr)
    causes = breaks(done.stdout)
    for message, tests in causes.items():
        shown = ", ".join(tests[:3]) + (f" and {len(tests) - 3} more" if len(tests) > 3 else "")
        print(f"{message}\n    {shown}")
    if done.returncode and not causes:
        print(done.stdout[-2000:] + done.stderr[-2000:])
    print(f"With JAX {found}: {sum(map(len, causes.values()))} tests would break.")
    print(f"All that they said: {options.env / 'tests.log'}")
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
