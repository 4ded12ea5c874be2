"""A whole optimizer step through `scalify`, against the plain one in float32."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

optax = pytest.importorskip("optax")

STEPS = 5


def optimizer():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10, 0.01)
    return optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(schedule, weight_decay=0.01, eps=1e-6)
    )


def problem():
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(4, 3)) * 0.5, jnp.float32),
        "b": jnp.asarray(rng.normal(size=3) * 2.0**-8, jnp.float32),
    }
    x = jnp.asarray(rng.normal(size=(STEPS, 8, 4)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(STEPS, 8, 3)), jnp.float32)
    return params, x, y


def update(state, x, y):
    params, opt_state = state

    def loss_fn(p):
        return jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer().update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def shapes(tree):
    """Structure (static scales included), shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("scale", [None, "rms"])
def test_equals_plain_adamw(scale):
    params, xs, ys = problem()
    plain = (params, optimizer().init(params))
    state = jsa.as_scaled_array(plain, scale)
    step, plain_step = jax.jit(jsa.scalify(update)), jax.jit(update)
    for x, y in zip(xs, ys, strict=True):
        state, loss = step(state, x, y)
        plain, plain_loss = plain_step(plain, x, y)
        np.testing.assert_allclose(float(loss), float(plain_loss), rtol=1e-6)
    got, want = jsa.asarray(state), plain
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for path, leaf in jax.tree_util.tree_leaves_with_path(want):
        other = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        size = float(np.max(np.abs(leaf)))
        np.testing.assert_allclose(other, leaf, rtol=1e-5, atol=2e-6 * size, err_msg=str(path))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("static", [False, True])
def test_one_compilation_and_a_stable_structure(static):
    params, xs, ys = problem()
    state = jsa.as_scaled_array((params, optimizer().init(params)))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, x, y):
        new, loss = jsa.scalify(update)(state, x, y)
        return (jsa.match_scales(new, state) if static else new), loss

    chex.clear_trace_counter()
    if static:
        state = jsa.freeze_scales(jsa.dynamic_rescale(state))
        state = jax.tree.map(
            lambda v: ScaledArray(v.data, v.scale or 2.0**-6) if isinstance(v, ScaledArray) else v,
            state,
            is_leaf=lambda v: isinstance(v, ScaledArray),
        )
    before = shapes(state)
    for x, y in zip(xs, ys, strict=True):
        state, loss = step(state, x, y)
        assert shapes(state) == before
        assert np.isfinite(float(loss))


def test_donation():
    params, xs, ys = problem()
    state = jsa.as_scaled_array((params, optimizer().init(params)))
    step = jax.jit(jsa.scalify(update), donate_argnums=0)
    for x, y in zip(xs, ys, strict=True):
        old = state
        state, _ = step(state, x, y)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old[0]))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_batches_may_be_scaled_too():
    params, xs, ys = problem()
    state = jsa.as_scaled_array((params, optimizer().init(params)), "rms")
    plain = (params, optimizer().init(params))
    step = jax.jit(jsa.scalify(update))
    state, loss = step(state, *jsa.as_scaled_array((xs[0], ys[0]), "rms"))
    _, plain_loss = update(plain, xs[0], ys[0])
    np.testing.assert_allclose(float(loss), float(plain_loss), rtol=1e-6)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("make", ["sgd", "adam", "lion", "adafactor", "rmsprop", "adagrad", "lamb"])
def test_other_optimizers(make):
    params, xs, ys = problem()
    tx = getattr(optax, make)(1e-2)

    def step(state, x, y):
        params, opt_state = state

        def loss_fn(p):
            return jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - y) ** 2)

        updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    plain = (params, tx.init(params))
    state = jsa.as_scaled_array(plain)
    with jsa.ScalifyConfig(missing_rule="silent"):
        scalified = jax.jit(jsa.scalify(step))
        for x, y in zip(xs[:3], ys[:3], strict=True):
            state, plain = scalified(state, x, y), step(plain, x, y)
    for got, want in zip(jax.tree.leaves(jsa.asarray(state)), jax.tree.leaves(plain), strict=True):
        size = float(np.max(np.abs(want), initial=0.0))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * size)


def test_float16_state_with_tiny_gradients():
    """Registers in float32, state in float16: an EMA from zero follows a gradient of 1e-6."""

    @jax.jit
    @functools.partial(jsa.scalify)
    def step(mu, g):
        return (0.9 * mu.astype(jnp.float32) + 0.1 * g).astype(jnp.float16)

    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(5, 64)) * 1e-6
    mu = jsa.as_scaled_array(jnp.zeros(64, jnp.float16))
    exact = np.zeros(64)
    for g in gradients:
        mu = step(mu, jsa.as_scaled_array(jnp.asarray(g, jnp.float32), "rms"))
        exact = 0.9 * exact + 0.1 * g
        error = np.linalg.norm(np.asarray(mu, np.float64) - exact) / np.linalg.norm(exact)
        assert error < 1e-3


def _bert_like_loss(params, ids, mask, head_mask, labels):
    """As Hugging Face's Flax BERT: masks of padding and of heads are integers, and in einsums."""
    h = params["embedding"][ids]
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-12)
    q, k, v = (jnp.einsum("bld,dhk->blhk", h, params[n]) + params[f"{n}_bias"] for n in "qkv")
    keep = mask[:, None, None, :]
    zeros = jnp.full(keep.shape, 0.0).astype(h.dtype)
    bias = jax.lax.select(keep > 0, zeros, jnp.full_like(zeros, jnp.finfo(h.dtype).min))
    weights = jax.nn.softmax(jnp.einsum("bqhk,bvhk->bhqv", q / jnp.sqrt(2.0), k) + bias)
    weights = jnp.einsum("...hqk,h->...hqk", weights, head_mask)
    out = jnp.einsum("bhqv,bvhk->bqhk", weights, v)
    logits = (out.reshape(h.shape) + h) @ params["embedding"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * mask) / jnp.sum(mask)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", ["one", "rms", "frozen"])
def test_a_step_with_integer_masks_is_the_plain_step(kind):
    rng = np.random.default_rng(0)
    shapes = {"embedding": (9, 4), **dict.fromkeys("qkv", (4, 2, 2))}
    params = {n: jnp.asarray(rng.normal(size=s) * 0.1, jnp.float32) for n, s in shapes.items()}
    params |= {f"{n}_bias": jnp.zeros((2, 2)) for n in "qkv"}
    ids, labels = jnp.asarray(rng.integers(0, 9, (2, 3, 5)))
    mask, head_mask = jnp.asarray([[1, 1, 1, 0, 0]] + [[1] * 5] * 2), jnp.asarray([1, 0])
    optimizer = optax.adamw(1e-3)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(_bert_like_loss)(params, ids, mask, head_mask, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads

    state = params, optimizer.init(params)
    scaled = jsa.as_scaled_array(state, "rms" if kind == "rms" else None)
    scaled = jsa.freeze_scales(scaled) if kind == "frozen" else scaled
    got = jsa.asarray(jax.jit(jsa.scalify(step))(*scaled), jnp.float32)
    chex.assert_trees_all_close(got, step(*state), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inside", [False, True])
def test_parameters_that_are_integers_are_added_as_in_optax(inside):
    params = {"w": jnp.ones(2, jnp.float16), "ids": jnp.arange(2), "on": jnp.array([True, False])}
    updates = {"w": jnp.full(2, 0.5), "ids": jnp.ones(2, int), "on": jnp.zeros(2, bool)}
    apply = jsa.scalify(jsa.optim.apply_updates) if inside else jsa.optim.apply_updates
    new = apply(jsa.as_scaled_array(params), updates)
    want = optax.apply_updates(params, updates)
    for name in params:
        np.testing.assert_array_equal(np.asarray(new[name]), want[name])
        assert new[name].dtype == want[name].dtype
    gradient = np.zeros(2, jax.dtypes.float0)  # JAX's gradient of integers
    assert jsa.optim.apply_updates(params["ids"], gradient) is params["ids"]
