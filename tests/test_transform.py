"""The transform: what it leaves alone, what it knows of values, and what its errors say."""

import functools
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray, _compat
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.base.pins import pin_p
from jax_scalify.interpreter import registry as registry_lib
from tests.helpers import scaled, value
from tests.opaque import opaque_primitive

X = np.array([1.0, -2.0, 3.0], np.float32)
MASK = np.array([True, False, True])


def scalify(fun):
    return jsa.scalify(fun, config=jsa.ScalifyConfig(missing_rule="error"))


# Invariant 3: nothing scaled comes in, nothing changes.


def _loop(x):
    return lax.fori_loop(0, 3, lambda i, c: c * 2 + i, x)


PLAIN_FUNCTIONS = {
    "elementwise": lambda x: jnp.where(x > 0, jnp.exp(x) * 2, 1e-8) + jax.nn.gelu(x),
    "grad": jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) ** 2)),
    "scan": lambda x: lax.scan(lambda c, v: (c + v, c), jnp.zeros(()), x),
    "loop": _loop,
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "jit": jax.jit(lambda x: jax.jit(jnp.tanh)(x) @ x),
    "remat": jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x))))),
    "integers": lambda x: jnp.argsort(x) * 2,
    "constant": lambda x: x * np.arange(3.0, dtype=np.float32),
    "rescale": lambda x: jsa.dynamic_rescale(x) * 2,
}


@pytest.mark.parametrize("name", PLAIN_FUNCTIONS)
def test_plain_inputs_leave_the_program_unchanged(name):
    fun = PLAIN_FUNCTIONS[name]
    plain = jax.make_jaxpr(fun)(X)
    through = jax.make_jaxpr(jsa.scalify(fun))(X)
    assert [e.primitive for e in through.eqns] == [e.primitive for e in plain.eqns]
    assert str(through) == str(plain)


def test_scaled_inputs_do_change_it():
    fun = PLAIN_FUNCTIONS["elementwise"]
    assert str(jax.make_jaxpr(jsa.scalify(fun))(scaled(X))) != str(jax.make_jaxpr(fun)(X))


# Arguments and results.


def test_keywords_static_leaves_and_trees():
    def fun(x, *, mode, act, flag, extra=None, shift=0.0):
        assert mode == "a" and act is jnp.tanh and flag is True and extra is None
        return {"y": act(x["x"]) + shift, "n": None}

    x = {"x": scaled(X, 2.0**-10), "i": jnp.arange(2)}
    out = scalify(functools.partial(fun, mode="a", act=jnp.tanh, flag=True))(x)
    assert out["n"] is None
    out = scalify(fun)(x, mode="a", act=jnp.tanh, flag=True, shift=1.0)
    np.testing.assert_allclose(np.asarray(out["y"]), np.tanh(X * 2.0**-10) + 1, rtol=1e-6)


def test_outputs():
    def fun(x, y):
        return x * 2, y + 1, x.shape[0], jnp.arange(3), x > 0, ()

    a, b, c, d, e, f = scalify(fun)(scaled(X, 4.0), jnp.asarray(X))
    assert isinstance(a, ScaledArray) and c == 3 and d.dtype == jnp.int32 and e.dtype == bool
    np.testing.assert_array_equal(np.asarray(b), X + 1)
    assert f == ()


def test_strings_and_callables_among_the_results():
    def fun(x, act):
        return {"act": act, "name": "a", "y": 2 * x, "z": act(x)}

    for wrap in (scalify, lambda f: jax.jit(scalify(lambda *a: {**f(*a), "act": 0, "name": 0}))):
        out = wrap(functools.partial(fun, act=jnp.tanh))(scaled(X, 4.0))
        np.testing.assert_array_equal(np.asarray(out["y"]), 8 * X)
        np.testing.assert_allclose(np.asarray(out["z"]), np.tanh(4 * X), rtol=1e-6)
    plain = jsa.scalify(fun)(jnp.asarray(X), jnp.tanh)
    assert plain["act"] is jnp.tanh and plain["name"] == "a"
    np.testing.assert_array_equal(plain["y"], 2 * X)


RESULTS = {
    "integers": lambda x: (jnp.full(2, 3), jnp.where(x > 1, 1, 0), jnp.argmax(x), jnp.asarray(3)),
    "floats": lambda x: (0.5, jnp.full(2, 2.0), jnp.where(x > 1, 1.0, 0.0) * 2, jnp.asarray(2.0)),
    "numpy": lambda x: (np.int32(3), np.arange(3), np.float32(2.0), np.ones(2, np.float16)),
    "complex": lambda x: (1j, x + 1j, jnp.asarray(1j)),
    "loops": lambda x: (_loop(0), _loop(0.5), _loop(x)),
    "branches": lambda x: lax.cond(x[0] > 0, lambda: (1.0, x), lambda: (2.0, -x)),
    "promotion": lambda x: (x * 2, jnp.where(x > 1, 1.0, 0.0) * x, jnp.sum(x), x.astype(int)),
}


@pytest.mark.parametrize("kind", ["dynamic", "static", "plain"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_arrays_of_the_types_of_the_plain_function(name, dtype, wrap, kind):
    """Weak types too: a constant among the results does not widen what is computed with it."""
    plain = jnp.asarray(X, dtype)
    x = plain if kind == "plain" else scaled(X, 1.0, dtype)
    x = jsa.freeze_scales(x) if kind == "static" else x
    out = jsa.tree.leaves(wrap(scalify(RESULTS[name]))(x))
    out = [leaf.data if isinstance(leaf, ScaledArray) else leaf for leaf in out]
    assert all(isinstance(leaf, jax.Array) for leaf in out)
    expected = jax.jit(RESULTS[name])(plain)
    assert list(map(jax.typeof, out)) == [jax.typeof(x) for x in jax.tree.leaves(expected)]


@pytest.mark.parametrize("x", [scaled(X, 4.0), jsa.freeze_scales(scaled(X, 4.0)), jnp.asarray(X)])
def test_python_ints_are_what_they_are_to_the_plain_function(x):
    def fun(x, n, *, axis):
        return jnp.broadcast_to(x, (n, 3)) ** n, {"n": n, "more": n + 1, "flag": n > 1}, axis

    out, rest, axis = scalify(fun)(x, 2, axis=-1)
    assert (type(rest["n"]), rest, axis) == (int, {"n": 2, "more": 3, "flag": True}, -1)
    expected = np.broadcast_to(np.asarray(x), (2, 3)) ** 2
    np.testing.assert_array_equal(np.asarray(out), expected)
    out = jax.jit(scalify(fun), static_argnums=1, static_argnames="axis")(x, 2, axis=-1)
    np.testing.assert_array_equal(np.asarray(out[0]), expected)
    assert jax.typeof(out[1]["n"]).weak_type and int(out[2]) == -1


def test_an_output_that_is_an_input():
    x = scaled(X, 4.0)
    out, plain = scalify(lambda v, p: (v, p))(x, jnp.asarray(X))
    assert float(out.scale) == 4 and not isinstance(plain, ScaledArray)


def test_is_wrapped():
    def fun(x):
        """Doc."""

    assert jsa.scalify(fun).__name__ == "fun" and jsa.scalify(fun).__doc__ == "Doc."


@pytest.mark.parametrize("bad", [None, 3, "text", X])
def test_refuses_what_is_not_callable(bad):
    with pytest.raises(TypeError, match="`fun` must be callable"):
        jsa.scalify(bad)


def test_refuses_what_is_no_config():
    with pytest.raises(TypeError, match="`config` must be a ScalifyConfig"):
        jsa.scalify(jnp.sin, config={})


def test_errors_of_the_user_pass():
    def fun(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jsa.scalify(fun)(scaled(X))


def test_prng_keys_pass():
    def fun(x, key):
        return x + jax.random.normal(key, x.shape), jax.random.split(key)

    with jsa.ScalifyConfig(missing_rule="silent"):
        out, keys = jax.jit(jsa.scalify(fun))(scaled(X), jax.random.key(0))
    expected = X + jax.random.normal(jax.random.key(0), (3,))
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-6, atol=1e-6)
    assert keys.shape == (2,)


def test_inside_itself_and_under_other_transforms():
    inner = scalify(lambda x: x * 2 + 1)
    assert float(scalify(lambda x: inner(x) * 3)(scaled(2.0))) == 15
    batched = jax.vmap(inner)(scaled([1.0, 2.0], [2.0, 4.0]))
    np.testing.assert_array_equal(np.asarray(batched), [5, 17])
    grad = jax.grad(lambda v: jsa.asarray(inner(jsa.as_scaled_array(v))))(2.0)
    assert float(grad) == 2


# Static scales.


def test_static_scales_leave_no_scale_arithmetic():
    def fun(x, w):
        y = jax.nn.relu(x @ w) + 1
        return jnp.sum(y * y, axis=-1)

    x = jnp.ones((4, 4))
    static = jax.make_jaxpr(scalify(fun))(ScaledArray(x, 2.0), ScaledArray(x, 2.0**-3))
    assert not any(v.aval.shape == () for e in static.eqns for v in e.outvars)
    out = scalify(fun)(ScaledArray(x, 2.0), ScaledArray(x, 2.0**-3))
    assert out.is_static
    dynamic = scalify(fun)(ScaledArray(x, jnp.float32(2)), ScaledArray(x, 2.0**-3))
    assert not dynamic.is_static
    np.testing.assert_array_equal(np.asarray(out), np.asarray(dynamic))


def test_jit_specialises_on_a_static_scale():
    fun = jax.jit(scalify(lambda x: x * 2))
    assert fun(ScaledArray(jnp.ones(2), 2.0)).scale == 4
    assert fun(ScaledArray(jnp.ones(2), 8.0)).scale == 16


def test_same_scale_needs_no_alignment():
    x = scaled(np.ones((4, 4)), 8.0)
    jaxpr = jax.make_jaxpr(scalify(lambda v: v + v * 1.5 - v.T))(x)
    assert not {"max", "div"} & {e.primitive.name for e in jaxpr.eqns}


# Constants (DESIGN 3).


def test_the_cotangent_seed_and_one_over_n_are_scales():
    x = scaled(np.ones(4096, np.float32))
    out = scalify(jax.grad(lambda v: jnp.mean(v * 3)))(x)
    assert float(out.scale) * 4096 in (1, 2, 4)
    assert 0.5 <= float(jnp.abs(out.data[0])) <= 2


def test_a_traced_scalar_is_its_own_scale():
    def fun(x, rate):
        return x * rate

    out = jax.jit(scalify(fun))(scaled(np.ones(4), 1.0, jnp.float16), jnp.float16(3e-5))
    assert 1 <= float(out.data[0]) < 2 and float(out.scale) == 2.0**-16


def test_a_captured_array_has_its_rms_as_scale():
    table = (np.random.default_rng(0).normal(size=64) * 2.0**-30).astype(np.float32)
    out = scalify(lambda x: x * table)(scaled(np.ones(64)))
    assert 0.5 <= float(jnp.sqrt(jnp.mean(out.data**2))) <= 2
    np.testing.assert_allclose(value(out), table, rtol=1e-6)


def test_one_hots_count_as_constants():
    out = scalify(lambda x, i: x * jax.nn.one_hot(i, 3))(scaled(X, 2.0**20), jnp.int32(2))
    np.testing.assert_array_equal(value(out), [0, 0, 3 * 2.0**20])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
class TestVotes:
    def test_zero_does_not_vote(self, dtype):
        x = scaled(X, 2.0**-30, dtype)
        for fun in (
            lambda v: jnp.where(MASK, v, 0),
            lambda v: v + 0.0,
            lambda v: jnp.pad(v, 1),
            lambda v: jnp.concatenate([v, jnp.zeros_like(v)]),
            lambda v: jnp.zeros_like(v).at[1].set(v[0]),
        ):
            assert float(scalify(fun)(x).scale) == 2.0**-30

    def test_infinities_do_not_vote(self, dtype):
        out = scalify(lambda v: jnp.where(MASK, v, -jnp.inf))(scaled(X, 2.0**-30, dtype))
        assert float(out.scale) == 2.0**-30 and np.isneginf(value(out)[1])

    def test_a_constant_in_a_sum_has_its_own_power(self, dtype):
        out = scalify(lambda v: 1 + v)(scaled(X, 2.0**-30, dtype))
        assert float(out.scale) == 1
        np.testing.assert_array_equal(value(out), [1, 1, 1])

    def test_a_constant_in_a_select_asks_for_no_more_than_it_needs(self, dtype):
        out = scalify(lambda v: jnp.where(MASK, v, -1e4))(scaled(X, 1.0, dtype))
        assert float(out.scale) == (2 if dtype == "float16" else 1)
        np.testing.assert_allclose(value(out), [1, -1e4, 3], rtol=4e-3)
        large = scalify(lambda v: jnp.where(MASK, v, -1e4))(scaled(X, 2.0**10, dtype))
        assert float(large.scale) == 2.0**10

    def test_the_smallest_and_largest_numbers_are_masks(self, dtype):
        lowest = float(jnp.finfo(dtype).min)
        out = scalify(lambda v: jnp.where(MASK, v, jnp.asarray(lowest, dtype)))(
            scaled(X, 1.0, dtype)
        )
        assert float(out.scale) == 1 and np.all(np.isfinite(out.data))
        if dtype == "float16":
            out = scalify(lambda v: jnp.where(MASK, v, jnp.asarray(lowest, dtype)))(
                scaled(X, 2.0**-14, dtype)
            )
            assert float(out.scale) == 2.0**-6

    def test_relu_and_clip_keep_the_scale(self, dtype):
        x = scaled(X, 2.0**-40, dtype)
        for fun, expected in (
            (lambda v: jnp.maximum(v, 0), np.maximum(X, 0) * 2.0**-40),
            (lambda v: jnp.maximum(v, -1), X * 2.0**-40),
            (lambda v: jnp.minimum(v, 6), X * 2.0**-40),
            (lambda v: jnp.clip(v, -1, 1), X * 2.0**-40),
        ):
            out = scalify(fun)(x)
            assert float(out.scale) == 2.0**-40
            np.testing.assert_array_equal(value(out), expected)

    def test_max_with_a_positive_constant_votes(self, dtype):
        out = scalify(lambda v: jnp.maximum(v, 0.5))(scaled(X, 2.0**-40, dtype))
        np.testing.assert_array_equal(value(out), [0.5] * 3)
        out = scalify(lambda v: jnp.minimum(v, -0.5))(scaled(X, 2.0**-40, dtype))
        np.testing.assert_array_equal(value(out), [-0.5] * 3)

    def test_epsilon_never_becomes_zero(self, dtype):
        out = scalify(lambda v: v + 1e-6)(scaled([1.0, 0.0], 2.0**20, dtype))
        assert float(out.data[1]) > 0
        out = scalify(lambda v: v / (v + 1e-6))(scaled([0.0, 0.0], 2.0**20, dtype))
        np.testing.assert_array_equal(out.data, [0, 0])

    def test_all_constants_vote(self, dtype):
        out = scalify(lambda v: jnp.where(MASK, jnp.asarray(3.0, dtype), 1e-4) * v)(
            scaled(np.ones(3), 1.0, dtype)
        )
        np.testing.assert_allclose(value(out), [3, 1e-4, 3], rtol=4e-3)

    def test_any_scale_takes_on_that_of_a_partner(self, dtype):
        zero = jsa.as_scaled_array(jnp.zeros(3, dtype))
        out = scalify(lambda z, v: 0.9 * z + v)(zero, scaled(X, 2.0**-30, dtype))
        assert float(out.scale) == 2.0**-30
        np.testing.assert_array_equal(value(out), X * 2.0**-30)

    @pytest.mark.sampled(4)
    def test_a_constant_beside_any_scale(self, dtype):
        zero = jsa.as_scaled_array(jnp.zeros(3, dtype))
        for fun, expected in (
            (lambda z: jnp.where(MASK, z, 1), [0, 1, 0]),
            (lambda z: jnp.maximum(z, 0.5), [0.5] * 3),
            (lambda z: jnp.clip(z, 0.25, 0.5), [0.25] * 3),
            (lambda z: jnp.pad(z, 1, constant_values=1), [1, 0, 0, 0, 1]),
            (lambda z: jnp.concatenate([z, jnp.ones(1, z.dtype)]), [0, 0, 0, 1]),
            (lambda z: z.at[0].set(1), [1, 0, 0]),
            (lambda z: jnp.take(z, np.array([0, 7]), mode="fill", fill_value=5), [0, 5]),
            (lambda z: 2 / jnp.maximum(z, 1), [2] * 3),
        ):
            np.testing.assert_array_equal(value(scalify(fun)(zero)), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mask", ["lowest", -1e9, -1e4, -np.inf])
@pytest.mark.parametrize("how", ["where", "bias", "captured", "argument"])
def test_masked_softmax(dtype, mask, how):
    if how != "where" and mask == -np.inf:
        pytest.skip("only selects")
    number = float(jnp.finfo(dtype).min) if mask == "lowest" else mask
    constant = np.where(MASK, 0, number).astype(np.float32)

    def fun(x, bias):
        if how == "where":
            x = jnp.where(MASK, x, number)
        elif how == "bias":
            x = x + jnp.where(MASK, 0.0, number).astype(x.dtype)
        elif how == "captured":
            x = x + jnp.asarray(constant).astype(x.dtype)
        else:
            x = x + bias
        return jax.nn.softmax(x)

    x = scaled(X, 0.5, dtype)
    bias = jnp.maximum(constant, float(jnp.finfo(dtype).min)).astype(dtype)
    out = scalify(fun)(x, bias)
    expected = np.exp(X / 2) * MASK / np.sum(np.exp(X / 2) * MASK)
    np.testing.assert_allclose(value(out), expected, atol=2e-2 if dtype == "bfloat16" else 4e-3)
    assert value(out)[1] == 0 or how in ("where",)


# Missing rules.


mystery_p = opaque_primitive("mystery", lambda x: jnp.cos(x) * x)


def mystery(x):
    return mystery_p.bind(x)


def test_errors_of_jax_name_the_function_and_the_argument():
    def step(state, x):
        return x if state["w"].sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        jax.jit(jsa.scalify(step))({"w": jsa.as_scaled_array(jnp.ones(2))}, 1.0)
    assert re.search(r"the function step at \S*test_transform.py:\d+", str(error.value))
    assert "args[0]['w']" in str(error.value)


def test_a_sum_over_no_axes_of_a_plain_number_is_plain():
    x = jsa.as_scaled_array(jnp.float16([3.0, 5.0]))
    out = jsa.scalify(lambda x, t: t + jnp.sum(jsa.stop_scaling(jnp.mean(x))))(x, jnp.float16(1))
    assert not isinstance(out, ScaledArray) and float(out) == 5


def test_missing_rule_error_names_primitive_operands_and_line():
    with pytest.raises(jsa.MissingRuleError) as error:
        jsa.scalify(mystery, config=jsa.ScalifyConfig(missing_rule="error"))(scaled(X))
    text = str(error.value)
    assert "`mystery`" in text and "scaled float32[3]" in text and "test_transform.py" in text


def test_missing_rule_warns_once_and_is_evaluated_on_values(monkeypatch):
    monkeypatch.setattr(registry_lib, "_warned", set())
    x = scaled(X, 8.0, jnp.float16)
    with pytest.warns(jsa.DequantisedWarning, match="No scale rule for primitive `mystery`"):
        out = jsa.scalify(mystery)(x)
    expected = (8 * X * np.cos(8 * X)).astype(np.float16)
    np.testing.assert_array_equal(np.asarray(out), expected)
    assert out.dtype == jnp.float16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jsa.scalify(mystery)(x)


def test_missing_rule_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = jsa.scalify(mystery, config=jsa.ScalifyConfig(missing_rule="silent"))(scaled(X))
    np.testing.assert_allclose(np.asarray(out), X * np.cos(X), rtol=1e-6)


def test_a_new_rule_counts_inside_a_jit_that_was_interpreted_before():
    """The body of a `jit` is interpreted once, but not with rules that were replaced since."""
    inner = jax.jit(mystery)
    x = scaled(X, 8.0)
    fun = jsa.scalify(lambda x: inner(x), config=jsa.ScalifyConfig(missing_rule="silent"))
    assert float(fun(x).scale) == 1

    @jsa.register_scale_rule(mystery_p)
    def mystery_rule(ctx, x, **params):
        return ScaledArray(ctx.bind(ctx.dequantise(x)) / 4, 4.0)

    try:
        assert float(fun(x).scale) == 4
    finally:
        registry_lib._rules.pop(mystery_p)


def test_a_rule_that_dequantises_is_reported_with_its_reason(monkeypatch):
    monkeypatch.setattr(registry_lib, "_warned", set())
    with pytest.warns(jsa.DequantisedWarning, match="power of k .*`cumprod`.*test_transform.py"):
        out = jsa.scalify(jnp.cumprod)(scaled(X, 8.0))
    np.testing.assert_array_equal(np.asarray(out), np.cumprod(8 * X))


def _while(x):
    return lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: c * 2, x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "fun",
    [
        _while,
        _loop,
        lambda x: lax.scan(lambda c, v: (c + v, c * v), x[0], x),
        lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: lax.map(jnp.sin, x),
        jax.checkpoint(lambda x: jnp.sin(x) * 2),
        jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x) ** 2))),
    ],
)
def test_control_flow_is_dequantised_and_never_dropped(fun):
    x = scaled(X[[0, 2]], 4.0)
    with jsa.ScalifyConfig(missing_rule="silent"):
        out = jax.jit(jsa.scalify(fun))(x)
    expected = fun(jnp.asarray(X[[0, 2]]) * 4)
    for got, want in zip(jsa.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6)


@pytest.mark.skipif(not _compat.keeps_barriers(), reason="a cut costs a division")
@pytest.mark.parametrize(("readers", "cuts"), [(1, 0), (2, 1)])
def test_a_chain_of_alignments_is_cut_where_it_has_several_readers(readers, cuts):
    def chain(x, y):
        end = ((x + y) * 3 + y) * 3 + x
        return [jnp.sum(f(end)) for f in (jnp.sin, jnp.cos)[:readers]]

    jaxpr = jax.make_jaxpr(jsa.scalify(chain))(scaled(X, 4.0), scaled(X, 0.5))
    pinned = [
        e
        for e in all_equations(jaxpr)
        if e.primitive is pin_p and e.outvars[0].aval.shape == X.shape
    ]
    assert len(pinned) == cuts


def test_errors_list_the_first_operands_of_many():
    @jsa.custom_scale
    def total(xs):
        return sum(xs)

    @total.defscale
    def rule(xs):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as info:
        jsa.scalify(total)([scaled(X, 2.0)] * 300)
    [note] = [n for n in info.value.__notes__ if n.startswith("jax_scalify")]
    assert "and 292 more)" in note and note.count("float") == 8


def test_errors_in_a_rule_name_the_equation():
    primitive = jax.extend.core.Primitive("broken")
    primitive.def_abstract_eval(lambda x: x)
    primitive.def_impl(lambda x: x)

    @jsa.register_scale_rule(primitive)
    def rule(ctx, x):
        return ScaledArray(x.data[0], x.scale)

    with pytest.raises(TypeError, match=r"scale rule of primitive `broken` .*test_transform.py"):
        jsa.scalify(lambda x: primitive.bind(x))(scaled(X))


def test_a_registered_rule():
    primitive = jax.extend.core.Primitive("double")
    primitive.def_abstract_eval(lambda x: x)

    @jsa.register_scale_rule("double")
    def rule(ctx, x):
        assert isinstance(x, ScaledArray)
        return ScaledArray(x.data, x.scale * 2)

    assert float(jsa.scalify(primitive.bind)(scaled(X, 4.0)).scale) == 8
    with pytest.raises(TypeError, match="`primitives` must be JAX primitives or their names"):
        jsa.register_scale_rule()


@pytest.mark.parametrize("call", [lambda f: f, jax.jit])
def test_an_elementwise_rule_of_a_user_gets_whole_arrays(call):
    primitive = jax.extend.core.Primitive("product_of_equal_shapes")
    primitive.def_impl(lambda x, y: x * y)
    primitive.def_abstract_eval(lambda x, y: x)
    jax.interpreters.mlir.register_lowering(
        primitive, jax.interpreters.mlir.lower_fun(lambda x, y: x * y, multiple_results=False)
    )

    @jsa.register_scale_rule(primitive, elements="new", elementwise=True)
    def rule(ctx, x, y):
        assert x.shape == y.shape == X.shape
        return ScaledArray(ctx.bind(x.data, y.data), x.scale * y.scale)

    fun = call(jsa.scalify(lambda x: primitive.bind(jnp.full_like(x, 3), x)))
    np.testing.assert_array_equal(np.asarray(fun(scaled(X, 4.0))), 12 * np.asarray(X))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32"])
def test_scales_of_rules_in_other_dtypes(dtype):
    primitive = jax.extend.core.Primitive("four_times")
    primitive.def_impl(lambda x: 4 * x)
    primitive.def_abstract_eval(lambda x: x)

    @jsa.register_scale_rule(primitive)
    def rule(ctx, x):
        return ScaledArray(x.data, jnp.asarray(x.scale).astype(dtype) * 4)

    @jax.jit
    @jsa.scalify
    def fun(x):
        return jax.lax.scan(lambda c, _: (primitive.bind(c), primitive.bind(x)), x, length=2)

    carry, stack = fun(scaled(X, jnp.float32(2.0)))
    assert carry.scale.dtype == stack.scale.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(carry), 32 * np.asarray(X))
    np.testing.assert_array_equal(np.asarray(stack)[1], 8 * np.asarray(X))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("kind", [float, np.float32, lambda s: np.full((3,), s)])
@pytest.mark.parametrize("scale", [3.0, -2.0, np.nan, np.inf])
def test_scales_of_rules_that_are_no_power_of_two(scale, kind, jit):
    primitive = jax.extend.core.Primitive("triple")
    primitive.def_abstract_eval(lambda x: x)
    jsa.register_scale_rule(primitive)(lambda ctx, x: ScaledArray(x.data, kind(scale)))
    with pytest.raises(ValueError, match="rule of primitive `triple` .* is no power of two"):
        jit(jsa.scalify(lambda x: primitive.bind(x)))(scaled(X, 4.0))


# Configuration.


@pytest.mark.parametrize(
    "kwargs",
    [
        {"missing_rule": "no"},
        {"rounding_mode": jsa.Pow2RoundMode.NONE},
        {"rounding_mode": jsa.Pow2RoundMode.STOCHASTIC},
        {"rounding_mode": "down"},
    ],
)
def test_bad_configuration(kwargs):
    with pytest.raises(ValueError, match=f"`{next(iter(kwargs))}` must be one of"):
        jsa.ScalifyConfig(**kwargs)


def test_bad_scale_dtype():
    for dtype in (jnp.float16, None):  # NumPy's dtype of None is float64
        with pytest.raises(TypeError, match="`scale_dtype` must be float32 or float64"):
            jsa.ScalifyConfig(scale_dtype=dtype)


def test_config_retraces_under_jit():
    fun = jax.jit(jsa.scalify(lambda x: jsa.dynamic_rescale(x)))
    x = scaled([3.0, 3.0])
    assert float(fun(x).scale) == 2
    with jsa.ScalifyConfig(rounding_mode=jsa.Pow2RoundMode.UP):
        assert float(fun(x).scale) == 4
    assert float(fun(x).scale) == 2


def test_threads_do_not_see_each_others_config():
    seen, inside, done = [], threading.Event(), threading.Event()

    def other():
        inside.wait(10)
        seen.append(float(jsa.dynamic_rescale(scaled([3.0, 3.0])).scale))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with jsa.ScalifyConfig(rounding_mode=jsa.Pow2RoundMode.UP):
        inside.set()
        assert done.wait(30)
        assert float(jsa.dynamic_rescale(scaled([3.0, 3.0])).scale) == 4
    thread.join()
    assert seen == [2]


def test_config_is_restored_after_an_error():
    with pytest.raises(KeyError), jsa.ScalifyConfig(rounding_mode=jsa.Pow2RoundMode.UP):
        raise KeyError
    assert float(jsa.dynamic_rescale(scaled([3.0, 3.0])).scale) == 2


def test_float64_scales():
    with jax.enable_x64(True):
        config = jsa.ScalifyConfig(scale_dtype=jnp.float64)
        x = ScaledArray(jnp.asarray(X), jnp.float64(2.0**50))
        out = jsa.scalify(lambda v, w: v * w, config=config)(x, x)
        assert out.scale.dtype == jnp.float64 and float(out.scale) == 2.0**100
        np.testing.assert_array_equal(out.data, X * X)


# Odd values.


def test_empty_and_0d():
    out = scalify(lambda x: (jnp.sum(x), x * 2, jnp.concatenate([x, x])))(scaled(np.zeros(0)))
    assert float(out[0]) == 0 and out[1].shape == (0,)
    out = scalify(lambda x: (x + 1, x * x, jnp.sqrt(x), jnp.where(x > 1, x, 0)))(scaled(4.0, 4.0))
    assert [float(v) for v in out] == [17, 256, 4, 16]


def test_infinities_and_nans_pass():
    x = scaled([np.inf, np.nan, -np.inf], 4.0)
    out = scalify(lambda v: (v + 1, v * -2, jnp.maximum(v, 0), jnp.isnan(v), jnp.isfinite(v)))(x)
    np.testing.assert_array_equal(np.asarray(out[0]), [np.inf, np.nan, -np.inf])
    np.testing.assert_array_equal(np.asarray(out[1]), [-np.inf, np.nan, np.inf])
    np.testing.assert_array_equal(np.asarray(out[2]), [np.inf, np.nan, 0])
    np.testing.assert_array_equal(out[3], [False, True, False])
    np.testing.assert_array_equal(out[4], [False, False, False])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_guarded_division(dtype):
    def fun(x, v):
        return jnp.where(v > 0, x / jnp.where(v > 0, v, 1), 0)

    for args in ((0.0, 2.0**-20), (2.0**-20, 2.0**20), (2.0**-30, 0.0)):
        zero = [s == 0 for s in args]
        data = [np.zeros(3) if z else np.array([2.0, 0.0, 4.0]) for z in zero]
        x, v = (scaled(d, s, dtype) for d, s in zip(data, args))
        with np.errstate(all="ignore"):
            expected = np.where(value(v) > 0, value(x) / np.where(value(v) > 0, value(v), 1), 0)
        np.testing.assert_allclose(value(scalify(fun)(x, v)), expected)


def test_products_beyond_the_range_of_scales():
    out = scalify(lambda x: x**4)(scaled([3.0, 0.0], 2.0**40))
    np.testing.assert_array_equal(np.isnan(value(out)), [False, False])
    x, y, z = (scaled([1.0, 0.5], 2.0**70) for _ in range(3))
    out = scalify(lambda x, y, z: x / z * y)(x, y, z)
    np.testing.assert_array_equal(value(out), [2.0**70, 2.0**69])
    out = scalify(lambda x, y, z: jnp.maximum(x * y, z))(
        scaled([1.0], 2.0**126), scaled([0.5], 2.0), scaled([1.0])
    )
    assert value(out)[0] == 2.0**126


def test_hypot():
    """It selects between x and x * 2**75 before it squares."""
    out = scalify(jnp.hypot)(scaled([3.0, 0.0, 5.0]), scaled([4.0, 2.0, 12.0]))
    np.testing.assert_allclose(value(out), [5, 2, 13], rtol=1e-6)


@pytest.mark.parametrize("scale", [2.0**20, 2.0**-30])
def test_a_0d_float16_result_keeps_its_range(scale):
    x = scaled(np.ones(100), scale, jnp.float16)
    for fun, expected in (
        (jnp.sum, 100 * scale),
        (jnp.mean, scale),
        (lambda v: v @ v, 100 * scale**2),
        (lambda v: jnp.max(v) * 2, 2 * scale),
        (lambda v: jnp.sum(v / jnp.sum(v)), 1),
    ):
        np.testing.assert_allclose(value(scalify(fun)(x)), expected, rtol=2e-3)


def test_a_constant_cast_to_fp8_saturates():
    fun = scalify(lambda x: x * jnp.full(3, 1000.0).astype(jnp.float8_e4m3fn).astype(jnp.float32))
    assert np.all(np.isfinite(value(fun(scaled(X)))))


def test_gradients_of_integers():
    def fun(x, i):
        return jnp.sum(x * i)

    grads = scalify(jax.grad(fun, (0, 1), allow_int=True))(scaled(X, 4.0), jnp.arange(3))
    np.testing.assert_array_equal(np.asarray(grads[0]), [0, 1, 2])
    assert np.asarray(grads[1]).dtype == jax.dtypes.float0


def test_names_of_the_users_code_stay():
    @jax.jit
    @jsa.scalify
    def fun(x):
        with jax.named_scope("my_scope"):
            return jnp.tanh(x)

    assert "my_scope" in fun.lower(scaled(X)).as_text(debug_info=True)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_composites_against_float64(dtype):
    rng = np.random.default_rng(0)
    x = scaled(rng.normal(size=(4, 32)), 2.0, dtype)
    labels = np.array([1, 2, 3, 30])

    def norm(v):
        mean = v.mean(-1, keepdims=True)
        centred = v - mean
        return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)

    def xent(v):
        return -jnp.take_along_axis(jax.nn.log_softmax(v), labels[:, None], 1).mean()

    def functions(v):
        return (
            jax.nn.softmax(v),
            jax.nn.logsumexp(v, axis=-1),
            norm(v),
            xent(v).astype(v.dtype),
            jax.grad(lambda u: (norm(u) ** 3).sum().astype(jnp.float32))(v),
            jax.grad(lambda u: xent(u).astype(jnp.float32))(v),
            jax.grad(lambda u: jax.nn.gelu(u).sum().astype(jnp.float32))(v),
        )

    out = jax.jit(scalify(functions))(x)
    with jax.enable_x64(True):
        expected = jax.jit(functions)(jnp.asarray(value(x), jnp.float64))
        expected = [np.asarray(e) for e in expected]
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
    for got, want in zip(out, expected, strict=True):
        np.testing.assert_allclose(value(got), want, atol=tolerance * np.abs(want).max())


CONSTANTS = [
    lambda x: x * (jnp.asarray(0.3, x.dtype) + 2 - 7),
    lambda x: x * jnp.sqrt(jnp.square(jnp.asarray(1.7, x.dtype)) / 3),
    lambda x: x * jnp.where(jnp.asarray(2.0, x.dtype) > 1, jnp.asarray(0.1, x.dtype), 3),
    lambda x: x * abs(-jnp.minimum(jnp.asarray(0.7, x.dtype), jnp.asarray(3, jnp.int32))),
    lambda x: x * (jnp.asarray(7, jnp.int32) // jnp.asarray(-2, jnp.int32)).astype(x.dtype),
]


@pytest.mark.parametrize("index", range(len(CONSTANTS)))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_constants_are_folded_as_the_compiler_would(index, dtype):
    fun = CONSTANTS[index]
    x = jnp.asarray([1.0, -3.0], dtype)
    np.testing.assert_array_equal(jsa.asarray(jsa.scalify(fun)(jsa.as_scaled_array(x))), fun(x))


@pytest.mark.parametrize(("given", "exponent"), [(True, 4), (False, 7)])
def test_sums_of_what_was_computed_grow_faster(given, exponent):
    """256 given terms are independent, 256 computed ones have something in common."""
    fun = jnp.sum if given else lambda x: jnp.sum(jnp.sin(x))
    out = scalify(fun)(scaled(np.ones(256), 1.0))
    assert float(out.scale) == 2.0**exponent


@pytest.mark.parametrize("computed", [0, 1, 2])
@pytest.mark.parametrize("where", ["here", "jit", "scan"])
def test_products_of_two_computed_values_grow_faster(computed, where):
    def product(x, w):
        return (jnp.sin(x) if computed else x) @ (jnp.sin(w) if computed == 2 else w)

    def scan(x, w):
        return jax.lax.scan(lambda c, v: (c, product(*v)), 0, (x[None], w[None]))[1][0]

    fun = {"here": product, "jit": jax.jit(product), "scan": scan}[where]
    out = scalify(fun)(scaled(np.ones((2, 256)), 1.0), scaled(np.ones((256, 2)), 1.0))
    assert float(jnp.max(out.scale)) == 2.0 ** (6 if computed == 2 else 4)


@pytest.mark.parametrize("uses", [1, 3, 4, 16, 32])
def test_cotangents_of_a_weight_add_up(uses):
    """Of n uses: `sqrt(n)` times one of them, whichever way they are added."""
    rng = np.random.default_rng(0)
    xs = [jnp.asarray(rng.normal(size=(8, 4)), jnp.float32) for _ in range(uses)]

    def loss(w, bias, xs):
        return sum(jnp.sum(jnp.sin(x @ w + bias)) for x in xs)

    grad = jax.grad(loss, argnums=(0, 1))
    w, bias = jnp.ones((4, 2)), jnp.ones(2)
    inputs = scaled(w, 1.0), scaled(bias, 1.0)
    one = scalify(grad)(*inputs, [scaled(xs[0], 1.0)])
    got = scalify(grad)(*inputs, [scaled(x, 1.0) for x in xs])
    for exact, g, single in zip(grad(w, bias, xs), got, one, strict=True):
        assert float(g.scale) == float(single.scale) * 2.0 ** int(np.log2(uses) / 2)
        np.testing.assert_allclose(jsa.asarray(g), exact, rtol=1e-5, atol=1e-5)
