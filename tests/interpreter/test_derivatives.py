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

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import assert_close, in_float64
from tests.interpreter.differentiated import (
    FORWARD,
    FUNCTIONS,
    IMPLICIT,
    KINDS,
    LOSSES,
    POSITIVE,
    REFUSED,
    REVERSE,
    SECOND,
    SECOND_REVERSE,
    X,
    grad_of,
    in_units_of_results,
    outside,
    pick_vjp,
    square_jvp,
    square_vjp,
    total,
    vjp_of,
)

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")


def _rows():
    """Every function in one way of each mode, one function of each mode in all ways."""
    for name, fun in FUNCTIONS.items():
        mode, _, place = name.partition("-")
        ways = {"grad": grad_of}
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


@pytest.mark.sampled(8)
@pytest.mark.parametrize("derivative, fun, jit", [_sampled(*row) for row in enumerate(ROWS)])
def test_inside(derivative, fun, jit):
    x = ScaledArray(jnp.asarray(X / 4), jnp.float32(4))
    assert_close(jit(jsa.scalify(derivative(fun)))(x), in_float64(derivative(fun), X))


@pytest.mark.sampled(32)
@pytest.mark.parametrize("derivative, fun, jit", ROWS)
def test_outside(derivative, fun, jit):
    assert_close(jit(derivative(outside(fun)))(jnp.asarray(X)), in_float64(derivative(fun), X))


# Scales of the operands.

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


@pytest.mark.sampled(32)
@pytest.mark.parametrize("name, kind", list(_function_kinds()))
def test_outside_at_every_kind_of_scale(name, kind):
    fun = FUNCTIONS[name]
    for way in (grad_of, FORWARD["jvp"]) if name == "jvp-direct" else (grad_of,):
        got = jax.jit(way(outside(fun, KINDS[kind])))(jnp.asarray(X))
        assert_close(got, in_float64(way(fun), X), _tolerance(kind))


@pytest.mark.sampled(32)
@pytest.mark.parametrize("exponent", [-20, 20])
@pytest.mark.parametrize("name", SCALED_FUNCTIONS)
def test_float16_far_from_1(name, exponent):
    fun, x = FUNCTIONS[name], X * np.float32(2.0**exponent)
    convert = functools.partial(jsa.as_scaled_array, scale=2.0**exponent, dtype=jnp.float16)
    units_of = in_units_of_results(fun, x)
    scalified, plain = units_of(outside(fun, convert)), units_of(fun)
    for way in (vjp_of, FORWARD["jvp"]) if name.startswith("jvp") else (vjp_of,):
        assert_close(jax.jit(way(scalified))(x), in_float64(way(plain), x), 4e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SCALED_FUNCTIONS[::2])
def test_float16_far_from_1_inside(name):
    fun = FUNCTIONS[name]
    gradient = jax.jit(jsa.scalify(grad_of(fun)))
    for scale in np.float32([2.0**-20, 2.0**20]):
        got = gradient(ScaledArray(jnp.asarray(X, jnp.float16), jnp.asarray(scale)))
        assert got.dtype == jnp.float16
        assert_close(got, in_float64(grad_of(fun), X * scale), 4e-3)


# Several operands, and values that are closed over.

PAIRS = {
    "jvp": lambda x, y: square_jvp(x) * y,
    "vjp": lambda x, y: square_vjp(x * y) + y,
    "plain": lambda x, y: x * x * y,
    "loop": lambda x, y: lax.scan(lambda c, v: (c + square_vjp(v) * y[0], c), x[0], x),
}


@pytest.mark.sampled(16)
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


@pytest.mark.sampled(8)
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


@pytest.mark.sampled(4)
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
    got = grad_of(outside(grad_of(fun)))(jnp.asarray(X))
    assert_close(got, in_float64(grad_of(grad_of(fun)), X))


@pytest.mark.sampled(8)
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


@pytest.mark.sampled(4)
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


@pytest.mark.sampled(32)
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


@pytest.mark.sampled(4)
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
