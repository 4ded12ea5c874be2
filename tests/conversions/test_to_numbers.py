"""Numbers for logs: Python's and NumPy's, of everything that a step returns."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray


def test_numbers_of_every_kind():
    x = ScaledArray(jnp.float16(1.5), jnp.float32(2.0**40))
    tree = {
        "scaled": x,
        "static": ScaledArray(jnp.float8_e4m3fn(1.5), 2.0**-40),
        "vector": ScaledArray(jnp.asarray([3, 60000], jnp.float16), jnp.float32([2, 4])),
        "bfloat16": jnp.bfloat16(3),
        "narrow": jnp.ones((2, 0), jnp.float8_e4m3fn),
        "integer": jnp.int32(-3),
        "bool": jnp.bool_(True),
        "complex": jnp.complex64(1 + 2j),
        "not finite": jnp.asarray([np.inf, np.nan]),
        "numpy": (np.float64(0.1), np.arange(3, dtype=np.int8)),
        "key": jax.random.key(7),
        "others": ["text", None, 0.25, 3, False, len],
    }
    got = jsa.to_numbers(tree)
    for name, expected in {
        "scaled": 1.5 * 2.0**40,
        "static": 1.5 * 2.0**-40,
        "bfloat16": 3.0,
        "integer": -3,
        "bool": True,
        "complex": 1 + 2j,
    }.items():
        assert type(got[name]) is type(expected) and got[name] == expected
    for name in ("vector", "narrow", "not finite"):
        assert type(got[name]) is np.ndarray and got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], np.asarray(tree[name], np.float32))
    np.testing.assert_array_equal(got["vector"], [6, 240000])
    assert type(got["numpy"][0]) is float and got["numpy"][0] == 0.1
    assert got["numpy"][1].dtype == np.int8
    np.testing.assert_array_equal(got["key"], [0, 7])
    assert got["others"] == tree["others"]
    assert type(jsa.to_numbers(x)) is float and jsa.to_numbers({}) == {}


def test_metrics_of_a_step():
    """What leaves a scalified function is scaled, scalars of float32 too, and prints."""

    @jax.jit
    @jsa.scalify
    def step(w):
        loss = jnp.sum(jnp.square(w)).astype(jnp.float32)
        return {"loss": loss, "plain": jsa.stop_scaling(loss), "steps": 3}

    metrics = step(jsa.as_scaled_array(jnp.full(4, 0.5), scale="rms", dtype=jnp.float16))
    assert isinstance(metrics["loss"], ScaledArray) and isinstance(metrics["plain"], jax.Array)
    assert json.loads(json.dumps(jsa.to_numbers(metrics))) == {"loss": 1, "plain": 1, "steps": 3}
    assert f"{metrics['loss']:.2f}" == "1.00" and float(metrics["loss"]) == 1
    assert metrics["loss"].block_until_ready() is metrics["loss"]
    jax.block_until_ready(metrics)
    host = jax.device_get(metrics)["loss"]
    assert isinstance(host.data, np.ndarray) and float(host) == 1
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(metrics["loss"])


def test_under_jit_there_are_no_numbers():
    with pytest.raises(TypeError, match=r"`tree\['loss'\]` is traced and has no value yet"):
        jax.jit(lambda x: jsa.to_numbers({"loss": x}))(jnp.ones(2))
    seen = []
    scaled = jsa.as_scaled_array(jnp.float32(2), scale=4.0)
    jax.jit(lambda x: jax.debug.callback(lambda x: seen.append(jsa.to_numbers(x)), x))(scaled)
    jax.effects_barrier()
    assert seen == [2.0]


def test_the_size_of_a_tree():
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(()), "n": 3, "f": len, "none": None}
    scaled = jsa.as_scaled_array(params, axis=0)
    assert jsa.tree.size(params) == jsa.tree.size(scaled) == 13
    assert jsa.tree.size(jax.eval_shape(lambda: scaled["w"])) == 12
    assert jsa.tree.size(jnp.ones((0, 3))) == jsa.tree.size({}) == 0
