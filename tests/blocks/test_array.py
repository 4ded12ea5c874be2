"""Arrays in block formats: how they are made, read, moved, cut, stored and used."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.blocks.storage import pack_elements, unpack_elements
from tests import block_values as reference

FORMS = {name: jsa.BlockFormat(name) for name in ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")}


def bits(x):
    return np.asarray(x).view(np.uint8)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(bits(g), bits(w))


def test_values_are_those_of_the_format_along_any_axis():
    x = reference.normal(3, 70, 20, dtype=jnp.float32)
    for name, axis in (("mxfp8", None), ("mxfp4", 2), ("nvfp4", 0)):
        w = jsa.as_scaled_array(x, block=(name, axis))
        want = reference.rounded(x, FORMS[name], -2 if axis is None else axis)
        np.testing.assert_array_equal(w.to_array(jnp.float32), np.float32(want))
        assert w.shape == x.shape and w.dtype == x.dtype
    assert w.block_shape == (16, 1, 1) and w.block_scales.shape == (1, 70, 20)


def test_what_becomes_an_array_in_blocks():
    tree = {"kernel": jnp.ones((40, 8)), "bias": jnp.ones(8), "step": 3, "scale": jnp.float32(2)}
    state = jsa.as_scaled_array(tree, block="mxfp4")
    kinds = jsa.tree.map(lambda x: type(x).__name__, state)
    assert kinds == {"kernel": "BlockScaledArray", "step": "int"} | dict.fromkeys(
        ("bias", "scale"), "ScaledArray"
    )
    chex.assert_trees_all_equal(jsa.asarray(state), tree)
    assert jsa.as_scaled_array(state)["kernel"] is state["kernel"]
    rule = lambda path, leaf: ("nvfp4", -1) if leaf.ndim == 1 else None  # noqa: E731
    ruled = jsa.as_scaled_array(tree, block=rule)
    assert ruled["bias"].block_shape == (16,) and type(ruled["kernel"]) is jsa.ScaledArray
    scaled = jsa.scaled_array(jnp.ones((64, 2)), jnp.float32(2.0**40))
    kept = jsa.as_scaled_array(scaled, block="mxfp8")
    assert kept.scale is scaled.scale and float(jsa.asarray(kept)[0, 0]) == 2.0**40
    assert jsa.freeze_scales(kept).scale == 2.0**40
    assert jsa.thaw_scales(jsa.freeze_scales(kept)).scale == 2.0**40


def test_the_scale_of_the_whole():
    x = reference.normal(2, 64, 8) * 1e-30
    nvfp4 = jsa.as_scaled_array(x, block="nvfp4")
    largest = float(jnp.max(jnp.abs(x)))
    assert largest <= 2688 * float(nvfp4.scale) < 2.001 * largest
    each = jsa.as_scaled_array(x * jnp.array([1, 1e9])[:, None, None], block="nvfp4", axis=0)
    assert each.scale.shape == (2, 1, 1) and each.scale[1, 0, 0] > 2.0**20 * each.scale[0, 0, 0]
    assert jsa.as_scaled_array(x, block="mxfp8").scale == 1.0
    rms = jsa.as_scaled_array(x, "rms", block="mxfp8")
    assert 1 < float(jnp.sqrt(jnp.mean(jnp.square(x / rms.scale)))) < 2
    np.testing.assert_array_equal(rms, jsa.as_scaled_array(x, block="mxfp8"))


def test_transposes_are_exact_and_of_square_blocks_the_same():
    x = reference.normal(70, 40)
    square = jsa.BlockFormat("mxfp4", square=True)
    for block in ("mxfp4", square):
        w = jsa.as_scaled_array(x, block=block)
        np.testing.assert_array_equal(w.T.to_array(), w.to_array().T)
    assert w.block_scales.shape == (3, 2) and w.nbytes == 35 * 40 + 6
    assert_same(jsa.as_scaled_array(x.T, block=square), w.T)


def test_stochastic_rounding_takes_a_key():
    form = jsa.BlockFormat("mxfp8", rounding="stochastic")
    x = jnp.full((96, 200), 1.03)
    w = jsa.as_scaled_array({"w": x}, block=form, key=jax.random.key(0))["w"].to_array()
    assert set(np.unique(w)) == {1.0, 1.125} and abs(float(w.mean()) - 1.03) < 0.002
    with pytest.raises(ValueError, match="`key` must be a key"):
        jsa.as_scaled_array(x, block=form)


def test_jit_vmap_scan_and_scalify_take_them():
    x, w = reference.normal(4, 40), reference.normal(3, 40, 40, seed=1) / 8
    layers = jsa.as_scaled_array(w, block="nvfp4", axis=0)
    values = jsa.asarray(layers)

    def network(layers, x):
        step = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
        return jax.lax.scan(step, x, layers)[0]

    want = network(values, x)
    np.testing.assert_allclose(jax.jit(network)(layers, x), want, rtol=1e-5)
    each = jax.vmap(lambda w: w.to_array())(layers)
    np.testing.assert_array_equal(each, values)
    out = jax.jit(jsa.scalify(network))(layers, jsa.as_scaled_array(x))
    np.testing.assert_allclose(jsa.asarray(out), want, rtol=1e-4, atol=1e-5)
    gradient = jsa.scalify(jax.grad(lambda x, w: jnp.sum(network(w, x))))
    scaled = gradient(jsa.as_scaled_array(x), layers)
    plain = jax.grad(lambda x: jnp.sum(network(values, x)))(x)
    np.testing.assert_allclose(jsa.asarray(scaled), plain, rtol=1e-3, atol=1e-5)


def test_stored_weights_in_matmuls_of_their_format_are_not_rounded_again():
    x, w = reference.normal(4, 64), reference.normal(64, 8, seed=1)
    for name in ("mxfp8", "nvfp4"):
        stored = jsa.as_scaled_array(w, block=name)
        formats = dict(forward_dtype=(jnp.float32, name), backward_dtype=jnp.float32)
        out = jsa.nn.matmul(x, stored, **formats)
        np.testing.assert_allclose(out, x @ stored.to_array(), rtol=2e-5, atol=1e-5)
    np.testing.assert_array_equal(jsa.nn.linear(x, stored, forward_dtype=jnp.float32), x @ stored)


def test_checkpoints(tmp_path):
    x = reference.normal(3, 70, 21, dtype=jnp.bfloat16)
    state = {
        name: jsa.as_scaled_array(x, block=(name, -1), axis=0 if name == "nvfp4" else None)
        for name in FORMS
    }
    state["frozen"] = jsa.freeze_scales(jsa.as_scaled_array(x, "rms", block="mxfp4"))
    path = tmp_path / "checkpoint"
    jsa.checkpoint.save(path, state)
    like = jax.eval_shape(lambda: state)
    assert_same(jsa.checkpoint.restore(path, like), state)
    stored = jsa.checkpoint.to_storable(state)
    sizes = {n: stored[n].shape[-1] for n in stored if n.endswith("block_data")}
    assert (
        sizes["mxfp4/mxfp4_1x32/block_data"] == 11
        and stored["frozen/mxfp4_32x1/block_data"].dtype == np.uint8
    )
    plain = {name: jax.ShapeDtypeStruct(x.shape, jnp.float32) for name in state}
    for name, value in jsa.checkpoint.from_storable(stored, plain).items():
        np.testing.assert_array_equal(value, state[name].to_array(jnp.float32))
    scaled = jsa.checkpoint.from_storable(stored, jsa.as_scaled_array(plain_zeros(plain)))
    np.testing.assert_array_equal(scaled["nvfp4"].to_array(), state["nvfp4"].to_array(jnp.float32))
    again = jsa.checkpoint.from_storable(
        jsa.checkpoint.to_storable({"w": x}), {"w": state["frozen"]}
    )
    np.testing.assert_array_equal(again["w"], state["frozen"])
    other = jsa.checkpoint.from_storable(
        {
            "w/mxfp4_1x32/" + n.rpartition("/")[2]: v
            for n, v in stored.items()
            if n.startswith("mxfp4/")
        },
        {"w": state["mxfp8"]},
    )
    np.testing.assert_array_equal(other["w"], state["mxfp4"])
    wrong = {**like, "mxfp4": jax.eval_shape(lambda: jsa.as_scaled_array(x[:, :2], block="mxfp4"))}
    with pytest.raises(ValueError, match=r"'mxfp4' has elements uint8\[3, 70, 11\], `like` has"):
        jsa.checkpoint.restore(path, wrong)


def plain_zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def test_two_elements_lie_in_a_byte():
    x = jnp.arange(-7, 8).astype(jnp.float4_e2m1fn)
    packed = pack_elements(x)
    assert packed.shape == (8,) and bits(packed)[0] == (bits(x)[1] << 4 | bits(x)[0])
    np.testing.assert_array_equal(bits(unpack_elements(packed, (15,))), bits(x))


def test_bad_arguments():
    x = jnp.ones((4, 4))
    with pytest.raises(TypeError, match="`block` must be a `jsa.BlockFormat` or one of"):
        jsa.as_scaled_array(x, block="mxfp6")
    with pytest.raises(ValueError, match="`block` has the axis 2"):
        jsa.as_scaled_array(x, block=("mxfp4", 2))
    with pytest.raises(ValueError, match="`block` has square blocks"):
        jsa.as_scaled_array(x, block=(jsa.BlockFormat("mxfp4", square=True), 0))
    with pytest.raises(ValueError, match=r"A rule of .*'w'.*: a block format is for real arrays"):
        jsa.as_scaled_array({"w": jnp.float32(1)}, block=lambda path, leaf: "mxfp4")
    with pytest.raises(ValueError, match="The rule `block` matches no leaf"):
        jsa.as_scaled_array({"w": x}, block=lambda path, leaf: None)
    with pytest.raises(ValueError, match="`T` is of matrices"):
        jsa.as_scaled_array(x[None], block="mxfp4").T  # noqa: B018


@pytest.mark.parametrize("name", FORMS)
def test_the_largest_float16_stays_finite_and_infinities_stay_infinite(name):
    """MX formats round 65,504 to 65,536, which float16 does not hold."""
    x = np.full((64, 32), 65504, np.float16)
    x[32, :4] = -np.inf
    array = jsa.as_scaled_array(jnp.asarray(x), block=name)
    inside = jax.jit(jsa.scalify(lambda x: x * np.float16(0.5)))(array)
    outside = np.asarray(jsa.asarray(array), np.float32)
    for got, most in ((outside, 65504), (2 * np.asarray(jsa.asarray(inside, jnp.float32)), 67584)):
        assert (got[:32] >= 57344).all() and (got[:32] <= most).all()
        assert not np.isfinite(got[32, :4]).any()
