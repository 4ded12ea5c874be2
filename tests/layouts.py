"""Layouts of parallelism on eight devices, run by `test_sharding.py`: each is the unsharded model.

In float32 to 1e-6, in FP8 to FP8's rounding, and the scales are the same on every mesh.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa
from examples.llama.layout import Layout, make_mesh, parse_mesh
from examples.llama.model import Sizes, init, loss_fn
from examples.llama.step import Training
from tests.helpers import is_scaled
from tests.test_doc_pages import run_page

CASES = {}
WITH_FULL_ONLY = set()
FULL = os.environ.get("SHARDING_TESTS") == "full"
SIZES = Sizes(2, 32, 8, 4, hidden=64, vocabulary=64, context=16)
MESHES = (
    "data=8",
    "fsdp=8",
    "data=2,tensor=4",
    "fsdp=4,tensor=2",
    "data=2,fsdp=2,tensor=2",
)


def case(fun):
    """Add a case to those that run on eight devices."""
    CASES[fun.__name__] = fun
    return fun


def full(fun):
    """Add a case that runs with `--full` only."""
    WITH_FULL_ONLY.add(fun.__name__)
    return case(fun)


def tokens_of(sizes, batch=8):
    return jax.random.randint(jax.random.key(1), (batch, sizes.context + 1), 0, sizes.vocabulary)


def as_values(tree):
    return [np.asarray(jsa.asarray(x, jnp.float32)) for x in jsa.tree.leaves(tree)]


def assert_near(got, want, tolerance):
    """Each array to a tolerance of its largest element."""
    for a, b in zip(as_values(got), as_values(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


# Data, FSDP, tensor (columns, rows, sequences): a Llama, by XLA's partitioner.


def _gradients(layout, sizes, scaled, fp8=False):
    """Loss and gradients of a model on a mesh, with dynamic scales or plain."""

    def loss(params, tokens):
        return loss_fn(params, tokens, sizes, layout)

    loss = jsa.fp8_matmuls(loss) if fp8 else loss
    grad = jax.value_and_grad(loss)
    params = init(sizes, jax.random.key(0))
    params = jsa.as_scaled_array(params, scale="rms") if scaled else params
    tokens = tokens_of(sizes)
    if layout.mesh is not None:
        params = jax.device_put(params, layout.shardings(params))
        jsa.tree.check_shardings(params)
        tokens = jax.device_put(tokens, layout.batch_sharding())
    return jax.jit(jsa.scalify(grad) if scaled else grad)(params, tokens)


@functools.cache
def _unsharded(sizes, scaled, fp8=False):
    return _gradients(Layout(None), sizes, scaled, fp8)


def _scales(tree):
    scales = [np.ravel(x.scale) for x in jsa.tree.leaves(tree) if is_scaled(x)]
    return np.concatenate(scales).tolist()


def _on_mesh(text):
    layout = Layout(make_mesh(parse_mesh(text, 8)))
    plain = _unsharded(SIZES, False)
    got = _gradients(layout, SIZES, True)
    assert_near(got, plain, 2e-6)
    assert _scales(got) == _scales(_unsharded(SIZES, True))
    fp8 = _gradients(layout, SIZES, True, fp8=True)
    assert_near(fp8, _unsharded(SIZES, True, True), 2e-2)
    assert _scales(fp8) == _scales(_unsharded(SIZES, True, True))
    assert_near(fp8[0], plain[0], 2e-2)


for _text in MESHES:
    CASES[f"a_llama_on_{_text}"] = functools.partial(_on_mesh, _text)
WITH_FULL_ONLY |= {f"a_llama_on_{_text}" for _text in MESHES[:-1]}


@full
def scales_of_a_state_do_not_depend_on_the_mesh():
    """Statistics of the optimizer, too, are those of whole arrays.

    One that is at a power of two but for the rounding of FP8 may be above it or below.
    """
    states = []
    for text in (None, "fsdp=8", "data=2,fsdp=2,tensor=2"):
        layout = Layout(None if text is None else make_mesh(parse_mesh(text, 8)))
        training = Training(SIZES, layout, "fp8", steps=4)
        state = training.make_state(0)
        update, tokens = training.make_update(state), tokens_of(SIZES)
        if layout.mesh is not None:
            tokens = jax.device_put(tokens, layout.batch_sharding())
        for _ in range(2):
            state, _ = update(state, tokens)
        states.append(np.array(_scales(state)))
    for scales in states[1:]:
        octaves = np.abs(np.log2(scales / states[0]))
        assert octaves.max() <= 1 and np.mean(octaves == 0) > 0.8


@case
def experts_on_devices_of_their_own():
    """Each device has two of the experts' weights; every token goes to two experts."""
    sizes = Sizes(1, 32, 4, 2, hidden=32, vocabulary=64, context=16, experts=16)
    devices = jax.make_mesh((8,), ("expert",), (AxisType.Auto,))
    for fp8, tolerance in ((True, 2e-2), (False, 2e-6))[: 1 + FULL]:
        value, grads = _unsharded(sizes, True, fp8)

        def loss(params, tokens):
            return loss_fn(params, tokens, sizes)

        def sharding(path, leaf):
            is_expert = path[-1].key in ("gate", "up", "down")
            return NamedSharding(devices, P(None, "expert") if is_expert else P())

        params = jsa.as_scaled_array(init(sizes, jax.random.key(0)), scale="rms")
        found = jax.tree_util.tree_map_with_path(sharding, params, is_leaf=is_scaled)
        params = jax.device_put(params, jsa.tree.shardings(params, found))
        grad = jax.value_and_grad(jsa.fp8_matmuls(loss) if fp8 else loss)
        got = jax.jit(jsa.scalify(grad))(params, tokens_of(sizes))
        assert_near(got, (value, grads), tolerance)
        assert _scales(got) == _scales((value, grads))


@case
def fp8_matmuls_send_no_more_than_plain_ones():
    """Columns, rows and sequences along `tensor`, the batch along `fsdp`, both passes."""
    layout = Layout(make_mesh(parse_mesh("fsdp=4,tensor=2", 8)))

    def loss(x, up, down):
        hidden = jax.nn.relu(layout.rows(x) @ up)
        return jnp.sum(layout.stream(hidden @ down).astype(jnp.float32) ** 2)

    specs = {(4, 64, 32): (P(("data", "fsdp"), "tensor")), (32, 128): P("fsdp", "tensor")}
    specs |= {(128, 32): P("tensor", "fsdp")}
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(layout.mesh, spec))
        for shape, spec in specs.items()
    ]

    def sent(function, args):
        report = jsa.numerics.compile_report(jax.jit(function), *args)
        return sum(c.bytes for c in report.collectives)

    plain = sent(jax.grad(loss, (0, 1, 2)), args)
    fp8 = jax.grad(jsa.fp8_matmuls(loss), (0, 1, 2))
    scaled = [jsa.ScaledArray(x, 1.0) for x in args]
    # This compiler sends FP8 as float16.
    assert 0 < sent(fp8, args) < plain
    assert 0 < sent(jsa.scalify(fp8), scaled) < plain


# By hand, in `shard_map`.


def _tensor_parallel(x, up, down):
    """Columns of the first matrix, rows of the second: one sum over the devices."""
    return lax.psum(jax.nn.gelu(x @ up) @ down, "tensor")


def _sequence_parallel(x, up, down):
    """As before, but between the layers each device has a part of the sequence."""
    whole = lax.all_gather(x, "tensor", axis=0, tiled=True)
    return lax.psum_scatter(jax.nn.gelu(whole @ up) @ down, "tensor", tiled=True)


def _feed_forward(dot, x, up, down):
    return dot(jax.nn.gelu(dot(x, up)), down)


@case
def feed_forward_layers_by_hand():
    devices = jax.make_mesh((8,), ("tensor",), (AxisType.Auto,))
    rng = np.random.default_rng(0)
    x, up, down = (
        jnp.asarray(rng.normal(size=s) / s[-2] ** 0.5, jnp.float32)
        for s in ((16, 32), (32, 64), (64, 32))
    )
    weights = P(None, "tensor"), P("tensor", None)
    want = jax.value_and_grad(
        lambda *args: jnp.sum(_feed_forward(jnp.matmul, *args) ** 2), (0, 1, 2)
    )(x, up, down)
    for fun, rows in ((_tensor_parallel, P()), (_sequence_parallel, P("tensor"))):
        mapped = jax.shard_map(fun, mesh=devices, in_specs=(rows, *weights), out_specs=rows)

        def loss(*args, mapped=mapped):
            return jnp.sum(mapped(*args) ** 2)

        args = jsa.as_scaled_array((x, up, down), scale="rms")
        for dtype, tolerance in ((jnp.float32, 2e-6), (jnp.float16, 1e-2)):
            narrow = jsa.tree.astype(args, dtype)
            got = jax.jit(jsa.scalify(jax.value_and_grad(loss, (0, 1, 2))))(*narrow)
            assert_near(got, want, tolerance)
        fp8 = jsa.fp8_matmuls(loss)
        got = jax.jit(jsa.scalify(jax.value_and_grad(fp8, (0, 1, 2))))(*args)
        assert_near(got[0], want[0], 5e-2)
        assert_near(got[1], want[1], 0.15)


def _pipelined(x, weights):
    """Microbatches go from device to device, each of which has one layer."""
    index, count = lax.axis_index("stage"), lax.axis_size("stage")
    micro = x.shape[0]

    def step(carry, number):
        held, out = carry
        fed = jnp.where(index == 0, x[jnp.minimum(number, micro - 1)], held)
        done = jnp.tanh(fed @ weights[0]) + fed
        place = jnp.maximum(number - (count - 1), 0)
        out = jnp.where((index == count - 1) & (number >= count - 1), out.at[place].set(done), out)
        held = lax.ppermute(done, "stage", [(i, (i + 1) % count) for i in range(count)])
        return (held, out), None

    start = lax.pcast((jnp.zeros_like(x[0]), jnp.zeros_like(x)), "stage", to="varying")
    (_, out), _ = lax.scan(step, start, jnp.arange(micro + count - 1))
    return lax.psum(jnp.where(index == count - 1, out, 0), "stage")


@case
def a_pipeline_of_eight_stages():
    devices = jax.make_mesh((8,), ("stage",), (AxisType.Auto,))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 2, 16)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(8, 16, 16)) / 8, jnp.float32)
    mapped = jax.shard_map(_pipelined, mesh=devices, in_specs=(P(), P("stage")), out_specs=P())

    def in_turn(x, weights):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w) + h, None), x, weights)[0]

    def gradients(fun):
        return jax.value_and_grad(lambda x, w: jnp.mean(fun(x, w) ** 2), (0, 1))

    want = jax.jit(gradients(in_turn))(x, weights)
    assert_near(jax.jit(gradients(mapped))(x, weights), want, 1e-5)
    args = jsa.as_scaled_array((x, weights), scale="rms")
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.float16, 1e-2)):
        got = jax.jit(jsa.scalify(gradients(mapped)))(*jsa.tree.astype(args, dtype))
        assert_near(got, want, tolerance)


@case
def the_page_on_many_devices():
    run_page("scale_out", full=FULL)
