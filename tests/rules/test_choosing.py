"""Elements of very different origin in one array: multiples of one array, and constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from tests.test_ordinary_programs import DTYPES, KINDS, check, outcomes, scaled

EXPONENTS = (-40, -8, 0, 4, 20)
MASK = np.array([True, False, True])


def _normal(scale, dtype, kind="dynamic", seed=0):
    data = np.random.default_rng(seed).normal(size=40).astype(dtype).astype(np.float64)
    return scaled(data * scale, scale, dtype, kind)


def _is_close(function, *operands, dtype, of=None):
    """Compare with the plain function in float32, in epsilons of the largest of each result."""
    plain = [jsa.asarray(x, jnp.float32) for x in operands]
    expected = jax.tree.leaves(function(*plain))
    for results in outcomes(function, *operands):
        for got, want in zip(jax.tree.leaves(results), expected, strict=True):
            want = np.asarray(want, np.float64)
            unit = float(jnp.finfo(dtype).eps) * (of or np.max(np.abs(want)))
            np.testing.assert_allclose(got / unit, want / unit, rtol=0, atol=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_hypot_at_every_scale(exponent, dtype, kind, request):
    if jax.__version__ < "0.11" and (exponent, dtype) == (-40, "float16"):
        # There it divides by `where(m == 0, 1, m)`: small numbers beside a constant.
        request.applymarker(pytest.mark.xfail(strict=True, reason="a limit, in docs/limits.md"))
    x, y = (_normal(2.0**exponent, dtype, kind, seed) for seed in (0, 1))
    _is_close(jnp.hypot, x, y, dtype=dtype)
    gradients = jax.grad(lambda x, y: jnp.sum(jnp.hypot(x, y)), (0, 1))
    _is_close(gradients, x, y, dtype=dtype, of=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hypot_of_different_scales(dtype):
    x = _normal(2.0**-14, dtype)
    for exponent in (-17, 0):
        _is_close(jnp.hypot, x, _normal(2.0**exponent, dtype, seed=1), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_choice_that_cancels_leaves_a_scalar_scale(dtype):
    x = _normal(2.0**-8, dtype)

    def norm(x):
        small = jnp.abs(x) < 2.0**-8
        scaled_up = lax.select(small, 2.0**12 * x, x)
        factors = (jnp.full(x.shape, factor, x.dtype) for factor in (2.0**-12, 1.0))
        return jnp.sqrt(scaled_up * scaled_up) * lax.select(small, *factors)

    for run in (jsa.scalify(norm), jax.jit(jsa.scalify(norm))):
        result = run(x)
        assert result.scale.shape == ()
        np.testing.assert_array_equal(jsa.asarray(result), jnp.abs(jsa.asarray(x)))


CHOICES = {
    "result": lambda c: c,
    "square": lambda c: c**2,
    "exp": lambda c: jnp.exp(-c),
    "matmul": lambda c: c @ c,
    "flip": jnp.flip,
    "sum": jnp.sum,
    "sort": jnp.sort,
    "compared": lambda c: c > 0.25,
    "loop": lambda c: lax.scan(lambda a, _: (a + c, None), c, None, length=2)[0],
    "branch": lambda c: lax.cond(c[0] > 0, lambda c: c * 2, lambda c: c, c),
    "cast": lambda c: c.astype(jnp.float32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_that_does_not_cancel(name, dtype):
    x = scaled([2.0**-10, 0.5, 3.0], 0.125, dtype)

    def function(x):
        return CHOICES[name](lax.select(x < 0.03, 64 * x, x))

    check(function, x, dtype=dtype)
    for result in jax.tree.leaves(jsa.scalify(function)(x), is_leaf=lambda r: hasattr(r, "scale")):
        assert jnp.shape(getattr(result, "scale", 1.0)) == ()


# Functions of an array with some constants among its elements.
AMONG = {
    "power": lambda c: c**4,
    "product": lambda c: c * c * c,
    "matmul": lambda c: c @ c,
    "sum": lambda c: jnp.sum(c) ** 2,
    "times_constant": lambda c: (c * 3) ** 3,
    "padded": lambda c: jnp.pad(c, 1, constant_values=3.0) ** 2,
    "polynomial": jnp.poly,
    "convolution": lambda c: jnp.convolve(c, jnp.convolve(c, c)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", AMONG)
def test_products_of_constants_among_small_elements(name, dtype, kind):
    for exponent in (-40, -6, 6):
        x = scaled(np.array([1.5, 1.0, -0.5]) * 2.0**exponent, 2.0**exponent, dtype, kind)
        _is_close(lambda x: AMONG[name](jnp.where(MASK, x, 1.0)), x, dtype=dtype)


@pytest.mark.parametrize("narrow", [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("exponent", [-60, -20, 4])
def test_constants_among_elements_are_cast(exponent, narrow):
    x = scaled(np.array([1.5, 1.0, -0.5]) * 2.0**exponent, 2.0**exponent)
    for function in (
        lambda x: jnp.where(MASK, x, 1.0).astype(narrow),
        lambda x: (jnp.where(MASK, x, 1.0) ** 2).astype(narrow),
        lambda x: jnp.pad(x, 1, constant_values=1.0).astype(narrow),
    ):
        _is_close(function, x, dtype=narrow)


def test_what_float32_data_took_of_a_scale_returns_to_it_in_float16():
    x = scaled(np.array([1.0, 2.0, 3.0]) * 2.0**-40, 2.0**-40, "float16")
    y = scaled(np.array([1.0, 2.0, 3.0]) * 2.0**-39, 2.0**-39, "float16")

    def function(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return (1 / x**2 + 1 / (x * y)).astype(jnp.float16)

    want = 1.5 * 2.0**80 / np.array([1.0, 4.0, 9.0])
    for got in outcomes(function, x, y):
        np.testing.assert_allclose(got, want, 2e-3)
