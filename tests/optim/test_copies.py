"""Numbers in memory of their own on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.optim.copies import Copies, stored_number


def test_a_stored_number_has_derivatives_and_batches():
    x = jnp.arange(6.0).reshape(2, 3)
    loss = lambda x: jnp.sum(stored_number(x) ** 2)  # noqa: E731
    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(stored_number)(x), x)


@pytest.mark.parametrize("platform, count", [("cpu", 0), ("tpu", 0), ("cuda", 3)])
def test_each_copy_of_a_number_has_a_barrier_of_its_own(platform, count):
    def fun(x, *arrays):
        copies = Copies()
        return [copies.of(x) * array for array in arrays], copies.of(np.float32(2))

    arrays = [jnp.ones(8)] * 3
    traced = jax.jit(fun).trace(jnp.float32(3), *arrays)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.optimization_barrier") == count
    scaled = [jsa.ScaledArray(x, 2.0) for x in (jnp.float32(3), *arrays)]
    results, two = jsa.scalify(fun)(*scaled)
    assert [float(jnp.max(jsa.asarray(x))) for x in results] == [12.0] * 3 and two == 2
