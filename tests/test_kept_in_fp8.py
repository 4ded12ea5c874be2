"""What a backward pass keeps of FP8 matmuls: recomputed activations, policies, stored inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

LAYERS, ROWS, WIDTH, HIDDEN = 2, 8, 16, 32
E4M3 = jnp.float8_e4m3fn
POLICIES = jsa.checkpoint_policies
RNG = np.random.default_rng(0)


def weights():
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {
        name: jnp.asarray(RNG.normal(size=(LAYERS, *s)) / s[0] ** 0.5, jnp.float16)
        for name, s in shapes.items()
    }


W, X = weights(), jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float16)


def layer(h, w):
    return h + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def loss_of(layer):
    def loss(w, x):
        return jnp.mean(jnp.square(lax.scan(layer, x, w)[0].astype(jnp.float32)))

    return loss


def kept(loss):
    """The arrays of rows that a layer keeps, as "dtype x channels", of a scalified gradient."""
    closed = jax.make_jaxpr(jsa.scalify(jax.grad(loss)))(jsa.as_scaled_array(W), X)
    scans = [e for e in all_equations(closed.jaxpr) if e.primitive.name == "scan"]
    stacked = [v.aval for v in scans[0].outvars if v.aval.shape[:1] == (LAYERS,)]
    found = [a for a in stacked if a.shape[1:2] == (ROWS,) and len(a.shape) == 3]
    return sorted(f"{a.dtype.name} x {a.shape[2]}" for a in found)


F16, F8 = f"float16 x {HIDDEN}", f"float8_e4m3fn x {HIDDEN}"
INPUT8 = f"float8_e4m3fn x {WIDTH}"
LOSSES = {
    "as it is": jsa.fp8_matmuls(loss_of(layer)),
    "recompute": jsa.fp8_matmuls(loss_of(layer), recompute=True),
    "operands": jsa.fp8_matmuls(
        loss_of(jax.checkpoint(layer, policy=POLICIES.fp8_operands)), recompute=True
    ),
    "operands and dots": jsa.fp8_matmuls(
        loss_of(jax.checkpoint(layer, policy=POLICIES.fp8_operands_and_dots))
    ),
}


def test_what_is_kept():
    wide, narrow = kept(LOSSES["as it is"]), kept(LOSSES["recompute"])
    assert narrow.count(F16) == 2 < wide.count(F16)  # gate and up, as they are multiplied
    assert F8 not in narrow and INPUT8 in narrow  # that of the matmul behind is made again
    assert kept(LOSSES["operands"]) == sorted([F8, INPUT8, INPUT8])  # of up and down; the carry
    # Sums of FP8 matmuls are in bfloat16.
    expected = [F8, INPUT8, INPUT8, *[f"bfloat16 x {HIDDEN}"] * 2]
    assert kept(LOSSES["operands and dots"]) == sorted(expected)


@functools.cache
def gradients(name):
    w = jax.tree.map(lambda v: v.astype(jnp.float32), W)
    x = jnp.ldexp(X.astype(jnp.float32), jnp.arange(-12, 12, 1.5).astype(int))  # beyond both ends
    args = jsa.as_scaled_array((w, x), scale=1.0)
    return jax.jit(jsa.scalify(jax.value_and_grad(LOSSES[name])))(*args)


@pytest.mark.parametrize(
    "name",
    [
        "operands",
        pytest.param("recompute", marks=pytest.mark.full),
        pytest.param("operands and dots", marks=pytest.mark.full),
    ],
)
def test_values_stay(name):
    """Exactly: nothing is rounded once more, whatever is kept, the smallest and largest of E4M3."""
    trees = (jsa.tree.leaves(gradients(each)) for each in (name, "as it is"))
    for a, b in zip(*trees, strict=True):
        a, b = (np.asarray(jsa.asarray(v, jnp.float32)) for v in (a, b))
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_jax_rounds_what_it_keeps_once_more():
    """Why policies are for the inside of `scalify`; if this fails, JAX has become better."""
    x = jnp.asarray([0.01, 256.0], E4M3)
    np.testing.assert_array_equal(lax.reduce_precision(x, 4, 3).astype(jnp.float32), [0, np.nan])
    scaled = jsa.scalify(lambda x: lax.reduce_precision(x, 4, 3))(jsa.ScaledArray(x, 1.0))
    np.testing.assert_array_equal(scaled.data.astype(jnp.float32), x.astype(jnp.float32))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "function",
    [
        jax.nn.gelu,
        jax.nn.softplus,
        *(
            pytest.param(f, marks=pytest.mark.full)
            for f in (jax.nn.silu, jax.nn.sigmoid, jnp.tanh, jax.nn.elu)
        ),
    ],
    ids=lambda f: f.__name__,
)
def test_activations_are_found(function):
    """Of each, with a bias and a product in front, one array is kept in 16 bits."""

    def loss(w, x, b):
        return jnp.sum((function(x @ w + b) @ w.T).astype(jnp.float32))

    w, b = jnp.ones((WIDTH, HIDDEN), jnp.float16), jnp.ones(HIDDEN, jnp.float16)
    new = jsa.fp8_matmuls(loss, recompute=True)
    equations = jax.make_jaxpr(new)(w, X, b).jaxpr.eqns
    assert sum(e.primitive.name in ("checkpoint", "remat2") for e in equations) == 1
    assert new(w, X, b) == jsa.fp8_matmuls(loss)(w, X, b)


def test_softmax_and_rematerialised_layers_stay():
    def loss(w, x):
        inner = jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w.T)
        return jnp.sum(jax.nn.softmax(inner(x)))

    new = jsa.fp8_matmuls(loss, recompute=True)
    equations = all_equations(jax.make_jaxpr(new)(W["up"][0], X).jaxpr)
    assert sum(e.primitive.name in ("checkpoint", "remat2") for e in equations) == 1


# Stored inputs


def rms_norm(x, weight):
    return jsa.nn.rms_norm(x, weight)


def swiglu(a, b):
    return a * jax.nn.silu(b)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("fun", "argnums", "shapes"),
    [
        (rms_norm, 0, [(ROWS, WIDTH), (WIDTH,)]),
        (jax.nn.gelu, 0, [(ROWS, WIDTH)]),
        (swiglu, (0, 1), [(ROWS, WIDTH)] * 2),
    ],
    ids=["norm", "gelu", "swiglu"],
)
def test_derivatives_at_rounded_inputs(fun, argnums, shapes):
    args = [jnp.asarray(RNG.normal(size=s), jnp.float16) for s in shapes]
    ct = jnp.asarray(RNG.normal(size=shapes[0]), jnp.float16)
    stored = jsa.nn.store_inputs(fun, argnums=argnums)

    def passes(f):
        def both(ct, *args):
            out, pull = jax.vjp(f, *args)
            return out, pull(ct)

        return jax.jit(jsa.scalify(both))

    # The same numbers as small data beside a large scale, and the other way round.
    scaled = [jsa.ScaledArray(args[0] * 2.0**-3, 2.0**3), *args[1:]]
    out, expected = passes(stored)(ct, *scaled), passes(fun)(ct, *scaled)
    for a, b in zip(jsa.tree.leaves(out[0]), jsa.tree.leaves(expected[0]), strict=True):
        np.testing.assert_array_equal(jsa.asarray(a), jsa.asarray(b))
    for a, b in zip(jsa.tree.leaves(out[1]), jsa.tree.leaves(expected[1]), strict=True):
        a, b = (np.asarray(jsa.asarray(v, jnp.float32)) for v in (a, b))
        assert 0 < np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


def test_stored_inputs_are_all_that_is_kept():
    fun = jsa.nn.store_inputs(jax.nn.gelu)
    found = kept(loss_of(lambda h, w: (fun(h) * w["gate"][:, 0], None)))
    assert f"float8_e4m3fn x {WIDTH}" in found


def test_stored_inputs_in_transforms():
    fun = jsa.nn.store_inputs(lambda x, n, b: jax.nn.gelu(x) * n + b)
    x, b = X[0:4].astype(jnp.float32), jnp.ones(WIDTH)

    def loss(x, b):
        return jnp.sum(jax.vmap(lambda row: fun(row[None], 2, b))(x))

    np.testing.assert_allclose(
        jax.jit(jax.grad(loss))(x, b), 2 * jax.vmap(jax.vmap(jax.grad(jax.nn.gelu)))(x), atol=0.15
    )
    assert jax.grad(loss, argnums=1)(x, b)[0] == 4

    def slope(x):
        return jnp.sum(jax.grad(lambda v: jnp.sum(jsa.nn.store_inputs(jnp.sin)(v)))(x))

    np.testing.assert_allclose(jax.grad(slope)(x), -jnp.sin(x), atol=0.13)


def test_stored_inputs_refuse():
    with pytest.raises(TypeError, match="`fun` must be callable, got int"):
        jsa.nn.store_inputs(3)
    with pytest.raises(TypeError, match="at most 16 bits, as jnp.float8_e4m3fn, got float32"):
        jsa.nn.store_inputs(jnp.sin, jnp.float32)
    with pytest.raises(TypeError, match="`dtype` must be floating point"):
        jsa.nn.store_inputs(jnp.sin, jnp.int8)
