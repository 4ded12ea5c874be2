"""A mixture of experts: exact moments, unit scale, the right gradient, and the modules."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.factors import balancing_std, top_k_stds
from tests.unit_scaling.test_umup_modules import rms
from tests.unit_scaling.test_unit_functional import MULTS, MULTS_FULL, TOLERANCE

full = functools.partial(pytest.param, marks=pytest.mark.full)
ROUTES = [(8, 2, True), (8, 1, False), (4, 3, True), (64, 6, False), (4, 4, True)]


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("mult", [*MULTS_FULL, full(2.0**-8), full(64.0)])
@pytest.mark.parametrize("experts, k", [(8, 2), (4, 1), full(4, 3), full(64, 6)])
def test_moments_of_routing(experts, k, mult):
    """Against samples, in float64."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2**18 // experts, experts))
    p = np.exp(mult * (z - z.max(1, keepdims=True)))
    p /= p.sum(1, keepdims=True)
    chosen = np.argsort(-z, 1)[:, :k]
    for normalize in (True, False):
        w = np.take_along_axis(p, chosen, 1)
        w = w / w.sum(1, keepdims=True) if normalize else w
        v = rng.normal(size=w.shape)
        back = np.zeros_like(z)
        np.put_along_axis(back, chosen, w * v, 1)
        mean = np.sum(w * v, 1, keepdims=True)
        if normalize:
            np.put_along_axis(back, chosen, w * (v - mean), 1)
        else:
            back -= p * mean
        sampled = [np.sum(w**2, 1).mean() ** 0.5, np.sum(back**2, 1).mean() ** 0.5]
        np.testing.assert_allclose(
            top_k_stds(experts, k, mult, normalize), sampled, rtol=0.04, atol=1e-12
        )
    f = np.where(np.arange(experts) < k, 1 / k, 0)
    pull = p * (f - (p * f).sum(1, keepdims=True))
    sampled = np.sqrt(np.mean(pull**2))
    np.testing.assert_allclose(
        balancing_std(experts, k, mult), sampled, rtol=0.4 if mult > 16 else 0.05
    )


@pytest.mark.parametrize(
    "experts, k, normalize, mult",
    [
        pytest.param(*route, mult, marks=[] if mult == default else pytest.mark.full)
        for route, default in zip(ROUTES, (1.0, 2.0**-4, 4.0, 1.0, 2.0**-4))
        for mult in MULTS
    ],
)
def test_routing_has_unit_scale(experts, k, normalize, mult):
    logits, ct = normal(2**15 // experts, experts), normal(2**15 // experts, k, seed=1)

    @jax.jit
    def run(logits):
        options = dict(mult=mult, normalize=normalize, constraint=None)
        weights, pull, indices = jax.vjp(
            lambda x: F.top_k_routing(x, k, **options), logits, has_aux=True
        )
        return weights, indices, pull(ct)[0]

    weights, indices, grad = run(logits)
    np.testing.assert_array_equal(indices, jnp.argsort(-logits, -1)[:, :k])
    assert rms(weights) == pytest.approx(1, rel=TOLERANCE)
    assert rms(grad) == pytest.approx(1, rel=TOLERANCE)
    total = jnp.take_along_axis(jax.nn.softmax(mult * logits), indices, -1)
    plain = total / total.sum(-1, keepdims=True) if normalize else total
    np.testing.assert_allclose(weights / plain, weights[0, 0] / plain[0, 0], rtol=2e-4)


def test_experts_between_dispatch_and_combine_have_unit_scale():
    """Whatever the balance: here most rows go to the first of the experts."""
    rows, experts, k, width, hidden = 256, 8, 2, 32, 96
    x, weight = normal(rows, width), normal(experts, width, hidden, seed=4)
    ct = normal(rows, hidden, seed=1)
    skewed = normal(rows, experts, seed=3).at[:, 0].add(2.0)
    weights, indices = F.top_k_routing(normal(rows, experts, seed=2), k)
    indices = jax.lax.top_k(skewed, k)[1]

    def layer(x, weight, weights, probe):
        out, sizes = F.dispatch(x, indices, experts)
        inside = F.ragged_dot(out, weight, sizes, None) + probe
        return F.combine(inside, weights, indices, None), (inside, sizes)

    @jax.jit
    def run(*operands):
        out, pull, (inside, sizes) = jax.vjp(layer, *operands, has_aux=True)
        return out, inside, sizes, pull(ct)

    out, inside, sizes, grads = run(x, weight, weights, jnp.zeros((rows * k, hidden)))
    np.testing.assert_array_equal(sizes, np.bincount(np.ravel(indices), minlength=experts))
    for value in (out, inside, *grads):
        assert rms(value) == pytest.approx(1, rel=TOLERANCE)
    each = jnp.einsum("td,edh->teh", x, weight) / math.sqrt(width)
    each = jnp.take_along_axis(each, indices[..., None], 1)
    np.testing.assert_allclose(
        out, jnp.einsum("tkh,tk->th", each, weights) / math.sqrt(k), atol=1e-4
    )


@pytest.mark.parametrize("mult", MULTS_FULL)
@pytest.mark.parametrize("experts, k", [(8, 2), full(4, 1), full(64, 6)])
def test_a_collapsed_router_has_a_unit_gradient_towards_balance(experts, k, mult):
    logits = normal(2**16 // experts, experts)
    collapsed = jnp.broadcast_to(jnp.arange(k), (*logits.shape[:-1], k))
    loss, grad = jax.value_and_grad(F.load_balancing_loss)(logits, collapsed, mult)
    assert rms(grad) == pytest.approx(1, rel=TOLERANCE)
    assert grad[:, :k].mean() > 0 > grad[:, k:].mean()
    p = jax.nn.softmax(mult * logits).mean(0)
    np.testing.assert_allclose(loss, experts * p[:k].mean(), rtol=1e-5)
    # Balanced, as the k experts from a moving place on: no force.
    balanced = (jnp.arange(len(logits))[:, None] + jnp.arange(k)) % experts
    loss, grad = jax.value_and_grad(F.load_balancing_loss)(logits, balanced, mult)
    np.testing.assert_allclose(loss, 1, rtol=1e-5)
    np.testing.assert_allclose(grad, 0, atol=1e-5)


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda x, i: F.top_k_routing(x, 5), ValueError, r"`k` of .* must be in \[1, 4\]"),
        (lambda x, i: F.top_k_routing(x, 2.0), TypeError, "`k` of .* must be an integer"),
        (lambda x, i: F.top_k_routing(x, 1), ValueError, "needs `normalize=False`"),
        (lambda x, i: F.top_k_routing(i, 1), TypeError, "`logits` of `top_k_routing`"),
        (lambda x, i: F.dispatch(x, x, 4), TypeError, "`indices` of `dispatch` must be integers"),
        (lambda x, i: F.dispatch(x, i[0], 4), ValueError, "`indices` of `dispatch`"),
        (lambda x, i: F.dispatch(x, i[1:], 4), ValueError, r"\(3, 4\) and \(2, 2\)"),
        (lambda x, i: F.ragged_dot(x, x, i[0]), ValueError, "a weight .experts, fan_in"),
        (lambda x, i: F.ragged_dot(x, x[None].mT, x[0]), TypeError, "`group_sizes` of"),
        (lambda x, i: F.ragged_dot(x, jnp.ones((3, 4, 1)), i[0]), ValueError, r"shape \(3,\), got"),
        (lambda x, i: F.combine(x, i, i), TypeError, "`weights` of `combine`"),
        (lambda x, i: F.combine(x, jnp.ones((3, 2)), i), ValueError, "`combine` takes"),
        (lambda x, i: F.load_balancing_loss(x, i[1:]), ValueError, "`load_balancing_loss` takes"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call(jnp.ones((3, 4)), jnp.zeros((3, 2), int))
