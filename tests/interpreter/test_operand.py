"""Static powers of two that wait: the results of multiplying at once, with fewer products."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.interpreter import operand
from jax_scalify.interpreter.operand import (
    LARGEST_EXPONENT,
    Operand,
    defer,
    defer_constant,
    settled,
    split,
    split_product,
)
from jax_scalify.scales.algebra import Scale
from tests.opaque import opaque_primitive

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

RNG = np.random.default_rng(0)
X, W, V = (jnp.asarray(RNG.normal(size=(64, 64)), jnp.float32) for _ in range(3))
MASK = RNG.normal(size=(64, 64)) > 0


def static(data, scale):
    return ScaledArray(data, float(scale))


def dynamic(data, scale):
    return ScaledArray(data, jnp.float32(scale))


# What is traced and compiled at once is not found in JAX's caches afterwards.
_at_once = jax.make_user_context(default_value=False)


def at_once(monkeypatch, fun, *args):
    """The result when nothing waits."""
    with monkeypatch.context() as patch, _at_once(True):
        patch.setattr(operand, "can_defer", lambda dtype: False)
        return fun(*args)


def assert_same(got, want):
    got, want = (jax.tree.leaves(t, is_leaf=deferred_or_scaled) for t in (got, want))
    for a, b in zip(got, want, strict=True):
        assert type(a) is type(b)
        if isinstance(a, ScaledArray):
            assert type(a) is ScaledArray and np.array_equal(a.scale, b.scale)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)


def deferred_or_scaled(x):
    return isinstance(x, ScaledArray)


def products(fun, *args):
    """Number of multiplications of arrays in a traced program."""
    equations = all_equations(jax.make_jaxpr(fun)(*args))
    return sum(e.primitive is lax.mul_p and e.outvars[0].aval.ndim > 0 for e in equations)


# Each is called on h = x @ w, whose product with 2**-3 waits, and on another array.
RULES = {
    "dot": lambda h, v: h @ v,
    "dot-both": lambda h, v: h @ (v @ v),
    "conv": lambda h, v: lax.conv(h.reshape(4, 16, 8, 8), v.reshape(64, 16, 2, 2), (1, 1), "SAME"),
    "mul": lambda h, v: h * v,
    "mul-constant": lambda h, v: h * 0.3,
    "mul-constants": lambda h, v: (h * 0.3) * -0.7,
    "mul-power": lambda h, v: h * -4.0,
    "div": lambda h, v: h / v,
    "div-by": lambda h, v: v / h,
    "div-far": lambda h, v: jnp.square(h) / (v @ v / jnp.square(v @ v) / jnp.square(h)),
    "div-constant": lambda h, v: h / 8.0,
    "neg": lambda h, v: -h,
    "abs": lambda h, v: jnp.abs(h * -0.3),
    "square": lambda h, v: jnp.square(h),
    "square-square": lambda h, v: jnp.square(jnp.square(jnp.square(h))),
    "integer_pow": lambda h, v: h**3,
    "integer_pow-inverse": lambda h, v: h**-2,
    "integer_pow-zero": lambda h, v: lax.integer_pow(h, 0),
    "sqrt": lambda h, v: jnp.sqrt(jnp.abs(h)),
    "rsqrt": lambda h, v: lax.rsqrt(jnp.abs(h)),
    "cbrt": lambda h, v: jnp.cbrt(h),
    "pow": lambda h, v: jnp.abs(h) ** 1.5,
    "exp": lambda h, v: jnp.exp(h * 2.0**-9),
    "tanh": lambda h, v: jnp.tanh(h) * v,
    "logistic": lambda h, v: jax.nn.sigmoid(h) + h,
    "floor": lambda h, v: jnp.floor(h) + h,
    "sign": lambda h, v: jnp.sign(h),
    "add": lambda h, v: h + v,
    "add-small": lambda h, v: h + v[0],
    "add-both": lambda h, v: h + v @ v,
    "add-constant": lambda h, v: h + 1.0,
    "sub": lambda h, v: v - h * 0.01,
    "sub-from-0": lambda h, v: 0.0 - h,
    "moment": lambda h, v: 0.9 * v + 0.1 * h,
    "relu": lambda h, v: jax.nn.relu(h),
    "max": lambda h, v: jnp.maximum(h, v),
    "max-constant": lambda h, v: jnp.maximum(h, 0.5),
    "min": lambda h, v: jnp.minimum(h, 0.5),
    "clip": lambda h, v: jnp.clip(h, -1.0, 2.0),
    "clamp": lambda h, v: lax.clamp(-1.0, h, 2.0),
    "where": lambda h, v: jnp.where(MASK, h, 0),
    "where-both": lambda h, v: jnp.where(MASK, h, v),
    "mask": lambda h, v: jnp.where(MASK, h, jnp.finfo(jnp.float32).min),
    "mask-infinite": lambda h, v: jnp.where(MASK, h, -jnp.inf),
    "tiny": lambda h, v: h + 1e-30,
    "huge": lambda h, v: (h * 1e-38) * 1e-30,
    "sum": lambda h, v: h.sum(0),
    "cumsum": lambda h, v: jnp.cumsum(h, 1),
    "window": lambda h, v: lax.reduce_window(h, 0.0, lax.add, (2, 2), (2, 2), "VALID"),
    "extrema": lambda h, v: h.max(0) - h.min(0),
    "argmax": lambda h, v: jnp.argmax(h * -0.5, 1),
    "compare": lambda h, v: (h > v, h <= 0.25, h > 0, h == h),
    "is_finite": lambda h, v: jnp.isfinite(h),
    "sort": lambda h, v: jnp.sort(h, 0),
    "top_k": lambda h, v: lax.top_k(h, 3)[0],
    "move": lambda h, v: h.T.reshape(16, 256)[3:9, ::2][:, None] * v[0, 0],
    "concatenate": lambda h, v: jnp.concatenate([h, v, h @ v]),
    "pad": lambda h, v: jnp.pad(h, 1, constant_values=0.5),
    "gather": lambda h, v: h[np.array([0, 2]), np.array([1, 1])],
    "scatter": lambda h, v: h.at[np.array([0, 2])].add(v[:2]),
    "update": lambda h, v: lax.dynamic_update_slice(h, v[:3], (1, 0)),
    "reduce_precision": lambda h, v: lax.reduce_precision(h * 2.0**-20, 4, 3),
    "narrow": lambda h, v: h.astype(jnp.float16),
    "narrow-and-back": lambda h, v: h.astype(jnp.bfloat16).astype(jnp.float32) + h,
    "fft": lambda h, v: jnp.abs(jnp.fft.fft(h)),
    "barrier": lambda h, v: lax.optimization_barrier((h, v))[0],
    "set_scaling": lambda h, v: jsa.set_scaling(h, 4.0),
    "rescale": lambda h, v: jsa.dynamic_rescale(h),
    "data": lambda h, v: jsa.get_data_and_scale(h)[0],
    "stop": lambda h, v: jsa.stop_scaling(h),
    "loss": lambda h, v: -(jax.nn.log_softmax(h) * v).sum(1).mean(),
    "jit": lambda h, v: jax.jit(lambda h: h + v)(h),
    "cond": lambda h, v: lax.cond(v[0, 0] > 0, jnp.negative, jnp.square, h),
    "scan": lambda h, v: lax.scan(lambda c, row: (c + row, c @ v), h[0], h)[1],
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("make", [static, dynamic])
@pytest.mark.parametrize("name", RULES)
def test_exactly_the_result_of_multiplying_at_once(name, make, monkeypatch):
    fun = jsa.scalify(lambda x, w, v: RULES[name](x @ w, v))
    args = make(X, 2.0**2), make(W, 2.0**-3), make(V, 2.0**1)
    assert_same(fun(*args), at_once(monkeypatch, fun, *args))


@pytest.mark.parametrize("scales", [(2.0**-60, 1.0), (1.0, 2.0**-60), (2.0**60, 1.0)])
@pytest.mark.parametrize("name", ["add", "moment", "where-both", "max", "concatenate", "compare"])
def test_scales_far_apart(name, scales, monkeypatch):
    fun = jsa.scalify(lambda x, w, v: RULES[name](x @ w, v))
    args = static(X, scales[0]), static(W, 1.0), static(V, scales[1])
    assert_same(fun(*args), at_once(monkeypatch, fun, *args))


def mlp(params, x, y):
    def loss(params):
        h = x
        for i, (w, b) in enumerate(params):
            h = h @ w + b
            h = jax.nn.relu(h) if i < len(params) - 1 else h
        return -(jax.nn.log_softmax(h) * y).sum(1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


def mlp_state(layers):
    sizes = [32] + [64] * (layers - 1) + [16]
    params = [
        (jnp.asarray(RNG.normal(size=(a, b)) / 8, jnp.float32), jnp.zeros(b))
        for a, b in zip(sizes, sizes[1:])
    ]
    y = jnp.asarray(np.eye(16)[RNG.integers(0, 16, 64)], jnp.float32)
    return jsa.as_scaled_array((params, X[:, :32], y), "rms")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layers", [3, 9])
def test_a_training_step_with_static_scales_multiplies_hardly_more_than_a_plain_one(layers):
    state = jsa.freeze_scales(mlp_state(layers))
    assert products(jsa.scalify(mlp), *state) <= products(mlp, *jsa.asarray(state)) + 4


def test_a_training_step_with_dynamic_scales_multiplies_each_summand_once():
    state = mlp_state(3)
    biases, updates = 3, 6
    loss = 8
    in_range = 10  # where more than two scales have been multiplied, data may be far from 1
    extra = products(jsa.scalify(mlp), *state) - products(mlp, *jsa.asarray(state))
    assert extra <= 2 * (biases + updates) + loss + in_range


def test_unit_ratios_and_constant_factors_cost_nothing():
    frozen = static(X, 1.0), static(W, 0.5), static(V, 0.5)
    assert products(jsa.scalify(lambda x, w, v: (x @ w).T + (x @ v)), *frozen) == 1  # the result
    step = jsa.scalify(lambda x, w, v: v - 0.01 * (x @ w).T)
    assert products(step, *frozen) == 1
    chain = jsa.scalify(lambda x, w, v: jnp.exp(jax.nn.relu((x @ w) @ v * 0.25)))
    assert products(chain, *frozen) == 1


def test_nothing_stands_between_a_matmul_and_a_transpose():
    text = jax.jit(jsa.scalify(lambda x, w, v: v - 0.01 * (x.T @ w).T)).lower(
        static(X, 1.0), static(W, 2.0**-30), static(V, 1.0)
    )
    assert " transpose(" not in text.compile().as_text()


WAYS = {
    "jit": jax.jit,
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0, 0)),
    "scan": lambda f: lambda p, x, y: lax.scan(lambda c, _: f(c, x, y), p, None, length=2),
    "remat": lambda f: (
        lambda p, x, y: jax.grad(
            lambda p: sum(jnp.sum(a) for a in jax.tree.leaves(jax.checkpoint(f)(p, x, y)))
        )(p)
    ),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("make", [jsa.freeze_scales, lambda tree: tree])
@pytest.mark.parametrize("way", WAYS)
def test_in_every_way_the_same_scales_and_values(way, make, monkeypatch):
    params, x, y = make(mlp_state(2))
    if way == "vmap":
        x, y = (ScaledArray(a.data.reshape(4, 16, -1), a.scale) for a in (x, y))
    fun = jsa.scalify(WAYS[way](mlp))
    got, want = fun(params, x, y), at_once(monkeypatch, fun, params, x, y)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


NN = {
    "gelu": jsa.nn.gelu,
    "softmax": jsa.nn.softmax,
    "standardize": jsa.nn.standardize,
    "layer_norm": lambda x: jsa.nn.layer_norm(x, V[0], V[1]),
    "swiglu": jsa.nn.swiglu,
    "loss": lambda x: jsa.nn.softmax_cross_entropy_with_integer_labels(x, jnp.arange(64)),
    "error": lambda x: jsa.nn.squared_error(x, V),
    "embed": lambda x: jsa.nn.embed(x, jnp.arange(32) % 5),
    "batched": jax.vmap(jsa.nn.gelu),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("make", [static, dynamic])
@pytest.mark.parametrize("name", NN)
def test_functions_of_nn_take_and_give_what_waits(name, make, monkeypatch):
    def loss(x, w):
        return jnp.sum(jnp.sin(NN[name](x @ w)))

    args = make(X, 2.0**5), make(W, 2.0**-9)
    fun = jsa.scalify(jax.value_and_grad(loss, (0, 1)))
    assert_same(fun(*args), at_once(monkeypatch, fun, *args))


def test_a_static_factor_of_nn_is_no_last_step():
    """XLA repeats what ends in a product by a scalar in each kernel that reads it."""

    def grads(x, w):
        return jax.grad(lambda x, w: jnp.sum(jsa.nn.gelu(x @ w) @ w), (0, 1))(x, w)

    jaxpr = jax.make_jaxpr(jsa.scalify(grads))(static(X, 2.0**3), static(W, 2.0**-3))
    equations = list(all_equations(jaxpr))
    by_scalars = [
        e.outvars[0]
        for e in equations
        if e.primitive is lax.mul_p and {v.aval.ndim for v in e.invars} == {0, 2}
    ]
    operands = [v for e in equations if e.primitive is lax.dot_general_p for v in e.invars]
    assert by_scalars and operands
    assert not {id(v) for v in operands} & {id(v) for v in by_scalars}


def test_derivatives_from_outside():
    def f(p):
        return jax.nn.relu(X @ p) * 0.3 + p[0]

    def loss(f):
        return lambda p: jnp.sum(f(p) * V)

    want = jax.grad(loss(f))(W)
    got = jax.grad(loss(lambda p: jsa.asarray(jsa.scalify(f)(static(p, 1.0)))))(W)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_a_long_chain_of_sums_stays_in_range():
    ones = jnp.ones((64, 64), jnp.float32)

    def f(x, w):
        for _ in range(100):
            x = jnp.abs(x) @ jnp.abs(w)  # not multiplied by 1/64, it would be 2**600
        return x, jnp.exp(x - 1)

    product, power = jsa.scalify(f)(static(ones, 1.0), static(ones, 2.0**-6))
    np.testing.assert_array_equal(product.data, ones)
    np.testing.assert_array_equal(power.to_array(), ones)


def test_operands_and_results_stay_within_their_bounds():
    far = defer(X, 20, Scale(0))
    assert far.is_deferred
    a, b, exponent = split_product(far, far)
    assert exponent == 20 and np.array_equal(a, X * 2.0**20) and b is X
    assert split(far)[1] == split_product(far, far, powers=(1, -1))[2] + 20 == 20
    assert split_product(far, powers=(2,))[1] == 0
    lower = defer(X, -20, Scale(0))
    assert split_product(far, lower, powers=(1, -1))[2] in (20, -20)
    assert not defer(X, 2 * LARGEST_EXPONENT + 1, Scale(0)).is_deferred
    assert defer_constant(far, 1e30, Scale(0)) is None
    product = defer_constant(far, 0.3, Scale(0))
    np.testing.assert_array_equal(product.raw, X * np.float32(0.3))
    np.testing.assert_array_equal(product.data, X * np.float32(0.3) * 2**20)
    assert product.data is product.data and not settled(product).is_deferred


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn, jnp.complex64])
def test_other_dtypes_are_multiplied_at_once(dtype):
    x = jnp.ones((2, 2), dtype)
    out = defer(x, 1, Scale(0))
    assert not out.is_deferred and np.all(np.asarray(out.data).astype(np.complex64) == 2)
    assert defer_constant(Operand(x, Scale(0)), 0.5, Scale(0)) is None


@pytest.mark.parametrize("number", [2 - 3j, 0.5j, 1 + 2.0**-13 * 1j, -1 + 0j, 1j])
@pytest.mark.parametrize("operation", [operator.mul, operator.truediv, operator.pow])
def test_complex_constants_are_taken_whole(number, operation):
    """Also one whose absolute value is 1, or rounds to it."""
    x = X[:2, :2] + 1j * W[:2, :2]
    constant = np.complex64(number)
    assert constant.imag == np.imag(number)
    got = jax.jit(jsa.scalify(lambda x: operation(x, constant)))(jsa.as_scaled_array(x, scale=4.0))
    want = operation(np.asarray(x, np.complex128), number)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_a_rule_from_outside_asks_for_data(jit):
    """In a function of its own first: what that has computed is not used outside of it."""
    primitive = opaque_primitive(f"outside_of_deferral_{jit}", lambda x: x)
    seen = []

    @jsa.register_scale_rule(primitive)
    def rule(ctx, x, **params):
        seen.append(x.is_deferred)
        inside = jax.jit(lambda: x.data + 0)()
        total = lax.cond(jnp.sum(inside) > 0, lambda: x.data, lambda: x.data)
        return ScaledArray(ctx.bind(total + x.data - inside, **params), x.scale)

    function = jsa.scalify(lambda x, w: primitive.bind(x @ w))
    out = (jax.jit(function) if jit else function)(static(X, 1.0), static(W, 1.0))
    np.testing.assert_allclose(out, X @ W, rtol=1e-6)
    assert seen == [True]


def test_a_custom_rule_asks_for_data():
    seen = []

    @jsa.custom_scale
    def double(x):
        return 2 * x

    @double.defscale
    def double_scale(x):
        seen.append(x.is_deferred)
        return ScaledArray(x.data, x.scale * 2)

    out = jsa.scalify(lambda x, w: double(x @ w))(static(X, 1.0), static(W, 1.0))
    assert seen == [True] and type(out) is ScaledArray
    np.testing.assert_allclose(out, 2 * (X @ W), rtol=1e-6)
