"""`benchmarks/cost/gpu_fp8.py` with tiny sizes on the CPU: it loops, checks kernels and stores."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.linen")
pytest.importorskip("rich")

from benchmarks.cost import gpu_fp8

pytestmark = pytest.mark.newest  # its command runs on the newest JAX

NO_GPU = pytest.mark.skipif(
    gpu_fp8.has_fp8_units(jax.devices()[0]), reason="there is a GPU with FP8 units"
)


@pytest.mark.full
@NO_GPU
def test_a_tiny_run_is_stored_and_not_measured_twice(tmp_path, capsys):
    arguments = "--allow-cpu --sizes 32 --sequence 16 --repeats 2".split()
    for measured in (3, 0):
        gpu_fp8.main([*arguments, "--out", str(tmp_path)])
        printed = capsys.readouterr().out
        assert printed.count("timing") == measured
        assert "FP8 is emulated" in printed
    (path,) = tmp_path.iterdir()
    assert path.name == f"gpu_fp8-cpu-jax{jax.__version__}.json"
    stored = json.loads(path.read_text())
    assert stored["emulated"] and stored["device"] == "cpu"
    layer = stored["cells"]["layer/32/forward+backward"]["variants"]
    assert list(layer) == ["bfloat16", "fp8", "scaled", "scaled-static"]
    matmuls = stored["cells"]["matmul/32x32x32/forward+backward"]["variants"]
    assert list(matmuls) == ["bfloat16", "fp8", "fp8-bfloat16"]
    for name, row in [*layer.items(), *matmuls.items()]:
        assert row["q1_ms"] <= row["median_ms"] <= row["q3_ms"] and row["tflops"] > 0
        # On a CPU no matmul is FP8, and each says why.
        kernels = row["kernels"]
        assert kernels["fp8"] == 0 and len(kernels["others"]) == kernels["matmuls"]
        assert all("FP8" in other["reason"] for other in kernels["others"]), name
        assert ("f8e4m3fn x f8e4m3fn" in "".join(row["check_fp8"])) == (name != "bfloat16")
    assert matmuls["fp8"]["kernels"]["matmuls"] == 3  # forward, dgrad, wgrad
    assert layer["scaled"]["kernels"]["matmuls"] == layer["bfloat16"]["kernels"]["matmuls"]


def test_cells_are_left_when_the_time_is_up(tmp_path, capsys):
    arguments = "--allow-cpu --sizes 32 --parts matmul --minutes 1e-9"
    gpu_fp8.main([*arguments.split(), "--out", str(tmp_path)])
    assert "2 cells left" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_loop_does_all_of_its_turns():
    x = jnp.eye(16) * 2
    loop = gpu_fp8.repeat(jnp.matmul, 5)
    count, out = loop(x, x)
    assert count == 5
    np.testing.assert_array_equal(out, x @ x)
    # The matmul is in the body of the loop still.
    program = loop.lower(x, x).compile().as_text()
    body, _, entry = program.partition("ENTRY")
    assert "dot_general" in body and "dot_general" not in entry


def test_flops_are_those_of_the_matmuls():
    variants = gpu_fp8.layer_variants(256, batch=2, sequence=32)
    fun, args = variants["bfloat16"]
    rows = gpu_fp8.jsa.numerics.check_fp8(fun, *args, compile=False).rows
    options = gpu_fp8.argparse.Namespace(
        parts=["layer"], widths=[256], batch=2, sequence=32, repeats=2, work=1.0
    )
    (cell,) = gpu_fp8.make_cells(options)
    sizes = [(r.sizes.batch, r.sizes.m, r.sizes.k, r.sizes.n) for r in rows]
    assert cell.flop == sum(2 * math.prod(size) for size in sizes)


def test_a_variant_that_fails_does_not_stop_the_others(capsys):
    def no_memory(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: [/job] out of memory\nmore")

    args = jnp.eye(16), jnp.eye(16)
    variants = {"bfloat16": (no_memory, args), "fp8": (jnp.matmul, args)}
    cell = gpu_fp8.Cell("a", 8192.0, {}, lambda: variants)
    found = gpu_fp8.measure(cell, 1e-8, 2, gpu_fp8.Console(width=120))["variants"]
    assert found["bfloat16"] == {"error": "RESOURCE_EXHAUSTED: [/job] out of memory"}
    assert found["fp8"]["median_ms"] > 0
    assert "failed: RESOURCE_EXHAUSTED: [/job]" in capsys.readouterr().out


def test_what_fails_is_said(capsys):
    fine = {"q1_ms": 1.0, "median_ms": 2.0, "q3_ms": 3.0, "tflops": 4.0}
    fine["kernels"] = {"fp8": 0, "matmuls": 1, "others": []}
    half = {**fine, "median_ms": 1.0, "kernels": {"fp8": 1, "matmuls": 1, "others": []}}
    cells = {"a": {"variants": {"bfloat16": fine, "fp8": half, "scaled": {"error": "no memory"}}}}
    results = {"device": "some GPU", "jax": "1", "emulated": False, "cells": cells}
    gpu_fp8.Console(width=120).print(gpu_fp8.summarise(results, ["a", "b"]))
    printed = capsys.readouterr().out
    assert "2.00x" in printed and "1/1" in printed and "failed" in printed


@NO_GPU
def test_without_a_gpu_it_refuses(tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        gpu_fp8.main(["--out", str(tmp_path)])
    assert raised.value.code == 2
    assert "needs an NVIDIA GPU with FP8 units" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bad_arguments_are_refused(capsys):
    for arguments, message in (
        (["--sizes", "64x32"], "must be N or MxKxN, each positive, got '64x32'"),
        (["--sizes", "0"], "must be N or MxKxN, each positive, got '0'"),
        (["--widths", "128", "-1"], "--widths must be positive, got -1"),
        (["--widths", "200"], "--widths must be multiples of 128, got 200"),
        (["--sequence", "0"], "--sequence must be positive, got 0"),
        (["--batch", "0"], "--batch must be positive, got 0"),
        (["--work", "nan"], "--work must be positive, got nan"),
        (["--minutes", "-1"], "--minutes must be positive, got -1.0"),
        (["--repeats", "1"], "--repeats must be at least 2, got 1"),
        (["--parts", "attention"], "invalid choice: 'attention'"),
    ):
        with pytest.raises(SystemExit) as raised:
            gpu_fp8.main(["--allow-cpu", *arguments])
        assert raised.value.code == 2
        assert message in capsys.readouterr().err
