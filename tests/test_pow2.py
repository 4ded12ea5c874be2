"""Exact power-of-two arithmetic against Python's integers and fractions."""

import fractions
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_scalify import pow2
from jax_scalify.pow2 import ONE, ZERO, Scale, ScaleTable

settings.register_profile("package", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("package")

exponents = st.integers(-20, 20)
round_down = jax.jit(pow2.round_down)


@functools.cache
def _padded(dtype):
    return np.zeros(64, dtype)


def rounded(values, dtype=np.float32):
    """`round_down` of up to 64 numbers, by one compiled function."""
    padded = _padded(dtype).copy()
    padded[: len(values)] = values
    return np.asarray(round_down(padded))[: len(values)]


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_round_down_is_the_largest_power_below(value):
    power = float(rounded([value])[0])
    assert pow2.is_power_of_two(power)
    assert power <= value < 2 * power or (power == 2.0**126 and value >= 2.0**127)


def test_round_down_at_the_edges():
    largest = 2.0**126
    values = [0, -0.0, 1e-45, 2.0**-127, 2.0**-126, -6, np.inf, -np.inf, np.nan, 3.4e38]
    expected = [0, 0, 0, 0, 2.0**-126, 4, largest, largest, largest, largest]
    np.testing.assert_array_equal(rounded(values), np.array(expected, np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_round_down_of_every_16_bit_number(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    normal = np.isfinite(wide) & (np.abs(wide) >= float(jnp.finfo(dtype).tiny))
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = 2.0 ** np.floor(np.log2(np.abs(wide)))
    expected = np.minimum(expected, 2.0**126)
    got = np.asarray(pow2.round_down(jnp.asarray(values))).astype(np.float64)
    np.testing.assert_array_equal(got[normal], expected[normal])
    subnormal = np.isfinite(wide) & ~normal
    np.testing.assert_array_equal(got[subnormal], 0)


def test_round_down_in_float64():
    with jax.enable_x64(True):
        got = pow2.round_down(jnp.array([3e-200, 5.0, 0.0], jnp.float64))
        np.testing.assert_array_equal(got, [2.0 ** math.floor(math.log2(3e-200)), 4, 0])


finite = st.floats(allow_nan=False, allow_infinity=False).filter(bool)


@given(finite)
def test_split_constant_is_exact_and_lies_towards_one(value):
    mantissa, exponent = pow2.split_constant(value)
    if abs(exponent) < 126 and abs(value) > 1e-300:
        assert fractions.Fraction(mantissa) * fractions.Fraction(2) ** exponent == value
        assert (abs(mantissa) <= 1) if abs(value) < 1 else (1 <= abs(mantissa) < 2)
        assert abs(mantissa) >= 0.5
    power = 2.0**exponent
    assert min(1, abs(value)) <= power <= max(1, abs(value)) or abs(exponent) == 126


@pytest.mark.parametrize(
    ("value", "mantissa", "exponent"),
    [(0.995, 0.995, 0), (0.3, 0.6, -1), (3.0, 1.5, 1), (1.0, 1.0, 0), (-0.5, -1.0, -1), (8, 1, 3)],
)
def test_split_constant_examples(value, mantissa, exponent):
    assert pow2.split_constant(value) == (mantissa, exponent)


@given(st.integers(1, 10**12))
def test_sqrt_exponent(count):
    exponent = pow2.sqrt_exponent(count)
    assert 4**exponent <= count < 4 ** (exponent + 1)


@given(finite)
def test_floor_exponent(value):
    exponent = pow2.floor_exponent(value)
    size = fractions.Fraction(abs(value))
    assert fractions.Fraction(2) ** exponent <= size < fractions.Fraction(2) ** (exponent + 1)


@pytest.mark.parametrize("value", [0, -1.0, 3.0, math.inf, math.nan])
def test_what_is_no_power_of_two(value):
    assert not pow2.is_power_of_two(value)
    if value != 0:
        with pytest.raises(ValueError, match="`scale` must be a power of two"):
            Scale.of(value)


# A scale and what it is worth: expressions over three atoms, evaluated both ways.

ATOMS = 3


def expressions():
    leaves = st.one_of(
        st.tuples(st.just("atom"), st.integers(0, ATOMS - 1)),
        st.tuples(st.just("static"), st.integers(-6, 6)),
    )

    def extend(children):
        return st.one_of(
            st.tuples(st.sampled_from(["mul", "div", "join", "meet"]), children, children),
            st.tuples(st.just("power"), children, st.integers(-2, 2)),
        )

    return st.recursive(leaves, extend, max_leaves=6)


def build(tree, atoms):
    kind, *rest = tree
    if kind == "atom":
        return atoms[rest[0]]
    if kind == "static":
        return Scale(rest[0])
    if kind == "power":
        return build(rest[0], atoms) ** rest[1]
    lhs, rhs = (build(t, atoms) for t in rest)
    if kind == "mul":
        return lhs * rhs
    if kind == "div":
        return lhs / rhs
    return (pow2.join if kind == "join" else pow2.meet)(lhs, rhs)


def exponent_of(tree, values):
    kind, *rest = tree
    if kind == "atom":
        return values[rest[0]]
    if kind == "static":
        return rest[0]
    if kind == "power":
        return exponent_of(rest[0], values) * rest[1]
    lhs, rhs = (exponent_of(t, values) for t in rest)
    return {"mul": lhs + rhs, "div": lhs - rhs, "join": max(lhs, rhs), "meet": min(lhs, rhs)}[kind]


@given(expressions(), st.lists(st.integers(-6, 6), min_size=ATOMS, max_size=ATOMS))
def test_the_algebra_of_scales(tree, values):
    expected = exponent_of(tree, values)
    if abs(expected) > 100:
        return
    table = ScaleTable()
    arrays = [jnp.float32(2.0**v) for v in values]
    scale = build(tree, [table.atom(a) for a in arrays])
    assert float(np.asarray(scale.array)) == 2.0**expected


@given(st.integers(-100, 100), st.sampled_from([2, 3]))
def test_roots(exponent, degree):
    table = ScaleTable()
    for scale in (Scale(exponent), table.atom(jnp.float32(2.0**exponent))):
        root, rest = scale.root(degree)
        root, rest = float(np.asarray(root.array)), float(np.asarray(rest.array))
        assert pow2.is_power_of_two(root) and rest in (1, 2, 4)[:degree]
        assert root**degree * rest == 2.0**exponent


def test_a_root_of_an_even_power_is_symbolic():
    table = ScaleTable()
    a = table.atom(jnp.float32(8))
    root, rest = (a**2 * Scale(4)).root(2)
    assert root == a * Scale(2) and rest == ONE


def test_identities_are_found_while_tracing():
    table = ScaleTable()
    a, b, c = (table.atom(jnp.float32(2.0**e)) for e in (1, 5, -3))
    assert a / a == ONE and a * b == b * a and (a * b) / b == a
    assert pow2.join(a, a) == a
    assert pow2.join(a, a * Scale(-3)) == a
    assert pow2.join(a, ZERO) == a and pow2.join(ZERO, ZERO) == ZERO
    joined = pow2.join(a, b)
    assert pow2.join(b, a) == joined and pow2.join(a, b, a) == joined
    assert pow2.join(joined, a) == joined and pow2.join(joined, b * Scale(-1)) == joined
    assert pow2.join(pow2.join(joined, c), a) == pow2.join(pow2.join(c, b), a)
    assert pow2.join(a * c, b * c) == joined * c
    assert pow2.join(a * Scale(2), b * Scale(2)) == joined * Scale(2)
    assert pow2.alignment(joined, joined) == ONE


def test_the_same_array_is_the_same_atom():
    table = ScaleTable()
    array = jnp.float32(2)
    assert table.atom(array) == table.atom(array)
    assert table.atom(jnp.float32(2)) != table.atom(array)


def test_zero_is_any_scale():
    table = ScaleTable()
    zero, a = table.atom(jnp.float32(0)), table.atom(jnp.float32(8))
    assert float((a * zero).array) == 0 and float((a / zero).array) == 8
    assert float(pow2.join(a, zero).array) == 8
    assert float((zero**-1).array) == 1
    assert ZERO**-1 == ONE and ZERO * a == ZERO and a / ZERO == a and ZERO**0 == ONE
    for scale in (ZERO, zero):
        root, rest = scale.root(2)
        assert float(np.asarray(root.array)) == 0 and float(np.asarray(rest.array)) in (1, 2)
    ratio = pow2.alignment(zero, pow2.join(zero, table.atom(jnp.float32(0))))
    assert np.isfinite(float(ratio.array))


@pytest.mark.parametrize("exponent", [-126, -100, 0, 100, 126])
def test_extreme_scales_are_inverted_exactly(exponent):
    table = ScaleTable()
    a = table.atom(jnp.float32(2.0**exponent))
    assert float((a**-1).array) == 2.0**-exponent


@given(st.floats(width=32))
def test_split_of_traced_numbers_keeps_their_value(value):
    table = ScaleTable()
    data, scale = table.split(jnp.float32(value))
    power = float(scale.array)
    got = np.float64(float(data)) * power
    if math.isnan(value):
        assert math.isnan(got)
    elif abs(value) < 2.0**-126:
        assert abs(got) <= 2.0**-126
    else:
        assert got == value
        assert math.isinf(value) or 1 <= abs(float(data)) < 4


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_product_stays_in_range_whatever_its_order(order):
    table = ScaleTable()
    atoms = [table.atom(jnp.float32(2.0**70)) for _ in range(3)]
    x, y, z = (atoms[i] for i in order)
    assert float((x * y / z).array) == 2.0**70


def test_scales_leave_neither_end_of_the_range():
    table = ScaleTable()
    a = table.atom(jnp.float32(2.0**100))
    assert float(((a * a) ** -1).array) == 0.0  # the value underflows, as it does in float32
    large = pow2.join(table.atom(jnp.float32(2.0**126)) * Scale(1), table.atom(jnp.float32(1)))
    assert float((large**-1).array) > 0


def test_a_monomial_of_many_factors_becomes_one_atom():
    table = ScaleTable()
    atoms = [table.atom(jnp.float32(2.0**e)) for e in (3, -5, 2, 9)]
    few, many = atoms[0] * atoms[1] * atoms[2], atoms[0] / atoms[1] * atoms[2] * atoms[3]
    assert few.settled() == few
    settled = many.settled()
    assert len(settled.factors) == 1 and float(settled.array) == 2.0**19
    assert many.settled() == settled
    large = [table.atom(jnp.float32(2.0**60)) for _ in range(4)]
    product = large[0] * large[1] * large[2] * large[3]
    assert float(product.settled().array) == 2.0**126
