"""Block formats against a reference that is written from their specifications."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.blocks import rounding
from jax_scalify.blocks.formats import NAMES, as_format
from tests import block_values as reference


def forms():
    """Each format with each rule for its scales."""
    for name in NAMES:
        for rule in ("nearest",) if name == "nvfp4" else ("up", "floor"):
            yield jsa.BlockFormat(name, scale_rounding=rule)


def rounded(x, form, bits=None):
    """Elements `(blocks, n)`, scales `(blocks, 1)` and values of blocks."""

    @jax.jit
    def function(x):
        split = rounding.split_into_blocks(x, (1, form.block_size))
        own = None if bits is None else bits.reshape(split.shape)
        if form.rounding == "stochastic" and bits is None:
            own = rounding.hashed_bits(split)
        elements, codes = rounding.round_blocks(split, form, own)
        values = rounding.times_scales(elements, codes, form)
        return elements[:, 0, 0], codes[:, 0, 0], rounding.join_blocks(values, x.shape)

    elements, codes, values = map(np.asarray, function(jnp.asarray(x, jnp.float32)))
    return elements, codes.view(form.scale_dtype).astype(np.float64), values


def blocks_of(form, rng):
    """Blocks with all exponents of float32, ties of elements and of scales, limits and zeros."""
    n = form.block_size
    sizes = np.exp2(rng.integers(-118, 118, (300, 1)).astype(np.float64))
    blocks = [rng.normal(size=(300, n)) * sizes, rng.standard_cauchy(size=(300, n))]
    grid = np.arange(256, dtype=np.uint8).view(reference.E4M3).astype(np.float64)
    grid = np.sort(grid[np.isfinite(grid)])
    ties = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    blocks += [rng.choice(ties, (20, n)) * 2.0**k for k in range(-20, 20)]
    exact = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0, 0.5, 1, 1.5, 2, 3, 4, -6])
    blocks += [np.resize(exact, n) * grid[:, None], np.full((1, n), 6) * ties[:, None]]
    blocks += [np.zeros((1, n)), np.full((1, n), 3.4e38), np.eye(n) * 1e-30, np.eye(n) * 2.0**-126]
    x = np.float32(np.concatenate(blocks))
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)  # subnormal numbers count as 0


@functools.cache
def results(form):
    """All blocks of `blocks_of`, before them special ones, and what becomes of them."""
    special = np.ones((5, form.block_size), np.float32)
    special[0, 1], special[1, 1] = np.nan, -np.inf
    special[2] = -0.0
    special[3] = 0
    special[3, 0] = np.nextafter(np.float32(2), np.float32(0))
    x = np.concatenate([special, blocks_of(form, np.random.default_rng(0))])
    return x, *rounded(x, form)


def test_formats_are_those_of_their_specifications():
    for form in forms():
        x, elements, scales, values = (part[5:] for part in results(form))
        want, want_scales = reference.quantised(x, form)
        np.testing.assert_array_equal(scales, want_scales, err_msg=str(form))
        np.testing.assert_array_equal(elements, want, err_msg=str(form))
        np.testing.assert_array_equal(elements.astype(form.dtype).astype(np.float32), elements)
        whole = want * want_scales
        whole[np.abs(whole) < 2.0**-126] = 0  # subnormal in float32
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(values, np.float32(whole))


def test_nan_stays_nan_infinities_are_seen_and_zeros_keep_their_sign():
    for form in forms():
        _, elements, _, values = results(form)
        spread = not form.is_fp8  # no element of 4 bits is nan: its block is
        assert np.isnan(values[0]).tolist() == [spread or i == 1 for i in range(form.block_size)]
        if form.is_mx:  # the largest scale: one is infinite, the others are nothing beside it
            assert values[1, 1] == -np.inf and np.abs(np.delete(values[1], 1)).max() < 1
        else:
            assert np.isnan(values[1]).all()  # E4M3 has no scale that would show one
        assert np.signbit(elements[2]).all() and np.signbit(values[2]).all()


def test_rounding_up_saturates_nothing_and_the_floor_does():
    for form in forms():
        value = results(form)[3][3, 0]
        cut = {"up": 0, "floor": 1 / 8 if form.is_fp8 else 1 / 4, "nearest": 0.04}
        assert abs(value - 2) <= 2 * cut[form.scale_rounding] + 1e-6, form
        if form.scale_rounding == "floor":
            assert value == (1.75 if form.is_fp8 else 1.5)


def test_the_scale_of_all_is_the_smallest_power_of_two_in_range():
    sizes = (0, 1e-30, 0.1, 2688, 2689, 1.5e38)
    x = jnp.float32([[n, -n / 3, np.nan, np.inf] for n in sizes])
    exponents = jax.jit(lambda x: rounding.tensor_exponent(x, (1,)))(x)
    for largest, exponent in zip(sizes, exponents[:, 0].tolist(), strict=True):
        power = 2.0**exponent
        assert exponent == 0 if largest == 0 else largest <= 2688 * power < 2 * largest * 1.0001


def test_stochastic_rounding_is_unbiased_and_between_neighbours():
    key = jax.random.key(0)
    for name in ("mxfp8", "nvfp4"):
        form = jsa.BlockFormat(name, rounding="stochastic")
        row = np.float32(np.random.default_rng(1).uniform(-1, 1, form.block_size))
        row[0] = 1
        x = np.broadcast_to(row, (4000, form.block_size))
        hashed = name == "nvfp4"
        values = rounded(x, form, None if hashed else jax.random.bits(key, x.shape, jnp.uint32))[2]
        spacing = np.ptp(values, 0)
        assert (np.abs(values - row) <= spacing + 1e-7).all()
        assert all(len(np.unique(column)) <= 2 for column in values.T)
        limit = 5 * spacing / np.sqrt(len(x)) + 1e-6
        assert (np.abs(values.mean(0) - row) < limit).all(), name


def test_every_form_is_read_and_others_are_refused():
    assert as_format("mxfp4", "x") == jsa.BlockFormat("mxfp4")
    assert as_format("bfloat16", "x") == jnp.bfloat16
    for bad in ("mxfp6", jnp.int8, 3):
        with pytest.raises(TypeError, match=r"`x` must be floating.*'mxfp8', .*'nvfp4'"):
            as_format(bad, "x")
    for options, message in (
        (dict(name="fp4"), "`name` must be one of"),
        (dict(name="mxfp8", rounding="up"), "`rounding` must be one of"),
        (dict(name="nvfp4", scale_rounding="floor"), r"of 'nvfp4' must be one of \['nearest'\]"),
        (dict(name="mxfp4", tensor_scale=True), "`tensor_scale` must be False or None"),
    ):
        with pytest.raises(ValueError, match=message):
            jsa.BlockFormat(**options)


def test_bits_of_an_element():
    bits = [jsa.BlockFormat(name).bits_per_element for name in NAMES]
    assert bits == [8.25, 8.25, 4.25, 4.5]
