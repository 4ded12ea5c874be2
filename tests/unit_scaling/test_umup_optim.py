"""Learning rates by role, and weight decay that does not depend on them."""

import functools
import math

import flax.linen
import flax.nnx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jax_scalify as jsa
from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling import linen, nnx, optim
from tests.unit_scaling.models import copy_into

WIDTH, DEPTH = 16, 4
PARAMS = {
    "embedding": np.ones((32, WIDTH), np.float32),
    "hidden": {
        "kernel": np.ones((WIDTH, 64), np.float32),
        "bias": np.ones(64, np.float32),
        "scale": np.ones(WIDTH, np.float32),
    },
    "readout": np.ones((WIDTH, 8), np.float32),
}
ROLES = {
    "embedding": "embedding",
    "hidden": {
        "kernel": us.Role("weight", depth=DEPTH),
        "bias": us.Role("bias", depth=DEPTH),
        "scale": us.Role("norm", depth=DEPTH),
    },
    "readout": "output",
}
FACTORS = {  # of embedding, bias, kernel, scale, readout
    ("adam", None): [1 / 4, 1 / 2, 1 / 8, 1 / 2, 1],
    ("sgd", None): [1 / 4, 1 / 2, 1 / 8, 1 / 2, 1],
    ("sgd", "to_output_scale"): [1, 4, 1 / 2, 2, 1],
}


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(p.dtype), PARAMS)


def steps(tx, grads, params=PARAMS):
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name, constraint", FACTORS)
def test_updates_are_those_of_optax_times_the_role_s_factor(name, constraint):
    grads = [gradients(seed) for seed in range(3)]
    schedule = optax.linear_schedule(0.5, 0.25, 2)
    if name == "adam":
        tx, plain = optim.adam(schedule, eps=0, roles=ROLES), optax.adam(schedule, eps=0)
    else:
        tx = optim.sgd(schedule, 0.9, True, roles=ROLES, readout_constraint=constraint)
        plain = optax.sgd(schedule, 0.9, True)
    got = steps(tx, grads, jax.tree.map(np.zeros_like, PARAMS))
    want = steps(plain, grads, jax.tree.map(np.zeros_like, PARAMS))
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), FACTORS[name, constraint])
    for mine, theirs, factor in leaves:
        np.testing.assert_array_equal(mine, theirs * factor)  # powers of two


@pytest.mark.parametrize("fan_in", [3, 1000])
@pytest.mark.parametrize("depth", [None, 7])
def test_factors_in_closed_form(fan_in, depth):
    stack = 1 if depth is None else 1 / math.sqrt(depth)
    root = math.sqrt(fan_in)
    adam = dict(weight=1 / root, embedding=1 / root, output=1, bias=1, norm=1)
    constrained = dict(weight=1, embedding=1, output=1, bias=root, norm=root)
    for name in adam:
        role = us.Role(name, fan_in, depth)
        assert optim.adam_factor(role) == pytest.approx(adam[name] * stack, rel=1e-15)
        assert optim.sgd_factor(role) == pytest.approx(adam[name] * stack, rel=1e-15)
        got = optim.sgd_factor(role, "to_output_scale")
        assert got == pytest.approx(constrained[name] * stack, rel=1e-15)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("constraint", [None, "to_output_scale"])
def test_one_step_changes_the_results_of_all_widths_as_much(name, constraint):
    """The table against the network: each role alone moves hidden values and logits alike."""

    @functools.partial(jax.jit, static_argnums=0)
    def changes(width):
        key = iter(jax.random.split(jax.random.key(0), 9))
        params = {
            "embedding": jax.random.normal(next(key), (64, width)),
            "weight": jax.random.normal(next(key), (width, width)),
            "bias": jnp.zeros(width),
            "output": jax.random.normal(next(key), (width, 8)),
        }
        labels = jax.random.randint(next(key), (64,), 0, 8)

        def apply(params):
            x = F.embedding(jnp.arange(64), params["embedding"])
            x = F.relu(F.linear(x, params["weight"], params["bias"]))
            return F.linear_readout(x, params["output"], constraint=constraint)

        grads = jax.grad(lambda p: F.cross_entropy(apply(p), labels))(params)
        options = {"readout_constraint": constraint} if name == "sgd" else {}
        tx = getattr(optim, name)(0.02, roles=lambda path: path, **options)
        updates, _ = tx.update(grads, tx.init(params))
        before, out = apply(params), {}
        for trained in ("weight", "bias", "output"):
            moved = {**params, trained: params[trained] + updates[trained]}
            out[trained] = jnp.sqrt(jnp.mean((apply(moved) - before) ** 2))
        return out

    narrow, wide = changes(64), changes(1024)
    for trained in narrow:
        assert 0.6 < wide[trained] / narrow[trained] < 1.6, trained


def test_weight_decay_depends_on_neither_learning_rate_nor_role():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    for rate in (1e-3, 0.5):
        got = steps(optim.adamw(rate, weight_decay=0.25, roles=ROLES), [zeros] * 2)
        jax.tree.map(lambda p: np.testing.assert_array_equal(p, 0.75**2), got)


def test_weight_decay_follows_the_shape_of_a_schedule():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    for peak in (0.5, 8.0):
        schedule = optax.linear_schedule(peak, 0.0, 2)
        tx = optim.adamw(schedule, weight_decay=0.25, peak_learning_rate=peak, roles=ROLES)
        got = steps(tx, [zeros] * 3)  # of the peak 1, 1/2, 0
        jax.tree.map(lambda p: np.testing.assert_array_equal(p, 0.75 * 0.875), got)


def test_weight_decay_is_added_to_adam():
    grads = gradients()
    adam = steps(optim.adam(0.5, roles=ROLES), [grads])
    got = steps(optim.adamw(0.5, weight_decay=0.25, roles=ROLES), [grads])
    jax.tree.map(lambda a, g: np.testing.assert_allclose(g, a - 0.25, atol=2e-7), adam, got)


def test_weight_decay_of_some():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    mask = jax.tree.map(lambda p: p.ndim > 1, PARAMS)
    got = steps(optim.adamw(0.5, weight_decay=0.25, roles=ROLES, mask=mask), [zeros])
    for p, decays in zip(jax.tree.leaves(got), jax.tree.leaves(mask)):
        np.testing.assert_array_equal(p, 0.75 if decays else 1.0)


def test_roles_by_tree_prefix_and_path_and_metadata_are_one():
    full = us.get_roles(PARAMS, ROLES)
    assert full["hidden"]["kernel"] == us.Role("weight", WIDTH, DEPTH)
    assert full["embedding"] == us.Role("embedding", WIDTH)
    assert us.get_roles(PARAMS, {**ROLES, "hidden": "norm"})["hidden"]["scale"].name == "norm"
    paths = []

    def by_path(path):
        paths.append(path)
        part = ROLES
        for name in path.split("/"):
            part = part[name]
        return part

    assert us.get_roles(PARAMS, by_path) == full
    assert "hidden/kernel" in paths
    stacked = {"kernel": np.ones((3, 4, 5)), "conv": np.ones((3, 3, 4, 8))}
    roles = us.get_roles(stacked, {"kernel": us.Role("weight", 4), "conv": "weight"})
    assert [roles[name].fan_in for name in ("kernel", "conv")] == [4, 36]
    scaled = jsa.as_scaled_array(PARAMS)
    assert us.get_roles(scaled, ROLES) == full


def test_roles_of_modules():
    expected = {
        "embed/embedding": us.Role("embedding", 8),
        "readout/kernel": us.Role("output", 8),
        **{
            f"layers/{i}/{name}/kernel": us.Role("weight", fan_in, 2)
            for i in range(2)
            for name, fan_in in {
                "attention/query": 8,
                "attention/key": 8,
                "attention/value": 8,
                "attention/out": 8,
                "mlp/up": 8,
                "mlp/gate": 8,
                "mlp/down": 24,
            }.items()
        },
    }

    def named(tree):
        leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, us.Role))
        return {
            jax.tree_util.keystr(path, simple=True, separator="/").replace("layers_", "layers/"): x
            for path, x in leaves
        }

    sizes = dict(num_layers=2, num_heads=2, hidden=24)
    make = lambda: nnx.TransformerDecoder(16, 8, **sizes, rngs=flax.nnx.Rngs(0))  # noqa: E731
    model = flax.nnx.eval_shape(make)
    assert named(us.get_roles(flax.nnx.state(model, flax.nnx.Param))) == expected
    ids = jnp.zeros((1, 4), jnp.int32)
    init = linen.TransformerDecoder(16, 8, **sizes).init
    variables = jax.eval_shape(init, jax.random.key(0), ids)
    assert named(us.get_roles(variables["params"])) == expected


def test_roles_outlive_a_scan_over_layers_and_other_boxes():
    class Stack(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            def body(layer, x):
                return layer(x), None

            scan = flax.linen.scan(
                body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return scan(linen.Linear(8, depth=3), x)[0]

    params = Stack().init(jax.random.key(0), jnp.ones((2, 8)))["params"]
    (role,) = jax.tree.leaves(us.get_roles(params))
    assert role == us.Role("weight", 8, 3)
    boxed = {"w": flax.linen.Partitioned(linen.WithRole(jnp.ones((8, 2)), role), ("x", None))}
    assert us.get_roles(boxed)["w"] == role


@pytest.mark.full
def test_states_of_flax_take_the_optimizers():
    ids = jnp.arange(8).reshape(1, 8)
    module = linen.TransformerDecoder(16, 8, num_layers=1, num_heads=2)
    params = module.init(jax.random.key(0), ids)["params"]
    tx = optim.adamw(0.5, weight_decay=2.0**-9)
    state = TrainState.create(apply_fn=module.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        grads = jax.grad(lambda p: module.apply({"params": p}, ids, ids, method="loss"))(
            state.params
        )
        return state.apply_gradients(grads=grads)

    moved = step(step(state))
    assert jax.tree.structure(moved.params) == jax.tree.structure(params)
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(moved))
    assert jax.tree.structure(restored) == jax.tree.structure(moved)
    jax.tree.map(np.testing.assert_array_equal, restored, moved)

    model = nnx.TransformerDecoder(16, 8, num_layers=1, num_heads=2, rngs=flax.nnx.Rngs(0))
    copy_into(model, params)
    optimizer = flax.nnx.Optimizer(model, tx, wrt=flax.nnx.Param)

    @flax.nnx.jit
    def update(model, optimizer):
        optimizer.update(model, flax.nnx.grad(lambda m: m.loss(ids, ids))(model))

    for _ in range(2):
        update(model, optimizer)
    down = model.layers[0].mlp.down.kernel
    assert down.role == us.Role("weight", 32, 1)
    np.testing.assert_allclose(
        down[...], moved.params["layers_0"]["mlp"]["down"]["kernel"].value, atol=1e-5
    )
    assert not np.array_equal(down[...], params["layers_0"]["mlp"]["down"]["kernel"].value)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: us.get_roles(PARAMS), ValueError, "'embedding' has no role"),
        (lambda: us.get_roles(PARAMS, {"embedding": "norm"}), ValueError, "tree like that"),
        (lambda: us.get_roles(PARAMS, lambda path: 3), TypeError, "must be a Role"),
        (lambda: us.get_roles(PARAMS, lambda path: "weigth"), ValueError, "one of 'weight'"),
        (lambda: us.get_roles(PARAMS, lambda path: "weight"), ValueError, "no axis to sum over"),
        (lambda: us.Role("weight", 0), ValueError, "`fan_in` of a Role"),
        (lambda: optim.adam_factor(us.Role("weight")), ValueError, "no `fan_in`"),
        (lambda: optim.sgd(1.0, readout_constraint="gmean"), ValueError, "got 'gmean'"),
        (lambda: optim.adamw(lambda step: 1.0), ValueError, "`peak_learning_rate`"),
        (lambda: optim.adamw(1.0, peak_learning_rate=1.0), ValueError, "is for a schedule"),
        (
            lambda: optim.scale_by_role(roles=ROLES).update([], optim.ScaleByRoleState((1.0,))),
            ValueError,
            "1 parameters and got 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_layers_of_others_take_a_function_of_their_paths():
    model = flax.nnx.Linear(16, 4, rngs=flax.nnx.Rngs(0))
    before = model.kernel[...]
    tx = optim.sgd(0.5, roles={"kernel": "weight", "bias": "bias"}.get)
    optimizer = flax.nnx.Optimizer(model, tx, wrt=flax.nnx.Param)
    grads = jax.tree.map(jnp.ones_like, flax.nnx.state(model, flax.nnx.Param))
    optimizer.update(model, grads)
    np.testing.assert_array_equal(model.kernel[...], before - 0.125)
    np.testing.assert_array_equal(model.bias[...], -0.5)
