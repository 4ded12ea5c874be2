"""Warnings about a step that is likely not set up as meant."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa

NARROW = jnp.float16


@contextlib.contextmanager
def _no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=(8, 8)), dtype) for name in ("w", "v")}


def _scaled(dtype="float16"):
    return jsa.as_scaled_array(_params(), scale="rms", dtype=dtype, static=True)


def _batch(dtype):
    return jnp.ones((4, 8), dtype), jnp.zeros((4, 8), dtype)


def _step():
    optimizer = jsa.optim.low_precision(optax.adamw(1e-3))

    def update(params, state, x, y):
        def loss_fn(params):
            return jnp.mean((jax.nn.relu(x @ params["w"]) @ params["v"] - y) ** 2)

        grads = jax.grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return jsa.optim.apply_updates(params, updates), state

    return jax.jit(jsa.scalify(update)), optimizer


def _run(params, batch, steps=2):
    update, optimizer = _step()
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = update(params, state, *batch)


@pytest.mark.parametrize(
    "params, dtype", [("float16", NARROW), ("float32", jnp.float32), ("bfloat16", jnp.bfloat16)]
)
def test_a_step_in_one_dtype_says_nothing(params, dtype):
    with _no_warning():
        _run(_scaled(params), _batch(dtype))


def test_a_float32_batch_beside_float16_weights_is_said_once_with_the_line():
    with pytest.warns(
        jsa.SetupWarning, match=r"Every matmul of `update` .*test_setup\.py"
    ) as found:
        _run(_scaled(), _batch(jnp.float32))
    [warning] = found
    assert "`args[2]`, `args[3]`" in str(warning.message)


def test_weights_that_were_not_converted_are_said_once():
    with pytest.warns(jsa.SetupWarning, match=r"No matmul of `update` .*test_setup\.py") as found:
        _run(_params(), _batch(jnp.float32))
    [warning] = found
    assert "`args[0]['v']`, `args[0]['w']`" in str(warning.message)


def test_nothing_scaled_is_said_once():
    f = jax.jit(jsa.scalify(lambda params, x: x @ params["w"]))
    with pytest.warns(jsa.SetupWarning, match="Nothing is scaled in `<lambda>`") as found:
        for _ in range(2):
            f(_params(), jnp.ones((4, 8)))
        f(_params(), jnp.ones((2, 8)))
    assert len(found) == 1


def test_what_needs_no_scale_says_nothing():
    with _no_warning():
        jsa.scalify(lambda key: jax.random.normal(key, (3,)))(jax.random.key(0))
        jsa.scalify(lambda n: n + 1)(jnp.arange(3))
        jsa.scalify(lambda params: jsa.scalify(jnp.sin)(params["w"]))(_scaled())
        jsa.scalify(lambda x: jsa.set_scaling(x, 2.0))(jnp.ones(3))
        jsa.dynamic_rescale(_scaled())


def test_constants_of_the_model_are_named_by_their_line():
    table = jnp.ones(8)

    def model(params, x):
        return (x + table) @ params["w"]  # here

    x = jnp.ones((4, 8), NARROW)
    with pytest.warns(
        jsa.SetupWarning, match=r"float32 constants, .*test_setup.*Give the"
    ) as found:
        jsa.scalify(model)(_scaled(), x)
    assert "Cast" not in str(found[0].message)
