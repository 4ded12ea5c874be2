"""With jit disabled, as people step through a model, all runs and comes to the same numbers."""

import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive

import jax_scalify as jsa
from jax_scalify import _compat
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.blocks.dot import block_round
from jax_scalify.blocks.quantising import Quantiser
from jax_scalify.interpreter.observing import is_observing
from jax_scalify.primitives.straight_through import straight_through
from jax_scalify.scales.program import placeholder_p
from tests.helpers import assert_close, values

DTYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
KINDS = {"dynamic": lambda tree: tree, "static": jsa.freeze_scales}
MXFP8 = Quantiser.of(jsa.BlockFormat("mxfp8"))


def _normal(shape, seed, dtype):
    data = np.random.default_rng(seed).normal(size=shape)
    return jsa.as_scaled_array(jnp.asarray(data, dtype), scale=0.25)


def _scanned(x, w):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c)), x, jnp.stack([w, w]))


def _sum_of_scan(x, w):
    return jnp.sum(_scanned(x, w)[0].astype(jnp.float32))


def _doubled_until_large(x, w):
    return lax.while_loop(lambda c: jnp.max(jnp.abs(c)) < 8, lambda c: c + c, x @ w)


def _branches(x, w):
    chosen = lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x - w, x)
    return chosen + lax.switch(1, [jnp.sin, jnp.cos], w)


@jsa.custom_scale
def _silu(x):
    return x * jax.nn.sigmoid(x)


def _loss(w, x):
    return jnp.mean(jax.nn.gelu(jsa.dynamic_rescale(x @ w)).astype(jnp.float32) ** 2)


def _rescaled_gradient(x, w):
    return jax.grad(lambda x: jnp.sum(jsa.ops.dynamic_rescale_l2_grad(x) * w))(x)


def _loss_with_bias(w, b, x):
    return jnp.sum(jnp.tanh(x @ w + b) ** 2)


def _cast(x, w):
    key = jax.random.key(0)
    narrow = jsa.ops.cast_on_forward(x, jnp.float8_e4m3fn)
    return jsa.ops.cast_on_backward(x, jnp.float8_e5m2, key=key), narrow.astype(x.dtype) @ w


def _stochastic(x, w):
    return jsa.ops.reduce_precision_on_forward(x, jnp.float8_e4m3fn, key=jax.random.key(0)) + w


PROGRAMS = {
    "dot": lambda x, w: x @ w,
    "einsum": lambda x, w: jnp.einsum("ij,kj->ik", x, w),
    "vmap": lambda x, w: jax.vmap(lambda r: jax.nn.softmax(r @ w))(x),
    "grad": lambda x, w: jax.grad(_loss, (0, 1))(w, x),
    "remat": lambda x, w: jax.grad(jax.checkpoint(_loss))(w, x),
    "gradient of a bias": lambda x, w: jax.grad(_loss_with_bias, (0, 1))(w, x[0], x),
    "scan": _scanned,
    "grad of scan": lambda x, w: jax.grad(_sum_of_scan, (0, 1))(x, w),
    "while": _doubled_until_large,
    "cond": _branches,
    "set_scaling": lambda x, w: jsa.set_scaling(x, w[0, 0]) + w,
    "rebalance_scale": lambda x, w: jsa.rebalance_scale(x, 4.0) * w,
    "stop_scaling": lambda x, w: jsa.stop_scaling(x) + w,
    "match_scales": lambda x, w: jsa.match_scales(x, w * 4),
    "get_data_and_scale": lambda x, w: jnp.multiply(*jsa.get_data_and_scale(x)) + w,
    "dynamic_rescale": lambda x, w: jsa.dynamic_rescale(x @ w, "max"),
    "delayed_rescale": lambda x, w: jsa.delayed_rescale(x @ w, jsa.init_delayed_rescale(x)),
    "on_backward": _rescaled_gradient,
    "cast": _cast,
    "stochastic cast": _stochastic,
    "straight_through": lambda x, w: straight_through(jnp.round(x), jnp.square, x) @ w,
    "block_round": lambda x, w: block_round(x, MXFP8, (1,), ()) + w.astype(jnp.bfloat16),
    "block_dot": lambda x, w: jsa.nn.matmul(x, w, forward_dtype="mxfp8"),
    "fp8": lambda x, w: jax.grad(lambda w: jnp.sum(jsa.nn.matmul(x, w)))(w),
    "custom_scale": lambda x, w: _silu(x) + jsa.nn.softmax(w),
    "layers": lambda x, w: jsa.nn.rms_norm(jsa.nn.gelu(x) + jax.nn.gelu(w, approximate=False)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_jitted(name, dtype, kind):
    x, w = (KINDS[kind](_normal((4, 4), seed, DTYPES[dtype])) for seed in (0, 1))
    want = jax.jit(jsa.scalify(PROGRAMS[name]))(x, w)
    with jax.disable_jit():
        got = jsa.scalify(PROGRAMS[name])(x, w)
    assert_close(got, values(want), 4 * jnp.finfo(DTYPES[dtype]).eps)


def _own_primitives():
    modules = pkgutil.walk_packages(jsa.__path__, "jax_scalify.")
    names = [m.name for m in modules if ".primitives" in m.name or ".base" in m.name]
    names += ["jax_scalify.scales.rounds", "jax_scalify.interpreter.observing"]
    found = [vars(importlib.import_module(name)).values() for name in names]
    return {x for values in found for x in values if isinstance(x, Primitive)} - {placeholder_p}


def test_these_programs_have_every_primitive_of_ours():
    found = set()
    x, w = (_normal((4, 4), seed, jnp.float16) for seed in (0, 1))
    for program in PROGRAMS.values():
        plain = jax.make_jaxpr(program)(x.data, w.data)
        with is_observing(True):
            scaled = jax.make_jaxpr(jsa.scalify(program))(x, w)
        found |= {e.primitive for j in (plain, scaled) for e in all_equations(j.jaxpr)}
    own = _own_primitives()
    unused = set() if _compat.keeps_barriers() else {"pin", "scale_round"}
    assert len(own) > 12
    assert {p.name for p in own - found} == unused


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_and_what_looks_at_it(dtype):
    """A training step; its report and records; a calibration; the search for the first nan."""
    optimizer = jsa.optim.low_precision(optax.adamw(1e-2))

    def step(state, x):
        w, moments = state
        loss, grad = jax.value_and_grad(_loss)(w, x)
        updates, moments = optimizer.update(grad, moments, w)
        return (jsa.optim.apply_updates(w, updates), moments), loss

    x, w = (_normal((4, 4), seed, DTYPES[dtype]) for seed in (0, 1))
    state = w, jsa.as_scaled_array(optimizer.init(w))
    scalified = jsa.scalify(step)
    want = jax.jit(scalified)(state, x)
    with jax.disable_jit():
        assert_close(scalified(state, x), values(want), 4 * jnp.finfo(DTYPES[dtype]).eps)
        assert jsa.numerics.report(scalified)(state, x).rows
        assert jsa.numerics.find_nonfinite(scalified)(state, x) is None
        calibration = jsa.calibrate(step, state, x, steps=1)
        calibrated = jsa.scalify(step, calibration=calibration)
        tracked = jsa.numerics.track(calibrated, calibration.watches, every=1)
        (state, _), record = tracked(calibration.freeze(state), x)
        assert calibration.guard(state, record) is not None
