"""A compiled `init` is for a GPU or a TPU what it is for a CPU: quickly compiled."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_scalify as jsa


@pytest.mark.parametrize("second_moment_dtype", ["float16", "float8_e4m3fn"])
def test_compilers_do_not_reduce_constants(second_moment_dtype):
    # XLA works out at 7 microseconds an element what is reduced of constants, but not behind a
    # barrier: moments of 10 million weights took it two minutes.
    optimizer = jsa.optim.low_precision(
        optax.adam(1e-3), second_moment_dtype=jnp.dtype(second_moment_dtype)
    )
    lowered = jax.jit(optimizer.init).trace(jnp.ones((64, 64))).lower(lowering_platforms=("cuda",))
    lines = lowered.as_text().splitlines()
    barriers = [line for line in lines if "stablehlo.optimization_barrier" in line]
    assert sum("tensor<64x64xf32>" in line for line in barriers) == 2
    state = jax.jit(optimizer.init)(jnp.ones((64, 64)))
    assert [leaf.dtype for leaf in jax.tree.leaves(state[0].mu)][0] == jnp.float16
    assert not jnp.any(jax.tree.leaves(state[0].mu)[0])
