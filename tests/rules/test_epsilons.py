"""Quotients by a norm that an epsilon keeps from being 0: unit vectors keep their digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa

GUARDS = {
    "maximum": lambda n: jnp.maximum(n, 1e-6),
    "clip": lambda n: jnp.clip(n, 1e-12, None),
    "where": lambda n: jnp.where(n > 1e-3, n, 1e-3),
    "where-zero": lambda n: jnp.where(n == 0, 1, n),
    "sum": lambda n: n + 1e-6,
}
NORMS = {
    "norm": lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True),
    "largest": lambda x: jnp.max(jnp.abs(x), axis=-1, keepdims=True),
    "mean": lambda x: jnp.mean(jnp.abs(x), axis=-1, keepdims=True),
}


def relative_error(got, want):
    error = np.asarray(jsa.asarray(got, jnp.float32), np.float64) - want
    return np.sqrt(np.mean(error**2) / np.mean(want**2))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("size", [2.0**-8, 1.0, 100.0])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("guard", GUARDS)
def test_rows_are_divided_by_their_norms(guard, norm, size, static):
    def normalised(x):
        return x / GUARDS[guard](NORMS[norm](x))

    def similarities(x):
        return normalised(x) @ normalised(x).T

    def gradient(x):
        weights = jnp.cos(jnp.arange(16.0).astype(x.dtype))
        return jax.grad(lambda x: jnp.sum(similarities(x) * weights))(x)

    data = np.random.default_rng(0).normal(size=(16, 256)).astype(np.float32) * size
    x = jsa.as_scaled_array(data, scale="rms", dtype=jnp.float16, static=static)
    value = jsa.asarray(x, jnp.float32)
    for function in (normalised, similarities, gradient):
        got = jax.jit(jsa.scalify(function))(x)
        assert relative_error(got, function(value)) < 2.0**-8, function.__name__


def test_a_constant_is_chosen_beside_its_multiple():
    """The size of 3 lies between two powers of two, and no dynamic scale does."""
    mask = np.array([[True, False], [True, True]])

    def function(x):
        return jnp.where(mask, jnp.where(x > 0, x, 3.0) * x, 3.0)

    value = 1e-6 * np.float32([[3, 4], [-6, 8]])
    x = jsa.as_scaled_array(value, scale="rms", dtype=jnp.float16)
    got = jsa.asarray(jax.jit(jsa.scalify(function))(x), jnp.float32)
    assert got[0, 1] == 3
    np.testing.assert_allclose(got[1, 0], -1.8e-5, rtol=2e-3)


def test_a_comparison_keeps_the_digits_of_its_constant():
    """At the scale 2**20, float16 data near 3 has steps of 1/16."""
    x = jsa.ScaledArray(jnp.array([49 * 2.0**-24], jnp.float16), jnp.float32(2.0**20))
    assert jsa.scalify(lambda x: x > 3.04)(x).tolist() == [True]
