"""`Scalified` for Keras models. Its page, docs/integrations/keras.md, runs in test_doc_pages."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

from jax_scalify.integrations.keras import Scalified  # noqa: E402

RNG = np.random.default_rng(0)
X = np.float32(RNG.normal(size=(64, 8)))
Y = np.float32(np.tanh(X[:, :1] - X[:, 1:2]))


class Model(Scalified, keras.Sequential):
    pass


@pytest.fixture(autouse=True)
def policy():
    yield
    keras.config.set_dtype_policy("float32")


def make(cls, optimizer=None, policy="float32"):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(1, dtype="float32")]
    model = cls([keras.Input((8,)), *layers])
    model.compile(optimizer or keras.optimizers.Adam(1e-2), "mse")
    return model


def fit(model, epochs=3):
    return model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def test_a_float32_model_trains_as_without():
    plain, model = make(keras.Sequential), make(Model)
    np.testing.assert_allclose(fit(model), fit(plain), rtol=1e-5)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Lion"])
def test_a_float16_model_has_state_in_float16_and_compiles_once(name):
    def optimizer():
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(keras.optimizers, name)(1e-2, **momentum)

    model = make(Model, optimizer(), "mixed_float16")
    np.testing.assert_allclose(fit(model), fit(make(keras.Sequential, optimizer())), rtol=0.02)
    parts = ("trainable_variables", "optimizer_variables")
    others = ("non_trainable_variables", "metrics_variables")
    state = model._get_jax_state(**dict.fromkeys(parts + others, True))
    stored = [x for part in (state[0], state[2]) for x in part if x.ndim]
    assert {x.dtype for x in stored} == {np.dtype(np.float16)}
    assert {w.dtype for w in model.get_weights()} == {np.dtype(np.float32)}
    step = model.train_function
    fit(model, epochs=1)
    assert model.train_function is step


def test_a_model_is_saved_and_goes_on(tmp_path):
    model = make(Model, policy="mixed_float16")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Model": Model})
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    np.testing.assert_allclose(fit(loaded), fit(model), rtol=1e-5)
    assert int(loaded.optimizer.iterations.value) == 24


def test_bad_models_are_refused():
    with pytest.raises(TypeError, match="before `keras.Model`"):
        Scalified().compile("adam")
    with pytest.raises(TypeError, match="Late must list `Scalified` before its Keras model"):
        type("Late", (keras.Sequential, Scalified), {})
    with pytest.raises(ValueError, match=r"must be float32 outside `fit`.*mixed_float16"):
        fit(make(Model, policy="float16"))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    with pytest.raises(ValueError, match="no scale of the loss"):
        fit(make(Model, scaled, "mixed_float16"))


def test_any_pure_function_can_be_an_optimizer():
    def apply(state, grads, params):
        state = jax.tree.map(lambda v, g: 0.9 * v + g, state, grads)
        return jax.tree.map(lambda p, v: p - 0.1 * v, params, state), state

    optimizer = jsa.optim.from_stateless(lambda p: jax.tree.map(jnp.zeros_like, p), apply)
    low = jsa.optim.low_precision(optimizer)
    params = {"w": np.float32([0.5, -0.25])}
    state = low.init(params)
    updates, state = jax.jit(low.update)({"w": np.float32([1e-6, -2e-6])}, state, params)
    np.testing.assert_allclose(state["w"].to_array(np.float32), [1e-6, -2e-6], rtol=1e-3)
    np.testing.assert_allclose(updates["w"], [-1e-7, 2e-7], atol=3e-8)
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(params, params)
    with pytest.raises(TypeError, match="`apply` must be callable, got int"):
        jsa.optim.from_stateless(lambda p: p, 3)
