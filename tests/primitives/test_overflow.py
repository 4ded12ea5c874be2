"""Data that is infinite where its value is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scalify.primitives.overflow import unless_infinite


@pytest.mark.parametrize("platform, selects", [("cpu", 1), ("tpu", 1), ("cuda", 0)])
def test_infinities_are_selected_except_on_cuda(platform, selects):
    """Other compilers may multiply the two tiny factors first, and infinity times 0 is nan."""
    traced = jax.jit(unless_infinite).trace(jnp.ones(3), jnp.ones(3))
    lowered = traced.lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("stablehlo.select") == selects


def test_an_infinity_or_nan_replaces_the_number():
    x, y = jnp.array([1.0, 2, 3, 4]), jnp.array([5.0, np.inf, -np.inf, np.nan])
    for call in (unless_infinite, jax.jit(unless_infinite), jax.vmap(unless_infinite)):
        np.testing.assert_array_equal(call(x, y), [1, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(jax.vmap(unless_infinite, (0, None))(x, y[0]), x)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(unless_infinite(x, x)))(x), np.ones(4))
