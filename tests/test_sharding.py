"""Sharded state on eight virtual devices: data keeps its sharding, scales are replicated.

The number of devices is fixed when JAX starts, so the cases run in one process of their own.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.interpreter import registry
from tests import block_layouts, layouts, wire
from tests.unit_scaling import on_devices

DEVICES = 8
CASES = {}


def case(fun):
    """Add a case to those that run on eight devices."""
    CASES[fun.__name__] = fun
    return fun


@functools.cache
def mesh(kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def sharding(*spec):
    return NamedSharding(mesh(), P(*spec))


def scaled(seed, shape, scale=1.0):
    data = np.random.default_rng(seed).normal(size=shape)
    return ScaledArray(jnp.asarray(data, jnp.float32), jnp.asarray(scale, jnp.float32))


def put(tree, shardings):
    return jax.device_put(tree, jsa.tree.shardings(tree, shardings))


def assert_sharded(x, *spec):
    """Check the data's sharding, and that every device holds the whole scale."""
    want = NamedSharding(x.data.sharding.mesh, P(*spec))
    assert x.data.sharding.is_equivalent_to(want, x.ndim), x.data.sharding
    assert x.scale.sharding.is_fully_replicated, x.scale.sharding
    assert len(x.scale.sharding.device_set) == DEVICES


def assert_same(got, want, rtol=1e-5):
    """Compare values: with those of one device, or with the plain function's."""
    for a, b in zip(jsa.tree.leaves(got), jsa.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=rtol)


def layer(x, w):
    return jax.nn.relu(x @ w) + 1


def arguments():
    """`(x, w)` on one device, and sharded."""
    x, w = scaled(0, (8, 16), 2.0), scaled(1, (16, 8), 0.5)
    return (x, w), (put(x, sharding("data")), put(w, sharding(None, "model")))


# Inputs and constraints.


@case
def inputs_keep_their_sharding():
    one, many = arguments()
    assert_sharded(many[0], "data")
    assert_sharded(many[1], None, "model")
    fun = jax.jit(jsa.scalify(layer))
    out = fun(*many)
    assert_sharded(out, "data", "model")
    assert_same(out, fun(*one))
    assert_same(out, layer(*jsa.asarray(one)))


@case
def constraints_are_on_the_data():
    def fun(x, w):
        return lax.with_sharding_constraint(jnp.tanh(x @ w), sharding("model", "data")) * 2

    one, many = arguments()
    fun = jax.jit(jsa.scalify(fun))
    out = fun(*many)
    assert_sharded(out, "model", "data")
    assert_same(out, fun(*one))


@case
def constraints_in_a_mesh_context():
    def fun(x, w):
        return lax.with_sharding_constraint(jnp.tanh(x @ w), P("model", "data"))

    one, many = arguments()
    with jax.set_mesh(mesh()):
        out = jax.jit(jsa.scalify(fun))(*many)
    assert_sharded(out, "model", "data")
    assert_same(out, np.tanh(np.asarray(one[0]) @ np.asarray(one[1])))


@case
def constraints_in_loops_branches_and_remat():
    def body(h, w):
        h = lax.with_sharding_constraint(jnp.tanh(h @ w), sharding("data"))
        return lax.cond(jnp.sum(h) > 0, lambda v: v * 2, lambda v: v, h), None

    def fun(x, w):
        return lax.scan(jax.checkpoint(body), x, w)[0]

    x, w = scaled(0, (8, 16), 2.0), scaled(1, (3, 16, 16), 0.25)
    many = put(x, sharding("data")), put(w, sharding(None, None, "model"))
    fun = jax.jit(jsa.scalify(fun))
    out = fun(*many)
    assert_sharded(out, "data")
    assert_same(out, fun(x, w))


@case
def scales_that_are_not_scalar_are_replicated():
    x, w = arguments()[0]
    w = jsa.as_scaled_array(jsa.asarray(w), "rms", axis=1)
    many = put(x, sharding("data")), put(w, sharding(None, "model"))
    assert many[1].scale.shape == (1, 8)
    assert_sharded(many[1], None, "model")
    fun = jax.jit(jsa.scalify(layer))
    out = fun(*many)
    assert out.data.sharding.is_equivalent_to(sharding("data", "model"), 2)
    assert_same(out, fun(x, w))


# jit's shardings, from `jsa.tree.shardings`.


@case
def in_and_out_shardings():
    one, _ = arguments()
    fun = jsa.scalify(layer)
    out_shardings = jsa.tree.shardings(jax.eval_shape(fun, *one), sharding("model", "data"))
    jitted = jax.jit(
        fun,
        in_shardings=jsa.tree.shardings(one, (sharding("data"), sharding(None, "model"))),
        out_shardings=out_shardings,
    )
    out = jitted(*one)
    assert_sharded(out, "model", "data")
    assert_same(out, jax.jit(fun)(*one))
    compiled = jitted.lower(*jax.eval_shape(lambda *a: a, *one)).compile()
    assert_same(compiled(*jax.device_put(one, compiled.input_shardings[0])), out)


@case
def a_state_made_under_jit_from_the_shardings_of_a_plain_one():
    """As trainers set their state up: from the shapes of the plain optimizer's."""
    params = {"w": jnp.ones((8, 16), jnp.float16), "gain": jnp.ones(8, jnp.float16)}
    plain = jax.eval_shape(optax.adamw(1e-2).init, params)
    names = {0: (), 1: ("data",), 2: ("data", "model")}
    for kinds in ({}, dict(dtype=jnp.bfloat16), dict(second_moment_dtype=jnp.float8_e4m3fn)):
        init = jsa.optim.low_precision(optax.adamw(1e-2), **kinds).init
        shapes = jax.eval_shape(init, params)
        for make in (lambda *spec: P(*spec), sharding):
            layout = jax.tree.map(lambda x, make=make: make(*names[x.ndim]), plain)
            layout = jsa.tree.shardings(shapes, layout)
            assert jax.tree.structure(layout) == jax.tree.structure(shapes)
            with jax.set_mesh(mesh()):
                state = jax.jit(init, out_shardings=layout)(params)
            assert_same(state, init(params))
            for leaf in jsa.tree.leaves(state):
                if isinstance(leaf, jsa.ScaledArray):
                    assert_sharded(leaf, *names[leaf.ndim])


@case
def shardings_of_an_inner_jit():
    inner = jax.jit(
        layer,
        in_shardings=(sharding("data"), sharding(None, "model")),
        out_shardings=sharding("model", "data"),
    )
    one, many = arguments()
    out = jax.jit(jsa.scalify(lambda x, w: inner(x, w) * 2))(*many)
    assert_sharded(out, "model", "data")
    assert_same(out, 2 * layer(*jsa.asarray(one)))


@case
def an_inner_jit_with_shardings_keeps_a_leafs_scale():
    """Also on a mesh with explicit axes, where the shardings are those of the types."""
    for kind in _KINDS:
        rows = NamedSharding(mesh(kind), P("data"))
        add = jax.jit(lambda w, u: w + u, in_shardings=(rows, rows), out_shardings=rows)
        for dtype in (jnp.float16, jnp.float32):
            data = jax.device_put(jnp.arange(1, 9).astype(dtype), rows)
            for scale in (0.5, jnp.float32(0.5)):
                out = jax.jit(jsa.scalify(lambda w, add=add: add(w, 8 * w)))(
                    ScaledArray(data, scale)
                )
                assert_same(out, 4.5 * np.arange(1, 9))
                assert out.data.sharding.is_equivalent_to(rows, 1)
                if dtype == jnp.float32:  # a wide leaf returns at its own scale
                    assert out.scale == 0.5, out.scale


@case
def shardings_of_static_scales_and_other_leaves():
    state = {
        "static": ScaledArray(jnp.ones((8, 2)), 4.0),
        "dynamic": scaled(0, (8, 2)),
        "plain": jnp.ones(8),
        "count": jnp.arange(8),
    }
    placed = jax.device_put(state, jsa.tree.shardings(state, sharding("data")))
    assert placed["static"].scale == 4.0
    assert_sharded(placed["dynamic"], "data")
    out = jax.jit(jsa.scalify(lambda s: jax.tree.map(lambda x: x * 2, s)))(placed)
    assert out["dynamic"].data.sharding.is_equivalent_to(sharding("data"), 2)
    assert_same(out["count"], 2 * np.arange(8))


# A training step: state stays where it is, and is donated.


def _update(state, x, y):
    def loss_fn(params):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.mean((hidden @ params["out"] - y) ** 2)

    params, momentum = state
    loss, grads = jax.value_and_grad(loss_fn)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), loss


@case
def a_training_step():
    def state():
        params = {"w": scaled(0, (16, 8), 0.25), "b": scaled(1, (8,)), "out": scaled(2, (8, 4))}
        return params, jsa.as_scaled_array(jax.tree.map(jnp.zeros_like, jsa.asarray(params)))

    specs = {"w": sharding(None, "model"), "b": sharding("model"), "out": sharding("model", None)}
    shardings = jsa.tree.shardings(state(), (specs, specs))
    step = jax.jit(jsa.scalify(_update), donate_argnums=0, out_shardings=(shardings, None))
    plain, one, many = jsa.asarray(state()), state(), jax.device_put(state(), shardings)
    one_step = jax.jit(jsa.scalify(_update))
    for i in range(3):
        x, y = scaled(i, (8, 16)).data, scaled(i + 9, (8, 4)).data
        batch = jax.device_put((x, y), sharding("data"))
        old = many
        many, loss = step(many, *batch)
        one, one_loss = one_step(one, x, y)
        plain, plain_loss = _update(plain, x, y)
        assert_same((loss, loss), (one_loss, plain_loss))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        for part in many:
            assert_sharded(part["w"], None, "model")
            assert_sharded(part["b"], "model")
            assert_sharded(part["out"], "model")
    assert step._cache_size() == 1
    assert_same(many, one)
    assert_same(many, plain, rtol=1e-4)
    text = step.lower(many, *batch).compile().as_text()
    assert "all-reduce" in text


@case
def conversions_keep_the_sharding():
    data = jax.device_put(jnp.full((8, 4), 6.0), sharding("data", "model"))
    for scale in (None, "rms", 2.0):
        x = jsa.as_scaled_array(data, scale)
        assert x.data.sharding.is_equivalent_to(data.sharding, 2)
        assert jsa.asarray(x).sharding.is_equivalent_to(data.sharding, 2)
    x = put(jsa.as_scaled_array(data), data.sharding)
    assert_sharded(jsa.dynamic_rescale(x), "data", "model")
    assert_sharded(jsa.match_scales(x, jsa.dynamic_rescale(x)), "data", "model")
    history = jsa.init_delayed_rescale(x)
    moved, history = jax.jit(jsa.delayed_rescale)(x, history)
    assert_sharded(moved, "data", "model")
    assert history[0] == 2
    frozen = jsa.thaw_scales(jsa.freeze_scales(x))
    assert frozen.data.sharding == data.sharding


@case
def checkpoints():
    """Each array is restored where its partner is, or is to be."""
    x = scaled(0, (8, 16), 2.0**-20)
    state = {
        "w": put(x, sharding("data")),
        "static": jax.device_put(ScaledArray(x.data, 4.0), sharding("data")),
        "rows": put(jsa.as_scaled_array(x.data, "rms", axis=1), sharding(None, "model")),
        "plain": jax.device_put(x.data, sharding("data")),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), sharding("data")),
        "device": jax.device_put(jnp.arange(8), jax.devices()[3]),
        "anywhere": jnp.arange(8),
    }
    others = {name: sharding("model", "data") for name in ("w", "static", "rows", "plain")}
    others |= {name: sharding("model") for name in ("keys", "device", "anywhere")}
    moved = jax.device_put(state, jsa.tree.shardings(state, others))
    narrow = jsa.tree.astype(moved, jnp.float16)
    narrow["plain"] = put(jsa.as_scaled_array(narrow["plain"]), sharding("model"))
    with tempfile.TemporaryDirectory() as directory:
        jsa.checkpoint.save(f"{directory}/x", state)
        for like in (state, moved, narrow, jax.device_put(state, jax.devices()[0])):
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
            )
            for template in (like, shapes):
                got = jsa.checkpoint.restore(f"{directory}/x", template)
                assert got["static"].is_static
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(like), strict=True):
                    assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)
                    assert a.committed == (b.committed or template is shapes)
                assert_same(
                    jax.random.key_data(got.pop("keys")), jax.random.key_data(state["keys"])
                )
                want = {name: state[name] for name in got}
                assert_same(got, want, rtol=1e-3 if like is narrow else 0)


@case
def checkpoints_like_the_shapes_of_explicit_shardings():
    explicit = mesh(jax.sharding.AxisType.Explicit)
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/x"
        with jax.set_mesh(explicit):
            x = put(scaled(0, (8, 16)), NamedSharding(explicit, P("data", "model")))
            jsa.checkpoint.save(path, x)
            like = jax.eval_shape(jsa.scalify(lambda x: x * 2), x)
            got = jsa.checkpoint.restore(path, like)
            assert_sharded(got, "data", "model")
            assert_same(got, x, rtol=0)
        with pytest.raises(ValueError, match="restore it inside of `with jax.set_mesh"):
            jsa.checkpoint.restore(path, like)


@case
def explicit_sharding():
    """Shardings in types: what the function asks of them while it is traced is right."""
    one, _ = arguments()
    explicit = mesh(jax.sharding.AxisType.Explicit)
    seen = []

    def fun(x, w):
        out = layer(x, w)
        seen.append(jax.typeof(out).sharding.spec)
        return out

    with jax.set_mesh(explicit):
        x, w = (
            put(v, NamedSharding(explicit, P(*spec)))
            for v, spec in zip(one, (("data",), (None, "model")))
        )
        out = jax.jit(jsa.scalify(fun))(x, w)
        assert_sharded(out, "data", "model")
    assert seen == [P("data", "model")]
    assert_same(out, layer(*jsa.asarray(one)))


# shard_map and collectives: scales go in, through and out.


COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "data"), P()),
    "pmean": (lambda x: lax.pmean(jnp.tanh(x), "data"), P()),
    "pmax": (lambda x: lax.pmax(x, "data"), P()),
    "all_gather": (lambda x: lax.all_gather(x, "data", tiled=True) * 2, P("data")),
    "ppermute": (
        lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(3)]),
        P("data"),
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
        P(None, "data"),
    ),
    "all_to_all": (lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), P(None, "data")),
    "axis_index": (lambda x: x * lax.axis_index("data"), P("data")),
}


def _shard_map(fun, in_specs, out_specs, kind=jax.sharding.AxisType.Auto, check_vma=True):
    return jax.shard_map(
        fun, mesh=mesh(kind), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


def _collective(name):
    fun, out_spec = COLLECTIVES[name]
    x = scaled(0, (8, 16), 2.0)
    want = jax.jit(_shard_map(fun, P("data"), out_spec))(jsa.asarray(x))

    def scalify_outside():
        got = jax.jit(jsa.scalify(_shard_map(fun, P("data"), out_spec)))(x)
        assert isinstance(got, ScaledArray) and not got.scale.shape
        assert got.scale.sharding.is_fully_replicated
        assert_same(got, want)
        # Far beyond float16, and beyond what a sum of it holds.
        for scale in (2.0**-40, jnp.float32(2.0**40)):
            far = ScaledArray(x.data.astype(jnp.float16), scale)
            for check_vma in (True, False):
                mapped = _shard_map(fun, P("data"), out_spec, check_vma=check_vma)
                got = jsa.asarray(jax.jit(jsa.scalify(mapped))(far), jnp.float32)
                exact = np.asarray(jax.jit(mapped)(jsa.asarray(far, jnp.float32)))
                limit = 2e-3 * np.max(np.abs(exact))
                np.testing.assert_allclose(got, exact, rtol=0, atol=limit)

    def scalify_inside():
        inside = jsa.scalify(fun)
        specs = (ScaledArray(P("data"), P()),), ScaledArray(out_spec, P())
        if name in ("psum", "pmean", "pmax"):
            assert_same(jax.jit(_shard_map(inside, *specs))(x), want)
        # Every device has a scale of its own.
        own = ScaledArray(x.data, jnp.repeat(jnp.float32(2.0) ** jnp.arange(4), 2)[:, None])
        own_want = jax.jit(_shard_map(fun, P("data"), out_spec))(jsa.asarray(own))

        def whole(v):
            return jsa.asarray(jsa.scalify(fun)(v))

        in_specs = (ScaledArray(P("data"), P("data")),)
        assert_same(jax.jit(_shard_map(whole, in_specs, out_spec))(own), own_want)

    return scalify_outside, scalify_inside


for _name in COLLECTIVES:
    CASES[f"scalify_of_shard_map_{_name}"] = lambda name=_name: _collective(name)[0]()
    CASES[f"shard_map_of_scalify_{_name}"] = lambda name=_name: _collective(name)[1]()


@case
def gradients_through_shard_map():
    def loss(w, x):
        local = _shard_map(
            lambda x, w: lax.psum(jnp.tanh(x @ w), "model"),
            (P("data", "model"), P("model")),
            P("data"),
        )
        return jnp.sum(local(x, w) ** 2)

    x, w = arguments()[0]
    want = jax.jit(jax.grad(loss))(jsa.asarray(w), jsa.asarray(x))
    got = jax.jit(jsa.scalify(jax.grad(loss)))(w, x)
    assert_same(got, want)


_KINDS = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
MAPPED = {
    "constants": lambda x: jnp.where(x > 0, x * 3.0 + 1.0, 0.0),
    "softmax": lambda x: jax.nn.softmax(x),
    "own scale": lambda x: jnp.sum(x, keepdims=True) * x,  # the exponent of a number is its scale
    "norm": lambda x: x / jnp.sqrt(lax.psum(jnp.sum(x * x), "data")) + x,
    "scan": lambda x: lax.scan(lambda c, _: (c * 0.5 + x, c.sum()), x, None, length=3)[0],
    "branch": lambda x: lax.cond(lax.axis_index("data") > 1, lambda y: y * 2, lambda y: y, x),
    "call": lambda x: jax.jit(lambda y: y * y + y)(x),
    "remat": lambda x: jax.checkpoint(lambda y: jnp.tanh(y * y) + y)(x),
    "scatter": lambda x: x.at[0].set(1.0),
    "index": lambda x: jnp.full_like(x, 2.0) * lax.axis_index("data"),
}


@case
def scales_that_differ_far_leave_infinity():
    def fun(x):
        finite = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
        return jnp.max(finite, keepdims=True) ** 3 * x

    data = np.repeat(np.float32(2.0) ** np.array([-30, 0, 0, 30]), 2)[:, None] * np.ones(4)
    data[0, 0] = np.inf
    mapped = _shard_map(fun, P("data"), P("data"))
    got = jax.jit(jsa.scalify(mapped))(ScaledArray(jnp.asarray(data, jnp.float32), jnp.float32(1)))
    want = jax.jit(mapped)(jnp.asarray(data, jnp.float32))
    assert not got.scale.shape and np.isposinf(want[0, 0])
    np.testing.assert_array_equal(jsa.asarray(got)[0], want[0])
    assert_same(got, want)


@case
def collectives_over_axes_of_which_scales_vary_along_one():
    x = ScaledArray(jnp.ones((8, 4)), jnp.float32(2.0) ** jnp.arange(8)[:, None])
    for fun in (
        lambda x: lax.pmean(jnp.mean(x**2), ("data", "model")),
        lambda x: lax.psum(x, ("data", "model")),
        lambda x: lax.pmax(x, ("model", "data")),
    ):
        mapped = _shard_map(fun, P("data", "model"), P())
        assert_same(jax.jit(jsa.scalify(mapped))(x), jax.jit(mapped)(jsa.asarray(x)))


@case
def small_leaves_of_one_shape_and_other_shardings():
    optimizer = jsa.optim.low_precision(optax.adamw(1e-3))

    def step(params, state):
        grads = jax.grad(lambda p: sum(jnp.sum(x**2) for x in p.values()))(params)
        updates, state = optimizer.update(grads, state, params)
        return jsa.optim.apply_updates(params, updates), state

    devices = mesh(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(devices):
        specs = {"cut": P("data"), "also cut": P("data"), "whole": P(None)}
        params = {
            k: jax.device_put(jnp.ones(8), NamedSharding(devices, s)) for k, s in specs.items()
        }
        params = jsa.as_scaled_array(params, dtype="float16")
        state = jsa.as_scaled_array(optimizer.init(params))
        new, _ = jax.jit(jsa.scalify(step))(params, state)
    for name, spec in specs.items():
        assert jax.typeof(new[name].data).sharding.spec == spec
        assert_same(new[name], new["whole"])


@case
def values_at_scales_that_differ_between_devices():
    """A wide array holds values, which stay as they are at the largest scale of all devices."""

    def stage(x, w):  # of a pipeline
        first = lax.axis_index("data") == 0
        y = lax.ppermute(x @ w, "data", [(0, 1), (1, 2), (2, 3)])
        return jnp.where(first, x, y)

    def scaled_by_a_sum(x, w):
        return x * jnp.sum(jsa.dynamic_rescale(x)) @ w

    for fun in (stage, scaled_by_a_sum):
        for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
            for check_vma in (True, False):
                mapped = _shard_map(fun, (P("data"), P()), P("data"), check_vma=check_vma)
                data = 2.0 ** (np.arange(8)[:, None] - 4) * jnp.ones((8, 2))
                x = ScaledArray(data.astype(dtype), jnp.float32(4))
                w = ScaledArray(jnp.eye(2, dtype=dtype), jnp.float32(2.0**-6))
                plain = (jsa.asarray(v, jnp.float32) for v in (x, w))
                assert_same(jax.jit(jsa.scalify(mapped))(x, w), jax.jit(mapped)(*plain))


@case
def equal_elements_that_shard_map_shards():
    for check_vma in (True, False):
        for make in (
            lambda t: jnp.ones(8, bool),
            lambda t: jnp.full(8, 3),
            lambda t: t + jnp.zeros(8, t.dtype),
        ):
            fun = _shard_map(
                lambda x, m: jnp.where(m > 0, x * m, x),
                (P("data"),) * 2,
                P("data"),
                check_vma=check_vma,
            )
            x, t = scaled(0, 8, 4.0), jnp.float32(3)
            got = jax.jit(jsa.scalify(lambda x, t, fun=fun, make=make: fun(x, make(t))))(x, t)
            assert_same(got, jsa.asarray(x) * make(t))


@case
def gathered_rows_keep_their_scales():
    gather = _shard_map(
        lambda w: lax.all_gather(w, "data", axis=0, tiled=True), P("data"), P(), check_vma=False
    )
    for rows in (4, 8):
        scales = jnp.asarray(2.0 ** (-8.0 * np.arange(rows)), jnp.float32)[:, None]
        w = ScaledArray(jnp.full((rows, 3), 1.3, jnp.float16), scales)
        got = jax.jit(jsa.scalify(gather))(w)
        np.testing.assert_array_equal(jsa.asarray(got, jnp.float32), jsa.asarray(w, jnp.float32))


@case
def bodies_of_shard_map():
    """Values and types are those of the plain function, whatever the mesh and the scales.

    A function has one of the three kinds of scales, and all of them with `--full`.
    """
    data = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    scales = 2.0, jnp.float32(0.25), jnp.exp2(jnp.arange(-4.0, 4.0))[:, None]
    settings = [(kind, c) for kind in _KINDS for c in (True, False)]
    for number, (name, fun) in enumerate(MAPPED.items()):
        for k, scale in enumerate(scales):
            if k != number % 3 and not layouts.FULL:
                continue
            kind, check_vma = settings[(number + k) % 4]
            mapped = _shard_map(fun, (P("data"),), P("data"), kind, check_vma)

            def loss(x, mapped=mapped):
                return jnp.sum(mapped(x) ** 2)

            with jax.set_mesh(mesh(kind)):
                x = jax.device_put(data, NamedSharding(mesh(kind), P("data")))
                arg = ScaledArray(x / scale, scale)
                for function in (mapped, jax.grad(loss)):
                    want = jax.jit(function)(x)
                    got = jax.jit(jsa.scalify(function))(arg)
                    result = got.data if isinstance(got, ScaledArray) else got
                    assert jax.typeof(result).sharding == jax.typeof(want).sharding, name
                    np.testing.assert_allclose(
                        jsa.asarray(got), want, 1e-4, 1e-4, err_msg=f"{name} {number + k}"
                    )


@case
def fp8_matmuls():
    """In a mesh of explicit axes a gradient is sharded as what it is the gradient of."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 4, 16), (16, 8)))

    def loss(x, w):
        return jnp.sum(jsa.nn.matmul(x, w) ** 2)

    expected = jax.grad(loss, (0, 1))(x, w)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        for spec in (P("data"), P(None, "data"), P("data", None, None)):
            with jax.set_mesh(mesh(kind)):
                args = [
                    jax.device_put(x, NamedSharding(mesh(kind), spec)),
                    jax.device_put(w, NamedSharding(mesh(kind), P(None, None))),
                ]
                grad = jax.grad(loss, (0, 1))
                got = jax.jit(grad)(*args)
                scaled = jax.jit(jsa.scalify(grad))(*jsa.as_scaled_array(args))
                if kind is jax.sharding.AxisType.Explicit:
                    types = [jax.typeof(a).sharding for a in (*got, *args)]
                    assert types[:2] == types[2:]
            for a, b, c in zip(got, scaled, expected, strict=True):
                np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(b, c, rtol=1e-4, atol=1e-4)


EXPLICIT = {
    "where": lambda x, w: jnp.where(x > 0, x, 0.0),
    "relu": lambda x, w: jax.grad(lambda x: jax.nn.relu(x).sum())(x),
    "norm": lambda x, w: jax.grad(lambda w: jax.nn.standardize(x @ w).sum())(w),
    "softmax": lambda x, w: jax.grad(lambda x: jax.nn.log_softmax(x)[:, 0].sum())(x),
    "concatenate": lambda x, w: jnp.concatenate([x, jnp.ones_like(x)], 1),
    "loop": lambda x, w: lax.scan(lambda c, _: (jax.nn.relu(c / 2), c.sum()), x, None, length=3),
    "zeros": lambda x, w: (jnp.zeros_like(x), x * 0),
}


@case
def constants_have_the_sharding_of_their_partner():
    """On a mesh with explicit axes: values and types are those of the plain function."""
    devices = mesh(jax.sharding.AxisType.Explicit)
    rng = np.random.default_rng(0)
    with jax.set_mesh(devices):
        x = jax.device_put(jnp.asarray(rng.normal(size=(16, 8)), jnp.float32), P("data", None))
        w = jax.device_put(jnp.asarray(rng.normal(size=(8, 8)), jnp.float32), P(None, None))
        args = jsa.as_scaled_array((x, w))
        for name, function in EXPLICIT.items():
            plain = jax.tree.leaves(jax.jit(function)(x, w))
            for operands in (args, jsa.freeze_scales(args)):
                results = jax.jit(jsa.scalify(function))(*operands)
                leaves = jax.tree.leaves(results, is_leaf=lambda leaf: hasattr(leaf, "to_array"))
                for got, want in zip(leaves, plain, strict=True):
                    data = got.data if isinstance(got, ScaledArray) else got
                    assert jax.typeof(data).sharding == jax.typeof(want).sharding, name
                    np.testing.assert_allclose(jsa.asarray(got), want, 1e-4, 1e-5, err_msg=name)


@case
def averages_are_rounded_as_on_one_device():
    average = jsa.optim.ema(0.999)
    params = {"w": scaled(0, (16, 24)), "b": scaled(1, (24,))}
    params = jsa.as_scaled_array(jsa.asarray(params), "rms", dtype=jnp.float16)
    other = jax.tree.map(lambda x: 1.5 * x, jsa.asarray(params, jnp.float32))
    other = jsa.as_scaled_array(other, "rms", dtype=jnp.float16)

    def averaged(params):
        step = jax.jit(jsa.scalify(average.update))
        state = jsa.optim.EmaState(jnp.int32(5000), params)
        for _ in range(3):
            out, state = step(other, state)
        return out, state

    alone = averaged(params)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        places = {"w": P("data", "model"), "b": P("model")}
        places = {name: NamedSharding(mesh(kind), spec) for name, spec in places.items()}
        with jax.set_mesh(mesh(kind)):
            other = put(other, places)
            out, state = averaged(put(params, places))
        assert_sharded(state.ema["w"], "data", "model")
        jax.tree.map(np.testing.assert_array_equal, (out, state), alone)


@case
def misplaced_scales_are_named():
    x = put(scaled(0, (8, 16)), sharding("data"))
    rows = jsa.as_scaled_array(x.data, "rms", axis=0)
    good = {
        "one": x,
        "rows": ScaledArray(rows.data, jax.device_put(rows.scale, sharding("data"))),
        "static": ScaledArray(x.data, 2.0),
        "anywhere": ScaledArray(x.data, jnp.float32(2)),
        "plain": jnp.ones(3),
    }
    assert jsa.tree.check_shardings(good) is good
    del good["anywhere"]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), good
    )
    assert jsa.tree.check_shardings(shapes) is shapes
    elsewhere = jax.device_put(x.scale, jax.devices()[3])
    along = ScaledArray(rows.data, jax.device_put(rows.scale, sharding("model")))
    with pytest.raises(ValueError) as error:
        jsa.tree.check_shardings({"a": along, "b": {"c": ScaledArray(x.data, elsewhere)}, **good})
    message = str(error.value)
    assert "['a']: along other axes: data P('data',)" in message and "P('model',)" in message
    assert "['b']['c']: on other devices" in message and "'rows'" not in message
    assert "jsa.tree.shardings(state" in message
    with pytest.raises(ValueError, match="not found in mesh|not in mesh|not found"):
        sharding("no_such_axis")


CASES |= wire.CASES | block_layouts.CASES | on_devices.CASES

CASES_OF_LAYOUTS = [
    pytest.param(
        name, marks=[pytest.mark.newest] + [pytest.mark.full] * (name in layouts.WITH_FULL_ONLY)
    )
    for name in layouts.CASES
]

# The process with eight devices, and the test that asks it.


def main():
    """Run the cases that the arguments name; print the traceback of each that fails, as JSON."""
    assert len(jax.devices()) == DEVICES
    jax.config.update("jax_disable_most_optimizations", not layouts.FULL)
    failures = {}
    for name in sys.argv[1:]:
        registry._warned.clear()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                (CASES | layouts.CASES)[name]()
        except BaseException:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


@pytest.fixture(scope="module")
def failures(request):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    items = [i for i in request.session.items if i.name.startswith("test_on_eight_devices[")]
    names = [item.callspec.params["name"] for item in items]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    kind = "full" if request.config.getoption("--full") else ""
    more = {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "SHARDING_TESTS": kind}
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_sharding", *names],
        env={**os.environ, **more},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*CASES, *CASES_OF_LAYOUTS])
def test_on_eight_devices(name, failures):
    if name in failures:
        pytest.fail(failures[name], pytrace=False)


if __name__ == "__main__":
    main()
