"""Equinox models, whose functions and strings are leaves, go in and out of the transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa
from jax_scalify import unit_scaling as us

eqx = pytest.importorskip("equinox")


def make_model():
    return eqx.nn.MLP(4, 2, 16, 2, key=jax.random.key(0))


def loss_fn(model, x):
    return jnp.mean(jnp.square(jax.vmap(model)(x)).astype(jnp.float32))


def step(model, x, loss=loss_fn):
    value, grads = eqx.filter_value_and_grad(loss)(model, x)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value


def train(step, model, x):
    step, losses = eqx.filter_jit(step), []
    for _ in range(4):
        model, loss = step(model, x)
        losses.append(float(loss))
    return model, losses


X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_whole_model_comes_back(dtype):
    want, losses = train(step, make_model(), X)
    model = jsa.as_scaled_array(make_model(), scale="rms", dtype=dtype)
    got, scaled_losses = train(jsa.scalify(step), model, X.astype(dtype))
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    np.testing.assert_allclose(scaled_losses, losses, rtol=tolerance)
    assert got.activation is want.activation
    assert got.layers[0].weight.dtype == dtype
    values = jsa.asarray(got, jnp.float32)
    for a, b in zip(jax.tree.leaves(values), jax.tree.leaves(want), strict=True):
        if eqx.is_array(b):
            np.testing.assert_allclose(a, b, atol=tolerance)


class Cnn(eqx.Module):
    """A model whose Python floats are settings: a slope, a dropout rate, the -inf of a maximum."""

    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    drop: eqx.nn.Dropout
    out: eqx.nn.Linear
    slope: float = 0.2

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.conv = eqx.nn.Conv2d(1, 4, 3, key=keys[0])
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.drop = eqx.nn.Dropout(0.25)
        self.out = eqx.nn.Linear(36, 2, key=keys[1])

    def __call__(self, x):
        x = jax.nn.leaky_relu(self.pool(self.conv(x)), self.slope)
        return self.out(self.drop(jnp.ravel(x), key=jax.random.key(1)))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_settings_of_a_model_are_not_trained(dtype, static):
    images = np.random.default_rng(0).normal(size=(8, 1, 8, 8)).astype(np.float32)
    want, losses = train(step, Cnn(), images)
    model = jsa.as_scaled_array(Cnn(), scale="rms", dtype=dtype, static=static)
    assert (model.slope, model.drop.p, model.pool.init) == (0.2, 0.25, -np.inf)
    optimizer = jsa.optim.low_precision(optax.sgd(0.1), dtype)

    @jsa.scalify
    def scaled_step(model, state, x):
        value, grads = eqx.filter_value_and_grad(jsa.fp8_matmuls(loss_fn, lambda _: False))(
            model, x
        )
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return jsa.optim.apply_updates(model, updates), state, value

    run, state = eqx.filter_jit(scaled_step), optimizer.init(eqx.filter(model, eqx.is_array))
    for loss in losses:
        model, state, value = run(model, state, images.astype(dtype))
        np.testing.assert_allclose(float(value), loss, rtol=1e-5 if dtype == "float32" else 5e-3)
    assert (model.slope, model.drop.p, model.pool.init) == (0.2, 0.25, -np.inf)
    values = jsa.asarray(model, jnp.float32)
    assert (values.slope, values.drop.p) == (want.slope, want.drop.p)
    report = jsa.numerics.check_fp8(scaled_step, model, state, images.astype(dtype), compile=False)
    assert len(report.rows) == 5  # two of the forward pass


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`fp8_matmuls` was given a function with")
def test_other_transforms_return_a_model_too():
    model = make_model()
    narrow, _ = jsa.fp8_matmuls(step)(model, X)
    unit, _ = us.unit_scale(step)(model, X)
    assert narrow.activation is unit.activation is model.activation


def test_a_report_on_a_step_that_returns_a_model():
    model = jsa.as_scaled_array(make_model(), scale="rms", dtype=jnp.float16)
    report = jsa.numerics.report(jsa.scalify(step))(model, X)
    assert any(row.phase == "backward" for row in report)
    assert not jsa.numerics.find_nonfinite(jsa.scalify(step))(model, X)


def test_check_fp8_of_a_step_with_a_model():
    checked = jsa.numerics.check_fp8(eqx.filter_jit(step), make_model(), X, compile=False)
    assert checked.summary.startswith("0 of 8 matmuls have FP8 operands, 8 f32 x f32; ")


def test_our_updates_of_a_model():
    model = make_model()
    updates = jax.tree.map(lambda x: 0.5 * x, eqx.filter(model, eqx.is_array))
    new = jsa.optim.apply_updates(model, updates)
    np.testing.assert_allclose(new.layers[0].weight, 1.5 * model.layers[0].weight)
    assert new.activation is model.activation
