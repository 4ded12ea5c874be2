"""What `make demo` would do, as `make -n` prints it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (shutil.which("make") and (ROOT / "Makefile").exists()), reason="needs make and a clone"
)


def commands(target, tmp_path, *, gpu, **variables):
    """Return the commands of a target on a machine with a GPU, or without one."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + ("echo GPU 0" if gpu else "exit 9") + "\n")
    smi.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": os.environ.get("HOME", "/"), **variables}
    done = subprocess.run(
        ["make", "-n", target, f"VENV={tmp_path}/cpu", f"VENV_GPU={tmp_path}/gpu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("gpu", [False, True])
def test_the_demo_takes_a_gpu_if_there_is_one(gpu, tmp_path):
    first, *_, last = commands("demo", tmp_path, gpu=gpu)
    place = tmp_path / ("gpu" if gpu else "cpu")
    assert first.startswith(f'echo "This makes the environment {place}')
    assert last.startswith(f"JAX_PLATFORMS= {place}/bin/python -m examples.gpt")


def test_the_demo_runs_where_it_is_told(tmp_path):
    *_, last = commands("demo", tmp_path, gpu=False, JAX_PLATFORMS="cpu")
    assert last.startswith(f"JAX_PLATFORMS=cpu {tmp_path}/cpu/bin/python")
