"""The statistics that rescales take: right for every finite input, read once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scalify.base.statistics import statistic

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
STATS = ["rms", "l2", "l1", "max"]
RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=(4, 32))


def reference(data, stat, axis=None):
    size = np.abs(np.asarray(data).astype(np.float64))
    if stat == "max":
        return np.max(size, axis, keepdims=axis is not None)
    power = {"l1": 1}.get(stat, 2)
    return np.mean(size**power, axis, keepdims=axis is not None) ** (1 / power)


def sizes(dtype):
    """From the smallest numbers that XLA does not flush to the largest."""
    finfo = jnp.finfo(dtype)
    smallest = finfo.tiny if finfo.maxexp == 128 else finfo.smallest_subnormal
    low, high = int(np.log2(float(smallest))), finfo.maxexp - 3
    return [*np.linspace(low + 4, high, 9, dtype=int), low, finfo.maxexp]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stat", STATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_over_the_whole_range(dtype, stat):
    largest = float(jnp.finfo(dtype).max)
    for exponent in sizes(dtype):
        values = np.clip(np.ldexp(NOISE, exponent), -largest, largest)
        tiny = float(jnp.finfo(dtype).tiny)
        if jnp.finfo(dtype).maxexp == 128:  # XLA flushes subnormal float32
            values = np.where(np.abs(values) < tiny, 0, values)
        data = jnp.asarray(values.astype(jnp.dtype(dtype)))
        for axis in (None, (0,), (1,), (0, 1)):
            want = reference(data, stat, axis)
            if jnp.finfo(dtype).maxexp == 128:
                want = np.where(want > 0, np.maximum(want, tiny), want)
            got = statistic(data, stat, axis)
            assert got.dtype == jnp.float32 and got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=2e-6)


@pytest.mark.parametrize("stat", STATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_beside_small(dtype, stat):
    for low, high in ((-120, 120), (-120, -60), (-62, -58), (60, 126), (-126, 0)):
        for count in (1, 127):
            values = np.ldexp(np.ones(128), low)
            values[:count] = np.ldexp(1.5, high)
            data = jnp.asarray(values.astype(jnp.dtype(dtype)))
            np.testing.assert_allclose(statistic(data, stat), reference(data, stat), rtol=2e-6)


@pytest.mark.parametrize("stat", STATS)
def test_one_row_out_of_range_leaves_the_others_right(stat):
    data = jnp.asarray(np.ldexp(NOISE, [[-100], [0], [100], [-70]]), jnp.float32)
    got = statistic(data, stat, (1,))
    np.testing.assert_allclose(got, reference(data, stat, 1), rtol=2e-6)
    mapped = jax.vmap(lambda row: statistic(row, stat))(data)
    np.testing.assert_array_equal(mapped, got[:, 0])


@pytest.mark.parametrize("stat", STATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_subnormal_numbers_of_float32_may_be_flushed(dtype, stat):
    """XLA flushes them on the CPU: they count as 0, or as what they are, beside any number."""
    tiny = np.ldexp(np.ones(8), -130).astype(jnp.dtype(dtype))
    got = float(statistic(jnp.asarray(tiny), stat))
    assert got == 0 or got == pytest.approx(2.0**-130, rel=1e-5)
    one = np.ones_like(tiny)
    got = float(statistic(jnp.asarray(np.concatenate([tiny, one])), stat))
    assert got == pytest.approx(reference(np.concatenate([0 * one, one]), stat), rel=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stat", STATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_empty_and_what_is_not_finite(dtype, stat):
    assert float(statistic(jnp.zeros((3, 2), dtype), stat)) == 0
    assert float(statistic(jnp.zeros((0, 2), dtype), stat)) == 0
    assert statistic(jnp.zeros((0, 2), dtype), stat, (0,)).shape == (1, 2)
    assert float(statistic(jnp.ones((), dtype), stat)) == 1
    for bad in (np.inf, -np.inf, np.nan):
        data = jnp.asarray(np.array([1, bad, 0]).astype(jnp.dtype(dtype)))
        assert not np.isfinite(float(statistic(data, stat)))


@pytest.mark.parametrize("stat", STATS)
def test_float64(stat):
    with jax.enable_x64(True):
        for exponent in (-1000, -600, -126, 0, 126, 600, 1020):
            values = np.ldexp(NOISE, exponent)
            got = statistic(jnp.asarray(values), stat, (1,))
            want = np.ldexp(reference(NOISE, stat, 1), exponent)
            np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("stat", STATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_the_largest_number_alone(dtype, stat):
    largest = jnp.finfo(dtype).max
    got = statistic(jnp.full(1000, largest), stat)
    np.testing.assert_allclose(got, float(largest), rtol=1e-6)


def test_complex():
    data = jnp.asarray([3 + 4j, 0], jnp.complex64)
    for factor in (1.0, 2.0**100, 2.0**-100):
        for stat in STATS:
            want = reference(np.abs(np.asarray(data * factor)), stat)
            np.testing.assert_allclose(statistic(data * factor, stat), want, rtol=1e-6)


def test_is_a_constant_to_derivatives():
    grad = jax.grad(lambda x: statistic(x, "rms") * jnp.sum(x))(jnp.ones(3))
    np.testing.assert_array_equal(grad, np.ones(3))


@pytest.mark.parametrize("stat", ["rms", "l1", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reads_the_data_once(dtype, stat):
    """One kernel reads the operand; in a wide dtype, another only in the branch for overflows."""
    program = statistic.lower(jnp.ones(4096, dtype), stat).compile().as_text()
    entry = program[program.index("ENTRY") :]
    (operand,) = re.findall(r"(%\S+) = \S+ parameter\(0\)", entry)
    readers = [
        line for line in entry.splitlines()[1:] if re.search(rf"\({operand}\b|, {operand}\b", line)
    ]
    assert len([r for r in readers if " tuple(" not in r and " conditional(" not in r]) == 1
    assert ("conditional" in entry) == (dtype != "float16" and stat != "max")
