import jax
import jax.numpy as jnp
import optax
import pytest

import jax_scalify as jsa


@pytest.mark.parametrize(("platform", "constraints"), [("cuda", 2), ("cpu", 0), ("tpu", 0)])
def test_gradients_are_row_major_on_a_gpu(platform, constraints):
    params = {"w": jnp.ones((8, 4)), "k": jnp.ones((2, 3, 4)), "b": jnp.ones(4), "s": jnp.ones(())}
    optimizer = jsa.optim.low_precision(optax.adam(1e-3))
    params = jsa.as_scaled_array(params, dtype="float16", scale="rms")
    state = jsa.as_scaled_array(optimizer.init(params))
    update = jax.jit(jsa.scalify(optimizer.update))
    lowered = update.trace(params, state, params).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("LayoutConstraint") == constraints
