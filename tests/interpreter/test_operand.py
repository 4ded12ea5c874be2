"""Values of wide dtypes are computed as they are; data is made where it is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.interpreter.operand import Operand
from jax_scalify.scales.algebra import ONE, Scale

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

RNG = np.random.default_rng(0)
X, W, B = (RNG.normal(size=shape) for shape in ((8, 16), (16, 16), (16,)))
WIDE = ["float32", "bfloat16"]


def model(x, w, b):
    y = jnp.tanh(x @ w + b) * 3 - 0.1 * x
    y = jnp.where(y > 0, y, 0.5 * y) / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return y + lax.cumsum(jax.nn.softmax(y @ w), axis=1) ** 3


def gradients(x, w, b):
    return jax.grad(lambda w, b: jnp.mean(jnp.square(model(x, w, b))), (0, 1))(w, b)


def scaled(x, scale, dtype, static):
    scale = float(scale) if static else jnp.float32(scale)
    return jsa.ScaledArray(jnp.asarray(x, dtype), scale)


def names(fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    return [eqn.primitive.name for eqn in all_equations(closed.jaxpr)]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("static", [True, False])
def test_a_wide_program_is_the_plain_one_between_arguments_and_results(dtype, static):
    args = [scaled(x, 2.0**k, dtype, static) for x, k in zip((X, W, B), (3, -2, -5))]
    plain = [x.data for x in args]
    kinds = "dot_general tanh sqrt rsqrt exp reduce_sum cumsum integer_pow"
    for fun in (model, gradients):
        ours, theirs = names(jsa.scalify(fun), *args), names(fun, *plain)
        for kind in kinds.split():
            assert ours.count(kind) <= theirs.count(kind), kind


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("exponents", [(0, 0, 0), (40, -40, -7), (-30, 30, 12)])
def test_wide_values_are_those_of_the_plain_program(dtype, exponents):
    powers = [2.0**k for k in exponents]
    data = [x / p for x, p in zip((X, W, B), powers)]
    args = [scaled(x, p, dtype, False) for x, p in zip(data, powers)]
    values = [jsa.asarray(x, jnp.float32) for x in args]
    tolerance = 2**-18 if dtype == "float32" else 2**-3
    for fun in (model, gradients):
        got, want = jax.jit(jsa.scalify(fun))(*args), jax.jit(fun)(*values)
        for a, b in zip(jax.tree.leaves(jsa.asarray(got, jnp.float32)), jax.tree.leaves(want)):
            b = np.asarray(b, np.float32)
            np.testing.assert_allclose(a, b, tolerance, tolerance * np.abs(b).max())


@pytest.mark.parametrize("dtype", WIDE)
def test_what_is_only_moved_has_no_product(dtype):
    x = scaled(X, 2.0**60, dtype, False)
    moves = lambda x: x.T.reshape(2, 64)[:, ::2].astype(jnp.float32)  # noqa: E731
    assert "mul" not in names(jsa.scalify(moves), x)
    out = jax.jit(jsa.scalify(moves))(x)
    np.testing.assert_array_equal(out.data, moves(x.data))
    np.testing.assert_array_equal(out.scale, 2.0**60)


@pytest.mark.parametrize("number", [0.0, 1e-30, 2.0**-126, 3e38, np.inf, -np.inf, np.nan])
def test_the_ends_of_float32(number):
    x = scaled([number, 1.0], 1.0, "float32", False)
    for fun in (lambda x: x + 1, lambda x: x * x, lambda x: 1 / x, lambda x: jnp.maximum(x, 0.5)):
        got, want = jax.jit(jsa.scalify(fun))(x), jax.jit(fun)(x.data)
        np.testing.assert_allclose(np.asarray(jsa.asarray(got)), np.asarray(want), 1e-6, 1e-37)


@pytest.mark.parametrize("narrow", ["float16", "float8_e4m3fn"])
def test_a_cast_asks_for_data_at_the_scale_of_the_law(narrow):
    x = scaled(np.ones((4, 1024)), 2.0**-60, "float32", False)
    w = scaled(np.ones((1024, 4)), 2.0**20, "float32", False)
    out = jax.jit(jsa.scalify(lambda x, w: (x @ w * 0.5).astype(narrow)))(x, w)
    assert out.dtype == narrow and out.scale == 2.0**-36  # -60 + 20 + 5 - 1
    np.testing.assert_array_equal(jsa.asarray(out, jnp.float32), np.full((4, 4), 2.0**-31))


def test_an_operand_as_data_and_as_values():
    x = Operand(jnp.float32([1.0, 2.0]), Scale(3))
    assert x.holds_data and x.data is x.source
    np.testing.assert_array_equal(x.value, [8.0, 16.0])
    assert x.value is x.value  # made once
    y = Operand(x.value, Scale(2), unit=ONE)
    assert not y.holds_data and y.value is y.source and y.unit is ONE
    np.testing.assert_array_equal(y.data, [2.0, 4.0])
    np.testing.assert_array_equal(y.with_scale(Scale(4)).data, [0.5, 1.0])
    np.testing.assert_array_equal(x.with_scale(Scale(4)).value, x.value)
    narrow = Operand(jnp.float16([1.0, 2.0]), Scale(3)).with_scale(Scale(4))
    assert narrow.holds_data
    np.testing.assert_array_equal(narrow.data, np.float16([0.5, 1.0]))
