"""Laws of powers of two over arbitrary bit patterns, in every dtype that data comes in.

Exactness is judged in NumPy and in Python's integers, which know subnormals. XLA on CPUs does not:
it reads subnormal operands of float32, bfloat16 and float64 arithmetic and comparisons as 0 and
writes subnormal results as 0. Moves of bits (negation, selection, float32 to bfloat16 and back)
keep them. Arithmetic on float16 runs in float32, where its subnormals are numbers like others.
"""

import functools
import itertools
import operator
from fractions import Fraction

import hypothesis.extra.numpy as npst
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jax_scalify as jsa
from jax_scalify.arrays.scaled_array import ScaledArray, rescale_data
from jax_scalify.base import pow2
from jax_scalify.base.pow2 import MAX_EXPONENT
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import ONE, ZERO, Scale
from jax_scalify.scales.multiplying import multiply
from jax_scalify.scales.table import ScaleTable

DTYPES = ("float16", "bfloat16", "float32", "float64")
FP8 = ("float8_e4m3fn", "float8_e5m2")
SCALE_DTYPES = ("float32", "float64")
E8M0 = ml_dtypes.float8_e8m0fnu
SHAPE = (4, 8)
SCALE_SHAPES = ((), (4, 1), (1, 8), (4, 8))
DEGREES = (2, 3)


def law(examples, dtypes=DTYPES):
    """A test of `(dtype, draw)`: each example draws whole arrays, so that few are enough."""

    def decorate(test):
        @pytest.mark.parametrize("dtype", dtypes)
        @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
        @given(data=st.data())
        def run(dtype, data):
            with jax.enable_x64(dtype == "float64"), np.errstate(all="ignore"):
                test(dtype, data.draw)

        run.__name__ = run.__qualname__ = test.__name__
        return run

    return decorate


def arrays(dtype, shape, elements):
    return npst.arrays(dtype, shape, elements=elements, fill=st.nothing())


def bit_patterns(dtype):
    """Raw bits as integers: the edges of the format (of either sign) among arbitrary ones."""
    info = jnp.finfo(dtype)
    tiny, sign = 1 << info.nmant, 1 << info.bits - 1
    edges = [0, 1, tiny - 1, tiny, sign - tiny - 1, sign - tiny, sign - tiny // 2]
    edges = [e | s for e in edges for s in (0, sign)]
    return arrays(f"uint{info.bits}", SHAPE, st.integers(0, 2 * sign - 1) | st.sampled_from(edges))


def numbers(dtype):
    """Arrays of any numbers: subnormals, 0, -0, inf, nan and the ends of the range among them."""
    return bit_patterns(dtype).map(lambda bits: bits.view(jnp.dtype(dtype)))


@st.composite
def ordinary_numbers(draw, dtype, limit=MAX_EXPONENT, spread=6):
    """Normal numbers within a few octaves of each other, anywhere within 2**±limit."""
    info, raw = jnp.finfo(dtype), draw(bit_patterns(dtype)).astype(np.uint64)
    low, high = max(int(info.minexp), -limit), min(int(info.maxexp) - 1, limit)
    center = draw(st.integers(low + spread, high - spread))
    octave = (raw >> np.uint64(info.nmant)) % np.uint64(2 * spread + 1)
    biased = octave + np.uint64(center - spread + int(info.maxexp) - 1)
    kept = raw & np.uint64((1 << info.nmant) - 1 | 1 << info.bits - 1)
    bits = kept | biased << np.uint64(info.nmant)
    return bits.astype(f"uint{info.bits}").view(jnp.dtype(dtype))


def exponents(low=-MAX_EXPONENT, high=MAX_EXPONENT, shapes=SCALE_SHAPES):
    """Exponents of powers of two, of one of the shapes that scales have."""
    elements = st.integers(low, high) | st.sampled_from([low, 0, high])
    return st.sampled_from(shapes).flatmap(lambda shape: arrays(np.int64, shape, elements))


rows = arrays(bool, SHAPE[0], st.booleans())


def exact(values):
    """Values in float64, which holds those of every dtype."""
    return np.asarray(values).astype(np.float64)


def powers(exponent, dtype=np.float32):
    return np.ldexp(1.0, exponent).astype(dtype)


def assert_same(got, expected):
    """The same numbers, in whatever dtypes and up to broadcasting."""
    np.testing.assert_array_equal(*np.broadcast_arrays(exact(got), exact(expected)))


def assert_powers_of_two_or_zero(scale):
    assert np.all((exact(scale) == 0) | (np.frexp(exact(scale))[0] == 0.5))


def assert_moved(got, values, exponent, dtype):
    """`got` is `values * 2**exponent`, rounded once; what XLA flushes may be 0 instead."""
    wide, tiny = exact(values), float(jnp.finfo(dtype).tiny)
    product = np.ldexp(wide, exponent)
    expected, got = exact(product.astype(jnp.dtype(dtype))), exact(got)
    subnormal = (wide != 0) & ((np.abs(wide) < tiny) | (np.abs(product) < tiny))
    flushed = (got == 0) & subnormal & (dtype != "float16")
    assert_same(got[~flushed], expected[~flushed])


# Rounding down and splitting numbers.

jitted_round_down = jax.jit(pow2.round_down)


@pytest.mark.sampled(8)
@law(40)
def test_round_down_of_any_bits(dtype, draw):
    values, info = draw(numbers(dtype)), jnp.finfo(dtype)
    size, largest = np.abs(exact(values)), 2.0 ** min(MAX_EXPONENT, int(info.maxexp) - 1)
    power = np.minimum(np.ldexp(1.0, np.frexp(size)[1] - 1), largest)
    expected = np.where(size < float(info.tiny), 0, np.where(np.isfinite(size), power, largest))
    for function in (pow2.round_down, jitted_round_down):
        got = function(jnp.asarray(values))
        assert got.dtype == values.dtype
        assert_same(got, expected)


@law(25)
def test_constants_split_exactly_and_towards_one(dtype, draw):
    two, values = Fraction(2), draw(numbers(dtype)).ravel()
    ordinary = np.isfinite(exact(values)) & (values != 0)
    for value in values[ordinary]:
        size = Fraction(abs(float(value)))
        mantissa, exponent = pow2.split_constant(value)
        assert Fraction(mantissa) * two**exponent == Fraction(float(value))
        assert min(size, 1) <= two**exponent <= max(size, 1)
        assert abs(exponent) == MAX_EXPONENT or Fraction(1, 2) < abs(Fraction(mantissa)) < 2
        floor = pow2.floor_exponent(value)
        assert two**floor <= size < two ** (floor + 1)
        assert pow2.is_power_of_two(value) == (value > 0 and two**floor == size)
    assert not any(pow2.is_power_of_two(v) for v in values[~ordinary])


@pytest.mark.sampled(4)
@law(20, dtypes=DTYPES[:3])
def test_traced_numbers_split_exactly(dtype, draw):
    values = draw(numbers(dtype))
    data, scale = ScaleTable().split(jnp.asarray(values))
    power, wide = exact(scale.array), exact(values)
    flushed = (wide == 0) | (np.abs(wide) < 2.0**-MAX_EXPONENT)
    assert data.dtype == values.dtype
    assert_same(power == 0, flushed)
    assert_same((exact(data) * power)[~flushed], wide[~flushed])
    size = np.abs(wide)
    decay = (size >= 0.5) & (size < 1)
    assert np.all(power[decay] == 1)
    ratio = np.abs(exact(data))[~flushed & ~decay & (size < 2.0 ** (MAX_EXPONENT + 1))]
    assert np.all((ratio >= 1) & (ratio < 2))


# The algebra: scales as expressions, against integer exponents. Each atom is an array of many.


def expressions():
    atoms = st.tuples(st.just("atom"), st.integers(0, len(SCALE_SHAPES) - 1))
    static = st.tuples(st.just("static"), st.integers(-6, 6))

    def extend(children):
        return st.one_of(
            st.tuples(st.sampled_from(["mul", "div", "join", "meet"]), children, children),
            st.tuples(st.just("power"), children, st.integers(-2, 3)),
            st.tuples(st.sampled_from(["root", "rest"]), children, st.sampled_from(DEGREES)),
            st.tuples(st.just("settled"), children),
        )

    return st.recursive(atoms | static, extend, max_leaves=8)


# What the operations are on scales, on their exponents, and on a bound on everything on the way.
SYMBOLIC = dict(mul=operator.mul, div=operator.truediv, join=algebra.join, meet=algebra.meet)
SYMBOLIC |= dict(static=Scale, power=operator.pow, settled=Scale.settled)
SYMBOLIC |= dict(root=lambda s, degree: s.root(degree)[0], rest=lambda s, degree: s.root(degree)[1])
NUMERIC = dict(mul=operator.add, div=operator.sub, join=np.maximum, meet=np.minimum)
NUMERIC |= dict(static=int, power=operator.mul, settled=lambda e: e)
NUMERIC |= dict(root=operator.floordiv, rest=operator.mod)
BOUND = dict.fromkeys(("mul", "div", "join", "meet"), operator.add)
BOUND |= dict(static=abs, power=lambda b, power: b * max(1, abs(power)), settled=lambda b: b)
BOUND |= dict(root=lambda b, _: b, rest=lambda b, _: max(b, 2))


def evaluate(tree, atoms, operations):
    kind, *args = tree
    if kind == "atom":
        return atoms[args[0]]
    args = (evaluate(a, atoms, operations) if isinstance(a, tuple) else a for a in args)
    return operations[kind](*args)


def draw_exponents(draw, low=-8, high=8):
    return [draw(exponents(low, high, [shape])) for shape in SCALE_SHAPES]


def atoms_of(table, values):
    return [table.atom(jnp.asarray(powers(v, table.dtype))) for v in values]


@pytest.mark.sampled(16)
@law(60, dtypes=SCALE_DTYPES)
def test_expressions_have_the_exponents_of_integers(dtype, draw):
    tree, values = draw(expressions()), draw_exponents(draw)
    assume(evaluate(tree, [np.max(np.abs(v)) for v in values], BOUND) <= MAX_EXPONENT)

    def function(arrays):
        table = ScaleTable(dtype)
        return evaluate(tree, [table.atom(a) for a in arrays], SYMBOLIC).array

    function = jax.jit(function) if draw(st.integers(0, 7)) == 7 else function
    got = np.asarray(function([jnp.asarray(powers(v, dtype)) for v in values]))
    assert_same(got, powers(evaluate(tree, values, NUMERIC), np.float64))
    # What the algebra computes is a shared exponent of an MX block as it stands.
    assert_same(got.astype(E8M0), got)


@pytest.mark.sampled(16)
@law(20, dtypes=SCALE_DTYPES)
def test_joins_that_share_terms_and_factors(dtype, draw):
    values = draw_exponents(draw)
    scales = atoms_of(ScaleTable(dtype), values)
    picked = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(-2, 2))
    pairs = [
        (scales[i] * scales[j] * Scale(e), values[i] + values[j] + e)
        for i, j, e in draw(st.lists(picked, min_size=3, max_size=3))
    ]
    # One table, so that each join may find the ones before it.
    for shift in draw(st.lists(st.integers(-4, 4), min_size=3, max_size=3)):
        (a, x), (b, y), (c, z) = pairs
        joined, top = algebra.join(a * Scale(shift), b), np.maximum(x + shift, y)
        assert_same(joined.array, powers(top))
        assert_same((joined / a).array, powers(top - x))
        nested = algebra.join(joined, c * Scale(-shift), a * Scale(2 * shift))
        top = np.maximum(top, np.maximum(z - shift, x + 2 * shift))
        assert_same(nested.array, powers(top))
        assert_same(algebra.join(b * Scale(1), nested * Scale(1)).array, powers(top + 1))
        pairs = pairs[1:] + pairs[:1]


def check_roots(scale, value):
    for degree in DEGREES:
        root, rest = (exact(s.array) for s in scale.root(degree))
        assert_same(root**degree * rest, value)
        assert np.all((rest >= 1) & (rest < 2**degree))


@pytest.mark.sampled(16)
@law(20, dtypes=SCALE_DTYPES)
def test_algebra_at_the_ends_of_the_range(dtype, draw):
    values = draw_exponents(draw, -MAX_EXPONENT, MAX_EXPONENT)
    scales = atoms_of(ScaleTable(dtype), values)
    joined, top = algebra.join(*scales), functools.reduce(np.maximum, values)
    assert_same(joined.array, powers(top))
    assert_same(algebra.meet(*scales).array, powers(functools.reduce(np.minimum, values)))
    for scale, value in zip(scales, values, strict=True):
        assert_same((scale**-1).array, powers(-value))
        check_roots(scale, powers(value, np.float64))
        ratio, exponent = exact((scale / joined).array), value - top
        flushed = (exponent < -MAX_EXPONENT) & (dtype == "float32")
        assert_same(ratio, np.where(flushed, 0, powers(exponent, np.float64)))


@pytest.mark.sampled(4)
@law(20, dtypes=SCALE_DTYPES)
def test_many_factors_settle_within_the_range(dtype, draw):
    values, exponent = draw_exponents(draw, 0, MAX_EXPONENT), draw(st.integers(0, 9))
    values += draw_exponents(draw, 0, 9) + draw_exponents(draw, 0, 9)
    scales = atoms_of(ScaleTable(dtype), values)
    settled = (functools.reduce(Scale.__mul__, scales) * Scale(exponent)).settled()
    assert len(settled.factors) == 1 and settled.settled() == settled
    total = sum(values) + exponent
    within = settled.bounded()
    assert_same(within.array, powers(np.minimum(total, MAX_EXPONENT)))
    rest = np.maximum(total - MAX_EXPONENT, 0)
    known = rest <= MAX_EXPONENT
    assert_same(np.where(known, (settled / within).array, 1), powers(np.where(known, rest, 0)))


@pytest.mark.sampled(4)
@law(20, dtypes=SCALE_DTYPES)
def test_zero_is_any_scale(dtype, draw):
    x, y = (powers(draw(exponents(-20, 20)), np.float64) for _ in range(2))
    x, y = (np.where(draw(arrays(bool, v.shape, st.booleans())), 0, v) for v in (x, y))
    table = ScaleTable(dtype)
    a, b = (table.atom(jnp.asarray(v, dtype)) for v in (x, y))
    inverse = np.where(y == 0, 1, 1 / y)
    cases = [(a * b, x * y), (a / b, x * inverse), (b**-1, inverse), (b**-2, inverse**2)]
    cases += [(a**3, x**3), (b**0, 1), (a * ZERO, 0), (a / ZERO, x), (ZERO / b, 0)]
    cases += [
        (algebra.join(a, b), np.maximum(x, y)),
        (algebra.join(a, ZERO), x),
        (algebra.meet(ZERO, a), x),
    ]
    for scale, expected in cases:
        assert_same(scale.array, expected)
    check_roots(a, x)
    check_roots(a**6, x**6)
    joined = algebra.join(a, b)
    for scale, value in ((a, x), (b, y)):
        ratio = exact((scale / joined).array)
        assert np.all(np.isfinite(ratio))  # 0 / 0 meets data that is 0
        assert_same(ratio * exact(joined.array), value)


# From plain arrays to scaled ones and back.


@pytest.mark.sampled(4)
@law(25)
def test_a_power_of_two_moves_exactly(dtype, draw):
    values = draw(numbers(dtype))
    exponent = draw(exponents(shapes=((), (4, 1), (1, 8), (4,))))
    full = exponent[:, None] if exponent.ndim == 1 else exponent  # along the leading axis
    x = jsa.as_scaled_array(jnp.asarray(values), powers(exponent))
    assert x.dtype == values.dtype and x.scale.dtype == np.float32
    np.testing.assert_array_equal(x.scale, powers(exponent))
    assert_moved(x.data, values, -full, dtype)
    assert_moved(x.to_array(), x.data, full, dtype)
    assert_moved(np.asarray(x), x.data, full, dtype)


@pytest.mark.sampled(4)
@law(25)
def test_scaled_array_keeps_both_fields(dtype, draw):
    values, exponent = draw(numbers(dtype)), draw(exponents(shapes=[()]))
    for scale in (2.0 ** int(exponent), powers(exponent)):
        x = jsa.scaled_array(jnp.asarray(values), scale)
        assert x.is_static == (type(scale) is float) and x.scale == scale
        assert_moved(x.data, values, 0, dtype)
        assert_moved(jsa.asarray(x), x.data, exponent, dtype)
        assert_same(jsa.thaw_scales(x), x)
        frozen = jsa.freeze_scales(x)
        if dtype in ("float16", "float8_e4m3fn", "float8_e5m2") and frozen.scale != scale:
            # Moved down for room: exact, but for what is not to become 0.
            ratio = np.float32(frozen.scale / np.float32(scale))
            smallest = float(jnp.finfo(dtype).smallest_subnormal)
            got, want = np.float32(frozen.data) * ratio, np.float32(x.data)
            np.testing.assert_allclose(got, want, rtol=0, atol=smallest * ratio)
        else:
            assert_same(frozen, x)


@law(20)
def test_data_takes_the_rest_of_a_scale(dtype, draw):
    values, scale = draw(ordinary_numbers(dtype, 40)), draw(st.floats(2**-40, 2**40, width=32))
    power = 2.0 ** pow2.floor_exponent(scale)
    wide = np.float64 if dtype == "float64" else np.float32
    expected = (values.astype(wide) * wide(scale / power)).astype(values.dtype)
    for given_scale in (scale, np.float32(scale), np.full((4, 1), scale, np.float32)):
        x = jsa.scaled_array(values, given_scale)
        assert_same(x.scale, power)
        assert_same(x.data, expected)
    x = jsa.as_scaled_array(jnp.asarray(values), scale)  # of the same value, not times the scale
    assert_same(x.scale, power)
    assert_moved(x.data, values, -pow2.floor_exponent(scale), dtype)


jitted_convert = jax.jit(jsa.as_scaled_array, static_argnums=1, static_argnames="scale_dtype")


@pytest.mark.sampled(16)
@law(25)
def test_statistics_round_trip(dtype, draw):
    scale_dtype = draw(st.sampled_from(SCALE_DTYPES if dtype == "float64" else ["float32"]))
    values = draw(ordinary_numbers(dtype, MAX_EXPONENT if scale_dtype == "float32" else 1000))
    for stat, convert in itertools.product(("rms", "max"), (jsa.as_scaled_array, jitted_convert)):
        x = convert(jnp.asarray(values), stat, scale_dtype=scale_dtype)
        assert x.scale.dtype == scale_dtype
        assert_powers_of_two_or_zero(x.scale)
        for value in (exact(x.data) * exact(x.scale), x.to_array(), np.asarray(x)):
            assert_same(value, values)
        size = np.abs(exact(x.data))
        measured = size.max() if stat == "max" else np.sqrt(np.mean(size**2))
        # The statistic is rounded to the scale's dtype, and no scale is larger than 2**126.
        assert 1 - 2**-20 < measured
        assert measured < 2 + 2**-20 or exact(x.scale) == 2.0**MAX_EXPONENT


@pytest.mark.sampled(4)
@law(12)
def test_zeros_take_the_scale_zero(dtype, draw):
    values = draw(ordinary_numbers(dtype))
    values[draw(rows)] = draw(st.sampled_from([0.0, -0.0]))
    x = jsa.as_scaled_array(jnp.asarray(values), "max", axis=0)
    assert_same(x.scale[:, 0] == 0, np.all(values == 0, 1))
    assert_same(x.to_array(), values)
    for scale in (None, "rms", "max", 0.0):
        x = jsa.as_scaled_array(jnp.asarray(values * 0), scale)
        assert float(x.scale) == 0 and not np.any(exact(x.data))


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_are_flushed_where_xla_flushes_them(dtype):
    if jax.default_backend() != "cpu":
        pytest.skip("other backends flush less")
    with jax.enable_x64(dtype == "float64"):
        info, kept = jnp.finfo(dtype), dtype == "float16"
        below = np.array([float(info.smallest_subnormal), float(info.tiny) / 2])
        values = jnp.asarray(below.astype(jnp.dtype(dtype)))
        assert_same(rescale_data(values, jnp.float32(2)), 2 * below * kept)
        assert_same(-values, -below)
        assert_same(jsa.as_scaled_array(values), below * kept)


# Powers of two moved into data, and between data and scale inside `scalify`.


@pytest.mark.sampled(8)
@law(20)
def test_multiply_rounds_once(dtype, draw):
    values, exponent = draw(numbers(dtype)), draw(exponents())
    data, power = jnp.asarray(values), jnp.asarray(powers(exponent))
    factor = ScaleTable().atom(power)
    as_it_is = ("float64", "bfloat16")  # a power of two is exact in bfloat16
    assert multiply(data, factor).dtype == (dtype if dtype in as_it_is else "float32")
    assert multiply(data, ONE) is data
    results = [multiply(data, factor, data.dtype), rescale_data(data, power)]
    if not exponent.ndim:
        results.append(multiply(data, Scale(int(exponent)), data.dtype))
    for got in results:
        assert got.dtype == data.dtype
        assert_moved(got, values, exponent, dtype)


@pytest.mark.sampled(4)
@law(15, dtypes=DTYPES + FP8)
def test_casts_to_fp8_saturate(dtype, draw):
    values = draw(numbers(dtype))
    exponent = draw(st.integers(-40, 40).filter(bool))  # a factor 1 casts nothing
    data, power = jnp.asarray(values), jnp.float32(2.0**exponent)
    for narrow in FP8:
        largest = float(jnp.finfo(narrow).max)
        clipped = np.clip(np.ldexp(exact(values), exponent), -largest, largest)
        expected = clipped.astype(np.float32).astype(jnp.dtype(narrow))
        for factor in (Scale(exponent), ScaleTable().atom(power)):
            assert_same(multiply(data, factor, narrow), expected)
        if narrow == dtype:
            assert_same(rescale_data(data, power), expected)


@functools.partial(jax.jit, static_argnums=0)
def scaled_call(function, *args):
    return jsa.scalify(function)(*args)


@pytest.mark.sampled(16)
@law(20)
def test_scales_that_are_asked_for_keep_the_value(dtype, draw):
    values = jnp.asarray(draw(ordinary_numbers(dtype, 60)))
    before, after = draw(exponents(-6, 6, [()])), draw(exponents(-6, 6))
    asked = powers(after) * draw(st.floats(1, 2, width=32, exclude_max=True))
    asked = jnp.asarray(asked)  # is rounded down
    for scale, call in (
        (powers(before), scaled_call),
        (2.0 ** int(before), scaled_call.__wrapped__),
    ):
        x = ScaledArray(values, scale)
        for function, extra in ((jsa.set_scaling, 0), (jsa.rebalance_scale, before)):
            y = call(function, x, asked)
            assert y.dtype == values.dtype
            assert_same(y.scale, powers(after + extra))
            assert_moved(y.data, values, before - after - extra, dtype)


RESCALES = {
    stat: functools.partial(jsa.dynamic_rescale, stat=stat, target=target)
    for stat, target in (("rms", 1.0), ("max", 8.0), ("l1", 0.25))
}


@pytest.mark.sampled(16)
@law(15)
def test_dynamic_rescale_keeps_the_value(dtype, draw):
    values = draw(ordinary_numbers(dtype, 50, spread=4))
    values[draw(rows)] = 0
    before = draw(exponents(-40, 40, [(), (4, 1)]))
    axis = 1 if before.ndim else None
    some = np.any(values, axis)
    for stat, rescale in RESCALES.items():
        y = scaled_call(rescale, ScaledArray(values, powers(before)))
        assert y.dtype == values.dtype
        assert_powers_of_two_or_zero(y.scale)
        assert_same(exact(y.data) * exact(y.scale), exact(values) * powers(before, np.float64))
        assert_same(exact(y.scale).reshape(some.shape) != 0, some)
        size = np.abs(exact(y.data))
        measured = {"rms": np.sqrt(np.mean(size**2, axis)), "l1": np.mean(size, axis)}
        unit = measured.get(stat, np.max(size, axis)) / rescale.keywords["target"]
        assert np.all((unit[some] > 1 - 2**-20) & (unit[some] < 2 + 2**-20))


@pytest.mark.sampled(4)
@law(8)
def test_dynamic_rescale_leaves_what_is_not_finite_alone(dtype, draw):
    values = draw(ordinary_numbers(dtype))
    values[draw(st.integers(0, 3)), 0] = draw(st.sampled_from([np.inf, -np.inf, np.nan]))
    for rescale in RESCALES.values():
        y = scaled_call(rescale, ScaledArray(values, np.float32(4)))
        assert_same(y.data, values)
        assert_same(y.scale, 4)


# E8M0, the shared scale of an MX block: 2**-127 to 2**127 and nan; no 0, no sign.


@jax.jit
def through_e8m0(scale):
    return scale.astype(jnp.float8_e8m0fnu).astype(scale.dtype)


def test_every_scale_is_an_e8m0_number():
    every, numbers_of_e8m0 = np.arange(256, dtype=np.uint8), np.ldexp(1.0, np.arange(-127, 128))
    assert_same(every.view(E8M0), [*numbers_of_e8m0, np.nan])
    scales = numbers_of_e8m0.astype(np.float32)
    assert_same(scales.astype(E8M0).view(np.uint8), every[:-1])
    ours = scales[1:-1]
    assert_same(ours[[0, -1]], powers(np.array([-MAX_EXPONENT, MAX_EXPONENT])))
    assert_same(jitted_round_down(ours), ours)
    assert_same(through_e8m0(ours), ours)
    # The ends of E8M0 are no scales of ours: one is subnormal in float32, the other's inverse is.
    assert_same(jitted_round_down(scales[[0, -1]]), [0, 2.0**MAX_EXPONENT])
    assert_same(np.float32(0).astype(E8M0), np.nan)
    assert_same(through_e8m0(np.float32(0)), np.nan)


@pytest.mark.sampled(8)
@law(15)
def test_scaled_arrays_are_rebuilt_from_e8m0(dtype, draw):
    values = draw(ordinary_numbers(dtype, 60))
    values[draw(rows)] = 0
    axis = draw(st.sampled_from([None, 0, 1, (0, 1)]))
    x = jsa.as_scaled_array(jnp.asarray(values), "max", axis=axis)
    scale = np.asarray(x.scale)
    stored = np.where(scale == 0, np.float32(1), scale).astype(E8M0)  # any scale will do for zeros
    for restored in (stored.astype(np.float32), jnp.asarray(stored).astype(jnp.float32)):
        assert_same(np.where(scale == 0, 0, restored), scale)
        y = ScaledArray(x.data, jnp.asarray(restored))
        assert_same(y.to_array(), values)
        doubled = scaled_call(jnp.add, y, y)
        assert_same(exact(doubled.data) * exact(doubled.scale), 2 * exact(values))
