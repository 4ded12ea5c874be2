"""Derivatives: taken inside `scalify`, and of a scalified function with respect to plain arrays.

The rules of the users' functions here are not their true derivatives, so that a rule that is
passed over shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import assert_close, in_float64

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

X = np.array([[0.5, -1.5, 2.0], [-0.75, 1.25, 3.0]], np.float32)


def outside(fun, convert=jsa.as_scaled_array):
    """The scalified function, as a function of plain arrays."""
    return lambda *xs: jsa.asarray(jsa.scalify(fun)(*map(convert, xs)), jnp.float32)


# Functions with derivative rules of their own.


@jax.custom_jvp
def square_jvp(x):
    return x * x


@square_jvp.defjvp
def _square_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return square_jvp(x), 3 * x * t


@jax.custom_vjp
def square_vjp(x):
    return x * x


square_vjp.defvjp(lambda x: (square_vjp(x), x), lambda x, ct: (3 * x * ct,))


def _nested(square):
    """Functions that call one with a rule in every place where it can be called."""
    return {
        "direct": square,
        "jit": jax.jit(lambda x: jax.jit(square)(x) * x),
        "vmap": jax.vmap(jax.vmap(square)),
        "scan": lambda x: lax.scan(lambda c, v: (c * 0.5 + square(v), square(c)), x[0], x),
        "fori": lambda x: lax.fori_loop(0, 2, lambda i, c: c * 0.5 + square(x), x),
        "cond": lambda x: lax.cond(x[0, 0] < x[0, 2], lambda v: square(v), lambda v: v, x),
        "switch": lambda x: lax.switch(1, [jnp.negative, square], x),
        "remat": jax.checkpoint(lambda x: square(x) * x),
        "remat-scan": lambda x: lax.scan(
            jax.checkpoint(lambda c, v: (c * 0.5 + square(v) * 2, None)), x[0], x
        )[0],
        "twice": lambda x: square(square(x) * 0.5) / x,
        "operand-twice": lambda x: square(x) * square(x + x) / x,
        "some-elements": lambda x: x.at[0].set(square(x[1])),
        "and-others": lambda x: (square(x), x * 2, jnp.ones(3, x.dtype), jnp.arange(2)),
    }


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def power_jvp(fun, x, n):
    return fun(x) ** n


@power_jvp.defjvp
def _power_jvp(fun, n, primals, tangents):
    return power_jvp(fun, primals[0], n), 5 * primals[0] * tangents[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def power_vjp(fun, x, n):
    return fun(x) ** n


power_vjp.defvjp(
    lambda fun, x, n: (power_vjp(fun, x, n), x), lambda fun, n, x, ct: (5 * fun(x) * ct,)
)


@jax.custom_jvp
def pick_jvp(tree, i):
    return {"row": tree["x"][i], "all": tree["x"] * tree["y"]}, i + 1


@pick_jvp.defjvp
def _pick_jvp(primals, tangents):
    (tree, i), (dot, _) = primals, tangents
    slopes = {"row": 2 * dot["x"][i], "all": tree["x"] * dot["x"] + 7 * dot["y"] * tree["y"]}
    return pick_jvp(tree, i), (slopes, np.zeros((), jax.dtypes.float0))


@jax.custom_vjp
def pick_vjp(tree, i):
    return {"row": tree["x"][i], "all": tree["x"] * tree["y"]}, i + 1


def _pick_backward(residuals, cts):
    tree, i = residuals
    ct = cts[0]
    x = jnp.zeros_like(tree["x"]).at[i].set(2 * ct["row"]) + tree["x"] * ct["all"]
    return {"x": x, "y": 7 * tree["y"] * ct["all"]}, None


pick_vjp.defvjp(lambda tree, i: (pick_vjp(tree, i), (tree, i)), _pick_backward)


@jax.custom_jvp
def product_jvps(x, y):
    return x * y


product_jvps.defjvps(lambda t, out, x, y: 2 * y * t, None)


@jax.custom_jvp
def product_zeros_jvp(x, y):
    return x * y


@functools.partial(product_zeros_jvp.defjvp, symbolic_zeros=True)
def _product_zeros_jvp(primals, tangents):
    (x, y), (t, zero) = primals, tangents
    factor = 2 if isinstance(zero, jax.custom_derivatives.SymbolicZero) else 9
    return product_zeros_jvp(x, y), factor * y * t


@jax.custom_vjp
def product_zeros_vjp(x, y):
    return x * y


product_zeros_vjp.defvjp(
    lambda x, y: (x.value * y.value, (y.value, 2 if not y.perturbed else 9)),
    lambda residuals, ct: (residuals[1] * residuals[0] * ct, None),
    symbolic_zeros=True,
)


@jax.custom_vjp
def optimized(x):
    return x * x


optimized.defvjp(lambda x: (x * x, x), lambda x, ct: (3 * x * ct,), optimize_remat=True)


@jax.custom_gradient
def square_gradient(x):
    return x * x, lambda ct: (3 * x * ct,)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.5, 0.5),))


def _converted(x):
    """The rule's function closes over a value that is differentiated."""
    fun, consts = jax.closure_convert(lambda v: v * x, x)

    @jax.custom_vjp
    def product(v, *consts):
        return fun(v, *consts)

    product.defvjp(
        lambda v, *consts: (product(v, *consts), (v, consts)),
        lambda residuals, ct: (residuals[1][0] * ct, *(4 * residuals[0] * ct for _ in consts)),
    )
    return product(x, *consts)


_OF_JVP = {
    "nondiff_argnums": lambda x: power_jvp(jnp.negative, x, 2),
    "trees-integers": lambda x: pick_jvp({"x": x, "y": x + 1}, jnp.int32(1)),
    "defjvps": lambda x: product_jvps(x, x),
    "symbolic_zeros": lambda x: product_zeros_jvp(x, jnp.asarray(X, x.dtype)),
    "rule-in-rule": lambda x: power_jvp(square_jvp, x, 1),
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "relu-silu": lambda x: jax.nn.silu(jax.nn.relu(x)),
}
_OF_VJP = {
    "nondiff_argnums": lambda x: power_vjp(jnp.negative, x, 2),
    "trees-integers": lambda x: pick_vjp({"x": x, "y": x + 1}, jnp.int32(1)),
    "symbolic_zeros": lambda x: product_zeros_vjp(x, jnp.asarray(X, x.dtype)),
    "optimize_remat": jax.checkpoint(lambda x: optimized(x) * x),
    "custom_gradient": square_gradient,
    "gradient-clipping": lambda x: square_vjp(clipped(x)),
    "closure_convert": _converted,
    "jvp-inside": lambda x: power_vjp(square_jvp, x, 1),
    "jvp-beside": lambda x: square_jvp(x) + square_vjp(x) * 2 + jax.nn.relu(x),
}
FUNCTIONS = {
    **{f"jvp-{name}": f for name, f in {**_nested(square_jvp), **_OF_JVP}.items()},
    **{f"vjp-{name}": f for name, f in {**_nested(square_vjp), **_OF_VJP}.items()},
}


# Ways to differentiate.


def _floating(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def _weights(x):
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) + 1.5


def total(tree):
    """A loss to which every element of every result contributes in its own way."""
    return sum(jnp.sum(x * _weights(x)) for x in _floating(tree))


def _grad(f):
    return jax.grad(lambda x: total(f(x)))


def _vjp(f):
    def way(x):
        out, pullback = jax.vjp(lambda x: _floating(f(x)), x)
        return out, pullback([_weights(o) for o in out])

    return way


def _linearize(f):
    def way(x):
        out, slope = jax.linearize(lambda x: _floating(f(x)), x)
        return out, slope(x * _weights(x)), slope(2 * x)

    return way


def _batch(x):
    return jnp.stack([x, x * 0.5])


FORWARD = {
    "jvp": lambda f: lambda x: jax.jvp(lambda x: _floating(f(x)), (x,), (x * _weights(x),)),
    "linearize": _linearize,
    "jacfwd": lambda f: jax.jacfwd(lambda x: _floating(f(x))),
    "jvp-vmap": lambda f: lambda x: jax.jvp(jax.vmap(f), (_batch(x),), (_batch(x * _weights(x)),)),
    "vmap-jvp": lambda f: lambda x: jax.vmap(FORWARD["jvp"](f))(_batch(x)),
    "jit-jvp": lambda f: jax.jit(FORWARD["jvp"](f)),
}
REVERSE = {
    "grad": _grad,
    "value_and_grad": lambda f: jax.value_and_grad(
        lambda x: (total(f(x)), {"out": f(x)}), has_aux=True
    ),
    "vjp": _vjp,
    "jacrev": lambda f: jax.jacrev(lambda x: _floating(f(x))),
    "vmap-grad": lambda f: lambda x: jax.vmap(_grad(f))(_batch(x)),
    "grad-vmap": lambda f: lambda x: jax.grad(lambda x: total(jax.vmap(f)(x)))(_batch(x)),
    "jit-grad": lambda f: jax.jit(_grad(f)),
    "grad-jit": lambda f: _grad(jax.jit(f)),
    "grad-remat": lambda f: _grad(jax.checkpoint(f)),
    "grad-scan": lambda f: jax.grad(
        lambda x: total(lax.scan(lambda c, v: (c + 1, f(v * c)), jnp.ones((), x.dtype), _batch(x)))
    ),
}
SECOND = {"hessian": lambda f: jax.hessian(lambda x: total(f(x)))}
SECOND_REVERSE = {"grad-grad": lambda f: jax.grad(lambda x: total(_grad(f)(x)))}


def _rows():
    """Every function in one way of each mode, one function of each mode in all ways."""
    for name, fun in FUNCTIONS.items():
        mode, _, place = name.partition("-")
        ways = {"grad": _grad}
        if mode == "jvp":
            ways["jvp"] = FORWARD["jvp"]
        twice = ("direct", "jit", "twice", "jvp-inside", "rule-in-rule")
        if place in twice or name == "vjp-remat":
            ways |= SECOND if mode == "jvp" else SECOND_REVERSE
        if place == "direct":
            ways |= {**REVERSE, **FORWARD} if mode == "jvp" else REVERSE
        elif place == "and-others":
            ways |= {way: REVERSE[way] for way in ("value_and_grad", "vjp", "jacrev")}
        for way, derivative in ways.items():
            # Those that are taken in all ways run operation by operation.
            jit = (lambda f: f) if place == "direct" else jax.jit
            yield pytest.param(derivative, fun, jit, id=f"{name}-{way}")


ROWS = list(_rows())


def _sampled(index, row):
    """JAX has applied the rules before `scalify` sees anything: a third of the rows will do."""
    return row if index % 3 == 0 else pytest.param(*row.values, id=row.id, marks=pytest.mark.full)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("derivative, fun, jit", [_sampled(*row) for row in enumerate(ROWS)])
def test_inside(derivative, fun, jit):
    x = ScaledArray(jnp.asarray(X / 4), jnp.float32(4))
    assert_close(jit(jsa.scalify(derivative(fun)))(x), in_float64(derivative(fun), X))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("derivative, fun, jit", ROWS)
def test_outside(derivative, fun, jit):
    assert_close(jit(derivative(outside(fun)))(jnp.asarray(X)), in_float64(derivative(fun), X))


# Scales of the operands.

KINDS = {
    "scale-2": lambda x: jsa.as_scaled_array(x, scale=2.0),
    "static": lambda x: ScaledArray(x / 4, 4.0),
    "per-axis": lambda x: jsa.as_scaled_array(x, scale=jnp.array([[4.0], [0.125]])),
    "per-last-axis": lambda x: jsa.as_scaled_array(x, scale=jnp.array([4.0, 0.125, 1.0])[None]),
    "per-row-leading": lambda x: ScaledArray(x / 4, jnp.array([4.0, 4.0])),
    "rms": lambda x: jsa.as_scaled_array(x, scale="rms"),
    "rms-axis": lambda x: jsa.as_scaled_array(x, scale="rms", axis=0),
    "rescaled": lambda x: jsa.dynamic_rescale(jsa.as_scaled_array(x)),
    "float16": lambda x: jsa.as_scaled_array(x, dtype=jnp.float16),
    "bfloat16": lambda x: jsa.as_scaled_array(x, dtype=jnp.bfloat16),
    "float16-static": lambda x: ScaledArray((x / 4).astype(jnp.float16), 4.0),
}
SCALED_FUNCTIONS = [
    f"{mode}-{name}"
    for mode in ("jvp", "vjp")
    for name in ("direct", "scan", "cond", "remat", "nondiff_argnums", "trees-integers")
]


def _tolerance(kind):
    return {"float16": 4e-3, "float16-static": 4e-3, "bfloat16": 3e-2}.get(kind, 2e-5)


def _function_kinds():
    for name in SCALED_FUNCTIONS:
        some = ("static", "per-axis", "float16")
        for kind in KINDS if name.endswith("direct") else some:
            yield name, kind


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name, kind", list(_function_kinds()))
def test_outside_at_every_kind_of_scale(name, kind):
    fun = FUNCTIONS[name]
    for way in (_grad, FORWARD["jvp"]) if name == "jvp-direct" else (_grad,):
        got = jax.jit(way(outside(fun, KINDS[kind])))(jnp.asarray(X))
        assert_close(got, in_float64(way(fun), X), _tolerance(kind))


def in_units_of_results(fun, x):
    """`fun` with floating results of unit size, so that cotangents of float16 data are in range."""
    units = [
        2.0 ** np.round(np.log2(np.abs(out).max()))
        for out in in_float64(lambda x: _floating(fun(x)), x)
    ]

    def units_of(call):
        return lambda x: [o / u for o, u in zip(_floating(call(x)), units, strict=True)]

    return units_of


@pytest.mark.parametrize("exponent", [-20, 20])
@pytest.mark.parametrize("name", SCALED_FUNCTIONS)
def test_float16_far_from_1(name, exponent):
    fun, x = FUNCTIONS[name], X * np.float32(2.0**exponent)
    convert = functools.partial(jsa.as_scaled_array, scale=2.0**exponent, dtype=jnp.float16)
    units_of = in_units_of_results(fun, x)
    scalified, plain = units_of(outside(fun, convert)), units_of(fun)
    for way in (_vjp, FORWARD["jvp"]) if name.startswith("jvp") else (_vjp,):
        assert_close(jax.jit(way(scalified))(x), in_float64(way(plain), x), 4e-3)


@pytest.mark.parametrize("name", SCALED_FUNCTIONS[::2])
def test_float16_far_from_1_inside(name):
    fun = FUNCTIONS[name]
    gradient = jax.jit(jsa.scalify(_grad(fun)))
    for scale in np.float32([2.0**-20, 2.0**20]):
        got = gradient(ScaledArray(jnp.asarray(X, jnp.float16), jnp.asarray(scale)))
        assert got.dtype == jnp.float16
        assert_close(got, in_float64(_grad(fun), X * scale), 4e-3)


# Several operands, and values that are closed over.

PAIRS = {
    "jvp": lambda x, y: square_jvp(x) * y,
    "vjp": lambda x, y: square_vjp(x * y) + y,
    "plain": lambda x, y: x * x * y,
    "loop": lambda x, y: lax.scan(lambda c, v: (c + square_vjp(v) * y[0], c), x[0], x),
}


@pytest.mark.parametrize("name", PAIRS)
def test_of_several_operands_one_of_them_plain(name):
    fun, y = PAIRS[name], X[::-1] * 2
    grad = functools.partial(jax.grad, argnums=(0, 1))
    want = in_float64(grad(lambda x, y: total(fun(x, y))), X, y)
    got = grad(lambda x, y: total(outside(fun)(x, y)))(X, y)
    assert_close(got, want)
    got = grad(
        lambda x, y: total(jsa.asarray(jsa.scalify(fun)(jsa.as_scaled_array(x), y), jnp.float32))
    )(X, y)
    assert_close(got, want)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("also_operand", [True, False])
def test_of_closed_over_values(name, also_operand):
    fun = PAIRS[name]

    def loss(call, y):
        operand = y * 0.5 if also_operand else jnp.asarray(X, y.dtype)
        return total(call(lambda x: fun(x, y * 2), operand))

    got = jax.grad(functools.partial(loss, lambda f, x: outside(f)(x)))(jnp.asarray(X))
    want = in_float64(jax.grad(functools.partial(loss, lambda f, x: f(x))), X)
    assert_close(got, want)


@pytest.mark.parametrize("name", ["jvp", "plain"])
def test_forward_of_closed_over_values(name):
    def slope(call, y):
        return jax.jvp(
            lambda y: call(lambda x: PAIRS[name](x, y * 2), jnp.asarray(X, y.dtype)), (y,), (y,)
        )

    got = slope(lambda f, x: outside(f)(x), jnp.asarray(X))
    assert_close(got, in_float64(functools.partial(slope, lambda f, x: f(x)), X))


def test_integer_operands_and_static_leaves():
    def fun(x, i, *, mode):
        assert mode == "a"
        return pick_vjp({"x": x, "y": x * 2}, i)[0]

    def loss(x, i):
        return total(
            jsa.asarray(jsa.scalify(fun)(jsa.as_scaled_array(x), i, mode="a"), jnp.float32)
        )

    i = jnp.int32(1)
    want = in_float64(jax.grad(lambda x: total(fun(x, i, mode="a"))), X)
    assert_close(jax.jit(jax.grad(loss))(X, i), want)
    slopes = jax.grad(loss, (0, 1), allow_int=True)(X, i)
    assert_close(slopes[0], want)
    assert slopes[1].dtype == jax.dtypes.float0


@pytest.mark.parametrize("name", ["jvp-direct", "vjp-direct", "vjp-scan"])
def test_a_training_step_inside_with_aux(name):
    fun = FUNCTIONS[name]

    def step(params, x):
        (loss, aux), grads = jax.value_and_grad(
            lambda p: (total(fun(p["w"] * x)) + jnp.sum(p["b"]), p["w"] * 2), has_aux=True
        )(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss, aux

    params = {"w": X, "b": X[0]}
    got = jax.jit(jsa.scalify(step))(*jsa.as_scaled_array((params, X[::-1]), scale="rms"))
    assert_close(got, in_float64(step, params, X[::-1]))


def test_the_gradient_of_a_gradient_inside_of_a_scalified_function():
    """Derivatives inside and outside of `scalify` at once."""
    fun = FUNCTIONS["jvp-scan"]
    got = _grad(outside(_grad(fun)))(jnp.asarray(X))
    assert_close(got, in_float64(_grad(_grad(fun)), X))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", ["grad", "jvp"])
def test_a_rule_inside_a_checkpoint_counts(way, jit):
    fun = jax.checkpoint(lambda x: total(square_jvp(x) * x))
    way = {**REVERSE, **FORWARD}[way]
    got = way(outside(fun))
    assert_close((jax.jit(got) if jit else got)(jnp.asarray(X)), in_float64(way(fun), X))


def test_a_rule_that_would_be_lost_in_a_second_derivative_is_refused():
    fun = jax.checkpoint(lambda x: total(square_jvp(x) * x))
    with pytest.raises(NotImplementedError, match="(?s)twice from outside.*inside"):
        jax.hessian(outside(fun))(jnp.asarray(X))
    got = jax.jit(jsa.scalify(jax.hessian(fun)))(ScaledArray(jnp.asarray(X), jnp.float32(1)))
    assert_close(got, in_float64(jax.hessian(fun), X))


AT_ZERO = {
    "product": (lambda c, x: c * x, 12),
    "sum": (lambda c, x: x + c, 3),
    "loop": (lambda c, x: lax.fori_loop(0, 3, lambda i, c: c * x[0], c), 64),
    "rescaled": (lambda c, x: jsa.rebalance_scale(c * x, 8.0), 12),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", AT_ZERO)
def test_a_number_that_is_zero_has_a_derivative(name, jit):
    """Its scale may be anything, but 0 * 0 could not move."""
    fun, expected = AT_ZERO[name]
    x = ScaledArray(jnp.ones(3), jnp.float32(4))

    def loss(c):
        return jnp.sum(jsa.asarray(jsa.scalify(fun)(c, x)))

    assert (jax.jit(jax.grad(loss)) if jit else jax.grad(loss))(0.0) == expected
    assert jax.jvp(jax.jit(loss) if jit else loss, (0.0,), (1.0,))[1] == expected


# Implicit functions.


def _newton(f, y):
    return lax.fori_loop(0, 6, lambda i, y: y - f(y) / jax.jvp(f, (y,), (jnp.ones_like(y),))[1], y)


def root(x):
    return lax.custom_root(
        lambda y: y * y - x, jnp.ones_like(x) * 2, _newton, lambda g, b: b / g(jnp.ones_like(b))
    )


def _diagonal(x):
    return x + jnp.asarray([[2.0], [4.0]], x.dtype)


def linear_solve(x):
    return lax.custom_linear_solve(
        lambda v: _diagonal(x) * v, x * x, lambda f, b: b / f(jnp.ones_like(b)), symmetric=True
    )


def linear_solve_transposed(x):
    matrix = x + 4 * jnp.eye(2, dtype=x.dtype)
    return lax.custom_linear_solve(
        lambda v: matrix @ v,
        x[0] * 2,
        lambda f, b: jnp.linalg.inv(lax.stop_gradient(matrix)) @ b,
        transpose_solve=lambda f, b: jnp.linalg.inv(lax.stop_gradient(matrix)).T @ b,
    )


def conjugate_gradients(x):
    matrix = x @ x.T + 4 * jnp.eye(2, dtype=x.dtype)
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0], maxiter=4)[0]


def generalised_minimal_residual(x):
    """Two coupled equations, of a matrix that is not symmetric."""
    matrix = x + 4 * jnp.eye(2, dtype=x.dtype)

    def matvec(v):
        return {"a": matrix @ v["a"] + v["b"], "b": matrix.T @ v["b"]}

    solution, _ = jax.scipy.sparse.linalg.gmres(matvec, {"a": x[0], "b": 3 * x[1]}, maxiter=4)
    return jnp.stack([solution["a"], solution["b"]])


def ode(x):
    return odeint(lambda y, t, k: -k * y, x[0], jnp.array([0.0, 0.5, 1.0], x.dtype), x[1])


POSITIVE = np.array([[0.5, 1.5], [2.0, 0.75]], np.float32)
IMPLICIT = {
    "root": (root, 2e-5),
    "linear_solve": (linear_solve, 2e-5),
    "linear_solve-transposed": (linear_solve_transposed, 2e-5),
    "cg": (conjugate_gradients, 1e-4),
    "gmres": (generalised_minimal_residual, 1e-4),
    "solve": (lambda x: jnp.linalg.solve(x + 4 * jnp.eye(2, dtype=x.dtype), x[0]), 2e-5),
    "odeint": (ode, 2e-5),
}


# JAX has no forward mode of odeint.
IMPLICIT_ROWS = {
    (name, way, where)
    for name in IMPLICIT
    for way in ("value", "grad", "jvp")
    for where in ("inside", "outside")
} - {("odeint", "jvp", "inside"), ("odeint", "jvp", "outside")}


# GMRES and ODEs take the longest to compile: one way of each is enough for each day.
DAILY_ROWS = {("gmres", "value", "inside"), ("odeint", "grad", "inside")}
SLOW_ROWS = {row for row in IMPLICIT_ROWS if row[0] in ("gmres", "odeint")}


@pytest.mark.filterwarnings("ignore::jax_scalify.DequantisedWarning")
@pytest.mark.parametrize(
    ("name", "way", "where"),
    [
        pytest.param(*row, marks=[pytest.mark.full] if row in SLOW_ROWS - DAILY_ROWS else [])
        for row in sorted(IMPLICIT_ROWS)
    ],
)
def test_implicit_functions(name, way, where):
    fun, tolerance = IMPLICIT[name]
    way = {"value": lambda f: f, **REVERSE, **FORWARD}[way]
    if where == "inside":
        x = ScaledArray(jnp.asarray(POSITIVE / 2), jnp.float32(2))
        got = jax.jit(jsa.scalify(way(fun)))(x)
    else:
        got = jax.jit(way(outside(fun)))(POSITIVE)
    assert_close(got, in_float64(way(fun), POSITIVE), tolerance)


# What has no meaning is refused.

REFUSED = {
    "grad": lambda f, x: jax.grad(f)(x),
    "grad-of-value": lambda f, x: jax.grad(lambda x: jsa.asarray(f(x)))(x),
    "value_and_grad": lambda f, x: jax.value_and_grad(f)(x),
    "vjp": lambda f, x: jax.vjp(f, x)[1](f(x)),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "in-a-tree": lambda f, x: jax.grad(lambda p: jsa.asarray(f(p["w"])))({"w": x, "v": x.data}),
    "under-vmap": lambda f, x: jax.vmap(jax.grad(lambda x: jsa.asarray(f(x))))(
        ScaledArray(x.data, jnp.ones(2))
    ),
    "of-the-scale": lambda f, x: jax.grad(lambda s: jsa.asarray(f(ScaledArray(x.data, s))))(
        x.scale
    ),
}
LOSSES = {
    "plain": lambda x: jnp.sum(x * x),
    "jvp": lambda x: jnp.sum(square_jvp(x)),
    "vjp": lambda x: jnp.sum(square_vjp(x)),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", REFUSED)
def test_with_respect_to_a_scaled_array_they_are_refused_with_advice(name, loss, jit):
    fun = jsa.scalify(LOSSES[loss])
    x = ScaledArray(jnp.asarray(X), jnp.float32(2))
    with pytest.raises(
        TypeError, match=r"(?s)`ScaledArray`.*inside.*scalify\(jax\.grad\("
    ) as error:
        REFUSED[name](jax.jit(fun) if jit else fun, x)
    assert "jsa.asarray(jsa.scalify(" in str(error.value)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_not_refused(loss, jit):
    fun, x = jsa.scalify(LOSSES[loss]), ScaledArray(jnp.asarray(X), jnp.float32(2))
    fun = jax.jit(fun) if jit else fun
    factor = 2 if loss == "plain" else 3
    grad = jax.grad(lambda d: jsa.asarray(fun(ScaledArray(d, x.scale))))(x.data)
    np.testing.assert_array_equal(grad, factor * X * 4)
    grad = jax.grad(lambda c: c * jsa.asarray(fun(x)))(2.0)
    np.testing.assert_array_equal(grad, jsa.asarray(fun(x)))
    out, slope = jax.jvp(lambda c: c * jsa.asarray(fun(x)), (2.0,), (1.0,))
    assert out == 2 * slope
