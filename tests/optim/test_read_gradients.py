import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.optim.arena import SMALL
from jax_scalify.optim.gradients import read_gradients

LARGE = (SMALL // 4, 8)


@pytest.mark.parametrize(("platform", "constraints"), [("cuda", 2), ("cpu", 0), ("tpu", 0)])
def test_gradients_are_row_major_on_a_gpu(platform, constraints):
    params = {"w": jnp.ones((8, 4)), "k": jnp.ones((2, 3, 4)), "b": jnp.ones(4), "s": jnp.ones(())}
    optimizer = jsa.optim.low_precision(optax.adam(1e-3))
    params = jsa.as_scaled_array(params, dtype="float16", scale="rms")
    state = jsa.as_scaled_array(optimizer.init(params))
    update = jax.jit(jsa.scalify(optimizer.update))
    lowered = update.trace(params, state, params).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("LayoutConstraint") == constraints


def test_large_gradients_have_numbers_in_memory_as_scales():
    data = jnp.asarray(np.random.default_rng(0).normal(size=LARGE), jnp.float16)
    grads = {
        "static": jsa.ScaledArray(data, 2.0**-20),
        "same": jsa.ScaledArray(data, 2.0**-20),
        "dynamic": jsa.ScaledArray(data, jnp.float32(2.0**-21)),
        "rows": jsa.ScaledArray(data, jnp.full((LARGE[0], 1), 2.0**-3)),
        "small": jsa.ScaledArray(data[:4], 2.0**-20),
        "zero": jsa.ScaledArray(jnp.zeros(LARGE, jnp.float16), 0.0),
        "plain": data,
    }
    read = jax.jit(jsa.scalify(read_gradients))
    for x, given in zip(*map(jsa.tree.leaves, (read(grads), grads)), strict=True):
        np.testing.assert_array_equal(jsa.asarray(x, jnp.float32), jsa.asarray(given, jnp.float32))
    stored = [
        e for e in all_equations(read.trace(grads).jaxpr.jaxpr) if e.primitive.name == "store"
    ]
    assert len(stored) == 3 + 1  # one number for equal static scales, and a copy for each leaf


def test_static_gradients_update_as_their_values_do():
    params = {"w": jnp.ones(LARGE, jnp.float16)}
    optimizer = jsa.optim.low_precision(optax.adam(1e-3))
    data = jnp.asarray(np.random.default_rng(0).normal(size=LARGE), jnp.float16)
    update = jax.jit(jsa.scalify(optimizer.update))
    state = optimizer.init(params)
    results = [
        update({"w": jsa.ScaledArray(data, scale)}, state, params)
        for scale in (2.0**-20, jnp.float32(2.0**-20))
    ]
    results.append(update({"w": data.astype(jnp.float32) * 2.0**-20}, state, params))
    for other in results[1:]:
        for x, y in zip(*map(jax.tree.leaves, (results[0], other)), strict=True):
            np.testing.assert_array_equal(x, y)
