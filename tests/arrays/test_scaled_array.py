"""`ScaledArray`: its validation, comparisons and behaviour in trees."""

import copy
import dataclasses
import operator
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa
from jax_scalify import ScaledArray

DTYPES = ("float32", "float16", "bfloat16")


def scale_of(x):
    return np.asarray(x.scale)


class TestScaledArray:
    def test_properties(self):
        x = ScaledArray(jnp.ones((2, 3), jnp.float16), jnp.float32(4))
        assert (x.shape, x.dtype, x.ndim, x.size) == ((2, 3), jnp.float16, 2, 6)
        assert x.aval == jax.ShapeDtypeStruct((2, 3), jnp.float16)
        assert not x.is_static and ScaledArray(x.data, 4.0).is_static

    def test_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            ScaledArray(jnp.ones(2), 1.0).scale = 2.0

    def test_a_dynamic_scale_is_a_leaf_and_a_static_one_structure(self):
        dynamic = ScaledArray(jnp.ones(2), jnp.float32(2))
        static = ScaledArray(jnp.ones(2), 2.0)
        assert len(jax.tree.leaves(dynamic)) == 2 and len(jax.tree.leaves(static)) == 1
        assert jax.tree.structure(static) != jax.tree.structure(ScaledArray(jnp.ones(2), 4.0))
        assert jax.tree.structure(static) == jax.tree.structure(ScaledArray(jnp.ones(2), 2))

    def test_key_paths(self):
        tree = {"w": ScaledArray(jnp.ones(2), jnp.float32(1))}
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]
        assert paths == ["['w'].data", "['w'].scale"]

    def test_holds_placeholders_without_complaint(self):
        x = ScaledArray(jnp.ones(2), jnp.float32(1))
        axes = ScaledArray(0, None)
        out = jax.vmap(lambda v: v, in_axes=(axes,), out_axes=axes)(x)
        np.testing.assert_array_equal(out.data, x.data)
        assert jax.tree.structure(jax.tree.map(lambda leaf: object(), x)) == jax.tree.structure(x)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_to_array_casts_once(self, dtype):
        data = jnp.asarray([40000.0, -3.0], dtype)
        x = ScaledArray(data, jnp.float32(2.0**-25))
        exact = np.asarray(data).astype(np.float64) * 2.0**-25
        np.testing.assert_array_equal(x.to_array(jnp.float32), exact)
        np.testing.assert_array_equal(x.to_array(), exact.astype(dtype))
        assert x.to_array().dtype == dtype

    def test_to_array_of_a_huge_scale(self):
        x = ScaledArray(jnp.asarray([2.0**-20], jnp.float16), jnp.float32(2.0**24))
        np.testing.assert_array_equal(x.to_array(), [16])

    def test_leading_scales(self):
        data = np.arange(6, dtype=np.float32).reshape(2, 3)
        scale = np.array([1, 8], np.float32)
        expected = data * scale[:, None]
        x = ScaledArray(jnp.asarray(data), jnp.asarray(scale))
        np.testing.assert_array_equal(x.to_array(), expected)
        np.testing.assert_array_equal(np.asarray(x), expected)
        square = ScaledArray(jnp.ones((2, 2)), jnp.asarray(scale))
        np.testing.assert_array_equal(square.to_array(), [[1, 1], [8, 8]])

    def test_numpy_and_python_numbers(self):
        x = ScaledArray(jnp.float16(1.5), jnp.float32(4))
        assert float(x) == 6 and x.item() == 6 and f"{x:.2f}" == "6.00"
        assert np.asarray(x).dtype == np.float16
        assert np.asarray(x, np.float64).dtype == np.float64
        with pytest.raises(ValueError, match="`copy` cannot be False"):
            x.__array__(copy=False)
        with pytest.raises(TypeError):
            float(ScaledArray(jnp.ones(2), 1.0))
        assert "data=" in repr(x) and "scale=" in f"{x}"

    @pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
    def test_numpy_of_extension_dtypes(self, dtype):
        x = ScaledArray(jnp.asarray([1.5, -3], dtype), jnp.float32(2))
        np.testing.assert_array_equal(np.asarray(x, np.float32), [3, -6])
        np.testing.assert_array_equal(np.asarray(x).astype(np.float32), [3, -6])

    def test_astype_saturates_for_fp8(self):
        x = ScaledArray(jnp.asarray([1000.0, -1e5, np.inf, 1.1]), jnp.float32(2))
        y = x.astype(jnp.float8_e4m3fn)
        assert y.dtype == jnp.float8_e4m3fn and float(y.scale) == 2
        np.testing.assert_array_equal(y.data.astype(jnp.float32), [448, -448, 448, 1.125])

    def test_passes_through_jit_scan_and_pickle(self):
        x = ScaledArray(jnp.ones(2, jnp.float16), jnp.float32(2))
        out, _ = jax.lax.scan(lambda c, _: (c, None), x, None, 3)
        assert jax.tree.structure(jax.jit(lambda v: v)(out)) == jax.tree.structure(x)
        np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(x))), [2, 2])


class TestRefusals:
    @pytest.mark.parametrize(
        "compute",
        [
            lambda x: x + 1,
            lambda x: 2.0 * x,
            lambda x: x / x,
            lambda x: jnp.ones((2, 2)) @ x,
            lambda x: x**2,
            lambda x: -x,
            lambda x: round(x, 3),
            lambda x: x[0],
            lambda x: list(x),
            lambda x: sum([x, x]),
            lambda x: jax.jit(lambda w, y: y @ w)(x, jnp.ones((1, 2))),
        ],
    )
    def test_operators_say_what_to_do(self, compute):
        x = jsa.as_scaled_array(jnp.ones((2, 2)))
        with pytest.raises(TypeError, match=r"A ScaledArray has no `.+`\. Put `@jsa.scalify` on"):
            compute(x)

    def test_attributes_say_what_to_do(self):
        x = jsa.as_scaled_array(jnp.ones((2, 2)))
        with pytest.raises(AttributeError, match=r"no `mean`\. .* `jsa.asarray\(x\)`"):
            x.mean()
        assert not hasattr(x, "__jax_array__")

    @pytest.mark.parametrize("static", [False, True])
    @pytest.mark.parametrize("traced", [False, True])
    @pytest.mark.parametrize(
        "compute",
        [
            lambda x: x + 1,
            lambda x: 1 - x,
            lambda x: sum([x, x]),
            lambda x: x / x,
            lambda x: -x,
            lambda x: abs(x),
            lambda x: 2**x,
            lambda x: jnp.float32(2) * x,
            lambda x: jnp.isnan(x),
            lambda x: jnp.exp(x),
            lambda x: jnp.stack([x, x]),
        ],
    )
    def test_a_number_is_computed_with_in_float32(self, compute, traced, static):
        x = ScaledArray(jnp.float16(-1.5), 2.0**-20 if static else jnp.float32(2.0**-20))
        out = (jax.jit(compute) if traced else compute)(x)
        assert isinstance(out, jax.Array)
        np.testing.assert_array_equal(out, compute(jnp.float32(-1.5 * 2.0**-20)))

    def test_a_number_in_python(self):
        x = ScaledArray(jnp.float16(1.125), jnp.float32(4))
        assert (int(x), round(x), round(x, 1)) == (4, 4, 4.5)
        with pytest.raises(TypeError, match=r"A ScaledArray has no `\+`"):
            x + jsa.as_scaled_array(jnp.ones(2))

    def test_numpy_computes_on_values(self):
        x = jsa.as_scaled_array(jnp.full((2, 2), 3.0), 2.0)
        np.testing.assert_array_equal(np.ones((2, 2)) @ np.asarray(x), np.full((2, 2), 6.0))
        assert np.mean(x) == 3

    def test_copies(self):
        x = jsa.as_scaled_array(jnp.full((2, 2), 3.0), 2.0)
        for same in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
            np.testing.assert_array_equal(same, x)
            assert float(same.scale) == 2 and not same.is_static

    @pytest.mark.parametrize("dtype", ["fp16", jnp.int8, "int32", bool])
    def test_dtypes_that_are_not_floating_point(self, dtype):
        for convert in (
            lambda: jsa.as_scaled_array({"w": jnp.ones(2)}, dtype=dtype),
            lambda: jsa.scaled_array(jnp.ones(2), 1.0, dtype=dtype),
            lambda: jsa.as_scaled_array(jnp.ones(2)).astype(dtype),
        ):
            with pytest.raises(TypeError, match="`dtype` must be floating point"):
                convert()


class TestComparisons:
    """They speak of values, as those of `jax.Array` do."""

    @pytest.mark.sampled(32)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**10])
    @pytest.mark.parametrize("static", [False, True])
    @pytest.mark.parametrize("compare", [operator.eq, operator.ne, operator.lt, operator.le])
    def test_with_numbers_arrays_and_each_other(self, compare, static, scale, dtype):
        plain = jnp.asarray([[0.7, -2.0], [jnp.nan, jnp.inf]], dtype)
        x = jsa.as_scaled_array(plain, scale)
        x = jsa.freeze_scales(x) if static else x
        for other in (0.7, 1, -2.0, jnp.inf, jnp.nan, jnp.asarray(0.7, dtype), plain, plain[0]):
            np.testing.assert_array_equal(compare(x, other), compare(plain, other))
            if not isinstance(other, np.ndarray):
                np.testing.assert_array_equal(compare(other, x), compare(other, plain))
        y = jsa.as_scaled_array(plain.T, 4.0)
        np.testing.assert_array_equal(compare(x, y), compare(plain, plain.T))
        assert isinstance(compare(x, y), jax.Array)

    def test_a_loss(self):
        loss, lost = (jsa.as_scaled_array(jnp.float16(v), 2.0**-4) for v in (0.7, jnp.nan))
        assert loss == 0.7 and loss != 0.5 and loss < 1 and 1 >= loss and not loss > loss
        assert lost != lost and not lost == lost
        assert jsa.scalify(lambda x: x == 0.7)(loss)
        assert loss and not jsa.as_scaled_array(jnp.float32(0))

    def test_what_has_an_axis_of_scales(self):
        x = ScaledArray(jnp.ones((2, 2)), jnp.float32([2, 8]))
        np.testing.assert_array_equal(x == 8, [[False, False], [True, True]])
        with pytest.raises(ValueError, match="ambiguous"):
            bool(x == x)

    def test_values_outside_the_range_of_the_data(self):
        x = ScaledArray(jnp.float16(1.5), jnp.float32(2.0**40))
        y = ScaledArray(jnp.float16(1.5), jnp.float32(2.0**-40))
        assert x != jnp.inf and x > 1e6 and x == 1.5 * 2.0**40 and y and y != 0

    def test_under_jit(self):
        x = jsa.as_scaled_array(jnp.float32([1.0, 3.0]), 2.0)
        np.testing.assert_array_equal(jax.jit(lambda x: x > 2)(x), [False, True])

    @pytest.mark.parametrize("other", [None, "text", object(), [1.0, 1.0], {}])
    def test_with_what_is_no_array(self, other):
        x = jsa.as_scaled_array(jnp.ones(2))
        assert not x == other and x != other
        with pytest.raises(TypeError, match="not supported between"):
            x < other  # noqa: B015

    def test_placeholders_are_compared_by_identity(self):
        axes, other = ScaledArray(0, None), ScaledArray(0, None)
        assert axes == axes and axes != other and axes != jsa.as_scaled_array(jnp.ones(2))

    def test_integers_as_data(self):
        with pytest.raises(TypeError, match="`data` must have a floating dtype"):
            ScaledArray(jnp.arange(2), 1.0) == 1.0  # noqa: B015

    def test_trees_hashes_and_containers_still_tell_arrays_apart(self):
        x, y = (jsa.as_scaled_array(jnp.ones(2)) for _ in range(2))
        assert len({x, y, x}) == 2 and {x: 1, y: 2}[x] == 1 and x in [x, y]
        assert jax.tree.structure(x) == jax.tree.structure(y)
        chex.assert_trees_all_equal({"w": x}, {"w": y})
        chex.assert_trees_all_close({"w": x}, {"w": y})
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), x, y))
        assert jsa.tree.check_same_structure({"w": x}, {"w": y})["w"] is x


AXES = np.ones((2, 3), np.float32)
FORMS = {  # no `ScaledArray`, and what is said of it
    "a longer scale": (AXES, np.ones(3, np.float32), ValueError, "scale` of shape .* not fit"),
    "more axes": (AXES, np.ones((2, 3, 1), np.float32), ValueError, "scale` of shape .* not fit"),
    "integers": (np.arange(3), np.float32(1), TypeError, "data` must have a floating dtype"),
    "bools": (AXES > 0, 1.0, TypeError, "data` must have a floating dtype"),
    "a list": ([1.0, 2.0], np.float32(1), TypeError, "data` must be an array, got list"),
    "a number": (2.0, np.float32(1), TypeError, "data` must be an array, got float"),
    "no data": (None, np.float32(1), TypeError, "data` must be an array, got NoneType"),
    "no scale": (AXES, None, TypeError, "scale` must be a real number or array, got NoneType"),
    "a list of scales": (AXES, [1.0, 1.0], TypeError, "scale` must be .*, got list"),
    "a bool": (AXES, np.bool_(True), TypeError, "scale` must be a real number or array"),
    "complex": (AXES, np.complex64(2), TypeError, "scale` must be a real number or array"),
    "nested": (ScaledArray(AXES, 1.0), 2.0, TypeError, "data` must be an array, got ScaledArray"),
}
SCALES = [3.0, -2.0, float("nan"), float("inf"), 0.0]
DOORS = {
    "scalify": lambda t: jsa.scalify(lambda t: jax.tree.map(jnp.sin, t))(t),
    "keyword": lambda t: jsa.scalify(lambda *, t: jax.tree.map(jnp.sin, t))(t=t),
    "as_scaled_array": jsa.as_scaled_array,
    "freeze_scales": jsa.freeze_scales,
    "thaw_scales": jsa.thaw_scales,
    "dynamic_rescale": jsa.dynamic_rescale,
    "dynamic_rescale_l2": lambda t: jsa.ops.dynamic_rescale_l2(t["w"]),
    "match_scales": lambda t: jsa.match_scales(t, t),
    "set_scaling": lambda t: jsa.set_scaling(t["w"], 2.0),
    "rebalance_scale": lambda t: jsa.rebalance_scale(t["w"], 2.0),
}
PRODUCTS = {
    "asarray": jsa.asarray,
    "to_array": lambda t: t["w"].to_array(),
    "numpy": lambda t: np.asarray(t["w"]),
}


class TestDoors:
    """Nothing is validated in `ScaledArray` itself; where one is taken, everything is."""

    @pytest.mark.parametrize("door", [*DOORS, *PRODUCTS])
    @pytest.mark.parametrize("form", FORMS)
    def test_fields_that_no_array_has(self, form, door):
        data, scale, error, message = FORMS[form]
        with pytest.raises(error, match=message):
            (DOORS | PRODUCTS)[door]({"w": ScaledArray(data, scale)})

    @pytest.mark.parametrize("door", ["scalify", "asarray", "freeze_scales", "dynamic_rescale"])
    def test_the_leaf_is_named(self, door):
        with pytest.raises(TypeError, match=r"`.*\['w'\]\.data` must have a floating dtype"):
            (DOORS | PRODUCTS)[door]({"w": ScaledArray(np.arange(2), 1.0), "v": 1.0})

    @pytest.mark.parametrize("door", DOORS)
    @pytest.mark.parametrize("kind", [float, jnp.float32, lambda s: jnp.float32([[1.0], [s]])])
    @pytest.mark.parametrize("scale", SCALES)
    def test_scales_that_are_no_power_of_two(self, scale, kind, door):
        x = ScaledArray(jnp.ones((2, 3)), kind(scale))
        message = "scale` 0 needs data that is zero" if scale == 0 else "must be a power of two"
        with pytest.raises(ValueError, match=message):
            DOORS[door]({"w": x})

    @pytest.mark.parametrize("scale", SCALES)
    def test_a_product_is_right_for_any_scale(self, scale):
        data = jnp.asarray([1.5, -2.0])
        for kind in (float, jnp.float32):
            x = ScaledArray(data, kind(scale))
            for out in (x.to_array(), np.asarray(x)):
                np.testing.assert_array_equal(out, data * np.float32(scale))

    @pytest.mark.parametrize("look", [jsa.asarray, jsa.to_numbers, jsa.stop_scaling])
    @pytest.mark.parametrize("scale", [*(s for s in SCALES if s), -0.0])
    def test_a_scale_that_optax_has_updated_is_refused(self, scale, look):
        x = ScaledArray(jnp.float32(1.5), jnp.float32(scale))
        with pytest.raises(ValueError, match=r"`tree\['w'\].scale` .* Has optax or .* two leaves"):
            look({"w": x})
        assert "which is no power of two" in repr(x)

    def test_a_static_scale_is_looked_at_under_jit(self):
        with pytest.raises(ValueError, match=r"`args\[0\].scale` must be a power of two or 0"):
            jax.jit(jsa.scalify(jnp.sin))(ScaledArray(jnp.ones(2), 3.0))

    def test_zeros_and_infinities_of_scale_zero(self):
        x = ScaledArray(jnp.asarray([0.0, jnp.inf, jnp.nan]), jnp.float32(0))
        assert jsa.scalify(lambda x: x)(x).shape == (3,)

    def test_freezing_what_is_traced(self):
        with pytest.raises(TypeError, match=r"`tree\['w'\].scale` must be concrete.* outside of"):
            jax.jit(jsa.freeze_scales)({"w": jsa.as_scaled_array(jnp.ones(2))})

    @pytest.mark.parametrize("axis", ["a", 0.5, ("a", 0), [None]])
    def test_an_axis_that_is_no_int(self, axis):
        with pytest.raises(TypeError, match="`axis` must be an int or a sequence of ints, got "):
            jsa.as_scaled_array(jnp.ones((2, 2)), axis=axis)

    def test_an_axis_of_numpy(self):
        assert jsa.as_scaled_array(jnp.ones((2, 3)), axis=np.int64(1)).scale.shape == (1, 3)


class TestMatchScales:
    @pytest.mark.parametrize("dynamic", [True, False])
    @pytest.mark.parametrize("partner", ["dynamic", "static", "axis", "leading"])
    def test_outside(self, dynamic, partner):
        like = {
            "dynamic": lambda: ScaledArray(jnp.ones((2, 3)), jnp.float32(2)),
            "static": lambda: ScaledArray(jnp.ones((2, 3)), 2.0),
            "axis": lambda: ScaledArray(jnp.ones((2, 3)), jnp.asarray([[1.0], [4.0]])),
            "leading": lambda: ScaledArray(jnp.ones((2, 3)), jnp.asarray([2.0, 2.0])),
        }[partner]()
        x = ScaledArray(jnp.full((2, 3), 3.0), jnp.float32(8) if dynamic else 8.0)
        out = jsa.match_scales({"w": x, "i": 1}, {"w": like, "i": 1})["w"]
        assert jax.tree.structure(out) == jax.tree.structure(like)
        assert np.shape(out.scale) == np.shape(like.scale)
        np.testing.assert_array_equal(out.scale, like.scale)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(x))

    def test_inside_scalify(self):
        def step(w, g):
            return jsa.match_scales(w * 3 + g, w)

        w, g = jsa.as_scaled_array((jnp.ones(3), jnp.ones(3)), 4.0)
        g = ScaledArray(g.data, jnp.float32(64))
        out = jax.jit(jsa.scalify(step))(w, g)
        assert float(out.scale) == 4
        np.testing.assert_array_equal(np.asarray(out), 3 * np.asarray(w) + np.asarray(g))

    def test_under_jit(self):
        x, like = jsa.as_scaled_array((jnp.ones(2), jnp.ones(2)), 4.0)
        like = ScaledArray(like.data, jnp.float32(2))
        out = jax.jit(jsa.match_scales)(x, like)
        assert float(out.scale) == 2 and float(np.asarray(out)[0]) == 1

    def test_trees_that_differ(self):
        with pytest.raises(ValueError):
            jsa.match_scales({"a": jnp.ones(2)}, {"b": jnp.ones(2)})


class TestTree:
    def test_scaled_arrays_are_leaves(self):
        tree = {"a": ScaledArray(jnp.ones(2), 1.0), "b": jnp.zeros(1)}
        assert [type(x) for x in jsa.tree.leaves(tree)][0] is ScaledArray
        leaves, treedef = jsa.tree.flatten(tree)
        assert jsa.tree.unflatten(treedef, leaves)["a"] is tree["a"]
        assert jsa.tree.structure(tree).num_leaves == 2
        names = jsa.tree.map(lambda x: type(x).__name__, tree)
        assert names["a"] == "ScaledArray"
        assert not jsa.tree.all(jsa.tree.map(lambda x: x.size == 2, tree))

    def test_astype(self):
        tree = {"a": ScaledArray(jnp.ones(2), 4.0), "b": jnp.zeros(1), "i": jnp.arange(2)}
        out = jsa.tree.astype(tree, jnp.float16)
        assert out["a"].dtype == out["b"].dtype == jnp.float16 and out["i"].dtype == jnp.int32
        assert out["a"].scale == 4

    def test_shardings(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        state = jsa.as_scaled_array({"w": jnp.ones(4), "i": jnp.arange(4)})
        shardings = jsa.tree.shardings(state, sharding)
        assert shardings["w"].scale.spec == jax.sharding.PartitionSpec()
        placed = jax.device_put(state, shardings)
        assert placed["w"].data.sharding == sharding


class TestFrameworks:
    def test_flax_nnx_state(self):
        nnx = pytest.importorskip("flax.nnx")
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        graph, state = nnx.split(model)
        scaled = jsa.as_scaled_array(state, "rms")
        leaves = jsa.tree.leaves(scaled)
        assert all(isinstance(x, ScaledArray) for x in leaves) and len(leaves) == 2
        back = jsa.asarray(scaled)
        assert jax.tree.structure(back) == jax.tree.structure(state)
        x = jnp.ones((1, 3))
        out = jsa.scalify(lambda s, v: nnx.merge(graph, s)(v))(scaled, x)
        np.testing.assert_allclose(np.asarray(out), model(x), rtol=1e-6)

    def test_optax_state(self):
        optax = pytest.importorskip("optax")
        params = {"w": jnp.ones(3, jnp.float16)}
        state = optax.adam(1e-3).init(params)
        scaled = jsa.as_scaled_array(state)
        assert float(scaled[0].mu["w"].scale) == 0 and scaled[0].count.dtype == jnp.int32
        assert jax.tree.structure(jsa.asarray(scaled)) == jax.tree.structure(state)


@pytest.mark.parametrize("scale", [jax.ShapeDtypeStruct((), jnp.float32), None, P(), object()])
def test_the_repr_of_what_trees_may_hold(scale):
    """A tree of shapes, of shardings or of results of a function has no scales to look at."""
    assert "no power of two" not in repr(ScaledArray(None, scale))
    assert repr(jax.eval_shape(lambda x: x, jsa.as_scaled_array(jnp.ones(3))))


@pytest.mark.parametrize(
    ("scale", "key"),
    [
        (1.0, "data@2^0"),
        (2.0**-5, "data@2^-5"),
        (2.0**40, "data@2^40"),
        (0.0, "data@0.0"),
        (-3.0, "data@-3.0"),
        (float("inf"), "data@inf"),
    ],
)
def test_the_key_of_data_names_a_static_scale(scale, key):
    tree = {"w": ScaledArray(jnp.ones(2), scale)}
    [(path, data)] = jax.tree_util.tree_leaves_with_path(tree)
    assert jax.tree_util.keystr(path) == f"['w'].{key}"
    dynamic = {"w": ScaledArray(jnp.ones(2), jnp.float32(scale))}
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(dynamic)]
    assert names == ["['w'].data", "['w'].scale"]


def test_a_traced_array_outside_scalify_names_the_transform():
    x = jsa.as_scaled_array(jnp.ones((2, 2), jnp.float16))
    for fun in (jnp.asarray, np.asarray):
        with pytest.raises(TypeError, match="Put `@jsa.scalify` on the function"):
            jax.jit(fun)(x)
