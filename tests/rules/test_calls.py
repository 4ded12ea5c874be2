"""How a scalified function is called, and what it may call: every way that JAX users know."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import assert_close, scaled, value, values

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

X = np.array([[1.0, -2.0, 3.0], [0.5, 4.0, -1.5]], np.float32)
TABLE = np.array([0.25, 1.5, -3.0], np.float32)


def assert_same(got, want, rtol=1e-6):
    """Compare the values of two trees; a `ScaledArray` is one leaf."""
    assert jsa.tree.structure(jsa.asarray(got)) == jax.tree.structure(want)
    for a, b in zip(jsa.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(value(a), value(b), rtol=rtol, atol=rtol)


# Arguments.


def _many(x, /, y, *more, scale=1.0, act=jnp.tanh, **named):
    return act(x) * scale + y + sum(more) + sum(v * k for k, v in enumerate(named.values()))


ARGUMENTS = {
    "positional": ((X, X), {}),
    "keywords": ((X,), {"y": X, "scale": 2.0}),
    "variable": ((X, X, X, 3.0), {}),
    "named": ((X, X), {"a": X, "b": 2, "scale": X}),
    "python-numbers": ((X, 2, 3.0), {"scale": np.float32(0.5)}),
    "callable": ((X, X), {"act": jnp.exp}),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name, jit):
    args, kwargs = ARGUMENTS[name]
    wrap = functools.partial(jax.jit, static_argnames="act") if jit else lambda f: f
    got = wrap(jsa.scalify(_many))(*jsa.as_scaled_array(args), **jsa.as_scaled_array(kwargs))
    assert_same(got, _many(*args, **kwargs))


STATIC = {
    "str": ("tanh", lambda x, name: getattr(jnp, name)(x)),
    "callable": (jnp.tanh, lambda x, f: f(x)),
    "bool": (True, lambda x, flag: x * 2 if flag else x),
    "none": (None, lambda x, none: x if none is None else 0),
    "scalar-type": (jnp.float16, lambda x, dtype: x.astype(dtype)),
    "dtype": (jnp.dtype("float16"), lambda x, dtype: x.astype(dtype)),
    "tree": ({"f": jnp.sin, "n": (None, "x")}, lambda x, tree: tree["f"](x)),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_leaves(name):
    static, fun = STATIC[name]
    assert_same(jsa.scalify(fun)(scaled(X, 4.0), static), fun(4 * X, static), rtol=1e-3)
    if name != "tree":
        got = jax.jit(jsa.scalify(fun), static_argnums=1)(scaled(X, 4.0), static)
        assert_same(got, fun(4 * X, static), rtol=1e-3)


def test_methods_and_partials():
    class Model:
        def __init__(self, w):
            self.w = w

        @functools.partial(jax.jit, static_argnums=0)
        @jsa.scalify
        def __call__(self, x):
            return x * self.w

        @jsa.scalify
        def method(self, x, k=1):
            return x * self.w * k

    model = Model(TABLE)
    assert_same(model(scaled(X, 4.0)), 4 * X * TABLE)
    assert_same(functools.partial(model.method, k=2)(scaled(X)), 2 * X * TABLE)
    assert_same(jsa.scalify(functools.partial(jnp.sum, axis=0))(scaled(X)), X.sum(0))


# What the function closes over.


CLOSURES = {
    "numpy": lambda: TABLE,
    "jax": lambda: jnp.asarray(TABLE),
    "number": lambda: 2.5,
    "integers": lambda: np.arange(3),
    "bools": lambda: np.array([True, False, True]),
    "uniform": lambda: jnp.full(3, 2.0),
    "converted": lambda: jsa.asarray(scaled(TABLE, 2.0)),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", CLOSURES)
def test_closures(name, jit):
    const = CLOSURES[name]()

    def fun(x):
        return jnp.tanh(x * const) + jax.jit(lambda v: v * const)(x)

    got = (jax.jit if jit else lambda f: f)(jsa.scalify(fun))(scaled(X, 2.0**-4))
    assert_same(got, fun(X / 16))


def test_closure_over_a_tracer():
    def outer(c):
        return jsa.asarray(jsa.scalify(lambda x: jnp.sum(jnp.sin(x * c)))(scaled(X, 2.0)))

    plain = lambda c: jnp.sum(jnp.sin(2 * X * c))  # noqa: E731
    for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))):
        assert_same(transform(outer)(0.25), transform(plain)(0.25), rtol=1e-5)
    assert_same(jax.vmap(outer)(TABLE), jax.vmap(plain)(TABLE))


W = scaled(TABLE, 2.0)
CLOSED_OVER = {
    "operator": lambda x: x * W,
    "reflected": lambda x: W * x,
    "function": lambda x: jnp.add(x, W),
    "jit": lambda x: jax.jit(jnp.multiply)(x, W),
    "returned": lambda x: (x, W),
    "scan": lambda x: lax.scan(lambda c, w: (c * w, None), x, w_stack())[0],
    "map": lambda x: jax.tree.map(jnp.multiply, {"w": x}, {"w": W})["w"],
}


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_a_scaled_array_that_is_closed_over_is_refused_with_advice(name):
    with pytest.raises(Exception) as error:  # noqa: B017
        jsa.scalify(CLOSED_OVER[name])(scaled(X))
    text = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert "closes over" in text and "argument" in text and "jsa.asarray" in text


def test_an_error_that_no_scaled_array_makes_has_no_advice_on_closures():
    with pytest.raises(TypeError, match="must be an array or a ScaledArray, got dict") as error:
        jsa.scalify(lambda x: jsa.set_scaling({"x": x}, 1.0))(scaled(X))
    assert not any("jax_scalify" in note for note in getattr(error.value, "__notes__", []))


def test_conversions_inside():
    def fun(x):
        return jsa.asarray(jsa.as_scaled_array(x * 2)) + 1

    assert_same(jsa.scalify(fun)(scaled(X, 4.0)), 8 * X + 1)


# scalify and jit inside.


def _square(x):
    return x * x + 1


NESTED = {
    "plain": lambda x: jsa.scalify(_square)(x) * 3,
    "jitted": lambda x: jax.jit(jsa.scalify(_square))(x) * 3,
    "scaled": lambda x: jsa.asarray(jsa.scalify(_square)(jsa.as_scaled_array(x))) * 3,
    "twice": lambda x: jsa.scalify(lambda v: jsa.scalify(_square)(v) * 3)(x),
    "loop": lambda x: lax.fori_loop(0, 2, lambda i, c: jsa.scalify(_square)(c), x),
    "grad": lambda x: jax.grad(lambda v: jnp.sum(jsa.scalify(_square)(v)))(x),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", NESTED)
def test_nested_scalify(name, jit):
    fun = NESTED[name]
    got = (jax.jit if jit else lambda f: f)(jsa.scalify(fun))(scaled(X, 0.5))
    assert isinstance(got, ScaledArray)
    assert_same(got, fun(jnp.asarray(X / 2)))


def test_the_inner_config_is_not_lost():
    inner = jsa.scalify(lambda x: jnp.cumprod(x), config=jsa.ScalifyConfig(missing_rule="silent"))
    assert_same(inner(scaled(X, 2.0)), jnp.cumprod(2 * X))


INNER_JITS = {
    "static": lambda x: jax.jit(lambda n, v: v * n, static_argnums=0)(3, x),
    "static-name": lambda x: jax.jit(lambda v, *, act: act(v), static_argnames="act")(
        x, act=jnp.tanh
    ),
    "donated": lambda x: jax.jit(lambda v: v * 2, donate_argnums=0)(x * 1.5),
    "donated-name": lambda x: jax.jit(lambda *, v: v * 2, donate_argnames="v")(v=x * 1.5) + x,
    "keep-unused": lambda x: jax.jit(lambda v, w: v * 2, keep_unused=True)(x, x),
    "inline": lambda x: jax.jit(lambda v: v * 2, inline=True)(x),
    "unused-result": lambda x: jax.jit(lambda v: (v * 2, v * 3))(x)[1],
    "shared": lambda x: (lambda f: f(f(x)) + f(x))(jax.jit(jnp.tanh)),
    "named-call": lambda x: jax.named_call(jnp.tanh, name="layer")(x),
    "numpy-function": lambda x: jnp.where(x > 0, jnp.linalg.norm(x, axis=-1, keepdims=True), x),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", INNER_JITS)
def test_jit_inside(name, jit):
    fun, x = INNER_JITS[name], scaled(X, 0.5)
    got = (jax.jit if jit else lambda f: f)(jsa.scalify(fun))(x)
    assert_same(got, fun(jnp.asarray(X / 2)))
    assert not x.data.is_deleted() and not x.scale.is_deleted()


# vmap: of a scalified function over scaled arguments, and inside.


def _example(x, w=None):
    """A row with a sum, a constant and a division in it."""
    y = jnp.tanh(x) + 0.5 if w is None else jnp.tanh(x) @ w + 0.5
    return y / (1 + jnp.sum(x * x))


SCALES = {"scalar": 2.0, "one-a-row": [2.0, 0.25], "full-rank": [[2.0], [0.25]]}


def _values(x):
    return jnp.asarray(jsa.asarray(x, jnp.float32))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", SCALES)
def test_vmap_inside(name, static):
    if static:
        if name != "scalar":
            return
        x = ScaledArray(jnp.asarray(X), SCALES[name])
    else:
        x = scaled(X, SCALES[name])
    got = jax.jit(jsa.scalify(jax.vmap(_example)))(x)
    assert_same(got, jax.vmap(_example)(_values(x)))
    columns = jsa.scalify(jax.vmap(_example, in_axes=1, out_axes=1))(x)
    assert_same(columns, jax.vmap(_example, in_axes=1, out_axes=1)(_values(x)))


def test_vmap_over_data_and_scales():
    x = scaled(X, SCALES["one-a-row"])
    got = jax.vmap(jsa.scalify(_example))(x)
    assert got.scale.shape == (2,)
    assert_same(got, jax.vmap(_example)(_values(x)))


def test_vmap_over_scales_of_full_rank():
    x = scaled(X, SCALES["full-rank"])
    assert_same(jax.vmap(jsa.scalify(_example))(x), jax.vmap(_example)(_values(x)))


def test_vmap_over_data_alone():
    x = scaled(X, 4.0)
    got = jax.jit(jax.vmap(jsa.scalify(_example), in_axes=(ScaledArray(0, None),)))(x)
    assert_same(got, jax.vmap(_example)(4 * X))
    kept = jax.vmap(
        jsa.scalify(jnp.negative),
        in_axes=(ScaledArray(0, None),),
        out_axes=ScaledArray(0, None),
    )(x)
    assert kept.scale.shape == () and float(kept.scale) == 4
    static = jax.vmap(jsa.scalify(_example))(ScaledArray(jnp.asarray(X), 4.0))
    assert static.is_static
    assert_same(static, jax.vmap(_example)(4 * X))


def test_vmap_along_different_axes():
    x = scaled(X.T, [2.0, 0.25])
    axes = ScaledArray(1, 0)
    got = jax.vmap(jsa.scalify(_example), in_axes=(axes,), out_axes=axes)(x)
    assert got.shape == (3, 2) and got.scale.shape == (2,)
    want = jax.vmap(_example)(jnp.asarray(X * np.array([[2.0], [0.25]], np.float32)))
    np.testing.assert_allclose(value(got.data) * value(got.scale), want.T, rtol=1e-6)


def test_vmap_over_one_of_two_arguments():
    x, w = scaled(X, [2.0, 0.25]), scaled(np.ones((3, 4)), 0.5)
    got = jax.vmap(jsa.scalify(_example), in_axes=(0, None))(x, w)
    assert_same(got, jax.vmap(_example, in_axes=(0, None))(_values(x), np.ones((3, 4)) / 2))
    got = jax.vmap(jsa.scalify(_example), in_axes=(None, 0))(scaled(X[0], 2.0), w_stack())
    want = jax.vmap(_example, in_axes=(None, 0))(2 * X[0], _values(w_stack()))
    assert_same(got, want)
    assert_same(
        jsa.scalify(jax.vmap(_example, in_axes=(0, None)))(x, w),
        jax.vmap(_example, in_axes=(0, None))(_values(x), np.ones((3, 4)) / 2),
    )


def w_stack():
    return scaled(np.ones((2, 3, 4)), [1.0, 4.0])


def test_vmap_of_vmap():
    scales = jnp.float32(2.0) ** jnp.arange(6).reshape(2, 3)
    data = np.random.default_rng(0).normal(size=(2, 3, 5))
    x = scaled(data, scales)
    want = jax.vmap(jax.vmap(_example))(_values(x))
    assert_same(jax.vmap(jax.vmap(jsa.scalify(_example)))(x), want)
    assert_same(jsa.scalify(jax.vmap(jax.vmap(_example)))(x), want)
    assert_same(jax.vmap(jsa.scalify(jax.vmap(_example)))(x), want)


def test_vmap_with_an_axis_name():
    def fun(x):
        return x / lax.psum(x, "rows") + lax.pmean(x, "rows") * lax.axis_index("rows")

    x = scaled(X, [2.0, 0.25])
    want = jax.vmap(fun, axis_name="rows")(_values(x))
    assert_same(jsa.scalify(jax.vmap(fun, axis_name="rows"))(x), want)
    assert_same(jax.vmap(jsa.scalify(fun), axis_name="rows")(x), want)


def test_per_example_gradients():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    w, x = scaled(np.ones((3, 2)) / 3, 0.5), scaled(X, 2.0)
    got = jax.jit(jsa.scalify(jax.vmap(jax.grad(loss), in_axes=(None, 0))))(w, x)
    want = jax.vmap(jax.grad(loss), in_axes=(None, 0))(_values(w), _values(x))
    assert_same(got, want, rtol=1e-5)


# Structure: tree functions put anything into both fields.


@pytest.mark.parametrize(
    "placeholder", [0, 0.5, None, True, "x", object()], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("scale", [2.0, jnp.float32(2.0)], ids=["static", "dynamic"])
def test_placeholders_keep_the_structure(placeholder, scale):
    tree = {"w": ScaledArray(jnp.asarray(X), scale)}
    structure = jax.tree.structure(tree)
    filled = jax.tree.unflatten(structure, [placeholder] * structure.num_leaves)
    assert jax.tree.structure(filled, is_leaf=lambda x: x is None) == structure


# Without running: shapes, AOT, export.


def _step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.5 * grad, loss


def _step_arguments():
    return scaled(np.ones((3, 2)) / 3, 0.5), scaled(X, 2.0)


def avals(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def test_eval_shape():
    args = _step_arguments()
    fun = jsa.scalify(_step)
    shapes = jax.eval_shape(fun, *args)
    out = fun(*args)
    assert jax.tree.structure(shapes) == jax.tree.structure(out)
    assert avals(shapes) == avals(out)
    assert avals(jax.eval_shape(fun, *jax.eval_shape(lambda *a: a, *args))) == avals(out)
    state = jax.eval_shape(jsa.as_scaled_array, {"w": X, "n": 3})
    assert state["w"].shape == X.shape and state["w"].scale.shape == ()


def test_ahead_of_time():
    args = _step_arguments()
    step = jax.jit(jsa.scalify(_step))
    lowered = step.lower(*jax.eval_shape(lambda *a: a, *args))
    compiled = lowered.compile()
    assert_same(compiled(*args), _step(*map(_values, args)))
    assert avals(lowered.out_info) == avals(compiled(*args))
    with pytest.raises(TypeError):
        compiled(*jsa.freeze_scales(args))


def _data(exported):
    return jax.export.deserialize(exported.serialize())


@pytest.mark.parametrize("kind", ["dynamic", "static", "per-channel"])
def test_export(kind):
    w, x = _step_arguments()
    if kind == "static":
        w, x = jsa.freeze_scales((w, x))
    elif kind == "per-channel":
        w = ScaledArray(w.data, jnp.full((3, 1), 0.5, jnp.float32))
    exported = jax.export.export(jax.jit(jsa.scalify(_step)))(w, x)
    got = exported.call(w, x)
    assert_same(got, _step(_values(w), _values(x)))
    assert isinstance(got[0], ScaledArray) and got[0].is_static == (kind == "static")


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_export_with_serialisation(kind):
    pytest.importorskip("flatbuffers")
    args = _step_arguments()
    if kind == "static":
        args = tuple(ScaledArray(a.data, s) for a, s in zip(args, (2.0**-60, 2.0)))
    step = jax.jit(jsa.scalify(_step))
    restored = _data(jax.export.export(step)(*args))
    got, want = restored.call(*args), step(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_export_for_other_platforms():
    args = _step_arguments()
    exported = jax.export.export(jax.jit(jsa.scalify(_step)), platforms=["tpu", "cuda"])(*args)
    assert exported.platforms == ("tpu", "cuda")


def test_export_with_a_symbolic_batch():
    def fun(w, x):
        return jax.nn.softmax(jax.nn.relu(x @ w + 1))

    rows, columns = jax.export.symbolic_shape("b, 3")
    w, _ = _step_arguments()
    x = ScaledArray(
        jax.ShapeDtypeStruct((rows, columns), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    )
    exported = jax.export.export(jax.jit(jsa.scalify(fun)))(w, x)
    for count in (1, 5):
        batch = np.full((count, 3), 0.5, np.float32)
        assert_same(exported.call(w, scaled(batch, 2.0)), fun(_values(w), 2 * batch))


def test_export_of_sums_over_a_symbolic_batch():
    def loss(x):
        return jnp.mean(jax.nn.logsumexp(x * x, 1) - jnp.take_along_axis(x, jnp.array([[1]]), 1))

    def fun(x):
        moved = jnp.mean(x, 0), x.T @ x, jnp.cumsum(x, 0), jnp.repeat(x, 2, 0), jnp.max(x)
        return *moved, jax.grad(loss)(x)

    x = ScaledArray(
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3"), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    exported = jax.export.export(jax.jit(jsa.scalify(fun)))(x)
    for count in (1, 5):
        batch = np.full((count, 3), 0.5, np.float32)
        assert_same(exported.call(scaled(batch, 2.0)), fun(2 * batch))


SYMBOLIC = {
    "matmul": lambda w, x: x @ w,
    "gradient": lambda w, x: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w),
    "joined": lambda w, x: jnp.concatenate([jnp.maximum(x @ w, w[0]), x[:, :4] * w[1]], 1),
    "normalised": lambda w, x: jax.nn.softmax(x @ w) + jax.nn.standardize(x @ w),
    "sums": lambda w, x: (jnp.cumsum(x @ w, 0), jnp.sort(x @ w, 0), jnp.mean(x @ w, 0)),
    "scan": lambda w, x: lax.scan(lambda c, r: (c + r @ w, r @ w), w[0] * 0, x),
    "reshape": lambda w, x: ((x @ w).reshape(-1), (x @ w).T.reshape(2, -1), (x * w[:, 0]).ravel()),
    "branches": lambda w, x: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x[:, :4], x),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_export_of_a_symbolic_batch_with_a_scale_a_channel(name, dtype):
    numbers = np.random.default_rng(0)
    w = jsa.as_scaled_array(jnp.asarray(numbers.normal(size=(8, 4)), dtype), scale="rms", axis=1)
    step = jax.jit(jsa.scalify(SYMBOLIC[name]))
    for is_scaled in (False, True):
        x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 8"), dtype)
        x = ScaledArray(x, jax.ShapeDtypeStruct((), jnp.float32)) if is_scaled else x
        exported = jax.export.export(step)(w, x)
        for count in (1, 5):
            batch = jnp.asarray(numbers.normal(size=(count, 8)), dtype)
            batch = jsa.as_scaled_array(batch) if is_scaled else batch
            want = values(step(w, batch))
            assert_close(exported.call(w, batch), want, 8 * float(jnp.finfo(dtype).eps))


# Platforms and effects.


def test_platform_dependent():
    def fun(x):
        return lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tanh) * 2

    traced = jax.jit(jsa.scalify(fun)).trace(scaled(X, 2.0))
    names = {"cpu": "sine", "tpu": "cosine", "cuda": "tanh"}
    for platform, name in names.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert [n for n in names.values() if f"stablehlo.{n} " in text] == [name]
    assert_same(jsa.scalify(fun)(scaled(X, 2.0)), 2 * np.sin(2 * X))


@pytest.mark.parametrize("jit", [False, True])
def test_debug_print_shows_values(jit, capfd):
    def fun(x):
        jax.debug.print("x = {x} of {name}", x=x, name="mine", ordered=True)
        return x * 2

    (jax.jit if jit else lambda f: f)(jsa.scalify(fun))(scaled([3.0, 1.0], 4.0))
    jax.effects_barrier()
    assert capfd.readouterr().out == "x = [12.  4.] of mine\n"


def test_debug_callback_sees_values_beyond_float16():
    seen = []

    def fun(x):
        jax.debug.callback(lambda v: seen.append(np.asarray(v, np.float64)), x)
        return x * 2

    jsa.scalify(fun)(scaled([3.0, 1.0], 2.0**20, jnp.float16))
    jax.effects_barrier()
    np.testing.assert_array_equal(seen, [[3 * 2.0**20, 2.0**20]])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("remat", [False, True])
def test_effects_keep_their_order(remat):
    seen = []

    def note(name, *values):
        jax.debug.callback(lambda *v: seen.append((name, *map(float, v))), *values, ordered=True)

    def body(c, v):
        note("step", c, v)
        return c + v, None

    def layer(x):
        note("layer", x[0])
        return x * 2

    def fun(x, unused):
        note("start", x[0])
        x = (jax.checkpoint(layer) if remat else jax.jit(layer))(x)
        total, _ = lax.scan(body, x[0], x)
        lax.cond(total > 0, lambda t: note("yes", t), lambda t: note("no", t), total)
        total = lax.fori_loop(0, 2, lambda i, t: (note("loop", i, t), t * 2)[1], total)
        note("end", total)
        return x

    def run(fun, *args):
        seen.clear()
        jax.block_until_ready(jax.jit(fun)(*args))
        jax.effects_barrier()
        return list(seen)

    want = run(fun, np.array([6.0, 2.0], np.float32), 1.0)
    got = run(jsa.scalify(fun), scaled([3.0, 1.0], 2.0), 1.0)
    assert got == want and len(want) == 8


def _on_the_host(x):
    assert x.dtype == jnp.float16
    return np.sqrt(x)


CALLBACKS = {
    "pure_callback": lambda x: jax.pure_callback(_on_the_host, x, x),
    "io_callback": lambda x: jax.experimental.io_callback(_on_the_host, x, x, ordered=True),
    "exported": lambda x: jax.export.export(jax.jit(jnp.sqrt))(
        jax.ShapeDtypeStruct(x.shape, x.dtype)
    ).call(x),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", CALLBACKS)
def test_calls_of_the_host_get_values_of_their_own_dtype(name, jit):
    x = scaled([4.0, 16.0], 4.0, jnp.float16)
    fun = jsa.scalify(lambda v: CALLBACKS[name](v) * 2, config=jsa.ScalifyConfig())
    with pytest.warns(jsa.DequantisedWarning, match="expects plain values"):
        got = (jax.jit if jit else lambda f: f)(fun)(x)
        got = value(got)
    np.testing.assert_array_equal(got, [8, 16])


def test_effects_stay_without_results():
    seen = []

    def fun(x):
        jax.experimental.io_callback(lambda v: seen.append(float(v)), None, x, ordered=True)

    config = jsa.ScalifyConfig(missing_rule="silent")
    assert jax.jit(jsa.scalify(fun, config=config))(scaled(3.0, 2.0)) is None
    jax.effects_barrier()
    assert seen == [6.0]


def test_a_maximum_of_scales_that_a_body_makes_one_after_the_other():
    """A member that was made after its maximum cannot be told by number."""
    x = jnp.linspace(0.9, 1.1, 8)

    def loss(x):
        return jnp.cumprod(x).sum()

    got = jax.jit(jsa.scalify(jax.grad(loss)))(jsa.as_scaled_array(x))
    np.testing.assert_allclose(got, jax.grad(loss)(x), rtol=1e-5)


@pytest.mark.parametrize("way", ["alone", "scan", "cond", "grad"])
def test_functions_with_an_equation_that_jax_lowers_as_it_binds(way):
    """`jnp.place` is one in JAX 0.12: its equations cannot be copied from trace to trace."""

    def place(x):
        return jnp.place(x, x > 0, 2 * x, inplace=False)

    ways = {
        "alone": place,
        "scan": lambda x: lax.scan(lambda c, _: (place(c), None), x, None, length=2)[0],
        "cond": lambda x: lax.cond(x[0] > 0, place, lambda c: c, x),
        "grad": jax.grad(lambda x: place(x).sum()),
    }
    x = scaled([1.0, -3.0], 2.0, "float16")
    got = jax.jit(jsa.scalify(ways[way]))(x)
    np.testing.assert_array_equal(value(got), ways[way](value(x)))
