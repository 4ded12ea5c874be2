"""A training run with frozen scales, and what its guard says of it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.numerics.guarding import Drift, judge
from jax_scalify.numerics.measuring import Measured

REDUCTIONS = ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "cond", "while")


def measured(**fields):
    known = dict(role="operand", dtype="float8_e4m3fn", log2_rms=0.0, log2_max=3.0)
    return Measured(**known | fields)


def found(log2_rms=0.0, log2_max=-math.inf, underflow=0.0, overflow=0.0, nonfinite=0.0):
    return dict(
        log2_rms=log2_rms,
        log2_max=log2_max,
        underflow=underflow,
        overflow=overflow,
        nonfinite=nonfinite,
    )


@pytest.mark.parametrize(
    "before, now, kind",
    [
        ({}, found(2.9), None),  # outside of the band, but not by much more than it was
        ({}, found(3.1), "grown"),
        ({}, found(-3.1), "shrunk"),
        ({"log2_rms": 2.0}, found(4.9), None),
        ({"dtype": "float16"}, found(5.9), None),  # has moved, and is still in its band
        ({"dtype": "float16"}, found(-6.6), "shrunk"),
        ({"dtype": "bfloat16"}, found(50.0, overflow=0.1), None),
        ({"dtype": "float32"}, found(nonfinite=0.5), "nonfinite"),
        ({"nonfinite": 0.5}, found(nonfinite=0.5), None),
        ({}, found(overflow=0.0009), None),
        ({}, found(overflow=0.0011), "saturates"),
        ({"overflow": 0.01}, found(overflow=0.015), None),
        ({"underflow": 0.02}, found(underflow=0.26), None),
        ({"underflow": 0.02}, found(underflow=0.28), "underflows"),
        ({"role": "gradient"}, found(underflow=0.5), None),
        ({"role": "state", "dtype": "float16"}, found(-8.0, 3.0, underflow=0.5), None),
        ({"role": "state", "dtype": "float16"}, found(8.0, 15.5), "grown"),
        ({}, found(-math.inf), "zero"),
        ({"log2_rms": -math.inf}, found(-math.inf), None),
        ({"log2_rms": -math.inf}, found(1.0), None),
        ({}, found(*[math.nan] * 5), None),  # in a branch that was not taken
    ],
)
def test_what_leaves_its_band(before, now, kind):
    verdict = judge({"w": measured(**before), "x": measured()}, {"w": now, "new": found(9.0)})
    assert [drift.kind for drift in verdict] == ([kind] if kind else [])
    assert bool(verdict) == (kind not in (None, "zero", "nonfinite"))


def test_a_verdict_says_why_the_worst_first():
    now = {"a": found(4.0), "b": found(nonfinite=0.25), "c": found(overflow=0.5), "d": found()}
    verdict = judge(dict.fromkeys("abcd", measured()), now)
    lines = str(verdict).splitlines()
    assert lines[0].startswith("b is nan or infinite in 25.0% of its elements: go back to a state")
    assert "c saturates in 50.0% of its elements, was 0.0%: calibrate again" in lines
    assert "a has grown by 4.0 octaves: calibrate again" in lines
    assert len(verdict) == len(lines) == 3
    assert verdict.drifts[0] == Drift("b", "nonfinite", 0.0, 0.25)
    assert str(judge({}, {})) == "All tensors are in the bands that they were calibrated for."


# A network whose state is float16 and whose matmuls are FP8.


def loss_fn(params, x, y):
    with jax.named_scope("hidden"):
        h = jnp.tanh(jsa.nn.matmul(x, params["a"]))
    with jax.named_scope("out"):
        return jnp.mean(jnp.square(jsa.nn.matmul(h, params["b"]) - y).astype(jnp.float32))


def step(state, batch):
    x, y, rate = batch
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], x, y)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    params = jsa.optim.apply_updates(
        state["params"], jax.tree.map(lambda m: -rate * m.astype(jnp.float32), mu)
    )
    new = {"params": params, "mu": jsa.match_scales(mu, state["mu"]), "count": state["count"] + 1}
    return new, loss


def first_state():
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(8, 16)) / 3, "b": rng.normal(size=(16, 2)) / 4}
    params = jax.tree.map(jnp.float32, params)
    params = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
    mu = jax.tree.map(jnp.zeros_like, jsa.asarray(params))
    return {"params": params, "mu": jsa.as_scaled_array(mu), "count": jnp.int32(0)}


def batch_of(number, rate=0.1):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(32, 8)).astype(np.float16)
    return x, np.stack([x[:, 0] * x[:, 1], np.sin(x[:, 2])], 1).astype(np.float16), np.float32(rate)


@pytest.fixture(scope="module")
def calibrated():
    """The state after some dynamic steps, and the calibration."""
    dynamic, state = jax.jit(jsa.scalify(step)), first_state()
    for i in range(5):
        state, _ = dynamic(state, batch_of(i))
    return state, jsa.calibrate(step, state, map(batch_of, range(9, 11)), steps=2)


def test_matmul_operands_of_both_passes_gradients_and_state_are_measured(calibrated):
    state, c = calibrated
    roles = {name: m.role for name, m in c.values.items()}
    operands = [name for name, role in roles.items() if role == "operand"]
    formats = {name: c[name].dtype for name in operands}
    assert sorted(formats.values()) == ["float8_e4m3fn"] * 4 + ["float8_e5m2"] * 2
    assert all(name.startswith("backward/") for name, d in formats.items() if d == "float8_e5m2")
    assert {name.split(":")[0].split("/")[-1] for name in operands} == {"hidden", "out"}
    assert 2 <= list(roles.values()).count("gradient") <= 3
    leaves = [f"args[0]['{tree}']['{leaf}']" for tree in ("mu", "params") for leaf in "ab"]
    assert list(c.state) == leaves and {m.dtype for m in c.state.values()} == {"float16"}
    assert all(m.line.startswith("test_guard.py:") for m in c.values.values())
    weights = np.asarray(state["params"]["a"].data, np.float64)
    rms = c["args[0]['params']['a']"].log2_rms
    assert rms == pytest.approx(np.log2(np.sqrt(np.mean(weights**2))), abs=0.5)


def test_no_statistic_is_left_in_the_frozen_step(calibrated):
    state, c = calibrated
    frozen = c.freeze(state)
    scales = [x.scale for x in jsa.tree.leaves(frozen) if isinstance(x, jsa.ScaledArray)]
    assert all(type(scale) is float and scale for scale in scales)
    closed = jax.make_jaxpr(jsa.scalify(step, calibration=c))(frozen, batch_of(0))
    names = [eqn.primitive.name for eqn in all_equations(closed.jaxpr)]
    assert not set(names) & set(REDUCTIONS)
    plain = jax.make_jaxpr(step)(jsa.asarray(state), batch_of(0))
    sums = [eqn.primitive.name for eqn in all_equations(plain.jaxpr)].count("reduce_sum")
    assert names.count("reduce_sum") <= sums


def train(state, tracked, c, numbers, rate):
    """Train on, and return what the guard says every fifth step."""
    verdicts = []
    for i in numbers:
        state, record = (out := tracked(state, batch_of(i, rate)))[0][0], out[1]
        if record is not None:
            verdicts.append(c.guard(state, record))
    return state, verdicts


def test_a_jump_of_the_learning_rate_makes_the_guard_speak(calibrated):
    state, c = calibrated
    calibrated_step = jax.jit(jsa.scalify(step, calibration=c))
    tracked = jsa.numerics.track(calibrated_step, c.watches, every=5)
    state, verdicts = train(c.freeze(state), tracked, c, range(30), 0.1)
    assert len(verdicts) == 6 and not any(map(len, verdicts))
    assert calibrated_step._cache_size() == 1  # the state keeps its structure
    state, verdicts = train(state, tracked, c, range(30, 45), 30.0)
    assert verdicts[0]
    spoken = verdicts[0]
    assert all(drift.name in c.state or drift.name in c.values for drift in spoken)


def test_state_with_dynamic_scales_is_judged_at_those_that_it_would_be_frozen_with():
    def step(state, x):
        return {"v": state["v"] + 0 * jnp.sum(x)}, x

    data = jnp.full((8, 8), 2.0**14, jnp.float16)  # near the top, where `freeze` leaves no state
    state, x = {"v": jsa.scaled_array(data, 1.0)}, jnp.ones(3, jnp.float16)
    c = jsa.calibrate(step, state, x, steps=1)
    assert c.freeze(state)["v"].scale > 2.0**6
    for now in (state, c.freeze(state), {"v": jsa.scaled_array(data / 256, 256.0)}):
        assert not c.guard(now)
    for scale in (2.0**12, 2.0**-30):  # as small numbers as none of the data is
        assert c.guard({"v": jsa.scaled_array(data, scale)})


def test_what_cannot_be_guarded_is_said(calibrated):
    state, c = calibrated
    assert not c.guard(state) and not c.guard()
    with pytest.raises(TypeError, match="`metrics` must be a Record, got dict"):
        c.guard(state, {})
    with pytest.raises(ValueError, match="Nothing of `state` and `metrics` was calibrated"):
        c.guard({"other": state})
    broken = dict(
        state,
        params=jsa.tree.map(
            lambda x: dataclasses.replace(x, data=x.data * jnp.nan), state["params"]
        ),
    )
    verdict = c.guard(broken)
    assert not verdict and [drift.kind for drift in verdict] == ["nonfinite"] * 2


def test_the_chain_that_is_wrong_without_a_sign_shows_one():
    def chain(w, x):
        for _ in range(12):
            x = jsa.nn.matmul(x, w)
        return w, x

    def weights(gain):
        w = gain * np.random.default_rng(0).normal(size=(16, 16)) / 4
        return jsa.as_scaled_array(jnp.float32(w), scale="rms", dtype=jnp.float16)

    x = np.ones((1, 16), np.float16)
    c = jsa.calibrate(chain, weights(1.0), x, steps=1)
    tracked = jsa.numerics.track(jax.jit(jsa.scalify(chain, calibration=c)), c.watches, every=1)
    records = [tracked(weights(gain), x)[1] for gain in (1.0, 1.9)]
    verdicts = [c.guard(metrics=record) for record in records]
    assert not verdicts[0] and verdicts[1]
    assert "saturates" in {drift.kind for drift in verdicts[1]}
    assert np.max(records[0].overflow) == 0 and np.max(records[1].overflow) > 0.01
