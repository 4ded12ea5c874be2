"""What the lowered program has for values that need no rounding, or are read by several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import values

MASK = np.array([True, True, True, True, True, False])


def _choice(factor):
    return lambda x: jnp.where(MASK, factor * x, -100.0)


@pytest.mark.parametrize("scale", [2.0**-5, jnp.float32(2.0**-5)], ids=["static", "dynamic"])
@pytest.mark.parametrize("factor", [0.7, 3.0])
def test_what_is_no_larger_than_an_operand_does_not_saturate(factor, scale):
    """At static scales; see `RuleContext.result`."""
    saturates = factor > 1 or not isinstance(scale, float)
    data = np.float16([65504, -65504, 1, np.inf, np.nan, 5])
    x = ScaledArray(jnp.asarray(data), scale)
    fun = jax.jit(jsa.scalify(_choice(factor)))
    lines = fun.lower(x).as_text().splitlines()
    assert any("stablehlo.clamp" in line and "6xf32" in line for line in lines) == saturates
    wide = data.astype(np.float64) * float(scale)
    want = np.where(MASK, np.float64(np.float16(factor)) * wide, -100)
    largest = 65504 * 2.0**-4  # of data at the scale of `3 * x`
    want = np.where(np.isinf(want), want, np.clip(want, -largest, largest)) if factor > 1 else want
    np.testing.assert_allclose(values(fun(x)), want, rtol=2.0**-10)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_what_an_fp8_matmul_and_a_sum_read_is_stored_once_on_gpus(platform):
    @jsa.fp8_matmuls
    def loss(params, x):
        return jnp.sum(jnp.sin(x @ params["w"] + params["b"]))

    params = {"w": jnp.ones((32, 32), jnp.float16), "b": jnp.ones(32, jnp.float16)}
    state = jsa.as_scaled_array((params, jnp.ones((64, 32), jnp.float16)), static=True)
    step = jax.jit(jsa.scalify(jax.grad(loss)))
    text = step.trace(*state).lower(lowering_platforms=(platform,)).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert any("tensor<64x32xf16>" in line for line in barriers) == (platform == "cuda")


def test_a_factor_that_is_multiplied_by_itself_has_one_reader():
    """It is not rounded to float16 before the product, as the operand of `square` is not."""
    x = jsa.as_scaled_array(jnp.linspace(0, 3, 64, dtype=jnp.float16))

    def squares(square):
        return values(jsa.scalify(lambda x: square(x - 1 / 3))(x))

    np.testing.assert_array_equal(squares(lambda d: d * d), squares(jnp.square))
