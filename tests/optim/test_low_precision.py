"""Optimizer state in few bits, against the same optimizer in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray

optax = pytest.importorskip("optax")

E4M3 = jnp.float8_e4m3fn
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.02, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.01),
    "amsgrad": lambda: optax.amsgrad(0.01),
    "adabelief": lambda: optax.adabelief(0.01),
    "adamax": lambda: optax.adamax(0.01),
    "nadam": lambda: optax.nadam(0.01),
    "rmsprop": lambda: optax.rmsprop(0.01),
    "adagrad": lambda: optax.adagrad(0.05),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
    "lion": lambda: optax.lion(0.003),
    "lamb": lambda: optax.lamb(0.01),
    "yogi": lambda: optax.yogi(0.01),
    "prodigy": lambda: optax.contrib.prodigy(),
    "muon": lambda: optax.contrib.muon(0.01),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.02, warmup_steps=5),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.02, 5, 60), eps=1e-8),
    ),
    "masked": lambda: optax.masked(optax.adam(0.01), {"w": True, "b": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.01), "s": optax.sgd(0.05, 0.9)}, {"w": "a", "b": "s"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.01),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.02), 4),
}
STEPS = 60


def problem():
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(6, 4)) * 0.5, jnp.float32),
        "b": jnp.zeros(4, jnp.float32),
    }
    x = jnp.asarray(rng.normal(size=(64, 6)), jnp.float32)
    target = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
    return params, x, jnp.tanh(x @ target) + 0.5


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def make_step(opt):
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = opt.update(grads, state, params)
        return jsa.optim.apply_updates(params, updates), state, loss

    return step


def train(opt, params, state, steps=STEPS, scalified=False, **options):
    _, x, y = problem()
    step = make_step(opt)
    step = jax.jit(jsa.scalify(step) if scalified else step, **options)
    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
    return params, state, losses


@functools.cache
def reference(name):
    opt = OPTIMIZERS[name]()
    params = problem()[0]
    return train(opt, params, opt.init(params))[2]


def shapes(tree):
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(jnp.shape(x), x.dtype, getattr(x, "weak_type", False)) for x in leaves]


def all_finite(tree):
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in leaves)


def stored_leaves(state):
    leaves = jsa.tree.leaves(state)
    return [x for x in leaves if isinstance(x, ScaledArray)]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_training_with_a_compressed_state(name):
    opt = jsa.optim.low_precision(OPTIMIZERS[name]())
    params = problem()[0]
    state = opt.init(params)
    weights = ("schedule_free", "prodigy")  # which keep some, in the dtype of the parameters
    assert name in weights or all(x.dtype == jnp.float16 for x in stored_leaves(state))
    params, new, losses = train(opt, params, state)
    assert shapes(new) == shapes(state)
    assert all_finite(new)
    np.testing.assert_allclose(losses, reference(name), rtol=0.02, atol=1e-4)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, "statistic") for name in OPTIMIZERS]
    + [(name, "gradient") for name in ("adam", "adafactor", "lion", "adagrad", "multi_steps")],
)
def test_scalified_training_all_in_float16(name, policy):
    opt = jsa.optim.low_precision(OPTIMIZERS[name](), policy=policy)
    # The first steps of Prodigy, of 1e-6, are smaller than the spacing of float16 weights.
    dtype = jnp.float32 if name == "prodigy" else jnp.float16
    params = jsa.as_scaled_array(problem()[0], "rms", dtype=dtype)
    state = opt.init(params)
    with jsa.ScalifyConfig(missing_rule="silent"):
        params, new, losses = train(opt, params, state, scalified=True)
    assert shapes(new) == shapes(state)
    assert all_finite(new)
    np.testing.assert_allclose(losses, reference(name), rtol=0.02, atol=1e-3)


@pytest.mark.sampled(16)
@pytest.mark.usefixtures("counts_compilations")
@pytest.mark.parametrize("policy", ["statistic", "gradient"])
@pytest.mark.parametrize("name", ["momentum", "adamw", "chain", "adafactor"])
def test_a_frozen_state_compiles_once(name, policy):
    opt = jsa.optim.low_precision(OPTIMIZERS[name](), policy=policy)
    params, x, y = problem()
    params = jsa.as_scaled_array(params, "rms", dtype=jnp.float16)
    state = params, opt.init(params)
    make = make_step(opt)

    def step(state, x, y):
        *new, loss = make(*state, x, y)
        return tuple(new), loss

    def hold(state, x, y):
        new, loss = step(state, x, y)
        return jsa.match_scales(new, state), loss

    for _ in range(2):  # then what was zero has a scale to keep
        state, _ = jax.jit(jsa.scalify(step))(state, x, y)
    state = jsa.freeze_scales(state)
    zeros = any(leaf.scale == 0 for leaf in stored_leaves(state))  # have no scale to keep yet
    given, losses = shapes(state), []
    update = jax.jit(jsa.scalify(hold), donate_argnums=0)
    for i in range(8):
        state, loss = update(state, x, y)
        losses.append(float(loss))
        given = shapes(state) if zeros and not i else given
        assert shapes(state) == given
    assert update._cache_size() == 1 + zeros
    assert all(leaf.is_static or leaf.scale == 0 for leaf in stored_leaves(state))
    assert all_finite(state)
    np.testing.assert_allclose(losses, reference(name)[2:10], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("round_updates", [False, True])
def test_state_with_a_random_key(round_updates):
    """A key has a dtype of its own, which is not NumPy's."""
    plain = optax.noisy_sgd(1e-2, key=jax.random.key(0))
    low = jsa.optim.low_precision(plain, round_updates=round_updates)
    params = jsa.as_scaled_array({"w": jnp.ones((4, 4), jnp.float16)}, static=True)
    grads = {"w": jnp.ones((4, 4), jnp.float16)}

    @jax.jit
    @jsa.scalify
    def step(params, state, grads):
        updates, state = low.update(grads, state, params)
        return jsa.optim.apply_updates(params, updates), state

    wide = {"w": jnp.ones((4, 4))}  # `low_precision` draws the noise in float32 too
    updates, _ = plain.update(wide, plain.init(wide), wide)
    got, _ = step(params, low.init(params), grads)
    np.testing.assert_allclose(jsa.asarray(got["w"]), 1 + updates["w"], rtol=2e-3)
