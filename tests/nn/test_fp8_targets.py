"""What XLA makes of FP8 forms for a GPU that is not there; needs the plugin, which tests do not."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_scalify as jsa
from benchmarks.cost import fp8_forms
from jax_scalify.numerics.targets import missing_plugin, parse_target

INSTALL = missing_plugin(parse_target("h100"))
needs_h100 = pytest.mark.skipif(INSTALL is not None, reason=f"needs a compiler: {INSTALL}")


@pytest.mark.full
def test_what_is_compiled_runs(monkeypatch):
    """On the devices at hand: the functions and their operands fit."""
    for name, value in dict(ROWS=8, WIDTH=16, HIDDEN=8, EXPERTS=2, LAYERS=2, RANK=2).items():
        monkeypatch.setattr(fp8_forms, name, value)
    for make in fp8_forms.CASES.values():
        step, args = make()
        step.eval_shape(*args)
    assert fp8_forms.dtypes_of_base("f16[2,16,16]{2,1,0} fusion(f8e4m3fn[512])") == [
        "f16",
        "f8e4m3fn",
    ]


@needs_h100
def test_grouped_matmuls_are_fp8_kernels(monkeypatch):
    monkeypatch.setattr(fp8_forms, "ROWS", 1024)
    bytes_moved = []
    for multiply in (lax.ragged_dot, jsa.nn.ragged_dot):
        step, args = fp8_forms.experts(multiply)
        report = jsa.numerics.compile_report(step, *args, target="h100")
        bytes_moved.append(report.bytes_moved)
    assert all(row.is_fp8 and row.eligible for row in report.matmuls.rows)
    assert len(report.matmuls.rows) == 3 and bytes_moved[1] < 0.9 * bytes_moved[0]


@needs_h100
def test_second_derivatives_cost_nothing_where_there_are_none():
    """The backward pass of a scan keeps the FP8 operands, and nothing of the 16-bit ones."""
    weights = jax.ShapeDtypeStruct((4, 256, 256), jnp.float16)
    x = jax.ShapeDtypeStruct((512, 256), jnp.float16)

    def loss(w, x):
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].astype(jnp.float32))

    step = jax.grad(jsa.fp8_matmuls(loss))
    text = jsa.numerics.compile_report(jax.jit(step), weights, x, target="h100").text
    assert "f8e4m3fn[4,512,256]" in text
    # One stack of activations in 16 bits: the derivative of tanh.
    loops = [line for line in text.splitlines() if " while(" in line]
    assert max(line.count("f16[4,512,256]") for line in loops) <= 2
