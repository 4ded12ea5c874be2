"""Scales that are computed together are those that are computed one by one."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import _compat
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.base.pins import pin_p
from jax_scalify.scales.rounds import ON_CPU, ON_GPU, ON_TPU, round_p

together = pytest.mark.skipif(not _compat.keeps_barriers(), reason="computed one by one")
SCALES = (1.0, 2.0**-40, 2.0**40, 0.0, 2.0**-7)
X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def scaled(scale, x=X):
    return jsa.ScaledArray(jnp.asarray(x * (scale != 0)), jnp.float32(scale))


@functools.cache
def together_of(fun):
    """`jit` of a scalified function; it is compiled once for all scales."""
    return jax.jit(jsa.scalify(fun))


@functools.cache
def one_by_one(fun):
    """The same, of scales that are not computed together."""
    jitted = jax.jit(jsa.scalify(fun))

    def call(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_compat, "keeps_barriers", lambda: False)
            return jitted(*args)

    return call


def assert_same(got, expected):
    leaves = [jax.tree.leaves(tree) for tree in (got, expected)]
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=0)


def residual(x, w, b):
    for _ in range(4):
        x = x + jnp.tanh(x @ w + b) * 3
    return x, x * b + w


def normalised(x, w, b):
    y = (x + w) / jnp.sqrt(jnp.mean((x + w) ** 2) + 1e-6)
    return y * b, jnp.cbrt(y + x), lax.rsqrt(jnp.abs(w) + jnp.abs(b) + 1)


def scanned(x, w, b):
    def body(carry, factor):
        carry = carry * w * factor + b
        return carry, carry + x

    return lax.scan(body, x, jnp.arange(1.0, 4.0))


def branching(x, w, b):
    return lax.cond(jnp.sum(w) > 0, lambda: x + w, lambda: (x + b) * w) + b


def by_scalars(x, w, b):
    norm = jnp.sqrt(jnp.sum(x**2) + jnp.sum(w**2) + jnp.sum(b**2))
    rate = 0.1 / (1.0 + norm)
    return x - rate * w, (w + b) * jnp.minimum(1.0, 2.0 / norm)


def by_hand(x, w, b):
    total = x + w
    _, scale = jsa.get_data_and_scale(total)
    return jsa.set_scaling(b + total, 4 * scale) + x


def along_axes(x, w, b):
    """Some scales have axes, others are scalars: products and maxima of both kinds."""
    powers = jnp.float32([0.5, 8.0, 2.0**20, 1.0])
    rows, columns = jsa.set_scaling(x + 1, powers[:, None]), jsa.set_scaling(w, powers[None])
    y = (rows * w + b) @ columns / (jnp.abs(rows) + jnp.abs(b))
    return y, jnp.sqrt(jnp.abs(rows * w * b)) + b, jnp.sum(y * rows, axis=0)


FUNCTIONS = (residual, normalised, scanned, branching, by_scalars, by_hand, along_axes)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("scales", list(itertools.combinations(SCALES, 3)))
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_data_and_scales_are_the_same(fun, scales):
    args = [scaled(scale) for scale in scales]
    assert_same(together_of(fun)(*args), one_by_one(fun)(*args))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_the_value_is_that_of_the_plain_function(fun):
    args = [scaled(scale) for scale in (2.0**3, 2.0**-2, 0.5)]
    plain = fun(*map(jsa.asarray, args))
    values = jsa.asarray(jax.jit(jsa.scalify(fun))(*args))
    for a, b in zip(jax.tree.leaves(values), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_scales_stay_within_their_range():
    huge, tiny = (scaled(2.0**e, np.ones((2, 2), np.float32)) for e in (120, -120))
    for out in jax.jit(jsa.scalify(lambda a, b: (a * a, b * b, a * a + a, b / a)))(huge, tiny):
        assert out.scale == 0 or 2.0**-126 <= out.scale <= 2.0**126


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun])
def test_exponents_beyond_the_range_of_float32(jit):
    """`2**100 * 2**100 * 2**-90`, where the last scale has an axis: `2**200` is an exponent."""
    a, b = (scaled(2.0**100, np.ones((4, 4), np.float16)) for _ in range(2))
    rows = jsa.ScaledArray(jnp.ones((4, 4), jnp.float16), jnp.full((4, 1), 2.0**-90, jnp.float32))
    out = jit(jsa.scalify(lambda a, b, rows: a * b * rows))(a, b, rows)
    np.testing.assert_array_equal(np.asarray(out, np.float64), 2.0**110)


def test_wide_scales():
    with jax.enable_x64(True), jsa.ScalifyConfig(scale_dtype=jnp.float64):
        args = [jsa.ScaledArray(jnp.asarray(X), jnp.float64(2.0**e)) for e in (30, -20, 3)]
        out = jax.jit(jsa.scalify(residual))(*args)
        assert out[0].scale.dtype == jnp.float64
        assert_same(out, one_by_one(residual)(*args))


@pytest.mark.sampled(4)
@pytest.mark.optimized
@pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.jit(jax.vmap(jax.jit(f)))])
def test_under_vmap(transform):
    def example(*args):
        return jsa.scalify(residual)(*args)

    args = [
        jsa.ScaledArray(jnp.stack([X, 2 * X]), jnp.float32([2.0**i, 2.0 ** (2 * i)]))
        for i in range(3)
    ]
    expected = [
        jax.jit(example)(*(jsa.ScaledArray(a.data[i], a.scale[i]) for a in args)) for i in (0, 1)
    ]
    got = transform(example)(*args)
    for i in (0, 1):
        assert_same(jax.tree.map(lambda x: x[i], got), expected[i])  # noqa: B023


def test_derivatives_of_a_jitted_function():
    def loss(x):
        out, _ = jax.jit(jsa.scalify(residual))(jsa.as_scaled_array(x), scaled(2.0), scaled(0.5))
        return jnp.sum(jsa.asarray(out))

    plain = lambda x: jnp.sum(residual(x, 2 * X, X / 2)[0])  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(X), jax.grad(plain)(X), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), jax.grad(plain)(X), rtol=1e-4, atol=1e-4)


@together
@pytest.mark.parametrize("dtype, more", [(jnp.float16, 3), (jnp.float32, 4)])
def test_the_lowered_program_has_few_operations_on_scales(dtype, more):
    # Float32 is kept in range: of each third product one scale is bounded first.
    def deep(depth):
        def fun(x, *weights):
            for w in weights:
                x = x + jax.nn.relu(x @ w)
            return x

        args = [scaled(1.0, X.astype(dtype)) for _ in range(depth + 1)]
        text = jax.jit(jsa.scalify(fun)).lower(*args).as_text()
        wanted = r"maximum|minimum|subtract|bitcast_convert|shift_left|floor"
        return len(re.findall(rf"stablehlo\.({wanted}) .*: .*tensor<(\d+x)?(f32|ui32)>", text))

    assert deep(8) <= deep(4) + more


@together
def test_a_norm_over_many_leaves_takes_few_steps():
    def norm(*leaves):
        pairs = zip(leaves, leaves[1:] + leaves[:1], strict=True)
        return jnp.sqrt(sum(jnp.sum((x + y) ** 4) for x, y in pairs))

    rng = np.random.default_rng(0)
    leaves = [scaled(2.0**e, X + i) for i, e in enumerate(rng.integers(-9, 9, 60))]
    scalified = jsa.scalify(norm)
    assert_same(jax.jit(scalified)(*leaves), one_by_one(norm)(*leaves))
    values = [np.asarray(x).astype(np.float64) for x in leaves]
    want = np.sqrt(sum(np.sum((values[i] + values[i - 1]) ** 4) for i in range(60)))
    np.testing.assert_allclose(np.asarray(scalified(*leaves)), want, rtol=1e-6)
    for dtype, most in ((jnp.float16, 2), (jnp.float32, 3)):  # powers of float32 are kept in range
        lowered = jax.jit(scalified).lower(*(x.astype(dtype) for x in leaves))
        assert lowered.as_text().count("applies stablehlo.maximum") <= most


@together
def test_constants_are_pinned_by_one_barrier():
    """XLA would merge equal barriers, and take the operands of equal kernels in other orders."""

    def fun(x, w, b):
        return (x + w) * 2 + b, (x - w) + 0.3 * b

    arrays = [jsa.ScaledArray(jnp.asarray(X), 2.0**e) for e in (3, -4, 6)]
    jaxpr = jax.make_jaxpr(jsa.scalify(fun))(*arrays)
    pins = [e for e in all_equations(jaxpr) if e.primitive is pin_p]
    assert len(pins) == 1 and len(pins[0].invars) > 2
    for x in jax.tree.leaves(jax.jit(jsa.scalify(fun))(*arrays)):
        assert np.isfinite(x).all()


@together
def test_scales_are_computed_before_they_are_needed_and_once():
    def count(fun, *args):
        jaxpr = jax.make_jaxpr(jsa.scalify(fun))(*args).jaxpr
        return [e.primitive for e in jaxpr.eqns].count(round_p)

    assert count(residual, scaled(2.0), scaled(4.0), scaled(8.0)) == 1

    def step(x, w, rate):  # the scale of a scalar is known later than those of arguments
        return jnp.exp(rate) * (x + w) + x

    args = scaled(2.0).astype(jnp.float16), scaled(4.0).astype(jnp.float16), jnp.float16(3.0)
    assert count(step, *args) == 2


def test_no_placeholder_is_left_where_nothing_is_asked_for():
    jaxpr = jax.make_jaxpr(jsa.scalify(lambda x, w: x @ w))(scaled(2.0), scaled(4.0)).jaxpr
    assert not any(e.primitive.name == "scale_placeholder" for e in jaxpr.eqns)


def norm_and_roots(x, w, b):
    y, _ = residual(x, w, b)
    return jnp.cbrt(y) * jnp.sqrt(jnp.sum((x + y) ** 4)) / (w + 2), jnp.mean(y**2) ** -1.5 * b


@pytest.mark.sampled(16)
@together
@pytest.mark.parametrize("fun", [residual, norm_and_roots])
def test_each_platform_computes_the_same_scales(fun):
    """The lowerings for GPUs and TPUs, run here."""
    jaxpr = jax.make_jaxpr(jsa.scalify(jax.value_and_grad(lambda *a: jnp.sum(fun(*a)[0]))))
    closed = jaxpr(scaled(2.0), scaled(4.0), scaled(8.0))
    found = [e for e in all_equations(closed) if e.primitive is round_p]
    assert found and any(e.params["computed"].levels for e in found)
    rng = np.random.default_rng(0)
    for eqn in found:
        cpu, *others = [
            jax.jit(functools.partial(eqn.params["computed"], style))
            for style in (ON_CPU, ON_GPU, ON_TPU)
        ]
        for limit in (9, 40, 120):
            arrays = [random_powers(rng, v.aval, limit) for v in eqn.invars]
            for other in others:
                for a, b in zip(cpu(*arrays), other(*arrays), strict=True):
                    np.testing.assert_array_equal(a, b)


def random_powers(rng, aval, limit):
    """Powers of two and zeros: a source is one, all exponents so far are a vector."""
    exponents = np.where(rng.random(aval.shape) < 0.1, -np.inf, rng.integers(-limit, limit))
    array = np.maximum(exponents, -(2.0**22)) if aval.shape else 2.0**exponents
    return jnp.asarray(array, aval.dtype)
