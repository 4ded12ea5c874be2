"""A mixture of experts: exact moments, unit scale, the right gradient, and the modules."""

import functools
import math

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling import linen, nnx
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
            top_k_stds(experts, k, mult, normalize),
            sampled,
            rtol=0.15 if mult > 4 else 0.04,
            atol=1e-12,
        )
    f = np.where(np.arange(experts) < k, 1 / k, 0)
    pull = p * (f - (p * f).sum(1, keepdims=True))
    sampled = np.sqrt(np.mean(pull**2))
    np.testing.assert_allclose(
        balancing_std(experts, k, mult), sampled, rtol=0.4 if mult > 16 else 0.05
    )


@pytest.mark.sampled(8)
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
    constant = weights[0, 0] / plain[0, 0]
    np.testing.assert_allclose(weights, constant * plain, rtol=2e-4, atol=1e-6)


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


@pytest.mark.parametrize("options", [dict(fp8=True), full(dict(k=1, normalize=False))])
def test_modules_of_both_interfaces_give_the_same(options):
    options = dict(num_experts=4, hidden=24, router_mult=2.0, act_mult=0.5, depth=3) | options
    ours, module = nnx.MoEMLP(16, rngs=flax.nnx.Rngs(0), **options), linen.MoEMLP(**options)
    graph, state = flax.nnx.split(ours)
    roles = flax.nnx.to_pure_dict(us.get_roles(state))
    assert roles["router"] == us.Role("output", 16, 3)
    assert roles["down"] == us.Role("weight", 24, 3)
    x = normal(2, 8, 16)
    assert us.get_roles(jax.eval_shape(module.init, jax.random.key(0), x)["params"]) == roles
    params = flax.nnx.to_pure_dict(state)
    got = jax.jit(lambda x: flax.nnx.merge(graph, state)(x))(x)
    want = jax.jit(module.apply)({"params": params}, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_a_mixture_is_the_sum_over_its_experts():
    """Results of unit scale, and the right gradient of the input, up to one constant."""
    width, experts, k = 16, 4, 2
    graph, params = flax.nnx.split(nnx.MoEMLP(width, experts, rngs=flax.nnx.Rngs(0)))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype(jnp.float64), params)
        x, ct, *ways = jax.random.normal(jax.random.key(0), (4, 256, width))

        @jax.jit
        def run(params, x):
            out, pull, loss = jax.vjp(
                lambda p, x: flax.nnx.merge(graph, p)(x), params, x, has_aux=True
            )
            return out, loss, *pull(ct)

        @jax.jit
        def plain(params, x):
            p = {name: value[...] for name, value in params.items()}
            logits = x @ p["router"] / width
            chosen, indices = jax.lax.top_k(logits, k)
            up, gate = (jnp.einsum("td,edh->teh", x, p[name]) / 4 for name in ("up", "gate"))
            each = jnp.einsum("teh,ehd->ted", up * jax.nn.silu(gate), p["down"]) / 8
            each = jnp.take_along_axis(each, indices[..., None], 1)
            share = jax.nn.one_hot(indices, experts).sum((0, 1)) / (k * len(x))
            out = jnp.einsum("tk,tkd->td", jax.nn.softmax(chosen), each)
            return out, experts * (jax.nn.softmax(logits).mean(0) * share).sum()

        out, loss, grads, grad = run(params, x)
        assert rms(out) == pytest.approx(1, rel=0.25)
        for name in ("up", "gate", "down"):
            assert rms(grads[name][...]) == pytest.approx(1, rel=0.25), name
        want, want_loss = plain(params, x)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
        constant = jnp.vdot(out, want) / jnp.vdot(want, want)
        np.testing.assert_allclose(out, want * constant, rtol=1e-6, atol=1e-9)
        exact = jax.jit(jax.grad(lambda x: jnp.vdot(ct, plain(params, x)[0])))(x)
        constant = jnp.vdot(grad, exact) / jnp.vdot(exact, exact)
        np.testing.assert_allclose(grad, exact * constant, atol=1e-6)


def test_matmuls_into_the_experts_are_in_fp8():
    graph, params = flax.nnx.split(nnx.MoEMLP(16, 4, fp8=True, rngs=flax.nnx.Rngs(0)))
    text = str(jax.make_jaxpr(lambda p, x: flax.nnx.merge(graph, p)(x))(params, normal(8, 16)))
    assert text.count("ragged_dot") >= 3 and "f8_e4m3fn" in text


@pytest.mark.parametrize("options", [dict(k=5), dict(k=0), dict(k=1)])
def test_modules_refuse_what_does_not_fit(options):
    with pytest.raises(ValueError, match="`k"):
        nnx.MoEMLP(8, 4, **options, rngs=flax.nnx.Rngs(0))
    with pytest.raises(ValueError, match="`k"):
        linen.MoEMLP(4, **options).init(jax.random.key(0), jnp.ones((2, 8)))


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
