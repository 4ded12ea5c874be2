"""Build the wheel and the sdist, and check them as a user would meet them.

    python scripts/check_package.py              # what CI runs
    python scripts/check_package.py --release    # all that has to hold before a release

The wheel is built from the sdist, and both are installed into a new environment with the runtime
dependencies alone. There the package is imported, trains, reports, and is checked by pyright: every
public name has a type. Optional parts must say what to install.

Before a release the changelog has the version, dated. The wheel is installed, and trains, on every
Python from 3.11 to 3.14 that is found; each extra is installed on the newest, and used.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = (  # what needs more, and has to say what to install
    "import jax_scalify.nn.linen",
    "import jax_scalify.nn.nnx",
    "import jax_scalify.unit_scaling.linen",
    "import jax_scalify.unit_scaling.nnx",
    "import jax_scalify.unit_scaling.optim",
    "jsa.checkpoint.save('state', jnp.ones(2))",
    "jsa.numerics.plot_histogram(jsa.numerics.report(jnp.sin)(jnp.ones(2)), 'a.png')",
    "jsa.numerics.report(jnp.sin)(jnp.ones(2)).to_dataframe()",
)
EXTRAS = {  # what each is for
    "flax": "import jax_scalify.nn.linen, jax_scalify.nn.nnx, jax_scalify.unit_scaling.nnx",
    "tensorboard": "import tensorboardX",
    "checkpoint": "jsa.checkpoint.save('s', jnp.ones(2)); jsa.checkpoint.restore('s', jnp.ones(2))",
    "plot": "jsa.numerics.plot_histogram(jsa.numerics.report(jnp.sin)(jnp.ones(2)), 'a.png')",
    "examples": "import equinox, optax, rich, sklearn; jsa.optim.low_precision(optax.adamw(1e-3))",
    "test": "import chex, flatbuffers, hypothesis, nbclient, pytest, xdist",
    "docs": "import myst_parser, sphinx, sphinx_book_theme, sphinx_copybutton, sphinx_design",
    "dev": "import build, pyright, ruff, twine",
}
TRAINS = """
import jax, jax.numpy as jnp, jax_scalify as jsa
@jax.jit
@jsa.scalify
def update(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
    return w - 0.1 * grad, loss
w = jsa.as_scaled_array(jnp.zeros((4, 2)), dtype=jnp.float16)
losses = []
for _ in range(50):
    w, loss = update(w, jnp.eye(4))
    losses.append(float(loss))
assert w.dtype == jnp.float16 and losses[-1] < 0.2 * losses[0], losses
"""
# Those of the modules that `jsa` has; the rest needs Flax.
PUBLIC_NAMES = """
import types, jax_scalify
pending, seen = [jax_scalify], set()
for module in pending:
    seen.add(module)
    for name in getattr(module, "__all__", vars(module)):
        value = getattr(module, name)
        if not isinstance(value, types.ModuleType):
            if hasattr(module, "__all__") or getattr(value, "__module__", "") == module.__name__:
                if not name.startswith("_"):
                    print(f"{module.__name__}.{name}")
        elif hasattr(module, "__all__") and value not in seen:
            pending.append(value)
"""


class Failure(Exception):
    """What is wrong with the package."""


def run(*command: object, cwd: Path = ROOT) -> str:
    """Run a command; return what it printed."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"`{' '.join(map(str, command))}`:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_version(is_release: bool) -> str:
    """Check that the version is said once, and by the changelog; return it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    said = [
        str(path.relative_to(ROOT))
        for path in [*(ROOT / "jax_scalify").rglob("*.py"), ROOT / "CITATION.cff"]
        if version in path.read_text()
    ]
    if said:
        raise Failure(f"the version is said again in {', '.join(said)}")
    changes = (ROOT / "CHANGELOG.md").read_text()
    heading = rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$"
    if is_release and not re.search(heading, changes, re.MULTILINE):
        raise Failure(f"CHANGELOG.md has no heading `## {version} - YYYY-MM-DD`")
    if not re.search(r"^## (Unreleased|\d)", changes, re.MULTILINE):
        raise Failure("CHANGELOG.md has no heading of a version")
    return version


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return both."""
    run(sys.executable, "-m", "build", "--outdir", folder)
    run(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir())
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path, version: str) -> None:
    """Check what is in the archives."""
    source = {str(p.relative_to(ROOT)) for p in (ROOT / "jax_scalify").rglob("*.py")}
    info = f"jax_scalify-{version}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = (source | {"jax_scalify/py.typed", f"{info}licenses/LICENSE"}) - names
    foreign = [n for n in names if not n.startswith(("jax_scalify/", info))]
    with tarfile.open(sdist) as archive:
        inside = {n.partition("/")[2] for n in archive.getnames()}
    missing |= (source | {"README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff"}) - inside
    if missing or foreign:
        raise Failure(f"missing: {sorted(missing)}; does not belong there: {foreign}")


def check_installed(python: Path, folder: Path) -> None:
    """Check that the package imports, trains, reports, and says what optional parts need."""
    run(python, "-c", TRAINS, cwd=folder)
    run(python, "-m", "jax_scalify", cwd=folder)
    for code in OPTIONAL:
        code = f"import jax.numpy as jnp, jax_scalify as jsa; {code}"
        done = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if not (last.startswith("ImportError: ") and "pip install" in last):
            raise Failure(f"`{code}` without the package that it needs: {last or 'no error'}")


def pythons() -> list[Path]:
    """Return a Python of each version that is supported and found, the newest last."""
    found = []
    for minor in range(11, 15):
        installed = Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3")
        on_path = shutil.which(f"python3.{minor}")
        for python in [*filter(None, [on_path]), *sorted(installed)]:
            works = [python, "-c", "import ensurepip, venv"]
            if subprocess.run(works, capture_output=True).returncode == 0:
                found.append(Path(python))
                break
    return found


def install(python: Path, folder: Path, what: str) -> Path:
    """Install something into a new environment; return its Python."""
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    run(inside, "-m", "pip", "install", "-q", what)
    return inside


def check_pythons(wheel: Path, folder: Path) -> None:
    """Check the wheel on every Python, and every extra on the newest."""
    found = pythons()
    for number, python in enumerate(found):
        inside = install(python, folder / f"python-{number}", str(wheel))
        run(inside, "-c", TRAINS, cwd=folder)
        print("  " + run(inside, "-m", "jax_scalify", cwd=folder).splitlines()[0], python)
    for extra, code in EXTRAS.items():
        place = folder / f"extra-{extra}"
        inside = install(found[-1], place, f"{wheel}[{extra}]")
        run(inside, "-c", f"import jax.numpy as jnp, jax_scalify as jsa; {code}", cwd=place)
        shutil.rmtree(place)
        print(f"  jax-scalify[{extra}]")


def check_types(python: Path) -> None:
    """Check that every public name has a type."""
    names = run(python, "-c", PUBLIC_NAMES, cwd=python.parent).split()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pyright",
            "--verifytypes",
            "jax_scalify",
            "--ignoreexternal",
            "--outputjson",
        ],
        env={**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"},
        cwd=python.parent,
        capture_output=True,
        text=True,
    )
    symbols = {s["name"]: s for s in json.loads(done.stdout)["typeCompleteness"]["symbols"]}
    poor = [n for n in names if n not in symbols or not symbols[n]["isTypeKnown"]]
    if poor:
        raise Failure(f"public names without a type: {', '.join(poor)}")
    print(f"  {len(names)} public names have one")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all checks; say what fails and exit with 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--release", action="store_true", help="a dated changelog, every Python, every extra"
    )
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            print("version and changelog")
            version = check_version(options.release)
            print("building")
            sdist, wheel = build(folder / "dist")
            check_contents(sdist, wheel, version)
            print("installing with the runtime dependencies alone")
            venv.create(folder / "env", with_pip=True)
            python = folder / "env" / "bin" / "python"
            run(python, "-m", "pip", "install", "-q", wheel)
            check_installed(python, folder)
            print("types of the public names")
            check_types(python)
            print("installing the sdist")
            run(python, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", sdist)
            check_installed(python, folder)
            if options.release:
                print("every Python, every extra")
                check_pythons(wheel, folder)
    except Failure as failure:
        sys.exit(f"FAILED: {failure}")
    print(f"jax_scalify {version}: sdist and wheel are good")


if __name__ == "__main__":
    main()
