"""Exact power-of-two arithmetic against Python's integers and fractions."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base import pow2
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import ONE, ZERO, Scale
from jax_scalify.scales.table import ScaleTable

settings.register_profile("package", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("package")

exponents = st.integers(-20, 20)


@pytest.mark.parametrize(
    ("value", "mantissa", "exponent"),
    [(0.995, 0.995, 0), (0.3, 0.6, -1), (3.0, 1.5, 1), (1.0, 1.0, 0), (-0.5, -1.0, -1), (8, 1, 3)],
)
def test_split_constant_examples(value, mantissa, exponent):
    assert pow2.split_constant(value) == (mantissa, exponent)


@pytest.mark.parametrize("value", [0, -1.0, 3.0, math.inf, math.nan])
def test_what_is_no_power_of_two(value):
    assert not pow2.is_power_of_two(value)
    if value != 0:
        with pytest.raises(ValueError, match="`scale` must be a power of two"):
            Scale.of(value)


# A scale and what it is worth: expressions over three atoms, evaluated both ways.


def test_a_root_of_an_even_power_is_symbolic():
    table = ScaleTable()
    a = table.atom(jnp.float32(8))
    root, rest = (a**2 * Scale(4)).root(2)
    assert root == a * Scale(2) and rest == ONE


def test_identities_are_found_while_tracing():
    table = ScaleTable()
    a, b, c = (table.atom(jnp.float32(2.0**e)) for e in (1, 5, -3))
    assert a / a == ONE and a * b == b * a and (a * b) / b == a
    assert algebra.join(a, a) == a
    assert algebra.join(a, a * Scale(-3)) == a
    assert algebra.join(a, ZERO) == a and algebra.join(ZERO, ZERO) == ZERO
    joined = algebra.join(a, b)
    assert algebra.join(b, a) == joined and algebra.join(a, b, a) == joined
    assert algebra.join(joined, a) == joined and algebra.join(joined, b * Scale(-1)) == joined
    assert algebra.join(algebra.join(joined, c), a) == algebra.join(algebra.join(c, b), a)
    assert algebra.join(a * c, b * c) == joined * c
    assert algebra.join(a * Scale(2), b * Scale(2)) == joined * Scale(2)
    assert joined / joined == ONE


def test_the_same_array_is_the_same_atom():
    table = ScaleTable()
    array = jnp.float32(2)
    assert table.atom(array) == table.atom(array)
    assert table.atom(jnp.float32(2)) != table.atom(array)


def test_zero_is_any_scale():
    table = ScaleTable()
    zero, a = table.atom(jnp.float32(0)), table.atom(jnp.float32(8))
    assert float((a * zero).array) == 0 and float((a / zero).array) == 8
    assert float(algebra.join(a, zero).array) == 8
    assert float((zero**-1).array) == 1
    assert ZERO**-1 == ONE and ZERO * a == ZERO and a / ZERO == a and ZERO**0 == ONE
    for scale in (ZERO, zero):
        root, rest = scale.root(2)
        assert float(np.asarray(root.array)) == 0 and float(np.asarray(rest.array)) in (1, 2)
    ratio = zero / algebra.join(zero, table.atom(jnp.float32(0)))
    assert np.isfinite(float(ratio.array))


@pytest.mark.parametrize("exponent", [-126, -100, 0, 100, 126])
def test_extreme_scales_are_inverted_exactly(exponent):
    table = ScaleTable()
    a = table.atom(jnp.float32(2.0**exponent))
    assert float((a**-1).array) == 2.0**-exponent


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
    large = algebra.join(table.atom(jnp.float32(2.0**126)) * Scale(1), table.atom(jnp.float32(1)))
    assert float((large**-1).array) > 0


def test_a_monomial_of_many_factors_becomes_one_atom():
    table = ScaleTable()
    atoms = [table.atom(jnp.float32(2.0**e)) for e in (3, -5, 2, 9, 1, -1, 4, 6, -7)]
    few, many = functools.reduce(Scale.__mul__, atoms[:8]), functools.reduce(Scale.__mul__, atoms)
    assert few.settled() == few
    settled = many.settled()
    assert len(settled.factors) == 1 and float(settled.array) == 2.0**12
    assert many.settled() == settled
    large = [table.atom(jnp.float32(2.0**20)) for _ in range(12)]
    product = functools.reduce(Scale.__mul__, large).settled()
    within = product.bounded()
    assert [float(s.array) for s in (within, product / within)] == [2.0**126, 2.0**114]


def test_a_join_with_a_square_is_clamped():
    one = jnp.ones(2)
    large, small = ScaledArray(one, jnp.float32(2.0**100)), ScaledArray(one, jnp.float32(1))
    out = jsa.scalify(lambda x, y: x * x + y)(large, small)
    assert np.all(np.asarray(out) > 0)


def test_a_static_scale_leaves_within_the_range():
    x = ScaledArray(jnp.full(2, 2.0**-40), 2.0**80)
    out = jsa.scalify(lambda x: x * x)(x)
    assert out.scale <= 2.0**126
    np.testing.assert_array_equal(np.asarray(out, np.float64), 2.0**80)


def test_a_factor_that_is_traced_moves_the_data_no_faster_than_the_value():
    """`w * (1 - lr)`: split to the power of two below, the data doubled at every step."""
    step = jax.jit(jsa.scalify(lambda w, lr: w * (1 - lr)))
    w, exact = jsa.as_scaled_array(jnp.full(4, 1.5, jnp.float16), "rms"), np.float64(1.5)
    for _ in range(100):
        w, exact = step(w, jnp.float16(2.0**-6)), exact * (1 - 2.0**-6)
    np.testing.assert_allclose(np.asarray(w, np.float64), exact, rtol=2e-2)
    assert 2.0**-4 < float(jnp.max(w.data)) < 4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exponents_of_arrays_and_back(dtype):
    limit = min(126, jnp.finfo(dtype).maxexp - 1)
    exponents = np.arange(max(-126, int(jnp.finfo(dtype).minexp)), limit + 1, dtype=np.int32)
    powers = jnp.asarray(np.ldexp(1.0, exponents).astype(jnp.dtype(dtype)))
    np.testing.assert_array_equal(pow2.exponent(powers), exponents)
    np.testing.assert_array_equal(pow2.power(exponents, jnp.dtype(dtype)), powers)
    assert int(pow2.exponent(jnp.zeros((), dtype))) < exponents[0]
    if dtype != "float16":  # scales are of float32's range
        beyond = pow2.power(jnp.asarray([-(2**30), 127, 2**30]), jnp.dtype(dtype))
        np.testing.assert_array_equal(beyond.astype(float), [2.0**-126, 2.0**126, 2.0**126])
