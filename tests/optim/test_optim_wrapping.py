"""`low_precision` inside and around other wrappers, and what a training loop does with a state."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_low_precision import all_finite, make_step, problem, shapes, stored_leaves, train

import jax_scalify as jsa
from jax_scalify import ScaledArray

optax = pytest.importorskip("optax")

low = jsa.optim.low_precision
ADAM = {"learning_rate": 0.02, "eps": 1e-8}


def labels(params):
    return {"w": "adam", "b": "sgd"}


# The same optimizer, plain, with the wrapper outside, and with it inside.
WRAPPERS = {
    "multi_steps": lambda w: optax.MultiSteps(w(optax.adam(0.05)), 4),
    "apply_if_finite": lambda w: optax.apply_if_finite(w(optax.adam(**ADAM)), 3),
    "masked": lambda w: optax.masked(w(optax.adam(**ADAM)), {"w": True, "b": False}),
    "inject_hyperparams": lambda w: optax.inject_hyperparams(
        lambda learning_rate, b2: w(optax.adam(learning_rate, b2=b2))
    )(0.02, b2=optax.linear_schedule(0.99, 0.999, 20)),
    "chain": lambda w: optax.chain(
        optax.clip_by_global_norm(0.5),
        w(optax.scale_by_adam()),
        optax.add_decayed_weights(0.01),
        optax.scale_by_learning_rate(optax.cosine_decay_schedule(0.02, 50)),
    ),
    "multi_transform": lambda w: optax.multi_transform(
        {"adam": w(optax.adam(**ADAM)), "sgd": optax.sgd(0.05)}, labels
    ),
}


def as_transformation(opt):
    return getattr(opt, "gradient_transformation", lambda: opt)()


@pytest.mark.sampled(16)
@pytest.mark.parametrize("scalified", [False, True])
@pytest.mark.parametrize("order", ["outside", "inside"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_both_orders(name, order, scalified):
    make = WRAPPERS[name]
    plain = as_transformation(make(lambda opt: opt))
    opt = low(make(lambda opt: opt)) if order == "outside" else as_transformation(make(low))
    params = problem()[0]
    want = train(plain, params, plain.init(params))[2]
    if scalified:
        params = jsa.as_scaled_array(params, "rms", dtype=jnp.float16)
    state = opt.init(jsa.asarray(params, jnp.float32))
    assert all(x.dtype == jnp.float16 for x in stored_leaves(state)) and stored_leaves(state)
    if scalified and name == "multi_steps":  # the sum of gradients that the wrapper has added
        state = jsa.as_scaled_array(state)
    with jsa.ScalifyConfig(missing_rule="error"):
        _, new, got = train(opt, params, state, scalified=scalified)
    assert all_finite(new)
    assert shapes(new) == shapes(state)
    np.testing.assert_allclose(got, want, rtol=0.02, atol=1e-3)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("scalified", [False, True])
def test_hyperparameters_stay_float32_and_can_be_set(scalified):
    opt = low(optax.inject_hyperparams(optax.adam)(1e-8, eps=1e-8))
    params, x, y = problem()
    state = opt.init(params)
    step = make_step(opt)
    step = jax.jit(jsa.scalify(step) if scalified else step)
    if scalified:
        params = jsa.as_scaled_array(params)
    state.hyperparams["learning_rate"] = jnp.float32(1e-3 / 3)
    _, state, _ = step(params, state, x, y)
    assert state.hyperparams["learning_rate"] == np.float32(1e-3 / 3)
    assert state.hyperparams["eps"] == np.float32(1e-8)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("scalified", [False, True])
def test_one_compilation_donation_and_a_scan(scalified):
    opt = low(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01)))
    params, x, y = problem()
    if scalified:
        params = jsa.as_scaled_array(params, "rms", dtype=jnp.float16)
    start = (params, opt.init(params))
    step = make_step(opt)
    whole = jsa.scalify(step) if scalified else step
    chex.clear_trace_counter()
    jitted = jax.jit(chex.assert_max_traces(whole, n=1), donate_argnums=(0, 1))
    carry = jax.tree.map(jnp.array, start)
    for _ in range(20):
        old = carry
        *carry, loss = jitted(*carry, x, y)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tuple(old)))

    def scanned(carry, _):
        *carry, loss = step(*carry, x, y)
        return tuple(carry), loss

    def run(carry):
        return jax.lax.scan(scanned, carry, length=20)

    end, losses = jax.jit(jsa.scalify(run) if scalified else run)(start)
    np.testing.assert_allclose(float(np.asarray(losses)[-1]), float(loss), rtol=2e-2)
    assert shapes(end) == shapes(start)


def test_scanned_layers_and_scales_of_a_lower_rank():
    """Optimizers under `vmap` keep one scale for each member."""
    opt = low(optax.adam(0.01, eps=1e-20))
    params = {"w": jnp.ones((3, 4, 2)) * jnp.float32([1.0, 2.0**-20, 2.0**20]).reshape(3, 1, 1)}
    state = jax.vmap(opt.init)(params)
    assert state[0].mu["w"].scale.shape == (3,)
    grads = jax.tree.map(lambda x: 1e-3 * x, params)
    updates, state = jax.jit(jax.vmap(opt.update))(grads, state, params)
    assert state[0].mu["w"].scale.shape == (3,)
    # The same state, updated as one.
    state = jax.tree.map(lambda x: x[0] if x.dtype == jnp.int32 else x, state)
    updates, state = opt.update(grads, state, params)
    assert state[0].mu["w"].scale.shape == (3,)
    data = np.asarray(state[0].mu["w"].data, np.float32)
    assert (abs(data) >= 0.99).all() and (abs(data) < 2).all()
    np.testing.assert_allclose(updates["w"], -0.01, rtol=2e-3)


def test_frozen_scales_stay():
    opt = low(optax.sgd(0.1, momentum=0.9))
    params, x, y = problem()
    state = opt.init(params)
    _, state, _ = make_step(opt)(params, state, x, y)
    frozen = jsa.freeze_scales(state)
    _, new, _ = jax.jit(make_step(opt))(params, frozen, x, y)
    assert jax.tree.structure(new) == jax.tree.structure(frozen)


def test_master_weights_as_scaled_arrays_outside_scalify():
    opt = low(optax.adamw(0.01))
    params, x, y = problem()
    master = jsa.as_scaled_array(params, "rms", dtype=jnp.float16)
    state = opt.init(master)

    @jax.jit
    def step(master, state, key):
        loss, grads = jax.value_and_grad(loss_of)(jsa.asarray(master, jnp.float32))
        updates, state = opt.update(grads, state, master)
        return jsa.optim.apply_updates(master, updates, key=key), state, loss

    def loss_of(params):
        return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)

    for i in range(60):
        master, state, loss = step(master, state, jax.random.key(i))
    plain = optax.adamw(0.01)
    want = train(plain, params, plain.init(params))[2]
    np.testing.assert_allclose(float(loss), want[-1], rtol=0.02)
    assert master["w"].dtype == jnp.float16 and isinstance(master["w"], ScaledArray)


def test_extra_arguments_pass_through():
    backtracking = optax.chain(
        optax.sgd(1.0, momentum=0.5),
        optax.scale_by_backtracking_linesearch(max_backtracking_steps=10),
    )
    opt = low(backtracking)
    params, x, y = problem()

    def value_fn(p):
        return jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - y) ** 2)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = opt.update(
            grads, state, params, value=value, grad=grads, value_fn=value_fn
        )
        return jsa.optim.apply_updates(params, updates), state, value

    state = opt.init(params)
    values = []
    for _ in range(10):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values[-1] < values[0] / 4


def test_state_bytes_per_parameter():
    params = {"w": jnp.ones((512, 512), jnp.float16)}
    params = jsa.as_scaled_array(params)

    def bytes_per_parameter(**options):
        state = (params, low(optax.adamw(1e-3), **options).init(params))
        return sum(x.nbytes for x in jax.tree.leaves(state)) / 512**2

    assert bytes_per_parameter() == pytest.approx(6, abs=1e-3)
    e4m3 = jnp.float8_e4m3fn
    assert bytes_per_parameter(first_moment_dtype=e4m3) == pytest.approx(5, abs=1e-3)
    assert bytes_per_parameter(dtype=jnp.float32) == pytest.approx(10, abs=1e-3)


W, B = jnp.ones(3), jnp.ones((2, 2))
MISMATCHES = {  # gradients, the parameters of `init` and of `update`, and what is said
    "missing": ({"w": W}, {"w": W, "b": B}, {"w": W, "b": B}, r"`grads\['b'\]` is missing"),
    "left over": ({"w": W, "b": B}, {"w": W}, {"w": W}, r"`params\['b'\]` is missing"),
    "shape": ({"w": W[:2]}, {"w": W}, {"w": W}, r"`grads\['w'\]` is of shape \(2,\), `params\['w'"),
    "parameters": ({"w": W, "b": B}, {"w": W, "b": B}, {"w": W}, r"`params\['b'\]` is missing"),
    "state": ({"w": W}, {"w": W, "b": B}, {"w": W}, r"`init\(params\)\[0\].mu\['b'\]` is missing"),
    "no parameters": ({"w": W}, {"v": W}, None, r"`init\(params\)\[0\].mu\['v'\]` is missing"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scalified", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_trees_that_do_not_match(name, scalified):
    grads, start, params, message = MISMATCHES[name]
    opt = low(optax.adam(0.1))
    update = jsa.scalify(opt.update) if scalified else opt.update
    with pytest.raises(ValueError, match=message + ".*: `update` takes gradients"):
        update(grads, opt.init(start), params)
