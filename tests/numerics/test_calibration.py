"""`jsa.calibrate`: what is measured, what is corrected, and what is left in the step."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.numerics import calibrating
from jax_scalify.numerics.choosing import Choice
from jax_scalify.numerics.equations import Equations
from jax_scalify.numerics.measuring import (
    Measured,
    at_frozen_scale,
    excess,
    excess_of_state,
    measure_state,
)

STATISTICS = ("reduce_max", "reduce_min", "is_finite", "reduce_sum", "argmax", "while", "cond")


def corrected_by(exponents, *, role="value"):
    """A calibration with these corrections and nothing else."""
    known = dict(role=role, dtype="float16", log2_rms=0.0, log2_max=1.0)
    values = {name: Measured(**known, correction=k) for name, k in exponents.items()}
    return jsa.Calibration(values, {})


def names_of(fun, *args):
    """The names of all values of a function."""
    leaves = jax.tree_util.tree_leaves_with_path(args)
    closed = jax.make_jaxpr(fun)(*args)
    return list(
        Equations(closed, [f"args{jax.tree_util.keystr(path)}" for path, _ in leaves]).results
    )


def counts(fun, *args):
    return collections.Counter(
        e.primitive.name for e in all_equations(jax.make_jaxpr(fun)(*args).jaxpr)
    )


def scaled(data, scale=1.0, dtype=np.float16):
    """Data with a dynamic scale."""
    return jsa.ScaledArray(jnp.asarray(data, dtype), jnp.float32(scale))


X = np.float16([[1.0, -2.5, 0.0], [0.125, 3.0, -7.0]])
W = np.float16([[0.5, 2.0, -1.0], [1.0, -0.25, 4.0], [3.0, 1.5, 0.0]])


# The correction itself: a power of two, which changes no value.


def product(x, w):
    return jnp.tanh(x @ w) * 2


def in_scan(x, w):
    return jax.lax.scan(lambda c, _: ((c @ w) * jnp.float16(0.25), c), x, None, 3)


def in_remat(x, w):
    return jax.value_and_grad(lambda w: jnp.sum(jax.checkpoint(product)(x, w)))(w)


def in_jit(x, w):
    inner = jax.jit(product)
    return inner(inner(x, w), w)


def in_cond(x, w):
    return jax.lax.cond(x[0, 0] > 0, product, lambda x, w: x @ w, x, w)


def in_vmap(x, w):
    return jax.vmap(product, (0, None))(x, w)


def in_custom_rules(x, w):
    return jax.grad(lambda w: jnp.sum(jax.nn.relu(x @ w) ** 2))(w)


def powers(x, w):
    y = jnp.abs(x @ w) + 1
    return jax.lax.pow(y, np.float16(2)) + jax.lax.pow(y, 2) + jax.lax.pow(y, np.float16(0.5))


FUNCTIONS = (product, in_scan, in_remat, in_jit, in_cond, in_vmap, in_custom_rules, powers)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fun", FUNCTIONS)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_correction_moves_a_power_of_two_and_changes_no_value(fun, kind):
    x, w = scaled(X, 0.25), scaled(W, 0.5)
    x, w = jsa.freeze_scales((x, w)) if kind == "static" else (x, w)
    plain = jsa.asarray(jax.jit(jsa.scalify(fun))(x, w), jnp.float32)
    names = names_of(fun, X, W)
    assert names
    for exponent in (1, -1):  # of all values: more would leave float16
        c = corrected_by(dict.fromkeys(names, exponent))
        found = jax.jit(jsa.scalify(fun, calibration=c))(x, w)
        jax.tree.map(np.testing.assert_array_equal, jsa.asarray(found, jnp.float32), plain)


def test_calls_of_one_function_have_corrections_of_their_own():
    x, w = scaled(X), scaled(W)
    names = [name for name in names_of(in_jit, X, W) if "dot_general" in name]
    assert names == ["dot_general", "dot_general#2"]

    def scale_of(*corrected):
        call = jsa.scalify(
            lambda x, w: jax.jit(jnp.matmul)(jax.jit(jnp.matmul)(x, w), w),
            calibration=corrected_by(dict.fromkeys(names, 0) | dict.fromkeys(corrected, 5)),
        )
        return float(jax.jit(call)(x, w).scale)

    one, two = names
    assert [scale_of(*c) / scale_of() for c in ((one,), (two,), (one, two))] == [32, 32, 1024]


def test_an_fp8_operand_is_multiplied_before_it_is_rounded():
    data = np.float16([[1000.0, -3.0], [2.0, 500.0]])  # E4M3 ends at 448
    eye = jsa.as_scaled_array(jnp.eye(2, dtype=jnp.float16))

    def fun(x, w):
        return jsa.nn.matmul(x, w)

    x = scaled(data)
    names = [name for name in names_of(fun, data, np.eye(2, dtype=np.float16)) if "cast" in name]
    saturated = jsa.asarray(jsa.scalify(fun)(x, eye), jnp.float32)
    assert saturated.max() == 448
    exponents = {name: 0 for name in names_of(fun, data, W[:2, :2])} | {names[0]: 3}
    found = jsa.asarray(jsa.scalify(fun, calibration=corrected_by(exponents))(x, eye), jnp.float32)
    expected = 8 * (data / 8).astype(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    assert found.max() == 1024  # to three bits of mantissa


BEFORE_ROUNDING = {  # and in float64
    "mul": (lambda x, y: x * y, lambda x, y: x * y),
    "div": (lambda x, y: x / (1 / y), lambda x, y: x * y),
    "square": (lambda x, y: jnp.square(x), lambda x, y: x**2),
    "integer_pow": (lambda x, y: x**3, lambda x, y: x**3),
    "pow": (lambda x, y: jnp.abs(x) ** jnp.float16(2.5), lambda x, y: np.abs(x) ** 2.5),
    "dot_general": (lambda x, y: x[:, None] @ y[None], lambda x, y: np.outer(x, y)),
    "add": (lambda x, y: x + jnp.abs(x), lambda x, y: x + np.abs(x)),
    "scatter-add": (
        lambda x, y: jnp.zeros(4, x.dtype).at[jnp.array([0, 1, 1, 1] * 9)].add(jnp.tile(x, 9)),
        lambda x, y: np.array([9 * x[0], 9 * (x[1] + x[2] + x[3]), 0, 0]),
    ),
    "reduce_sum": (
        lambda x, y: jnp.sum(jnp.broadcast_to(x[:, None], (4, 2048)), axis=1),
        lambda x, y: 2048 * x,
    ),
}


@pytest.mark.parametrize("primitive", BEFORE_ROUNDING)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (2.0**30, 2.0**-30)])
@pytest.mark.parametrize("up", [False, True])
def test_a_correction_is_applied_before_a_result_is_rounded(primitive, scales, up):
    fun, in_float64 = BEFORE_ROUNDING[primitive]
    size, exponent = (2.0**-9, -12) if up else (2.0**15, 30)  # of products beyond float16
    values = np.float16([[1, -0.5, 0.733, 1.1], [1, 0.5, -0.25, 1]]) * np.float16(size)
    x, y = map(jsa.ScaledArray, jnp.asarray(values), scales)
    names = names_of(fun, *values)
    name = [name for name in names if name.partition("#")[0] == primitive][-1]
    c = corrected_by(dict.fromkeys(names, 0) | {name: exponent})
    wanted = in_float64(*(np.float64(values) * np.float64(scales)[:, None]))
    for call in (jsa.scalify(fun, calibration=c), jax.jit(jsa.scalify(fun, calibration=c))):
        found = call(x, y)
        assert found.dtype == jnp.float16 and np.isfinite(found.data).all()
        np.testing.assert_array_equal(found.data, np.float16(wanted / float(found.scale)))
    uncorrected = wanted * 2.0**exponent / float(found.scale)
    if not up:
        assert np.abs(uncorrected).max() > 65504
    elif primitive not in ("add", "scatter-add", "reduce_sum"):
        assert np.any(np.float16(uncorrected) != uncorrected)


def test_special_numbers_keep_their_values():
    x = scaled(np.float16([0.0, -0.0, 2.0**-24, 65504.0, np.inf, np.nan, -1.0]))
    for exponent in (4, -4):
        c = corrected_by({"neg": exponent})
        found = np.asarray(jsa.asarray(jsa.scalify(jnp.negative, calibration=c)(x), jnp.float32))
        small = 0.0 if exponent > 0 else -(2.0**-24)
        large = -65504.0 if exponent > 0 else -np.inf  # as any rescale of data
        wanted = np.float32([0.0, 0.0, small, large, -np.inf, np.nan, 1.0])
        np.testing.assert_array_equal(found, wanted)
    for shape in ((), (0, 3)):
        c = corrected_by({"neg": 4})
        assert jsa.scalify(jnp.negative, calibration=c)(scaled(np.ones(shape))).shape == shape


def test_scales_at_the_ends_and_per_axis():
    for exponent in (-40, 40):
        x = scaled(X, 2.0**exponent)
        y = jsa.scalify(jnp.negative, calibration=corrected_by({"neg": 5}))(x)
        assert float(y.scale) == float(x.scale) * 32
        np.testing.assert_array_equal(jsa.asarray(y, jnp.float32), -jsa.asarray(x, jnp.float32))
    rows = scaled(X, [[2.0], [8.0]])
    y = jsa.scalify(jnp.negative, calibration=corrected_by({"neg": 1}))(rows)
    np.testing.assert_array_equal(y.scale, 2 * np.asarray(rows.scale))
    zero = jsa.as_scaled_array(jnp.zeros(3, jnp.float16))
    y = jsa.scalify(jnp.negative, calibration=corrected_by({"neg": 1}))(zero)
    np.testing.assert_array_equal(jsa.asarray(y), 0)


def test_without_corrections_the_jaxpr_is_that_of_scalify():
    x, w = jsa.freeze_scales((scaled(X), scaled(W)))
    for fun in (product, in_scan, in_jit):
        c = corrected_by(dict.fromkeys(names_of(fun, X, W), 0))
        texts = [
            str(jax.make_jaxpr(call)(x, w))
            for call in (jsa.scalify(fun), jsa.scalify(fun, calibration=c))
        ]
        assert texts[0] == texts[1]


def test_a_correction_is_one_multiplication_by_a_constant():
    x, w = jsa.freeze_scales((scaled(X), scaled(W)))
    fun = jnp.negative
    plain = counts(jsa.scalify(fun), x)
    found = counts(jsa.scalify(fun, calibration=corrected_by({"neg": 3})), x)
    more = {name: found[name] - plain[name] for name in found | plain}
    assert more["mul"] == 1 and all(more.get(name, 0) == 0 for name in STATISTICS)


def test_names_outlive_another_batch_a_mesh_and_a_retrace():
    def fun(x, w):
        def loss(w):
            with jax.named_scope("block"):
                y = jax.nn.relu(jnp.tanh(x @ w) @ w)
            return jnp.sum(jax.checkpoint(lambda y: y * y)(y))

        return jax.grad(loss)(w)

    names = names_of(fun, X, W)
    assert {"block:dot_general", "block:dot_general#2", "backward/block:dot_general#3"} < set(names)
    assert names_of(fun, np.ones((5, 3), np.float16), W) == names
    assert names_of(jax.jit(fun), X, W) == names
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows, whole = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in (["data"], []))
        found = names_of(fun, jax.device_put(X, rows), jax.device_put(W, whole))
    assert set(names) <= set(found)  # with explicit axes JAX casts once more


def test_a_derivative_from_outside_is_that_of_the_function():
    def f(x):
        return jnp.sum(jax.nn.relu(x * 3) ** 2)

    x = jnp.float32([1.0, -2.0, 0.5])
    c = corrected_by(dict.fromkeys(names_of(f, np.float16(x)), 1))

    def value(x):
        x = jsa.as_scaled_array(x.astype(jnp.float16), scale=0.5)
        return jsa.asarray(jsa.scalify(f, calibration=c)(x), jnp.float32)

    np.testing.assert_array_equal(jax.grad(value)(x), jax.grad(f)(x))


def test_what_is_not_computed_is_known_as_unseen():
    def step(w, x):
        looped = jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y + 1, x)
        branch = jax.lax.cond(x[0, 0] > 99, lambda: jnp.sin(x) @ w, lambda: jnp.cos(x) @ w)
        return w, looped @ w + branch

    c = jsa.calibrate(step, scaled(W), X, steps=1)
    assert c.unseen == ("while", "sin") and c["cos"].role == "operand"
    jsa.scalify(step, calibration=c)(scaled(W), X)  # no warning
    assert jsa.Calibration.from_json(c.to_json()) == c


# What is measured and chosen.


def test_the_band_of_a_dtype():
    for dtype, width, top in (
        ("float16", 6, 16),
        ("float8_e4m3fn", 2, 8.8),
        ("float8_e5m2", 2, 15.8),
    ):
        assert excess(0.0, 2.0, dtype) == excess(width, top - 1.1, dtype) == 0
        assert excess(width + 1, top - 2.5, dtype) == width + 1
        assert excess(-width - 1, 0.0, dtype) == -width - 1
        exact = math.log2(float(jnp.finfo(dtype).max))
        for exponent, room in (
            (excess(0.0, top, dtype), 2),
            (excess_of_state(0.0, top, dtype), 4 if dtype == "float16" else 2),
        ):
            assert exact - room - 1 < top - exponent <= exact - room
        assert excess(-math.inf, -math.inf, dtype) == 0
        assert excess_of_state(-width - 1, 0.0, dtype) == 0
        assert excess_of_state(-9.0, -7.0, dtype) == -9
    assert excess_of_state(-3.0, -1.0, "float8_e4m3fn") == -3  # most of it is subnormal
    assert excess_of_state(-3.0, -1.0, "float8_e5m2") == 0
    for dtype in ("float32", "bfloat16", "float64"):
        assert excess(60.0, 100.0, dtype) == excess_of_state(60.0, 100.0, dtype) == 0


def test_many_values_of_one_size_keep_their_own_rows():
    """More than are stacked for one kernel."""

    def step(w, x):
        for _ in range(40):
            x = x @ w
        return w, x

    w = jsa.as_scaled_array(1.1 * jnp.eye(4), dtype=jnp.float16)
    calibration = jsa.calibrate(step, w, jnp.ones((4, 4), jnp.float16), steps=1)
    products = [m for name, m in calibration.values.items() if "dot_general" in name]
    found = [m.log2_rms + m.scale for m in products]
    assert len(found) == 39  # which are operands of the next
    assert found == pytest.approx(np.arange(1, 40) * np.log2(float(np.float16(1.1))), abs=0.02)


def test_state_is_measured_leaf_by_leaf():
    state = {
        "w": jsa.scaled_array(np.float16([3.0, -4.0, 0.0, 0.0]), 2.0**-3),
        "frozen": jsa.ScaledArray(jnp.float16([65504.0, 1.0]), 4.0),
        "zero": jsa.as_scaled_array(jnp.zeros(2, jnp.float16)),
        "fp8": jsa.ScaledArray(jnp.asarray([448.0, 2.0**-9], jnp.float8_e4m3fn), jnp.float32(1.0)),
        "plain": jnp.float32([1.0, np.inf]),
        "count": jnp.int32(3),
        "none": None,
    }
    found = measure_state(state)
    assert list(found) == [f"args[0]['{n}']" for n in ("fp8", "frozen", "plain", "w", "zero")]
    fp8, frozen, plain, w, zero = found.values()
    assert (w.scale, w.log2_rms, w.log2_max) == pytest.approx((-3, math.log2(2.5), 2))
    assert (frozen.scale, frozen.overflow) == (2, 0.5)
    assert (zero.scale, zero.log2_rms, zero.log2_max) == (None, -math.inf, -math.inf)
    assert (fp8.overflow, fp8.underflow) == (0.5, 0.5)
    assert (plain.scale, plain.nonfinite, plain.log2_max) == (None, 0.5, 0)
    # Room to grow: at least 10 octaves in float16, and 3 in FP8.
    for before, room in ((frozen, 10), (fp8, 4)):
        moved = at_frozen_scale(before)
        assert moved.scale == before.scale + room
        assert moved.log2_max == pytest.approx(before.log2_max - room, abs=1e-9)
    assert at_frozen_scale(w) == w
    assert at_frozen_scale(zero) == zero and at_frozen_scale(plain) == plain


def chain(w, x, dot=jnp.matmul):
    for _ in range(20):
        x = dot(x, w)
    return w, x


def grown():
    w = 1.9 * np.random.default_rng(0).normal(size=(32, 32)) / math.sqrt(32)
    return jsa.as_scaled_array(jnp.float32(w), scale="rms", dtype="float16"), np.ones(
        (1, 32), np.float16
    )


def test_a_chain_that_leaves_float16_is_brought_back():
    w, x = grown()
    c = jsa.calibrate(chain, w, x, steps=1)
    true = np.float64(x)
    for _ in range(20):
        true = true @ np.float64(jsa.asarray(w, jnp.float32))
    assert not jnp.isfinite(jsa.scalify(chain)(w, x)[1].data).all()
    assert 1 <= len(c.exponents) <= 6
    for state in (w, c.freeze(w)):  # dynamic and static scales
        y = jax.jit(jsa.scalify(chain, calibration=c))(state, x)[1]
        np.testing.assert_allclose(
            jsa.asarray(y, jnp.float32), true, rtol=0.02, atol=0.02 * true.std()
        )
    again = jsa.calibrate(chain, w, np.ones((7, 32), np.float16), steps=1)  # another batch size
    assert again.exponents == c.exponents and list(again) == list(c)
    assert not c.diff(again)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dot", [jnp.matmul, jsa.nn.matmul], ids=["float16", "fp8"])
def test_a_loop_has_one_correction_for_all_steps(dot):
    def step(w, x):
        y, _ = jax.lax.scan(jax.checkpoint(lambda c, _: (dot(c, w), None)), x, None, 20)
        return w, y

    w, x = grown()
    c = jsa.calibrate(step, w, x, steps=1)
    assert list(c.exponents.values()) == [1]
    true = np.float64(x)
    for _ in range(20):
        true = true @ np.float64(jsa.asarray(w, jnp.float32))
    y = jax.jit(jsa.scalify(step, calibration=c))(c.freeze(w), x)[1]
    error = np.linalg.norm(jsa.asarray(y, jnp.float32) - true) / np.linalg.norm(true)
    assert error < (0.01 if dot is jnp.matmul else 0.4)  # 20 products of E4M3


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dot", [jnp.matmul, jsa.nn.matmul], ids=["float16", "fp8"])
@pytest.mark.parametrize("micro", [False, True], ids=["layers", "layers of small batches"])
def test_what_is_in_a_deep_loop_is_measured_once_and_comes_into_its_band(dot, micro, monkeypatch):
    """Scales there are known at run time alone; batches differ in their numbers of tokens."""

    def layer(dot, x, w):
        wide = jnp.float32(x)
        y = (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)
        for _ in range(3):  # rules take each product to grow by 8, and it grows by 64
            y = dot(y, w)
        return x + y / 4096, None

    def loss(dot, w, x, mask):
        body = jax.checkpoint(functools.partial(layer, dot))
        y, _ = jax.lax.scan(body, x, jnp.broadcast_to(w, (32, 64, 64)))
        return jnp.sum(jnp.mean(jnp.float32(y), -1) * mask) / jnp.sum(mask)

    def step(w, batch, dot=dot):
        gradient = jax.grad(functools.partial(loss, dot))
        if not micro:
            return w, gradient(w, *batch)
        parts = jax.tree.map(lambda x: x.reshape(2, 8, *x.shape[1:]), batch)
        total, _ = jax.lax.scan(
            lambda total, part: (total + gradient(w, *part), None), jnp.zeros_like(w), parts
        )
        return w, total

    def batch(tokens):
        x = np.random.default_rng(tokens).uniform(1, 2, (16, 64))
        return jnp.float16(x), jnp.float32(np.arange(16) % 8 < tokens)

    rounds, measure = [], calibrating._measure
    monkeypatch.setattr(calibrating, "_measure", lambda *a: rounds.append(1) or measure(*a))
    w = np.ones((64, 64), np.float32)
    state, batches = jsa.as_scaled_array(w, dtype=jnp.float16), [batch(8), batch(1), batch(2)]
    c = jsa.calibrate(step, state, iter(batches), steps=3)
    assert c.exponents and len(rounds) == 1
    seen = measure(step, None, c.exponents, c.freeze(state), batches, c.freeze).values
    for name in c.exponents:
        m = seen[name]
        assert m.scale == c[name].scale and abs(m.log2_rms - c[name].log2_rms) < 0.1
        assert excess(m.log2_rms, m.log2_max, m.dtype) == 0
    gradient = jax.jit(jsa.scalify(step, calibration=c))(c.freeze(state), batches[0])[1]
    wide = step(w, jax.tree.map(jnp.float32, batches[0]), jnp.matmul)[1]
    error = np.linalg.norm(jsa.asarray(gradient, jnp.float32) - wide) / np.linalg.norm(wide)
    assert error < (0.01 if dot is jnp.matmul else 0.1)


def grows(w, x):  # by 4 a step, and rules take it to shrink by 2**0.5
    return jax.lax.scan(lambda c, _: (c @ w / 8, None), x, None, 10)[0]


def decays(w, x):  # by 16 a step, and rules take it to shrink by 2**6.5
    return jax.lax.scan(lambda c, _: (c @ w / 512, None), x, None, 6)[0]


def decays_for_long(w, x):
    """More steps than are told apart; every one of the first sixty is as the last."""
    flat = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w / 32), None), x, None, 60)[0]
    return jax.lax.scan(lambda c, _: (flat @ w / 512, None), flat, None, 300)[0]


def grows_in_a_branch(w, x):
    return jax.lax.cond(x[0, 0] > 0, grows, lambda w, x: x, w, x)


def grows_in_a_loop_of_branches(w, x):
    def step(c, i):
        return jax.lax.switch(i, [lambda c: c / 1024, lambda c: grows(w, c) / 2**10], c), None

    return jax.lax.scan(step, x, np.array([1, 0, 1, 1]))[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fun", [grows, decays, decays_for_long, grows_in_a_branch, grows_in_a_loop_of_branches]
)
@pytest.mark.parametrize("differentiate", [False, True])
def test_what_a_calibration_says_of_loops_is_what_there_is_then(fun, differentiate):
    """Data and scales differ from step to step, and each correction moves the steps behind it."""

    def step(w, batch):
        x, mask = batch

        def loss(w):
            return jnp.sum(jnp.mean(jnp.float32(fun(w, x)), -1) * mask) / jnp.sum(mask)

        return w, jax.grad(loss)(w) if differentiate else fun(w, x)

    rng = np.random.default_rng(0)
    x = np.float16(rng.uniform(1, 2, (4, 32)))
    batches = [(x, np.float32([1, 0, 0, 0])), (x, np.ones(4, np.float32))]
    w = np.ones((32, 32), np.float32)
    state = jsa.as_scaled_array(w, dtype=jnp.float16)
    c = jsa.calibrate(step, state, iter(batches), steps=2)
    assert c.exponents
    seen = calibrating._measure(step, None, c.exponents, c.freeze(state), batches, c.freeze)
    for name, m in seen.values.items():
        assert not (m.nonfinite or m.overflow or m.underflow), name
        if name in c.exponents:
            assert m.scale == c[name].scale and abs(m.log2_rms - c[name].log2_rms) < 0.1
    y = jax.jit(jsa.scalify(step, calibration=c))(c.freeze(state), batches[0])[1]
    wide = step(w, jax.tree.map(jnp.float32, batches[0]))[1]
    np.testing.assert_allclose(jsa.asarray(y, jnp.float32), wide, rtol=5e-3)


def test_batches_may_have_loops_of_different_lengths():
    def step(w, x):
        return w, jax.lax.scan(lambda c, row: (c @ w / 8 + row, None), jnp.zeros_like(x[0]), x)[0]

    state = jsa.as_scaled_array(np.ones((32, 32), np.float32), dtype=jnp.float16)
    c = jsa.calibrate(step, state, (np.ones((n, 2, 32), np.float16) for n in (3, 7)), steps=2)
    y = jax.jit(jsa.scalify(step, calibration=c))(c.freeze(state), np.ones((7, 2, 32), np.float16))
    np.testing.assert_allclose(jsa.asarray(y[1]), sum(4**n for n in range(7)), rtol=1e-3)


def choice(scores):
    return jnp.where(jnp.tri(len(scores), dtype=bool), scores, jnp.finfo(scores.dtype).min)


def added_choice(scores):
    hidden = jnp.finfo(scores.dtype).min
    return scores + jnp.where(jnp.tri(len(scores), dtype=bool), 0, hidden).astype(scores.dtype)


def added_product(scores):
    seen = jnp.tri(len(scores), dtype=bool).astype(scores.dtype)
    return scores - 60_000 * (1 - seen)


# Beside 60,000 the largest score and what is left of the others get its scale: those are corrected.
@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "mask, corrected",
    [(choice, set()), (added_choice, set()), (added_product, {"reduce_max", "sub#2"})],
)
def test_what_a_mask_hides_is_no_distortion(mask, corrected, monkeypatch):
    def masked_attention(w, x):
        return w, jax.nn.softmax(mask(0.5 * (x @ w @ x.T))) @ x

    rounds, measure = [], calibrating._measure
    monkeypatch.setattr(calibrating, "_measure", lambda *a: rounds.append(1) or measure(*a))
    w = jsa.as_scaled_array(np.eye(32, dtype=np.float16))
    x = jsa.as_scaled_array(np.float16(np.random.default_rng(0).normal(size=(64, 32))))
    c = jsa.calibrate(masked_attention, w, x, steps=2)
    assert set(c.exponents) == corrected
    assert len(rounds) == 1 or corrected
    assert not any(m.nonfinite for m in c.values.values())
    out = jax.jit(jsa.scalify(masked_attention, calibration=c))(c.freeze(w), x)[1]
    plain = masked_attention(np.eye(32, dtype=np.float32), jsa.asarray(x, jnp.float32))[1]
    np.testing.assert_allclose(jsa.asarray(out, jnp.float32), plain, atol=0.01)


@pytest.mark.parametrize("tokens", [3, 1500])
def test_gradients_of_a_loss_that_is_divided_by_a_number_of_the_batch(tokens):
    """A traced scalar is a part of each of their scales: none is known while tracing."""

    def loss(w, x, mask):
        for _ in range(10):  # rules take the products to grow by 2.8, and they grow by 16
            x = x @ w
        return jnp.sum(jnp.sum(x, 1) * mask) / jnp.sum(mask)

    def step(w, batch):
        return w, jax.grad(loss)(w, *batch)

    w = 2 * jnp.ones((8, 8))
    batch = jnp.ones((4, 8), jnp.float16), jnp.float16([1, 0, 1, 1]) * np.float16(tokens / 3)
    state = jsa.as_scaled_array(w, dtype=jnp.float16)
    c = jsa.calibrate(step, state, batch, steps=1)
    gradient = jax.jit(jsa.scalify(step, calibration=c))(c.freeze(state), batch)[1]
    wide = jax.grad(loss)(w, *(x.astype(jnp.float32) for x in batch))
    np.testing.assert_allclose(jsa.asarray(gradient, jnp.float32), wide, rtol=2e-3)
    assert not any(m.nonfinite or m.overflow or m.underflow for m in c.values.values())
    assert all(-9 < m.log2_rms < 10 for m in c.values.values())


def test_corrections_that_break_the_steps_are_not_taken(monkeypatch):
    def choose(step, config, exponents, seen, batches):
        choice = Choice(seen.values, exponents)
        choice.exponents = {"dot_general": 30}
        return choice

    monkeypatch.setattr(calibrating, "_choose", choose)
    monkeypatch.setattr(calibrating._Seen, "is_distorted", True)  # so that there is another round
    w = jsa.as_scaled_array(np.eye(4, dtype=np.float16))
    with pytest.warns(UserWarning, match="goes back to the 0 of the round before"):
        c = jsa.calibrate(lambda w, x: w + 0 / (x @ w), w, np.ones((4, 4), np.float16), steps=2)
    assert not c.exponents and not any(m.nonfinite for m in c.state.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_masked_language_model_stays_with_static_scales_where_dynamic_ones_bring_it(fp8):
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.normal(size=(16, 32)), jnp.float16)

    def loss(params, tokens, weights):
        x = words[tokens]
        for w in params["hidden"]:
            y = jax.nn.gelu(x @ w)
            x = jsa.nn.layer_norm(
                x + y / jnp.sqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-3)
            )
        logits = jax.nn.log_softmax(x @ params["head"])
        losses = -jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return jnp.sum(losses * weights) / jnp.sum(weights)

    loss_fn = jsa.fp8_matmuls(loss, jsa.fp8.linear_layers) if fp8 else loss
    optimizer = jsa.optim.low_precision(optax.adam(1e-2))

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (jsa.optim.apply_updates(params, updates), opt_state), value

    def batch(number):
        rng = np.random.default_rng(number)
        tokens = rng.integers(16, size=(4, 8))
        return tokens.astype(np.int32), np.float16(rng.random((4, 8)) < 0.3)

    hidden = [jnp.float32(rng.normal(size=(32, 32))) / 6 for _ in range(3)]
    params = {"hidden": hidden, "head": jnp.float32(rng.normal(size=(32, 16))) / 60}
    params = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
    state = params, jsa.as_scaled_array(optimizer.init(params))
    dynamic = jax.jit(jsa.scalify(step))
    for number in range(10):
        state, _ = dynamic(state, batch(number))
    c = jsa.calibrate(step, state, (batch(10 + i) for i in range(4)))
    assert not any(m.nonfinite for m in [*c.values.values(), *c.state.values()])
    frozen, static = jax.jit(jsa.scalify(step, calibration=c)), c.freeze(state)
    for number in range(10, 30):
        state, value = dynamic(state, batch(number))
        static, other = frozen(static, batch(number))
        np.testing.assert_allclose(jsa.asarray(other), jsa.asarray(value), rtol=0.05, atol=0.02)


def test_integers_are_no_mask():
    def step(w, x):
        return w, jsa.nn.matmul(x.astype(jnp.float16), w)

    w = jsa.as_scaled_array(np.eye(16, dtype=np.float16))
    x = np.random.default_rng(0).integers(-20_000, 20_000, (8, 16), np.int16)
    c = jsa.calibrate(step, w, x, steps=1)
    y = jax.jit(jsa.scalify(step, calibration=c))(c.freeze(w), x)[1]
    assert list(c.exponents) == ["convert_element_type"]
    np.testing.assert_allclose(jsa.asarray(y, jnp.float32), x, rtol=0.07, atol=300)


def test_an_operand_of_exp_has_the_scale_that_exp_needs():
    def step(w, x):  # rules take the products to grow by 2**(2.5 * 20), and they stay near 1
        y = x
        for _ in range(20):
            y = y @ w
        return w, jnp.exp(-jnp.abs(y))

    w = jsa.as_scaled_array(np.eye(32), scale=1.0, dtype=np.float16)
    x = np.float16(np.random.default_rng(0).normal(size=(8, 32)))
    c = jsa.calibrate(step, w, x, steps=1)
    y = jax.jit(jsa.scalify(step, calibration=c))(c.freeze(w), x)[1]
    np.testing.assert_allclose(jsa.asarray(y, jnp.float32), np.exp(-np.abs(x)), rtol=2e-3)


# Files, and calibrations that do not fit.


def some_calibration():
    known = dict(role="operand", dtype="float16", log2_rms=-0.25, log2_max=3.0)
    values = {"a": Measured(**known, correction=2, line="m.py:3"), "b": Measured(**known, scale=-4)}
    state = {"args[0]['w']": Measured(**known | {"role": "state"}, scale=3, overflow=0.25)}
    state["args[0]['z']"] = Measured(
        role="state", dtype="float16", log2_rms=-math.inf, log2_max=-math.inf
    )
    return jsa.Calibration(values, state, steps=7)


def test_it_is_json_and_prints(tmp_path):
    c = some_calibration()
    assert jsa.Calibration.from_json(c.to_json()) == c
    for path in (tmp_path / "c.json", tmp_path):
        c.save(path)
        assert jsa.Calibration.load(path) == c
    assert "args[0]['w']" in str(c) and "1 corrected" in c.summary and "0.00% / 25.00%" in repr(c)
    assert c["a"].correction == 2 and len(c) == 4 and list(c)[2:] == ["a", "b"]
    with pytest.raises(KeyError, match=r"'aa' was not calibrated. There are 'a'"):
        c["aa"]
    for text in (
        "",
        "{}",
        '{"version": 9}',
        '{"version": 1, "steps": 1, "values": {"a": {"x": 1}}}',
    ):
        with pytest.raises(ValueError, match="no calibration of `to_json`"):
            jsa.Calibration.from_json(text)
    with pytest.raises(FileNotFoundError):
        jsa.Calibration.load(tmp_path / "missing")


def test_it_lies_beside_a_checkpoint(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    c, state = some_calibration(), {"w": scaled(X, 4.0)}
    jsa.checkpoint.save(tmp_path / "step-1", state)
    c.save(tmp_path / "step-1")
    restored = jsa.checkpoint.restore(tmp_path / "step-1", like=state)
    np.testing.assert_array_equal(restored["w"].data, state["w"].data)
    assert jsa.Calibration.load(tmp_path / "step-1") == c


def test_differences_are_said():
    c = some_calibration()
    values = dict(c.values, new=c.values["a"])
    values["a"] = dataclasses.replace(c.values["a"], correction=0, log2_rms=2.0)
    del values["b"]
    state = {n: dataclasses.replace(m, scale=5, dtype="bfloat16") for n, m in c.state.items()}
    lines = c.diff(jsa.Calibration(values, state))
    text = "\n".join(lines)
    assert "a: correction 2^2, 0 in the other; RMS 2^-0.2, 2^2.0 in the other" in lines
    assert "b: not in the other" in lines and "new: only in the other" in lines
    assert "args[0]['w']: dtype float16, bfloat16 in the other; scale 2^3, 5 in the other" in lines
    assert len(lines) == 5 and "None" in text and not c.diff(c)


def test_the_calibration_of_another_step_is_refused():
    x, w = scaled(X), scaled(W)
    c = corrected_by({f"other/layer_{i}:dot_general": 3 for i in range(8)}, role="operand")
    with pytest.raises(
        ValueError, match=r"8 of its 8 values .* other/layer_0:dot_general"
    ) as error:
        jsa.scalify(product, calibration=c)(x, w)
    assert "3 more" in str(error.value)
    names = dict.fromkeys(names_of(product, X, W), 0)
    with pytest.warns(UserWarning, match=r"1 of its \d values are not in the step, as gone"):
        jsa.scalify(product, calibration=corrected_by(names | {"gone": 1}))(x, w)

    def two(x, w):
        y = x @ w
        return jax.nn.relu(y @ w)

    c = corrected_by({name: 0 for name in names_of(two, X, W) if name != "dot_general"})
    with pytest.warns(
        UserWarning, match=r"1 matmul operands .* dot_general at test_calibration.py:\d+"
    ):
        jsa.scalify(two, calibration=c)(x, w)


class Loader:
    """Gives batches, and is no iterator."""

    def __iter__(self):
        return iter([X])


def test_bad_arguments_are_refused():
    w, x = scaled(W), X

    def step(w, x):
        return w, x @ w

    with pytest.raises(TypeError, match="`calibration` must be a `jsa.Calibration`, got dict"):
        jsa.scalify(step, calibration={})
    with pytest.raises(TypeError, match="`step` must be callable"):
        jsa.calibrate(None, w, x)
    with pytest.raises(ValueError, match="`steps` must be at least 1, got 0"):
        jsa.calibrate(step, w, x, steps=0)
    with pytest.raises(TypeError, match="`steps` must be an int, got float"):
        jsa.calibrate(step, w, x, steps=2.0)
    with pytest.raises(ValueError, match="`batch` is an iterator of 1 batches, fewer than `steps`"):
        jsa.calibrate(step, w, iter([x]), steps=2)
    with pytest.raises(TypeError, match=r"got Loader: give `iter\(batch\)`"):
        jsa.calibrate(step, w, Loader())
    tied = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    pair = nnx.List([tied, nnx.Linear(8, 8, rngs=nnx.Rngs(1))])
    pair[1].kernel = tied.kernel
    pair = jsa.as_scaled_array(pair)
    for call in (jsa.Calibration({}, {}).freeze, lambda state: jsa.calibrate(step, state, x)):
        with pytest.raises(ValueError, match="NNX objects in `state` share a variable"):
            call(pair)
    jsa.Calibration({}, {}).freeze(jsa.asarray(nnx.Linear(8, 8, rngs=nnx.Rngs(0))))
    dropped = nnx.List([nnx.Dropout(0.1, rngs=nnx.Rngs(0)) for _ in range(2)])
    dropped[1].rngs = dropped[0].rngs  # a stream may be shared
    jsa.Calibration({}, {}).freeze(dropped)
    with pytest.raises(ValueError, match=r"args\[0\]\['w'\] is plain: `jsa.as_scaled_array"):
        jsa.calibrate(lambda s, x: s, {"w": w}, x, steps=1).freeze({"w": W})
    with pytest.raises(TypeError, match="`state` has no `ScaledArray`"):
        jsa.calibrate(step, W, x)
    with pytest.raises(ValueError, match="`step` must return the new state"):
        jsa.calibrate(lambda w, x: (x @ w["w"], w), {"w": w}, x, steps=1)


# Frozen state.


def test_freezing_gives_the_calibrated_scales():
    like = dict(role="state", dtype="float16")
    c = jsa.Calibration(
        {},
        {
            "args[0]['m']": Measured(**like, log2_rms=0.0, log2_max=2.0, scale=-5),
            "args[0]['rows']": Measured(**like, log2_rms=0.0, log2_max=2.0, scale=1),
            "args[0]['w']": Measured(**like, log2_rms=0.0, log2_max=13.5, scale=2),
        },
    )
    rows = scaled(X, [[2.0], [8.0]])
    state = {"m": scaled(np.zeros(3)), "rows": rows, "w": scaled([48000.0, 1.0]), "count": 3}
    frozen = c.freeze(state)
    assert frozen["m"].scale == 2.0**-5 and not frozen["m"].data.any()
    assert frozen["w"].scale == 4.0 and list(frozen["w"].data) == [12000, 0.25]
    assert frozen["rows"] is rows and frozen["count"] == 3
    np.testing.assert_array_equal(c.freeze(frozen)["w"].data, frozen["w"].data)
    large = dict(state, m=scaled([3e4, 0, 0], 2.0**5))
    with pytest.raises(ValueError, match=r"args\[0\]\['m'\] has grown beyond the scale 2\^-5"):
        c.freeze(large)
    with pytest.raises(
        ValueError, match=r"args\[0\]\['v'\] was not calibrated; .*'w'\] is missing"
    ):
        c.freeze({"m": state["m"], "rows": rows, "v": state["w"]})
    with pytest.raises(TypeError, match="outside of `jit`"):
        jax.jit(c.freeze)({"m": state["m"], "rows": rows, "w": state["w"]})


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_freezing_makes_no_second_moment_zero(dtype):
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    moment = jnp.asarray([1, smallest, -smallest, 0], dtype)
    measured = Measured(role="state", dtype=dtype, log2_rms=0.0, log2_max=0.0, scale=2)
    frozen = jsa.Calibration({}, {"args[0]": measured}).freeze(jsa.ScaledArray(moment, 1.0))
    assert frozen.scale == 4.0
    expected = [0.25, smallest, -smallest, 0]
    np.testing.assert_array_equal(np.asarray(frozen.data, np.float32), np.float32(expected))


@pytest.mark.full
def test_accumulated_gradients_are_frozen_with_the_scale_that_they_had():
    """They are zero after each second step, the last one that is calibrated, too."""
    optax = pytest.importorskip("optax")
    optimizer = jsa.optim.low_precision(optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2))

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2).astype(jnp.float32))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return jsa.optim.apply_updates(params, updates), opt_state

    w = jsa.as_scaled_array(jnp.ones((4, 4)), scale="rms", dtype=jnp.float16)
    state, x = (w, optimizer.init(w)), jnp.eye(4, dtype=jnp.float16)
    calibration = jsa.calibrate(step, state, x, steps=2)
    name = "args[0][1].acc_grads"
    assert calibration.state[name].scale is not None
    frozen = jax.jit(jsa.scalify(step, calibration=calibration))
    state = calibration.freeze(state)
    assert state[1].acc_grads.scale == 2.0 ** calibration.state[name].scale
    for _ in range(3):
        new = frozen(state, x)
        assert jax.tree.structure(new) == jax.tree.structure(state)
        state = new
    assert frozen._cache_size() == 1


def step_of_rows(state, batch):
    """Train a table and weights, and an average that has the scale that it had."""
    (params, mean), opt_state = state
    x, rows = batch

    def loss_of(params):
        return jnp.mean(jnp.square(params["table"][rows] @ params["w"] - x).astype(jnp.float32))

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = ADAM.update(grads, opt_state, params)
    mean = jsa.match_scales(mean * np.float16(0.5) + params["w"] * np.float16(0.5), mean)
    return ((jsa.optim.apply_updates(params, updates), mean), opt_state), loss


ADAM = jsa.optim.low_precision(optax.adam(1e-2))


def state_of_rows(axis):
    """A state of dynamic scales, of which the table may have some along an axis."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(8, 8)).astype(np.float16) for name in ("table", "w")}
    rows = None if axis is None else lambda path, leaf: axis if "table" in str(path) else None
    params = jsa.as_scaled_array(arrays, "rms", axis=rows)
    mean = jsa.as_scaled_array(np.zeros((8, 8), np.float16))
    return (params, mean), jsa.as_scaled_array(ADAM.init(arrays))


def leaves_of(tree):
    return [leaf for leaf in jsa.tree.leaves(tree) if isinstance(leaf, jsa.ScaledArray)]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("axis", [None, 0], ids=["scalar", "a row"])
@pytest.mark.parametrize("batch_scale", [None, "dynamic", "static"])
def test_what_is_frozen_stays_frozen(axis, batch_scale):
    """Beside a batch of dynamic scales, and beside weights with scales along an axis."""
    step, state = step_of_rows, state_of_rows(axis)
    x = jnp.ones((4, 8), jnp.float16)
    if batch_scale is not None:
        x = scaled(x) if batch_scale == "dynamic" else jsa.ScaledArray(x, 2.0)
    batch = x, jnp.arange(4)
    dynamic = jax.jit(jsa.scalify(step))
    for _ in range(2):
        state, _ = dynamic(state, batch)
    found = jsa.calibrate(step, state, batch, steps=2)
    frozen = found.freeze(state)
    update = jax.jit(jsa.scalify(step, calibration=found))
    new, _ = update(frozen, batch)
    for _ in range(2):
        new, _ = update(new, batch)
    assert update._cache_size() == 1
    jsa.tree.check_same_structure(new, frozen)
    is_static = [leaf.is_static for leaf in leaves_of(new)]
    assert sum(is_static) == len(is_static) - (axis is not None)
    # Without a calibration too: a leaf that is stored keeps its static scale.
    (params, _), _ = dynamic(frozen, batch)[0]
    assert params["w"].is_static


def test_a_leaf_that_is_always_zero_unfreezes_no_other():
    """As moments of a weight that is not used."""
    ((params, mean), _), batch = state_of_rows(None), (jnp.ones((4, 8), jnp.float16), jnp.arange(4))
    params["unused"] = scaled(np.ones(3, np.float16))
    state = (params, mean), jsa.as_scaled_array(ADAM.init(jsa.asarray(params)))
    for _ in range(2):
        state, _ = jsa.scalify(step_of_rows)(state, batch)
    found = jsa.calibrate(step_of_rows, state, batch, steps=2)
    update, state = jax.jit(jsa.scalify(step_of_rows, calibration=found)), found.freeze(state)
    for _ in range(4):
        state, _ = update(state, batch)
        dynamic = [leaf for leaf in leaves_of(state) if not leaf.is_static]
        assert len(dynamic) == 2 and not any(leaf.data.any() for leaf in dynamic)
    assert update._cache_size() == 2


def test_a_state_by_keyword_is_the_same_state():
    def step(state, batch):
        for _ in range(10):
            batch = batch @ state
        return state, batch

    w, x = 2 * jnp.ones((8, 8)), jnp.ones((1, 8), jnp.float16)
    found = jsa.calibrate(step, jsa.as_scaled_array(w, dtype=jnp.float16), x, steps=1)
    update = jax.jit(jsa.scalify(step, calibration=found))
    moved = jsa.as_scaled_array(w, scale=2.0**-3, dtype=jnp.float16)
    for state in (moved, found.freeze(moved)):
        (one, y), (two, z) = update(state, x), update(batch=x, state=state)
        assert one.is_static is two.is_static is state.is_static
        for a, b in ((one, two), (y, z)):
            np.testing.assert_array_equal(a.data, b.data)
            assert float(a.scale) == float(b.scale)
        assert float(z.data[0, 0]) == 8.0
    with pytest.raises(TypeError, match="missing a required argument|missing 1 required"):
        update(state=moved)


def test_a_plain_state_is_judged_by_its_values():
    w = jsa.as_scaled_array(2.0**-12 * jnp.ones((8, 8)), "rms", dtype=jnp.float16)
    found = jsa.calibrate(lambda w, x: (w, x @ w), w, jnp.ones((1, 8), jnp.float16), steps=1)
    assert not found.guard(w) and not found.guard(jsa.asarray(w))


@pytest.mark.parametrize("axis", [None, 0], ids=["scalar", "a row"])
def test_a_state_of_dynamic_scales_is_brought_to_the_calibrated_ones(axis):
    """A calibrated step computes what it does of a frozen state, and its results stay dynamic."""
    state, batch = state_of_rows(axis), (jnp.ones((4, 8), jnp.float16), jnp.arange(4))
    for _ in range(3):
        state, _ = jsa.scalify(step_of_rows)(state, batch)
    found = jsa.calibrate(step_of_rows, state, batch, steps=2)
    body = jsa.scalify(step_of_rows, calibration=found)
    frozen, moved = found.freeze(state), jsa.dynamic_rescale(state)
    assert any(
        a.scale != b.scale for a, b in zip(leaves_of(frozen), leaves_of(moved)) if a.is_static
    )
    for _ in range(3):  # not compiled: XLA need not round what it fuses
        (frozen, loss), (moved, same) = body(frozen, batch), body(moved, batch)
        assert float(jsa.asarray(loss)) == float(jsa.asarray(same))
        jsa.tree.check_same_structure(moved, state)
        for a, b in zip(leaves_of(frozen), leaves_of(moved), strict=True):
            assert not b.is_static
            np.testing.assert_array_equal(a.data, b.data)
            np.testing.assert_array_equal(a.scale, b.scale)
    update = jax.jit(body)
    for _ in range(2):
        state, _ = update(state, batch)
    assert update._cache_size() == 1
    many, _ = jax.jit(lambda s: jax.lax.scan(lambda s, _: body(s, batch), s, None, 3))(state)
    assert all(np.isfinite(leaf.data).all() for leaf in leaves_of(many))


def test_a_state_is_brought_to_the_calibrated_scales_at_the_ends():
    """Zero without a scale, what is not finite, float8 and scales far away; others stay."""

    def step(state):
        return jax.tree.map(lambda x: x * jnp.ones((), x.dtype), state)

    like = dict(role="state", log2_rms=0.0, log2_max=2.0)
    values = {
        "far": (np.float16, [1.0, -2.5], 2.0**40, -40),
        "inf": (np.float16, [np.inf, np.nan, -1.0], 4.0, 1),
        "narrow": (jnp.float8_e4m3fn, [1.5, -448.0], 1.0, -1),  # saturates
        "none": (np.float16, [1.0], 8.0, None),
        "wide": (np.float32, [1.5, 2.0**100], 2.0**20, -20),
        "zero": (np.float16, [0.0, 0.0], 0.0, -7),
    }
    known = {
        f"args[0]['{name}']": Measured(**like, dtype=jnp.dtype(dtype).name, scale=scale)
        for name, (dtype, _, _, scale) in values.items()
    }
    state = {
        name: jsa.ScaledArray(jnp.asarray(np.asarray(data, dtype)), jnp.float32(own))
        for name, (dtype, data, own, _) in values.items()
    }
    new = jsa.scalify(step, calibration=jsa.Calibration({}, known))(state)
    exponents = {name: float(np.log2(np.asarray(x.scale, np.float64))) for name, x in new.items()}
    assert exponents == {"far": -40, "inf": 1, "narrow": -1, "none": 3, "wide": -20, "zero": -7}
    data = {name: np.asarray(x.data, np.float64) for name, x in new.items()}
    np.testing.assert_array_equal(data["far"], [np.inf, -np.inf])  # as in plain float16
    np.testing.assert_array_equal(data["inf"], [np.inf, np.nan, -2.0])
    np.testing.assert_array_equal(data["narrow"], [3.0, -448.0])
    np.testing.assert_array_equal(data["none"], [1.0])
    np.testing.assert_array_equal(data["wide"], [1.5 * 2.0**40, np.inf])
    np.testing.assert_array_equal(data["zero"], [0.0, 0.0])


def test_a_new_state_without_scales_is_refused():
    state = {"w": jsa.as_scaled_array(jnp.ones((8, 3), jnp.float16))}
    step = lambda state, x: ({"w": jsa.stop_scaling(state["w"])}, x @ state["w"])  # noqa: E731
    with pytest.raises(ValueError, match="new state without a `ScaledArray`"):
        jsa.calibrate(step, state, jnp.ones((4, 8), jnp.float16))
