"""`unit_scale` of models from elsewhere: tensors at initialisation are within [1/2, 2]."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scalify import unit_scaling as us
from tests.unit_scaling import ordinary_models

KINDS = ("activation", "gradient", "argument's gradient")
HAS_GPT2 = importlib.util.find_spec("transformers") is not None and (
    importlib.util.find_spec("transformers.models.gpt2.modeling_flax_gpt2") is not None
)
DEEP = [
    *(
        pytest.param(name, depth, marks=pytest.mark.full)
        for name, depth in (("resnet", 6), ("mixer", 3))
    ),
    pytest.param(
        *("gpt2", 3),
        marks=[pytest.mark.full, pytest.mark.skipif(not HAS_GPT2, reason="no transformers 4.x")],
    ),
]


def unit_matrices(params):
    """Biases stay as they are: those of Equinox are small random numbers."""
    return jax.tree.map(lambda p: us.unit_parameters(p) if p.ndim > 1 else p, params)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name, depth", [("resnet", 1), *DEEP])
def test_tensors_have_unit_scale(name, depth):
    loss, params, *data = getattr(ordinary_models, name)(depth)
    params = unit_matrices(params)
    found = us.unit_scale(loss, example=(params, *data)).measure(params, *data)
    rest = found.outside()
    assert [t.kind for t in found] == [k for k in KINDS for _ in found.of(k)]
    assert found.share_within() > 0.95 and len(found) > 20 * depth, str(rest)
    for kind in KINDS[1:]:
        assert found.of(kind).share_within() > 0.95, str(rest)
    assert found.share_within(0.25, 4) == 1, str(rest)


@pytest.mark.full
@pytest.mark.parametrize("name", ["resnet", "mixer"])
def test_without_an_example_most_are_near(name):
    """Factors of independent Gaussians: what tensors have in common, they do not know."""
    loss, params, *data = getattr(ordinary_models, name)(6 if name == "resnet" else 3)
    params = unit_matrices(params)
    found = us.unit_scale(loss).measure(params, *data)
    assert found.of("activation").share_within() > 0.9
    assert found.share_within(1 / 8, 8) == 1


def linear(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) @ params["v"]))


ARRAYS = {"w": jnp.full((16, 32), 3.0), "v": jnp.ones((32, 4))}
X = jax.random.normal(jax.random.key(0), (8, 16))


def test_a_measurement_is_a_table():
    found = us.unit_scale(linear).measure(ARRAYS, X)
    names = [(t.kind, t.name, t.shape) for t in found]
    assert names[0] == ("activation", "dot_general", (8, 32))
    assert names[-1] == ("argument's gradient", "args[1]", (8, 16))
    lines = str(found.outside()).splitlines()
    assert lines[0].split() == ["kind", "rms", "shape", "name", "scope", "line"]
    assert "test_unit_scale_models.py" in lines[1] and len(lines) == 1 + len(found.outside())
    product = found.of("activation").tensors[0]
    expected = us.unit_scale(lambda params, x: x @ params["w"])(ARRAYS, X)
    np.testing.assert_allclose(product.rms, np.sqrt(np.mean(np.square(expected))), rtol=1e-5)
    with pytest.raises(ValueError, match="`kind` must be one of activation, gradient"):
        found.of("weight")


def test_results_without_a_loss_are_measured():
    found = us.unit_scale(lambda w, x: jnp.sin(x @ w)).measure(ARRAYS["w"], X)
    assert all(t.rms > 0 for t in found) and len(found.of("gradient")) == 2


def test_errors():
    with pytest.raises(TypeError, match="`example` of `unit_scale` must be a tuple .* got Array"):
        us.unit_scale(linear, example=X)
    with pytest.raises(TypeError, match="`example` of `unit_scale` must be arrays, not traced"):
        jax.jit(lambda x: us.unit_scale(linear, example=(ARRAYS, x))(ARRAYS, x))(X)
    scaled = us.unit_scale(lambda xs: jnp.mean(sum(xs) ** 2), example=([X, X],))
    with pytest.raises(ValueError, match="give `unit_scale` an example of the same structure"):
        scaled([X, X, X])
