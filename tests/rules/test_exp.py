"""`exp` of float16 and bfloat16 data is evaluated in their own dtype: what that must not lose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray

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
