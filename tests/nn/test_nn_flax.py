"""The layers of `jsa.nn.linen` and `jsa.nn.nnx`: Flax's parameters, Flax's results."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.nn import linen, nnx

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.float32)
MASK = jnp.tril(jnp.ones((1, 1, 6, 6), bool))
KEY = jax.random.key(0)

# Name: constructor of a layer of some interface, arguments of the call.
LINEN = {
    "LayerNorm": (lambda m: m.LayerNorm(), {}),
    "LayerNorm-no-bias": (lambda m: m.LayerNorm(use_bias=False, epsilon=1e-3), {}),
    "LayerNorm-no-scale": (lambda m: m.LayerNorm(use_scale=False), {}),
    "LayerNorm-axes": (lambda m: m.LayerNorm(reduction_axes=(1, 2)), {}),
    "LayerNorm-mask": (lambda m: m.LayerNorm(), dict(mask=X > -1)),
    "RMSNorm": (lambda m: m.RMSNorm(), {}),
    "RMSNorm-no-scale": (lambda m: m.RMSNorm(use_scale=False), {}),
    "Dense": (lambda m: m.Dense(4), {}),
    "attention": (lambda m: m.MultiHeadDotProductAttention(2), {}),
    "attention-mask": (lambda m: m.MultiHeadDotProductAttention(2), dict(mask=MASK)),
    "MultiHeadAttention": (lambda m: m.MultiHeadAttention(2), dict(mask=MASK)),
    "SelfAttention": (lambda m: m.SelfAttention(2), {}),
}
NNX = {
    "LayerNorm": lambda m, rngs: m.LayerNorm(8, rngs=rngs),
    "LayerNorm-no-bias": lambda m, rngs: m.LayerNorm(8, use_bias=False, rngs=rngs),
    "LayerNorm-axes": lambda m, rngs: m.LayerNorm(8, reduction_axes=(1, 2), rngs=rngs),
    "RMSNorm": lambda m, rngs: m.RMSNorm(8, rngs=rngs),
    "Linear": lambda m, rngs: m.Linear(8, 4, rngs=rngs),
    "attention": lambda m, rngs: m.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
}


def assert_close(got, expected, tolerance=2e-6, largest=None):
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    largest = np.abs(expected).max() if largest is None else largest
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * largest)


def check(apply, plain, params, dtype):
    """Values, and gradients of parameters and input, inside `scalify` and without."""
    params = jax.tree.map(lambda p: p + 0.25, params)  # no gradient is 0 by symmetry

    def loss(fun):
        return lambda params, x: jnp.sum(jnp.sin(fun(params, x)).astype(jnp.float32))

    @jax.jit
    def results(params, x):
        return apply(params, x), plain(params, x), jax.grad(loss(plain), (0, 1))(params, x)

    got, want, expected = results(params, X)
    assert_close(got, want)
    narrow = jax.tree.map(lambda x: x.astype(dtype), (params, X))
    ours = jax.jit(jsa.scalify(jax.grad(loss(apply), (0, 1))))(*jsa.as_scaled_array(narrow))
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    leaves = jax.tree.leaves(expected)
    largest = max(np.abs(leaf).max() for leaf in leaves)  # that of the keys' bias is rounding
    for got, want in zip(jsa.tree.leaves(ours), leaves, strict=True):
        assert got.dtype == dtype
        assert_close(got, want, tolerance, largest)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", LINEN)
def test_linen_layers_are_those_of_flax(name, dtype):
    make, options = LINEN[name]
    modules = flax.linen, linen
    params, ours = jax.jit(lambda key: [make(m).init(key, X, **options) for m in modules])(KEY)
    assert jax.tree.structure(ours) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, ours, params)
    applies = [lambda p, x, m=m: make(m).apply(p, x, **options) for m in (linen, flax.linen)]
    check(*applies, params, dtype)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", NNX)
def test_nnx_layers_are_those_of_flax(name, dtype):
    applies, states = [], []
    for module in (nnx, flax.nnx):
        layer = NNX[name](module, flax.nnx.Rngs(0))
        graph, state, rest = flax.nnx.split(layer, flax.nnx.Param, ...)
        states.append(flax.nnx.to_pure_dict(state))
        applies.append(lambda p, x, g=graph, r=rest: flax.nnx.merge(g, p, r)(x))
    jax.tree.map(np.testing.assert_array_equal, *states)
    check(*applies, states[0], dtype)


@pytest.mark.parametrize("module", [linen, nnx])
def test_the_rest_of_flax_is_there(module):
    assert {"Conv", "Embed", "BatchNorm", "gelu", "LayerNorm"} <= set(dir(module))
    assert module.gelu is jsa.nn.gelu
    assert module.Conv.__module__.startswith("flax")
    with pytest.raises(AttributeError):
        module.NoSuchLayer  # noqa: B018


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("interface", ["linen", "nnx"])
def test_embeddings_are_those_of_flax(interface, dtype):
    ids = jnp.asarray([[0, 3, 3], [1, 0, 3]])
    if interface == "linen":
        table = flax.linen.Embed(5, 8).init(KEY, ids)["params"]["embedding"]
        applies = [
            lambda t, m=m: m.Embed(5, 8, dtype=t.dtype).apply({"params": {"embedding": t}}, ids)
            for m in (linen, flax.linen)
        ]
    else:
        table = flax.nnx.Embed(5, 8, rngs=flax.nnx.Rngs(0)).embedding[...]

        def apply(t, m):
            layer = m.Embed(5, 8, dtype=t.dtype, rngs=flax.nnx.Rngs(0))
            layer.embedding[...] = t
            return layer(ids)

        applies = [lambda t, m=m: apply(t, m) for m in (nnx, flax.nnx)]
    ours = jsa.as_scaled_array(table.astype(dtype), scale=2.0**-8)
    got = jax.jit(jsa.scalify(applies[0]))(ours)
    expected = applies[1](table.astype(dtype))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    gradients = [jax.grad(lambda t, f=f: jnp.sum(jnp.sin(f(t)).astype(t.dtype))) for f in applies]
    got = jax.jit(jsa.scalify(gradients[0]))(ours)
    assert_close(got, gradients[1](table), 1e-6 if dtype == jnp.float32 else 0.01)


def test_attention_dropout_is_that_of_flax():
    """The same random numbers drop the same weights."""
    options = dict(num_heads=2, dropout_rate=0.5, deterministic=False)
    params = flax.linen.MultiHeadAttention(**options).init(
        {"params": KEY, "dropout": jax.random.key(1)}, X
    )
    results = [
        m.MultiHeadAttention(**options).apply(params, X, rngs={"dropout": jax.random.key(2)})
        for m in (linen, flax.linen)
    ]
    assert_close(*results)


@pytest.mark.parametrize("exponent", [-20, 0, 20])
def test_a_normalised_value_has_scale_1(exponent):
    layer = linen.LayerNorm(param_dtype=jnp.float16)
    x = jsa.ScaledArray(X.astype(jnp.float16), jnp.float32(2.0**exponent))
    params = jsa.as_scaled_array(layer.init(KEY, x.data), 2.0**3)
    out = jax.jit(jsa.scalify(layer.apply))(params, x)
    assert out.dtype == jnp.float16 and float(out.scale) == 1
