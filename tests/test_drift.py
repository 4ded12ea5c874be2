"""Scales that feed back: of weight, gradient, moments, update, and of the next weight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray

STEPS, BATCHES = 1000, 50
SQUARES = ("nu", ".v_row", ".v_col", ".v[", ".sum_of_squares")  # second moments, by their names
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "weak momentum": lambda: optax.sgd(1e-2, momentum=0.3),
    "nesterov": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(3e-3),
    "adamw": lambda: optax.adamw(3e-3, weight_decay=0.1),
    "amsgrad": lambda: optax.amsgrad(3e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(3e-3)),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "adagrad": lambda: optax.adagrad(3e-2),
    "lion": lambda: optax.lion(3e-4),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(3e-3),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=3e-3),
    "accumulated": lambda: optax.MultiSteps(optax.adam(3e-3), 2).gradient_transformation(),
}


def by_library(optimizer):
    """An optimizer of optax: functions of (parameters) and of (gradients, state, parameters)."""

    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer.init, update


def zeros_of(params):
    return jax.tree.map(jnp.zeros_like, params)


def adamw_by_hand():
    def init(params):
        return {"mu": zeros_of(params), "nu": zeros_of(params), "count": jnp.zeros((), jnp.int32)}

    def update(grads, state, params):
        count = state["count"] + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["nu"], grads)

        def step(w, m, v):
            m, v = m / (1 - 0.9**count), v / (1 - 0.999**count)
            return w - 3e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * w)

        return jax.tree.map(step, params, mu, nu), {"mu": mu, "nu": nu, "count": count}

    return init, update


def adamw_of_keras():
    """As in Keras 3: differences, and a learning rate that is a variable of rank 0."""

    def init(params):
        state = {"mu": zeros_of(params), "nu": zeros_of(params)}
        return state | {"count": jnp.zeros((), jnp.int32), "rate": jnp.float32(3e-3)}

    def update(grads, state, params):
        count, rate = state["count"] + 1, state["rate"]
        t = count.astype(jnp.float32)
        alpha = rate * jnp.sqrt(1 - jnp.power(0.999, t)) / (1 - jnp.power(0.9, t))
        params = jax.tree.map(lambda w: w - w * 0.004 * rate, params)
        mu = jax.tree.map(lambda m, g: m + (g - m) * 0.1, state["mu"], grads)
        nu = jax.tree.map(lambda v, g: v + (jnp.square(g) - v) * 0.001, state["nu"], grads)
        params = jax.tree.map(lambda w, m, v: w - m * alpha / (jnp.sqrt(v) + 1e-7), params, mu, nu)
        return params, {"mu": mu, "nu": nu, "count": count, "rate": rate}

    return init, update


def adamax_of_keras():
    def init(params):
        return {"mu": zeros_of(params), "norm": zeros_of(params)}

    def update(grads, state, params):
        mu = jax.tree.map(lambda m, g: m + (g - m) * 0.1, state["mu"], grads)
        norm = jax.tree.map(lambda u, g: jnp.maximum(0.999 * u, jnp.abs(g)), state["norm"], grads)
        params = jax.tree.map(lambda w, m, u: w - 3e-3 * m / (u + 1e-7), params, mu, norm)
        return params, {"mu": mu, "norm": norm}

    return init, update


BY_HAND = {
    "adamw by hand": adamw_by_hand,
    "adamw of Keras": adamw_of_keras,
    "adamax of Keras": adamax_of_keras,
}
RULES = {name: lambda make=make: by_library(make()) for name, make in OPTIMIZERS.items()} | BY_HAND


def problem(seed=0):
    """A small regression with noise, so that gradients do not vanish: parameters, and batches."""
    rng = np.random.default_rng(seed)

    def draw(*shape, gain=1.0):
        return jnp.asarray(rng.normal(size=shape) * gain, jnp.float32)

    params = {
        "up": draw(8, 16, gain=0.3),
        "bias": jnp.zeros(16),
        "gain": jnp.ones(16),
        "down": draw(16, 4, gain=0.2),
        "shift": jnp.zeros(4),
    }
    x = draw(BATCHES, 16, 8)
    return params, (x, jnp.tanh(x @ draw(8, 4)) + draw(BATCHES, 16, 4, gain=0.5))


def loss_fn(params, batch, dtype):
    """The mean square error of a network that computes in a dtype."""
    x, y = batch
    w = jax.tree.map(lambda p: p.astype(dtype), params)
    h = jax.nn.silu(x.astype(dtype) @ w["up"] + w["bias"]) * w["gain"]
    out = (h @ w["down"] + w["shift"]).astype(jnp.float32)
    return jnp.mean(jnp.square(out - y))


def train(rule, dtype, wrap, convert, steps=STEPS):
    """Train; return the state and all losses."""
    init, update = rule
    params, batches = problem()

    @jax.jit
    @wrap
    def step(params, state, i, batches):
        batch = jax.tree.map(lambda a: a[i], batches)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, dtype)
        params, state = update(grads, state, params)
        return params, state, loss

    state, losses = convert((params, init(params))), []
    for i in range(steps):
        *state, loss = step(*state, i % BATCHES, batches)
        losses.append(loss)
    return state, np.array([float(jsa.asarray(loss)) for loss in losses])


@functools.cache
def plain_losses(name, dtype):
    return train(RULES[name](), dtype, lambda f: f, lambda tree: tree)[1]


def at_rms(tree):
    return jsa.as_scaled_array(tree, "rms")


def octaves_off(state):
    """`log2` of scale over RMS, of each leaf that is not zero everywhere; of squares half of it."""
    off = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, ScaledArray)
    ):
        if isinstance(leaf, ScaledArray) and np.any(leaf.data):
            name = jax.tree_util.keystr(path)
            rms = np.sqrt(np.mean(np.square(np.asarray(leaf.data, np.float64))))
            is_square = any(part in name for part in SQUARES)
            off[name] = -float(np.log2(rms)) / (1 + is_square)
    return off


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", RULES)
def test_scales_stay_near_their_values(name, dtype):
    """The state is float32, of dynamic scales, and no scale is chosen anew."""
    state, losses = train(RULES[name](), dtype, jsa.scalify, at_rms)
    plain = plain_losses(name, dtype)
    for part in (slice(100), slice(STEPS // 2), slice(-100, None)):
        np.testing.assert_allclose(losses[part].mean(), plain[part].mean(), rtol=0.02)
    off = octaves_off(state)
    assert len(off) >= 5
    # The trust ratio of zeros is `where(norm == 0, 1, ratio)`, of a scale 2**-40.
    limit = 9 if name == "lamb" else 8
    assert not {name: octaves for name, octaves in off.items() if abs(octaves) > limit}


def exponents(tree):
    leaves = jsa.tree.leaves(tree)
    return [int(np.log2(np.max(x.scale))) for x in leaves if isinstance(x, ScaledArray)]


def trained_by(rule, octaves, steps=4):
    """Train a weight by gradients whose scale is too large; return states and plain weights."""
    init, update = rule
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
    plain, scaled, states = (weight, init(weight)), jsa.as_scaled_array((weight, init(weight))), []
    plain_update, scaled_update = jax.jit(update), jax.jit(jsa.scalify(update))
    for _ in range(steps):
        grad = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
        wrong = ScaledArray(grad * 2.0**-octaves, jnp.float32(2.0**octaves))
        plain = plain_update(grad, plain[1], plain[0])
        scaled = scaled_update(wrong, scaled[1], scaled[0])
        states.append(scaled)
    return states, plain


@pytest.mark.parametrize("octaves", [-25, 0, 25, 30, 40])
@pytest.mark.parametrize("name", ["adamw by hand", "adamw of Keras", "adamw"])
def test_gradients_of_a_wrong_scale_do_not_move_that_of_a_weight(name, octaves):
    """A weight's scale went to 2**3, 2**8 and 2**18 at once, of gradients 2**25, 2**30, 2**40 off.

    That of the second moment stopped at 2**23, and that of the first one did not.
    """
    states, plain = trained_by(RULES[name](), octaves)
    for weight, _ in states:
        assert exponents(weight) == [0]
    first = exponents(states[0])
    assert all(exponents(state) == first for state in states)
    weight, _ = states[-1]
    np.testing.assert_allclose(jsa.asarray(weight), plain[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw by hand", "adamw of Keras", "momentum"])
def test_a_weight_of_zeros_gets_the_size_of_its_updates(name):
    """However wrong the scale of the gradient is: one 2**9 too large flushed activations.

    The learning rate of Keras is a part of the state, of a scale of 1.
    """
    for octaves in (0,) if name == "momentum" else (-20, 0, 20, 40):
        init, update = RULES[name]()
        weight = jnp.zeros((8, 8), jnp.float32)
        grad = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
        state = jsa.as_scaled_array((weight, init(weight)))
        wrong = ScaledArray(grad * 2.0**-octaves, jnp.float32(2.0**octaves))
        weight, _ = jax.jit(jsa.scalify(update))(wrong, state[1], state[0])
        assert -12 <= exponents(weight)[0] <= 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_sum_stays_at_the_scale_of_the_leaf_that_it_replaces(dtype):
    def leaf(scale):
        return ScaledArray(jnp.asarray([1.0, -2.0], dtype), jnp.float32(scale))

    def check(function, expected, *args):
        out = jax.jit(jsa.scalify(function))(*args)
        assert float(out.scale) == expected
        values = [jsa.asarray(x, jnp.float32) for x in args]
        np.testing.assert_allclose(jsa.asarray(out, jnp.float32), function(*values), rtol=1e-2)

    w, u, zero = leaf(1.0), leaf(2.0**10), ScaledArray(jnp.zeros(2, dtype), jnp.float32(0))
    check(lambda w, u: w + jnp.abs(u), 1, w, u)
    check(lambda w, u: w - u * u, 1, w, u)
    check(lambda w, u: jnp.abs(u) + w, 1, w, u)
    check(lambda w, u: 0.3 * w + jnp.abs(u), 1, w, u)
    check(lambda w, u: (w + jnp.abs(u)) + u * u, 1, w, u)
    check(lambda w, u: w + 0.9 * u, 1, w, u)
    check(lambda w, u: w + 0.001 * w - jnp.abs(u), 1, w, u)
    check(lambda w, u: w.at[jnp.array([1, 1])].add(jnp.abs(u)), 1, w, u)
    check(lambda w, u: w + u, 2.0**10, w, u)  # either may be the leaf
    check(lambda w, u: 0.001 * w + jnp.abs(u), 2.0**10, w, u)  # weight decay in a gradient
    check(lambda m, u: 0.9 * m + jnp.abs(u), 2.0**13, zero, u)  # 10 times u in the end
    check(lambda w, u: jax.jit(lambda w, u: w + jnp.abs(u))(w, u), 1, w, u)
    check(lambda w, u: jax.lax.cond(True, lambda: w + jnp.abs(u), lambda: w), 1, w, u)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("exponent", [None, -40, 0, 40])
def test_the_next_state_is_computed_in_the_unit_of_its_leaf(exponent, static, dtype):
    """What is stored is the sum itself: a product with 1 / scale would be one more kernel."""

    def step(m, g):
        m = 0.9 * m + 0.1 * g
        return m, m * m

    scale = 0.0 if exponent is None else 2.0**exponent
    data = jnp.asarray([0.0, 0.0, 0.0] if exponent is None else [1.5, -0.75, 0.0], dtype)
    m = ScaledArray(data, scale if static else jnp.float32(scale))
    g = ScaledArray(jnp.asarray([1.0, -2.0, 3.0], dtype), jnp.float32(2.0 ** (exponent or 0)))
    scaled = jax.jit(jsa.scalify(step))
    closed = scaled.trace(m, g).jaxpr
    body = closed.eqns[0].params.get("jaxpr", closed).jaxpr if len(closed.eqns) == 1 else closed
    made = {v: eqn.primitive.name for eqn in body.eqns for v in eqn.outvars}
    assert made[body.outvars[0]] == "add" or (static and scale == 0)  # that leaf has no unit yet

    def value(x):
        return np.asarray(x.data).astype(np.float64) * float(x.scale)

    tolerance = 4 * float(jnp.finfo(dtype).eps)
    for got, want in zip(scaled(m, g), step(value(m), value(g)), strict=True):
        np.testing.assert_allclose(value(got), want, rtol=tolerance, atol=0)


def test_a_sum_that_is_cast_to_float16_has_the_scale_of_its_terms():
    """Only wide dtypes have room beside the scale of a leaf."""

    def cast(w, u):
        w = w + jnp.square(u)
        return w, w.astype(jnp.float16)

    w = ScaledArray(jnp.ones(2), jnp.float32(1))
    u = ScaledArray(jnp.asarray([1.0, 2.0]), jnp.float32(2.0**10))
    wide, narrow = jax.jit(jsa.scalify(cast))(w, u)
    assert float(wide.scale) == 1 and float(narrow.scale) == 2.0**20
    np.testing.assert_allclose(jsa.asarray(narrow, jnp.float32), jsa.asarray(wide), rtol=1e-3)
    narrow = jsa.as_scaled_array(jnp.ones(2, jnp.float16))
    out = jax.jit(jsa.scalify(lambda w, u: w + jnp.square(u)))(narrow, u.astype(jnp.float16))
    assert float(out.scale) == 2.0**23  # a square in float16 has three octaves of room
