"""`custom_scale`: functions with rules for their scales, called in every way that JAX knows.

The rules choose scales that no other rule would give, so that one that is passed over shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base.jaxprs import LazyJaxpr
from jax_scalify.testing import check_scale_rule

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

X = np.array([[0.5, -1.5, 2.0], [-0.75, 1.25, 3.0]], np.float32)


def scaled(data, scale=4.0, dtype=jnp.float32):
    """The value `data`, at a dynamic scale."""
    return jsa.as_scaled_array(jnp.asarray(data, dtype), scale=jnp.asarray(scale, jnp.float32))


def assert_same(got, want, rtol=1e-5):
    """Compare the values of two trees; a `ScaledArray` is one leaf."""
    got, want = jsa.asarray(got, jnp.float32), jsa.asarray(want, jnp.float32)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def assert_scales(tree, scale):
    """Every floating leaf of a tree is a `ScaledArray` of this scale."""
    for x in jsa.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_array_equal(x.scale, np.full(np.shape(x.scale), scale))


def with_scale(fun, scale, calls=None, **options):
    """A function with a rule that evaluates it on values, and gives its results a scale."""
    function = jsa.custom_scale(fun, **options)

    @function.defscale
    def _(*args, **static):
        if calls is not None:
            calls.append(args)
        power = scale(*args) if callable(scale) else scale

        def at_scale(o):
            if not jnp.issubdtype(o.dtype, jnp.floating):
                return o
            return ScaledArray(ScaledArray(o, 1 / jnp.asarray(power)).to_array(), power)

        return jax.tree.map(at_scale, fun(*jsa.asarray(args), **static))

    return function


def silu(x):
    return x * jax.nn.sigmoid(x)


def silu_scale(x):
    """8 times the scale of x."""
    gate = jax.nn.sigmoid(x.to_array(jnp.float32))
    return ScaledArray((x.data * gate / 8).astype(x.dtype), x.scale * 8)


def silu_scale_vjp(x, ct):
    """A quarter of the cotangent's scale."""
    value = x.to_array(jnp.float32)
    gate = jax.nn.sigmoid(value)
    slope = gate * (1 + value * (1 - gate))
    return (ScaledArray((ct.data * slope * 4).astype(x.dtype), ct.scale / 4),)


FORWARD, COTANGENT, BOTH, NEITHER = (jsa.custom_scale(silu) for _ in range(4))
FUNCTIONS = {"forward": FORWARD, "cotangent": COTANGENT, "both": BOTH}
for _function in (FORWARD, BOTH):
    _function.defscale(silu_scale)
for _function in (COTANGENT, BOTH):
    _function.defscale_vjp(silu_scale_vjp)


# Where a function may be called: how, and how many times in a row.


def _inside_another(f):
    """Without a forward rule the body is interpreted, and the rule inside is used."""
    outer = jsa.custom_scale(lambda x: f(x))
    outer.defscale_vjp(silu_scale_vjp)
    return outer


PLACES = {
    "direct": (lambda f: f, 1),
    "twice": (lambda f: lambda x: f(f(x)), 2),
    "jit": (lambda f: jax.jit(lambda x: jax.jit(f)(x)), 1),
    "vmap": (jax.vmap, 1),
    "vmap-columns": (lambda f: jax.vmap(f, in_axes=1, out_axes=1), 1),
    "vmap-vmap": (lambda f: jax.vmap(jax.vmap(f)), 1),
    "scan": (lambda f: lambda x: lax.scan(lambda c, v: (c, jax.vmap(f)(v)), 0.0, x)[1], 1),
    "cond": (lambda f: lambda x: lax.cond(x[0, 0] > 0, lambda v: f(v), lambda v: f(-v), x), 1),
    "remat": (jax.checkpoint, 1),
    "remat-scan": (lambda f: lambda x: lax.map(jax.checkpoint(f), x), 1),
    "another": (_inside_another, 1),
}
SCALES = {
    "dynamic": jnp.float32(4),
    "static": 4.0,
    "row": jnp.float32([[4], [4]]),
    "leading": jnp.float32([4, 4]),
    "column": jnp.float32([[4, 4, 4]]),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("place", PLACES)
def test_the_rule(place):
    call, count = PLACES[place]
    for name in SCALES if place in ("direct", "vmap", "scan") else ["dynamic", "row"]:
        got = jax.jit(jsa.scalify(call(FORWARD)))(ScaledArray(X / 4, SCALES[name]))
        assert_same(got, call(silu)(X))
        assert_scales(got, 4 * 8.0**count)
        assert got.is_static == (name == "static")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("place", PLACES)
def test_the_rule_of_cotangents(place):
    call, count = PLACES[place]

    def gradient(f):
        return jax.grad(lambda x: jnp.sum(call(f)(x)))

    for function in (BOTH, COTANGENT):
        got = jax.jit(jsa.scalify(gradient(function)))(scaled(X))
        assert_same(got, gradient(silu)(X))
        assert_scales(got, 0.25**count)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype, way", [
    *((jnp.float16, way) for way in ("eager", "jit", "vmap", "scan", "grad", "grad_outside")),
    (jnp.bfloat16, "grad"), (jnp.float32, "vmap"),
])  # fmt: skip
def test_invariants(dtype, way):
    data = np.asarray(X / 2, dtype)
    check_scale_rule(BOTH, data, ways=way, scales=(2.0**-20, 2.0**10, 0.0))


@pytest.mark.parametrize("call, most", [
    (lambda f: lambda x: lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: f(c) + 2, x), 3),
    (lambda f: lambda x: lax.scan(lambda c, v: (c + f(v), c), x[0], x)[0], 2),
    (lambda f: (lambda g: lambda x: g(x * 2) + g(x * 2))(jax.jit(f)), 2),
], ids=["while", "scan", "jit-twice"])  # fmt: skip
def test_how_often_a_body_is_interpreted(call, most):
    calls = []
    assert_same(jsa.scalify(call(with_scale(silu, 16.0, calls)))(scaled(X)), call(silu)(X))
    assert 1 <= len(calls) <= most


# vmap: an example has a scale of its own if its operands have.


def _product(x, w):
    return x @ w


PRODUCT = jsa.custom_scale(_product)


@PRODUCT.defscale
def _product_scale(x, w):
    assert (x.ndim, w.ndim, x.scale.ndim, w.scale.ndim) == (1, 2, 0, 0)
    return ScaledArray(x.data @ w.data / 2, x.scale * w.scale * 2)


def _operand(shape, scale):
    """An operand of powers of two of a shape, None for a static one."""
    data = np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)
    if scale is None:
        return ScaledArray(data, 2.0)
    return ScaledArray(data, jnp.exp2(jnp.arange(np.prod(scale, dtype=int)) % 4.0).reshape(scale))


# Shapes of the two scales, axes, shape of the scale of the result.
VMAPS = {
    "shared": ((), (), (0, None), ()),
    "static": (None, None, (0, 0), ()),
    "own": ((5,), (), (0, None), (5, 1)),
    "own-full-rank": ((5, 1), (), (0, 0), (5, 1)),
    "own-static": ((5, 1), None, (0, 0), (5, 1)),
    "size-1": ((1, 1), (1, 1, 1), (0, 0), ()),
    "both": ((5,), (5, 1, 1), (0, 0), (5, 1)),
    "of-the-second": ((), (5,), (None, 0), (5, 1)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", VMAPS)
def test_vmap(name):
    x_scale, w_scale, axes, shape = VMAPS[name]
    x = _operand((3,) if axes[0] is None else (5, 3), x_scale)
    w = _operand((3, 2) if axes[1] is None else (5, 3, 2), w_scale)
    got = jsa.scalify(jax.vmap(PRODUCT, axes))(x, w)
    assert_same(got, jax.vmap(_product, axes)(*jsa.asarray((x, w))))
    assert jnp.shape(got.scale) == shape
    np.testing.assert_array_equal(np.ravel(got.scale), 2 * np.ravel(x.scale) * np.ravel(w.scale))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", [1, 4])
def test_vmap_of_vmap(rows):
    x, w = _operand((4, 5, 3), (rows, 5, 1)), _operand((4, 3, 2), (4,))
    got = jsa.scalify(jax.vmap(jax.vmap(PRODUCT, (0, None))))(x, w)
    assert_same(got, jax.vmap(jax.vmap(_product, (0, None)))(*jsa.asarray((x, w))))
    np.testing.assert_array_equal(got.scale, 2 * x.scale * w.scale[:, None, None])


def test_vmap_of_the_rule_of_cotangents():
    """Each example has a gradient; that of a shared operand is their sum."""
    function = jsa.custom_scale(lambda x, w: x * w)
    scaled_by = lambda o, ct: ScaledArray(ct.data * o.data / 8, ct.scale * o.scale * 8)  # noqa: E731
    function.defscale_vjp(lambda x, w, ct: (scaled_by(w, ct), scaled_by(x, ct)))

    def grads(f):
        return jax.grad(lambda x, w: jnp.sum(jax.vmap(f, (0, None))(x, w)), (0, 1))

    x, w = _operand((5, 3), (5,)), _operand((3,), ())
    got = jax.jit(jsa.scalify(grads(function)))(x, w)
    assert_same(got, grads(jnp.multiply)(*jsa.asarray((x, w))))
    assert_scales(got[0], 8 * w.scale)


def test_vmap_of_a_rule_that_looks_at_data():
    """Each example has a scale then, and operands of integers and results without one have none."""
    fun = lambda x, i: (x * 2, jnp.argmax(x), x[i])  # noqa: E731
    function = jsa.custom_scale(fun)

    @function.defscale
    def _(x, i):
        power = jnp.exp2(jnp.floor(jnp.log2(jnp.max(jnp.abs(x.data)))))
        doubled = ScaledArray(x.data * 2 / power, jnp.asarray(x.scale) * power)
        return doubled, jnp.argmax(x.data), ScaledArray(x.data[i], x.scale)

    x, i = X * np.float32([[1], [64]]), np.array([2, 0])
    got = jsa.scalify(jax.vmap(function))(scaled(x), i)
    assert_same(got, jax.vmap(fun)(x, i))
    np.testing.assert_array_equal(got[0].scale, [[2], [128]])


def test_vmap_with_an_axis_name():
    total = jsa.custom_scale(lambda x: lax.psum(x, "rows"))
    total.defscale(lambda x: ScaledArray(lax.psum(x.data, "rows") / 2, 2 * x.scale))
    for call in (lambda f: f(X), lambda f: jsa.scalify(f)(scaled(X))):
        got = call(jax.vmap(total, axis_name="rows"))
        assert_same(got, np.stack([X.sum(0)] * 2))
    assert_scales(got, 8)


# Without `scalify`.


def _loss(f):
    return lambda x: jnp.sum(f(x) ** 2)


REVERSE = {
    "value": lambda f: f,
    "jit-vmap": lambda f: jax.jit(jax.vmap(f)),
    "grad": lambda f: jax.grad(_loss(f)),
    "jit-grad-vmap": lambda f: jax.jit(jax.grad(_loss(jax.vmap(f)))),
    "grad-remat": lambda f: jax.grad(_loss(jax.checkpoint(f))),
    "grad-grad": lambda f: jax.grad(_loss(jax.grad(_loss(f)))),
    "grad-scan": lambda f: jax.grad(_loss(lambda x: lax.map(f, x))),
    "export": lambda f: lambda x: jax.export.export(jax.jit(f))(x).call(x),
}
ALL = REVERSE | {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x * 2,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x * 2),
    "jacfwd-vmap": lambda f: jax.jacfwd(jax.vmap(f)),
    "hessian": lambda f: jax.hessian(_loss(f)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", ALL)
def test_without_scalify_it_is_the_plain_function(way):
    want = ALL[way](silu)(jnp.asarray(X))
    for function in (FORWARD, NEITHER, *((BOTH, COTANGENT) if way in REVERSE else ())):
        assert_same(ALL[way](function)(jnp.asarray(X)), want)
    # Of plain arguments `scalify` makes nothing else.
    assert_same(jsa.scalify(ALL[way](FORWARD))(jnp.asarray(X)), want)


def test_the_lowered_program_is_the_plain_one():
    texts = {jax.jit(lambda x, f=f: f(x) + 1).lower(X).as_text() for f in (silu, FORWARD, BOTH)}
    assert len(texts) == 1


def test_a_linear_function_can_be_transposed():
    function = with_scale(lambda x, w: x @ w, 16.0)
    (got,) = jax.linear_transpose(lambda x: function(x, X.T), X)(X[:, :2])
    assert_same(got, X[:, :2] @ X)


@pytest.mark.parametrize("way", ["jvp", "linearize"])
def test_forward_mode_is_refused_where_cotangents_have_a_rule(way):
    for call in (ALL[way](BOTH), jsa.scalify(ALL[way](BOTH))):
        with pytest.raises(TypeError, match="forward-mode"):
            call(X)


# Derivatives from outside, of functions with derivative rules, and by what is closed over.


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_outside(name, jit):
    fun = jsa.scalify(lambda x: jax.vmap(FUNCTIONS[name])(x) * 2)
    grad = jax.grad(_loss(lambda x: jsa.asarray(fun(jsa.as_scaled_array(x)))))
    assert_same((jax.jit(grad) if jit else grad)(X), jax.grad(_loss(lambda x: silu(x) * 2))(X))


@jax.custom_jvp
def square_jvp(x):
    return x * x


@jax.custom_vjp
def square_vjp(x):
    return x * x


square_jvp.defjvps(lambda t, out, x: 3 * x * t)  # not the true derivatives
square_vjp.defvjp(lambda x: (square_vjp(x), x), lambda x, ct: (3 * x * ct,))


@pytest.mark.parametrize("fun", [square_jvp, square_vjp], ids=["jvp", "vjp"])
def test_derivative_rules_of_functions_inside(fun):
    function = with_scale(lambda x: fun(x) + 1, 16.0)
    loss = lambda x: jnp.sum(function(x))  # noqa: E731
    outside = lambda x: jsa.asarray(jsa.scalify(loss)(jsa.as_scaled_array(x)))  # noqa: E731
    for got in (jax.grad(loss)(X), jsa.scalify(jax.grad(loss))(scaled(X)), jax.grad(outside)(X)):
        assert_same(got, 3 * X)


@pytest.mark.parametrize("rule", ["defscale", "defscale_vjp"])
def test_closures_over_traced_arrays(rule):
    """Their derivative is the plain one, whatever the rule."""

    def loss(c, x):
        function = jsa.custom_scale(lambda x: x * jnp.sin(c) * X)
        getattr(function, rule)(lambda x, *ct: x if rule == "defscale" else ct)
        return jnp.sum(function(x))

    c = jnp.arange(1.0, 4.0)
    want = jnp.cos(c) * np.sum(X * X)
    for wrap in (lambda f: f, jax.jit):
        assert_same(wrap(jax.grad(loss))(c[0], X), want[0])
    assert_same(jax.vmap(jax.grad(loss), (0, None))(c, X), want)
    assert_same(jsa.scalify(jax.grad(loss))(scaled(c[0]), X), want[0])


# Arguments and results: a function of arrays, its static arguments, and how it is called.


def _tree(tree, i, more):
    return {"row": tree["x"][i], "sum": (tree["x"] + tree["y"][0]) * more, "i": i + 1}


def _pool(x, kind="mean", *, axis=-1):
    return getattr(jnp, kind)(x, axis)


def _noise(key, x):
    return x + jax.random.uniform(key, x.shape)


def _add(*xs, shift=1.0):
    return sum(xs) + shift


STATIC = ("kind", "axis")
CALLS = {
    "static-keyword": (_pool, STATIC, lambda f, x: f(x, axis=0, kind="max")),
    "static-positional": (_pool, STATIC, lambda f, x: f(x, "sum")),
    "static-default": (_pool, STATIC, lambda f, x: f(x)),
    "args": (_add, (), lambda f, x: f(x, X, x)),
    "args-static": (_add, "shift", lambda f, x: f(x, X, shift=3.0)),
    "args-none": (lambda x, *xs: x + sum(xs), (), lambda f, x: f(x)),
    "keywords": (lambda x, y: x - y, (), lambda f, x: f(y=X, x=x)),
    "positional-only": (lambda x, y=X, /: x - y, (), lambda f, x: f(x)),
    "ufunc": (jnp.multiply, (), lambda f, x: f(x, x)),
    "default": (lambda x, factor=0.5: x * factor, (), lambda f, x: f(x)),
    "python-number": (lambda x, n: x * n, (), lambda f, x: f(x, 3)),
    "none": (lambda x, b=None: x if b is None else x + b, (), lambda f, x: f(x)),
    "integers": (lambda x, i: x[i], (), lambda f, x: f(x, np.int32(1))),
    "bools": (lambda x, where: jnp.where(where, x, 0), (), lambda f, x: f(x, X > 0)),
    "key": (_noise, (), lambda f, x: f(jax.random.key(0), x)),
    "tree": (_tree, (), lambda f, x: f({"x": x, "y": (x, None)}, 1, X)),
    "several-results": (lambda x: (x, [x * 2, jnp.argmax(x)]), (), lambda f, x: f(x)),
    "numpy-closure": (lambda x: x @ X.T, (), lambda f, x: f(x)),
    "rule-of-a-rule": (FORWARD, (), lambda f, x: f(x)),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_and_results(name):
    fun, static, call = CALLS[name]
    function = with_scale(fun, 16.0, static_argnames=static)
    want = call(fun, X)
    assert_same(call(function, X), want)
    got = jsa.scalify(lambda x: call(function, x))(scaled(X))
    assert_same(got, want)
    assert_scales(got, 16)


def test_a_static_argument_before_others():
    function = jsa.custom_scale(lambda n, *xs: sum(xs) * n, static_argnames="n")
    function.defscale(lambda *xs, n: ScaledArray(sum(x.data for x in xs), n * xs[0].scale))
    got = jsa.scalify(lambda x: function(2, x, x))(scaled(X))
    assert_same(got, 4 * X)
    assert_scales(got, 8)


def test_plain_operands_and_defaults():
    """One scaled operand is enough, without one the rule is not asked; it is given defaults."""
    calls = []
    function = with_scale(lambda x, y=1.0: x * y, 16.0, calls)
    fun = lambda x, y: ((function(x, y), function(x)), function(y, y))  # noqa: E731
    out, plain = jsa.scalify(fun)(scaled(X), X)
    assert [len(args) for args in calls] == [2, 2]
    assert all(args[1].scale.is_one for args in calls)
    assert_scales(out, 16)
    assert not isinstance(plain, ScaledArray)


def test_cotangents_of_trees_and_integers():
    """The gradient of an operand without floating leaves is None."""
    function = jsa.custom_scale(lambda p, i: (p["w"][i] * p["b"], i + 1))

    @function.defscale_vjp
    def _(p, i, cts):
        (p, ct) = jsa.asarray((p, cts[0]))
        grads = {"w": jnp.zeros(X.shape).at[i].set(ct * p["b"]), "b": ct * p["w"][i]}
        return jax.tree.map(lambda g: ScaledArray(g / 16, 16.0), grads), None

    def grad(f):
        return jax.grad(lambda p, i: jnp.sum(f(p, i)[0]))

    params, i = {"w": X, "b": X[0]}, jnp.int32(1)
    want = grad(function.__wrapped__)(params, i)
    assert_same(grad(function)(params, i), want)
    got = jsa.scalify(grad(function))(jsa.as_scaled_array(params), i)
    assert_same(got, want)
    assert_scales(got, 16)


# What rules return.

RETURNED = {
    "static": (lambda x: 2.0, ()),
    "static-integer": (lambda x: 2, ()),
    "symbolic": (lambda x: x.scale / 2, ()),
    "array": (lambda x: jnp.minimum(jnp.asarray(x.scale), 2), ()),
    "other-dtype": (lambda x: jnp.bfloat16(2), ()),
    "leading": (lambda x: jnp.full(2, 2.0), (2, 1)),
    "full-rank": (lambda x: jnp.full((1, 3), 2.0), (1, 3)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_scales_that_rules_return(name):
    scale, shape = RETURNED[name]
    function = with_scale(jnp.negative, scale)
    for fun in (function, lambda x: function(x).T.T):
        got = jsa.scalify(fun)(scaled(X, dtype=jnp.float16))
        assert (got.dtype, got.scale.dtype, got.scale.shape) == (jnp.float16, jnp.float32, shape)
        assert_same(got, -X)
        assert_scales(got, 2)


def test_a_long_product_of_scales_is_computed_on_the_way():
    factors = []
    function = jsa.custom_scale(lambda x, y: x * y)

    @function.defscale
    def _(x, y):
        factors.append(len(x.scale.factors))
        return ScaledArray(x.data * y.data, x.scale * y.scale)

    fun = jsa.scalify(lambda x, *ys: [x := function(x, y) for y in ys][-1])
    got = fun(*(ScaledArray(jnp.ones(2), jnp.float32(2.0**15)) for _ in range(16)))
    assert float(got.scale) == 2.0**126 and max(factors) < 10


@pytest.mark.parametrize("call", [lambda f: f, jax.vmap], ids=["direct", "vmap"])
@pytest.mark.parametrize(
    "fun, nonnegative", [(lambda x: jax.nn.softmax(x), True), (jnp.square, True), (jnp.tanh, False)]
)
def test_results_that_are_not_negative_add_up(fun, nonnegative, call):
    """A sum of n of them counts n, by what the function's body says; of others, less."""
    x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    got = jsa.scalify(lambda x: jnp.sum(call(with_scale(fun, 16.0))(x), axis=1))(scaled(x))
    assert_same(got, jnp.sum(fun(x), axis=1))
    assert np.all((np.asarray(got.scale) == 16 * 64) == nonnegative)


# Without running, and with effects.


@pytest.fixture
def traces(monkeypatch):
    """The functions that were traced since their equations were needed."""
    traced, closed = [], LazyJaxpr.closed.func

    def counted(self):
        traced.append(self)
        return closed(self)

    monkeypatch.setattr(LazyJaxpr, "closed", property(counted))
    return traced


def test_plain_derivatives_are_traced_only_where_they_are_needed(traces):
    function = with_scale(lambda x, y: jnp.sin(x) * y, 8.0)

    @function.defscale_vjp
    def _(x, y, ct):
        return tuple(ScaledArray(a.data, a.scale * 2.0) for a in (x, y))

    def loss(x, y):
        return jnp.sum(function(x, y) * X)

    gradients = jsa.scalify(jax.grad(loss, (0, 1)))(scaled(X), scaled(X))
    assert not traces
    assert_scales(gradients, 8.0)
    jsa.scalify(jax.vmap(jax.grad(loss), (None, 0)))(scaled(X), scaled(np.stack([X, X])))
    assert traces
    want = jax.grad(lambda x, y: jnp.sum(jnp.sin(x) * y * X))(X, X)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X, X), want, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_result_types_of_a_function_that_its_rule_replaces(traces, dtype):
    function = with_scale(lambda xs: [x + 1 for x in xs], 8.0, result_types=lambda xs: xs)
    xs = [scaled(X, dtype=dtype), scaled(X[0], dtype=dtype)]
    got = jsa.scalify(function)(xs)
    assert not traces
    assert_scales(got, 8.0)
    plain = [x.to_array() for x in xs]
    assert_same(got, [x + 1 for x in plain])
    assert_same(jax.jit(function)(plain), [x + 1 for x in plain])
    assert_same(jsa.scalify(lambda xs, _: function(xs))(plain, xs[0]), [x + 1 for x in plain])
    slope = jax.grad(lambda xs: sum(jnp.sum(x**2) for x in function(xs)).astype(jnp.float32))
    assert_same(slope(plain), [2 * (x + 1) for x in plain], rtol=1e-2)


def test_wrong_result_types_are_refused():
    def total(x):
        return jnp.sum(x)

    function = with_scale(total, 8.0, result_types=lambda x: x)
    with pytest.raises(TypeError, match=r"`total` returned .*float32\[\].*float32\[2, 3\]"):
        function(X)
    function = with_scale(lambda x: {"a": x}, 8.0, result_types=lambda x: [x])
    with pytest.raises(TypeError, match=r"returned .*'a'.* but its `result_types` are"):
        function(X)
    with pytest.raises(TypeError, match="`result_types` must be callable, got int"):
        jsa.custom_scale(total, result_types=3)


def test_shapes_compilation_and_export():
    fun = jsa.scalify(jax.value_and_grad(lambda x: jnp.sum(jax.vmap(BOTH)(x))))
    x, step = scaled(X), jax.jit(fun)
    shapes, want = jax.eval_shape(fun, x), fun(x)
    assert jax.tree.structure(shapes) == jax.tree.structure(want)
    assert_same(step.lower(jax.eval_shape(lambda x: x, x)).compile()(x), want)
    assert_same(jax.export.export(step)(x).call(x), want)


def test_effects_of_the_body(capfd):
    def fun(x):
        jax.debug.print("x = {}", x, ordered=True)
        return x * 2

    function = with_scale(fun, 16.0)
    jax.jit(lambda x: (function(x), x)[1])(2.0)
    jax.effects_barrier()
    assert capfd.readouterr().out == "x = 2.0\n"


# What is refused.

DEFINITIONS = {
    "function": (lambda: jsa.custom_scale(3), r"`fun` must be callable, got int"),
    "static": (
        lambda: jsa.custom_scale(silu, static_argnames="axis"),
        r"`static_argnames` of `silu` must be among \['x'\], got \['axis'\]",
    ),
    "rule": (lambda: NEITHER.defscale(3), r"`silu.defscale` must be callable, got int"),
    "arguments": (lambda: NEITHER.defscale(lambda x, y: x), r"must take \(x\), got \(x, y\)"),
    "vjp-rule": (lambda: NEITHER.defscale_vjp(3), r"`silu.defscale_vjp` must be callable"),
    "vjp-arguments": (lambda: NEITHER.defscale_vjp(lambda x: x), r"must take \(x, cotangent\)"),
    "static-of-rule": (
        lambda: jsa.custom_scale(_pool, static_argnames=STATIC).defscale(lambda x, kind: x),
        r"must take \(x, kind=, axis=\), got \(x, kind\)",
    ),
    "string": (lambda: FORWARD("x"), r"`silu` takes arrays, got str; name .*`static_argnames`"),
    "keyword": (lambda: with_scale(_add, 2.0)(X, shift=2.0), r"`_add` cannot take .* `shift`"),
    "keywords": (lambda: with_scale(lambda **k: k["x"], 2.0)(x=X), r"cannot take arrays by `k`"),
    "not-a-power": (
        lambda: jsa.scalify(with_scale(jnp.tanh, 3.0))(scaled(X)),
        r"must return a scale that is a power of two or 0, got 3.0",
    ),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definitions_and_calls_that_are_refused(name):
    call, message = DEFINITIONS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


RULES = {
    "structure": (lambda x: (x,), r"structure of the function, PyTreeDef\(\*\), got .*\(\(\*,\)\)"),
    "shape": (lambda x: ScaledArray(x.data[:1], 1.0), r"float32\[.*3\], got float32\[.*1.*\]"),
    "dtype": (lambda x: x.astype(jnp.float16), r"float32\[.*3\], got float16\[.*3\]"),
    "python-data": (lambda x: ScaledArray(1.0, 1.0), r"float32\[.*3\], got float32\[.*\]"),
    "no-scale": (lambda x: x.data, r"must return a ScaledArray, got"),
    "scale-shape": (lambda x: ScaledArray(x.data, jnp.ones(4)), r"fits \[.*\], got \[.*4"),
}  # fmt: skip


@pytest.mark.parametrize("call", [lambda f: f, jax.vmap, jax.jit], ids=["direct", "vmap", "jit"])
@pytest.mark.parametrize("name", RULES)
def test_results_of_rules_that_are_refused(name, call):
    rule, message = RULES[name]
    function = jsa.custom_scale(silu)
    function.defscale(rule)
    with pytest.raises(TypeError, match=message) as error:
        jsa.scalify(lambda x: call(function)(x))(scaled(np.stack([X] * 3)))
    assert "`silu`" in str(error.value) and "test_custom_scale.py:" in str(error.value.__notes__)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("scale", [3.0, -2.0, np.nan, np.inf])
@pytest.mark.parametrize("kind", [float, np.float32, np.array])
def test_scales_of_rules_that_are_no_power_of_two(kind, scale, jit):
    function = jsa.custom_scale(silu)
    function.defscale(lambda x: ScaledArray(x.data, kind(scale)))
    with pytest.raises(ValueError, match=r"rule of `silu` must return a scale that is a power"):
        jit(jsa.scalify(function))(scaled(X))


@pytest.mark.parametrize("scales", [(4.0, 0.5), (0.5, 4.0), (np.float32(0.5), 4.0)])
@pytest.mark.parametrize("batched", [False, True])
def test_a_rule_can_take_the_larger_scale(scales, batched):
    function = jsa.custom_scale(lambda x, y: x + y)

    @function.defscale
    def rule(x, y):
        scale = x.scale.maximum(y.scale)
        value = x.to_array(jnp.float32) + y.to_array(jnp.float32)
        return ScaledArray(value / jnp.asarray(scale), scale)

    x, y = (ScaledArray(jnp.ones(3), s if type(s) is float else jnp.float32(s)) for s in scales)
    out = jsa.scalify(jax.vmap(function) if batched else function)(x, y)
    assert float(jnp.max(jnp.asarray(out.scale))) == 4
    np.testing.assert_array_equal(np.asarray(out), 4.5)


def test_a_scale_of_another_array_is_refused():
    """`(3,)` on `(3, 3)` data: along which axis?"""
    function = jsa.custom_scale(lambda x, y: x * y)

    @function.defscale
    def rule(x, y):
        return ScaledArray(x.data * y.data, y.scale)

    y = ScaledArray(jnp.ones(3), jnp.array([1.0, 2.0, 4.0]))
    with pytest.raises(
        TypeError, match=r"scale of shape \(\) or one that fits \[3, 3\], got \[3\]"
    ):
        jsa.scalify(function)(ScaledArray(jnp.ones((3, 3)), jnp.float32(1)), y)
