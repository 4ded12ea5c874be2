"""Weights in FP8 in layers that know nothing of it: widened exactly, where they are used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.interpreter.tracing import trace
from jax_scalify.passes.widening import wider_dtype

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RNG = np.random.default_rng(0)
STACK = jnp.asarray(RNG.normal(size=(3, 8, 8)) / 3, jnp.float32)
X = jnp.asarray(RNG.normal(size=(2, 8)), jnp.float32)


def layers(w, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def squared(fun):
    return lambda *args: jnp.sum(jnp.square(fun(*args).astype(jnp.float32)))


FUNCTIONS = {
    "matmul": lambda w, x: x @ w[0],
    "elementwise": lambda w, x: x * w[0, 0] + w[1, 1] - x / (2 + w[2, 0]),
    "scan": layers,
    "jit": jax.jit(lambda w, x: x @ w[1].T),
    "loop": lambda w, x: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w[i]), x),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w[0], lambda: x @ w[1]),
    "embedding": lambda w, x: w[1][jnp.array([2, 5])] + x,
    "vmap": lambda w, x: jax.vmap(lambda v: v @ w[2])(x),
    "grad-x": jax.grad(squared(layers), argnums=1),
    "grad-w": jax.grad(squared(layers)),
    "remat": jax.grad(squared(jax.checkpoint(layers)), argnums=1),
    "relu": jax.grad(squared(lambda w, x: jax.nn.relu(x @ jax.nn.relu(w[0]))), argnums=1),
}


def assert_as_wide(name, dtype, narrow, transform=lambda given: given):
    """Widening is exact: equal to the same function of the same numbers in the dtype of `x`."""
    fun = FUNCTIONS[name]
    x = jsa.as_scaled_array(X.astype(dtype), scale=2.0**6)
    weights, x = transform((jsa.as_scaled_array(STACK, scale="rms", dtype=narrow), x))
    got, want = (jax.jit(jsa.scalify(fun))(w, x) for w in (weights, weights.astype(dtype)))
    assert got.dtype == dtype
    a, b = (np.asarray(jsa.asarray(v, jnp.float32)) for v in (got, want))
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7 * np.abs(b).max())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_if_the_weights_had_been_wide(name):
    with pytest.raises(jax.dtypes.TypePromotionError):
        jax.eval_shape(FUNCTIONS[name], STACK.astype(E4M3), X.astype(jnp.float16))
    assert_as_wide(name, "float16", E4M3)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", ["matmul", "scan"])
def test_in_other_dtypes_and_with_static_scales(name):
    for dtype, narrow in (("bfloat16", E5M2), ("float32", E4M3), ("float16", E5M2)):
        assert_as_wide(name, dtype, narrow, jsa.freeze_scales)


@pytest.mark.parametrize("narrow", [E4M3, E5M2])
def test_every_number_is_widened_exactly(narrow):
    """0, subnormals, the largest, nan; infinity of E5M2. At scales far from 1, too."""
    numbers = jnp.arange(256).astype(jnp.uint8).view(narrow)
    for scale in (1.0, 2.0**-40, 2.0**40):
        for given in (scale, jnp.float32(scale)):
            x = jsa.ScaledArray(numbers, given)
            one = jsa.ScaledArray(jnp.ones(256, jnp.float16), 1.0)
            out = jsa.scalify(lambda x, y: x * y)(x, one)
            assert out.dtype == jnp.float16
            value = np.asarray(out.data, np.float64) * np.float64(out.scale)
            np.testing.assert_array_equal(value, np.asarray(numbers, np.float64) * scale)


def casts(fun, *args):
    """The shapes that are cast from FP8."""
    closed = trace(fun, args, {}).closed
    return {
        e.invars[0].aval.shape
        for e in all_equations(closed.jaxpr)
        if e.primitive.name == "convert_element_type" and e.invars[0].aval.dtype == E4M3
    }


def test_a_stack_is_cast_a_layer_at_a_time():
    x = X.astype(jnp.float16)
    weights = jsa.as_scaled_array(STACK, scale="rms", dtype=E4M3)
    for name in ("scan", "loop", "grad-x", "remat"):
        assert casts(FUNCTIONS[name], weights, x) == {(8, 8)}
    assert casts(FUNCTIONS["embedding"], weights, x) == {(2, 8)}


def test_fp8_matmuls_take_what_is_stored():
    """No cast to 16 bits and back: the operand is the weight."""
    step = jax.grad(squared(jsa.fp8_matmuls(layers)), argnums=1)
    weights = jsa.as_scaled_array(STACK, scale="rms", dtype=E4M3)
    x = X.astype(jnp.float16)
    jaxpr = jax.make_jaxpr(jsa.scalify(step))(weights, x).jaxpr
    wide = [e for e in all_equations(jaxpr) for v in e.invars if v.aval.shape[-2:] == (8, 8)]
    kinds = {v.aval.dtype for e in wide for v in e.invars if v.aval.shape[-2:] == (8, 8)}
    assert kinds == {jnp.dtype(E4M3)}
    (scan, back) = (e for e in all_equations(jaxpr) if e.primitive.name == "scan")
    assert not any(v.aval.dtype == E4M3 and v.aval.ndim == 3 for v in scan.outvars)
    got = jax.jit(jsa.scalify(step))(weights, x)
    want = jax.jit(jsa.scalify(step))(weights.astype(jnp.float16), x)
    np.testing.assert_array_equal(jsa.asarray(got), jsa.asarray(want))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def of_linen():
    model = linen.Dense(8)
    return lambda p, x: jnp.tanh(model.apply(p, x)), model.init(jax.random.key(0), X)


def of_nnx():
    graph, params = nnx.split(Model(nnx.Rngs(0)))
    return lambda p, x: nnx.merge(graph, p)(x), params


def of_equinox():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    return lambda p, x: jnp.tanh(jax.vmap(p)(x)), model


def is_matrix(path, leaf):
    return E4M3 if leaf.ndim == 2 else jnp.float16


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [of_linen, of_nnx, of_equinox])
def test_layers_of_libraries(make):
    fun, params = make()
    params = jsa.as_scaled_array(params, scale="rms", dtype=is_matrix)
    x = jsa.as_scaled_array(X.astype(jnp.float16))
    kept = jsa.tree.astype(params, jnp.float16)
    step = jax.jit(jsa.scalify(jax.value_and_grad(squared(fun), argnums=1)))
    got, want = step(params, x), step(kept, x)
    assert got[1].dtype == jnp.float16
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(jsa.asarray(a), jsa.asarray(b))


def test_objects_of_nnx_keep_their_weights():
    """A module that is given back has the FP8 weights that it was given with."""
    model = jsa.as_scaled_array(Model(nnx.Rngs(0)), scale="rms", dtype=is_matrix)
    x = jsa.as_scaled_array(X.astype(jnp.float16))
    run = nnx.jit(jsa.scalify(lambda model, x: model(x)))
    assert run(model, x).dtype == jnp.float16
    assert model.linear.kernel.get_value().dtype == E4M3
    got = jsa.scalify(lambda w, x: (w, x @ w))(jsa.as_scaled_array(STACK[0], dtype=E4M3), x)
    assert [v.dtype for v in got] == [E4M3, jnp.float16]


def test_what_stays_as_it_is():
    """A function of FP8 alone computes in FP8; without a scale JAX refuses, as it would."""
    x = jsa.as_scaled_array(STACK[0], dtype=E4M3)
    assert jsa.scalify(lambda x: x * 2)(x).dtype == E4M3
    with pytest.raises(jax.dtypes.TypePromotionError):
        jsa.scalify(jnp.matmul)(X, x.data)
    half, brain = jsa.as_scaled_array(X.astype(jnp.float16)), X.astype(jnp.bfloat16)
    with pytest.raises(jax.dtypes.TypePromotionError):  # of what the function makes itself
        jsa.scalify(lambda x: x @ STACK[0].astype(E4M3))(half)
    assert jsa.scalify(lambda w, x, y: x @ w + y)(x, half, brain).dtype == jnp.float32
    assert wider_dtype(E4M3, [np.int32, np.float32]) == jnp.float32
    assert wider_dtype(E5M2, [jnp.bfloat16, np.float32]) == jnp.bfloat16
    assert wider_dtype(jnp.float8_e8m0fnu, [jnp.float16]) == jnp.float32


def lora(base, adapters, x):
    def layer(h, w):
        w, a, b = w
        return jnp.tanh(h @ w + (h @ a) @ b), None

    return lax.scan(layer, x, (base, adapters["a"], adapters["b"]))[0]


def test_adapters_of_a_frozen_base():
    rank = 2
    rng = np.random.default_rng(1)
    adapters = {"a": rng.normal(size=(3, 8, rank)) / 3, "b": 0.1 * rng.normal(size=(3, rank, 8))}
    adapters = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), adapters)
    gradient = jax.grad(squared(lambda a, base, x: lora(base, a, x)))
    base = jsa.as_scaled_array(STACK, scale="rms", dtype=E4M3, axis=0)
    small = jsa.as_scaled_array(adapters, scale="rms", dtype=jnp.float16)
    got = jax.jit(jsa.scalify(gradient))(small, base, X.astype(jnp.float16))
    want = gradient(adapters, jsa.asarray(base, jnp.float32), X)
    for name in adapters:
        assert got[name].dtype == jnp.float16
        a, b = np.asarray(jsa.asarray(got[name], jnp.float32)), np.asarray(want[name])
        np.testing.assert_allclose(a, b, atol=5e-3 * np.abs(b).max())
    assert casts(functools.partial(gradient), small, base, X.astype(jnp.float16)) == {(8, 8)}
