"""Scales and data of the stored state: range, long runs, what is not finite, and errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_low_precision import all_finite, make_step, problem, shapes, train

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.optim.scale_choice import reduced, saturate

optax = pytest.importorskip("optax")

low = jsa.optim.low_precision
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def adam_moments(opt, state, grads, params):
    _, state = jax.jit(opt.update)(grads, state, params)
    return state


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, E4M3, E5M2])
@pytest.mark.parametrize("size", [2.0**-45, 1.0, 2.0**50])
def test_where_the_data_lies(dtype, size):
    rng = np.random.default_rng(0)
    grads = jnp.asarray(rng.normal(size=4000) * size, jnp.float32)
    opt = low(optax.scale_by_adam(), dtype)
    state = adam_moments(opt, opt.init(grads), grads, grads)
    second = state.nu.root if jnp.dtype(dtype).itemsize == 1 else state.nu
    mu, nu = (np.asarray(x.data, np.float32) for x in (state.mu, second))
    top = min(float(jnp.finfo(dtype).max), 2.0**15)
    assert top / 4.1 < nu.max() <= top
    if jnp.dtype(dtype).itemsize > 1:
        assert 1 <= np.sqrt(np.mean(mu**2)) < 2
    else:
        assert top / 4.1 < abs(mu).max() <= top
    scale = np.asarray(state.mu.scale)
    assert np.log2(scale) % 1 == 0
    tolerance = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        mu * scale, 0.1 * np.asarray(grads), rtol=tolerance, atol=1e-3 * size
    )


def test_a_peak_does_not_leave_the_range():
    grads = jnp.zeros(2**20).at[3].set(1.0)
    opt = low(optax.scale_by_adam())
    mu = adam_moments(opt, opt.init(grads), grads, grads).mu
    assert jnp.isfinite(mu.data).all()
    np.testing.assert_allclose(mu.to_array(jnp.float32)[3], 0.1, rtol=1e-3)


def test_what_is_divided_by_is_not_rounded_to_zero():
    """An element whose second moment is 2**-60 of the largest must not take a huge step."""
    grads = jnp.float32([1.0, 2.0**-30, 2.0**-15, 0.0])
    opt = low(optax.adam(0.1, eps=1e-16))
    state = opt.init(grads)
    for _ in range(5):
        updates, state = jax.jit(opt.update)(grads, state, grads)
    assert (abs(updates) < 0.11).all()
    np.testing.assert_allclose(updates, [-0.1, 0.0, -0.1, 0.0], rtol=2e-3, atol=0.001)


def test_zero_and_not_finite():
    params = {"a": jnp.ones(4), "b": jnp.ones(4)}
    opt = low(optax.adam(0.1))
    state = opt.init(params)
    update = jax.jit(opt.update)
    grads = {"a": jnp.ones(4), "b": jnp.zeros(4)}
    _, state = update(grads, state, params)
    before = state[0]
    assert before.mu["b"].scale == 0 and before.nu["b"].scale == 0
    _, state = update({"a": jnp.full(4, jnp.nan), "b": jnp.zeros(4)}, state, params)
    assert jnp.isnan(state[0].mu["a"].data).all()
    assert state[0].mu["a"].scale == before.mu["a"].scale
    assert state[0].mu["b"].scale == 0 and (state[0].mu["b"].data == 0).all()
    inf = {"a": jnp.float32([jnp.inf, 1, 1, 1]), "b": jnp.zeros(4)}
    mu = update(inf, opt.init(params), params)[1][0].mu["a"]
    assert jnp.isinf(mu.data[0])


GRADIENTS = {
    "one": [[jnp.inf, 1e-3, -2e-3, 0.0], [1e-3, 1e-3, 1e-3, 1e-3]],
    "all": [[-jnp.inf] * 4, [jnp.inf] * 4],
    "beside zeros": [[jnp.inf, 0.0, 0.0, 0.0], [0.0] * 4],
    "nan": [[jnp.nan, 1e-3, -2e-3, 0.0], [0.0] * 4],
}
FAMILY = {
    "adam": lambda: optax.adam(1e-2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "lion": lambda: optax.lion(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
}


VARIANTS = list(itertools.product(["statistic", "gradient", "outside"], [jnp.float32, jnp.float16]))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", ["dynamic", "static", "axis"])
@pytest.mark.parametrize("name", FAMILY)
def test_what_is_not_finite_at_first_is_what_the_optimizer_has(name, kind):
    """Infinity at scale 0, which a fresh state has, would be nan for ever."""
    plain = FAMILY[name]()
    plain_update = jax.jit(plain.update)
    params = jnp.float32([[1.0, 2.0, -3.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    opts = [low(plain, d, policy="statistic" if p == "outside" else p) for p, d in VARIANTS]
    weights = jsa.as_scaled_array(params, "rms", axis=0 if kind == "axis" else None)
    scale = jnp.full((2, 1), 2.0**-10) if kind == "axis" else 2.0**-10
    scale = jnp.float32(scale) if kind == "dynamic" else scale
    weights = jsa.freeze_scales(weights) if kind == "static" else weights

    @jax.jit  # one program for all variants
    def update(grads, scaled, states):
        return [
            opt.update(grads, state, params)[1]
            if policy == "outside"
            else jsa.scalify(opt.update)(scaled, state, weights)[1]
            for (policy, _), opt, state in zip(VARIANTS, opts, states, strict=True)
        ]

    for first in GRADIENTS.values():
        want, states = plain.init(params), [opt.init(params) for opt in opts]
        for step, grads in enumerate((jnp.float32(first), jnp.full((2, 4), 1e-3))):
            want = plain_update(grads, want, params)[1]
            states = update(grads, ScaledArray(grads / scale, scale), states)
            for variant, state in zip(VARIANTS, states, strict=True):
                for got, leaf in zip(jsa.tree.leaves(state), jax.tree.leaves(want), strict=True):
                    got = np.asarray(jsa.asarray(got, jnp.float32))
                    for what in (np.isnan, np.isposinf, np.isneginf):
                        np.testing.assert_array_equal(what(got), what(leaf), str(variant))
                    if step == 0:  # then, beside what is not finite, the scale stays
                        np.testing.assert_allclose(got, leaf, 1e-2, 1e-9, err_msg=str(variant))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("scalified", [False, True])
def test_a_refused_batch_changes_no_bit(scalified):
    opt = low(optax.apply_if_finite(optax.adam(0.01), 5))
    params, x, y = problem()
    if scalified:
        params = jsa.as_scaled_array(params, "rms", dtype=jnp.float16)
    step = make_step(opt)
    step = jax.jit(jsa.scalify(step) if scalified else step)
    state = opt.init(params)
    for _ in range(3):
        params, state, _ = step(params, state, x, y)
    after, new, _ = step(params, state, x.at[0, 0].set(jnp.inf), y)
    assert new.total_notfinite == 1
    for got, want in zip(
        jax.tree.leaves((after, new.inner_state)),
        jax.tree.leaves((params, state.inner_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("policy", "octaves"), [("statistic", 10), ("gradient", 4)])
def test_months_of_sinking_gradients(policy, octaves):
    """3,000 steps with b2 = 0.999 while the gradients sink: finite, and right."""
    steps = 3000
    params = jnp.zeros(256, jnp.float32)
    optimizer = optax.scale_by_adam(b2=0.999, eps=1e-20)
    opt = low(optimizer, policy=policy)

    def gradient(step, params):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), params.shape)
        return noise + 0.3

    def run(opt):
        def body(carry, step):
            state, level = carry
            # The scale of the gradient sinks with its size, as it does where weights shrink.
            grads = gradient(step, params) * level
            updates, state = opt.update(grads, state, params)
            finite = jnp.stack([jnp.isfinite(updates).all(), jnp.isfinite(state.nu).all()])
            return (state, level * jnp.float32(2 ** (-octaves / steps))), (updates, finite)

        return lambda state, level: jax.lax.scan(body, (state, level), jnp.arange(steps))

    level = jsa.as_scaled_array(jnp.float32(1.0))
    (state, _), (updates, finite) = jax.jit(jsa.scalify(run(opt)))(opt.init(params), level)
    assert bool(jnp.all(jnp.asarray(jsa.asarray(finite))))
    want = jax.jit(run(optimizer))(optimizer.init(params), jnp.float32(1.0))[1][0]
    got, want = np.asarray(updates)[-500:], np.asarray(want)[-500:]
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
    assert all_finite(state)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{"first_moment_dtype": E4M3}, {"dtype": jnp.bfloat16}])
def test_other_dtypes_train(options):
    opt = low(optax.adamw(0.01, b2=0.95), **options)
    params = problem()[0]
    state = opt.init(params)
    assert state[0].mu["w"].dtype == options.get("first_moment_dtype", options.get("dtype"))
    assert state[0].nu["w"].dtype == options.get("dtype", jnp.float16)
    plain = optax.adamw(0.01, b2=0.95)
    want = train(plain, params, plain.init(params))[2]
    _, new, got = train(opt, params, state)
    assert shapes(new) == shapes(state)
    np.testing.assert_allclose(got, want, rtol=0.03)


def test_parameters_do_not_become_moments():
    opt = low(optax.contrib.schedule_free_adamw(0.1), first_moment_dtype=E4M3)
    for dtype in (jnp.float16, jnp.float32):
        state = opt.init({"w": jnp.full((2, 2), 0.1, dtype)})
        assert state.z["w"].dtype == dtype
        np.testing.assert_array_equal(state.z["w"], jnp.full((2, 2), 0.1, dtype))


def test_saturation():
    x = jnp.float32([1e6, -1e6, jnp.inf, jnp.nan, 1e-12, -1e-12, 0.0])
    got = np.asarray(saturate(x, jnp.float16), np.float32)
    np.testing.assert_array_equal(got, [65504, -65504, np.inf, np.nan, 0, 0, 0])
    got = np.asarray(saturate(x, jnp.float16, wide=True), np.float32)
    np.testing.assert_array_equal(got[4:], [2.0**-24, -(2.0**-24), 0])


def test_weights_saturate_and_round_once():
    add = jax.jit(jsa.scalify(jsa.optim.apply_updates))
    w = jsa.scaled_array(jnp.full(2, 60000.0, jnp.float16), 1.0)
    new = add(w, jsa.as_scaled_array(jnp.full(2, 10000.0)))
    assert jnp.isfinite(new.data).all() and new.dtype == jnp.float16
    params = {"w": jnp.ones(2, jnp.float16), "frozen": None}
    assert jsa.optim.apply_updates(params, {"w": jnp.ones(2), "frozen": None})["w"][0] == 2
    kept = jsa.optim.apply_updates(params, {"w": None, "frozen": None})
    assert kept["w"] is params["w"]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("scalified", [False, True])
def test_stochastic_rounding_of_weights(scalified):
    w = jsa.as_scaled_array(jnp.ones(10_000, jnp.float16))
    key = jax.random.key(0)

    def add(w, u):
        return jsa.optim.apply_updates({"w": w}, {"w": u}, key=key)["w"]

    add = jsa.scalify(add) if scalified else add
    new = add(w, jnp.full(10_000, 1e-4))
    np.testing.assert_allclose(np.mean(np.asarray(new, np.float64)), 1.0001, atol=2e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("b2", [0.99, 0.999])
def test_a_moving_average_keeps_its_mean(b2):
    """Rounded to nearest, 0.999 x in float16 is off by up to a third of the step."""
    params = jnp.zeros(512)
    opt = low(optax.scale_by_adam(b2=b2))

    def body(state, step):
        grads = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), params.shape)
        return opt.update(grads * 2.0 ** (-step / 500), state, params)[::-1][0], None

    def reference(nu, step):
        grads = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), params.shape)
        return b2 * nu + (1 - b2) * (grads * 2.0 ** (-step / 500)) ** 2, None

    state, _ = jax.lax.scan(body, opt.init(params), jnp.arange(2500))
    want, _ = jax.lax.scan(reference, params, jnp.arange(2500))
    ratio = state.nu.to_array(jnp.float32) / want
    assert float(jnp.mean(ratio)) == pytest.approx(1, abs=2e-3)


def test_errors():
    with pytest.raises(TypeError, match="`optimizer` must have `init` and `update`.*function"):
        low(optax.adam)
    with pytest.raises(ValueError, match="`policy` must be one of.*'rms'"):
        low(optax.adam(0.1), policy="rms")
    with pytest.raises(TypeError, match="`dtype` must be one of float32, .*int8"):
        low(optax.adam(0.1), jnp.int8)
    with pytest.raises(TypeError, match="`first_moment_dtype` must be one of.*float64"):
        low(optax.adam(0.1), first_moment_dtype=np.float64)
    with pytest.raises(TypeError, match="`second_moment_dtype`"):
        low(optax.adam(0.1), second_moment_dtype="no dtype")
    opt = low(optax.adam(0.1), policy="gradient")
    params = jnp.ones(2)
    with pytest.raises(ValueError, match='`policy="gradient"` needs .*scalify'):
        opt.update(params, opt.init(params), params)


def test_updates_of_an_immense_scale_do_not_wipe_out_float16_weights():
    # Sophia and mechanize divide by almost nothing.
    weights = ScaledArray(jnp.float16([1.0, -0.5]), jnp.float32(2.0**-3))
    updates = ScaledArray(jnp.float32([2.0**-64, 0.0]), jnp.float32(2.0**54))
    new = jax.jit(jsa.scalify(jsa.optim.apply_updates))(weights, updates)
    np.testing.assert_array_equal(
        jsa.asarray(new, jnp.float32), np.float32([0.125 + 2.0**-10, -0.0625])
    )
    assert new.dtype == jnp.float16 and float(new.scale) == 2.0**-4
    follows = functools.partial(jsa.optim.apply_updates, policy="gradient")
    assert float(jsa.scalify(follows)(weights, updates).scale) == 2.0**54


def test_frozen_weights_keep_their_scale():
    weights = ScaledArray(jnp.float16([4.0, -0.5]), 0.25)
    updates = ScaledArray(jnp.float32([1.0, 1.0]), 1.0)
    new = jax.jit(jsa.scalify(jsa.optim.apply_updates))(weights, updates)
    assert new.scale == 0.25 and new.is_static
    np.testing.assert_array_equal(jsa.asarray(new, jnp.float32), [2.0, 0.875])


def test_unknown_options_for_weights():
    for name in ("policy", "rounding"):
        with pytest.raises(ValueError, match=f"`{name}` must be one of"):
            jsa.optim.apply_updates(jnp.ones(2), jnp.ones(2), **{name: "none"})


def test_updates_that_do_not_fit():
    params = {"w": jnp.ones(1)}
    with pytest.raises(ValueError, match="`updates` must have the structure of `params`"):
        jsa.optim.apply_updates(params, {"v": jnp.ones(1)})
    with pytest.raises(ValueError, match=r"`updates` must have the shapes.* got \(2,\) for \(1,\)"):
        jsa.optim.apply_updates(params, {"w": jnp.ones(2)})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["statistic", "gradient"])
@pytest.mark.parametrize("scalified", [False, True])
def test_small_updates_count_on_average_without_a_key(scalified, policy):
    updates = jnp.asarray(np.random.default_rng(0).uniform(0.5e-4, 1.5e-4, 10_000), jnp.float32)
    w = jsa.as_scaled_array(jnp.ones(10_000, jnp.float16))
    for rounding, mean in (("stochastic", 1.0001), ("nearest", 1.0)):
        add = functools.partial(jsa.optim.apply_updates, policy=policy, rounding=rounding)
        new = jax.jit(jsa.scalify(add) if scalified else add)(w, updates)
        np.testing.assert_allclose(np.mean(np.asarray(new, np.float64)), mean, atol=2e-5)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("policy", ["statistic", "gradient"])
@pytest.mark.parametrize("factor", [jnp.inf, jnp.nan])
def test_a_refused_step_leaves_every_bit(policy, factor):
    opt = jsa.optim.low_precision(optax.apply_if_finite(optax.adamw(1e-2), 5), policy=policy)
    rng = np.random.default_rng(0)
    weights, x = rng.normal(size=(2, 16, 16)).astype(np.float32)

    @jax.jit
    @jsa.scalify
    def step(w, state, factor):
        grads = jax.grad(lambda w: jnp.square(x @ w).mean() * factor)(w.astype(jnp.float32))
        updates, state = opt.update(grads, state, w)
        return jsa.optim.apply_updates(w, updates, policy=policy), state

    state = jsa.as_scaled_array(weights, "rms", dtype=jnp.float16), opt.init(weights)
    for _ in range(3):
        state = step(*state, jnp.float32(1))
    refused = step(*state, jnp.float32(factor))
    for old, new in ((state[0], refused[0]), (state[1].inner_state, refused[1].inner_state)):
        jax.tree.map(np.testing.assert_array_equal, old, new)
    assert refused[1].total_notfinite == 1


@pytest.mark.parametrize(("platform", "reductions"), [("cuda", 1), ("tpu", 1), ("cpu", 2)])
def test_what_a_scale_is_chosen_by_is_one_reduction(platform, reductions):
    """Devices that share a leaf exchange both numbers at once."""
    x, old = jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    lowered = jax.jit(reduced).trace(x, old).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("stablehlo.reduce(") == reductions


def test_sums_of_many_squares():
    """More than 2**24 of them: added up in a row in float32 they would stay there."""
    largest, total = jax.jit(reduced)(jnp.ones(2**25, jnp.float32), jnp.float32(1))
    assert largest == 1 and total == 2**25
