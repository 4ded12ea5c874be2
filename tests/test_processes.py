"""Several processes on this machine, over loopback: they train as one does, and one may be killed.

Each process has two virtual devices.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")

from examples.gpt.data import load_corpus
from examples.gpt.records import read_lines
from examples.llama.cli import find_sizes, make_parser
from examples.llama.layout import Layout
from examples.llama.step import Training
from examples.llama.train import Run

pytestmark = pytest.mark.newest
ROOT = Path(__file__).parents[1]
STEPS, EVERY = 30, 6
SIZE = ["--layers", "1", "--context", "64"]
OPTIONS = [*SIZE, "--steps", str(STEPS), "--checkpoint-every", str(EVERY)]
TIMEOUT = 180  # seconds, of which a loaded machine may need a few


def free_address():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def start(command, devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as the process of the tests
    environment = {**os.environ, **quick, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_training(count, mesh, directory, *more, devices=2):
    """So many processes of the example."""
    command = ["-m", "examples.llama", *OPTIONS, "--mesh", mesh, "--out", str(directory), *more]
    if count == 1:
        return [start(command, devices)]
    command += ["--coordinator", free_address(), "--processes", str(count)]
    return [start([*command, "--process", str(i)], devices) for i in range(count)]


def outputs(processes):
    """What processes print until they end."""
    try:
        return [p.communicate(timeout=TIMEOUT)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.communicate()


def trained(count, mesh, directory, *more, devices=2):
    """Train to the end; the losses by step."""
    processes = start_training(count, mesh, directory, *more, devices=devices)
    texts = outputs(processes)
    assert [p.returncode for p in processes] == [0] * count, texts
    return losses_of(directory)


def losses_of(directory):
    return {line["step"]: line["loss"] for line in read_lines(directory / "metrics.jsonl")}


@pytest.fixture(scope="module")
def uninterrupted():
    """The losses of this process alone, on one device."""
    sizes = find_sizes(make_parser().parse_args(SIZE))
    training = Training(sizes, Layout(None), "float16", steps=STEPS)
    return Run(training, batch=8, seed=0, corpus=load_corpus(None, context=sizes.context)).train()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run of two processes, of which one was killed: its directory, the other's code and text."""
    directory = tmp_path_factory.mktemp("killed")
    processes = start_training(2, "data=2,fsdp=2", directory)
    deadline = time.monotonic() + TIMEOUT
    while not (directory / "checkpoints" / str(EVERY)).is_dir():
        assert time.monotonic() < deadline and processes[0].poll() is None, outputs(processes)
        time.sleep(0.02)
    processes[1].kill()
    return directory, processes[0], outputs(processes)[0]


@pytest.mark.full
def test_one_process_is_killed_and_the_others_say_so(killed, uninterrupted):
    directory, other, text = killed
    assert other.returncode != 0, text
    assert "another one has ended" in text or "another task died" in text
    assert "start all of them again with --resume" in text.lower()
    found = losses_of(directory)
    assert EVERY <= len(found) < STEPS
    np.testing.assert_allclose(list(found.values()), uninterrupted[: len(found)], rtol=2e-3)


@pytest.mark.full
def test_a_restart_on_another_mesh_gives_the_losses_of_an_uninterrupted_run(killed, uninterrupted):
    directory, *_ = killed
    found = trained(1, "fsdp=1,tensor=2", directory, "--resume")
    assert list(found) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), uninterrupted, rtol=2e-3)


@pytest.mark.full
def test_numbers_of_processes_and_meshes(tmp_path):
    """The same sums in the same order are the same bits; in another order nearly so."""
    one = trained(1, "data=2,fsdp=2", tmp_path / "one", devices=4)
    two = trained(2, "data=2,fsdp=2", tmp_path / "two", devices=2)
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-3)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / str(STEPS))
    assert trained(2, "data=2,fsdp=2", tmp_path / "two", "--resume") == two
    four = trained(4, "fsdp=2,tensor=2", tmp_path / "four", devices=1)
    np.testing.assert_allclose(list(four.values()), list(one.values()), rtol=2e-3)
    shutil.rmtree(tmp_path / "four" / "checkpoints" / str(STEPS))
    rest = trained(2, "fsdp=4", tmp_path / "four", "--resume")
    np.testing.assert_allclose(list(rest.values()), list(four.values()), rtol=2e-3)


# States that are not the same in all processes: what `jsa.tree.check_shardings` says.


def check_states(address, process):
    """What one of two processes is told."""
    import jax_scalify as jsa

    jax.distributed.initialize(address, 2, process)
    told = []
    for scales in ((2.0, 2.0), (2.0, 4.0), (np.float32(2), np.float32(8))):
        state = {"w": jsa.ScaledArray(np.ones(3, np.float32), scales[process]), "step": 1}
        try:
            jsa.tree.check_shardings(state)
            told.append("")
        except ValueError as error:
            told.append(str(error))
    try:
        jsa.tree.check_shardings({"ab"[process]: jsa.as_scaled_array(np.ones(3, np.float32))})
    except ValueError as error:
        told.append(str(error))
    print(json.dumps(told), flush=True)


@pytest.mark.full
def test_different_scales_are_named():
    address = free_address()
    processes = [start(["-m", "tests.test_processes", address, str(i)], 1) for i in range(2)]
    for text in outputs(processes):
        same, static, dynamic, others = json.loads(text.splitlines()[-1])
        assert same == ""
        assert "['w']: 2.0, 4.0 (static)" in static and "Restore" in static
        assert "['w']: 2.0, 8.0" in dynamic
        assert "states of other leaves" in others


if __name__ == "__main__":
    check_states(sys.argv[1], int(sys.argv[2]))
