"""Gradients of `unit_scale` are right up to one positive constant for each parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling.automatic import evaluation, measuring, planning
from tests.helpers import compiled

WIDTH = 4


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def honest(monkeypatch):
    """Make every factor one of the function itself, and autodiff right."""
    monkeypatch.setattr(evaluation, "scale_fwd", lambda x, factor: x * factor)
    monkeypatch.setattr(evaluation, "scale_bwd", lambda x, factor: x)


def constants(got, expected):
    """The factor of each leaf, after checking that there is one."""
    found = []
    for leaf, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        leaf, want = np.asarray(leaf, np.float64).ravel(), np.asarray(want, np.float64).ravel()
        if not want.any():
            np.testing.assert_array_equal(leaf, 0)
            continue
        constant = leaf @ want / (want @ want)
        np.testing.assert_allclose(leaf, constant * want, rtol=0, atol=1e-9 * abs(leaf).max())
        found.append(constant)
    return found


def check(fun, params, *args, monkeypatch, constraint="to_output_scale", is_measured=False):
    """Gradients against those of the function that the forward pass computes."""
    example = (params, *args) if is_measured else None
    scaled = us.unit_scale(fun, constraint=constraint, example=example)

    def both(params, *args):
        results = jax.value_and_grad(scaled)(params, *args)
        with monkeypatch.context() as patch:
            honest(patch)
            return results, jax.value_and_grad(scaled)(params, *args)

    (value, got), (same, expected) = compiled(both, params, *args)
    np.testing.assert_allclose(value, same, rtol=1e-12)
    found = constants(got, expected)
    assert found and min(found) > 0
    return found


@pytest.fixture
def random_factors(monkeypatch):
    """Factors far from 1 and from each other: a wrong edge cannot hide."""
    rng = np.random.default_rng(0)

    def function(self, group):
        return 2 ** rng.uniform(-1, 1), list(2 ** rng.uniform(-1, 1, len(group.operands)))

    cache = {}

    def stable(self, group):
        key = (group.root.name, len(group.ops), len(group.operands), *group.root.outputs[0].shape)
        return cache.setdefault(key, function(self, group))

    monkeypatch.setattr(measuring.Measuring, "function", stable)
    monkeypatch.setattr(planning, "_of_product", lambda group, m: stable(m, group))


def step(kind, a, b, w, params):
    if kind == 0:
        return a @ w
    if kind == 1:
        return jnp.tanh(a)
    if kind == 2:
        return a + b @ w
    if kind == 3:
        return a + jnp.tanh(b @ w) @ params["v"]
    if kind == 4:
        return a * jnp.sin(b)
    if kind == 5:
        return (a - a.mean(1, keepdims=True)) * params["gain"]
    if kind == 6:
        return jax.nn.relu(a) + params["bias"]
    return jax.nn.softmax(jnp.tanh(a) @ jnp.tanh(b).T) @ a


def random_function(seed):
    """A graph of products, functions and sums with shared values and reused weights."""
    rng = np.random.default_rng(seed)
    steps = [(rng.integers(8), *rng.integers(0, 99, 3)) for _ in range(rng.integers(4, 14))]
    ends = rng.integers(1, 3)

    def fun(params, x):
        values = [x @ params["in"]]
        for kind, i, j, k in steps:
            # Mostly the latest values, so that the graph is deep.
            a, b = values[-1 - i % min(3, len(values))], values[-1 - j % min(5, len(values))]
            values.append(step(kind, a, b, params["w"][k % len(params["w"])], params))
        return sum(jnp.mean(v**2) for v in values[-ends:])

    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    params = {
        "in": normal(3, WIDTH),
        "w": [normal(WIDTH, WIDTH) / 2 for _ in range(5)],
        "v": normal(WIDTH, WIDTH) / 2,
        "gain": normal(WIDTH),
        "bias": normal(WIDTH),
    }
    return fun, params, normal(5, 3)


MORE = [pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 60)]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", [*range(6), *MORE])
def test_random_graphs(seed, monkeypatch, random_factors):
    fun, params, x = random_function(seed)
    check(fun, params, x, monkeypatch=monkeypatch)


FEW = [pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 30)]


@pytest.mark.parametrize("seed", [0, *FEW])
def test_random_graphs_with_sizes_of_an_example(seed, monkeypatch, random_factors):
    fun, params, x = random_function(seed)
    check(fun, params, x, monkeypatch=monkeypatch, is_measured=True)


def test_the_graphs_have_all_kinds_of_edges(random_factors):
    notes, cuts = set(), set()
    for seed in range(12):
        fun, params, x = random_function(seed)
        for row in us.unit_scale(fun).report(params, x).rows:
            cuts.update(row.cut_edges)
            if row.kind == "residual sum":
                notes.add("starts" in row.note)
    assert cuts == {True, False} and notes == {True, False}


def gated(params, x):
    """The branch of `w` meets the skip: its two edges are no cut-edges."""
    h = x @ params["in"]
    return jnp.mean(jax.nn.softmax(h * jnp.tanh(h @ params["w"])) ** 2)


def two_paths(params, x):
    """A product on one path only: unless it is constrained, it alone has another factor."""
    h = x @ params["in"]
    return jnp.mean(jnp.tanh(jnp.sin(h @ params["w"]) * jnp.cos(h)) ** 2)


def residual(params, x):
    """Two branches of one value are added."""
    h = x @ params["in"]
    return jnp.mean(jax.nn.softmax(jnp.tanh(h @ params["w"]) + jnp.sin(h @ params["v"])) ** 2)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("fun", [gated, two_paths, residual])
def test_without_the_constraint_gradients_are_wrong(fun, monkeypatch):
    rng = np.random.default_rng(1)
    shapes = {"in": (3, 8), "w": (8, 8), "v": (8, 8)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(size=(5, 3)))
    for constraint in ("to_output_scale", "gmean", lambda *factors: 3.0):
        check(fun, params, x, monkeypatch=monkeypatch, constraint=constraint)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(fun, params, x, monkeypatch=monkeypatch, constraint=None)


def scanned(params, x):
    """Shared and stacked weights, a residual carry, results of every step."""

    def body(carry, w):
        h = carry + jnp.tanh(carry @ w["up"]) @ w["down"]
        return h, jnp.tanh(h) @ params["out"]

    h, ys = jax.lax.scan(body, x @ params["in"], params["layers"])
    return jnp.mean((h @ params["head"]) ** 2) + jnp.mean(ys**2)


def recurrent(params, xs):
    def body(h, x):
        h = jnp.tanh(h @ params["h"] + x @ params["x"])
        return h, h @ params["out"]

    return jnp.mean(jax.lax.scan(body, jnp.zeros((2, 4)), xs)[1] ** 2)


def arrays(**shapes):
    rng = np.random.default_rng(0)
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s) / 2), shapes, is_leaf=is_shape)


def branching(params, x):
    """A weight in both branches, one in each, and a loop whose gradient ends at its start."""
    h = x @ params["in"]

    def left(h):
        return jnp.tanh(h @ params["both"]) @ params["left"]

    def right(h):
        return h * jnp.sin(h @ params["both"])

    h = jax.lax.switch(params["index"], [left, right, lambda h: h + 1], h) + jnp.cos(h)
    wide = jax.lax.stop_gradient(jax.lax.while_loop(lambda x: x.sum() > 9, jnp.tanh, h))
    return jnp.mean((h * wide @ params["head"]) ** 2)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=pytest.mark.full) for i in (1, 2))])
def test_branches(index, is_measured, monkeypatch, random_factors):
    shapes = {"in": (3, 4), "both": (4, 4), "left": (4, 4), "head": (4, 2)}
    params, x = arrays(**shapes), arrays(x=(5, 3))["x"]

    def fun(params, x):
        return branching({**params, "index": index}, x)

    check(fun, params, x, monkeypatch=monkeypatch, is_measured=is_measured)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("is_measured", [False, True])
def test_loops(is_measured, monkeypatch, random_factors):
    layers = {"up": (3, 4, 6), "down": (3, 6, 4)}
    params = arrays(**{"in": (3, 4), "layers": layers, "out": (4, 2), "head": (4, 2)})
    x = arrays(x=(5, 3))["x"]
    check(scanned, params, x, monkeypatch=monkeypatch, is_measured=is_measured)
    params, x = arrays(h=(4, 4), x=(3, 4), out=(4, 2)), arrays(x=(6, 2, 3))["x"]
    check(recurrent, params, x, monkeypatch=monkeypatch, is_measured=is_measured)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_measured", [False, True])
def test_checkpoints(is_measured, monkeypatch, random_factors):
    params = arrays(w=(4, 6), v=(6, 4), head=(4, 2))
    x = arrays(x=(5, 4))["x"]

    @jax.checkpoint
    def block(params, x):
        return x + jnp.tanh(jnp.tanh(x) @ params["w"]) @ params["v"]

    @jax.checkpoint
    def loss(params, x):
        return jnp.mean((block(params, block(params, x)) @ params["head"]) ** 2)

    check(loss, params, x, monkeypatch=monkeypatch, is_measured=is_measured)
    assert "remat" in str(jax.make_jaxpr(us.unit_scale(loss))(params, x))


def test_a_branch_that_is_connected_elsewhere_is_not_delayed(monkeypatch, random_factors):
    params, x = arrays(w=(4, 4), head=(4, 4)), arrays(x=(5, 4))["x"]

    def fun(params, x):
        h = x @ params["head"]
        return jnp.mean((h + jnp.tanh(h @ params["w"]) @ params["head"]) ** 2)

    (row,) = [r for r in us.unit_scale(fun).report(params, x).rows if r.kind == "residual sum"]
    assert "connected elsewhere" in row.note
    np.testing.assert_allclose(row.betas, row.weights)
    check(fun, params, x, monkeypatch=monkeypatch)
