"""JAX's flags for its new custom derivatives and remat: the same functions, the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.interpreter import registry
from tests.helpers import assert_close, in_float64
from tests.interpreter.differentiated import (
    FORWARD,
    FUNCTIONS,
    IMPLICIT,
    KINDS,
    LOSSES,
    POSITIVE,
    REFUSED,
    REVERSE,
    X,
    in_units_of_results,
    outside,
)

FLAGS = [f"jax_{name}3" for name in ("custom_vjp", "custom_jvp", "remat")]
FLAGS = [flag for flag in FLAGS if hasattr(jax.config, flag)]
pytestmark = pytest.mark.skipif(not FLAGS, reason="this JAX has none of the flags")


@pytest.fixture(params=["all", *FLAGS], autouse=True)
def flag(request, monkeypatch):
    """Each flag alone, and all of them."""
    flags = FLAGS if request.param == "all" else [request.param]
    before = {name: getattr(jax.config, name) for name in flags}
    monkeypatch.setattr(registry, "_warned", set())
    try:
        for name in flags:
            jax.config.update(name, True)
        with jsa.ScalifyConfig(missing_rule="error"):
            yield request.param
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def layers(h, w):
    def layer(h, w):
        return jnp.tanh(h @ w) + jax.nn.relu(h), None

    return lax.scan(jax.checkpoint(layer), h, w)[0]


# A function for each place in which JAX meets a rule.
NAMES = [
    f"{mode}-{name}"
    for mode in ("jvp", "vjp")
    for name in ("direct", "jit", "vmap", "scan", "cond", "remat-scan", "nondiff_argnums")
] + [
    "jvp-trees-integers",
    "vjp-trees-integers",
    "jvp-symbolic_zeros",
    "vjp-symbolic_zeros",
    "vjp-optimize_remat",
    "vjp-closure_convert",
    "vjp-jvp-beside",
    "jvp-logsumexp",
]


def with_flags(*names):
    """Names with the flags that they depend on."""
    touched = {"jax_custom_jvp3": "jvp", "jax_custom_vjp3": "vjp", "jax_remat3": "remat"}
    return pytest.mark.parametrize(
        "name, flag",
        [
            pytest.param(name, flag, marks=() if flag == "all" or sampled else pytest.mark.full)
            for flag in ("all", *FLAGS)
            for name in names
            if flag == "all" or touched[flag] in name
            for sampled in [name.endswith(("direct", "remat-scan"))]
        ],
        indirect=["flag"],
    )


def jit(name):
    """Compile at once but for functions that are simple, which run operation by operation."""
    return (lambda f: f) if name.endswith("direct") else jax.jit


@pytest.mark.sampled(8)
@with_flags("jvp-direct", "vjp-direct", "jvp-remat-scan", "vjp-remat-scan", "vjp-optimize_remat")
def test_gradient_inside(name, flag):
    fun, grad = FUNCTIONS[name], REVERSE["grad"]
    x = ScaledArray(jnp.asarray(X / 4), jnp.float32(4))
    assert_close(jit(name)(jsa.scalify(grad(fun)))(x), in_float64(grad(fun), X))


@pytest.mark.sampled(4)
@with_flags(*NAMES)
def test_value_inside(name, flag):
    """Not differentiated, so that the new primitives are met."""
    fun = FUNCTIONS[name]
    x = ScaledArray(jnp.asarray(X, jnp.float16), jnp.float32(2.0**20))
    if "trees" in name or "logsumexp" in name:
        x = ScaledArray(x.data, jnp.float32(1))
    assert_close(jax.jit(jsa.scalify(fun))(x), in_float64(fun, X * np.float32(x.scale)), 4e-3)


@pytest.mark.sampled(32)
@with_flags(*NAMES)
def test_gradient_outside(name, flag):
    fun, grad = FUNCTIONS[name], REVERSE["grad"]
    assert_close(jit(name)(grad(outside(fun)))(jnp.asarray(X)), in_float64(grad(fun), X))


@pytest.mark.sampled(8)
@with_flags(*(name for name in NAMES if name.startswith("jvp")))
def test_forward_mode(name, flag):
    fun, jvp = FUNCTIONS[name], FORWARD["jvp"]
    want = in_float64(jvp(fun), X)
    assert_close(jit(name)(jvp(outside(fun)))(jnp.asarray(X)), want)
    assert_close(
        jit(name)(jsa.scalify(jvp(fun)))(ScaledArray(jnp.asarray(X / 4), jnp.float32(4))), want
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", ["vmap-grad", "jit-grad", "grad-remat"])
@with_flags("jvp-direct", "vjp-direct")
def test_ways_outside(name, way, flag):
    if (way, flag) == ("grad-remat", "jax_custom_vjp3") and jax.__version__ < "0.11":
        pytest.skip("JAX 0.10's own: a custom_vjp of a tree in a remat, with the one new and not")
    fun, way = FUNCTIONS[name], REVERSE[way]
    assert_close(way(outside(fun))(jnp.asarray(X)), in_float64(way(fun), X))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["static", "per-axis"])
@with_flags("jvp-direct", "vjp-direct")
def test_kinds_of_scales_outside(name, kind, flag):
    fun, grad = FUNCTIONS[name], REVERSE["grad"]
    assert_close(grad(outside(fun, KINDS[kind]))(jnp.asarray(X)), in_float64(grad(fun), X))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("exponent", [-20, 20])
@with_flags("jvp-scan", "vjp-scan", "vjp-remat-scan")
def test_float16_far_from_1_outside(name, exponent, flag):
    fun, x = FUNCTIONS[name], X * np.float32(2.0**exponent)
    units_of = in_units_of_results(fun, x)

    def convert(x):
        return jsa.as_scaled_array(x, scale=2.0**exponent, dtype=jnp.float16)

    got = jax.jit(REVERSE["vjp"](units_of(outside(fun, convert))))(x)
    assert_close(got, in_float64(REVERSE["vjp"](units_of(fun)), x), 4e-3)


def _layers_loss(w, h):
    return jnp.sum(layers(h, w).astype(jnp.float32) ** 2)


@pytest.mark.sampled(16)
def test_remat_in_a_scan(flag):
    w, h = np.stack([np.eye(3, dtype=np.float32) * s for s in (0.5, 1.0, 2.0)]), X
    scaled = jsa.as_scaled_array((w, h), scale="rms", dtype=jnp.float16)
    grad = jax.jit(jsa.scalify(jax.grad(_layers_loss)))(*scaled)
    assert grad.dtype == jnp.float16 and grad.scale.shape == (3, 1, 1)
    assert_close(grad, in_float64(jax.grad(_layers_loss), w, h), 1e-2)
    got = jax.jit(jax.grad(lambda w: outside(_layers_loss)(w, h)))(jnp.asarray(w))
    assert_close(got, in_float64(jax.grad(_layers_loss), w, h))


@pytest.mark.sampled(4)
def test_remat_is_still_there(flag):
    """The barriers that keep the forward pass from being reused."""
    w, h = jnp.ones((3, 3, 3)), jnp.asarray(X)
    grad = jax.grad(_layers_loss)
    plain = jax.jit(grad).lower(w, h).as_text().count("optimization_barrier")
    scaled = jax.jit(jsa.scalify(grad)).lower(*jsa.as_scaled_array((w, h), scale=2.0))
    assert scaled.as_text().count("optimization_barrier") >= plain > 0


@pytest.mark.sampled(8)
def test_a_training_step(flag):
    def step(w, h):
        loss, grad = jax.value_and_grad(_layers_loss)(w, h)
        return w - 0.125 * grad, loss

    w = np.stack([np.eye(3, dtype=np.float32) * s for s in (0.5, 1.0, 2.0)])
    got = jax.jit(jsa.scalify(step))(*jsa.as_scaled_array((w, X), scale="rms"))
    assert_close(got, in_float64(step, w, X))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("flag", ["all"], indirect=True)
@pytest.mark.parametrize(
    "name", ["root", "linear_solve", pytest.param("odeint", marks=pytest.mark.full)]
)
def test_implicit_functions(name, flag):
    fun, tolerance = IMPLICIT[name]
    grad = REVERSE["grad"]
    want = in_float64(grad(fun), POSITIVE)
    x = ScaledArray(jnp.asarray(POSITIVE / 2), jnp.float32(2))
    assert_close(jax.jit(jsa.scalify(grad(fun)))(x), want, tolerance)
    assert_close(jax.jit(grad(outside(fun)))(POSITIVE), want, tolerance)


@pytest.mark.parametrize("loss", LOSSES)
def test_with_respect_to_a_scaled_array_they_are_refused(loss, flag):
    x = ScaledArray(jnp.asarray(X), jnp.float32(2))
    for name in ("grad-of-value", "vjp"):
        with pytest.raises(TypeError, match=r"(?s)`ScaledArray`.*inside"):
            REFUSED[name](jsa.scalify(LOSSES[loss]), x)


def test_plain_arguments_leave_the_program_unchanged(flag):
    for name in ("jvp-scan", "vjp-scan", "vjp-remat-scan"):
        fun = FUNCTIONS[name]
        with jax.numpy_dtype_promotion("standard"):
            plain, ours = jax.make_jaxpr(fun)(X), jax.make_jaxpr(jsa.scalify(fun))(X)
        assert [e.primitive for e in plain.eqns] == [e.primitive for e in ours.eqns]
