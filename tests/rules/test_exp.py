"""Nonlinear functions: float16 is evaluated in float32, a wide dtype as plain JAX evaluates it."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.interpreter import registry
from tests.helpers import assert_close, in_float64, scaled, values

VALUES = [0, -0.0, 1e-8, -1e-8, 6e-5, 1, -1, 11, 11.09, 12, -12, -17.5, 88, -88, -104, 1e4, -1e4]
SCALES = [1.0, *(2.0**k for k in (-40, 40, -10, 10)), *(jnp.float32(2.0**k) for k in (-40, 40))]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_of_what_leaves_the_range_of_the_dtype(dtype):
    values = np.array([*VALUES, np.inf, -np.inf, np.nan], np.float32)
    run = jax.jit(lambda x: jsa.asarray(jsa.scalify(jnp.exp)(x), jnp.float32))
    for scale in SCALES:
        data = jnp.asarray(values / np.float32(scale)).astype(dtype)
        with np.errstate(over="ignore"):
            exact = np.exp(np.asarray(data, np.float64) * float(scale))
            want = np.asarray(jnp.asarray(exact.astype(np.float32)).astype(dtype), np.float64)
        got = np.asarray(run(ScaledArray(data, scale)), np.float64)
        eps = float(jnp.finfo(dtype).eps)
        tiny = max(float(jnp.finfo(dtype).smallest_subnormal), 2.0**-126)
        np.testing.assert_allclose(got, want, rtol=eps, atol=tiny, err_msg=str(scale))


# `exp(-x**2)` of JAX 0.12, in the derivative of erf, reads the bits of float32.

GELU = functools.partial(jax.nn.gelu, approximate=False)
OF_GELU = {
    "value": GELU,
    "gradient": jax.grad(lambda x: jnp.sum(GELU(x))),
    "mapped": jax.grad(lambda x: jnp.sum(lax.map(GELU, x))),
    "remat": jax.grad(lambda x: jnp.sum(jax.checkpoint(GELU)(x))),
    "second derivative": jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(GELU(x)))(x))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", OF_GELU)
def test_exact_gelu(name, dtype, kind, monkeypatch):
    """No warning, and the results of float64, in the dtype and where the model computes wider."""
    monkeypatch.setattr(registry, "_warned", set())
    numbers = np.concatenate([np.linspace(-8, 8, 41), [0, 1e-6, -1e-4, 20, -20]])
    for exponent in (-2, 0, 3):
        x = jsa.as_scaled_array(jnp.asarray(numbers, dtype), scale=2.0**exponent)
        x = jsa.freeze_scales(x) if kind == "static" else x
        want = in_float64(OF_GELU[name], values(x))
        tolerance = 8 * float(jnp.finfo(dtype).eps)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_close(jax.jit(jsa.scalify(OF_GELU[name]))(x), want, tolerance)
            wide = jsa.scalify(lambda x: OF_GELU[name](x.astype(jnp.float32)).astype(dtype))
            assert_close(jax.jit(wide)(x), want, tolerance)


def test_functions_that_read_bits_are_called_on_values(monkeypatch):
    """In dtypes of the range of float32; what reads those of float16 is reported."""
    monkeypatch.setattr(registry, "_warned", set())

    @jax.custom_jvp
    def truncated(x):
        bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return lax.bitcast_convert_type(bits >> 8 << 8, x.dtype) * 2

    truncated.defjvps(lambda tangent, out, x: tangent)

    def fun(x):
        return truncated(x), jnp.sum(x)

    numbers = np.float32([1.2345, -300.7, 0.0])
    got, total = jax.jit(jsa.scalify(fun))(scaled(numbers / 4, 4.0))
    np.testing.assert_array_equal(values(got), values(truncated(jnp.asarray(numbers))))
    assert np.isclose(values(total), numbers.sum())
    plain = jax.make_jaxpr(jsa.scalify(fun))(numbers)
    assert str(plain) == str(jax.make_jaxpr(fun)(numbers))
    with pytest.warns(jsa.DequantisedWarning, match="bitcast_convert_type"):
        jsa.scalify(truncated)(scaled(numbers, 4.0, jnp.float16))


@pytest.mark.parametrize(
    "scale", [1.0, 2.0**-5, jnp.float32(2.0**4)], ids=["one", "static", "dynamic"]
)
@pytest.mark.parametrize("name", ["exp", "tanh", "log1p", "sin", "floor", "erf", "logistic"])
def test_bfloat16_is_what_plain_jax_computes(name, scale):
    function = getattr(lax, name)
    numbers = np.array([0, -0.0, 1e-30, 0.3, -0.7, 2.5, 9, -88, 1e4, np.inf, np.nan], np.float32)
    x = ScaledArray(jnp.asarray(numbers / np.float32(scale)).astype(jnp.bfloat16), scale)
    got = jax.jit(lambda x: jsa.asarray(jsa.scalify(function)(x)))(x)
    want = jax.jit(function)(jnp.asarray(numbers).astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
