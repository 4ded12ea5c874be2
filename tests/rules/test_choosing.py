"""Elements of very different origin in one array: multiples of one array, and constants."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from tests.helpers import leaves
from tests.programs import DTYPES, KINDS, all_outcomes, check_rows, outcomes, rows, scaled

pytestmark = pytest.mark.sampled(3)
MASK = np.array([True, False, True])


def _normal(scale, seed=0, dtypes=DTYPES, kinds=KINDS):
    found = []
    for dtype in dtypes:
        data = np.random.default_rng(seed).normal(size=40).astype(dtype).astype(np.float64)
        found += rows(data * scale, scale, [dtype], kinds)
    return found


def _pairs(first, second):
    """Rows of two operands, of rows of one."""
    return [((*x, *y), dtype) for (x, dtype), (y, _) in zip(first, second, strict=True)]


def _are_close(function, rows, of=None):
    """Compare with the plain function in float32, in epsilons of the largest of each result."""
    plain = [[jsa.asarray(x, jnp.float32) for x in operands] for operands, _ in rows]
    expected = [jax.tree.leaves(function(*operands)) for operands in plain]
    for results in all_outcomes(function, [operands for operands, _ in rows]):
        for result, wanted, (operands, dtype) in zip(results, expected, rows, strict=True):
            for got, want in zip(jax.tree.leaves(result), wanted, strict=True):
                want = np.asarray(want, np.float64)
                unit = float(jnp.finfo(dtype).eps) * (of or np.max(np.abs(want)))
                np.testing.assert_allclose(
                    got / unit, want / unit, rtol=0, atol=4, err_msg=str(operands)
                )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_divisor_of_zeros_is_replaced_by_1(dtype, kind):
    """`jnp.sinc` divides by `where(x == 0, 1, x)`, in float32 where x is float16."""
    sizes = [2.0**-12, 1.0]
    operands = [scaled(np.array([0.0, 0.0, 0.5]) * size, size, dtype, kind) for size in sizes]
    if kind == "dynamic":  # zeros without a scale of their own
        operands.append(jsa.as_scaled_array(jnp.zeros(3, dtype)))

    def function(x):
        return jnp.sinc(x), jax.grad(lambda x: jnp.sum(jnp.sinc(x)))(x)

    _are_close(function, [((x,), dtype) for x in operands], of=1.0)


# There, it divides by `where(m == 0, 1, m)`: small numbers beside a constant.
_LIMIT = pytest.mark.xfail(jax.__version__ < "0.11", strict=True, reason="docs/limits.md")


@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [
        ("float32", (-40, -8, 0, 4, 20)),
        ("bfloat16", (-40, -8, 0, 4, 20)),
        ("float16", (-8, 0, 4, 20)),
        pytest.param("float16", (-40,), marks=_LIMIT),
    ],
)
def test_hypot_at_every_scale(dtype, exponents):
    pairs = []
    for exponent in exponents:
        x, y = (_normal(2.0**exponent, seed, [dtype]) for seed in (0, 1))
        pairs += _pairs(x, y)
    _are_close(jnp.hypot, pairs)
    _are_close(jax.grad(lambda x, y: jnp.sum(jnp.hypot(x, y)), (0, 1)), pairs, of=1.0)


def test_hypot_of_different_scales():
    x, pairs = _normal(2.0**-14, kinds=KINDS[:1]), []
    for exponent in (-17, 0):
        pairs += _pairs(x, _normal(2.0**exponent, seed=1, kinds=KINDS[:1]))
    _are_close(jnp.hypot, pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_choice_that_cancels_leaves_a_scalar_scale(dtype):
    [((x,), _)] = _normal(2.0**-8, dtypes=[dtype], kinds=KINDS[:1])

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


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_that_does_not_cancel(name):
    found = rows([2.0**-10, 0.5, 3.0], 0.125, kinds=KINDS[:1])

    def function(x):
        return CHOICES[name](lax.select(x < 0.03, 64 * x, x))

    check_rows(function, found)
    for (x,), _ in found:
        for result in leaves(jsa.scalify(function)(x)):
            assert jnp.shape(getattr(result, "scale", 1.0)) == ()


# Functions of an array with some constants among its elements.
AMONG = {
    "power": lambda c: c**4,
    "product": lambda c: c * c * c,
    "matmul": lambda c: c @ c,
    "sum": lambda c: jnp.sum(c) ** 2,
    "times_constant": lambda c: (c * 3) ** 3,
    "times_array": lambda c: (c * jnp.array([1.25, 0.75, -1.5], c.dtype)) ** 3,
    "matmul_with_array": lambda c: (c @ jnp.array([[1.25], [0.75], [-1.5]], c.dtype)) ** 2,
    "padded": lambda c: jnp.pad(c, 1, constant_values=3.0) ** 2,
    "polynomial": jnp.poly,
    "convolution": lambda c: jnp.convolve(c, jnp.convolve(c, c)),
    "sixth_power": lambda c: jnp.where(c == 1, 1.875, c) ** 6,
    # A result that stays in float32 is rounded by an equation that only moves it.
    "reshaped": lambda c: jnp.square(jnp.square(c)).reshape(1, 3),
    "negated_cast": lambda c: -jnp.square(c.astype(jnp.float32)).astype(c.dtype),
    "reshaped_matmul": lambda c: (
        jnp.square(jnp.square(c)).reshape(1, 3) @ jnp.ones((3, 2), c.dtype)
    ),
    "of_two_constants": lambda c: (jnp.where(c == 1, 1000.0, c) * 1e-3) ** 4,
}


@pytest.mark.parametrize("name", AMONG)
def test_products_of_constants_among_small_elements(name):
    found = []
    for scale in (2.0**-40, 2.0**-6, 2.0**6):
        found += rows(np.array([1.5, 1.0, -0.5]) * scale, scale)
    _are_close(lambda x: AMONG[name](jnp.where(MASK, x, 1.0)), found)


WITH_AN_ARRAY = {
    "product": lambda c, w: (c[:, None] * w) ** 2,
    "matmul": lambda c, w: (c @ w) ** 2,
    "quotient": lambda c, w: (c[:, None] / w) ** 2,
    "variance": lambda c, w: jnp.var(c[:, None] * w),
}


@pytest.mark.parametrize("size", [2.0**-20, 2.0**-6, 1.0])
@pytest.mark.parametrize("name", WITH_AN_ARRAY)
def test_products_of_constants_among_elements_and_an_array_of_any_scale(name, size):
    size = 1 / size if name == "quotient" else size
    small, weights = np.array([1.5, 1.0, -0.5]) * 2.0**-8, np.array([[1.25], [0.75], [-1.5]]) * size
    kinds = ["dynamic", "frozen"]  # for a scale along an axis see docs/limits.md
    pairs = _pairs(rows(small, 2.0**-8, kinds=kinds), rows(weights, size, kinds=kinds))
    _are_close(lambda x, w: WITH_AN_ARRAY[name](jnp.where(MASK, x, 9.0), w), pairs)


@pytest.mark.parametrize("narrow", [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_constants_among_elements_are_cast(narrow):
    scales = (2.0**-60, 2.0**-20, 2.0**4)
    found = [((scaled(np.array([1.5, 1.0, -0.5]) * s, s),), narrow) for s in scales]
    for function in (
        lambda x: jnp.where(MASK, x, 1.0).astype(narrow),
        lambda x: (jnp.where(MASK, x, 1.0) ** 2).astype(narrow),
        lambda x: jnp.pad(x, 1, constant_values=1.0).astype(narrow),
    ):
        _are_close(function, found)


def test_what_float32_data_took_of_a_scale_returns_to_it_in_float16():
    x = scaled(np.array([1.0, 2.0, 3.0]) * 2.0**-40, 2.0**-40, "float16")
    y = scaled(np.array([1.0, 2.0, 3.0]) * 2.0**-39, 2.0**-39, "float16")

    def function(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return (1 / x**2 + 1 / (x * y)).astype(jnp.float16)

    want = 1.5 * 2.0**80 / np.array([1.0, 4.0, 9.0])
    for got in outcomes(function, x, y):
        np.testing.assert_allclose(got, want, 2e-3)


@pytest.mark.parametrize("scale", [2.0**-6, 1.0, 2.0**40])
def test_the_gradient_of_a_guarded_logarithm(scale):
    """The constant of the guard is 1, far below the values, and does not flush their gradient."""

    def function(x):
        squares = jnp.sum(x * x, -1, keepdims=True)
        is_positive = squares > 0
        return jnp.where(is_positive, jnp.log(jnp.where(is_positive, squares, 1.0)), 0.0).sum()

    values = np.array([[1.0, 2.0, -1.0], [0.5, 1.5, 1.0]])
    x = scaled(values * scale, jnp.float32(scale), "float16")
    want = 2 * values / scale / np.square(values).sum(-1, keepdims=True)
    for got in outcomes(jax.grad(function), x):
        np.testing.assert_allclose(got, want, 2e-3)


CLIPS = {
    "hard_tanh": jax.nn.hard_tanh,
    "where": lambda x: jnp.where(x >= 1, 1, jnp.where(-1 > x, -1, x)),
    "other_way": lambda x: jnp.where(x < -1, -1, jnp.where(x > 1, 1, x)),
    "in_a_jit": jax.jit(lambda x: jax.jit(jax.nn.hard_tanh)(x)),
}


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**8, 2.0**14])
@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_by_choices_has_the_scale_of_clip(name, scale):
    """At the scale of `x`, powers of the clipped elements would underflow."""
    data = np.array([-3.0, -1.0, -0.25, 0.0, 0.5, 1.0, 3.0])
    for dtype, kind in itertools.product(DTYPES, (float, jnp.float32)):
        x = scaled(data * scale, kind(scale), dtype)
        want = jsa.asarray(jsa.scalify(lambda x: jnp.clip(x, -1, 1))(x), jnp.float32)
        for got in outcomes(CLIPS[name], x):
            np.testing.assert_array_equal(got, want)
        got = jsa.asarray(jsa.scalify(lambda x: jnp.mean(CLIPS[name](x) ** 4))(x), jnp.float32)
        np.testing.assert_allclose(got, np.mean(np.float64(want) ** 4), 2e-2)


def test_a_choice_of_something_else_is_no_clip():
    x = scaled([-3.0, 0.5, jnp.nan, jnp.inf, 3.0], 2.0**-2, "float16")
    y = scaled([9.0, 8.0, 7.0, 6.0, 5.0], 2.0**3, "float16")
    for function in (
        lambda x, y: jnp.where(x > 1, 1, y),
        lambda x, y: jnp.where(x > 1, 2, x),
        lambda x, y: jnp.where(x > 1, x, 1),
        lambda x, y: jnp.where(x > 1, 1, 4 * x),
        lambda x, y: jnp.where(2 * x > 1, 1, x),
        lambda x, y: jnp.where(x < 1, 1, x),
        lambda x, y: jnp.where(y > 1, 1, jnp.maximum(x, -1)),
        lambda x, y: jnp.where(x > 1, 1, jnp.maximum(y, -1)),
        lambda x, y: lax.scan(lambda c, _: (jnp.where(c > 1, 1, x), c), x, length=2)[0],
        lambda x, y: jnp.where(x > 1, 1, jnp.minimum(x, 0.5)),
        lambda x, y: jnp.where(x > 2, 2, jnp.where(x > 1, 1, x)),
        lambda x, y: jnp.where(x > 1, 1, jnp.maximum(-x, -1)),
        lambda x, y: jax.nn.relu((x > 0.25).astype(x.dtype)),
        lambda x, y: jnp.minimum((x < -0.25).astype(x.dtype), 1) * y,
        lambda x, y: jnp.where((x > 0.25).astype(x.dtype) > 0.5, 1, x),
        lambda x, y: jnp.where(~(x > 1), 1, x),
        lambda x, y: jnp.where((x > 1) & (y > 6), 1, x),
        lambda x, y: jnp.where((x > 1)[::-1], 1, x),
    ):
        want = function(*(jsa.asarray(v, jnp.float32) for v in (x, y)))
        for got in outcomes(function, x, y):
            np.testing.assert_array_equal(got, want)


# Functions behind which nothing is left of a mask.
UNMASKED = {
    "squared_relu": lambda s: jnp.square(jax.nn.relu(jnp.where(MASK, s, -1e4))),
    "matmul": lambda s: jax.nn.relu(jnp.where(MASK, s, -1e4)) @ jax.nn.relu(s),
    "cube": lambda s: jax.nn.relu(jnp.where(MASK, s, -6e4)) ** 3,
    "slice": lambda s: jnp.square(jnp.where(MASK, s, 1e4)[:1]),
    "hypot": lambda s: jnp.hypot(jnp.clip(s, -5, 5), jnp.where(MASK, s, 1.0)),
    "hypot_in_a_loop": lambda s: jax.lax.scan(
        lambda c, _: (jnp.hypot(c, s), c), jnp.where(MASK, s, 1.0), length=3
    ),
}


@pytest.mark.parametrize("name", UNMASKED)
def test_a_mask_that_is_gone_flushes_nothing(name):
    _are_close(UNMASKED[name], rows(np.array([0.05, 0.01, 0.3]), 1.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.maximum(x, 0),
        lambda x: jnp.maximum(0, -x),
        lambda x: jnp.clip(x, -1e4, 5e4),
        lambda x: jnp.maximum(x, -x),
        jax.nn.celu,
    ],
)
def test_the_derivative_of_a_maximum_keeps_the_scale(function, kind):
    """It is a mask of 0, 1/2 where both operands are equal, and 1."""
    x = scaled(np.array([3e4, 1.0, -2.0, 0.0, -1e4]), 1.0, jnp.float16, kind)
    cotangent = scaled(np.array([4e4, -4e4, 1e-3, 8.0, 6e4]), 1.0, jnp.float16, kind)

    def derivative(x, cotangent):
        return jax.vjp(function, x)[1](cotangent)[0]

    found = jax.jit(jsa.scalify(derivative))(x, cotangent)
    assert np.all(np.asarray(found.scale) == 1)
    want = derivative(*(jsa.asarray(v, jnp.float32) for v in (x, cotangent)))
    np.testing.assert_allclose(np.asarray(found, np.float32), want, rtol=1e-3, atol=1e-3)
