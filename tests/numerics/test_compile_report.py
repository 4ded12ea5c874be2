"""`numerics.compile_report`, and its targets; those need the plugins, which the tests do not."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa
from jax_scalify.numerics import check_fp8, compile_report
from jax_scalify.numerics.targets import missing_plugin, parse_target

X = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
E4M3 = jax.ShapeDtypeStruct((256, 256), jnp.float8_e4m3fn)


def needs(name):
    install = missing_plugin(parse_target(name))
    return pytest.mark.skipif(install is not None, reason=f"needs a compiler: {install}")


def layer(w, x):
    return jnp.mean(jax.nn.relu(x @ w) ** 2)


def test_of_the_devices_at_hand():
    report = compile_report(jax.grad(layer), X, X)
    assert (report.target, report.platform, report.devices) == (None, "cpu", 1)
    assert report.memory.arguments == 2 * X.size * 2 and report.memory.results == X.size * 2
    assert report.launches == sum(k.runs for k in report.kernels) > 0
    assert report.bytes_moved > 3 * X.size * 2
    assert not report.collectives and not report.unknown_loops
    assert report.seconds > 0 and report.processor_seconds > 0
    assert [row.phase for row in report.matmuls.rows] == ["forward", "backward"]
    text = str(report)
    assert report.summary in text and "dot_general" in text and "backward" in text
    found = json.loads(report.to_json())
    assert found["launches"] == report.launches and "text" not in found
    assert found["matmuls"]["rows"][0]["line"].startswith(__file__)


def test_scaled_arrays_of_shapes_only():
    """A model of any size is described, and never made."""
    weights = jsa.ScaledArray(jax.ShapeDtypeStruct((1 << 16, 1 << 16), jnp.float16), 0.5)
    x = jsa.ScaledArray(jax.ShapeDtypeStruct((8, 1 << 16), jnp.float16), 1.0)
    report = compile_report(jax.jit(jsa.scalify(lambda w, x: x @ w)), weights, x)
    assert report.memory.arguments == 2 * ((1 << 32) + (8 << 16))


def test_donated_arguments_are_in_place():
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    assert compile_report(step, X).memory.in_place == X.size * 2


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("h101", ValueError, "a100, h100, h200, b200"),
        ("h100:0", ValueError, "SLICESxHOSTSxGPUS"),
        ("h100:2x2x2x8", ValueError, "HOSTSxGPUS"),
        ("v5p:2x2x4x1", ValueError, "TPU topology"),
        (8, TypeError, "'h100:8', got int"),
    ],
)
def test_targets_that_are_not_known(name, error, message):
    with pytest.raises(error, match=message):
        compile_report(layer, X, X, target=name)


def test_targets():
    assert parse_target("b200:2x4x8").devices == 64
    assert parse_target("H100").topology == "1x1x1"
    assert "major: 10" in parse_target("b200").description
    for name in ("v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x1", "v5e"):
        assert parse_target(name).platform == "tpu"


@pytest.mark.parametrize("name", ["h100", "v5p:2x2x1"])
def test_what_to_install(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    extra = "cuda13" if name == "h100" else "tpu"
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'jax\[{extra}\]'"):
        compile_report(layer, X, X, target=name)


def test_what_is_no_function():
    with pytest.raises(TypeError, match="`fun` must be callable, got int"):
        compile_report(3)
    with pytest.raises(TypeError, match=r"`compile_report\(jax.jit\(.*static_argnames"):
        compile_report(lambda x, name: x, X, object())


def test_fp8_or_an_error():
    def dot(out):
        return lambda x, y: jnp.dot(x, y.T, preferred_element_type=out)

    assert check_fp8(dot(jnp.float16), E4M3, E4M3, compile=False, error=True).rows[0].eligible
    with pytest.raises(ValueError, match=r"(?s)0 of 1 .* could be .*test_compile_report.*float32"):
        check_fp8(dot(jnp.float8_e4m3fn), E4M3, E4M3, compile=False, error=True)
    with pytest.raises(ValueError, match="0 of 1 matmuls of FP8 operands are FP8 kernels on cpu"):
        check_fp8(dot(jnp.float16), E4M3, E4M3, error=True)


@needs("h100")
def test_h100():
    f16 = jax.ShapeDtypeStruct((1024, 1024), jnp.float16)
    before = dict(os.environ)
    step = jax.jit(jax.grad(jsa.fp8_matmuls(layer)))
    report = compile_report(step, f16, f16, target="h100")
    assert report.platform == "cuda" and report.memory.arguments == 2 * f16.size * 2
    assert report.matmuls.rows and all(row.is_fp8 for row in report.matmuls.rows)
    assert check_fp8(step, f16, f16, target="h100", error=True).backend == "cuda"
    assert dict(os.environ) == before and jax.default_backend() == "cpu"


@needs("h100:8")
def test_gathers_over_eight_gpus():
    mesh = AbstractMesh((8,), ("data",))
    rows = NamedSharding(mesh, P("data"))
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float16, sharding=rows)
    report = compile_report(lambda w, x: x @ w, w, w, target="h100:8")
    assert report.devices == 8 and report.memory.arguments == 2 * w.size * 2 // 8
    assert [(c.kind, c.dtype) for c in report.collectives] == [("all-gather", "f16")]
    with pytest.raises(ValueError, match="'h100' has 1 of the 8 devices"):
        compile_report(lambda w, x: x @ w, w, w, target="h100")


@needs("v5p:2x2x1")
def test_tpu():
    report = compile_report(jax.grad(layer), X, X, target="v5p:2x2x1")
    assert (report.platform, report.devices) == ("tpu", 1)
    assert report.launches and report.memory.arguments == 2 * X.size * 2


@needs("v5p:2x2x1")
def test_loops_of_a_tpu_count_as_often_as_they_run():
    stack = jax.ShapeDtypeStruct((12, *X.shape), X.dtype)
    loop = jax.jit(lambda x, ws: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0])
    report = compile_report(loop, X, stack, target="v5p:2x2x1")
    assert report.unknown_loops == 0 and report.bytes_moved >= stack.size * 2


def test_the_report_of_a_training_step_in_float16():
    rng = np.random.default_rng(0)
    params = jsa.as_scaled_array(jnp.float16(rng.normal(size=(64, 64))))
    frozen = jsa.freeze_scales(params)
    step = jax.jit(jsa.scalify(lambda w, x: w - jax.grad(layer)(w, x)))
    dynamic = compile_report(step, params, params)
    static = compile_report(step, frozen, frozen)
    assert static.launches < dynamic.launches and static.bytes_moved < dynamic.bytes_moved
