"""JAX's checks on, of implicit promotions of dtypes and ranks and of nan: our own code passes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa
from jax_scalify import unit_scaling as us

DTYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}


@pytest.fixture(autouse=True)
def checks():
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True),
    ):
        yield


def _normal(shape, seed, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _loss(params, x):
    h = jsa.nn.rms_norm(x @ params["w"], params["gain"])
    h = jax.nn.gelu(h, approximate=False) + jsa.nn.linear(h, params["w"], params["bias"])
    heads = h.reshape(1, 8, 2, 4)
    h = jsa.nn.dot_product_attention(heads, heads, heads, is_causal=True).reshape(8, 8)
    h = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), h, params["stack"])[0]
    return jnp.mean(jnp.square(jsa.dynamic_rescale(h)).astype(jnp.float32))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_training_step_and_what_looks_at_it(dtype, kind):
    optimizer = jsa.optim.low_precision(optax.lion(1e-2))  # optax's own Adam promotes counts

    def step(state, x):
        params, moments = state
        loss, grads = jax.value_and_grad(_loss)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return (jsa.optim.apply_updates(params, updates), moments), loss

    dtype = DTYPES[dtype]
    params = {"w": _normal((8, 8), 0, dtype), "stack": _normal((2, 8, 8), 1, dtype)}
    params |= {"gain": jnp.ones(8, dtype), "bias": jnp.ones(8, dtype)}
    params = jsa.as_scaled_array(params, scale="rms")
    state = params, jsa.as_scaled_array(optimizer.init(params))
    state = jsa.freeze_scales(state) if kind == "static" else state
    x = jsa.as_scaled_array(_normal((8, 8), 2, dtype), scale=4.0)
    scalified = jax.jit(jsa.scalify(step))
    assert float(scalified(state, x)[1]) > 0
    assert jsa.numerics.report(scalified)(state, x).rows
    assert jsa.numerics.find_nonfinite(scalified)(state, x) is None
    calibration = jsa.calibrate(step, state, x, steps=1)
    calibrated = jax.jit(jsa.scalify(step, calibration=calibration))
    tracked = jsa.numerics.track(
        calibrated, lambda name: calibration.watches(name) or "args" in name, every=1
    )
    (state, _), record = tracked(calibration.freeze(state), x)
    assert not calibration.guard(state, record)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_plain_arrays(dtype):
    """What has no scale has a scale of nan in a record."""
    x = jsa.as_scaled_array(_normal(8, 0, DTYPES[dtype]))
    _, record = jsa.numerics.track(lambda x: x * 2, every=1)(x.data)
    assert np.isnan(record.scale_exponent).all() and np.isfinite(record.log2_rms).all()
    assert jsa.numerics.find_nonfinite(lambda x: jnp.log(x * 0) * 0)(x.data).primitive == "log"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rules_are_checked(dtype):
    x = np.asarray(_normal((2, 3), 0, DTYPES[dtype]))
    with jax.debug_nans(False):
        jsa.testing.check_scale_rule(jnp.tanh, x, ways=jsa.testing.WAYS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_broadcast_their_parameters(dtype):
    x, w, b = (_normal(s, 0, DTYPES[dtype]) for s in ((4, 6, 8), (8, 8), (8,)))
    heads = x.reshape(4, 6, 2, 4)
    layers = [
        lambda x, w, b: jsa.nn.layer_norm(x, b, b),
        lambda x, w, b: jsa.nn.linear(x, w, b),
        lambda x, w, b: us.functional.linear(x, w, b),
        lambda x, w, b: us.functional.layer_norm(x, b, b),
        lambda x, w, b: jsa.nn.linear(
            x, w, b, forward_dtype=jnp.float8_e4m3fn, backward_dtype=jnp.float8_e5m2
        ),
        lambda x, w, b: us.functional.rope(heads) * x.reshape(heads.shape),
        lambda x, w, b: jsa.nn.dot_product_attention(
            heads, heads, heads, w[:6, :6], is_causal=True, local_window_size=2
        ),
        lambda x, w, b: jsa.nn.dot_product_attention(
            heads, heads, heads, mask=w[:6, :6] < 9, key_value_seq_lengths=jnp.arange(1, 5)
        ),
    ]
    for layer in layers:
        for operands in ((x, w, b), jsa.as_scaled_array((x, w, b), scale="rms")):
            grad = jax.grad(lambda *a, f=layer: jnp.sum(f(*a).astype(jnp.float32)), (0, 1, 2))
            jax.jit(jsa.scalify(grad))(*operands)
