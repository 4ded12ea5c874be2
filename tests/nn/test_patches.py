"""Convolutions that are matmuls become FP8 matmuls; embedding tables with a scale for each row."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
NONE = ((0, 0), (0, 0))
# Images, kernel, strides, options.
MATMULS = {
    "pointwise": ((2, 6, 5, 4), (1, 1, 4, 3), (1, 1), dict(dimension_numbers=NHWC)),
    "strided": ((2, 6, 5, 4), (1, 1, 4, 3), (2, 3), dict(dimension_numbers=NHWC)),
    "patches": ((2, 8, 6, 4), (4, 2, 4, 3), (4, 2), dict(dimension_numbers=NHWC)),
    "channels first": ((2, 4, 8, 9), (3, 4, 2, 3), (2, 3), dict(dimension_numbers=NCHW)),
    "a rest": ((2, 9, 7, 4), (2, 2, 4, 3), (2, 2), dict(dimension_numbers=NHWC)),
    "one window": ((2, 5, 6, 4), (5, 4, 4, 3), (1, 4), dict(dimension_numbers=NHWC)),
    "one dim": ((2, 8, 4), (4, 4, 3), (4,), dict(dimension_numbers=("NHC", "HIO", "NHC"))),
    "dilated pixel": ((2, 4, 4, 4), (1, 1, 4, 3), (1, 1), dict(rhs_dilation=(2, 2))),
}
OTHERS = {
    "overlapping": ((2, 6, 6, 4), (2, 2, 4, 3), (1, 1), dict(dimension_numbers=NHWC)),
    "gaps": ((2, 6, 6, 4), (2, 2, 4, 3), (3, 3), dict(dimension_numbers=NHWC)),
    "grouped": ((2, 6, 6, 4), (1, 1, 2, 4), (1, 1), dict(feature_group_count=2)),
    "dilated": ((2, 8, 8, 4), (2, 2, 4, 3), (2, 2), dict(rhs_dilation=(2, 2))),
    "upsampled": ((2, 6, 6, 4), (1, 1, 4, 3), (1, 1), dict(lhs_dilation=(2, 2), padding=NONE)),
    "padded": ((2, 6, 6, 4), (1, 1, 4, 3), (1, 1), dict(padding=((1, 0), (0, 0)))),
}


def made(case):
    images, kernel, strides, options = case
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (images, kernel))
    options = dict(dimension_numbers=NHWC, padding="VALID") | options

    def conv(x, w, convolve=lax.conv_general_dilated, **more):
        return convolve(x, w, strides, **options, **more)

    return conv, x, w


def counted(fun, *args):
    equations = all_equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return collections.Counter(e.primitive.name for e in equations)


def sampled(names, *by_default):
    """All names, but for those by default marked as of the whole suite."""
    return [n if n in by_default else pytest.param(n, marks=pytest.mark.full) for n in names]


@pytest.mark.parametrize("name", sampled(MATMULS, "patches", "channels first", "strided"))
def test_a_convolution_of_patches_is_a_matmul(name):
    conv, x, w = made(MATMULS[name])
    wide = dict(forward_dtype=jnp.float32, backward_dtype=jnp.float32)

    def passes(fun):
        def both(x, w):
            out, pull = jax.vjp(fun, x, w)
            return out, *pull(out)

        return jax.jit(both)

    new = jsa.fp8_matmuls(conv, **wide)
    assert counted(new, x, w)["conv_general_dilated"] == 0

    def own(x, w):
        return conv(x, w, jsa.nn.conv_general_dilated, **wide)

    for got in (passes(new)(x, w), passes(own)(x, w)):
        for a, b in zip(got, passes(conv)(x, w), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    conv, x, w = made(OTHERS[name])
    assert counted(jsa.fp8_matmuls(conv), x, w) == counted(conv, x, w)
    assert counted(lambda x, w: conv(x, w, jsa.nn.conv_general_dilated), x, w)["dot_general"] == 0


def test_skipped_convolutions_stay():
    conv, x, w = made(MATMULS["pointwise"])
    rewritten = jsa.fp8_matmuls(conv, lambda matmul: False)
    assert counted(rewritten, x, w)["conv_general_dilated"] == 1


def test_a_predicate_sees_the_matmul():
    conv, x, w = made(MATMULS["patches"])
    seen = []
    jax.eval_shape(jsa.fp8_matmuls(conv, lambda matmul: seen.append(matmul) or True), x, w)
    assert seen[0].sizes == (2 * 2 * 3, 3, 4 * 2 * 4) and seen[0].rhs_name == "[1]"


def test_patch_embeddings_of_flax_are_fp8():
    """In linen and NNX, in all passes, with scales; FP8 operands as a matmul of patches has."""
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 3)), jnp.float16)
    model = linen.Conv(5, (4, 4), (4, 4), padding="VALID")
    params = model.init(jax.random.key(0), images)
    graph, state = nnx.split(nnx.Conv(3, 5, (4, 4), (4, 4), padding="VALID", rngs=nnx.Rngs(0)))

    def patches(params, x):
        rows = x.reshape(2, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 2, 2, -1)
        kernel, bias = params["params"]["kernel"], params["params"]["bias"]
        return rows @ kernel.reshape(-1, 5) + bias

    losses = [
        jsa.fp8_matmuls(lambda p, x, f=f: jnp.sum(jnp.square(f(p, x).astype(jnp.float32))))
        for f in (model.apply, patches)
    ]
    scaled = jsa.as_scaled_array(params, scale="rms", dtype=jnp.float16)
    got, expected = (jax.jit(jsa.scalify(jax.grad(f)))(scaled, images) for f in losses)
    for a, b in zip(jsa.tree.leaves(got), jsa.tree.leaves(expected), strict=True):
        a, b = (np.asarray(jsa.asarray(v, jnp.float32)) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 * np.abs(b).max())
    for loss, weights in (
        (losses[0], params),
        (jsa.fp8_matmuls(lambda p, x: jnp.sum(nnx.merge(graph, p)(x))), state),
    ):
        closed = jax.make_jaxpr(jax.grad(loss))(weights, images)
        dots = [e for e in all_equations(closed.jaxpr) if e.primitive.name == "dot_general"]
        types = {tuple(v.aval.dtype for v in e.invars) for e in dots}
        assert types and all({*t} <= {jnp.dtype(E4M3), jnp.dtype(E5M2)} for t in types)


# Embedding tables


@functools.cache
def nnx_embed():
    return nnx.split(nnx.Embed(6, 4, rngs=nnx.Rngs(0)))


def embed_with_nnx(table, ids):
    graph, state = nnx_embed()
    (_,), tree = jax.tree.flatten(state)
    return nnx.merge(graph, jax.tree.unflatten(tree, [table]))(ids)


LOOKUPS = {
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "index": lambda table, ids: table[ids],
    "jsa.nn.embed": jsa.nn.embed,
    "linen": lambda table, ids: linen.Embed(6, 4).apply({"params": {"embedding": table}}, ids),
    "nnx": embed_with_nnx,
}


@pytest.mark.parametrize("stored", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", sampled(LOOKUPS, "take", "jsa.nn.embed"))
def test_tables_with_a_scale_for_each_row(name, stored):
    """Rows of very different size keep their digits; gradients come back for each row."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(6, 4)) * 2.0 ** np.array([[0], [-20], [3], [-9], [12], [-30]])
    table = jnp.asarray(table, jnp.float32)
    ids = jnp.array([[5, 1, 1], [0, 4, 3]])
    scaled = jsa.as_scaled_array(table, scale="rms", dtype=stored, axis=0)
    assert scaled.scale.shape == (6, 1)
    digits = {"float16": 2.0**-10, "float8_e4m3fn": 2.0**-3}[stored]
    exact = np.asarray(jsa.asarray(scaled, jnp.float32))
    np.testing.assert_allclose(exact, table, rtol=digits)
    lookup, weights = LOOKUPS[name], jnp.asarray(rng.normal(size=(2, 3, 4)), jnp.float32)
    rows = jax.jit(jsa.scalify(lookup))(scaled, ids)
    np.testing.assert_array_equal(jsa.asarray(rows, jnp.float32), exact[ids])
    if stored != "float16":  # what is trained has 16 bits
        return

    def loss(table, ids):
        return jnp.sum(lookup(table, ids).astype(jnp.float32) * weights)

    got = jsa.asarray(jax.jit(jsa.scalify(jax.grad(loss)))(scaled, ids), jnp.float32)
    np.testing.assert_allclose(got, jax.grad(loss)(table, ids), rtol=2e-3, atol=1e-3)


def test_a_row_that_is_not_there_is_nan():
    scaled = jsa.as_scaled_array(jnp.ones((6, 4), jnp.float16), axis=0, scale="rms")
    rows = jsa.scalify(jsa.nn.embed)(scaled, jnp.array([5, 6]))
    np.testing.assert_array_equal(jsa.asarray(rows), [[1] * 4, [np.nan] * 4])
