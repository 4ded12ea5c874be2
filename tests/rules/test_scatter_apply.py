"""`x.at[i].apply(f)`: a scatter that holds a function of the elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import in_one_program

pytestmark = [
    pytest.mark.usefixtures("every_primitive_has_a_rule"),
    pytest.mark.sampled(3),
]

DTYPES = ("float16", "bfloat16", "float32")
DATA = [[1.0, 2.0, -3.0], [0.5, 0.25, 0.125]]
SCALES = {
    "static": 4.0,
    "small": jnp.float32(2.0**-20),
    "one": jnp.float32(1),
    "large": jnp.float32(2.0**20),
    "rows": 2.0 ** jnp.float32([[0], [-20]]),
    "columns": 2.0 ** jnp.float32([[0, -20, 5]]),
}
TWICE = np.array([0, 0])


@jax.custom_jvp
def _halved(v):
    return v * 0.5


_halved.defjvp(lambda p, t: (_halved(*p), t[0] * 0.5))

# Exact wherever they are evaluated: multiplications by powers of two, and choices.
EXACT = {
    "halve": lambda x: x.at[0].apply(lambda v: v * 0.5),
    "negate-column": lambda x: x.at[:, 1].apply(jnp.negative),
    "twice": lambda x: x.at[TWICE].apply(lambda v: v * 0.5),
    "relu": lambda x: x.at[np.array([0, 1])].apply(jax.nn.relu),
    "jit": lambda x: x.at[0, 1].apply(jax.jit(lambda v: v * 2)),
    "custom_jvp": lambda x: x.at[1].apply(_halved),
    "cond": lambda x: x.at[0].apply(lambda v: lax.cond(v > 0, lambda v: v * 2, lambda v: -v, v)),
    "outside": lambda x: x.at[9].apply(jnp.cos),
    "empty": lambda x: x.at[:0].apply(jnp.sin),
}


def operand(dtype, scale):
    return ScaledArray(jnp.asarray(DATA, dtype), SCALES[scale])


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_powers_of_two_are_exact(name, dtype):
    fun = EXACT[name]
    for scale in ("static", "small", "large", "rows", "columns"):
        x = operand(dtype, scale)
        out = jax.jit(jsa.scalify(fun))(x)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        np.testing.assert_array_equal(out.to_array(jnp.float32), fun(x.to_array(jnp.float32)))


@pytest.mark.parametrize("function", [jnp.sin, jnp.exp2, jax.nn.gelu, jnp.square])
def test_functions_of_elements(function):
    def fun(x):
        return x.at[1].apply(function)

    operands = [operand(dtype, scale) for dtype in DTYPES for scale in SCALES]
    jitted = in_one_program(jsa.scalify(fun), [(x,) for x in operands])
    for x, out in zip(operands, jitted, strict=True):
        want = np.asarray(fun(x.to_array(jnp.float32)), np.float64)
        for result in (out, jsa.scalify(fun)(x)):
            np.testing.assert_array_equal(result.to_array(jnp.float32)[0], want[0])
            finite, info = np.isfinite(want), jnp.finfo(x.dtype)
            tiny = float(info.smallest_subnormal) * np.broadcast_to(result.scale, x.shape)
            error = np.abs(
                np.asarray(result.to_array(jnp.float32), np.float64)[finite] - want[finite]
            )
            limit = max(float(info.eps), 2e-6) * np.abs(want[finite]) + tiny[finite]
            assert np.all(error <= limit), x


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_array_beside_a_scaled_one(dtype):
    plain = jnp.asarray(DATA, dtype)
    out = jsa.scalify(lambda p, x: (p.at[0].apply(jnp.negative), p.at[TWICE].apply(abs) + x))(
        plain, ScaledArray(jnp.zeros(3, dtype), jnp.float32(1))
    )
    for got, want in zip(out, (plain.at[0].multiply(-1), plain.at[0].apply(abs)), strict=True):
        np.testing.assert_array_equal(jsa.asarray(got, jnp.float32), want.astype(jnp.float32))


def test_gradients_beside_it():
    def loss(w, x):
        return jnp.sum(w * x.at[0].apply(lambda v: v * 0.5))

    x = operand("float32", "columns")
    w = ScaledArray(jnp.ones((2, 3)), jnp.float32(2))
    want = x.to_array().at[0].multiply(0.5)
    inside = jax.jit(jsa.scalify(jax.grad(loss)))(w, x)
    np.testing.assert_array_equal(inside.to_array(), want)

    def outside(values):
        return jsa.asarray(jsa.scalify(loss)(jsa.as_scaled_array(values, 2.0), x), jnp.float32)

    np.testing.assert_array_equal(jax.grad(outside)(jnp.ones((2, 3))), want)


def test_gradients_through_it_are_refused_as_by_jax():
    def loss(x):
        return jnp.sum(x.at[0].apply(jnp.sin))

    x = operand("float32", "one")
    for fun, arg in ((jax.grad(loss), x.to_array()), (jsa.scalify(jax.grad(loss)), x)):
        with pytest.raises(NotImplementedError):
            fun(arg)


@pytest.mark.parametrize(
    "function",
    [
        lambda v: lax.fori_loop(0, 3, lambda _, c: c * 0.5, v),
        lambda v: lax.while_loop(lambda c: abs(c) > 1, lambda c: c * 0.25, v),
        lambda v: lax.cond(v > 0, lambda v: v * 2.0**10, lambda v: -v, v),
        lambda v: lax.scan(lambda c, _: (c * 4, c), v, length=2)[1].sum(),
    ],
    ids="fori while cond scan".split(),
)
@pytest.mark.parametrize("number", [3.0, 2.0**20, -(2.0**-20)])
def test_a_function_of_float16_takes_values_that_float16_does_not_hold(function, number):
    scale = 2.0 ** np.floor(np.log2(abs(number)))
    x = ScaledArray(jnp.full((1,), number / scale, jnp.float16), jnp.float32(scale))
    out = jsa.scalify(lambda x: x.at[0].apply(function))(x)
    assert out.to_array(jnp.float32)[0] == float(function(jnp.float32(number)))


@pytest.mark.filterwarnings("ignore::jax_scalify.DequantisedWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_multiplied_by_updates(scale, dtype):
    def fun(x):
        return x.at[TWICE].multiply(jnp.asarray([[2.0], [0.25]], x.dtype))

    x = operand(dtype, scale)
    out = jax.jit(jsa.scalify(fun))(x)
    assert np.shape(out.scale) == np.shape(x.scale)
    np.testing.assert_array_equal(out.to_array(jnp.float32), fun(x.to_array(jnp.float32)))
