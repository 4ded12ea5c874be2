"""Rescales of whole states: the value stays, and a flag tells if every statistic was finite."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import scaled

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
BAD = [np.inf, -np.inf, np.nan]


def rescale(tree):
    return jsa.dynamic_rescale(tree, return_finite=True)


WAYS = {
    "outside": rescale,
    "outside-jit": jax.jit(rescale),
    "inside": jsa.scalify(rescale),
    "inside-jit": jax.jit(jsa.scalify(rescale)),
    "inside-scan": jax.jit(
        jsa.scalify(
            lambda tree: lax.scan(
                lambda carry, _: (jsa.dynamic_rescale(carry), rescale(carry)[1]), tree, None, 2
            )
        )
    ),
}


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_the_flag(way, dtype):
    good = {"w": scaled([[4.0, -8.0]], 2.0**40, dtype), "z": scaled([0.0], 2.0**-40, dtype)}
    out, finite = WAYS[way](good)
    assert finite.dtype == bool and np.all(finite)
    moves = way != "inside-scan" or dtype != "float32"
    new = 2.0**42 if moves else 2.0**40  # a loop keeps the scale of a carry of float32
    assert float(out["w"].scale) == new and (not moves or float(out["z"].scale) == 0)
    np.testing.assert_array_equal(np.asarray(out["w"], np.float64), [[2.0**42, -(2.0**43)]])
    for bad in BAD:
        tree = {**good, "b": scaled([64.0, bad], 2.0**-40, dtype)}
        out, finite = WAYS[way](tree)
        assert not np.any(finite)
        assert float(out["w"].scale) == new and float(out["b"].scale) == 2.0**-40
        np.testing.assert_array_equal(
            np.asarray(out["b"].data).astype(np.float32),
            np.asarray(tree["b"].data).astype(np.float32),
        )


@pytest.mark.parametrize("way", ["outside", "outside-jit"])
def test_plain_leaves_have_no_say(way):
    tree = {"i": jnp.arange(2), "x": jnp.asarray([np.inf]), "n": None, "f": 1.5}
    out, finite = WAYS[way](tree)
    assert finite.shape == () and finite.dtype == bool and bool(finite)
    chex.assert_trees_all_equal(out, tree)


def test_plain_leaves_inside_stay_plain():
    def step(tree, x):
        return rescale(tree), x * 2

    plain = {"x": jnp.asarray([np.nan, 4.0]), "lr": jnp.float32(np.inf), "i": jnp.arange(2)}
    (out, finite), _ = jsa.scalify(step)(plain, scaled([1.0]))
    assert bool(finite)
    chex.assert_trees_all_equal(out, plain)
    (out, finite), _ = jsa.scalify(step)({**plain, "w": scaled([np.nan])}, scaled([1.0]))
    assert not bool(finite) and not isinstance(out["lr"], ScaledArray)


def test_one_flag_for_each_example_of_a_vmap():
    def leaf(x):
        return jsa.dynamic_rescale(x, return_finite=True)

    values = np.array([[1.0, 2.0], [np.inf, 2.0], [16.0, 32.0]])
    scales = {"one": 4.0, "a row": np.full((3, 1), 4.0), "a column": np.full((1, 2), 4.0)}
    for name, scale in scales.items():
        out, finite = jax.jit(jsa.scalify(jax.vmap(leaf)))(scaled(values, scale))
        # The first column has one statistic, of all examples.
        np.testing.assert_array_equal(finite, [name != "a column", False, name != "a column"])
        np.testing.assert_array_equal(np.asarray(out), 4 * values)
    _, finite = jax.vmap(leaf)(jnp.asarray(values))
    np.testing.assert_array_equal(finite, [True] * 3)


def test_a_channel_that_is_not_finite_is_left_alone():
    x = scaled([[64.0, 64.0], [1.0, np.inf], [0.0, 0.0]], [[2.0], [8.0], [4.0]])
    out, finite = rescale(x)
    assert not bool(finite)
    np.testing.assert_array_equal(out.scale, [[128], [8], [0]])
    np.testing.assert_array_equal(out.data, [[1, 1], [1, np.inf], [0, 0]])


def test_the_flag_has_no_derivative():
    def loss(x):
        y, finite = jsa.dynamic_rescale(x, return_finite=True)
        return jnp.sum(jnp.where(finite, y, 0) ** 2)

    for x in (jnp.asarray([1.0, -3.0]), scaled([1.0, -3.0], 2.0**20)):
        for derivative in (jax.grad(loss), lambda x: jax.jvp(loss, (x,), (x,))[1]):
            got, want = jsa.scalify(derivative)(x), None
            value = np.asarray(x, np.float64)
            want = 2 * value if np.ndim(np.asarray(got)) else 2 * np.sum(value**2)
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-6)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("static", [False, True])
def test_every_buffer_can_be_donated(dtype, static):
    tree = [scaled(np.full((4, 3), 3.0), 1.0, dtype), scaled(3.0, 2.0, dtype), scaled([], 1, dtype)]
    tree.append(scaled(np.ones((2, 2)), [[1.0], [2.0]], dtype))
    if static:
        tree = jsa.thaw_scales(jsa.freeze_scales(tree))
    old = jax.tree.leaves(tree)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, finite = jax.jit(rescale, donate_argnums=0)(tree)
    assert all(leaf.is_deleted() for leaf in old if leaf.size) and bool(finite)
    assert [float(x.scale) for x in out[:2]] == [2, 4]


def test_leaves_of_one_shape_share_a_program():
    tree = {i: scaled(np.full(7, 2.0**i)) for i in range(-20, 20)}
    program = jax.jit(jsa.dynamic_rescale).lower(tree).as_text()
    assert program.count("stablehlo.case") == 1  # the one of float32's range
    out = jsa.dynamic_rescale(tree)
    assert all(float(x.scale) == 2.0**i for i, x in out.items())


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_is_not_zero_does_not_become_zero(inside, dtype):
    """Second moments are divided by: those far below the RMS become the smallest number."""
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    top = float(jnp.finfo(dtype).max)
    x = jsa.ScaledArray(jnp.asarray([top, smallest, -smallest, 0, smallest * 8], dtype), 2.0**-20)
    out = jax.jit(jsa.scalify(jsa.dynamic_rescale))(x) if inside else jsa.dynamic_rescale(x)
    assert out.scale > x.scale
    data = np.asarray(out.data, np.float64)
    np.testing.assert_array_equal(data[1:4], [smallest, -smallest, 0])
    np.testing.assert_array_equal(jsa.dynamic_rescale(out).data, out.data)


def test_a_static_scale_stays_static_between_steps():
    """Zeros keep theirs. Inside `jit` the new scale has no value, and is dynamic."""
    tree = {"w": jsa.ScaledArray(jnp.full(4, 64.0, jnp.float16), 0.5), "b": jnp.zeros(3)}
    tree["b"] = jsa.as_scaled_array(tree["b"], scale="rms", static=True)
    new = jsa.dynamic_rescale(tree)
    assert (new["w"].scale, new["b"].scale) == (32.0, 2.0**-6)
    assert all(x.is_static for x in jsa.tree.leaves(new))
    assert not jax.jit(jsa.dynamic_rescale)(tree)["w"].is_static
