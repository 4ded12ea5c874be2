"""Adapters (LoRA) on a frozen FP8 base: plain JAX, linen, NNX and Equinox, in float16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations

E4M3 = jnp.float8_e4m3fn
WIDTH, CLASSES, RANK, LAYERS = 16, 8, 2, 2


def base_weights(seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(LAYERS, WIDTH, WIDTH)) * WIDTH**-0.5
    return {
        "layers": jnp.asarray(hidden, jnp.float32),
        "head": jnp.asarray(rng.normal(size=(WIDTH, CLASSES)) * WIDTH**-0.5, jnp.float32),
    }


def batch_of(step, count=128):
    """Inputs, and labels of a model that is the base moved a little in few directions."""
    rng, weights = np.random.default_rng([9, step]), base_weights()
    x, fixed = rng.normal(size=(count, WIDTH)), np.random.default_rng(3)
    h = x
    for w in np.asarray(weights["layers"]):
        h = np.tanh(h @ (w + fixed.normal(size=(WIDTH, 1)) @ fixed.normal(size=(1, WIDTH)) / 2))
    logits = 2 * h @ np.asarray(weights["head"])
    labels = np.argmax(logits + rng.gumbel(size=logits.shape), -1)  # sampled of the softmax
    return jnp.asarray(x, jnp.float32), jnp.asarray(labels)


class Adapted(linen.Module):
    """A Dense of linen beside its adapter."""

    features: int

    @linen.compact
    def __call__(self, x):
        a = self.param("lora_a", linen.initializers.normal(WIDTH**-0.5), (x.shape[-1], RANK))
        b = self.param("lora_b", linen.initializers.zeros, (RANK, self.features))
        return linen.Dense(self.features, use_bias=False, name="base")(x) + (x @ a) @ b


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = jnp.tanh(Adapted(WIDTH, name=f"layer_{i}")(x))
        return linen.Dense(CLASSES, use_bias=False, name="head")(x)


def of_jax():
    base, rng = base_weights(), np.random.default_rng(1)
    a = jnp.asarray(rng.normal(size=(LAYERS, WIDTH, RANK)) * WIDTH**-0.5, jnp.float32)
    adapters = {"a": a, "b": jnp.zeros((LAYERS, RANK, WIDTH))}

    def logits(adapters, base, x):
        def layer(h, weights):
            w, a, b = weights
            return jnp.tanh(h @ w + (h @ a) @ b), None

        return lax.scan(layer, x, (base["layers"], adapters["a"], adapters["b"]))[0] @ base["head"]

    return logits, adapters, base


def of_linen():
    model, base = LinenModel(), base_weights()
    params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    adapters = {k: {n: v for n, v in p.items() if "lora" in n} for k, p in params.items()}
    frozen = {f"layer_{i}": {"base": {"kernel": base["layers"][i]}} for i in range(LAYERS)}
    frozen["head"] = {"kernel": base["head"]}

    def logits(adapters, frozen, x):
        both = {name: {**frozen[name], **adapters[name]} for name in frozen}
        return model.apply({"params": both}, x)

    return logits, adapters, frozen


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        layer = dict(use_bias=False, rngs=rngs)
        self.first = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, **layer)
        self.second = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, **layer)
        self.head = nnx.Linear(WIDTH, CLASSES, **layer)

    def __call__(self, x):
        return self.head(jnp.tanh(self.second(jnp.tanh(self.first(x)))))


def of_nnx():
    model, base = NNXModel(nnx.Rngs(0)), base_weights()
    model.first.kernel[...], model.second.kernel[...] = base["layers"]
    model.head.kernel[...] = base["head"]
    graph, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    return lambda adapters, frozen, x: nnx.merge(graph, adapters, frozen)(x), adapters, frozen


def of_equinox():
    eqx = pytest.importorskip("equinox")

    class Adapted(eqx.Module):
        linear: eqx.nn.Linear
        a: jax.Array
        b: jax.Array

        def __call__(self, x):
            return self.linear(x) + self.b @ (self.a @ x)

    base, keys = base_weights(), jax.random.split(jax.random.key(0), 3)

    def linear(w, key):
        layer = eqx.nn.Linear(*w.shape, use_bias=False, key=key)
        return eqx.tree_at(lambda layer: layer.weight, layer, w.T)

    layers = [
        Adapted(linear(w, k), jax.random.normal(k, (RANK, WIDTH)) / 4, jnp.zeros((WIDTH, RANK)))
        for w, k in zip(base["layers"], keys)
    ]
    model = layers, linear(base["head"], keys[2])
    is_adapter = jax.tree.map(lambda _: False, model)
    is_adapter = eqx.tree_at(
        lambda m: [x for layer in m[0] for x in (layer.a, layer.b)], is_adapter, [True] * 4
    )
    adapters, frozen = eqx.partition(model, is_adapter)

    def logits(adapters, frozen, x):
        layers, head = eqx.combine(adapters, frozen)

        def one(x):
            for layer in layers:
                x = jnp.tanh(layer(x))
            return head(x)

        return jax.vmap(one)(x)

    return logits, adapters, frozen


def make_update(logits, optimizer, transform=lambda fun: fun):
    def loss(adapters, base, x, labels):
        out = 2 * logits(adapters, base, x)
        return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()

    loss = transform(loss)

    def update(adapters, state, base, x, labels):
        value, grads = jax.value_and_grad(loss)(adapters, base, x, labels)
        updates, state = optimizer.update(grads, state, adapters)
        return jsa.optim.apply_updates(adapters, updates), state, value

    return update


def fine_tune(make, steps, dtype, transform=lambda fun: fun):
    """Losses on other examples before and after, and what was trained; `dtype` None is plain."""
    logits, adapters, base = make()
    optimizer = optax.adam(0.02)
    if dtype is None:
        update = jax.jit(make_update(logits, optimizer))
        state = optimizer.init(adapters)
    else:
        optimizer = jsa.optim.low_precision(optimizer)
        update = jax.jit(jsa.scalify(make_update(logits, optimizer, transform)))
        adapters = jsa.as_scaled_array(adapters, scale="rms", dtype=dtype)
        state = jsa.as_scaled_array(optimizer.init(adapters))
        base = jsa.as_scaled_array(base, scale="rms", dtype=E4M3)
    losses = []
    for step in [-1, *range(steps), -1]:
        x, labels = batch_of(step) if step >= 0 else batch_of(10**6, 1024)
        x = x if dtype is None else x.astype(dtype)
        adapters, state, value = update(adapters, state, base, x, labels)
        losses.append(float(value))
    return losses[0], losses[-1], (adapters, state, base)


def dtypes_of(tree):
    return {x.dtype.name for x in jsa.tree.leaves(tree) if getattr(x, "ndim", 0)}


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "make",
    [
        of_nnx,
        *(pytest.param(make, marks=pytest.mark.full) for make in (of_jax, of_linen, of_equinox)),
    ],
)
def test_adapters_train_as_in_float32(make):
    before, plain, _ = fine_tune(make, 40, None)
    _, ours, (adapters, state, base) = fine_tune(make, 40, jnp.float16)
    assert plain < 0.99 * before and ours / plain - 1 < 0.005
    assert dtypes_of(adapters) == dtypes_of(state) == {"float16"}
    assert dtypes_of(base) == {"float8_e4m3fn"}


@pytest.mark.full
def test_adapters_train_for_longer():
    _, plain, _ = fine_tune(of_jax, 600, None)
    for transform in (lambda fun: fun, jsa.fp8_matmuls):
        _, ours, _ = fine_tune(of_jax, 600, jnp.float16, transform)
        assert abs(ours / plain - 1) < 0.005


def test_the_base_is_never_wide_as_a_whole():
    """One layer at a time is: of a GPU's program `docs/fp8.md` has the figures."""
    layers, width = 4, 32
    base = {"layers": jnp.ones((layers, width, width)), "head": jnp.ones((width, CLASSES))}
    adapters = {"a": jnp.ones((layers, width, RANK)), "b": jnp.ones((layers, RANK, width))}
    logits, _, _ = of_jax()
    optimizer = jsa.optim.low_precision(optax.adam(0.01))
    adapters = jsa.as_scaled_array(adapters, scale="rms", dtype=jnp.float16)
    state = jsa.as_scaled_array(optimizer.init(adapters))
    frozen = jsa.as_scaled_array(base, scale="rms", dtype=E4M3)
    x, labels = jnp.ones((8, width), jnp.float16), jnp.zeros(8, int)
    sizes = [(x.data.nbytes, x.size) for x in jsa.tree.leaves(frozen)]
    assert all(nbytes == size for nbytes, size in sizes)
    for transform in (lambda fun: fun, jsa.fp8_matmuls):
        update = jax.jit(jsa.scalify(make_update(logits, optimizer, transform)))
        jaxpr = jax.make_jaxpr(update)(adapters, state, frozen, x, labels).jaxpr
        values = [v.aval for e in all_equations(jaxpr) for v in (*e.invars, *e.outvars)]
        kinds = {v.dtype.name for v in values if v.shape == (layers, width, width)}
        assert kinds == {"float8_e4m3fn"}
