"""Loops, branches and rematerialisation: values, scales and structure."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.interpreter import registry
from jax_scalify.testing import check_scale_rule
from tests.helpers import replace_rule, value

STEPS, STACK = (4, 6), (3, 6, 6)


def scaled(seed, shape, scale=1.0, dtype=jnp.float16):
    data = np.random.default_rng(seed).normal(size=shape)
    return ScaledArray(jnp.asarray(data, dtype), jnp.float32(scale))


def _layers(body):
    def layers(h, w):
        return lax.scan(lambda h, w: (body(h, w), None), h, w)[0]

    return layers


def _tanh_layer(h, w):
    return jnp.tanh(h @ w)


def _fold(x):
    return lax.scan(lambda c, v: (c * 0.5 + v, c), x[0], x)


LOOPS = {
    "carry": (_fold, (STEPS,)),
    "reverse-unroll": (
        lambda x: lax.scan(lambda c, v: (c * 0.5 + v, c), x[0], x, reverse=True, unroll=2),
        (STEPS,),
    ),
    "carry-from-zeros": (
        lambda x: lax.scan(lambda c, v: (c + v, v * 2), jnp.zeros(6, x.dtype), x),
        (STEPS,),
    ),
    "carry-from-ones": (
        lambda x: lax.scan(lambda c, v: (c * v, c), jnp.ones(6, x.dtype), x)[0],
        (STEPS,),
    ),
    "carry-becomes-scaled-late": (
        lambda x: lax.scan(lambda c, v: ((c[1], c[2], v), c[0]), (jnp.zeros(6, x.dtype),) * 3, x),
        (STEPS,),
    ),
    "constant-results": (
        lambda x: lax.scan(lambda c, v: (c, (jnp.ones(6, x.dtype), v, 2)), 0.0, x)[1],
        (STEPS,),
    ),
    "counter": (lambda x: lax.scan(lambda c, v: (c + 1, v * c.astype(x.dtype)), 0, x), (STEPS,)),
    "captured": (lambda x, y: lax.scan(lambda c, v: (c + v * y, None), y, x)[0], (STEPS, (6,))),
    "layers": (_layers(_tanh_layer), ((2, 6), STACK)),
    "layers-remat": (_layers(jax.checkpoint(_tanh_layer)), ((2, 6), STACK)),
    "map": (lambda x: lax.map(jnp.tanh, x), (STEPS,)),
    "associative_scan": (lambda x: lax.associative_scan(jnp.add, x), (STEPS,)),
    "fori": (
        lambda x: lax.fori_loop(0, 4, lambda i, c: c + x * i.astype(x.dtype), jnp.zeros_like(x)),
        (STEPS,),
    ),
    "cond": (
        lambda x: lax.cond(x[0, 0] > 0, lambda c: c * 2, lambda c: jnp.ones_like(c), x),
        (STEPS,),
    ),
    "cond-no": (lambda x: lax.cond(x[0, 0] < 9e3, jnp.zeros_like, lambda c: c, x), (STEPS,)),
    "switch": (
        lambda x: lax.switch((x[0, 0] > 0) * 2, [lambda c: c * 2, lambda c: c * 0, lambda c: c], x),
        (STEPS,),
    ),
    "platform": (lambda x: lax.platform_dependent(x, cpu=jnp.negative, default=jnp.sin), (STEPS,)),
    "nested": (
        lambda x: lax.scan(
            lambda c, v: (
                lax.fori_loop(0, 3, lambda i, d: d * 1.5, c) + v,
                lax.cond(v[0] > 0, lambda u: u, lambda u: u * 4, v),
            ),
            jnp.zeros(6, x.dtype),
            x,
        ),
        (STEPS,),
    ),
    "remat": (jax.checkpoint(lambda x: jnp.tanh(x) * x), (STEPS,)),
    "no-steps": (lambda x: lax.scan(lambda c, v: (c + v, v), x[0] * 2, x[:0]), (STEPS,)),
}


@pytest.mark.sampled(32)
@pytest.mark.parametrize("way", ["jit", "vmap", "grad"])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_and_branches(name, way):
    fun, shapes = LOOPS[name]
    data = [scaled(i, s).data / 2 for i, s in enumerate(shapes)]
    check_scale_rule(
        fun, *data, ways=(way,), scales=(2.0**-8, 1.0, 2.0), static_scale=0.5, tolerance=2.0**-8
    )


def test_while_loop():
    def fun(x):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2 + 1), (0, x))

    data = scaled(0, STEPS).data
    check_scale_rule(fun, data, ways=("jit", "vmap"), scales=(2.0**-8, 1.0, 2.0**20, 0.0))


def test_the_condition_may_depend_on_scaled_values():
    def fun(x):
        return lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: c * 2, x)

    x = ScaledArray(jnp.ones(3, jnp.float16), jnp.float32(2.0))
    np.testing.assert_array_equal(value(jax.jit(jsa.scalify(fun))(x)), value(fun(jnp.full(3, 2.0))))


def test_stacked_layers_keep_their_own_scales():
    scales = jnp.float32(2.0) ** jnp.array([0, 20, -20])
    w = ScaledArray(scaled(0, STACK).data, scales)
    out = jax.jit(jsa.scalify(lambda w: lax.scan(lambda c, v: (c, v * 2), 0, w)[1]))(w)
    assert out.scale.shape == (3, 1, 1)
    np.testing.assert_array_equal(out.scale.ravel(), 2 * scales)
    np.testing.assert_array_equal(value(out), 2 * value(w))


def test_gradients_of_stacked_layers_have_a_scale_a_layer():
    def loss(w, h):
        return jnp.sum(_layers(_tanh_layer)(h, w).astype(jnp.float32) ** 2)

    grad = jax.jit(jsa.scalify(jax.grad(loss)))(scaled(0, STACK, 0.25), scaled(1, (2, 6)))
    assert grad.scale.shape == (3, 1, 1) and grad.dtype == jnp.float16


def test_static_scales_stay_static_through_a_loop():
    x = ScaledArray(jnp.ones(STEPS, jnp.float16), 4.0)
    carry, ys = jax.jit(jsa.scalify(lambda x: lax.scan(lambda c, v: (v, v * 2), x[0], x)))(x)
    assert (carry.scale, ys.scale) == (4.0, 8.0)
    out = jax.jit(
        jsa.scalify(lambda x: lax.cond(x[0, 0] > 0, lambda v: v * 2, lambda v: v + v, x))
    )(x)
    assert isinstance(out, ScaledArray)


def test_plain_carries_stay_plain():
    def fun(x):
        return lax.scan(lambda c, v: ((c[0] + 1, c[1] * 0.5), v), (0, jnp.float32(1)), x)[0]

    count, decay = jax.jit(jsa.scalify(fun))(scaled(0, STEPS))
    assert not isinstance(count, ScaledArray) and count == 4
    assert float(decay) == 0.0625


def test_a_body_is_interpreted_at_most_twice(monkeypatch):
    calls = []
    rule = registry._rules[lax.dot_general_p].rule
    counting = functools.wraps(rule)(lambda *a, **k: (calls.append(1), rule(*a, **k))[1])
    replace_rule(monkeypatch, lax.dot_general_p, counting)

    def loss(w, h):
        return jnp.sum(_layers(_tanh_layer)(h, w) ** 2)

    jax.jit(jsa.scalify(jax.grad(loss))).lower(scaled(0, STACK), scaled(1, (2, 6)))
    assert 3 <= len(calls) <= 6  # three matmuls, in two loops


def test_the_scale_of_a_carry_does_not_run_away():
    """The branch that is not taken grows: by the law of `select_n`, the scale with it."""

    def fun(x):
        return lax.fori_loop(0, 60, lambda i, h: jnp.where(h == 0, h * 10, h * 0.9), x)

    out = jax.jit(jsa.scalify(fun))(ScaledArray(jnp.ones(3), jnp.float32(4)))
    assert float(out.scale) == 4
    np.testing.assert_allclose(value(out), 4 * 0.9**60, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::jax_scalify.DequantisedWarning")
def test_refs_hold_plain_values():
    def fun(x):
        ref, flag = jax.new_ref(x), jax.new_ref(jnp.array([False]))
        ref[0] = ref[0] * 2 + 1
        flag[...] = x[:1] > 3
        return jnp.where(flag[...], ref[...], 0)

    x = ScaledArray(jnp.ones(3, jnp.float16), jnp.float32(4))
    for function in (jsa.scalify(fun), jax.jit(jsa.scalify(fun))):
        np.testing.assert_array_equal(value(function(x)), [9, 4, 4])


@pytest.mark.parametrize("condition", ["value", "count"])
def test_a_loop_that_stops_at_different_times_for_each_example(condition):
    def loop(x, n):
        def goes_on(carry):
            return carry[0] < 10 if condition == "value" else carry[1] < n

        return lax.while_loop(goes_on, lambda c: (c[0] * 2.0 + 0.5, c[1] + 1), (x, 0))

    x, n = ScaledArray(jnp.array([1.0, 3.0, 20.0]), jnp.float32(0.5)), jnp.array([2, 0, 5])
    got = jax.jit(jsa.scalify(jax.vmap(loop)))(x, n)
    expected = jax.vmap(loop)(x.to_array(), n)
    np.testing.assert_array_equal(value(got[0]), expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_steps_that_share_a_scale_stack_results_of_one(dtype):
    """What a step's scale depends on is the same for all: a `lax.map` over blocks of an array."""
    x = scaled(0, (6, 4), dtype=dtype)
    w = scaled(1, (4, 3), dtype=dtype)

    def blocks(x, w):
        return lax.map(lambda rows: jnp.tanh(rows @ w) + rows[..., :3], x.reshape(3, 2, 4))

    for function in (blocks, lambda x, w: jax.grad(lambda w: jnp.sum(blocks(x, w)))(w)):
        out = jax.jit(jsa.scalify(function))(x, w)
        assert out.scale.shape == ()
        want = function(*jsa.asarray((x, w), jnp.float32))
        np.testing.assert_allclose(jsa.asarray(out, jnp.float32), want, rtol=4e-3, atol=4e-3)

    # Of results that depend on the carry, each step has its own scale.
    def powers(x):
        return lax.scan(lambda c, row: (c * 4, c * row), jnp.sum(x), x)[1]

    out = jax.jit(jsa.scalify(powers))(x)
    assert out.scale.shape == (6, 1)
    np.testing.assert_allclose(
        jsa.asarray(out, jnp.float32), powers(jsa.asarray(x, jnp.float32)), rtol=4e-3
    )


@pytest.mark.parametrize("length", [0, 1])
def test_a_shared_scale_of_few_steps(length):
    x = ScaledArray(jnp.ones((length, 4)), jnp.float32(1))
    out = jax.jit(jsa.scalify(lambda x: lax.map(lambda row: row * 3, x)))(x)
    assert out.shape == (length, 4)
    np.testing.assert_array_equal(jsa.asarray(out), np.full((length, 4), 3.0))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("chosen_by", ["branch", "loop"])
def test_what_a_step_chooses_has_the_scale_of_what_was_chosen(chosen_by, kind):
    """Though neither scale depends on the step."""

    def choose(k, x, y):
        if chosen_by == "branch":
            return lax.cond(k % 2 == 0, lambda: x, lambda: y)
        return lax.while_loop(lambda s: s[0] < k % 2, lambda s: (s[0] + 1, y), (0, x))[1]

    def f(x, y):
        return lax.map(lambda k: choose(k, x, y), jnp.arange(4))

    x, y = jnp.arange(1.0, 5.0), jnp.arange(2.0, 6.0)
    scales = [2.0**8, 2.0**-8] if kind == "static" else jnp.float32([2.0**8, 2.0**-8])
    args = [ScaledArray(a / s, s) for a, s in zip((x, y), scales, strict=True)]
    np.testing.assert_array_equal(value(jax.jit(jsa.scalify(f))(*args)), f(x, y))


def test_what_an_untaken_branch_leaves_to_the_backward_pass_has_no_say():
    def loss(ws, x):
        def step(c, w):
            return lax.cond(jnp.sum(w) > 0, lambda: jnp.tanh(c @ w), lambda: c), None

        return jnp.sum(lax.scan(step, x, ws)[0])

    signs = np.float32([1, -1, 1, -1])[:, None, None]
    ws = jnp.asarray(signs * np.abs(np.random.default_rng(0).normal(size=(4, 6, 6))) / 4)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 6)), jnp.float32)
    gradient = jax.grad(jsa.fp8_matmuls(loss), (0, 1))
    args = [ScaledArray(a, jnp.float32(1)) for a in (ws, x)]
    found = jax.jit(jsa.scalify(gradient))(*args)
    for got, want in zip(found, gradient(ws, x), strict=True):
        np.testing.assert_allclose(value(got), want, rtol=1e-5, atol=1e-6)


def test_gradients_of_a_decoding_loop_keep_their_digits():
    """Each step attends to a cache, and adds to a residual stream: scales must not grow with it."""
    steps, dim, head = 10, 16, 8
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shapes = dict(q=(dim, head), k=(dim, head), v=(dim, head), o=(head, dim))
    params = {k: 0.25 * jax.random.normal(next(keys), s) for k, s in shapes.items()}
    start, target = (jax.random.normal(next(keys), s) for s in ((4, dim), (4, steps, dim)))

    def loss(params, x, y):
        def step(carry, t):
            cached_k, cached_v, x = carry
            h = jnp.tanh(x)
            cached_k = cached_k.at[:, t].set(h @ params["k"])
            cached_v = cached_v.at[:, t].set(h @ params["v"])
            scores = jnp.einsum("bk,btk->bt", h @ params["q"], cached_k)
            weights = jax.nn.softmax(jnp.where(jnp.arange(steps) <= t, scores, -1e4))
            x = x + jnp.einsum("bt,btk->bk", weights, cached_v) @ params["o"]
            return (cached_k, cached_v, x), x

        cache = jnp.zeros((4, steps, head), x.dtype)
        _, out = lax.scan(step, (cache, cache, x), jnp.arange(steps))
        return jnp.mean((out.swapaxes(0, 1) - y) ** 2)

    exact = jax.grad(loss)(params, start, target)
    half = jax.tree.map(lambda a: a.astype(jnp.float16), (params, start, target))
    scaled = jsa.as_scaled_array(half[0], scale="rms", static=True)
    got = jsa.asarray(jax.jit(jsa.scalify(jax.grad(loss)))(scaled, *half[1:]), jnp.float32)
    for name, want in exact.items():
        error = np.linalg.norm(got[name] - want) / np.linalg.norm(want)
        assert error < 0.03, (name, error)


@pytest.mark.parametrize("activation", [lambda z: 0.1 * z**3, jax.nn.gelu])
def test_weights_that_a_loop_updates_are_weights(activation):
    """A loop of training steps, whose model is a loop over layers, has the gradients of a step."""
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (3, 16, 16)) / 4
    batches = jax.random.normal(keys[1], (3, 8, 16)) / 2

    def gradient(w, x):
        def loss(w):
            h, _ = lax.scan(lambda h, w: (h + activation(h @ w), None), x, w)
            return jnp.mean(jnp.square(h).astype(jnp.float32))

        return jax.grad(loss)(w)

    def train(w, batches):
        def step(w, x):
            g = gradient(w, x)
            return (w - 1e-3 * g).astype(w.dtype), g

        return lax.scan(step, w, batches)[1]

    scaled = jsa.as_scaled_array(w, scale="rms", dtype=jnp.float16, static=True)
    batches = batches.astype(jnp.float16)
    got = jsa.asarray(jax.jit(jsa.scalify(train))(scaled, batches), jnp.float32)
    want = train(jsa.asarray(scaled, jnp.float32), batches.astype(jnp.float32))
    np.testing.assert_allclose(got, want, atol=0.02 * jnp.max(jnp.abs(want)))
