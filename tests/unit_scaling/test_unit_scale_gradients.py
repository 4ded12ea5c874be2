"""Gradients of `unit_scale` are right up to one positive constant for each parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling.automatic import evaluation, measuring, planning

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


def check(fun, params, *args, monkeypatch, constraint="to_output_scale"):
    """Gradients against those of the function that the forward pass computes."""
    scaled = us.unit_scale(fun, constraint=constraint)
    value, got = jax.value_and_grad(scaled)(params, *args)
    with monkeypatch.context() as patch:
        honest(patch)
        same, expected = jax.value_and_grad(scaled)(params, *args)
    assert value == same
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
            w = params["w"][k % len(params["w"])]
            out = [
                lambda: a @ w,
                lambda: jnp.tanh(a),
                lambda: a + b @ w,
                lambda: a + jnp.tanh(b @ w) @ params["v"],
                lambda: a * jnp.sin(b),
                lambda: (a - a.mean(1, keepdims=True)) * params["gain"],
                lambda: jax.nn.relu(a) + params["bias"],
                lambda: jax.nn.softmax(jnp.tanh(a) @ jnp.tanh(b).T) @ a,
            ][kind]()
            values.append(out)
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


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed, monkeypatch, random_factors):
    fun, params, x = random_function(seed)
    check(fun, params, x, monkeypatch=monkeypatch)
