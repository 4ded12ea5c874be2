"""The functions that speak about scales, with and without `scalify`, under every transform."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import scaled

X = np.array([1.0, -2.0, 3.0], np.float32)
FP8 = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}

IDENTITIES = {
    "set_scaling": lambda x: jsa.set_scaling(x, 8.0),
    "set_scaling-traced": lambda x: jsa.set_scaling(x, jnp.max(jnp.abs(x))),
    "rebalance_scale": lambda x: jsa.rebalance_scale(x, 4.0),
    "stop_scaling": jsa.stop_scaling,
    "dynamic_rescale": jsa.dynamic_rescale,
    "dynamic_rescale-max": lambda x: jsa.dynamic_rescale(x, "max", 2.0**10),
    "get_data_and_scale": lambda x: jnp.multiply(*jsa.get_data_and_scale(x)),
    "match_scales": lambda x: jsa.match_scales(x, x * 4),
    "lax.set_scaling": lambda x: jsa.lax.set_scaling(x, 2.0),
    "lax.get_data_scale": lambda x: jnp.multiply(*jsa.lax.get_data_scale(x)),
    "lax.stop_scaling": jsa.lax.stop_scaling,
    "lax.rebalance": lambda x: jsa.lax.rebalance(x, 2.0),
    **{
        name: getattr(jsa.ops, name)
        for stat in ("l1", "l2", "max")
        for name in (f"dynamic_rescale_{stat}", f"dynamic_rescale_{stat}_grad")
    },
    "cast_on_backward": lambda x: jsa.ops.cast_on_backward(x, jnp.float32),
    "reduce_precision_on_forward": lambda x: jsa.ops.reduce_precision_on_forward(x, jnp.float32),
    "reduce_precision_on_backward": lambda x: jsa.ops.reduce_precision_on_backward(x, jnp.float32),
}

TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2)),
    "vmap-grad": lambda f: jax.vmap(jax.grad(lambda x: f(x) ** 2)),
    "grad-vmap": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x) ** 2)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x * 2,)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
    "remat": lambda f: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x) ** 2)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", IDENTITIES)
def test_identities_without_scalify(name, transform):
    through = TRANSFORMS[transform](IDENTITIES[name])
    plain = TRANSFORMS[transform](lambda x: x)
    for got, want in zip(
        jax.tree.leaves(through(jnp.asarray(X))), jax.tree.leaves(plain(jnp.asarray(X)))
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("transform", ["eager", "jit", "vmap", "grad", "grad-vmap", "jvp"])
@pytest.mark.parametrize("name", IDENTITIES)
def test_values_inside_scalify(name, transform):
    fun = TRANSFORMS["eager" if transform == "jit" else transform](IDENTITIES[name])
    plain = TRANSFORMS["eager" if transform == "jit" else transform](lambda x: x)
    scalified = jsa.scalify(fun)
    if transform == "jit":
        scalified = jax.jit(scalified)
    x = ScaledArray(jnp.asarray(X), jnp.float32(2.0**-10))
    expected = jax.tree.leaves(plain(jnp.asarray(X) * 2.0**-10))
    got = jax.tree.leaves(scalified(x), is_leaf=lambda v: isinstance(v, ScaledArray))
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(g), e)


@pytest.mark.parametrize("name", ["set_scaling", "rebalance_scale", "stop_scaling"])
def test_linear_transpose(name):
    fun = IDENTITIES[name]
    (out,) = jax.linear_transpose(fun, jnp.asarray(X))(jnp.asarray(X) * 2)
    np.testing.assert_array_equal(out, 2 * X)


def test_can_be_exported():
    fun = jax.jit(lambda x: jsa.dynamic_rescale(jsa.set_scaling(x, 4.0)) * 2)
    exported = jax.export.export(fun)(jax.ShapeDtypeStruct((3,), jnp.float32))
    np.testing.assert_array_equal(exported.call(jnp.asarray(X)), 2 * X)


class TestScales:
    @pytest.mark.parametrize(
        ("asked", "got"), [(8.0, 8), (jnp.float32(6.0), 4), (jnp.float32(0.3), 0.25)]
    )
    def test_set_scaling(self, asked, got):
        out = jsa.scalify(lambda x: jsa.set_scaling(x, asked))(scaled(X, 2.0))
        assert float(out.scale) == got
        np.testing.assert_array_equal(np.asarray(out), 2 * X)

    def test_set_scaling_to_a_traced_scale(self):
        fun = jax.jit(jsa.scalify(lambda x, s: jsa.set_scaling(x, s)))
        assert float(fun(scaled(X, 2.0), jnp.float32(16)).scale) == 16
        out = jsa.scalify(lambda x: jsa.set_scaling(x, jnp.max(x)))(scaled(X, 2.0**20))
        assert float(out.scale) == 2.0**21

    def test_set_scaling_of_plain_input_makes_it_scaled(self):
        out = jsa.scalify(lambda x: jsa.set_scaling(x, 4.0) * 2)(jnp.asarray(X))
        assert isinstance(out, ScaledArray)
        np.testing.assert_array_equal(np.asarray(out), 2 * X)

    def test_set_scaling_in_float16_casts_once(self):
        x = scaled([2.0**-10, 3 * 2.0**-10], 2.0**30, jnp.float16)
        out = jsa.scalify(lambda v: jsa.set_scaling(v, 2.0**20))(x)
        np.testing.assert_array_equal(out.data, [1, 3])

    def test_set_scaling_per_axis(self):
        scale = np.array([[2.0], [8.0]], np.float32)
        out = jsa.scalify(lambda x: jsa.set_scaling(x, scale))(scaled(np.ones((2, 3)), 4.0))
        np.testing.assert_array_equal(out.scale, scale)
        np.testing.assert_array_equal(np.asarray(out), np.full((2, 3), 4))

    def test_vmapped_scales(self):
        fun = jsa.scalify(lambda x, s: jax.vmap(jsa.set_scaling)(x, s))
        out = fun(scaled(np.ones((2, 3)), 4.0), jnp.asarray([2.0, 8.0]))
        np.testing.assert_array_equal(np.asarray(out), np.full((2, 3), 4))
        assert out.scale.shape in ((2,), (2, 1))

    @pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
    def test_bad_scales(self, bad):
        for function in (jsa.set_scaling, jsa.rebalance_scale):
            with pytest.raises(ValueError, match="must be finite and not negative"):
                function(jnp.asarray(X), bad)

    @pytest.mark.parametrize("bad", [3.0, 3, np.float32(0.3), np.array([2.0, 3.0, 4.0])])
    def test_numbers_that_are_no_powers_of_two(self, bad):
        for function, name in ((jsa.set_scaling, "scale"), (jsa.rebalance_scale, "factor")):
            for x in (jnp.asarray(X), scaled(X, 2.0)):
                with pytest.raises(ValueError, match=f"`{name}` must be a power of two, got"):
                    function(x, bad)

    def test_a_shape_that_does_not_fit(self):
        with pytest.raises(ValueError, match="does not fit data of shape"):
            jsa.set_scaling(jnp.asarray(X), np.ones(2))

    @pytest.mark.parametrize("bad", ["text", None, [1.0]])
    def test_what_is_not_an_array(self, bad):
        for function in (jsa.get_data_and_scale, jsa.ops.dynamic_rescale_l2):
            with pytest.raises(TypeError, match="`x` must be an array or a ScaledArray"):
                function(bad)

    def test_integers_pass(self):
        x = jnp.arange(3)
        assert jsa.set_scaling(x, 2.0) is x
        assert jsa.get_data_and_scale(x)[0] is x
        assert jsa.ops.dynamic_rescale_l2(x) is x

    def test_rebalance(self):
        out = jsa.scalify(lambda x: jsa.rebalance_scale(x, 8.0))(scaled(X, 2.0))
        assert float(out.scale) == 16
        np.testing.assert_array_equal(np.asarray(out), 2 * X)

    def test_get_data_and_scale(self):
        data, scale = jsa.scalify(jsa.get_data_and_scale)(scaled(X, 4.0))
        assert not isinstance(data, ScaledArray) and not isinstance(scale, ScaledArray)
        np.testing.assert_array_equal(data, X)
        assert float(scale) == 4 and scale.dtype == jnp.float32
        per_axis = ScaledArray(jnp.ones((2, 2)), jnp.asarray([[2.0], [8.0]]))
        data, scale = jsa.scalify(jsa.get_data_and_scale)(per_axis)
        assert scale.shape == ()
        np.testing.assert_array_equal(data * scale, [[2, 2], [8, 8]])

    def test_a_scale_goes_round_trip(self):
        def fun(x, y):
            return jsa.set_scaling(y, jsa.get_data_and_scale(x)[1])

        out = jsa.scalify(fun)(scaled(X, 4.0), scaled(X, 2.0**20))
        assert float(out.scale) == 4

    def test_stop_scaling(self):
        out = jsa.scalify(lambda x: jsa.stop_scaling(x, jnp.float32))(
            scaled([40000.0], 2.0**-25, jnp.float16)
        )
        assert not isinstance(out, ScaledArray)
        assert float(out[0]) == 40000 * 2.0**-25

    @pytest.mark.parametrize("kind", ["dynamic", "static", "plain"])
    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
    def test_stop_scaling_of_a_tree(self, dtype, kind):
        """Inside of `scalify` and outside; what is no floating-point array stays."""
        w = jnp.asarray([3.0, -0.5], dtype)
        leaf = {"dynamic": scaled(w, 4.0, dtype), "static": ScaledArray(w, 4.0), "plain": w}[kind]
        tree = {"w": [leaf], "steps": jnp.arange(2), "none": None, "c": jnp.complex64(1 + 2j)}
        for stop in (jsa.stop_scaling, jsa.scalify(jsa.stop_scaling)):
            for wanted in (None, jnp.float32):
                out = stop(tree, wanted) if wanted else stop(tree)
                factor = 1 if kind == "plain" else 4
                np.testing.assert_array_equal(out["w"][0], np.asarray(w, np.float32) * factor)
                assert not isinstance(out["w"][0], ScaledArray)
                assert out["w"][0].dtype == (wanted or dtype) and out["steps"].dtype == jnp.int32
                assert out["c"] == 1 + 2j and out["none"] is None
        assert jsa.stop_scaling("text") == "text"

    @pytest.mark.parametrize(
        ("stat", "expected"), [("rms", 2.0**-9), ("l2", 2.0**-9), ("l1", 2.0**-9), ("max", 2.0**-9)]
    )
    def test_dynamic_rescale(self, stat, expected):
        out = jsa.dynamic_rescale(scaled(X, 2.0**-10), stat)
        assert float(out.scale) == expected
        np.testing.assert_array_equal(np.asarray(out), X * 2.0**-10)

    def test_dynamic_rescale_target(self):
        out = jsa.dynamic_rescale(scaled(X, 1.0), "max", 2.0**10)
        assert 2**10 <= float(jnp.max(jnp.abs(out.data))) < 2**11

    def test_dynamic_rescale_of_what_has_no_statistic(self):
        assert float(jsa.dynamic_rescale(scaled(np.zeros(3), 8.0)).scale) == 0
        out = jsa.dynamic_rescale(scaled([1.0, np.inf], 8.0))
        assert float(out.scale) == 8 and np.isinf(np.asarray(out)[1])
        assert jsa.dynamic_rescale(scaled(np.zeros((0,)), 8.0)).shape == (0,)

    @pytest.mark.parametrize("size", [2.0**14, 2.0**-14])
    def test_dynamic_rescale_of_float16_does_not_overflow(self, size):
        out = jsa.dynamic_rescale(scaled(np.full(4096, size), 1.0, jnp.float16))
        assert float(out.scale) == size

    def test_dynamic_rescale_per_axis(self):
        x = ScaledArray(jnp.asarray([[1.0, 1.0], [16.0, 16.0]]), jnp.asarray([[2.0], [8.0]]))
        out = jsa.dynamic_rescale(x)
        np.testing.assert_array_equal(out.scale, [[2], [128]])
        np.testing.assert_array_equal(np.asarray(out), np.asarray(x))

    def test_dynamic_rescale_rounding_up(self):
        with jsa.ScalifyConfig(rounding_mode=jsa.Pow2RoundMode.UP):
            assert float(jsa.dynamic_rescale(scaled([3.0, 3.0], 1.0)).scale) == 4

    def test_dynamic_rescale_refuses(self):
        with pytest.raises(ValueError, match="`stat` must be one of"):
            jsa.dynamic_rescale(scaled(X, 1.0), "median")
        with pytest.raises(ValueError, match="`target` must be a power of two"):
            jsa.dynamic_rescale(scaled(X, 1.0), target=3.0)

    def test_dynamic_rescale_of_a_tree(self):
        tree = {"w": scaled(X * 16, 1.0), "i": jnp.arange(2), "n": None, "s": "x"}
        out = jsa.dynamic_rescale(tree)
        assert float(out["w"].scale) == 32 and out["i"] is tree["i"]

    @pytest.mark.parametrize("stat", ["l1", "l2", "max"])
    def test_rescale_on_one_pass_only(self, stat):
        forward = getattr(jsa.ops, f"dynamic_rescale_{stat}")
        backward = getattr(jsa.ops, f"dynamic_rescale_{stat}_grad")
        x = scaled(np.full(4, 64.0), 1.0)
        assert float(jsa.scalify(forward)(x).scale) == 64
        assert float(jsa.scalify(backward)(x).scale) == 1
        grad = jsa.scalify(jax.grad(lambda v: jnp.sum(backward(v) * 64)))(x)
        np.testing.assert_array_equal(grad.data, np.ones(4))
        assert float(grad.scale) == 64


class TestCasts:
    @pytest.mark.parametrize("dtype", FP8)
    @pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
    def test_saturation_exhaustively(self, dtype, source):
        values = np.arange(2**16, dtype=np.uint16)
        if source == "float32":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        else:
            values = values.view(jnp.dtype(source))
        largest = float(jnp.finfo(dtype).max)
        with np.errstate(all="ignore"):
            wide = values.astype(np.float32)
            expected = np.clip(wide, -largest, largest).astype(FP8[dtype]).astype(np.float32)
        out = jsa.ops.cast_on_forward(jnp.asarray(values), dtype)
        assert out.dtype == dtype
        np.testing.assert_array_equal(np.asarray(out).astype(np.float32), expected)
        x = ScaledArray(jnp.asarray(values), jnp.float32(2.0**20))
        inside = jax.jit(jsa.scalify(lambda v: v.astype(dtype)))(x)
        np.testing.assert_array_equal(np.asarray(inside.data).astype(np.float32), expected)

    @pytest.mark.parametrize("dtype", FP8)
    def test_cast_acts_under_grad(self, dtype):
        seen = []

        def fun(x):
            y = jsa.ops.cast_on_forward(x, dtype)
            seen.append(y.dtype)
            return jnp.sum(y.astype(x.dtype) ** 2)

        x = jnp.asarray([1.1, 1000000.0])
        value, grad = jax.value_and_grad(fun)(x)
        rounded = np.asarray(jsa.ops.cast_on_forward(x, dtype)).astype(np.float32)
        assert seen == [jnp.dtype(dtype)] and grad.dtype == jnp.float32
        assert float(value) == np.sum(rounded**2)
        scaled_value = jsa.scalify(lambda v: jax.value_and_grad(fun)(v)[0])(scaled([1.1, 3.0], 1.0))
        assert float(scaled_value) != pytest.approx(1.1**2 + 9, rel=1e-4)

    def test_reduce_precision_on_forward_acts_under_grad(self):
        def fun(x):
            return jnp.sum(jsa.ops.reduce_precision_on_forward(x, jnp.float8_e4m3fn) ** 2)

        value, grad = jax.value_and_grad(fun)(jnp.asarray([1.1, 1000.0]))
        assert float(value) == 1.125**2 + 448.0**2
        np.testing.assert_array_equal(grad, [2.25, 896])
        inside, grad = jsa.scalify(jax.value_and_grad(fun))(scaled([1.1], 2.0**20))
        assert float(inside) == 1.125**2 * 2.0**40
        assert float(np.asarray(grad)[0]) == 2.25 * 2.0**20

    @pytest.mark.parametrize("name", ["cast_on_backward", "reduce_precision_on_backward"])
    def test_on_backward(self, name):
        op = functools.partial(getattr(jsa.ops, name), dtype=jnp.float8_e5m2)
        weights = jnp.asarray([1.1, 1e6, -1e6])

        def fun(x):
            return jnp.sum(op(x) * weights)

        x = jnp.asarray([1.1, 1.0, 1.0])
        value, grad = jax.value_and_grad(fun)(x)
        assert float(value) == float(jnp.sum(x * weights))
        np.testing.assert_array_equal(grad, [1.0, 57344, -57344])
        assert grad.dtype == jnp.float32
        _, tangent = jax.jvp(op, (x,), (x,))
        np.testing.assert_array_equal(tangent, x)

    def test_on_backward_inside_scalify_rounds_the_data(self):
        def fun(x, w):
            return jnp.sum(jsa.ops.cast_on_backward(x, jnp.float8_e5m2) * w)

        grad = jsa.scalify(jax.grad(fun))(scaled(X, 1.0), scaled([1.1, 1.0, -3.3], 2.0**30))
        np.testing.assert_array_equal(np.asarray(grad), np.array([1, 1, -3.5]) * 2.0**30)

    @pytest.mark.parametrize(
        "name",
        ["cast_on_forward", "cast_on_backward", "reduce_precision_on_forward",
         "reduce_precision_on_backward"],
    )  # fmt: skip
    def test_refuses_integers_as_dtype(self, name):
        with pytest.raises(TypeError, match="`dtype` must be floating point, got int32"):
            getattr(jsa.ops, name)(jnp.ones(2), jnp.int32)

    def test_no_trace_left_in_the_plain_program(self):
        fun = jax.jit(lambda x: jsa.dynamic_rescale(jsa.set_scaling(x, 4.0)))
        text = fun.lower(jnp.ones(3)).as_text()
        assert "stablehlo.multiply" not in text and "stablehlo.divide" not in text


def test_state_that_starts_from_zero_takes_the_scale_of_its_update():
    zeros = ScaledArray(jnp.zeros(2), jnp.float32(0))
    update = ScaledArray(jnp.ones(2), jnp.float32(4))
    out = jsa.scalify(lambda m, g: jsa.match_scales(0.9 * m + g, m))(zeros, update)
    np.testing.assert_array_equal(np.asarray(out), 4)


def test_a_requested_scale_stays_within_the_range():
    out = jsa.scalify(lambda x: jsa.set_scaling(x, 2.0**-130))(jsa.as_scaled_array(jnp.ones(2)))
    assert float(out.scale) == 2.0**-126
    np.testing.assert_array_equal(np.asarray(out), 1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("static", [False, True])
def test_a_factor_zero_is_read_as_one(static, dtype, jit):
    x = jsa.as_scaled_array(jnp.asarray([[1.0, 2.0, -4.0]] * 2, dtype), 2.0)
    x = jsa.freeze_scales(x) if static else x
    factors = jnp.float32([[0.0], [4.0]])
    rebalance = jsa.rebalance_scale
    for out, scale in (
        (jit(jsa.scalify(lambda x: rebalance(x, 0.0)))(x), 2.0),
        (jit(jsa.scalify(rebalance))(x, jnp.float32(0)), 2.0),
        (jit(jsa.scalify(rebalance))(x, factors), [[2.0], [8.0]]),
        (jit(jsa.scalify(lambda x: rebalance(x, factors)))(x), [[2.0], [8.0]]),
        (rebalance(x, 0.0), 2.0),
    ):
        np.testing.assert_array_equal(jsa.asarray(out), jsa.asarray(x))
        np.testing.assert_array_equal(out.scale, scale)
