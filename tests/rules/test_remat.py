"""Rematerialisation: the scalified step saves, layer by layer, what the plain one saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify._compat import JAX_VERSION

LAYERS, BATCH, TIME, WIDTH, HEADS = 12, 4, 64, 128, 4
POLICIES = {"nothing": None, "dots": jax.checkpoint_policies.checkpoint_dots}
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "project": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}


def _norm(x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


def _block(h, w):
    """A transformer layer."""
    q, k, v = jnp.split((_norm(h) @ w["qkv"]).reshape(BATCH, TIME, HEADS, -1), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (HEADS / WIDTH) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), scores, -1e9)
    attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    h = h + attended.reshape(h.shape) @ w["project"]
    return h + jax.nn.gelu(_norm(h) @ w["up"]) @ w["down"]


def _gradient(policy="everything", unrolled=False):
    """The gradient of a stack of layers, rematerialised unless everything is saved."""
    remat = policy != "everything"
    block = jax.checkpoint(_block, policy=POLICIES[policy]) if remat else _block

    def loss(w, h):
        if unrolled:
            for i in range(LAYERS):
                h = block(h, jax.tree.map(lambda x: x[i], w))  # noqa: B023
        else:
            h = lax.scan(lambda h, w: (block(h, w), None), h, w)[0]
        return jnp.mean(h**2)

    return jax.grad(loss)


def _state():
    rng = np.random.default_rng(0)
    w = {
        name: jnp.asarray(rng.normal(0, shape[0] ** -0.5, (LAYERS, *shape)), jnp.float32)
        for name, shape in SHAPES.items()
    }
    return w, jnp.asarray(rng.normal(size=(BATCH, TIME, WIDTH)), jnp.float32)


def _barriers(fun, *args):
    return jax.jit(fun).lower(*args).as_text().count("optimization_barrier")


def _saved_bytes(fun, *args):
    """Bytes that the forward loop of the gradient hands to the backward loop."""
    loops = [e for e in jax.make_jaxpr(fun)(*args).jaxpr.eqns if e.primitive.name == "scan"]
    assert len(loops) == 2
    stacked = [v.aval for v in loops[0].outvars if v.aval.shape[:1] == (LAYERS,)]
    return sum(a.size * a.dtype.itemsize for a in stacked)


def _temporary_bytes(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.sampled(16)
@pytest.mark.parametrize("policy", ["everything", *POLICIES])
def test_the_forward_pass_saves_the_same_arrays_and_their_scales(policy):
    fun, args = _gradient(policy), _state()
    plain = _saved_bytes(fun, *args)
    ours = _saved_bytes(jsa.scalify(fun), *jsa.as_scaled_array(args))
    if policy != "everything":
        assert _barriers(jsa.scalify(fun), *jsa.as_scaled_array(args)) >= _barriers(fun, *args) > 0
        assert plain <= ours <= plain + 100 * 4 * LAYERS
    else:
        assert ours <= 1.1 * plain


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "unrolled",
    [
        False,
        pytest.param(
            True,
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(JAX_VERSION < (0, 11), reason="plain remat saves nothing"),
            ],
        ),
    ],
    ids=["scanned", "unrolled"],
)
def test_remat_saves_the_memory_that_it_saves_in_the_plain_step(policy, unrolled):
    args = _state()
    scaled = jsa.as_scaled_array(args)
    functions = _gradient(unrolled=unrolled), _gradient(policy, unrolled)
    plain = [_temporary_bytes(f, *args) for f in functions]
    ours = [_temporary_bytes(jsa.scalify(f), *scaled) for f in functions]
    print(f"temporary bytes: plain {plain}, ours {ours}")  # `pytest -rP` shows it
    assert plain[1] < 0.6 * plain[0]
    # A cube of float32 is kept in range by a factor of its own: one array of 60 more is alive.
    assert ours[1] / ours[0] <= 1.07 * plain[1] / plain[0], (plain, ours)


def test_what_is_kept_is_no_product_with_a_static_factor():
    """The matmul's result, and not times 1/4 beside it: that is multiplied where it is used."""

    def loss(w, x):
        return jnp.sum(jax.checkpoint(jnp.tanh)(x @ w))

    w, x = jsa.ScaledArray(jnp.ones((16, 8)), 0.5), jsa.ScaledArray(jnp.ones((4, 16)), 2.0)
    closed = jax.make_jaxpr(jsa.scalify(jax.value_and_grad(loss)))(w, x)
    equations = closed.jaxpr.eqns
    (product,) = {
        v
        for e in equations
        if e.primitive.name == "dot_general"
        for v in e.outvars[:1]
        if v.aval.shape == (4, 8)
    }
    remats = [e for e in equations if e.primitive.name in ("checkpoint", "remat2")]
    assert remats and all(product in e.invars for e in remats)
    value, grads = jsa.scalify(jax.value_and_grad(loss))(w, x)
    true, true_grads = jax.value_and_grad(loss)(jsa.asarray(w), jsa.asarray(x))
    np.testing.assert_allclose(jsa.asarray(value), true, rtol=1e-6)
    np.testing.assert_allclose(jsa.asarray(grads), true_grads, rtol=1e-6, atol=1e-6)
