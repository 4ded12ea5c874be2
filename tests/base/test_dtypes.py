"""Casts to every narrow format: to nearest even, and stochastic, over all of their numbers."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base import dtypes, stochastic_rounding

# JAX has names for float6 as well, but its CPU compiler does not take them.
NARROW = """float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2
    float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn""".split()
HALF = ["float16", "bfloat16"]
SOURCES = ["float32", "float16", "bfloat16", "float64"]
KEYS = {"key": jax.random.key, "PRNGKey": jax.random.PRNGKey}


@pytest.fixture(params=SOURCES)
def source(request):
    wide = request.param == "float64"
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        yield jnp.dtype(request.param)


@functools.cache
def numbers(dtype):
    """All finite numbers of a dtype in float64, in order."""
    dtype = jnp.dtype(dtype)
    size = 2 ** jnp.finfo(dtype).bits
    encodings = np.arange(size).astype(f"uint{8 * dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        values = encodings.view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def exact(x):
    return np.asarray(x).astype(np.float64)


def critical(dtype, source):
    """Numbers, midpoints, the next numbers of the source, what is too large, and what is small."""
    values = numbers(dtype)
    ends = values[[0, -1]]
    with np.errstate(over="ignore"):
        points = np.concatenate([values, -values, (values[1:] + values[:-1]) / 2])
        points = np.concatenate([points, 1.01 * ends, 2 * ends, 1e30 * ends, [1e-30, -1e-30]])
        points = points.astype(source)
    up, down = (np.nextafter(points, source.type(end)) for end in (np.inf, -np.inf))
    points = np.concatenate([points, up, down, np.array([0.0, -0.0], source)])
    return points[np.isfinite(points)]


def neighbours(x, values):
    """The largest number at or below, and the smallest at or above, saturating."""
    x = np.clip(exact(x), values[0], values[-1])
    return values[np.searchsorted(values, x, "right") - 1], values[np.searchsorted(values, x)]


def nearest(x, dtype):
    """The nearest number, with an even encoding (in E8M0 the larger one) if two are as near.

    The same as ml_dtypes from float32, but for its smallest binade of E8M0: what is nearer to
    2**-127 it rounds up. It rounds float64 twice.
    """
    dtype = jnp.dtype(dtype)
    below, above = neighbours(x, numbers(dtype))
    middle, x = (below + above) / 2, exact(x)
    even = below.astype(dtype).view(np.uint8) % 2 == 0
    even &= dtype != jnp.float8_e8m0fnu
    out = np.where((x < middle) | ((x == middle) & even), below, above)
    return np.copysign(out, np.where(out == 0, x, out)).astype(dtype)


def assert_same(got, expected):
    np.testing.assert_array_equal(exact(got), exact(expected))
    zero = exact(expected) == 0
    np.testing.assert_array_equal(np.signbit(exact(got)[zero]), np.signbit(exact(expected)[zero]))


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", NARROW)
def test_to_nearest_even_exactly_once(dtype, source):
    x = critical(dtype, source)
    expected = nearest(x, dtype)
    if source == "float32":
        theirs = np.clip(x, *numbers(dtype)[[0, -1]].astype(np.float32)).astype(expected.dtype)
        common = (dtype != "float8_e8m0fnu") | (x <= 2.0**-127) | (x >= 2.0**-126)
        assert_same(theirs[common], expected[common])
    jitted = jax.jit(lambda v: dtypes.cast(v, dtype))
    for cast in (jitted, lambda v: dtypes.cast(v, dtype)):
        out = cast(jnp.asarray(x))
        assert out.dtype == dtype
        assert_same(out, expected)
    assert_same(ScaledArray(jnp.asarray(x), 4.0).astype(dtype).data, expected)
    assert_same(jsa.ops.cast_on_forward(jnp.asarray(x), dtype), expected)
    through = jax.jit(lambda v: jsa.ops.reduce_precision_on_forward(v, dtype))(jnp.asarray(x))
    assert_same(through, expected.astype(source))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", NARROW)
def test_every_number_goes_round_trip(dtype):
    values = numbers(dtype).astype(jnp.dtype(dtype))
    for wide in (jnp.float32, jnp.bfloat16):
        there = jax.jit(lambda v: dtypes.cast(v, wide))(jnp.asarray(values))  # noqa: B023
        assert_same(there, values)
        assert_same(jax.jit(lambda v: dtypes.cast(v, dtype))(there), values)


@pytest.mark.parametrize("key", [None, jax.random.key(0)])
@pytest.mark.parametrize("dtype", NARROW)
def test_infinities_saturate_and_nan_stays(dtype, key):
    x = jnp.asarray([np.inf, -np.inf, np.nan, -np.nan])
    out = exact(jax.jit(lambda v: stochastic_rounding.cast(v, dtype, key=key))(x))
    np.testing.assert_array_equal(out[:2], numbers(dtype)[[-1, 0]])
    has_nan = dtype != "float4_e2m1fn"
    np.testing.assert_array_equal(np.isnan(out[2:]), has_nan)


@pytest.mark.parametrize("dtype", NARROW)
def test_integers_saturate(dtype):
    out = dtypes.cast(jnp.asarray([2**31 - 1, 1, 0]), dtype)
    expected = np.clip([2.0**31, 1, 0], *numbers(dtype)[[0, -1]]).astype(jnp.dtype(dtype))
    assert_same(out, expected)


# Stochastic rounding.


@functools.partial(jax.jit, static_argnums=2)
def rounded(x, bits, dtype):
    shape = jnp.broadcast_shapes(x.shape, bits.shape)
    x, bits = jnp.broadcast_to(x, shape), jnp.broadcast_to(bits, shape)
    return stochastic_rounding.round_stochastically(x, bits, jnp.dtype(dtype))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", NARROW + HALF)
def test_stochastic_gives_a_neighbour(dtype, source):
    if jnp.dtype(dtype) == source:
        pytest.skip("nothing to cast")
    values = numbers(dtype)
    x = critical(dtype, source)
    smallest = 2.0**-126  # what is subnormal in float32 is flushed by XLA on the way from float64
    x = x[(np.abs(exact(x)) >= smallest) | (x == 0)] if source == "float64" else x
    bits = np.uint32([0, 1, 2**31, 2**32 - 1])[:, None]
    out = exact(rounded(jnp.asarray(x), bits, dtype))
    below, above = neighbours(x, values)
    np.testing.assert_array_equal((out == below) | (out == above), True)
    clipped = np.clip(exact(x), *values[[0, -1]])
    fraction = (clipped - below) / np.where(above > below, above - below, 1)
    moves = (fraction > 2.0**-16) & (fraction < 1 - 2.0**-16)
    moves &= (dtype != "float8_e8m0fnu") | (clipped >= smallest)  # there it rounds to nearest
    np.testing.assert_array_equal(np.min(out, axis=0)[moves], below[moves])
    np.testing.assert_array_equal(np.max(out, axis=0)[moves], above[moves])
    signs = np.signbit(out) == np.signbit(exact(x))
    assert dtype.endswith("uz") or np.all(signs | (out != 0))


@pytest.mark.parametrize("dtype", NARROW + HALF)
def test_stochastic_is_unbiased_exactly(dtype, source):
    """Random bits that are spread evenly have exactly the value as their mean."""
    if jnp.dtype(dtype) == source:
        pytest.skip("nothing to cast")
    values = numbers(dtype)
    step = max(1, len(values) // 500)
    below, above = values[:-1:step], values[1::step]
    if dtype == "float8_e8m0fnu":
        below, above = below[1:], above[1:]
    x = np.concatenate([below + fraction * (above - below) for fraction in (0.125, 0.5, 0.75)])
    with np.errstate(over="ignore"):
        x = x[exact(x.astype(source)) == x]
    x = x[np.abs(x) >= 2.0**-126] if source == "float64" else x
    assert x.size
    bits = (np.arange(64, dtype=np.uint32) << 26 | np.uint32(0x2A5_1234))[:, None]
    out = exact(rounded(jnp.asarray(x.astype(source)), bits, dtype))
    np.testing.assert_array_equal(np.mean(out, axis=0), x)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", NARROW + HALF)
def test_stochastic_is_unbiased_with_a_key(dtype):
    values = numbers(dtype)
    x = np.random.default_rng(0).normal(size=2**16).astype(np.float32)
    x = np.abs(x) + np.float32(0.01) if dtype == "float8_e8m0fnu" else x
    x = np.clip(x, *values[[0, -1]].clip(-3e38, 3e38)).astype(np.float32)
    below, above = neighbours(x, values)
    variance = (above - x) * (x - below)
    for index, make in enumerate(KEYS.values()):
        out = exact(jsa.ops.cast_on_forward(jnp.asarray(x), dtype, key=make(index)))
        error = np.mean(out - x)
        assert abs(error) < 4 * np.sqrt(np.mean(variance) / x.size)
        assert np.mean(np.square(out - x)) == pytest.approx(np.mean(variance), rel=0.03)


@pytest.mark.parametrize("dtype", HALF)
def test_stochastic_saturates_finite_numbers_only(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = np.float32([3.4028235e38, -3.4028235e38, largest, np.inf, -np.inf, np.nan])
    out = exact(rounded(jnp.asarray(x), np.uint32([[0], [2**32 - 1]]), dtype))
    np.testing.assert_array_equal(out, [[largest, -largest, largest, np.inf, -np.inf, np.nan]] * 2)


def test_stochastic_to_a_wider_dtype_is_exact():
    x = jnp.asarray(numbers("float8_e5m2"), jnp.float16)
    for dtype in (jnp.float32, jnp.float16):
        out = stochastic_rounding.cast(x, dtype, key=jax.random.key(0))
        assert out.dtype == dtype
        assert_same(out, x)
    whole = stochastic_rounding.cast(
        jnp.asarray([1, 1000]), jnp.float8_e4m3fn, key=jax.random.key(0)
    )
    assert_same(whole, [1, 448])


def test_a_value_far_below_the_smallest_number_survives_on_average():
    x = jnp.full(2**18, 2.0**-24 / 1000)
    out = exact(jsa.ops.cast_on_forward(x, jnp.float16, key=jax.random.key(1)))
    assert set(np.unique(out)) == {0, 2.0**-24}
    assert np.mean(out) == pytest.approx(2.0**-24 / 1000, rel=0.25)


# With a key, inside models.

X = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
FORWARD = [jsa.ops.cast_on_forward, jsa.ops.reduce_precision_on_forward]
BACKWARD = [jsa.ops.cast_on_backward, jsa.ops.reduce_precision_on_backward]


def exactly(dtype, key, x):
    """What a cast with this key gives."""
    return exact(stochastic_rounding.cast(jnp.asarray(x), dtype, key=key)).astype(np.float32)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("op", FORWARD)
def test_forward_with_a_key(op, make):
    dtype, key = jnp.float8_e4m3fn, make(3)

    def fun(x, key):
        return op(x, dtype, key=key).astype(jnp.float32)

    expected = exactly(dtype, key, X)
    assert not np.array_equal(expected, exactly(dtype, None, X))
    for call in (fun, jax.jit(fun), jax.checkpoint(fun)):
        np.testing.assert_array_equal(call(jnp.asarray(X), key), expected)
    keys = jax.random.split(key, len(X))
    each = np.stack([exactly(dtype, k, x) for k, x in zip(keys, X)])
    np.testing.assert_array_equal(jax.vmap(fun)(X, keys), each)
    shared = np.stack([exactly(dtype, keys[0], x) for x in X])
    np.testing.assert_array_equal(jax.vmap(fun, (0, None))(X, keys[0]), shared)
    same = np.stack([exactly(dtype, k, X[0]) for k in keys])
    np.testing.assert_array_equal(jax.vmap(fun, (None, 0))(X[0], keys), same)
    scanned = jax.lax.scan(lambda _, args: (None, fun(*args)), None, (X, keys))[1]
    np.testing.assert_array_equal(scanned, each)


@pytest.mark.parametrize("op", FORWARD)
def test_forward_with_a_key_is_straight_through(op):
    dtype, key = jnp.float8_e4m3fn, jax.random.key(3)

    def fun(x):
        return jnp.sum(op(x, dtype, key=key).astype(jnp.float32) ** 2)

    np.testing.assert_array_equal(jax.grad(fun)(jnp.asarray(X)), 2 * exactly(dtype, key, X))
    tangent = jax.jvp(lambda x: op(x, dtype, key=key), (X,), (jnp.full_like(X, 1.1),))[1]
    rounded = op is jsa.ops.cast_on_forward
    np.testing.assert_array_equal(exact(tangent), exact(np.float32(1.125 if rounded else 1.1)))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("op", BACKWARD)
def test_backward_with_a_key(op, make):
    dtype, key = jnp.float8_e5m2, make(3)

    def fun(x, weight, key):
        return jnp.sum(op(x, dtype, key=key) * weight)

    grad = jax.grad(fun)
    assert float(fun(X, X, key)) == float(jnp.sum(X * X))
    expected = exactly(dtype, key, X)
    for call in (grad, jax.jit(grad), jax.grad(jax.checkpoint(fun))):
        np.testing.assert_array_equal(call(X, X, key), expected)
    keys = jax.random.split(key, len(X))
    each = np.stack([exactly(dtype, k, x) for k, x in zip(keys, X)])
    batched = jax.grad(lambda x: jnp.sum(jax.vmap(fun)(x, X, keys)))
    np.testing.assert_array_equal(jax.vmap(grad)(X, X, keys), each)
    np.testing.assert_array_equal(batched(X), each)
    shared = jax.grad(lambda x: jnp.sum(jax.vmap(lambda k: fun(x, X[0], k))(keys)))
    same = np.stack([exactly(dtype, k, X[0]) for k in keys])
    np.testing.assert_array_equal(shared(X[0]), np.sum(same, axis=0))

    def scanned(x):
        return jax.lax.scan(lambda total, args: (total + fun(*args), None), 0.0, (x, X, keys))[0]

    for call in (jax.grad(scanned), jax.jit(jax.grad(scanned))):
        np.testing.assert_array_equal(call(X), each)
    inside = jax.jit(jsa.scalify(jax.grad(scanned)))(ScaledArray(jnp.asarray(X), np.float32(4)))
    np.testing.assert_array_equal(np.asarray(inside), each)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_inside_scalify_the_data_is_rounded(dtype):
    key, scale = jax.random.key(5), jnp.float32(2.0**40)
    x = ScaledArray(jnp.asarray(X), scale)
    fun = jsa.scalify(lambda x, key: jsa.ops.cast_on_forward(x, dtype, key=key))
    for call in (fun, jax.jit(fun)):
        out = call(x, key)
        assert out.dtype == dtype and float(out.scale) == 2.0**40
        np.testing.assert_array_equal(exact(out.data), exactly(dtype, key, X))
    assert_same(x.astype(dtype, key=key).data, exactly(dtype, key, X))
    per_axis = ScaledArray(x.data, jnp.float32([[1], [2], [4], [8]]))
    np.testing.assert_array_equal(fun(per_axis, key).scale, per_axis.scale)

    def mapped(x, keys):
        return jax.vmap(lambda x, k: jsa.ops.cast_on_forward(x, dtype, key=k))(x, keys)

    keys = jax.random.split(key, len(X))
    each = np.stack([exactly(dtype, k, row) for k, row in zip(keys, X)])
    np.testing.assert_array_equal(exact(jsa.scalify(mapped)(x, keys).data), each)
    weight = np.linspace(1, 2, X.size, dtype=np.float32).reshape(X.shape)

    def loss(x, w):
        return jnp.sum(jsa.ops.cast_on_backward(x, dtype, key=key) * w)

    grad = jsa.scalify(jax.grad(loss))(x, ScaledArray(jnp.asarray(weight), jnp.float32(2.0**30)))
    data = exactly(dtype, key, weight)
    np.testing.assert_array_equal(np.asarray(grad), data * np.float32(2.0**30))


def test_what_is_not_a_key():
    for op in FORWARD + BACKWARD:
        with pytest.raises(TypeError):
            op(jnp.asarray(X), jnp.float8_e4m3fn, key=7)


def test_jax_knows_no_other_narrow_format():
    # From 0.7 on, ml_dtypes has `float8_e5m3fnu`, of which JAX has no arrays.
    names = [n for n in dir(ml_dtypes) if n.startswith("float") and hasattr(jnp, n)]
    assert {n for n in names if not n.startswith("float6")} == set(NARROW)


@pytest.mark.parametrize("function", [jsa.ops.cast_on_forward, jsa.ops.reduce_precision_on_forward])
def test_outside_of_scalify_an_array_is_needed(function):
    x = ScaledArray(jnp.ones(2), 2.0)
    with pytest.raises(TypeError, match=r"must be an array, got ScaledArray: .* `jsa.asarray`"):
        function(x, jnp.float16)
    assert jsa.scalify(function)(x, jnp.float16).scale == 2
