"""Scales packed for storage: exact, and refused by computations."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray

E8M0 = jnp.dtype(jnp.float8_e8m0fnu)
SCALES = np.concatenate([[0.0], np.ldexp(1.0, np.arange(-126, 128))]).astype(np.float32)


def state():
    return {
        "w": ScaledArray(jnp.ones((2, 3), jnp.float16), jnp.float32(2.0**-20)),
        "zero": ScaledArray(jnp.zeros(3, jnp.float8_e4m3fn), jnp.float32(0)),
        "rows": ScaledArray(jnp.ones((3, 2)), jnp.float32([[2.0**127], [2.0**-126], [1]])),
        "leading": ScaledArray(jnp.ones((2, 2)).at[1].set(0), jnp.float32([4, 0])),
        "static": ScaledArray(jnp.ones(2), 8.0),
        "plain": [jnp.arange(2), jnp.ones(2), None, "text"],
        "host": ScaledArray(np.ones(2, np.float32), np.float32(2.0**30)),
    }


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g is e or g.dtype == e.dtype
        np.testing.assert_array_equal(g, e)


def test_every_scale_goes_round_trip():
    data = (SCALES != 0).astype(np.float32)
    for tree in (
        [ScaledArray(jnp.asarray(d), jnp.asarray(s)) for d, s in zip(data, SCALES)],
        ScaledArray(jnp.asarray(data), jnp.asarray(SCALES)),
        ScaledArray(data, SCALES),
    ):
        packed = jsa.pack_scales(tree)
        leaves = jsa.tree.leaves(packed)
        codes = np.concatenate([np.atleast_1d(np.asarray(x.scale).view(np.uint8)) for x in leaves])
        np.testing.assert_array_equal(codes, np.arange(255))
        assert all(x.scale.dtype == E8M0 for x in leaves)
        assert_same(jsa.unpack_scales(packed), tree)
        assert_same(jsa.pack_scales(packed), packed)


def test_trees_go_round_trip():
    packed = jsa.pack_scales(state())
    assert jax.tree.structure(packed) == jax.tree.structure(state())
    assert packed["static"].scale == 8.0 and packed["plain"][3] == "text"
    assert packed["rows"].scale.shape == (3, 1) and packed["leading"].scale.shape == (2,)
    assert isinstance(packed["host"].scale, np.ndarray)
    assert isinstance(packed["w"].scale, jax.Array)
    assert_same(jsa.unpack_scales(packed), state())
    assert_same(jsa.unpack_scales(state()), state())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_unpacked_in_the_dtype_that_is_asked_for(dtype):
    with jax.enable_x64(dtype == "float64"):
        tree = ScaledArray(jnp.asarray(SCALES != 0, dtype), jnp.asarray(SCALES, dtype))
        assert_same(jsa.unpack_scales(jsa.pack_scales(tree), dtype), tree)
    with pytest.raises(TypeError, match="`scale_dtype` must be float32, float64 or bfloat16"):
        jsa.unpack_scales(state(), jnp.float16)


def test_packed_trees_survive_tree_functions_and_transfers():
    arrays = {k: v for k, v in state().items() if k != "plain"}
    packed = jsa.pack_scales(arrays)
    assert_same(jsa.unpack_scales(jax.tree.map(lambda x: x, packed)), arrays)
    leaves, treedef = jax.tree.flatten(packed)
    assert_same(jsa.unpack_scales(jax.tree.unflatten(treedef, leaves)), arrays)
    device = jax.devices()[-1]
    moved = jax.device_put(packed, device)
    assert all(x.devices() == {device} for x in jax.tree.leaves(moved))
    unpacked = jsa.unpack_scales(moved)
    assert_same(unpacked, arrays)
    assert all(x.devices() == {device} for x in jax.tree.leaves(unpacked))
    assert all(x.devices() == {device} for x in jax.tree.leaves(jsa.pack_scales(unpacked)))


def test_packed_trees_survive_msgpack():
    serialization = pytest.importorskip("flax.serialization")
    arrays = {k: v for k, v in state().items() if k != "plain"}
    packed = jsa.pack_scales(arrays)
    paths, treedef = jax.tree.flatten_with_path(packed)
    stored = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    restored = serialization.msgpack_restore(serialization.msgpack_serialize(stored))
    tree = jax.tree.unflatten(treedef, [restored[jax.tree_util.keystr(p)] for p, _ in paths])
    assert_same(jsa.unpack_scales(tree), arrays)


def test_values_of_packed_arrays():
    for packed, plain in zip(
        jsa.tree.leaves(jsa.pack_scales(state())), jsa.tree.leaves(state()), strict=True
    ):
        if isinstance(plain, ScaledArray):
            expected = jsa.asarray(plain, jnp.float32)
            np.testing.assert_array_equal(jsa.asarray(packed, jnp.float32), expected)
            np.testing.assert_array_equal(packed.__array__(np.float32), expected)


@pytest.mark.parametrize("bad", [3.0, np.nan, np.inf, -1.0, 2.0**-149 * 3])
def test_a_scale_that_is_no_power_of_two(bad):
    tree = {"layer": [ScaledArray(jnp.ones(2), np.float32(bad))]}
    with pytest.raises(ValueError, match=r"`tree\['layer'\]\[0\]` must be a power of two"):
        jsa.pack_scales(tree)
    rows = ScaledArray(jnp.ones((2, 2)), np.float32([[1], [bad]]))
    with pytest.raises(ValueError, match="must be a power of two"):
        jsa.pack_scales(rows)


def test_a_scale_that_is_too_large():
    with pytest.raises(ValueError, match="must be a power of two up to 2"):
        jsa.pack_scales(ScaledArray(np.ones(2), np.float64(2.0**128)))


def test_a_scale_that_is_too_small():
    data = np.float32([[0, 0], [0, 1]])
    tree = {"w": ScaledArray(data, np.float32([[1], [2.0**-127]]))}
    with pytest.raises(
        ValueError, match=r"`tree\['w'\]` must be at least 2\*\*-126 where the data"
    ):
        jsa.pack_scales(tree)
    with pytest.raises(ValueError, match="must be at least"):
        jsa.pack_scales(ScaledArray(data, np.float32(2.0**-149)))
    zero_there = ScaledArray(data, np.float32([2.0**-127, 1]))
    np.testing.assert_array_equal(jsa.unpack_scales(jsa.pack_scales(zero_there)).scale, [0, 1])


def test_a_stored_nan():
    tree = {"w": ScaledArray(np.ones(2), np.array(np.nan, ml_dtypes.float8_e8m0fnu))}
    with pytest.raises(ValueError, match=r"`tree\['w'\]` is nan"):
        jsa.unpack_scales(tree)


@pytest.mark.parametrize("function", [jsa.pack_scales, jsa.unpack_scales])
def test_refuses_to_be_traced(function):
    w = {"w": state()["w"]}
    w = jsa.pack_scales(w) if function is jsa.unpack_scales else w
    for call in (jax.jit(function), lambda tree: jax.eval_shape(function, tree)):
        with pytest.raises(TypeError, match=rf"`{function.__name__}` is for storage, on the host"):
            call(w)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), w)
    with pytest.raises(TypeError, match=r"`tree\['w'\]` is ShapeDtypeStruct"):
        function(shapes)


def test_computations_refuse_packed_scales():
    packed = jsa.pack_scales({"w": state()["w"]})
    advice = r"packed for storage \(float8_e8m0fnu\).*state = jsa.unpack_scales\(state\)"
    double = jsa.scalify(lambda x, tree: tree["w"] * x)
    for call in (double, jax.jit(double)):
        with pytest.raises(TypeError, match=rf"`args\[1\]\['w'\]` has a scale that is {advice}"):
            call(2.0, packed)
        with pytest.raises(TypeError, match=rf"`kwargs\['tree'\]\['w'\]` has .* {advice}"):
            call(2.0, tree=packed)
    for function in (jsa.freeze_scales, jsa.dynamic_rescale):
        with pytest.raises(TypeError, match=advice):
            function(packed)
    np.testing.assert_array_equal(np.asarray(double(2.0, jsa.unpack_scales(packed))), 2.0**-19)
