"""Block formats on eight virtual devices: cases for `tests/test_sharding.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa
from tests import block_values as reference

CASES = {}


def case(fun):
    """Add a case to those that run on eight devices."""
    CASES[fun.__name__] = fun
    return fun


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


@case
def arrays_in_blocks_are_cut_along_and_across_blocks():
    x = reference.normal(256, 6)
    state = {"w": jsa.as_scaled_array(x, block="nvfp4")}
    for spec in (P("data", "model"), P(("data", "model"))):
        placed = jax.device_put(state, jsa.tree.shardings(state, NamedSharding(mesh(), spec)))
        assert placed["w"].block_scales.sharding.spec == spec
        assert placed["w"].scale.sharding.spec == P()
        assert jsa.tree.check_shardings(placed) is placed
        np.testing.assert_array_equal(jax.jit(jsa.asarray)(placed)["w"], state["w"])
    made = jax.jit(lambda x: jsa.as_scaled_array(x, block="nvfp4"))(
        jax.device_put(x, NamedSharding(mesh(), P("data")))
    )
    jax.tree.map(np.testing.assert_array_equal, made, state["w"])
    short = {"w": jsa.as_scaled_array(x[:64], block="mxfp8")}
    with pytest.raises(ValueError, match=r"Axis 0 .* blocks of 32, .* would give each device 16"):
        jsa.tree.shardings(short, NamedSharding(mesh(), P("data")))


@case
def matmuls_of_block_formats_are_those_of_one_device():
    """Cut along every dim of both operands, on meshes of both kinds, in both passes."""
    x, w = reference.normal(4, 8, 64), reference.normal(64, 32, seed=1)
    formats = dict(forward_dtype=("nvfp4", "mxfp8"), backward_dtype="nvfp4", hadamard=16)
    dot = functools.partial(jsa.nn.matmul, **formats)

    def step(x, w):
        return jax.value_and_grad(lambda x, w: jnp.sum(jnp.tanh(dot(x, w))), (0, 1))(x, w)

    alone, scaled_alone = (
        jax.jit(step)(x, w),
        jax.jit(jsa.scalify(step))(*jsa.as_scaled_array((x, w))),
    )
    for kind in (AxisType.Auto, AxisType.Explicit):
        places = [(P("data"), P(None, "model"))]
        if kind is AxisType.Auto:  # the other has to be told where results are
            places.append((P("data", None, "model"), P("model")))
        for specs in places:
            args = [jax.device_put(a, NamedSharding(mesh(kind), s)) for a, s in zip((x, w), specs)]
            with jax.set_mesh(mesh(kind)):
                results = jax.jit(step)(*args)
                scaled = jax.jit(jsa.scalify(step))(*jsa.as_scaled_array(tuple(args)))
            for got, want in ((results, alone), (scaled, scaled_alone)):
                jax.tree.map(
                    lambda g, r: np.testing.assert_allclose(g, r, 1e-4, 1e-5),
                    jsa.asarray(got),
                    jsa.asarray(want),
                )
            for g, a in zip(results[1], args, strict=True):
                assert kind is AxisType.Auto or jax.typeof(g).sharding == jax.typeof(a).sharding


@case
def matmuls_of_block_formats_and_fp8_in_shard_map():
    """A weight that all devices share has a gradient that is summed over them."""
    x, w = reference.normal(8, 40), reference.normal(40, 8, seed=1)
    for name in ("mxfp8", jnp.float8_e4m3fn):
        dot = functools.partial(jsa.nn.matmul, forward_dtype=name, backward_dtype=jnp.float32)

        def gradient(w, x, dot=dot):
            return jax.grad(lambda w: jnp.sum(jnp.sin(dot(x, w))))(w)

        specs = dict(in_specs=(P(), P("data")), out_specs=P())
        shared = jax.shard_map(gradient, mesh=mesh(), **specs)
        want = gradient(w, x)
        for got in (
            jax.jit(shared)(w, x),
            jax.jit(jsa.scalify(shared))(*jsa.as_scaled_array((w, x))),
        ):
            np.testing.assert_allclose(jsa.asarray(got), want, rtol=1e-4, atol=1e-4)
