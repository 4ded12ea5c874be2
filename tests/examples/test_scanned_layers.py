"""Flax models whose layers are scanned, with and without remat, train under `scalify`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa

linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

WIDTH, LAYERS, STEPS = 8, 2, 3


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, h, _):
        y = linen.LayerNorm()(h)
        y = linen.Dense(WIDTH)(jax.nn.gelu(linen.Dense(2 * WIDTH)(y)))
        return h + y, None


class LinenModel(linen.Module):
    remat: bool

    @linen.compact
    def __call__(self, x):
        block = linen.remat(LinenBlock, prevent_cse=False) if self.remat else LinenBlock
        layers = linen.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return linen.Dense(WIDTH)(layers()(x, None)[0])


def linen_model(remat):
    """Return parameters and `apply(params, x)`."""
    model = LinenModel(remat)
    params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    return params, model.apply


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h):
        return h + self.down(jax.nn.gelu(self.up(self.norm(h))))


class NNXModel(nnx.Module):
    def __init__(self, remat, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return NNXBlock(rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.remat = remat

    def __call__(self, x):
        def apply(h, block):
            return block(h)

        step = nnx.remat(apply) if self.remat else apply
        return self.head(nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers))


def nnx_model(remat):
    """Return parameters and `apply(params, x)`."""
    graph, params = nnx.split(NNXModel(remat, nnx.Rngs(0)))
    return nnx.to_pure_dict(params), lambda params, x: nnx.merge(graph, params)(x)


MODELS = {"linen": linen_model, "nnx": nnx_model}


@functools.cache
def optimizer():
    return optax.adamw(0.01, eps=1e-6)


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        yield jnp.asarray(rng.normal(size=(2, 4, WIDTH)), jnp.float32)


def as_scaled(state, dtype):
    """Scale the state, scanned layers one by one, as the gradients are: the step keeps that."""

    def convert(x):
        axis = 0 if x.shape[:1] == (LAYERS,) else None
        return jsa.as_scaled_array(jnp.array(x), "rms", dtype=dtype, axis=axis)

    return jax.tree.map(convert, state)


def make_step(apply):
    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            x = batch[0].astype(jax.tree.leaves(params)[0].dtype)
            return jnp.mean((apply(params, x).astype(jnp.float32) - batch[1]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        # AdamW in float32 registers, on state of any dtype.
        wide = jsa.tree.astype((grads, opt_state, params), jnp.float32)
        updates, new_opt_state = optimizer().update(*wide)
        new = optax.apply_updates(wide[2], updates), new_opt_state
        return jax.tree.map(lambda a, b: a.astype(b.dtype), new, state), loss

    return step


def train(step, state):
    """Return the last state and the losses; the state's structure stays."""
    step, losses = jax.jit(step, donate_argnums=0), []
    given = [jax.typeof(x) for x in jax.tree.leaves(state)]
    for batch in batches():
        state, loss = step(state, batch)
        losses.append(float(loss))
        assert [jax.typeof(x) for x in jax.tree.leaves(state)] == given
    assert step._cache_size() == 1
    return state, losses


@pytest.mark.sampled(16)
@pytest.mark.usefixtures("counts_compilations")
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("name", MODELS)
def test_scanned_layers_train(name, remat):
    params, apply = MODELS[name](remat)
    plain = params, optimizer().init(params)
    plain_state, want = train(make_step(apply), jax.tree.map(jnp.array, plain))
    with jsa.ScalifyConfig(missing_rule="error"):
        state, losses = train(jsa.scalify(make_step(apply)), as_scaled(plain, jnp.float32))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    for got, leaf in zip(jsa.tree.leaves(state), jax.tree.leaves(plain_state), strict=True):
        size = np.max(np.abs(leaf))
        np.testing.assert_allclose(np.asarray(got), leaf, rtol=1e-4, atol=1e-5 * size)


@pytest.mark.full
@pytest.mark.usefixtures("counts_compilations")
@pytest.mark.parametrize("name", MODELS)
def test_scanned_layers_train_in_float16(name):
    params, apply = MODELS[name](remat=True)
    plain = params, optimizer().init(params)
    _, want = train(make_step(apply), jax.tree.map(jnp.array, plain))
    with jsa.ScalifyConfig(missing_rule="error"):
        state, losses = train(jsa.scalify(make_step(apply)), as_scaled(plain, jnp.float16))
    np.testing.assert_allclose(losses, want, rtol=1e-2)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_a_scale_a_layer(name):
    params, apply = MODELS[name](False)
    params = jsa.as_scaled_array(params)
    x = next(batches())[0]
    with jsa.ScalifyConfig(missing_rule="error"):
        grads = jax.jit(jsa.scalify(jax.grad(lambda p, x: jnp.mean(apply(p, x) ** 2))))(params, x)
    stacked = [g for g in jsa.tree.leaves(grads) if g.ndim and g.shape[0] == LAYERS]
    assert len(stacked) == 6
    assert all(g.scale.shape == (LAYERS,) + (1,) * (g.ndim - 1) for g in stacked)
