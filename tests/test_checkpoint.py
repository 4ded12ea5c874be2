"""Checkpoints: exact where nothing else is asked for, and onto other dtypes and kinds of leaves.

`python -m tests.test_checkpoint` writes those of the JAX that runs it, for the other versions.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.checkpoint import from_storable, restore, save, to_storable

ocp = pytest.importorskip("orbax.checkpoint")
optax = pytest.importorskip("optax")

STORED = Path(__file__).parent / "checkpoints"
DATA_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class State(NamedTuple):
    params: Any
    rest: Any
    step: Any
    key: Any


def values(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32).astype(dtype)


def scaled(shape, scale=2.0**-20, dtype=jnp.float16, seed=0):
    return ScaledArray(values(shape, dtype, seed), jnp.asarray(scale, jnp.float32))


def array_state(seed=0):
    """Arrays only: what orbax alone saves and restores."""
    params = {d: scaled((2, 3), 2.0 ** (i - 60), d, seed) for i, d in enumerate(DATA_DTYPES)}
    params |= {
        "zero": ScaledArray(jnp.zeros(3, jnp.float16), jnp.float32(0)),
        "rows": scaled((3, 2), [[2.0**127], [2.0**-126], [1]]),
        "leading": scaled((2, 2), [4, 2.0**-30]),
        "bfloat16 scale": ScaledArray(values(3, seed=seed), jnp.bfloat16(2.0**100)),
        "plain": values(4, jnp.bfloat16, seed),
        "none": None,
        "complex": ScaledArray(values(2) + 1j, jnp.float32(2)),
    }
    rest = [optax.adamw(1e-3).init(values(2)), (jnp.array([True, False]), jnp.arange(3 + seed)[:3])]
    return State(params, rest, jnp.int32(7 + seed), jax.random.key(seed))


def state(seed=0):
    """A leaf of each kind."""
    more = {
        "static": ScaledArray(values((2, 3), jnp.float16, seed), 2.0 ** (seed - 9)),
        "host": ScaledArray(np.float32([1, 2 + seed]), np.float32(2.0**30)),
        "host scalar": ScaledArray(np.float64(1 + seed), np.float64(0.5)),
        "numpy": (np.arange(2.0) + seed, np.float16(seed), np.arange(2, dtype=ml_dtypes.int4)),
        "python": (True, 3 + seed, 0.1 + seed, 2**40 + seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "raw key": jax.random.key_data(jax.random.key(seed)),
        "empty": (jnp.zeros((0, 3)), ScaledArray(jnp.zeros((2, 0)), jnp.float32(0)), {}, []),
        "a": {"b": jnp.float32(1)},
        "a.b": jnp.float32(2),
        "function": jnp.tanh,
        "text": "text",
    }
    return array_state(seed), more


def assert_same(got, expected):
    """Check structure, kinds, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if g is e:
            continue
        assert isinstance(g, jax.Array) == isinstance(e, jax.Array), (type(g), type(e))
        assert jnp.shape(g) == jnp.shape(e)
        if isinstance(e, (int, float)):
            assert type(g) is type(e) and g == e
            continue
        assert g.dtype == e.dtype
        if jnp.issubdtype(g.dtype, jax.dtypes.prng_key):
            g, e = jax.random.key_data(g), jax.random.key_data(e)
        assert np.asarray(g).tobytes() == np.asarray(e).tobytes(), (g, e)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# Exactly


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pack", [True, False])
def test_every_kind_of_leaf_is_restored_exactly(tmp_path, pack):
    assert_same(from_storable(to_storable(state(), pack=pack), state(1)), state())
    assert save(tmp_path / "x", state(), pack=pack) is None
    assert_same(restore(tmp_path / "x", like=state(1)), state())
    arrays = array_state()
    assert_same(from_storable(to_storable(arrays, pack=pack), shapes(arrays)), arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_names_and_kinds_of_what_is_stored():
    stored = to_storable({"layer": [ScaledArray(jnp.ones(2), 4.0), scaled(2)], "n": 3, "f": len})
    assert {name: (str(x.dtype), x.shape) for name, x in stored.items()} == {
        "layer/0/data": ("float32", (2,)),
        "layer/0/static_scale": ("float64", ()),
        "layer/1/data": ("float16", (2,)),
        "layer/1/scale": ("float8_e8m0fnu", ()),
        "n": ("int64", ()),
    }
    assert list(to_storable(scaled(2))) == ["data", "scale"]
    assert list(to_storable(jnp.ones(2))) == [""]
    for tree in (scaled(2), jnp.ones(2)):
        assert_same(from_storable(to_storable(tree), tree), tree)


def test_every_bit_pattern_is_restored_exactly(tmp_path):
    bits = np.arange(256, dtype=np.uint8)
    tree = {
        str(dtype): ScaledArray(jnp.asarray(bits.view(dtype)), jnp.float32(2.0**-30))
        for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
    }
    tree["scales"] = ScaledArray(
        jnp.concatenate([jnp.zeros(1), jnp.ones(254)]),
        jnp.asarray(np.concatenate([[0], np.ldexp(1.0, np.arange(-126, 128))]), jnp.float32),
    )
    save(tmp_path / "x", tree)
    assert_same(restore(tmp_path / "x", jax.tree.map(jnp.zeros_like, tree)), tree)


def test_packed_states_are_restored_packed(tmp_path):
    packed = jsa.pack_scales(array_state())
    save(tmp_path / "x", packed)
    assert_same(restore(tmp_path / "x", packed), packed)
    assert_same(restore(tmp_path / "x", array_state(1)), array_state())


def test_static_and_dynamic_scales_are_restored_as_each_other():
    dynamic = {"w": scaled(3), "v": scaled(2, 8.0)}
    static = jsa.freeze_scales(dynamic)
    assert_same(
        from_storable(to_storable(dynamic), jsa.freeze_scales(jsa.tree.map(_double, dynamic))),
        static,
    )
    assert_same(from_storable(to_storable(static), dynamic), dynamic)
    rows = {"w": scaled((2, 3), [[1], [1]]), "v": scaled((2, 2), [1, 1])}
    once = {"w": scaled((2, 3), 2.0**-20), "v": scaled((2, 2), 8.0)}
    got = from_storable(to_storable(once), rows)
    assert got["w"].scale.shape == (2, 1) and got["v"].scale.shape == (2,)
    np.testing.assert_array_equal(got["w"].scale, 2.0**-20)
    assert_same(jsa.tree.map(lambda x: x.data, got), jsa.tree.map(lambda x: x.data, once))


def _double(x):
    return ScaledArray(x.data, x.scale * 2)


# Orbax alone


def test_orbax_alone_restores_a_state_exactly(tmp_path):
    tree, like = array_state(), array_state(1)
    for pack in (False, True):
        tree, like = (jsa.pack_scales(x) if pack else x for x in (tree, like))
        path = tmp_path / f"standard-{pack}"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
        with ocp.StandardCheckpointer() as checkpointer:
            assert_same(checkpointer.restore(path, shapes(like)), tree)
        path = tmp_path / f"pytree-{pack}"
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
            arguments = ocp.checkpoint_utils.construct_restore_args(like)
            assert_same(checkpointer.restore(path, item=like, restore_args=arguments), tree)


def test_orbax_alone_restores_no_data_at_another_static_scale(tmp_path):
    def weights(scale):
        return {"w": ScaledArray(values((2, 3)), scale), "m": scaled((2, 3))}

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", weights(2.0**-5))
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "saved", weights(2.0**-5)), weights(2.0**-5))
        with pytest.raises(ValueError, match=r"(?s)w\.data@2\^-6.*w\.data@2\^-5|w\.data@2\^-5.*-6"):
            checkpointer.restore(tmp_path / "saved", weights(2.0**-6))


def test_checkpoints_of_orbax_alone_are_read(tmp_path):
    for save_args in (ocp.args.StandardSave, ocp.args.PyTreeSave):
        path = tmp_path / save_args.__name__
        handler = ocp.StandardCheckpointHandler()
        if save_args is ocp.args.PyTreeSave:
            handler = ocp.PyTreeCheckpointHandler()
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=save_args(array_state()))
        assert_same(restore(path, array_state(1)), array_state())


def test_a_checkpoint_manager(tmp_path):
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = {"w": scaled((64, 64)), "count": jnp.int32(0)}
    kept = {}
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as m:
        for step in range(4):
            kept[step] = jax.tree.map(np.array, tree)
            m.save(step, args=ocp.args.StandardSave(to_storable(tree, pack=False)))
            m.wait_until_finished()
            tree = update(tree)
    with ocp.CheckpointManager(tmp_path) as m:
        assert m.all_steps() == [2, 3]
        for step in m.all_steps():
            stored = m.restore(step, args=ocp.args.StandardRestore())
            expected = jax.tree.map(jnp.asarray, kept[step])
            assert_same(from_storable(stored, tree), expected)
            assert_same(restore(tmp_path / str(step) / "default", tree), expected)


# Other dtypes


@pytest.mark.parametrize("stored", DATA_DTYPES)
@pytest.mark.parametrize("dtype", DATA_DTYPES)
@pytest.mark.parametrize("scale", [2.0**-100, 1.0, [[2.0**20], [2.0**-20], [0]]])
def test_another_dtype(stored, dtype, scale):
    x = scaled((3, 64), scale, stored)
    x = ScaledArray(jnp.where(x.scale == 0, 0, x.data), x.scale)
    like = ScaledArray(jnp.zeros(x.shape, dtype), jnp.zeros_like(x.scale))
    got = from_storable(to_storable({"x": x}), {"x": like})["x"]
    by_argument = from_storable(to_storable({"x": x}), {"x": x}, dtype=dtype)["x"]
    assert_same(by_argument, got)
    assert got.dtype == dtype and got.scale.shape == x.scale.shape
    wide, narrow = (np.asarray(v, np.float64) for v in (x, got))
    one, other = jnp.finfo(stored), jnp.finfo(dtype)
    if one.nmant <= other.nmant and one.maxexp <= other.maxexp and one.minexp >= other.minexp:
        np.testing.assert_array_equal(wide, narrow)
        np.testing.assert_array_equal(got.scale, x.scale)
    ordinary = np.abs(np.asarray(got.data, np.float64)) >= float(other.smallest_normal)
    assert np.mean(ordinary | (wide == 0)) > 0.95
    np.testing.assert_allclose(narrow[ordinary], wide[ordinary], rtol=2.0 ** -(other.nmant + 1))
    tiny = float(other.smallest_subnormal) * np.broadcast_to(np.asarray(got.scale), x.shape)
    assert np.all(np.abs(wide - narrow)[~ordinary] <= tiny[~ordinary])


@pytest.mark.parametrize("size", [2.0**100, 2.0**-100])
@pytest.mark.parametrize("scale", [2.0**120, 1.0, 2.0**-120])
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_a_cast_neither_over_nor_underflows(size, scale, dtype):
    x = ScaledArray(values((4, 64)) * size, jnp.float32(scale))
    got = from_storable(to_storable(x), jsa.tree.astype(x, dtype))
    if np.abs(np.log2(size * scale)) < 125:  # the result has a scale
        rms = np.sqrt(np.mean(np.square(np.asarray(got.data, np.float64))))
        assert 0.9 < rms < 2.2
        expected = np.asarray(x.data, np.float64) * scale
        got = np.asarray(got.data, np.float64) * float(got.scale)
        assert np.abs(got - expected).max() < 0.07 * np.abs(expected).max()
    else:
        assert 2.0**-126 <= float(got.scale) <= 2.0**126


def test_a_maximum_far_above_the_rms_fits():
    data = np.full(2**22, 2.0**-12, np.float32)
    data[7] = 1000.0
    for scale in (1.0, 2.0**-40):
        x = ScaledArray(data, np.float32(scale))
        for dtype, largest in (("float8_e4m3fn", 448), ("float16", 65504)):
            got = from_storable(to_storable(x), jsa.tree.astype(x, dtype))
            assert float(got.data[7]) < largest
            np.testing.assert_allclose(float(got.data[7]) * float(got.scale), 1000 * scale, 0.07)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60])
def test_small_second_moments_stay(rows, scale):
    """Adam divides by their root: 0 in place of a small one would make a huge update."""
    sizes = np.float32(2.0) ** -np.arange(0, 32)[:, None]
    x = ScaledArray(jnp.square(values((32, 64))) * sizes, jnp.float32(scale))
    if rows:
        x = ScaledArray(x.data, jnp.full((32, 1), x.scale))
    got = from_storable(to_storable(x), jsa.tree.astype(x, jnp.float16))
    assert jnp.mean(got.data > 0) > (0.99 if rows else 0.97)
    assert float(jnp.max(got.data)) <= 65504 / 16
    signed = ScaledArray(x.data.at[0, 0].set(-1.0), x.scale)
    got = from_storable(to_storable(signed), jsa.tree.astype(signed, jnp.float16))
    assert rows or jnp.mean(got.data > 0) < 0.85
    gains = ScaledArray(jnp.linspace(0.5, 2.0, 8), jnp.float32(scale))
    got = from_storable(to_storable(gains), jsa.tree.astype(gains, jnp.float16))
    assert_same(got, jsa.tree.astype(gains, jnp.float16))


def test_a_dtype_of_a_larger_maximum_but_a_shorter_range_below():
    x = scaled(64, 1.0, ml_dtypes.float8_e4m3b11fnuz)
    x = ScaledArray(x.data * jnp.asarray(2.0**-9, x.dtype), x.scale)
    got = from_storable(to_storable(x), jsa.tree.astype(x, jnp.float8_e4m3fn))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(x, np.float32))


def test_a_leaf_that_is_not_finite_keeps_its_scale():
    x = ScaledArray(jnp.float32([1, jnp.nan, -jnp.inf]), jnp.float32(2.0**-9))
    got = from_storable(to_storable(x), jsa.tree.astype(x, jnp.float16))
    assert_same(got, jsa.tree.astype(x, jnp.float16))


def test_rescaling_is_exact():
    x = scaled((8, 8), 2.0**40, jnp.float32)
    x = ScaledArray(x.data.astype(jnp.float16).astype(jnp.float32) * 2.0**-60, x.scale)
    got = from_storable(to_storable(x), jsa.tree.astype(x, jnp.float16))
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(x, np.float64))


def test_float64():
    with jax.enable_x64(True):
        x = ScaledArray(values(3).astype(jnp.float64), jnp.float64(2.0**-20))
        tree = {"x": x, "plain": x.data}
        assert_same(from_storable(to_storable(tree), tree), tree)
        got = from_storable(to_storable(jsa.tree.astype(tree, jnp.float32)), tree)
        np.testing.assert_array_equal(got["x"].data, x.data.astype(jnp.float32))
        assert got["x"].scale.dtype == got["plain"].dtype == jnp.float64
    host = {"x": np.float32([0.1]), "s": ScaledArray(np.float64([0.1]), np.float64(2))}
    like = {"x": np.zeros(1), "s": np.zeros(1)}
    assert_same(from_storable(host, like), {"x": np.float64(host["x"]), "s": np.float64([0.2])})


# Plain and scaled


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [*DATA_DTYPES, "float64"])
def test_a_plain_checkpoint_is_restored_as_scaled(tmp_path, dtype):
    if dtype == "float64":
        plain = {"w": np.random.default_rng(0).normal(size=(16, 8)), "n": jnp.int32(3)}
        dtype = "float32"
    else:
        plain = {"w": values((16, 8)) * 2.0**-40, "n": jnp.int32(3)}
    like = jsa.as_scaled_array(jax.tree.map(jnp.zeros_like, plain), dtype=dtype)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", plain)
    got = restore(tmp_path / "x", like)
    assert_same(got, jsa.as_scaled_array(plain, scale="rms", dtype=dtype))
    assert_same(restore(tmp_path / "x", jsa.freeze_scales(like)), jsa.freeze_scales(got))


def test_a_plain_checkpoint_gets_scales_of_the_kind_of_like():
    plain = {"w": values((3, 4)) * jnp.float32([[1], [2.0**-30], [0]]), "v": values((2, 4))}
    like = {"w": scaled((3, 4), [[1], [1], [1]]), "v": scaled((2, 4), [1, 1], jnp.float32)}
    got = from_storable(to_storable(plain), like)
    assert got["w"].scale.shape == (3, 1) and got["v"].scale.shape == (2,)
    expected = jsa.as_scaled_array(plain, "rms", axis=0)
    assert_same(got["w"], jsa.tree.astype(expected["w"], jnp.float16))
    np.testing.assert_array_equal(got["v"].data, expected["v"].data)


def test_a_scaled_checkpoint_is_restored_as_plain(tmp_path):
    tree = {
        "w": scaled((4, 4)),
        "static": ScaledArray(values(3), 2.0**-9),
        "py": jsa.as_scaled_array(0.5),
    }
    save(tmp_path / "x", tree)
    for dtype in ("float32", "float16"):
        like = jsa.asarray(tree, dtype) | {"py": 0.0}
        got = restore(tmp_path / "x", like)
        assert_same(got, jsa.asarray(tree, dtype) | {"py": 0.5})
    assert_same(
        restore(tmp_path / "x", shapes(jsa.asarray(tree)), dtype="float32"),
        jsa.asarray(tree, "float32"),
    )


def test_keys_of_orbax_alone_and_raw_keys():
    key = jax.random.key(3)
    assert_same(
        from_storable({"k": jax.random.key_data(key)}, {"k": jax.random.key(0)}), {"k": key}
    )
    with pytest.raises(ValueError, match=r"'k' is uint32\[2\], `like` has uint32\[4\]"):
        from_storable({"k": jax.random.key_data(key)}, {"k": jax.random.key(0, impl="rbg")})
    with pytest.raises(ValueError, match=r"'k' is missing"):
        from_storable({"k": key}, {"k": jax.random.key(0, impl="rbg")})


# Errors


def test_every_mismatch_is_listed(tmp_path):
    stored = {
        "shape": jnp.ones(3),
        "kind": jnp.arange(3),
        "integers": jnp.int8([1]),
        "complex": jnp.ones(2, jnp.complex64),
        "scale": scaled((3, 2), [[1], [2], [4]]),
        "static": scaled((3, 2), [1, 2, 4]),
        "rank": {"data": jnp.float32(1), "scale": jnp.ones(2)},
        "surplus": scaled(2),
        "same": jnp.ones(2),
    }
    like = {
        "shape": scaled(4),
        "kind": scaled(3),
        "integers": jnp.int32([1]),
        "complex": jnp.ones(2),
        "scale": scaled((3, 2)),
        "static": ScaledArray(jnp.ones((3, 2)), 2.0),
        "rank": scaled(()),
        "missing": {"w": scaled(2, dtype=jnp.float16)},
        "same": jnp.ones(2),
    }
    lines = [
        "'complex' is complex64[2], `like` has float32[2]: let it have complex64 there, "
        "and cast what comes back",
        "'integers' is int8[1], `like` has int32[1]: let it have int8 there, "
        "and cast what comes back",
        "'kind' is int32[3], `like` has float16[3]: let it have int32 there, "
        "and cast what comes back",
        "'missing/w' is missing, `like` has float16[2]",
        "'rank' has a scale of shape (2,), `like` has ()",
        "'scale' has a scale of shape (3, 1), `like` has ()",
        "'shape' is float32[3], `like` has float16[4]",
        "'static' has a scale of shape (3,), `like` has ()",
        "'surplus/data' (float16[2]) has no place in `like`",
        "'surplus/scale' (float8_e8m0fnu[]) has no place in `like`",
    ]
    save(tmp_path / "x", stored)
    for call in (
        lambda: from_storable(to_storable(stored), like),
        lambda: restore(tmp_path / "x", like),
    ):
        with pytest.raises(ValueError, match="The checkpoint differs from `like`:") as error:
            call()
        assert str(error.value).splitlines()[1:] == [f"  {line}" for line in lines]


def test_a_python_number_takes_a_scalar_of_its_kind(tmp_path):
    stored = {
        "step": jnp.int32(7),
        "count": np.uint8(3),
        "rate": jnp.bfloat16(0.5),
        "phase": jnp.complex64(1j),
        "done": True,
        "scaled": ScaledArray(jnp.float16(3), jnp.float32(0.5)),
        "epoch": 2**40,
    }
    like = {
        "step": 0,
        "count": 0,
        "rate": 0.1,
        "phase": 0j,
        "done": False,
        "scaled": 0.0,
        "epoch": 0,
    }
    arrays = {name: jnp.asarray(stored[name]) for name in ("step", "count", "rate", "phase")}
    expected = {**stored, **arrays, "scaled": 1.5}
    save(tmp_path / "x", stored)
    assert_same(from_storable(to_storable(stored), like), expected)
    assert_same(restore(tmp_path / "x", like), expected)
    for name, leaf, text in (
        ("step", 0.0, "is int32[], `like` has a Python float: let it have int32 there"),
        ("rate", 0, "is bfloat16[], `like` has a Python int: let it have bfloat16 there"),
        ("done", 0, "is bool[], `like` has a Python int: let it have bool there"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"'{name}' {text}, and cast")):
            from_storable(to_storable(stored), {**like, name: leaf})
    with pytest.raises(ValueError, match=re.escape("'step' is int32[2], `like` has a Python int")):
        from_storable({"step": jnp.int32([1, 2])}, {"step": 0})


def test_an_array_that_was_a_python_number_takes_one():
    like = jax.eval_shape(lambda: {"step": jnp.asarray(0)})
    assert like["step"].weak_type
    assert_same(from_storable(to_storable({"step": 5}), like), {"step": jnp.int32(5)})
    made = jax.jit(lambda step: step + 1)(0)
    assert_same(from_storable({"step": np.int64(5)}, {"step": made}), {"step": jnp.int32(5)})
    with pytest.raises(OverflowError):
        from_storable({"step": np.int64(2**40)}, {"step": made})
    with pytest.raises(ValueError, match="let it have int64 there"):
        from_storable({"step": np.int64(5)}, {"step": jnp.int32(0)})


def test_a_trained_state_of_flax_is_restored_into_a_fresh_one():
    train_state = pytest.importorskip("flax.training.train_state")

    def create():
        params = {"w": jnp.ones((4, 4))}
        return train_state.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    trained = jax.jit(lambda s: s.apply_gradients(grads=s.params))(create())
    restored = from_storable(to_storable(trained), like=create())
    assert restored.step.dtype == jnp.int32 and int(restored.step) == 1
    np.testing.assert_array_equal(restored.params["w"], trained.params["w"])


def test_formats_that_lose_dtypes(tmp_path):
    tree = {"w": scaled(2), "b": jnp.ones(2, jnp.bfloat16)}
    stored = to_storable(tree)
    np.savez(tmp_path / "x.npz", **stored)
    raw = dict(np.load(tmp_path / "x.npz").items())
    with pytest.raises(ValueError, match="view them as what `to_storable` returned") as error:
        from_storable(raw, tree)
    assert "'w' has bytes of no dtype" in str(error.value) and "'b' has bytes" in str(error.value)
    viewed = {name: array.view(stored[name].dtype) for name, array in raw.items()}
    assert_same(from_storable(viewed, tree), tree)
    serialization = pytest.importorskip("flax.serialization")
    kept = serialization.msgpack_restore(serialization.msgpack_serialize(stored))
    assert_same(from_storable(kept, tree), tree)


def test_leaves_of_the_same_name():
    one = jnp.ones(1)
    for name, tree in {
        "a/b": {"a/b": one, "a": {"b": one}},
        "w/data": {"w": scaled(1), "w/data": one},
    }.items():
        with pytest.raises(ValueError, match=f"Two leaves have the name '{name}': rename one"):
            to_storable(tree)
    with pytest.raises(ValueError, match="'w/data' is missing"):
        from_storable({"w": scaled(1)}, {"w": scaled(1), "w/data": one})


def test_states_that_cannot_be_saved(tmp_path):
    with pytest.raises(TypeError, match="'w' must be a concrete array"):
        to_storable({"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(TypeError, match="'w/data' must be a concrete array"):
        jax.jit(lambda x: to_storable({"w": ScaledArray(x, 2.0)}))(1.0)
    with pytest.raises(TypeError, match="'w' must be an array of numbers, got <U1"):
        save(tmp_path / "x", {"w": np.array(["x"])})
    with pytest.raises(ValueError, match=r"scale of `tree\['w'\]` must be a power of two"):
        save(tmp_path / "x", {"w": ScaledArray(jnp.ones(2), jnp.float32(jnp.nan))})
    for empty in ({}, {"w": jnp.zeros(0), "v": ScaledArray(jnp.zeros((0, 2)), 2.0)}, [None, len]):
        with pytest.raises(ValueError, match="`state` must have an array with elements"):
            save(tmp_path / "x", empty)
    with pytest.raises(TypeError, match=r"`state\['w'\].data` must have a floating dtype"):
        save(tmp_path / "x", {"w": ScaledArray(jnp.arange(2), 2.0)})
    with pytest.raises(ValueError, match=r"`state\['w'\].scale` of shape \(3,\) does not fit"):
        save(tmp_path / "x", {"w": ScaledArray(jnp.ones((2, 3)), jnp.ones(3))})
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="`dtype` must be a real floating dtype, got int8"):
        from_storable({}, {}, dtype=jnp.int8)


def test_an_existing_path_is_refused(tmp_path):
    path = tmp_path / "x"
    save(path, {"w": jnp.ones(2)})
    with pytest.raises(FileExistsError, match="exists; `overwrite=True` replaces it"):
        save(path, {"w": jnp.zeros(2)})
    assert_same(restore(path, {"w": jnp.zeros(2)}), {"w": jnp.ones(2)})
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    with pytest.raises(FileExistsError, match="exists and is no checkpoint"):
        save(tmp_path / "thesis", {"w": jnp.zeros(2)}, overwrite=True)
    with pytest.raises(FileNotFoundError, match="`path`: there is no checkpoint at"):
        restore(tmp_path / "thesis", {"w": jnp.zeros(2)})
    assert (tmp_path / "thesis" / "chapter").exists()


def test_overwrite_loses_nothing(tmp_path, monkeypatch):
    path, like = tmp_path / "x", {"w": jnp.zeros(2)}
    save(path, {"w": jnp.ones(2)}, overwrite=True)
    for rest in (".new", ".old"):  # of a kill in the middle
        shutil.copytree(path, tmp_path / f"x{rest}")
    save(path, {"w": jnp.full(2, 2.0)}, overwrite=True)
    assert_same(restore(path, like), {"w": jnp.full(2, 2.0)})
    assert [p.name for p in tmp_path.iterdir()] == ["x"]

    def fail(*_, **__):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "save", fail)
        with pytest.raises(OSError, match="No space left"):
            save(path, like, overwrite=True)
    assert_same(restore(path, like), {"w": jnp.full(2, 2.0)})


def test_without_orbax(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (lambda: save(tmp_path / "x", {}), lambda: restore(tmp_path / "x", {})):
        with pytest.raises(ImportError, match="pip install orbax-checkpoint"):
            call()


# Training


def train(tree, steps, update):
    for step in steps:
        rng = np.random.default_rng(step)
        x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 4), (8, 3)))
        tree = update(tree, x, y)
    return tree


@pytest.mark.sampled(16)
@pytest.mark.parametrize("frozen", [False, True])
def test_resumed_training_equals_uninterrupted_training(tmp_path, frozen):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10, 0.01)
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.MultiSteps(
            optax.adamw(schedule, eps=1e-6), every_k_schedule=2
        ).gradient_transformation(),
    )

    def init(seed):
        params = {"w": values((4, 3), seed=seed) * 0.5, "b": values(3, seed=seed), "unused": None}
        opt_state = optimizer.init(params)
        tree = State(params, opt_state, jnp.int32(0), jax.random.key(seed))
        return store(jsa.as_scaled_array(tree, scale="rms"))

    def store(tree):
        def moments(node):
            if not isinstance(node, optax.ScaleByAdamState):
                return node
            mu = jsa.tree.astype(node.mu, jnp.float8_e5m2)
            return node._replace(mu=mu, nu=jsa.tree.astype(node.nu, jnp.bfloat16))

        rest = jax.tree.map(
            moments, tree.rest, is_leaf=lambda n: isinstance(n, optax.ScaleByAdamState)
        )
        return tree._replace(params=jsa.tree.astype(tree.params, jnp.float16), rest=rest)

    def step(tree, x, y):
        params, opt_state = jsa.tree.astype((tree.params, tree.rest), jnp.float32)
        key, noise = jax.random.split(tree.key)

        def loss_fn(p):
            h = jnp.tanh(x @ p["w"] + p["b"]) + 0.1 * jax.random.normal(noise, (8, 3))
            return jnp.mean((h - y) ** 2)

        updates, opt_state = optimizer.update(jax.grad(loss_fn)(params), opt_state, params)
        params = optax.apply_updates(params, updates)
        new = store(State(params, opt_state, tree.step + 1, key))
        return jsa.match_scales(new, tree) if frozen else new

    update = jax.jit(jsa.scalify(step), donate_argnums=0)
    kind = jsa.freeze_scales if frozen else jsa.thaw_scales

    def start():  # scales are frozen when the first steps have found them
        return kind(train(init(0), range(2), jax.jit(jsa.scalify(step))))

    whole = train(start(), range(2, 8), update)
    save(tmp_path / "x", train(start(), range(2, 5), update))
    resumed = restore(tmp_path / "x", like=kind(init(1)))
    assert int(resumed.step) == 5
    resumed = train(resumed, range(5, 8), update)
    assert_same(resumed, whole)
    for name in ("w", "b"):
        assert whole.params[name].is_static == frozen
        assert whole.params[name].dtype == jnp.float16
        assert np.isfinite(np.asarray(whole.params[name])).all()
    mu = optax.tree.get(jsa.asarray(whole.rest, jnp.float32), "mu")["w"]
    assert np.any(np.asarray(mu) != 0)


# Other versions of JAX


@pytest.mark.parametrize("version", ["0.10", "0.12"])
def test_checkpoints_of_other_versions(tmp_path, version):
    shutil.unpack_archive(STORED / f"jax-{version}.zip", tmp_path)
    assert_same(restore(tmp_path / "ours", state(1)), state())
    assert_same(restore(tmp_path / "orbax", array_state(1)), array_state())
    with ocp.StandardCheckpointer() as checkpointer:
        got = checkpointer.restore(tmp_path / "orbax", shapes(array_state(1)))
        assert_same(got, array_state())


def write():
    """Write the checkpoints of this version."""
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory, "ours"), state())
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path(directory, "orbax"), array_state())
        for note in Path(directory).rglob("commit_success.txt"):  # it names the directory
            note.unlink()
        version = ".".join(jax.__version__.split(".")[:2])
        shutil.make_archive(str(STORED / f"jax-{version}"), "zip", directory)


if __name__ == "__main__":
    write()


# Parts, and what should not be saved


def test_a_part_of_a_checkpoint(tmp_path, monkeypatch):
    whole = {"params": array_state().params, "opt_state": array_state(1).rest, "step": 3}
    save(tmp_path / "x", whole)
    part = {"params": array_state(1).params}
    with pytest.raises(ValueError, match="'opt_state/0/0/count' .* has no place in `like`"):
        restore(tmp_path / "x", part)
    assert_same(restore(tmp_path / "x", part, partial=True), {"params": whole["params"]})
    assert_same(from_storable(to_storable(whole), part, partial=True), {"params": whole["params"]})
    narrow = {"params": {"plain": ScaledArray(jnp.zeros(4, jnp.float16), 1.0)}}
    restored = restore(tmp_path / "x", narrow, partial=True)["params"]["plain"]
    np.testing.assert_array_equal(jsa.asarray(restored, jnp.float32), whole["params"]["plain"])
    with pytest.raises(ValueError, match="'params/w' is missing"):
        restore(tmp_path / "x", {"params": {"w": jnp.zeros(2)}}, partial=True)
    # The rest is not read: its files may be gone.
    read = []
    original = ocp.PyTreeCheckpointHandler.restore
    monkeypatch.setattr(
        ocp.PyTreeCheckpointHandler,
        "restore",
        lambda self, *args, **kwargs: (
            read.append(kwargs["args"]) or original(self, *args, **kwargs)
        ),
    )
    restore(tmp_path / "x", part, partial=True)
    leaves = jax.tree_util.tree_leaves_with_path(read[0].item)
    assert all((leaf is ocp.PLACEHOLDER) != ("params" in str(path)) for path, leaf in leaves)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    good = state()
    save(tmp_path / "x", good, check_finite=True)
    bad = {
        "params": {"w": ScaledArray(jnp.asarray([1, np.inf, np.nan, -np.inf], jnp.float16), 2.0)},
        "narrow": jnp.asarray([np.nan, 1], jnp.float8_e4m3fn),
        "number": np.float64(np.inf),
        "complex": jnp.complex64(complex(1, np.nan)),
        "scale": ScaledArray(jnp.ones(1), jnp.float32(np.inf)),
        "fine": jnp.ones(3),
    }
    with pytest.raises(ValueError, match="is not finite, and nothing was saved") as error:
        save(tmp_path / "x", bad, check_finite=True, overwrite=True)
    assert str(error.value).splitlines()[1:-1] == [
        "  'complex': 1 nan of 1 elements",
        "  'narrow': 1 nan of 2 elements",
        "  'number': 1 inf of 1 elements",
        "  'params/w': 1 nan and 2 inf of 4 elements",
        "  'scale', its scale: 1 inf of 1 elements",
    ]
    assert_same(restore(tmp_path / "x", state(1)), good)
    save(tmp_path / "y", {"best": jnp.float32(np.inf)})  # is a value, where one says nothing


def test_an_error_says_how_to_read_a_part_and_what_there_is():
    stored = to_storable({"params": {"w": jnp.ones(2)}, "ema": {"ema": {"w": jnp.ones(2)}}})
    with pytest.raises(ValueError, match="`partial=True` leaves out what has no place"):
        from_storable(stored, {"params": {"w": jnp.ones(2)}})
    with pytest.raises(ValueError, match="\nIt has .*'ema/ema/w'") as error:
        from_storable(stored, {"ema": {"w": jnp.ones(2)}}, partial=True)
    assert "partial" not in str(error.value)
