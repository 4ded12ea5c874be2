"""Of `make test-nightly`: what it installs, and what it says."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("packaging")
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "test_nightly.py"))
OUTPUT = """
FAILED tests/test_a.py::test_one - AttributeError: module 'jax' has no attribute 'gone'
FAILED tests/test_b.py::test_two[x-1] - AttributeError: module 'jax' has no attribute 'gone'
ERROR tests/test_c.py
3 failed, 10 passed in 1.00s
"""


def test_failures_are_grouped_by_their_message():
    assert list(SCRIPT["breaks"](OUTPUT).items()) == [
        (
            "AttributeError: module 'jax' has no attribute 'gone'",
            ["tests/test_a.py::test_one", "tests/test_b.py::test_two[x-1]"],
        ),
        ("no message", ["tests/test_c.py"]),
    ]


def test_extras_are_followed_and_jax_is_left_out():
    names = {line.partition(">")[0] for line in SCRIPT["requirements"]("test")}
    assert {"pytest", "hypothesis", "flax", "orbax-checkpoint", "optax"} <= names
    assert {"ml_dtypes", "numpy"} <= {line.partition(">")[0] for line in SCRIPT["requirements"]("")}
    assert not any(line.startswith("jax") for line in SCRIPT["requirements"]("test"))


def test_without_a_newer_one_nothing_is_installed(capsys, monkeypatch):
    namespace = SCRIPT["main"].__globals__
    monkeypatch.setitem(namespace, "newest", lambda python: namespace["Version"]("0.1"))
    assert SCRIPT["main"]([]) == 0
    assert "has no JAX newer than" in capsys.readouterr().out
