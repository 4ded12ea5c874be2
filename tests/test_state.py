"""A training loop compiles once: a step returns state of the structure that it was given."""

import dataclasses
import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.arrays.scaled_array import align_scale
from tests.helpers import assert_close, values

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")

optax = pytest.importorskip("optax")

STEPS, LAYERS, WIDTH = 20, 3, 4


def structure(state):
    """Tree (static scales included), shapes, dtypes and weak types of data and scales."""
    leaves, treedef = jax.tree.flatten(state)
    return treedef, [jax.typeof(leaf) for leaf in leaves]


def copy(tree):
    """New buffers, for a step that donates them."""
    return jax.tree.map(jnp.array, tree)


def buffers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Models: parameters and a loss.


def _mlp(params, x):
    return jax.nn.gelu(x @ params["w"] + params["b"]) @ params["out"]


def _layer(h, w):
    return h + jnp.tanh(h @ w) * 0.5


def _scanned(params, x, remat=False):
    layer = jax.checkpoint(_layer) if remat else _layer
    return lax.scan(lambda h, w: (layer(h, w), None), x, params["w"])[0]


MODELS = {
    "mlp": (
        _mlp,
        {"w": random(0, WIDTH, 8), "b": jnp.zeros(8), "out": random(1, 8, WIDTH) * 0.5},
    ),
    "scanned": (_scanned, {"w": random(0, LAYERS, WIDTH, WIDTH) * 0.5}),
    "scanned-remat": (
        functools.partial(_scanned, remat=True),
        {"w": random(0, LAYERS, WIDTH, WIDTH) * 0.5},
    ),
}

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.02, 5, STEPS), eps=1e-6),
    ),
    "lion": lambda: optax.lion(0.01),
    "every-second": lambda: optax.MultiSteps(optax.adam(0.02), 2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.02),
}


def make_step(model, optimizer, store=lambda state, given: state):
    """A whole step; arithmetic in float32 registers, state in whatever dtype it is stored."""

    def step(state, x, y):
        params, opt_state = jsa.tree.astype(state, jnp.float32)

        def loss_fn(params):
            return jnp.mean((model(params, x) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), opt_state
        new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, state)
        return store(new, state), loss

    return step


def batches():
    return zip(random(7, STEPS, 8, WIDTH), random(8, STEPS, 8, WIDTH) * 0.1, strict=True)


def train(step, state):
    """Train for 20 steps; return the state, the losses and how often the step was compiled."""
    step = jax.jit(chex.assert_max_traces(step, n=1), donate_argnums=0)
    chex.clear_trace_counter()
    given, losses = structure(state), []
    for x, y in batches():
        state, loss = step(state, x, y)
        assert structure(state) == given
        losses.append(float(loss))
    assert step._cache_size() == 1
    return state, losses


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_compiles_once(name, dtype):
    model, params = MODELS["mlp"]
    optimizer = OPTIMIZERS[name]()
    plain = params, optimizer.init(params)
    state = jsa.as_scaled_array(copy(plain), dtype=dtype)
    state, losses = train(jsa.scalify(make_step(model, optimizer)), state)
    assert all(np.isfinite(losses)) and losses[-1] < losses[0]
    if dtype == "float32":
        _, want = train(make_step(model, optimizer), copy(plain))
        np.testing.assert_allclose(losses, want, rtol=1e-4)


# A scanned model's gradients have a scale a layer: its parameters may have them, too.

ONE_A_LAYER = {"scalar": None, "one-a-layer": 0}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("axis", ONE_A_LAYER)
@pytest.mark.parametrize("name", ["scanned", "scanned-remat"])
def test_match_scales_keeps_the_state_of_a_scanned_model(name, axis, dtype):
    model, params = MODELS[name]
    optimizer = OPTIMIZERS["adamw"]()
    plain = params, optimizer.init(params)
    state = jsa.as_scaled_array(copy(plain), "rms", dtype=dtype, axis=ONE_A_LAYER[axis])
    state = jsa.tree.map(
        lambda x: ScaledArray(x.data, jnp.maximum(x.scale, 2.0**-10)) if _is_scaled(x) else x,
        state,
    )
    step = make_step(model, optimizer, store=jsa.match_scales)
    state, losses = train(jsa.scalify(step), state)
    assert all(np.isfinite(losses)) and losses[-1] < losses[0]
    if dtype == "float32":
        _, want = train(make_step(model, optimizer), copy(plain))
        np.testing.assert_allclose(losses, want, rtol=1e-4)


def _is_scaled(x):
    return isinstance(x, ScaledArray)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", ["scanned", "scanned-remat"])
def test_scales_a_layer_are_stable_without_help(name):
    """Parameters and moments with `(L, 1, 1)`, as the gradients have, come back as they were."""
    model, params = MODELS[name]
    optimizer = OPTIMIZERS["adamw"]()
    state = jsa.as_scaled_array((params, optimizer.init(params)), axis=0)
    train(jsa.scalify(make_step(model, optimizer)), state)


def test_one_scale_of_stacked_layers_stays_one():
    """Gradients of a scanned model have scales `(L, 1, 1)`; the state keeps those that it has."""
    model, params = MODELS["scanned"]
    optimizer = OPTIMIZERS["adamw"]()
    state = jsa.as_scaled_array((params, optimizer.init(params)))
    step = jax.jit(jsa.scalify(make_step(model, optimizer)))
    x, y = next(batches())
    first, _ = step(state, x, y)
    step(first, x, y)
    assert structure(first) == structure(state) and step._cache_size() == 1


MATCHES = {
    "scalar": (4.0, 0.5),
    "layers-to-scalar": ([[[1.0]], [[4.0]], [[0.25]]], 2.0),
    "scalar-to-layers": (2.0, [[[1.0]], [[4.0]], [[0.25]]]),
    "leading-to-full": ([1.0, 4.0, 0.25], [[[1.0]], [[2.0]], [[8.0]]]),
    "full-to-leading": ([[[1.0]], [[2.0]], [[8.0]]], [1.0, 4.0, 0.25]),
}


def _as_given(scale, kind):
    if kind == "static":
        return scale if isinstance(scale, float) else None
    return jnp.asarray(scale, jnp.float32)


@pytest.mark.parametrize("kinds", ["dynamic-dynamic", "static-dynamic", "dynamic-static"])
@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("name", MATCHES)
def test_match_scales(name, where, kinds):
    scales = [_as_given(s, k) for s, k in zip(MATCHES[name], kinds.split("-"), strict=True)]
    if None in scales:
        return
    shape = (LAYERS, WIDTH, WIDTH)
    new, like = (
        {"w": ScaledArray(random(i, *shape), s), "n": jnp.int32(i)} for i, s in enumerate(scales)
    )
    want = jsa.asarray(new)
    if where == "outside":
        got = jsa.match_scales(new, like)
    elif "static" in kinds:
        return  # a step's results are static only where all of its arguments are
    else:
        got = jax.jit(jsa.scalify(jsa.match_scales))(new, like)
        # Inside, every scale that is not scalar has the rank of its data.
        like["w"] = ScaledArray(like["w"].data, align_scale(like["w"].scale, 3))
    assert structure(got) == structure(like)
    np.testing.assert_array_equal(got["w"].scale, like["w"].scale)
    np.testing.assert_array_equal(np.asarray(got["w"]), want["w"])


def test_match_scales_says_what_differs():
    x = jsa.as_scaled_array(jnp.ones(2))
    with pytest.raises(ValueError, match="b"):
        jsa.match_scales({"a": x}, {"b": x})


# Donation.


def _donated(step, *args):
    text = jax.jit(step, donate_argnums=0).lower(*args).as_text()
    return text.count("tf.aliasing_output") + text.count("jax.buffer_donor")


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", MODELS)
def test_donation_aliases_every_buffer(name):
    model, params = MODELS[name]
    optimizer = OPTIMIZERS["adamw"]()
    axis = None if name == "mlp" else 0
    state = jsa.as_scaled_array((params, optimizer.init(params)), axis=axis)
    step = jsa.scalify(make_step(model, optimizer))
    x, y = next(batches())
    assert _donated(step, state, x, y) == len(jax.tree.leaves(state))
    assert len(set(buffers(state))) == len(buffers(state))
    new, _ = jax.jit(step, donate_argnums=0)(state, x, y)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert len(set(buffers(new))) == len(buffers(new))


def _of_one_scale(dynamic):
    scale = jnp.float32(2.0)
    return {k: ScaledArray(v.data, scale) for k, v in dynamic.items()}


def _shared(x):
    return {"a": x, "b": x, "c": jnp.ones(3), "d": jnp.zeros(3)}


# What makes a state of two arrays with one scale.
STATES = {
    "as_scaled_array": lambda _: dict(jsa.as_scaled_array(_shared(jnp.ones(3))), a=None),
    "one-scale-for-all": lambda dynamic: dynamic,
    "rms": lambda _: jsa.as_scaled_array({"a": jnp.ones(3), "b": jnp.ones(3)}, "rms"),
    "thaw_scales": lambda dynamic: jsa.thaw_scales(jsa.freeze_scales(dynamic)),
    "match_scales": lambda dynamic: jsa.match_scales(dynamic, _of_one_scale(dynamic)),
    "match_scales-inside": lambda dynamic: jax.jit(jsa.scalify(jsa.match_scales))(
        dynamic, _of_one_scale(dynamic)
    ),
    "dynamic_rescale": jsa.dynamic_rescale,
    "scalify": lambda dynamic: jsa.scalify(lambda x: (x, x * 2, x + x, -x))(dynamic["a"]),
    "jit": lambda dynamic: jax.jit(jsa.scalify(lambda x: (x, x * 2, x + x, -x)))(dynamic["a"]),
}


@pytest.mark.parametrize("name", STATES)
def test_no_scale_buffer_is_shared(name):
    """A buffer that two leaves share cannot be donated twice."""
    dynamic = jsa.as_scaled_array({"a": jnp.full(3, 4.0), "b": jnp.full(3, 2.0)}, jnp.float32(2.0))
    state = STATES[name](dynamic)
    scales = [x.scale for x in jsa.tree.leaves(state)]
    pointers = [s.unsafe_buffer_pointer() for s in scales]
    assert len(set(pointers)) == len(pointers)


ALIASING = {
    "itself": lambda x: x,
    "twice": lambda x: (x, x),
    "scale-alone": lambda x: {"p": x, "ema": x * 0.5},
    "of-one-sum": lambda x: (lambda y: (y, 4 * y, y.T))(x + x),
    "times-one": lambda x: (x * 1, x + 0),
    "constants": lambda x: (x * 2, INDICES, KEY),
}
INDICES, KEY = jnp.arange(3), jax.random.key(0)
KINDS = {
    "dynamic": lambda x: jsa.as_scaled_array(x, 2.0),
    "axis": lambda x: jsa.as_scaled_array(x[None], "max", axis=1),
    "frozen": lambda x: jsa.freeze_scales(jsa.as_scaled_array(x, 2.0)),
    "plain": lambda x: x,
    "numpy": lambda x: ScaledArray(np.array(x), 2.0),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALIASING)
def test_results_share_no_buffer(name, kind, wrap, dtype):
    """Neither with arguments, nor with constants, nor with each other: as `jax.jit` has it."""
    x = KINDS[kind](jnp.array([1.5, -2.0, 3.0], dtype))
    out = wrap(jsa.scalify(ALIASING[name]))(x)
    before = [np.asarray(leaf) for leaf in jsa.tree.leaves(jsa.asarray((x, INDICES)))]
    jax.jit(lambda tree: tree, donate_argnums=0)(out)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(out))
    for leaf, was in zip(jsa.tree.leaves((x, INDICES)), before, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), was)
    assert jax.random.key_data(KEY).shape == (2,)


def test_what_is_beside_scaled_values_has_buffers_of_its_own():
    x, plain = jsa.as_scaled_array(jnp.ones(3)), jnp.arange(3.0)
    out = jsa.scalify(lambda x, p, i: (p, p, p + x, i))(x, plain, INDICES)
    assert len(set(buffers((out, plain, INDICES)))) == len(buffers((out, plain, INDICES)))


def test_the_memory_of_a_numpy_array_is_not_kept():
    memory = np.zeros(1024 + 16, np.float32)
    start = -(memory.ctypes.data // 4) % 16  # JAX takes over what is aligned to 64 bytes
    x = memory[start : start + 1024]
    results = jsa.scalify(lambda s, p: (s, p))(ScaledArray(x, 2.0), x)
    x[:] = 1
    assert not any(np.any(np.asarray(out)) for out in results)


# What compiles again, and what does not.


def _count_traces(fun):
    count = []

    @jax.jit
    def counted(*args):
        count.append(1)
        return fun(*args)

    return counted, count


def test_a_change_of_the_config_traces_again():
    fun, traces = _count_traces(jsa.scalify(lambda x: jnp.sum(x * 3)))
    x = jsa.as_scaled_array(jnp.ones(3))
    for config, count in (
        (jsa.ScalifyConfig(), 1),
        (jsa.ScalifyConfig(), 1),
        (jsa.ScalifyConfig(missing_rule="error"), 2),
        (jsa.ScalifyConfig(rounding_mode=jsa.Pow2RoundMode.UP), 3),
        (jsa.ScalifyConfig(missing_rule="error"), 3),
    ):
        with config:
            out = fun(x)
        assert len(traces) == count and float(out) == 9
    with jax.enable_x64(True), jsa.ScalifyConfig(scale_dtype=jnp.float64):
        assert fun(x).scale.dtype == jnp.float64


def test_an_explicit_config_does_not_trace_again():
    config = jsa.ScalifyConfig(missing_rule="error")
    fun, traces = _count_traces(jsa.scalify(jnp.negative, config=config))
    x = jsa.as_scaled_array(jnp.ones(3))
    fun(x), fun(x)
    assert len(traces) == 1


def test_the_values_of_scales_do_not_trace_again():
    fun, traces = _count_traces(jsa.scalify(lambda x: jnp.tanh(x) * 2 + 1))
    data = jnp.ones((2, 3))
    for scale in (0.0, 1.0, 2.0**100, np.float32(4.0), jnp.float32(2.0)):
        fun(ScaledArray(data * 0, jnp.asarray(scale, jnp.float32)))
    assert len(traces) == 1
    fun(ScaledArray(data, 2.0)), fun(ScaledArray(data, 2.0))
    assert len(traces) == 2
    fun(ScaledArray(data, 4.0))
    assert len(traces) == 3


def test_freezing_compiles_once_more():
    model, params = MODELS["mlp"]
    optimizer = OPTIMIZERS["adamw"]()
    state = jsa.as_scaled_array((params, optimizer.init(params)))
    step, traces = _count_traces(jsa.scalify(make_step(model, optimizer, store=jsa.match_scales)))
    for i, (x, y) in enumerate(batches()):
        if i == 2:
            state = jsa.freeze_scales(jsa.dynamic_rescale(state))
            given = structure(state)
        state, _ = step(state, x, y)
        if i == 5:
            break
    assert structure(state) == given and len(traces) <= 3


def test_a_changed_leaf_is_named():
    like = {"w": jsa.as_scaled_array(jnp.ones((3, 2))), "count": jnp.int32(0)}
    same = {"w": jsa.as_scaled_array(jnp.zeros((3, 2)), 2.0), "count": jnp.int32(1)}
    assert jsa.tree.check_same_structure(same, like) is same
    stacked = ScaledArray(jnp.ones((3, 2)), jnp.ones((3, 1)))
    for leaf, shown in (
        (stacked, r"\['w'\]: float32\[3, 2\], scale \[3, 1\], was float32\[3, 2\], scale \[\]"),
        (like["w"].astype(jnp.float16), r"\['w'\]: float16"),
        (ScaledArray(jnp.ones((3, 2)), 1.0), "static 1.0"),
        (jnp.ones((3, 2)), r"\['w'\]: float32\[3, 2\], was"),
    ):
        with pytest.raises(ValueError, match=shown):
            jsa.tree.check_same_structure({**like, "w": leaf}, like)
    with pytest.raises(ValueError, match=r"\['count'\]: missing, was int32"):
        jsa.tree.check_same_structure({"w": like["w"]}, like)


def difference(new, like):
    """The lines of the error without the first, which is always the same."""
    with pytest.raises(ValueError, match="`new` differs from `like`, so that it com") as error:
        jsa.tree.check_same_structure(new, like)
    return str(error.value).splitlines()[1:]


def test_advice_for_leaves_that_differ():
    plain, scaled = jnp.ones(2), jsa.as_scaled_array(jnp.ones(2))
    for new, like, advice in (
        (scaled, jsa.freeze_scales(scaled), "brings scales to those of `like`"),
        (plain, scaled, "To have scales: .*`jsa.as_scaled_array` outside"),
        (scaled, plain, "To have none: .*`jsa.asarray`"),
        (scaled.astype(jnp.float16), scaled, "`jsa.tree.astype` casts"),
        (jnp.ones(3), plain, "in the shape that it was given in"),
        ({"a": plain}, plain, "every leaf that was given"),
    ):
        *_, last = difference(new, like)
        assert re.search(advice, last), last
    lines = difference({"a": plain, "b": jnp.ones(3), "c": plain}, {"a": scaled, "b": plain})
    assert len(lines) == 6  # three leaves, three remedies


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Trained:
    w: Any
    tx: Any = dataclasses.field(metadata={"static": True}, default=None)


@jax.tree_util.register_pytree_node_class
class Layer:
    def __init__(self, w, width):
        self.w, self.width = w, width

    def tree_flatten(self):
        return (self.w,), self.width

    @classmethod
    def tree_unflatten(cls, width, children):
        return cls(*children, width)


def test_the_first_node_that_differs_is_named():
    w = jsa.as_scaled_array(jnp.ones(2))
    static, containers = "an optimizer, a function", "Return the containers that were given."
    for new, like, line, advice in (
        ((w,), [w], "  the tree: tuple, was list", containers),
        ({"a": ((w,), w)}, {"a": ([w], w)}, "  ['a'][0]: tuple, was list", containers),
        ([w, {"a": {}}], [w, {"b": {}}], "  [1]: dict with ['a'], was ['b']", containers),
        ([w, ((),)], [w, ()], "  [1]: tuple with [0], was nothing", containers),
        ([w, None], [w, ()], "  [1]: NoneType, was tuple", containers),
        ([Trained(w, 3)], [Trained(w, 4)], "  [0].tx: static 3, was 4", static),
        ([Layer(w, 3)], [Layer(w, 4)], "  [0]: static 3, was 4", static),
        (
            {"s": Trained(w, "x" * 99 + "a")},
            {"s": Trained(w, "x" * 99 + "b")},
            "  ['s'].tx: another static str than it was",
            static,
        ),
    ):
        found, *rest = difference(new, like)
        assert found == line and len(rest) == 1 and advice in rest[0]


def test_an_optimizer_that_was_made_twice_is_named():
    train_state = pytest.importorskip("flax.training.train_state")
    optax = pytest.importorskip("optax")
    one, other = (
        train_state.TrainState.create(
            apply_fn=None, params={"w": jnp.ones(2)}, tx=jsa.optim.low_precision(optax.adam(1e-3))
        )
        for _ in range(2)
    )
    line, advice = difference(one, other)
    assert line.startswith("  .tx: ") and "GradientTransformation" in line and len(line) < 200
    assert "make such an object" in advice and "match_scales" not in advice


def test_the_check_runs_inside_a_jitted_step():
    @jax.jit
    def step(x):
        return jsa.tree.check_same_structure(jsa.scalify(lambda v: v * 2)(x), x)

    x = jsa.as_scaled_array(jnp.ones(2))
    np.testing.assert_array_equal(np.asarray(step(x)), 2)
    with pytest.raises(ValueError, match="compiles again"):
        jax.jit(lambda x: jsa.tree.check_same_structure(jsa.scalify(jnp.sum)(x), x))(x)


def test_a_partner_of_a_static_scale_0_takes_any_scale():
    zeros = jsa.freeze_scales(jsa.as_scaled_array(jnp.zeros(2)))
    assert zeros.scale == 0
    x = jsa.as_scaled_array(jnp.full(2, 3.0), scale=4.0)
    for scaled in (x, jsa.freeze_scales(x)):
        matched = jsa.match_scales(scaled, zeros)
        np.testing.assert_array_equal(jsa.asarray(matched), [3.0, 3.0])
        assert matched.is_static == scaled.is_static
    step = jax.jit(jsa.scalify(lambda like, x: jsa.match_scales(x + 1.0, like)))
    np.testing.assert_array_equal(jsa.asarray(step(zeros, x)), [4.0, 4.0])


def test_what_is_matched_to_a_static_scale_has_it_beside_dynamic_ones():
    fixed, free = (jsa.as_scaled_array(jnp.ones(2), scale=2.0) for _ in range(2))
    fixed = jsa.freeze_scales(fixed)

    def step(fixed, free):
        return jsa.match_scales((fixed + free, free * 3), (fixed, free))

    for transform in (jsa.scalify, lambda f: jax.jit(jsa.scalify(f))):
        first, second = transform(step)(fixed, free)
        assert first.is_static and first.scale == 2 and not second.is_static
        np.testing.assert_array_equal(jsa.asarray(first), [2.0, 2.0])


# Complex leaves.


@pytest.mark.parametrize("scale", [None, 2.0, "rms"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_a_real_dtype_leaves_complex_numbers_whole(dtype, scale):
    values = np.array([1 + 2j, -3e5j, 0.5], np.complex64)
    tree = {"complex": jnp.asarray(values), "real": jnp.ones(3)}
    for state in (
        jsa.as_scaled_array(tree, scale, dtype=dtype),
        jsa.as_scaled_array(tree, scale, dtype=lambda path, leaf: dtype),
        jsa.tree.astype(jsa.as_scaled_array(tree, scale), dtype),
        jsa.as_scaled_array(jsa.as_scaled_array(tree, scale), dtype=dtype),
    ):
        assert (state["complex"].dtype, state["real"].dtype) == (np.complex64, jnp.dtype(dtype))
        for out in (jsa.asarray(state), jsa.asarray(state, jnp.float32)):
            np.testing.assert_array_equal(out["complex"], values)
        assert jsa.asarray(state, jnp.float32)["real"].dtype == jnp.float32
    for out in (jsa.asarray(tree, dtype), jsa.tree.astype(tree, dtype)):
        np.testing.assert_array_equal(out["complex"], values)
        assert out["real"].dtype == jnp.dtype(dtype)
    with pytest.raises(TypeError, match="`dtype` must be complex as `data` is"):
        jsa.scaled_array(values, 2.0, dtype)


def test_a_complex_dtype_makes_all_leaves_complex():
    tree = {"complex": jnp.ones(3, jnp.complex64), "real": jnp.ones(3)}
    for out in (jsa.as_scaled_array(tree, dtype=jnp.complex64), jsa.asarray(tree, jnp.complex64)):
        assert {x.dtype for x in jsa.tree.leaves(out)} == {np.dtype(np.complex64)}
    assert jsa.scaled_array([1.0, 2.0], 2.0, jnp.complex64).dtype == jnp.complex64


def _scanned_loss(params, x):
    def layer(h, w):
        return jnp.tanh(h @ w["kernel"] + w["bias"]), None

    h, _ = lax.scan(layer, x, params["layers"])
    return jnp.mean((h @ params["out"]).astype(jnp.float32) ** 2)


def _scanned_params(dtype):
    numbers = np.random.default_rng(0)
    kernel, out = numbers.normal(size=(3, 8, 8)) / 3, numbers.normal(size=(8, 2))
    layers = {"kernel": jnp.asarray(kernel, dtype), "bias": jnp.zeros((3, 8), dtype)}
    return {"layers": layers, "out": jnp.asarray(out, dtype)}


OPTIMIZERS_OF_STEPS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(1e-2),
    "skipping": optax.apply_if_finite(optax.sgd(0.1), 3),
    "low_precision": jsa.optim.low_precision(optax.adamw(1e-2)),
    "by gradient": jsa.optim.low_precision(optax.adamw(1e-2), policy="gradient"),
}


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:An average at")
@pytest.mark.parametrize("apply", [optax.apply_updates, jsa.optim.apply_updates])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", OPTIMIZERS_OF_STEPS)
def test_a_compiled_step_over_scanned_layers_takes_its_own_result(name, dtype, apply):
    optimizer = OPTIMIZERS_OF_STEPS[name]

    def step(state, x):
        params, moments = state
        loss, grads = jax.value_and_grad(_scanned_loss)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return (apply(params, updates), moments), loss

    plain = _scanned_params(dtype)
    params = jsa.as_scaled_array(plain, scale="rms")
    given = params if name in ("low_precision", "by gradient") else plain
    state = params, jsa.as_scaled_array(optimizer.init(given))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), dtype)
    jitted = jax.jit(jsa.scalify(step))
    compiled = jitted.lower(state, x).compile()
    losses = []
    for _ in range(4):
        new, loss = compiled(state, x)
        jsa.tree.check_same_structure(new, state)
        state, losses = new, [*losses, float(loss)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_only_what_an_argument_becomes_gets_the_shape_of_its_scale(dtype):
    """Its value stays; gradients, and what has arguments with a scale a row, keep their scales."""
    params = jsa.as_scaled_array(_scanned_params(dtype), scale="rms")
    x = jnp.ones((4, 8), dtype)

    def step(params, x):
        grads = jax.grad(_scanned_loss)(params, x)
        return jax.tree.map(lambda w, g: w - g, params, grads), grads

    new, grads = jax.jit(jsa.scalify(step))(params, x)
    assert new["layers"]["kernel"].scale.shape == () == new["layers"]["bias"].scale.shape
    assert grads["layers"]["kernel"].scale.shape == (3, 1, 1)
    want, _ = step(jsa.asarray(params, jnp.float32), x.astype(jnp.float32))
    assert_close(new, values(want), 8 * float(jnp.finfo(dtype).eps))
    rows = jsa.as_scaled_array(jnp.asarray([[1e-3, 2e-3], [1e3, 2e3]], dtype), "rms", axis=0)
    ones = jsa.as_scaled_array(jnp.ones((2, 2), dtype))
    assert jax.jit(jsa.scalify(lambda x, y: x + y))(rows, ones).scale.shape == (2, 1)


def _stepped(optimizer, apply, dtype, state, x, y):
    def loss_fn(params):
        out = _mlp(jsa.tree.astype(params, dtype), x.astype(dtype))
        return jnp.mean(jnp.square((out - y).astype(jnp.float32)))

    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (apply(params, updates), opt_state), loss


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn])
@pytest.mark.parametrize("stored", ["apply_updates", "round_updates", "optax"])
def test_static_weights_beside_dynamic_moments(stored, dtype):
    """Weights with static scales return at these scales, and moments with dynamic ones."""
    if dtype == jnp.float8_e4m3fn and stored != "apply_updates":
        pytest.skip("weights in FP8 are stored by `apply_updates`")
    optimizer = jsa.optim.low_precision(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.02)),
        round_updates=stored == "round_updates",
    )
    apply = jsa.optim.apply_updates if stored == "apply_updates" else optax.apply_updates
    params = jsa.as_scaled_array(MODELS["mlp"][1], scale="rms", dtype=dtype, static=True)
    state = params, jsa.as_scaled_array(optimizer.init(params))
    narrow = jnp.float16 if dtype == jnp.float8_e4m3fn else dtype

    @jsa.scalify
    def step(state, x, y):
        return _stepped(optimizer, apply, narrow, state, x, y)

    state, losses = train(step, copy(state))
    assert all(x.is_static for x in jsa.tree.leaves(state[0]))
    moments = [x for x in jsa.tree.leaves(state[1]) if isinstance(x, ScaledArray)]
    assert moments and not any(x.is_static for x in moments)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


SGD_STEPS = {
    "as it is": lambda w, g: w,
    "float32 sum": lambda w, g: w - 0.1 * g,
    "matched": lambda w, g: jsa.match_scales(3 * w - g, w),
    "matched in jit": jax.jit(lambda w, g: jsa.match_scales(3 * w - g, w)),
    "stored": lambda w, g: jsa.optim.apply_updates(w, -0.1 * g),
    "stored under vmap": jax.vmap(lambda w, g: jsa.optim.apply_updates(w, -0.1 * g)),
    "in a loop": lambda w, g: lax.fori_loop(
        0, 3, lambda _, w: jsa.optim.apply_updates(w, -0.1 * g), w
    ),
    "chosen": lambda w, g: lax.cond(
        g[0, 0] > 0, lambda: jsa.optim.apply_updates(w, -0.1 * g), lambda: w
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", SGD_STEPS)
def test_a_leaf_returns_at_its_static_scale(name, dtype):
    """Beside a batch and a momentum whose scales are dynamic."""
    if name == "float32 sum" and dtype == jnp.float16:
        pytest.skip("a float16 sum has the larger scale")
    w = jsa.as_scaled_array(random(0, 3, 4).astype(dtype), scale=0.5, static=True)
    g = jsa.as_scaled_array(100 * random(1, 3, 4).astype(dtype), scale=64.0)

    @jax.jit
    @jsa.scalify
    def step(w, g):
        return SGD_STEPS[name](w, g), 0.5 * g, w * g

    new, momentum, product = step(w, g)
    assert new.scale == 0.5 and isinstance(new.scale, float)
    assert not momentum.is_static and not product.is_static
    step(new, momentum)
    assert step._cache_size() == 1
    wanted = SGD_STEPS[name](jsa.asarray(w, jnp.float32), jsa.asarray(g, jnp.float32))
    tolerance = 1e-2 if dtype == jnp.float16 else 1e-5
    np.testing.assert_allclose(jsa.asarray(new, jnp.float32), wanted, tolerance, tolerance)


def test_scales_that_are_asked_to_be_static():
    tree = {"w": 5 * jnp.ones(3), "b": jnp.zeros(3), "step": jnp.int32(1)}
    found = jsa.as_scaled_array(tree, scale="rms", dtype=jnp.float16, static=True)
    assert (found["w"].scale, found["b"].scale, found["step"]) == (4.0, 2.0**-6, 1)
    np.testing.assert_array_equal(found["w"].data, np.float16([1.25] * 3))
    assert jsa.as_scaled_array(tree, static=True)["b"].scale == 1.0
    axes = jsa.as_scaled_array({"w": jnp.ones((2, 3))}, scale="rms", axis=0, static=True)
    assert np.shape(axes["w"].scale) == (2, 1)  # scales along axes stay dynamic
    again = jsa.as_scaled_array(jsa.as_scaled_array(tree, scale="rms"), "rms", static=True)
    assert (again["w"].scale, again["b"].scale) == (4.0, 2.0**-6)
    large = jnp.array([1e-3] * 4000 + [1.0])  # far above the RMS: float16 keeps 10 octaves of room
    (largest,) = jsa.as_scaled_array([large], "rms", dtype=jnp.float16, static=True)
    assert float(jnp.max(largest.data)) <= 64.0
    with pytest.raises(TypeError, match="`static` must be a bool, got 'rms'"):
        jsa.as_scaled_array(tree, static="rms")
    with pytest.raises(TypeError, match=r"`tree\['b'\].scale` must be concrete.* outside of `jit`"):
        jax.jit(lambda t: jsa.as_scaled_array(t, static=True))(tree)


@pytest.mark.parametrize("round_updates", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_static_weight_of_any_rank_returns_static(dtype, shape, round_updates):
    optimizer = jsa.optim.low_precision(optax.adam(1e-2), dtype, round_updates=round_updates)

    @jax.jit
    @jsa.scalify
    def step(params, opt_state, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.square(x * p["w"] - 1)))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jsa.as_scaled_array({"w": jnp.full(shape, 0.3)}, "rms", dtype=dtype, static=True)
    opt_state = jsa.as_scaled_array(optimizer.init(params))
    for _ in range(3):
        params, opt_state = step(params, opt_state, jnp.ones(4, dtype))
    if dtype != "float16" or round_updates:
        assert params["w"].scale == 0.25 and params["w"].is_static
        assert step._cache_size() == 1
