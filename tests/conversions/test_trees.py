"""Conversions between trees of arrays and trees of scaled arrays."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.scales.algebra import Scale

DTYPES = ("float32", "float16", "bfloat16")


def scale_of(x):
    return np.asarray(x.scale)


class TestAsScaledArray:
    def test_default_scale(self):
        tree = jsa.as_scaled_array({"w": jnp.full(3, 5.0), "z": jnp.zeros(3), "s": 2.0})
        assert float(tree["w"].scale) == 1 and float(tree["z"].scale) == 0
        assert float(tree["s"]) == 2
        assert tree["w"].scale.dtype == jnp.float32 and tree["w"].scale.shape == ()

    def test_traced_leaves_have_scale_one(self):
        out = jax.jit(jsa.as_scaled_array)(jnp.zeros(3))
        assert float(out.scale) == 1

    def test_other_leaves_pass_through(self):
        tree = {
            "i": jnp.arange(3),
            "b": np.array([True]),
            "k": jax.random.key(0),
            "n": None,
            "f": len,
            "s": "text",
            "t": 3,
            "flag": True,
        }
        out = jsa.as_scaled_array(tree)
        for name, leaf in tree.items():
            assert out[name] is leaf

    @pytest.mark.parametrize("value", [np.array(["a"]), np.array([object()]), np.array([b"a"])])
    def test_arrays_of_objects_and_strings(self, value):
        with pytest.raises(TypeError, match=r"`tree\['w'\]` is an array of dtype"):
            jsa.as_scaled_array({"w": value})

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scale", [2.0**-20, 1, 3.0, 2.0**20, "rms", "max"])
    def test_the_value_stays(self, dtype, scale):
        rng = np.random.default_rng(0)
        size = scale if not isinstance(scale, str) else 2.0**-5
        size = min(size, 2.0**10) if dtype == "float16" else size
        x = jnp.asarray(rng.normal(size=(4, 5)) * max(size, 2.0**-6), dtype)
        scale = max(scale, 2.0**-12) if dtype == "float16" and scale == 2.0**-20 else scale
        out = jsa.as_scaled_array(x, scale)
        exact = np.asarray(x).astype(np.float64)
        got = np.asarray(out, np.float64)
        np.testing.assert_allclose(got, exact, rtol=1e-6, atol=np.abs(exact).max() * 1e-3)
        assert np.frexp(scale_of(out))[0] == 0.5
        assert out.dtype == dtype

    def test_statistics(self):
        x = jnp.asarray([3.0, -4, 0, 0]) * 2.0**-30
        assert float(jsa.as_scaled_array(x, "rms").scale) == 2.0**-29
        assert float(jsa.as_scaled_array(x, "max").scale) == 2.0**-28
        assert float(jsa.as_scaled_array(jnp.zeros(2), "rms").scale) == 0
        for stat in ("rms", "max"):
            x = jnp.full(4, 2.0**100)
            assert float(jsa.as_scaled_array(x, stat).scale) == 2.0**100
            x = jnp.full(4, 2.0**-100)
            assert float(jsa.as_scaled_array(x, stat).scale) == 2.0**-100

    def test_dtype_is_applied_after_the_division(self):
        x = jnp.full((2, 2), 3.0 * 2.0**-40)
        out = jsa.as_scaled_array(x, "rms", dtype=jnp.float16)
        assert out.dtype == jnp.float16
        np.testing.assert_array_equal(np.asarray(out, np.float64), x)

    def test_axis(self):
        x = jnp.asarray([[1.0, 100.0, 1e-6], [2.0, 50.0, 3e-6]])
        out = jsa.as_scaled_array({"w": x, "b": x[0, 0]}, "max", axis=1)
        assert out["w"].scale.shape == (1, 3) and out["b"].scale.shape == ()
        np.testing.assert_array_equal(out["w"].scale[0], [2, 64, 2.0**-19])
        np.testing.assert_allclose(np.asarray(out["w"]), x)
        assert jsa.as_scaled_array(x, "rms", axis=0).scale.shape == (2, 1)
        assert jsa.as_scaled_array(x, "rms", axis=-1).scale.shape == (1, 3)
        assert jsa.as_scaled_array(x, axis=(0, 1)).scale.shape == (2, 3)
        assert jsa.as_scaled_array(x, axis=0).scale.shape == (2, 1)
        zero = jsa.as_scaled_array(x.at[:, 1].set(0), "max", axis=1)
        np.testing.assert_array_equal(zero.scale[0], [2, 0, 2.0**-19])

    def test_an_array_as_scale(self):
        x = jnp.ones((2, 3))
        scale = jnp.asarray([[2.0], [3.0]])
        out = jsa.as_scaled_array(x, scale)
        np.testing.assert_array_equal(out.scale, [[2], [2]])
        np.testing.assert_array_equal(np.asarray(out), x)

    def test_a_scaled_leaf_stays(self):
        x = ScaledArray(jnp.ones(2, jnp.float16), jnp.float32(8))
        assert jsa.as_scaled_array(x) is x
        assert jsa.as_scaled_array(x, dtype=jnp.float32).dtype == jnp.float32

    def test_scale_buffers_are_not_shared(self):
        tree = jsa.as_scaled_array([jnp.ones(2), jnp.ones(2), jnp.zeros(2)], jnp.float32(1) + 0)
        pointers = {leaf.scale.unsafe_buffer_pointer() for leaf in tree}
        assert len(pointers) == 3
        moved = jax.jit(lambda t: t, donate_argnums=0)(tree)
        assert [float(leaf.scale) for leaf in moved] == [1, 1, 1]

    def test_a_dtype_that_does_not_exist(self):
        with pytest.raises(TypeError, match="`dtype` must be a dtype, as .*got 'foo'"):
            jsa.asarray(jsa.as_scaled_array(jnp.ones(2)), "foo")

    @pytest.mark.parametrize("scale", [-1.0, np.nan, np.inf, -np.inf, np.array([1.0, -2.0])])
    def test_scales_that_no_array_can_have(self, scale):
        with pytest.raises(ValueError, match="`scale` must be finite and not negative"):
            jsa.as_scaled_array(jnp.ones(2), scale)

    @pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 1, 1), (2, 3, 1)])
    def test_scales_of_a_shape_that_does_not_fit(self, shape):
        with pytest.raises(ValueError, match=r"`scale` of shape .* does not fit data of shape"):
            jsa.as_scaled_array(jnp.ones((2, 3)), np.ones(shape))

    def test_zero_scale_with_data(self):
        with pytest.raises(ValueError, match="`scale` 0 needs data that is zero"):
            jsa.as_scaled_array(jnp.ones(2), 0.0)
        assert float(jsa.as_scaled_array(jnp.zeros(2), 0.0).scale) == 0
        with pytest.raises(ValueError, match="`scale` 0 needs data that is zero"):
            jsa.as_scaled_array(jnp.ones((2, 2)), np.array([[1.0], [0.0]]))

    def test_unknown_statistic(self):
        with pytest.raises(ValueError, match="`scale` must be None, a number, .* got \"?'median"):
            jsa.as_scaled_array(jnp.ones(2), "median")

    def test_a_scale_that_is_not_a_number(self):
        for scale in (object(), [object()]):
            with pytest.raises(TypeError, match="`scale`"):
                jsa.as_scaled_array(jnp.ones(2), scale)

    def test_empty_and_0d(self):
        out = jsa.as_scaled_array([jnp.zeros((0, 3)), jnp.float32(3)], "rms")
        assert out[0].shape == (0, 3) and float(out[0].scale) == 0 and float(out[1]) == 3


class TestScaledArrayFunction:
    def test_value(self):
        x = jsa.scaled_array(np.array([1.0, 2.0], np.float32), np.float32(6))
        np.testing.assert_array_equal(np.asarray(x), [6, 12])
        assert float(x.scale) == 4 and not x.is_static

    def test_a_known_scale_of_a_rule_is_static(self):
        x = ScaledArray(jnp.ones(2), Scale(3))
        assert x.is_static and Scale(3).is_static
        (data,), tree = jax.tree.flatten(x)
        assert jax.tree.unflatten(tree, [data]).scale == 8

    def test_a_python_number_is_static(self):
        x = jsa.scaled_array([1.0, 2.0], 6.0)
        assert x.is_static and x.scale == 4.0
        np.testing.assert_array_equal(np.asarray(x), [6, 12])
        assert jsa.scaled_array([1.0], 2).scale == 2

    def test_zero(self):
        assert jsa.scaled_array([0.0], 0.0).scale == 0
        with pytest.raises(ValueError, match="`scale` 0"):
            jsa.scaled_array([1.0], 0.0)

    def test_integers(self):
        with pytest.raises(TypeError, match="`data` must have a floating dtype"):
            jsa.scaled_array(jnp.arange(3), 1.0)
        assert jsa.scaled_array([1, 2], 1.0, dtype=jnp.float16).dtype == jnp.float16

    @pytest.mark.parametrize("scale", [-1.0, np.nan, np.inf])
    def test_bad_scales(self, scale):
        with pytest.raises(ValueError, match="`scale` must be finite and not negative"):
            jsa.scaled_array([1.0], scale)
        with pytest.raises(ValueError, match="`scale` must be finite and not negative"):
            jsa.scaled_array([1.0], np.float32(scale))

    @pytest.mark.parametrize("scale", [2.0**127, 2.0**-130, 2.0**150])
    def test_scales_outside_float32_keep_the_value(self, scale):
        x = jsa.scaled_array(jnp.asarray([0.5 if scale < 1 else 2.0**-60]), scale)
        assert 2.0**-126 <= x.scale <= 2.0**126

    def test_scale_dtype(self):
        x = jsa.scaled_array([1.0], jnp.float16(2))
        assert x.scale.dtype == jnp.float32


class TestAsArray:
    def test_tree(self):
        tree = {
            "x": ScaledArray(jnp.ones(2, jnp.float16), jnp.float32(2)),
            "i": 3,
            "p": jnp.ones(1),
        }
        out = jsa.asarray(tree)
        np.testing.assert_array_equal(out["x"], [2, 2])
        assert out["x"].dtype == jnp.float16 and out["i"] == 3 and out["p"] is tree["p"]
        out = jsa.asarray(tree, jnp.bfloat16)
        assert out["x"].dtype == out["p"].dtype == jnp.bfloat16 and out["i"] == 3

    def test_static(self):
        x = ScaledArray(jnp.ones(2, jnp.float16), 2.0**-30)
        np.testing.assert_array_equal(jsa.asarray(x, jnp.float32), [2.0**-30] * 2)

    def test_the_cast_of_the_scale_comes_last(self):
        x = ScaledArray(jnp.asarray([40000.0], jnp.float16), jnp.float32(2.0**-25))
        assert float(jsa.asarray(x)[0]) == float(np.float16(40000 * 2.0**-25)) > 0

    def test_to_fp8_saturates(self):
        x = ScaledArray(jnp.asarray([100.0]), jnp.float32(16))
        assert float(jsa.asarray(x, jnp.float8_e4m3fn)[0]) == 448


@pytest.mark.parametrize("number", [0.5, -np.inf, 3, True, 1j])
def test_python_numbers_in_a_tree_are_settings(number):
    tree = {"w": jnp.ones(2), "rate": number}
    seen = []

    def f(tree):
        seen.append(tree["rate"])
        return {"w": 2 * tree["w"], "rate": tree["rate"]}

    for static in (False, True):
        out = jsa.as_scaled_array(tree, scale="rms", dtype=jnp.float16, static=static)
        assert out["rate"] is number and out["w"].dtype == jnp.float16
        assert jsa.asarray(out, jnp.float32)["rate"] is number
        assert jsa.scalify(f)(out)["rate"] is number
    assert jsa.fp8_matmuls(f)(tree)["rate"] is number
    assert all(each is number for each in seen) and len(seen) == 3
    assert float(jsa.as_scaled_array(0.5)) == 0.5  # a number by itself is data
    assert isinstance(jsa.as_scaled_array(0.5), ScaledArray)


def test_extension_dtypes_are_floats():
    leaf = np.ones(2, ml_dtypes.bfloat16)
    assert isinstance(jsa.as_scaled_array(leaf), ScaledArray)


@pytest.mark.parametrize("make", [jsa.scaled_array, jsa.as_scaled_array])
@pytest.mark.parametrize("scale", [np.float32(2.0**-130), np.float64(2.0**-140)])
def test_a_scale_below_float32_is_not_lost(make, scale):
    x = make(jnp.full(1, 2.0**60, jnp.float32), scale)
    assert float(x.scale) > 0


@pytest.mark.parametrize("scale", [0.0, 2.0, 6.0])
def test_a_static_scale_while_tracing(scale):
    x = jnp.zeros(2, jnp.float16) if scale == 0 else jnp.ones(2, jnp.float16)
    got = jax.jit(lambda x: jsa.scaled_array(x, scale))(x)
    assert got.is_static and got.scale == {0: 0, 2: 2, 6: 4}[scale]
    np.testing.assert_array_equal(got.to_array(), scale * x)


def test_a_leaf_with_inf_keeps_its_other_values():
    x = jsa.as_scaled_array(jnp.asarray([np.inf, 1.0, 0.5], jnp.float16), "rms")
    np.testing.assert_array_equal(np.asarray(x), [np.inf, 1, 0.5])


def test_float64_values_outside_float32_are_kept():
    with jax.enable_x64(True):
        small = jsa.as_scaled_array(jnp.full(2, 1e-100, jnp.float64), "max")
        np.testing.assert_array_equal(np.asarray(small), 1e-100)
        assert float(jsa.scaled_array(jnp.float64(1), 0.1)) == 0.1
        out = jsa.scalify(lambda x, s: x * s)(
            jsa.as_scaled_array(jnp.ones(2, jnp.float64)), jnp.float64(1e-60)
        )
        np.testing.assert_array_equal(np.asarray(out), 1e-60)


@pytest.mark.parametrize("make", [jsa.scaled_array, jsa.as_scaled_array])
def test_scale_dtypes_that_are_too_narrow(make):
    with pytest.raises(TypeError, match="`scale_dtype` must be float32"):
        make(jnp.ones(2), np.float32(2), scale_dtype=jnp.float8_e8m0fnu)


@pytest.mark.parametrize("scale", [2.0, jnp.float32(2)])
def test_infinite_complex_numbers(scale):
    """`(inf + 0i) * (2 + 0i)` has a nan; a scale multiplies the parts."""
    values = np.array([np.inf, complex(1, -np.inf), 1 + 2j], np.complex64)
    x = jsa.as_scaled_array(jnp.asarray(values), scale=scale)
    for got in (x.to_array(), np.asarray(x), jsa.asarray(jsa.scalify(lambda x: x[::-1])(x))[::-1]):
        np.testing.assert_array_equal(got, values)
    r = jsa.as_scaled_array(jnp.array([1.0, jnp.inf, jnp.inf, 1.0]), scale=scale)

    def transformed(r):
        return jnp.fft.ifft(r).real + 1

    np.testing.assert_array_equal(
        jsa.asarray(jsa.scalify(transformed)(r)), transformed(jsa.asarray(r))
    )
