"""Gates: an activation `x * gate(x)` keeps the scales of `x` and of the cotangent."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.interpreter.gates import gates_of
from tests.helpers import assert_close, values

GATED = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "exact gelu": functools.partial(jax.nn.gelu, approximate=False),
    "swish with a number": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "by hand": lambda x: 0.5 * x * (1 + jnp.tanh(0.79788456 * (x + 0.044715 * x**3))),
    "by erf": lambda x: x * 0.5 * (1 + jax.lax.erf(x * 0.70710678)),
    "jsa.nn.silu": jsa.nn.silu,
    "jsa.nn.gelu": jsa.nn.gelu,
}
OTHER = {
    "a gate of another array": lambda x: jnp.tanh(x[:2]) * jax.nn.sigmoid(x[2:]),
    "a gate of a sum": lambda x: jax.nn.sigmoid(x + x[::-1]) * x[0],
    "no factor": lambda x: 2 * jax.nn.sigmoid(x),
    "not bounded": lambda x: x * (x + 1),
    "both signs": lambda x: x * jnp.tanh(x),
}


def _both_passes(fun, x, cotangent):
    y, pull = jax.vjp(fun, x)
    return y, pull(cotangent)[0]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", GATED)
def test_an_activation_keeps_the_scale(name, frozen, dtype):
    numbers = np.random.default_rng(0)
    # In a silu that is compiled as a whole, the second term of the derivative has the scale of `x`.
    # In float32 JAX has exp(-x**2) of bits.
    leads = ("gelu" in name or "by hand" in name) and (name, dtype) != ("exact gelu", jnp.float32)
    exponents = (0, -3, -20, 4, 10) if leads else (0, -3, -20)
    for exponent in exponents:
        x, cotangent = (
            jsa.ScaledArray(jnp.asarray(numbers.normal(size=(8, 16)), dtype), 2.0**e)
            for e in (exponent, exponent + 2)
        )
        given = (x, cotangent) if frozen else jsa.thaw_scales((x, cotangent))
        both = functools.partial(_both_passes, GATED[name])
        found = jax.jit(jsa.scalify(both))(*given)
        assert float(found[0].scale) == x.scale
        assert float(found[1].scale) == cotangent.scale
        want = both(*(jnp.asarray(v, jnp.float32) for v in values((x, cotangent))))
        assert_close(found, values(want), max(1e-5, 8 * float(jnp.finfo(dtype).eps)))


# JAX computes the derivatives of these in a body of their own.
CALLS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "checkpoint of jit": lambda fun: jax.checkpoint(jax.jit(fun)),
    "scan": lambda fun: lambda x: jax.lax.scan(lambda c, x: (c, fun(2 * x)), 0.0, x[None] / 2)[1],
    "scan of checkpoint": lambda fun: lambda x: jax.lax.map(jax.checkpoint(fun), x[None]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", [*GATED, "mish"])
def test_an_activation_keeps_the_scale_in_a_body_of_its_own(name, call):
    fun = CALLS[call](GATED.get(name, jax.nn.mish))
    numbers = np.random.default_rng(0)
    for exponent in (-20, 0, 4, 7):
        x = jsa.scaled_array(jnp.asarray(numbers.normal(size=16), jnp.float16), 2.0**exponent)
        gradient = jax.grad(lambda x: jnp.sum(fun(x).astype(jnp.float32)))  # noqa: B023
        found = jax.jit(jsa.scalify(gradient))(x)
        assert np.all(np.asarray(found.scale) <= 1)
        want = gradient(jsa.asarray(x, jnp.float32))
        np.testing.assert_allclose(np.asarray(found, np.float32), want, rtol=4e-3, atol=4e-3)


def test_sums_of_numbers_have_no_gates():
    """JAX adds up the cotangents 1 and 1 of `y`."""

    def fun(x):
        y = jnp.sum(jax.nn.silu(x))
        return y + y

    x = jsa.scaled_array(jnp.float16([0.5, -1.0]), 2.0)
    found = jax.jit(jsa.scalify(jax.grad(fun)))(x)
    np.testing.assert_allclose(np.asarray(found), jax.grad(fun)(jnp.asarray(x)), atol=2e-3)


def test_gradients_of_scanned_layers():
    """Their scales do not grow with the number of layers."""
    keys, layers, width = jax.random.split(jax.random.key(0), 3), 16, 16
    weights = {
        "up": 8 * jax.random.normal(keys[0], (layers, width, 2 * width)) / width**0.5,
        "down": jax.random.normal(keys[1], (layers, 2 * width, width)) / (2 * width) ** 0.5,
    }

    def loss(weights, x):
        def layer(h, w):
            return h + jax.nn.gelu(jsa.nn.rms_norm(h) @ w["up"]) @ w["down"], None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32)))

    x = jax.random.normal(keys[2], (8, width))
    want = jax.grad(loss)(weights, x)
    given = jsa.as_scaled_array(weights, scale="rms", dtype=jnp.float16)
    found = jax.jit(jsa.scalify(jax.grad(loss)))(given, jnp.float16(x))
    for name, gradient in want.items():
        error = jnp.linalg.norm(jsa.asarray(found[name], jnp.float32) - gradient)
        assert error < 0.01 * jnp.linalg.norm(gradient)


@pytest.mark.parametrize(
    "name", ["another cotangent", "another factor", "a large term", "a large factor"]
)
def test_a_sum_that_only_looks_like_a_derivative(name):
    """Its scale has to hold the second term, in one body and in two."""
    second = {
        "another cotangent": lambda x, y: 2.0**30 * jnp.tanh(x).astype(jnp.float32),
        "another factor": lambda x, y: y * jnp.tanh(x),
        "a large term": lambda x, y: 30000.0 * x,
        "a large factor": lambda x, y: jnp.square(200.0 * x) * jnp.tanh(x),
    }[name]
    x = jsa.scaled_array(jnp.float16([-1.5, 0.5, 2.0, 1.0]), 1.0)
    y = jsa.scaled_array(jnp.float16([1.0, 1.5, -1.0, 1.25]), 2.0**30)
    for call in (lambda fun: fun, *CALLS.values()):

        def loss(x, y):
            def fun(x):
                return jax.nn.silu(x).astype(jnp.float32) + second(x, y).astype(jnp.float32)

            return jnp.sum(call(fun)(x))  # noqa: B023

        found = jsa.asarray(jax.jit(jsa.scalify(jax.grad(loss)))(x, y), jnp.float32)
        want = jax.grad(loss)(*(jsa.asarray(v, jnp.float32) for v in (x, y)))
        np.testing.assert_allclose(found, want, rtol=0, atol=4e-3 * float(jnp.max(jnp.abs(want))))


@pytest.mark.parametrize("name", GATED)
def test_an_outlier_stays_in_range(name):
    x = jnp.asarray([40000.0, -40000.0, 0.5, 60000.0], jnp.float16)
    both = jsa.scalify(functools.partial(_both_passes, GATED[name]))
    y, gradient = both(*(jsa.as_scaled_array(v, scale=1.0) for v in (x, x)))
    small = float(GATED[name](jnp.float32(0.5)))
    np.testing.assert_allclose(np.asarray(y), [40000, 0, small, 60000], rtol=2e-3)
    plain = _both_passes(GATED[name], x, x)[1]
    known = np.isfinite(plain) | (np.asarray(x) > 0)  # the cube in gelu is inf in plain float16
    want = np.where(x == 0.5, np.asarray(gradient), np.maximum(x, 0))
    np.testing.assert_allclose(np.asarray(gradient)[known], want[known], rtol=2e-3)


@pytest.mark.parametrize("exponent", [0, -20, 10])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_glu_keeps_the_scale(dtype, exponent):
    """Its gate is computed from one half of the array and multiplies the other."""
    numbers = np.random.default_rng(0)
    shapes = ((8, 16), 2.0**exponent), ((8, 8), 2.0 ** (exponent + 2))
    given = [
        jsa.ScaledArray(jnp.asarray(numbers.normal(size=shape), dtype), scale)
        for shape, scale in shapes
    ]
    both = functools.partial(_both_passes, jax.nn.glu)
    found = jax.jit(jsa.scalify(both))(*given)
    assert float(found[0].scale) == given[0].scale
    want = both(*(jnp.asarray(v, jnp.float32) for v in values(given)))
    assert_close(found, values(want), max(1e-5, 8 * float(jnp.finfo(dtype).eps)))
    outlier = jnp.asarray([40000.0, 1.0, 60000.0, 0.0], jnp.float16)
    found = jsa.scalify(both)(*(jsa.as_scaled_array(v, scale=1.0) for v in (outlier, outlier[:2])))
    np.testing.assert_allclose(np.asarray(found[0]), [40000, 0.5], rtol=2e-3)
    np.testing.assert_allclose(np.asarray(found[1]), [40000, 0.5, 0, 0.25], rtol=2e-3)


@pytest.mark.parametrize("name", OTHER)
def test_what_is_no_gate(name):
    assert not gates_of(jax.make_jaxpr(OTHER[name])(jnp.ones((4, 2))).jaxpr).gates


@pytest.mark.parametrize("weight", [3e4, jnp.float32(3e4)])
def test_a_term_with_a_large_number_keeps_its_scale(weight):
    def gelu(x):
        gate = 0.5 * (1 + jnp.tanh(x))
        return x * gate + jnp.asarray(weight, x.dtype) * gate

    x, cotangent = (jnp.asarray(v, jnp.float32) for v in ([0.5, -1.0, 2.0], [1.0, 2.0, -0.5]))
    both = functools.partial(_both_passes, gelu)
    given = jsa.as_scaled_array((x, cotangent), scale=2.0**-9, dtype=jnp.float16)
    want = both(x, cotangent)
    assert_close(jsa.scalify(both)(*given)[1], np.float64(want[1]), 1e-2)


def test_the_gates_of_an_lstm_halve():
    """A gradient that has come through 32 of them is smaller, and so is its scale."""

    def chain(cell, inputs):
        for x in inputs:
            cell = cell * jax.nn.sigmoid(x)
        return cell

    cell, inputs = jnp.ones((4,)), jnp.zeros((32, 4))
    given = jsa.as_scaled_array((cell, inputs), scale=1.0)
    gradient = jsa.scalify(jax.grad(lambda *args: chain(*args).sum()))(*given)
    np.testing.assert_array_equal(np.asarray(gradient), np.full(4, 2.0**-32, np.float32))
    assert abs(math.log2(float(gradient.scale)) + 32) <= 2
