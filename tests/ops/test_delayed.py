"""Delayed rescaling against a simulation in NumPy, with and without `scalify`."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.primitives.definitions import NOTHING_SEEN as NONE
from jax_scalify.primitives.definitions import delayed_rescale_p
from tests.helpers import scaled, value

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
TOPS = {"float32": 0, "bfloat16": 0, "float16": 14, "float8_e4m3fn": 7, "float8_e5m2": 14}
SCALES = [2.0**-40, 1.0, 2.0**40]
SHAPE = np.array([1.0, -0.5, 0.25, 0.0])
ZERO = -2000  # as an exponent


WAYS = {
    "outside": lambda f: f,
    "outside-jit": jax.jit,
    "inside": jsa.scalify,
    "inside-jit": lambda f: jax.jit(jsa.scalify(f)),
}


def expected_exponent(history, algorithm):
    return max(history) if algorithm == "max" else history[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("algorithm", "margin"), [("max", 0), ("max", 3), ("most_recent", 1)])
def test_a_sequence_of_values(dtype, scale, algorithm, margin):
    """Growing and sinking, with zeros and what is not finite between them."""
    top, length = TOPS[dtype] - margin, 3
    step = jax.jit(
        functools.partial(
            jsa.delayed_rescale, algorithm=algorithm, margin=margin, return_finite=True
        )
    )
    history, seen = jsa.ops.amax_history(length), [NONE] * length
    for size in (2, 3, ZERO, -1, -1, np.nan, -2, 1, np.inf, ZERO, 0, -4, -4, -4):
        data = SHAPE * np.exp2(size) if np.isfinite(size) else [1, size, 0, -1]
        x = scaled(data, scale, dtype)
        data = np.asarray(x.data).astype(np.float64)
        y, history, finite = step(x, history)
        amax, own = np.max(np.abs(data)), int(np.log2(scale))
        expected = expected_exponent(seen, algorithm)
        new = expected - top if expected != NONE else own
        assert float(y.scale) == 2.0**new and y.dtype == dtype
        assert bool(finite) == np.isfinite(amax)
        limit = float(jnp.finfo(dtype).max) if dtype.startswith("float8") else np.inf
        moved = data * 2.0 ** (own - new)
        moved = np.where(np.isfinite(data), np.clip(moved, -limit, limit), data)
        with np.errstate(over="ignore"):
            moved = moved.astype(jnp.dtype(dtype)).astype(np.float64)
        np.testing.assert_array_equal(np.asarray(y.data).astype(np.float64), moved)
        if np.isfinite(amax):
            seen = [int(np.floor(np.log2(amax))) + own if amax else NONE, *seen[:-1]]
            if amax and expected == seen[0] and algorithm == "max":
                assert (
                    2.0**top <= np.max(np.abs(np.asarray(y.data).astype(float))) < 2.0 ** (top + 1)
                )
        np.testing.assert_array_equal(history, seen)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_a_whole_state(way, dtype):
    state = {
        "w": scaled([[3.0, -4.0]], 2.0**40, dtype),
        "rows": scaled([[1.0, 2.0], [4.0, 8.0], [0.0, 0.0]], [[2.0], [1.0], [4.0]], dtype),
        "0d": scaled(6.0, 2.0**-40, dtype),
        "empty": scaled(np.zeros((0, 2)), 2.0, dtype),
        "step": jnp.int32(3),
        "none": None,
    }
    step = WAYS[way](lambda s, h: jsa.delayed_rescale(s, h, return_finite=True))
    history = jsa.init_delayed_rescale(state, 2)
    same, history, finite = step(state, history)
    assert bool(finite)
    for old, new in zip(jsa.tree.leaves(state), jsa.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(value(old), value(new))
    out, history, _ = step(same, history)
    chex.assert_trees_all_equal_structs(same, out)
    top = TOPS[dtype]
    assert float(out["w"].scale) == 2.0 ** (42 - top)
    assert float(out["0d"].scale) == 2.0 ** (-38 - top)
    assert float(out["empty"].scale) == 2
    np.testing.assert_array_equal(out["rows"].scale, [[2.0 ** (2 - top)], [2.0 ** (3 - top)], [4]])
    assert history["w"].tolist() == [42, 42] and history["none"] is history["step"] is None
    assert history["rows"].tolist() == [[[2], [3], [NONE]]] * 2
    assert history["empty"].tolist() == [NONE] * 2
    for old, new in zip(jsa.tree.leaves(state), jsa.tree.leaves(out), strict=True):
        np.testing.assert_array_equal(value(old), value(new))
    bad = {**state, "w": scaled([[np.nan, 1.0]], 1.0, dtype)}
    _, after, finite = step(bad, history)
    assert not bool(finite)
    np.testing.assert_array_equal(after["w"], history["w"])


def test_scales_along_the_leading_axes():
    x = scaled(np.ones((3, 2, 2)), [1.0, 2.0, 4.0], "float16")
    history = jsa.init_delayed_rescale(x, 2)
    assert history.shape == (2, 3)
    y, history = jsa.delayed_rescale(x, history)
    y, history = jsa.delayed_rescale(x, history)
    assert history.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_array_equal(value(y), value(x))
    np.testing.assert_array_equal(y.data, np.full((3, 2, 2), 2.0**14))


def test_a_history_of_another_shape_than_the_scale():
    x = scaled([[1.0, 2.0], [4.0, 0.0]], [[2.0], [8.0]], "float16")
    y, history = jsa.delayed_rescale(x, jnp.asarray([6], jnp.int32))
    assert history.tolist() == [5] and y.scale.shape == () and float(y.scale) == 2.0**-8
    np.testing.assert_array_equal(value(y), value(x))
    columns = jnp.asarray([[[6, NONE]]], jnp.int32)
    y, history = jsa.delayed_rescale(x, columns)
    assert history.tolist() == [[[5, 2]]]
    np.testing.assert_array_equal(y.scale, [[2.0**-8, 8]])
    np.testing.assert_array_equal(value(y), value(x))


def test_beyond_the_range():
    """A value that grows by 2**4 saturates in FP8, and is infinite in float16 without a margin."""
    history = jsa.ops.amax_history(1).at[:].set(0)
    for dtype, largest in (("float8_e4m3fn", 448), ("float8_e5m2", 57344), ("float16", np.inf)):
        y, after = jsa.delayed_rescale(scaled([16.0, -1.0], 1.0, dtype), history)
        assert float(y.data[0]) == largest and after.tolist() == [4]
        y, _ = jsa.delayed_rescale(scaled([16.0, -1.0], 1.0, dtype), history, margin=4)
        np.testing.assert_array_equal(value(y), [16, -1])


def test_the_dtype_of_a_cast_that_follows():
    def cast(x, history):
        y, history = jsa.ops.delayed_rescale(x, history, dtype=jnp.float8_e4m3fn)
        return jsa.ops.cast_on_forward(y, jnp.float8_e4m3fn), history

    y, _ = jsa.scalify(cast)(scaled([5.0], 2.0**-20, "float16"), jnp.asarray([-18], jnp.int32))
    assert float(y.data[0]) == 160 and float(y.scale) == 2.0**-25 and y.dtype == "float8_e4m3fn"


def test_scales_stay_within_their_range():
    for exponent, scale in ((-126, 2.0**-126), (120, 2.0**106)):
        x = scaled([1.0], 2.0**exponent, "float16")
        y, _ = jsa.delayed_rescale(x, jnp.asarray([exponent], jnp.int32))
        assert float(y.scale) == scale
        np.testing.assert_array_equal(value(y), value(x))
    x = scaled([2.0**100], 2.0**40)
    y, history = jsa.delayed_rescale(x, jnp.asarray([140], jnp.int32))
    assert float(y.scale) == 2.0**126 and history.tolist() == [140]
    np.testing.assert_array_equal(value(y), value(x))


def test_static_scales_and_constants_inside():
    x = jsa.freeze_scales(scaled([3.0], 2.0**-20, "float16"))
    y, history = jsa.delayed_rescale(x, jsa.ops.amax_history(1))
    y, history = jsa.delayed_rescale(x, history)
    assert history.tolist() == [-19] and not y.is_static
    np.testing.assert_array_equal(value(y), value(x))

    def constant(x, history):
        y, history = jsa.delayed_rescale(jnp.full(2, 6.0), history)
        return x * y, history

    y, history = jsa.scalify(constant)(scaled([1.0, 2.0]), jsa.ops.amax_history(1))
    np.testing.assert_array_equal(value(y), [6, 12])
    assert history.tolist() == [NONE]


# Without `scalify`, and under transforms.


def test_the_identity_without_scalify():
    x, history = jnp.asarray([1.0, jnp.inf]), jsa.ops.amax_history(4)
    f = functools.partial(jsa.delayed_rescale, return_finite=True)
    for call in (f, jax.jit(f), jsa.scalify(f)):
        y, after, finite = call(x, history)
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(after, history)
        assert bool(finite)
    batch = jnp.ones((3, 2)), jnp.tile(history, (3, 1))
    for axes in ((0, 0), (0, None), (None, 0)):
        args = [b if a == 0 else u for a, b, u in zip(axes, batch, (x, history))]
        y, after, finite = jax.vmap(f, axes)(*args)
        assert y.shape == (3, 2) and finite.shape == (3,)
        np.testing.assert_array_equal(after, batch[1])
    assert jsa.delayed_rescale({"n": 1.5, "s": "x"}, {"n": None, "s": None})[0]["n"] == 1.5
    exported = jax.export.export(jax.jit(f))(x, history)
    np.testing.assert_array_equal(exported.call(x, history)[0], x)


def test_plain_leaves_inside_stay_plain():
    def step(tree, history):
        return jsa.delayed_rescale(tree, history)

    tree = {"w": scaled([4.0], 1.0), "lr": jnp.float32(3.0), "x": jnp.ones(2)}
    history = jsa.init_delayed_rescale(tree, 1)
    for _ in range(2):
        tree, history = jsa.scalify(step)(tree, history)
    assert not isinstance(tree["lr"], ScaledArray) and history["lr"].tolist() == [NONE]
    assert history["w"].tolist() == [2]


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap(axes):
    """Every example has a scale and a history of its own."""
    data = np.array([[1.0, 2.0], [8.0, 16.0], [0.0, np.inf]])
    histories = np.array([[0, 1], [3, NONE], [NONE, NONE]], np.int32)
    f = functools.partial(jsa.delayed_rescale, return_finite=True)

    def mapped(x, history):
        return jax.vmap(f, axes)(x, history)

    x, history = data if axes[0] == 0 else data[1], histories if axes[1] == 0 else histories[0]
    y, after, finite = jax.jit(jsa.scalify(mapped))(scaled(x, 4.0, "float16"), jnp.asarray(history))
    for i in range(3):
        one = scaled(data[i] if axes[0] == 0 else x, 4.0, "float16")
        own = jnp.asarray(histories[i] if axes[1] == 0 else history)
        want = f(one, own)
        np.testing.assert_array_equal(value(y)[i], value(want[0]))
        np.testing.assert_array_equal(y.data[i], want[0].data)
        np.testing.assert_array_equal(after[i], want[1])
        assert bool(finite[i]) == bool(want[2])


def test_vmap_of_channels_of_numbers_and_twice():
    f = functools.partial(jsa.delayed_rescale, return_finite=True)
    x = scaled(np.arange(1.0, 9).reshape(2, 2, 2), 2.0, "float16")
    twice = jsa.scalify(jax.vmap(jax.vmap(f)))
    y, history, finite = twice(x, jnp.full((2, 2, 1), 4, jnp.int32))
    assert history[..., 0].tolist() == [[2, 3], [3, 4]] and finite.shape == (2, 2)
    np.testing.assert_array_equal(value(y), value(x))
    rows = jsa.scalify(jax.vmap(f))
    y, history, _ = rows(x, jnp.full((2, 1, 2, 1), 4, jnp.int32))
    assert history[:, 0, :, 0].tolist() == [[2, 3], [3, 4]]
    numbers = jsa.scalify(jax.vmap(f, in_axes=(0, 1), out_axes=(0, 1, 0)))
    y, history, _ = numbers(scaled([1.0, 4.0], 2.0, "float16"), jnp.zeros((3, 2), jnp.int32))
    assert history.shape == (3, 2) and history[0].tolist() == [1, 3]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", SCALES)
def test_the_derivative_is_the_identity(dtype, scale):
    history = jnp.asarray([3, NONE], jnp.int32)

    def loss(x, history, rescale=True):
        if rescale:
            x, history = jsa.ops.delayed_rescale(x, history)
        return jnp.sum(x * jnp.asarray([1.0, 2.0, -3.0], x.dtype)), history

    x = scaled([1.0, -2.0, 3.0], scale, dtype)
    for transform in (lambda f: f, jax.checkpoint):
        grad = jax.value_and_grad(transform(loss), has_aux=True)
        (_, after), got = jax.jit(jsa.scalify(grad))(x, history)
        (_, _), want = jsa.scalify(lambda x, h: jax.value_and_grad(
            functools.partial(loss, rescale=False), has_aux=True)(x, h))(x, history)  # fmt: skip
        np.testing.assert_array_equal(value(got), value(want))
        assert after.tolist() == [int(np.log2(scale)) + 1, 3]
    plain = jnp.asarray([1.0, -2.0, 3.0])
    np.testing.assert_array_equal(jax.grad(lambda x: loss(x, history)[0])(plain), [1, 2, -3])
    _, tangent = jax.jvp(lambda x: loss(x, history)[0], (plain,), (plain,))
    assert float(tangent) == 1 - 4 - 9
    mapped = jax.vmap(jax.grad(lambda x: loss(x, history)[0]))(jnp.stack([plain, plain]))
    np.testing.assert_array_equal(mapped, [[1, 2, -3]] * 2)

    def outside(x):
        return jnp.sum(jsa.asarray(jsa.delayed_rescale(jsa.as_scaled_array(x), history)[0]) ** 2)

    np.testing.assert_array_equal(jax.grad(outside)(plain), 2 * plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_scan_carries_the_history(dtype):
    """The carry grows by 2 a step; its history follows, and so does its scale."""

    def steps(x, history):
        def step(carry, _):
            x, history = carry
            x, history = jsa.ops.delayed_rescale(x * 2, history, margin=1)
            return (x, history), history[0]

        return lax.scan(step, (x, history), None, 30)

    x = scaled([1.5, -0.5], 2.0**-20, dtype)
    (y, history), exponents = jax.jit(jsa.scalify(steps))(x, jsa.ops.amax_history(4))
    assert exponents.tolist() == list(range(-19, 11)) and history.tolist() == [10, 9, 8, 7]
    np.testing.assert_array_equal(value(y), value(x) * 2.0**30)
    assert float(y.scale) == 2.0 ** (9 - (TOPS[dtype] - 1))


def test_gradients_through_a_scan_of_layers():
    layers = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32) * 0.5

    def loss(weights, x, histories):
        def layer(h, wh):
            w, history = wh
            h, history = jsa.ops.delayed_rescale(h, history, margin=12)
            return jnp.tanh(h @ w), history

        h, histories = lax.scan(jax.checkpoint(layer), x, (weights, histories))
        return jnp.mean(h**2), histories

    x = np.ones((2, 4), np.float32)
    want = jax.grad(lambda w: loss(w, x, jnp.zeros((3, 2), jnp.int32))[0])(layers)
    histories = jnp.tile(jsa.ops.amax_history(2), (3, 1))
    step = jax.jit(jsa.scalify(jax.grad(loss, has_aux=True)))
    state = jsa.as_scaled_array(layers, dtype=jnp.float16), jsa.as_scaled_array(x, dtype="float16")
    for _ in range(3):
        got, histories = step(*state, histories)
    assert histories[0].tolist() == [0, 0] and np.all(np.asarray(histories) > -10)
    np.testing.assert_allclose(value(got), want, atol=2e-3 * np.max(np.abs(want)))


def test_variables_of_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.asarray([[0.5, -1.0], [2.0, 1.0]]))
            self.history = nnx.Variable(jsa.ops.amax_history(3))

        def __call__(self, x):
            x, self.history[...] = jsa.ops.delayed_rescale(
                x, self.history[...], dtype=jnp.float8_e4m3fn, margin=1
            )
            x = jsa.ops.reduce_precision_on_forward(x, jnp.float8_e4m3fn)
            return x @ self.w[...]

    graph, params, rest = nnx.split(Model(), nnx.Param, ...)

    def step(params, rest, x):
        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            return jnp.sum(model(x)), nnx.split(model, nnx.Param, ...)[2]

        return jax.grad(loss, has_aux=True)(params)

    x = np.array([[1.0, -3.0]])
    grads, after = jax.jit(step)(params, rest, jnp.asarray(x, jnp.float32))
    chex.assert_trees_all_equal(after, rest)  # plain: nothing is entered
    inside = jax.jit(chex.assert_max_traces(jsa.scalify(step), n=1))
    chex.clear_trace_counter()
    for exponent in range(-24, -19):
        batch = jsa.scaled_array(jnp.asarray(x, jnp.float16), np.float32(2.0**exponent))
        grads, rest = inside(jsa.as_scaled_array(params, dtype=jnp.float16), rest, batch)
        want = np.broadcast_to(x.T * 2.0**exponent, (2, 2))
        np.testing.assert_array_equal(value(jax.tree.leaves(grads, is_leaf=_scaled)[0]), want)
    (history,) = jax.tree.leaves(rest)
    assert history.tolist() == [-19, -20, -21]


def _scaled(x):
    return isinstance(x, ScaledArray)


def test_a_loop_compiles_once_and_donates():
    def step(state, history):
        state = jsa.scalify(lambda s: jax.tree.map(lambda x: x * 1.5, s))(state)
        return jsa.delayed_rescale(state, history, margin=1)

    state = {"w": scaled([1.0, 2.0], 1.0, "float16"), "c": scaled([[2.0], [0]], [[1], [2]])}
    history = jsa.init_delayed_rescale(state, 4)
    step = jax.jit(chex.assert_max_traces(step, n=1), donate_argnums=(0, 1))
    chex.clear_trace_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            old = jax.tree.leaves((state, history))
            state, history = step(state, history)
            assert all(leaf.is_deleted() for leaf in old)
    np.testing.assert_allclose(value(state["w"]), 1.5**20 * np.array([1, 2]), rtol=1e-2)
    assert history["w"].tolist() == [12, 12, 11, 10]


def test_every_step_says_whether_it_was_finite():
    x = scaled([[1.0, 2.0], [np.inf, 1.0]], [[1.0], [2.0]])
    y, history, finite = jsa.delayed_rescale(x, jsa.init_delayed_rescale(x, 1), return_finite=True)
    assert not bool(finite) and history.tolist() == [[[1], [NONE]]]


def test_what_is_refused():
    x, history = scaled([1.0]), jsa.ops.amax_history()
    with pytest.raises(ValueError, match="`algorithm` must be one of"):
        jsa.delayed_rescale(x, history, "mean")
    with pytest.raises(TypeError):
        jsa.delayed_rescale(x, history, margin=0.5)
    for bad in (jnp.zeros(3), 1, "x"):
        with pytest.raises(TypeError, match="`history` must be an int32 array"):
            jsa.delayed_rescale(x, bad)
    for shape in ((), (0,), (2, 3), (2, 1, 1)):
        with pytest.raises(ValueError, match="`history` of shape"):
            jsa.delayed_rescale(x, jnp.zeros(shape, jnp.int32))
    with pytest.raises(ValueError):
        jsa.delayed_rescale({"a": x}, {"b": history})
    with pytest.raises(ValueError, match="`length` must be at least 1"):
        jsa.init_delayed_rescale(x, 0)
    with pytest.raises(TypeError):
        jsa.ops.amax_history(1.5)


def test_results_keep_their_facts():
    """A value that cannot be negative stays one; a history may be."""
    closed = jax.make_jaxpr(lambda x: jsa.delayed_rescale(x * x, jsa.ops.amax_history(2)))(1.0)
    assert any(eqn.primitive is delayed_rescale_p for eqn in closed.eqns)
    data = jnp.ones(1024, jnp.float16)

    def total(x, history):
        y, history = jsa.delayed_rescale(x * x, history)
        return jnp.sum(y), jnp.sum(history.astype(jnp.float32))

    y, exponents = jsa.scalify(total)(ScaledArray(data, jnp.float32(1)), jnp.zeros(2, jnp.int32))
    assert np.isfinite(value(y)) and float(value(exponents)) == 0
