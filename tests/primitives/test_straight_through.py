"""A value with the derivative of something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.passes.pruning import pruned
from jax_scalify.primitives.straight_through import straight_through

X = jnp.float32([0.3, 1.7, -2.6])


def rounded_square(x):
    return straight_through(jnp.round(x), jnp.square, x)


def test_values_and_derivatives():
    f = jax.jit(rounded_square)
    np.testing.assert_array_equal(f(X), jnp.round(X))
    np.testing.assert_allclose(jax.vmap(jax.grad(f))(X), 2 * X)
    np.testing.assert_allclose(jax.vmap(jax.grad(jax.grad(f)))(X), 2 * jnp.ones(3))
    np.testing.assert_allclose(jax.jvp(f, (X,), (X,))[1], 2 * X * X)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(jax.vmap(f)(x)))(X), 2 * X)
    stopped = jax.grad(lambda x: jnp.sum(straight_through(x)))
    np.testing.assert_array_equal(stopped(X), jnp.zeros(3))


def test_of_two_operands_under_vmap_with_one_mapped():
    def f(x, y):
        return straight_through(x * y, lambda a, b: 3 * a * b, x, y)

    both = jax.grad(lambda x, y: jnp.sum(jax.vmap(f, (0, None))(x, y)), argnums=(0, 1))
    gx, gy = both(X, jnp.float32(2.0))
    np.testing.assert_allclose(gx, 6 * jnp.ones(3))
    np.testing.assert_allclose(gy, 3 * jnp.sum(X), rtol=1e-6)


@pytest.mark.parametrize("where", ["scan", "remat", "cond"])
def test_second_derivatives_in_structures(where):
    """JAX 0.10 forgets the rule of a `custom_jvp` function in a scan."""

    def f(x):
        if where == "scan":
            step = lambda c, v: (c + rounded_square(v) * v, None)  # noqa: E731
            return jax.lax.scan(step, 0.0, x)[0]
        if where == "remat":
            return jnp.sum(jax.checkpoint(rounded_square)(x) * x)
        return jax.lax.cond(x[0] > 0, lambda: jnp.sum(rounded_square(x) * x), lambda: 0.0)

    gradient = jax.grad(f)(X)
    np.testing.assert_allclose(gradient, jnp.round(X) + 2 * X * X, rtol=1e-6)
    second = jax.jvp(jax.grad(f), (X,), (jnp.ones(3),))[1]
    np.testing.assert_allclose(second, 6 * X, rtol=1e-5)


def test_scalify_drops_it():
    closed = jax.make_jaxpr(jax.jit(lambda x: rounded_square(jnp.sin(x)) + 1))(X)
    assert "straight_through" in str(closed) and "straight_through" not in str(pruned(closed))
    assert pruned(pruned(closed)) is not closed
    plain = jax.make_jaxpr(jnp.sin)(X)
    assert pruned(plain) is plain
    x = jsa.as_scaled_array(X)
    np.testing.assert_array_equal(jsa.scalify(rounded_square)(x), jnp.round(X))
    inside = jsa.scalify(jax.grad(lambda x: jnp.sum(rounded_square(x))))(x)
    np.testing.assert_allclose(inside, 2 * X, rtol=1e-6)
    same = jsa.scalify(lambda x: straight_through(x, jnp.square, x))(x)
    np.testing.assert_array_equal(same, X)


def test_what_a_scan_gives_back_is_what_it_goes_over():
    def f(x):
        return jax.lax.scan(lambda c, v: (c, straight_through(v)), 0.0, x)[1]

    (eqn,) = pruned(jax.make_jaxpr(f)(X)).jaxpr.eqns or (None,)
    assert eqn is None or not eqn.outvars
    np.testing.assert_array_equal(jsa.scalify(f)(jsa.as_scaled_array(X)), X)


@pytest.mark.filterwarnings("ignore::jax_scalify.DequantisedWarning")
def test_scalify_drops_it_beside_a_linear_solve():
    """Which holds its functions in a named tuple."""

    def loss(w, x):
        return jnp.sum(jnp.linalg.solve(jnp.eye(4) + 0.1 * w, x @ w))

    gradient = jax.grad(jsa.fp8_matmuls(loss))
    w, x = jnp.float32(np.arange(16).reshape(4, 4)), jnp.ones((4, 4))
    found = jax.jit(jsa.scalify(gradient))(*jsa.as_scaled_array((w, x)))
    np.testing.assert_allclose(jsa.asarray(found), gradient(w, x), rtol=1e-4)
