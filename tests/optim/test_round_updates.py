"""Updates that end at numbers of the weights' dtype: `low_precision(..., round_updates=True)`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa


def make_params(seed=0):
    """A matrix of ordinary size, a tiny one, zeros, and an array that stays in float32."""
    keys = jax.random.split(jax.random.key(seed), 2)
    narrow = {
        "w": jax.random.normal(keys[0], (16, 8)),
        "tiny": 2.0**-30 * jax.random.normal(keys[1], (8,)),
        "zeros": jnp.zeros(8),
    }
    scaled = jsa.as_scaled_array(narrow, scale="rms", dtype=jnp.float16)
    return {**scaled, "wide": jsa.as_scaled_array(jnp.ones(4))}


def make_grads(step):
    keys = jax.random.split(jax.random.key(100 + step), 4)
    shapes = {"w": (16, 8), "tiny": (8,), "zeros": (8,), "wide": (4,)}
    return {n: 1e-3 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items())}


def train(add, optimizer, steps=5):
    """Run some steps; return the parameters after each of them."""

    @jax.jit
    @jsa.scalify
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return add(params, updates), state

    params = make_params()
    state = jsa.as_scaled_array(optimizer.init(params))
    seen = []
    for step in range(steps):
        params, state = update(params, state, jsa.as_scaled_array(make_grads(step)))
        seen.append(jsa.asarray(params, jnp.float32))
    return seen


@pytest.mark.sampled(16)
@pytest.mark.parametrize("policy", ["statistic", "gradient"])
def test_optax_adds_them_as_we_would(policy):
    optimizer = optax.identity()  # nothing that XLA could compute in two ways
    ours = jsa.optim.low_precision(optimizer, policy=policy)
    rounded = jsa.optim.low_precision(optimizer, policy=policy, round_updates=True)
    expected = train(lambda p, u: jsa.optim.apply_updates(p, u, policy=policy), ours)
    for a, b in zip(train(optax.apply_updates, rounded), expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_frozen_scales_stay():
    optimizer = jsa.optim.low_precision(optax.adamw(1e-2), round_updates=True)

    @jax.jit
    @jsa.scalify
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": make_params()["w"]}
    state = jsa.as_scaled_array(optimizer.init(params))
    grads = jsa.as_scaled_array({"w": make_grads(0)["w"]})
    params, state = update(params, state, grads)
    params, state = jsa.freeze_scales((params, state))
    new = update(params, state, jsa.freeze_scales(grads))
    jsa.tree.check_same_structure(new, (params, state))


def test_small_updates_count_on_average():
    """1e-4 is a tenth of float16's spacing at 1: rounded to nearest, it is lost."""
    params = jnp.ones(4000, jnp.float16)
    optimizer = jsa.optim.low_precision(optax.sgd(1.0), round_updates=True)
    grads = jnp.linspace(-1.1e-4, -0.9e-4, 4000)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    assert new.dtype == jnp.float16
    assert set(np.unique(np.asarray(new, np.float64))) == {1.0, 1.0 + 2.0**-10}
    np.testing.assert_allclose(np.mean(np.asarray(new, np.float64)) - 1, 1e-4, rtol=0.15)


def test_an_immense_scale_does_not_flush_the_weights():
    optimizer = jsa.optim.low_precision(optax.sgd(2.0**-60), round_updates=True)

    @jax.jit
    @jsa.scalify
    def update(w, state, grad):
        updates, state = optimizer.update(grad, state, w)
        return optax.apply_updates(w, updates), state

    w = jsa.as_scaled_array(jnp.float32([1.0, -0.25, 2.0**-8]), scale="rms", dtype=jnp.float16)
    grad = jsa.scaled_array(jnp.zeros(3, jnp.float16), 2.0**100)
    state = jsa.as_scaled_array(optimizer.init(w))
    new, _ = update(w, state, grad)
    np.testing.assert_array_equal(jsa.asarray(new, jnp.float32), [1.0, -0.25, 2.0**-8])


def test_outside_of_scalify_and_wide_weights():
    params = {"narrow": jnp.ones(3, jnp.bfloat16), "wide": jnp.ones(3), "count": jnp.arange(3)}
    updates = {"narrow": jnp.full(3, 0.3), "wide": jnp.full(3, 0.3), "count": None}
    optimizer = jsa.optim.low_precision(
        optax.GradientTransformation(lambda p: optax.EmptyState(), lambda u, s, p=None: (u, s)),
        round_updates=True,
    )
    out, _ = optimizer.update(updates, optax.EmptyState(), params)
    assert out["count"] is None
    np.testing.assert_array_equal(out["wide"], updates["wide"])
    new = params["narrow"] + out["narrow"]
    np.testing.assert_array_equal(new, new.astype(jnp.bfloat16).astype(jnp.float32))


def test_the_same_update_again_and_again():
    """The bits depend on the count of steps, so that the same numbers are rounded otherwise."""
    constant = optax.chain(optax.scale_by_schedule(lambda count: -1.0), optax.scale(1e-4))
    optimizer = jsa.optim.low_precision(constant, round_updates=True)

    @jax.jit
    def run(weights):
        def body(carry, _):
            weights, state = carry
            updates, state = optimizer.update(jnp.ones(50), state, weights)
            return (optax.apply_updates(weights, updates), state), None

        return jax.lax.scan(body, (weights, optimizer.init(weights)), length=1000)[0][0]

    weights = jnp.linspace(1.25, 1.75, 50, dtype=jnp.float16)
    moved = np.float64(weights) - np.float64(run(weights))
    assert np.all(moved > 0.05)
    np.testing.assert_allclose(moved.mean(), 0.1, rtol=0.05)


def test_needs_the_parameters():
    optimizer = jsa.optim.low_precision(optax.sgd(0.1), round_updates=True)
    params = jnp.ones(3, jnp.float16)
    with pytest.raises(ValueError, match="`round_updates` needs the parameters"):
        optimizer.update(params, optimizer.init(params))


def test_train_state():
    from flax.training.train_state import TrainState

    optimizer = jsa.optim.low_precision(optax.identity(), round_updates=True)
    state = TrainState.create(apply_fn=None, params=make_params(), tx=optimizer)
    state = jsa.as_scaled_array(state)
    step = jax.jit(jsa.scalify(lambda s, g: s.apply_gradients(grads=g)))
    for i in range(3):
        state = step(state, jsa.as_scaled_array(make_grads(i)))
    expected = train(jsa.optim.apply_updates, jsa.optim.low_precision(optax.identity()), 3)[-1]
    jax.tree.map(np.testing.assert_array_equal, jsa.asarray(state.params, jnp.float32), expected)
