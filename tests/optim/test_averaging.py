"""Averages of parameters in few bits, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.optim import EmaState, ema, incremental_update

optax = pytest.importorskip("optax")

F16 = jnp.float16


def value(x):
    return np.asarray(jsa.asarray(x, jnp.float32), np.float64)


def averages(decay, values):
    """The unbiased averages of a series, in float64."""
    total, found = np.zeros_like(values[0], np.float64), []
    for t, x in enumerate(values):
        total = decay * total + (1 - decay) * np.asarray(x, np.float64)
        found.append(total / (1 - decay ** (t + 1)))
    return found


def moved(update, state, x, steps, *, scalified=False):
    """The state after some steps with the same value."""

    def run(state, x):
        return lax.scan(lambda s, _: (update(x, s)[1], None), state, None, length=steps)[0]

    return jax.jit(jsa.scalify(run) if scalified else run)(state, x)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("dtype", "scalified"),
    [("float16", False), ("float16", True), ("bfloat16", False), ("float8_e4m3fn", True)],
)
def test_small_steps_count_at_any_decay(dtype, scalified):
    """From 1 to 2 with 1,000 steps: optax's average in float16 stands still from 0.999 on."""
    old = jsa.as_scaled_array(jnp.linspace(1, 1.5, 2000), dtype=dtype, scale=1.0)
    new = jsa.as_scaled_array(2 * jsa.asarray(old, jnp.float32), dtype=dtype, scale=1.0)
    for decay in (0.9, 0.9999):
        update, state = ema(decay, dtype).update, EmaState(jnp.int32(10**6), old)
        state = moved(update, state, new, 1000, scalified=scalified)
        share = value(state.ema) / value(old) - 1
        right = 1 - decay**1000
        spacing = float(jnp.finfo(dtype).eps)
        noise = np.sqrt(spacing * min(1, 2 * right) / 2)
        assert abs(share.mean() - right) < 4 * noise / np.sqrt(2000) + 0.02 * spacing
        assert share.std() < 1.2 * noise + spacing
        assert state.ema.dtype == dtype and state.count == 10**6 + 1000


def test_that_of_optax_stands_still():
    """What docs/optimizers.md says of it: float16 has no number between."""
    old, new = jnp.ones(8, F16), jnp.full(8, 2, F16)
    out = moved(lambda x, s: (None, optax.incremental_update(x, s, 1e-4)), old, new, 1000)
    assert value(out).max() - 1 < 1e-3  # 0.0952 is right


@pytest.mark.sampled(4)
@pytest.mark.optimized  # what XLA may reassociate and contract
@pytest.mark.parametrize("scalified", [False, True])
def test_steps_that_float32_loses(scalified):
    """Of 1e-7 and 3e-8: float32 makes 1.19e-7 and 0 of them, to nearest, beside 1."""
    for step, dtype, noise in ((1e-7, F16, 0.035), (3e-8, jnp.float32, 0.002)):
        old = jsa.as_scaled_array(jnp.ones(8000), scale=1.0, dtype=dtype)
        new = jsa.as_scaled_array(jnp.full(8000, 2.0), scale=1.0, dtype=dtype)
        state = EmaState(jnp.int32(10**6), old)
        update = ema(1 - step, dtype, debias=False).update
        state = moved(update, state, new, 1000, scalified=scalified)
        share = (value(state.ema) - 1).mean() / step / 1000
        assert abs(share - 1) < 4 * noise, (step, dtype)


def test_it_is_the_average_in_float64_and_that_of_optax():
    values = [np.random.default_rng(i).normal(size=(3, 4)).astype(np.float32) for i in range(12)]
    for decay, debias in ((0.5, True), (0.999, True), (0.999, False), (0, True)):
        theirs = optax.ema(decay, debias)
        expected, other = averages(decay, values), theirs.init(values[0])
        for dtype, tolerance in ((jnp.float32, 2e-6), (F16, 6e-3)):
            average = ema(decay, dtype, debias=debias)
            update, state = jax.jit(average.update), average.init(values[0])
            for t, x in enumerate(values):
                out, state = update(x, state)
                right = expected[t] * (1 if debias else 1 - decay ** (t + 1))
                scale = np.abs(right).max()
                np.testing.assert_allclose(out, right, rtol=0, atol=tolerance * scale)
                np.testing.assert_allclose(value(state.ema), out, rtol=0, atol=tolerance * scale)
        for x in values:
            reference, other = theirs.update(x, other)
        np.testing.assert_allclose(out, reference, rtol=0, atol=7e-3 * scale)


def test_the_first_value_is_kept_exactly():
    """Zeros, subnormals, the largest number, infinities, nan; scales of 2^±40; any leaf."""
    patterns = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = patterns[np.isfinite(patterns)]
    params = {
        "all": ScaledArray(jnp.asarray(finite), jnp.float32(2.0**40)),
        "large": ScaledArray(jnp.asarray(finite), 2.0**-40),
        "zero": ScaledArray(jnp.zeros(3, F16), jnp.float32(0)),
        "rows": ScaledArray(jnp.ones((2, 3), F16), jnp.float32([[2.0**40], [2.0**-40]])),
        "leading": ScaledArray(jnp.ones((2, 3), F16), jnp.float32([2.0**40, 2.0**-40])),
        "inf": ScaledArray(jnp.asarray([1, np.inf, -np.inf, np.nan], F16), jnp.float32(4)),
        "empty": jnp.zeros((0, 3), F16),
        "rank 0": jnp.float16(0.3),
        "wide": jnp.float32(0.1),
        "integers": jnp.arange(3),
        "number": 3,
        "none": None,
    }
    average = ema(0.9999)
    for call in (jax.jit(average.update), jax.jit(jsa.scalify(average.update))):
        out, state = call(params, average.init(params))
        assert state.ema["none"] is None and int(state.ema["number"]) == 3
        np.testing.assert_array_equal(state.ema["integers"], params["integers"])
        for name in ("large", "zero", "rows", "leading", "inf", "empty", "rank 0", "wide"):
            assert out[name].dtype == params[name].dtype, name
            np.testing.assert_array_equal(value(out[name]), value(params[name]), name)
        for name in ("zero", "rows", "leading", "inf", "empty", "rank 0"):
            assert state.ema[name].dtype == F16
            np.testing.assert_array_equal(value(state.ema[name]), value(params[name]), name)
        # All of float16 in one leaf: below RMS 1 the subnormal ones lose their last digits.
        scale = float(state.ema["all"].scale)
        np.testing.assert_allclose(
            value(state.ema["all"]), value(params["all"]), rtol=0, atol=scale * 2.0**-24
        )
    np.testing.assert_array_equal(state.ema["rows"].scale, params["rows"].scale)


def test_what_is_not_finite_stays_so():
    """And the largest, smallest and zero do not move where nothing changes."""
    info = np.finfo(np.float32)
    old = np.float32([np.inf, -np.inf, np.nan, 1, 1, info.max, -info.max, info.tiny, 0, -0.0])
    new = np.float32([np.inf, 1, 1, np.inf, np.nan, info.max, -info.max, info.tiny, 0, -0.0])
    for call in (incremental_update, jsa.scalify(incremental_update)):
        step = jax.jit(lambda new, old, i, call=call: call(new, old, 0.3, key=jax.random.key(i)))
        for i in range(20):
            out = value(step(new, old, i))
            assert not np.isfinite(out[:5]).any()
            np.testing.assert_array_equal(out[5:], old[5:])


def test_static_scales_stay_and_it_compiles_once():
    average = ema(0.9999)
    params = {"w": ScaledArray(jnp.linspace(-2, 2, 50, dtype=F16), 0.25)}
    step = jax.jit(jsa.scalify(average.update))
    _, state = step(params, average.init(params))
    state = jsa.freeze_scales(state)
    _, first = step(params, state)
    sizes = step._cache_size()
    state = first
    for _ in range(3):
        out, state = step(params, state)
    assert step._cache_size() == sizes
    jsa.tree.check_same_structure(state, first)
    jsa.tree.check_same_structure(out, params)
    np.testing.assert_allclose(value(out["w"]), value(params["w"]), atol=2e-3 * 0.5)


def test_the_rounding_is_another_one_at_each_count_and_place():
    average = ema(0.9999)
    old, new = jnp.ones(500, F16), jnp.full(500, 3, F16)
    update = jax.jit(average.update)
    rows = []
    for count in (10**6, 10**6 + 1, 10**6):
        state = EmaState(jnp.int32(count), jsa.as_scaled_array(old))
        rows.append(value(update(new, state)[1].ema) > 1)
    assert 0.1 < rows[0].mean() < 0.3 and (rows[0] != rows[1]).any()
    np.testing.assert_array_equal(rows[0], rows[2])
    # Many models at once, and a chain of optax.
    many = jax.jit(jax.vmap(average.update))(
        jnp.stack([new] * 2), jax.vmap(average.init)(jnp.ones((2, 500)))
    )
    assert many[1].ema.shape == (2, 500)
    chain = optax.chain(optax.scale(2.0), average)
    np.testing.assert_array_equal(jax.jit(chain.update)(old, chain.init(old))[0], 2 * old)


def test_on_a_mesh_of_explicit_axes():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = jax.device_put(jnp.ones((4, 2), F16), sharding)
    average = ema(0.99)
    with jax.set_mesh(mesh):
        out, _ = jax.jit(average.update)(params, average.init(params))
    np.testing.assert_array_equal(out, params)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scalified", [False, True])
def test_incremental_update(scalified):
    def step(new, old, i, size):
        key = jax.random.fold_in(jax.random.key(0), i)
        return incremental_update(new, old, size, key=key)

    step = jax.jit(jsa.scalify(step) if scalified else step)
    old = jsa.as_scaled_array({"w": jnp.ones(1000), "n": 2}, dtype=F16)
    new = jsa.as_scaled_array({"w": jnp.full(1000, 2.0), "n": 5}, scale="rms", dtype=F16)
    target = old
    for i in range(50):
        target = step(new, target, i, 1e-3)
    np.testing.assert_allclose(value(target["w"]).mean() - 1, 1 - 0.999**50, rtol=0.1)
    assert target["n"] == 5 and target["w"].dtype == F16
    np.testing.assert_array_equal(value(step(new, old, 0, 1.0)["w"]), 2)
    np.testing.assert_array_equal(value(step(new, old, 0, 0.0)["w"]), 1)


def test_snapshots_have_equal_weights():
    """Polyak's average and SWA: 1 / (n + 1)."""
    rng = np.random.default_rng(0)
    snapshots = [rng.normal(size=2000).astype(np.float16) for _ in range(20)]
    average = jnp.zeros(2000, F16)
    for n, params in enumerate(snapshots):
        average = jax.jit(incremental_update)(params, average, 1 / (n + 1))
    right = np.mean(np.float64(snapshots), 0)
    np.testing.assert_allclose(np.float64(average), right, atol=3e-3)
    assert abs(np.mean(np.float64(average) - right)) < 2e-5


def test_lookahead_in_float16():
    optimizer = jsa.optim.low_precision(
        optax.lookahead(optax.sgd(0.1), sync_period=5, slow_step_size=0.5)
    )
    params = jsa.as_scaled_array(jnp.linspace(1, 2, 64), scale="rms", dtype=F16)
    params = optax.LookaheadParams(params, params)
    state = optimizer.init(params)

    @jax.jit
    @jsa.scalify
    def step(params, state):
        grads = jax.grad(lambda p: jnp.sum(jnp.square(p)))(params.fast)
        updates, state = optimizer.update(grads, state, params)
        return jsa.optim.apply_updates(params, updates), state

    for _ in range(5):
        params, state = step(params, state)
    right = np.linspace(1, 2, 64) * (0.5 + 0.5 * 0.8**5)
    np.testing.assert_allclose(value(params.slow), right, rtol=2e-3)


def test_errors():
    for decay in (1, -0.1, 1.5, "0.9"):
        with pytest.raises(ValueError, match="`decay` must be a number from 0 to less than 1"):
            ema(decay)
    with pytest.raises(TypeError, match="`dtype` must be one of float32"):
        ema(0.9, jnp.int8)
    average = ema(0.9)
    with pytest.raises(TypeError, match=r"`params\['w'\]` is complex64: only real"):
        average.init({"w": jnp.ones(2) + 1j})
    state = average.init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="`updates` must have the structure of `state.ema`"):
        average.update({"v": jnp.ones(2)}, state)
    with pytest.raises(ValueError, match=r"got \(3,\) for \(2,\)"):
        average.update({"w": jnp.ones(3)}, state)
    with pytest.raises(ValueError, match=r"`step_size` must be of rank 0, got the shape \(2,\)"):
        incremental_update(jnp.ones(2), jnp.ones(2), jnp.ones(2))
