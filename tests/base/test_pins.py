"""Barriers that are lowered for some platforms only."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.base.pins import pin, pin_p, store, store_p


def dense(x, w, b):
    """A layer and the gradient of its bias: two matmuls and a sum read the cotangent."""
    out, pull = jax.vjp(lambda x, w, b: jnp.tanh(x @ w + b), x, w, b)
    return out, pull(out)


def barriers(fun, args, platform):
    """The number of barriers on arrays. Those on numbers make constants operands of kernels."""
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return len(re.findall(r"stablehlo.optimization_barrier .*: tensor<\d", text))


def test_kernels_that_round_at_different_static_scales_are_equal():
    """The number beyond which data is infinite is an operand: XLA for GPUs compiles one kernel."""

    def text(scale):
        x = jsa.ScaledArray(jnp.ones((8, 4), jnp.float16), scale)
        fun = jax.jit(jsa.scalify(lambda x: (x.astype(jnp.float32) * 0.3).astype(jnp.float16)))
        lowered = fun.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        lowered = re.sub(r"jax.result_info = \"[^\"]*\"", "", lowered)  # the names of results
        numbers = re.findall(r"dense<([^>]*)> : tensor<f32>", lowered)
        return re.sub(r"dense<[^>]*> : tensor<f32>", "dense<> : tensor<f32>", lowered), numbers

    (first, numbers), (second, others) = text(2.0**-3), text(2.0**-9)
    assert first == second
    assert numbers != others
    assert re.search(r"stablehlo.optimization_barrier .*: tensor<f32>", first)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("primitive, own", [(pin_p, "cpu"), (store_p, "cuda")])
def test_each_barrier_has_its_platforms(primitive, own, platform):
    count = barriers(lambda x: primitive.bind(x)[0] * 2, (jnp.ones(3),), platform)
    assert count == (platform == own)


@pytest.mark.parametrize("function", [pin, store])
def test_barriers_have_derivatives_and_batches(function):
    x = jnp.arange(6.0).reshape(2, 3)
    loss = lambda x: jnp.sum(function(x) ** 2)  # noqa: E731
    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(function)(x), x)


@pytest.mark.parametrize("dtype, count", [("float16", 1), ("bfloat16", 0), ("float32", 0)])
def test_what_a_matmul_and_others_read_is_stored_once_on_gpus(dtype, count):
    args = [jnp.ones(shape, dtype) for shape in ((4, 8), (8, 16), (16,))]
    args = [jsa.ScaledArray(x, 2.0**-3) for x in args]
    fun = jsa.scalify(dense)
    assert barriers(fun, args, "cuda") - barriers(fun, args, "tpu") == count
