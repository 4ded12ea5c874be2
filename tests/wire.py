"""In which dtypes sums over devices travel: cases of `test_sharding.py`, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base.jaxprs import all_equations

DEVICES = 8
E5M2 = jsa.ScalifyConfig(sum_dtype=jnp.float8_e5m2)
WIDE = jsa.ScalifyConfig(sum_dtype=jnp.float32)
# Devices, and a result that each of them has a part of, or all.
SHAPES = ((8, 4, 5), (8, 3, 16), (8, 3, 5), (8, 16, 1))
CASES = {}


def case(fun):
    """Add a case to those that run on eight devices."""
    CASES[fun.__name__] = fun
    return fun


def over_devices(fun, out_spec=None, check_vma=True, kind=AxisType.Auto):
    """Map a function of each device's part."""
    mesh = jax.make_mesh((DEVICES,), ("d",), (kind,))
    specs = {"in_specs": P("d"), "out_specs": out_spec or P(), "check_vma": check_vma}
    return jax.shard_map(fun, mesh=mesh, **specs)


def sent(fun, *args):
    """The dtypes of what collectives of a traced function take, but for scales."""
    names = ("psum", "psum_invariant", "reduce_scatter", "all_to_all", "all_gather_invariant")
    jaxpr = jax.make_jaxpr(fun)(*args)
    return {
        (e.primitive.name.removesuffix("_invariant"), str(e.invars[0].aval.dtype))
        for e in all_equations(jaxpr)
        if e.primitive.name in names and e.invars[0].aval.ndim > 1
    }


def operand(shape, dtype, exponent=0):
    """Data of unit size, of which each device has a part along the first axis."""
    data = np.random.default_rng(0).normal(size=shape)
    return ScaledArray(jnp.asarray(data, dtype), jnp.float32(2.0**exponent))


def total(x):
    """The sum over devices, in float64, at the scale 1."""
    return np.asarray(x.data, np.float64).sum(0, keepdims=True)


@case
def sums_in_16_bits_travel_in_16_bits():
    fun = over_devices(lambda x: lax.psum(x, "d"))
    for dtype in (jnp.float16, jnp.bfloat16):
        x = operand((8, 4, 5), dtype)
        assert sent(jsa.scalify(fun), x) == {("psum", jnp.dtype(dtype).name)}
        assert sent(jsa.scalify(fun, config=WIDE), x) == {("psum", "float32")}
        for exponent in (-40, 0, 40):
            x = ScaledArray(x.data, jnp.float32(2.0**exponent))
            got = jax.jit(jsa.scalify(fun))(x)
            assert got.dtype == dtype
            want = total(x)
            error = np.abs(np.asarray(jsa.asarray(got, jnp.float32)) / 2.0**exponent - want).max()
            assert error <= 4 * float(jnp.finfo(dtype).eps) * np.abs(want).max()


@case
def a_sum_in_float16_is_right_to_the_ends_of_the_range():
    fun = over_devices(lambda x: lax.psum(x, "d"))
    largest = ScaledArray(jnp.full((8, 2), 60000.0, jnp.float16), jnp.float32(1))
    alternating = ScaledArray(largest.data * jnp.float16([[1], [-1]] * 4), jnp.float32(1))
    tiny = ScaledArray(jnp.full((8, 2), 2.0**-10, jnp.float16), jnp.float32(1))
    for x in (alternating, tiny):
        np.testing.assert_array_equal(
            jsa.asarray(jax.jit(jsa.scalify(fun))(x), "float32"), total(x)
        )
    for special in (np.inf, np.nan):
        x = ScaledArray(largest.data.at[3, 0].set(special), jnp.float32(1))
        got = np.asarray(jsa.asarray(jax.jit(jsa.scalify(fun))(x), jnp.float32))
        np.testing.assert_array_equal(got[0, 0], np.float32(special))


@case
def gradients_in_e5m2_are_rounded_once():
    dtypes = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float16)
    kinds = ((AxisType.Auto, True), (AxisType.Explicit, True), (AxisType.Auto, False))
    rows = [(s, d, k) for s, d in zip(SHAPES, dtypes, strict=True) for k in kinds[:2]]
    for shape, dtype, (kind, check_vma) in [*rows, (SHAPES[2], jnp.float16, kinds[2])]:
        whole = over_devices(lambda x: lax.psum(x, "d"), None, check_vma, kind)
        fun = jsa.scalify(whole, config=E5M2)
        x = operand(shape, dtype, 30)
        if kind is AxisType.Explicit:
            sharding = NamedSharding(jax.make_mesh((DEVICES,), ("d",)), P("d"))
            x = ScaledArray(jax.device_put(x.data, sharding), x.scale)
        want = np.asarray(x.data.astype(jnp.float8_e5m2), np.float64).sum(0, keepdims=True)
        got = jsa.asarray(jax.jit(fun)(x), jnp.float32)
        assert got.shape == want.shape
        error = np.abs(np.asarray(got) / 2.0**30 - want).max()
        assert error <= float(jnp.finfo(dtype).eps) * np.abs(want).max()
        gathered = {("all_gather", jnp.dtype(dtype).name)} if check_vma else set()
        assert sent(fun, x) == {("all_to_all", "float8_e5m2")} | gathered


@case
def scattered_gradients_in_e5m2():
    x = operand((8, 16, 8), jnp.float16, -30)
    for tiled, axis in ((True, 1), (True, 2), (False, 2)):

        def scatter(x, tiled=tiled, axis=axis):
            part = lax.psum_scatter(x, "d", scatter_dimension=axis, tiled=tiled)
            return part if tiled else part[..., None]

        mapped = over_devices(scatter, P(*[None] * axis, "d"))
        got = jax.jit(jsa.scalify(mapped, config=E5M2))(x)
        narrow = np.asarray(x.data.astype(jnp.float8_e5m2), np.float64).sum(0, keepdims=True)
        got = np.asarray(jsa.asarray(got, jnp.float32)) * 2.0**30
        assert np.abs(got - narrow).max() <= 2.0**-10 * np.abs(narrow).max()
        assert sent(jsa.scalify(mapped, config=E5M2), x) == {("all_to_all", "float8_e5m2")}


@case
def infinity_and_nan_travel_in_e5m2():
    fun = jax.jit(jsa.scalify(over_devices(lambda x: lax.psum(x, "d")), config=E5M2))
    x = operand((8, 2, 3), jnp.float16)
    for special in (np.inf, -np.inf, np.nan):
        got = fun(ScaledArray(x.data.at[3, 0, 0].set(special), x.scale))
        got = np.asarray(jsa.asarray(got, jnp.float32))
        np.testing.assert_array_equal(got[0, 0, 0], np.float32(special))
        assert np.isfinite(got.ravel()[1:]).all()


@case
def only_gradients_travel_in_e5m2():
    """Neither numbers and vectors, nor what a forward pass adds up."""

    def loss(w, x):
        hidden = lax.scan(lambda h, _: (lax.psum(jnp.tanh(h @ w), "d"), None), x, None, length=2)[0]
        return jnp.mean(hidden**2) + lax.pmean(jnp.sum(w[0]), "d")

    x, w = operand((8, 4), jnp.float16), operand((4, 4), jnp.float16)
    mesh = jax.make_mesh((DEVICES,), ("d",), (AxisType.Auto,))
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P()), out_specs=P())

    def step(w, x):
        return jax.grad(lambda w: mapped(w, x))(w)

    found = sent(jsa.scalify(step, config=E5M2), w, x)
    gathered = ("all_gather", "float16")  # the gradient is whole on each device
    assert found == {("psum", "float16"), ("all_to_all", "float8_e5m2"), gathered}
    vector = over_devices(lambda x: lax.psum(x, "d"))
    got = jax.jit(jsa.scalify(vector, config=E5M2))(operand((8,), jnp.float16))
    want = total(operand((8,), jnp.float16))
    np.testing.assert_allclose(jsa.asarray(got, jnp.float32), want, rtol=2e-3)


@case
def an_embedding_inside_shard_map_has_a_gradient():
    table, ids = operand((16, 4), jnp.float16), jnp.arange(8, dtype=jnp.int32).reshape(8, 1)
    mesh = jax.make_mesh((DEVICES,), ("d",), (AxisType.Auto,))

    def loss(table, ids):
        return lax.pmean(jnp.mean(jsa.nn.embed(table, ids).astype(jnp.float32) ** 2), "d")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    got = jax.jit(jsa.scalify(jax.grad(mapped)))(table, ids)
    want = jax.grad(mapped)(jsa.asarray(table, jnp.float32), ids)
    np.testing.assert_allclose(jsa.asarray(got, jnp.float32), want, rtol=4e-3, atol=1e-4)


@case
def partial_sums_in_types():
    """`unreduced` and `reduced` specs of explicit meshes go through, forward and backward."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))

    def partial(x, w):
        out = P("x", None, unreduced={"y"})
        return jnp.einsum("ij,jk->ik", x, w, out_sharding=out)

    def whole(x, w):
        return jax.sharding.reshard(partial(x, w), P("x", None))

    def reduced(x, w):
        w = jax.sharding.reshard(w, P(None, None, reduced={"x"}))
        return jnp.einsum("ij,jk->ik", x, w, out_sharding=P("x", None))

    functions = {
        "whole": whole,
        "scattered": lambda x, w: jax.sharding.reshard(partial(x, w), P("x", "y")),
        "gradient": jax.grad(lambda x, w: jnp.sum(whole(x, w) ** 2), (0, 1)),
        "reduced": jax.grad(lambda x, w: jnp.sum(reduced(x, w) ** 2), (0, 1)),
    }
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        for name, fun in functions.items():
            spec = P("x", "y") if name == "reduced" else P("y", None)
            x = jax.device_put(rng.normal(size=(8, 16)).astype(np.float32), P("x", "y"))
            w = jax.device_put(rng.normal(size=(16, 8)).astype(np.float32), spec)
            want = jax.tree.leaves(jax.jit(fun)(x, w))
            for dtype, limit in ((jnp.float16, 2e-3), (jnp.bfloat16, 2e-2)):
                args = [ScaledArray(a.astype(dtype), jnp.float32(2.0**30)) for a in (x, w)]
                got = jsa.tree.leaves(jax.jit(jsa.scalify(fun))(*args))
                power = 2 if name in ("whole", "scattered") else 3
                for a, b in zip(got, want, strict=True):
                    assert jax.typeof(a.data).sharding == jax.typeof(b).sharding
                    values = np.asarray(jsa.asarray(a, jnp.float32)) / 2.0 ** (30 * power)
                    assert np.abs(values - b).max() <= limit * np.abs(b).max()
