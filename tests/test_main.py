"""`python -m jax_scalify`."""

import subprocess
import sys
from importlib import metadata

import jax
import pytest

import jax_scalify as jsa
from jax_scalify import __main__ as report
from jax_scalify.interpreter.registry import registered_rules


def test_it_prints_what_a_bug_report_needs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jax_scalify"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag")
    report.main()
    printed = capsys.readouterr().out
    assert f"jax_scalify {jsa.__version__}\n" in printed
    assert f"jax {jax.__version__}\n" in printed
    assert "XLA_FLAGS=--xla_some_flag\n" in printed
    assert f"{jax.device_count()} × {jax.devices()[0].platform}: " in printed
    assert f"{len(registered_rules())} primitives have a scale rule" in printed
    for pair in ("E4M3 × E4M3", "E4M3 × E5M2", "E5M2 × E4M3", "E5M2 × E5M2"):
        assert f"{pair} matmul: " in printed


def test_packages_that_are_missing_and_rules_that_are_missing_are_named(monkeypatch):
    def version(name):
        if name == "flax":
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    lines = report.describe_versions()
    assert "flax is not installed" in lines and "optax 1" in lines
    rules = [rule for rule in registered_rules() if rule.name not in ("add", "dot_general")]
    monkeypatch.setattr(report, "registered_rules", lambda: rules)
    assert report.describe_rules()[1].endswith(": add, dot_general")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of what CPUs do")
def test_a_cpu_emulates_fp8():
    assert all(": emulated (" in line for line in report.describe_fp8())


def test_a_format_that_is_refused_does_not_end_the_report(monkeypatch):
    def refuse(*args):
        raise ValueError("no such format\nat all")

    monkeypatch.setattr(jsa.numerics, "check_fp8", refuse)
    assert report.describe_fp8()[0] == "E4M3 × E4M3 matmul: refused: no such format"


def test_an_unknown_option_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "jax_scalify", "--bad"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "unrecognized arguments: --bad" in done.stderr
