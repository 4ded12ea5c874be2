"""Ratios of residual branches: closed forms, and the plain network that each scheme stands for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling import functional as F

LAYERS = 6


def weights(scheme, layers=LAYERS):
    """The weights of the embedding and of all branches in the last stream."""
    out = [1.0]
    for index in range(layers):
        tau = scheme(index, layers)
        length = math.sqrt(tau**2 + 1)
        out = [w / length for w in out] + [tau / length]
    return np.array(out)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_fixed_tau_gives_a_share_of_the_variance(share):
    tau = us.fixed_tau(share)(2, LAYERS)
    assert tau**2 / (tau**2 + 1) == pytest.approx(share, rel=1e-14)
    expected = [(1 - share) ** LAYERS] + [
        share * (1 - share) ** (LAYERS - 1 - i) for i in range(LAYERS)
    ]
    np.testing.assert_allclose(weights(us.fixed_tau(share)) ** 2, expected, rtol=1e-13)


def test_running_mean_gives_all_the_same_weight():
    expected = np.full(LAYERS + 1, 1 / math.sqrt(LAYERS + 1))
    np.testing.assert_allclose(weights(us.running_mean()), expected, rtol=1e-14)


@pytest.mark.parametrize("mult, ratio", [(1, 1), (0.25, 1), (1, 0.25), (4, 2), (1e-3, 8)])
def test_umup_gives_alphas_whatever_the_depth(mult, ratio):
    for layers in (2, 6, 64):
        got = weights(us.umup_residuals(mult, ratio), layers) ** 2
        relative = got[1:] / got[0]
        attention, mlp = relative[::2].sum(), relative[1::2].sum()
        assert attention / mlp == pytest.approx(ratio**2, rel=1e-12)
        assert (attention + mlp) / 2 == pytest.approx(mult**2, rel=1e-12)
        np.testing.assert_allclose(relative[::2], relative[0], rtol=1e-12)
        np.testing.assert_allclose(relative[1::2], relative[1], rtol=1e-12)
        assert got.sum() == pytest.approx(1, rel=1e-12)


def test_umup_is_the_formula_of_the_paper():
    mult, ratio, layers = 0.7, 1.3, 8
    mlp = mult * math.sqrt(2 / (1 + ratio**2))
    alphas = [ratio * mlp, mlp] * (layers // 2)
    scheme = us.umup_residuals(mult, ratio)
    for index, alpha in enumerate(alphas):
        before = layers / 2 + sum(a**2 for a in alphas[:index])
        assert scheme(index, layers) ** 2 == pytest.approx(alpha**2 / before, rel=1e-14)


def test_lemma_f1_the_network_is_a_plain_one_up_to_its_scale():
    """Gradients too: those of a branch's matrix are unit-scaled, but all by known factors."""
    mult, ratio = 0.5, 3.0
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x = jnp.asarray(rng.normal(size=(5, 8)))
        matrices = jnp.asarray(rng.normal(size=(LAYERS, 8, 8)))
        scheme = us.umup_residuals(mult, ratio)
        mlp = mult * math.sqrt(2 / (1 + ratio**2))
        alphas = np.array([ratio * mlp, mlp] * (LAYERS // 2))

        def branch(matrix, x):
            norm = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))
            return jnp.tanh(norm @ matrix)

        @jax.jit
        def scaled(x, matrices):
            for index, matrix in enumerate(matrices):
                tau = scheme(index, LAYERS)
                x = F.residual_apply(lambda x, m=matrix: branch(m, x), x, tau)
            return x

        @jax.jit
        def plain(x, matrices):
            for alpha, matrix in zip(alphas, matrices):
                x = x + alpha / math.sqrt(LAYERS / 2) * branch(matrix, x)
            return x

        scale = math.sqrt(1 + np.sum(alphas**2) / (LAYERS / 2))
        assert scaled(x, matrices).dtype == jnp.float64
        np.testing.assert_allclose(scale * scaled(x, matrices), plain(x, matrices), rtol=1e-12)

        def gradients(function, factor):
            def total(*operands):
                return jnp.sum(jnp.sin(factor * function(*operands)))

            return jax.jit(jax.grad(total, (0, 1)))(x, matrices)

        (got_x, got), (want_x, want) = gradients(scaled, scale), gradients(plain, 1.0)
        # Gradients of the input are equal up to the same scale: no factor is lost on the way.
        np.testing.assert_allclose(got_x, want_x, rtol=1e-10, atol=1e-12)
        # Those inside of a branch lack the branch's weight, which leaves it with the gradient.
        taus = [scheme(index, LAYERS) for index in range(LAYERS)]
        lost = np.array([math.sqrt(t**2 + 1) / t for t in taus])[:, None, None]
        np.testing.assert_allclose(got, want * lost, rtol=1e-9, atol=1e-11)


def test_config_makes_the_scheme_of_its_multipliers():
    config = us.UmupConfig(residual_mult=0.5, residual_attn_ratio=2.0)
    expected = us.umup_residuals(0.5, 2.0)
    for index in range(LAYERS):
        assert config.residuals()(index, LAYERS) == expected(index, LAYERS)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: us.fixed_tau(1.0), "`tau` of `fixed_tau`"),
        (lambda: us.fixed_tau(0), "`tau` of `fixed_tau`"),
        (lambda: us.umup_residuals(-1), "`residual_mult`"),
        (lambda: us.running_mean()(6, 6), "got 6 of 6"),
        (lambda: us.umup_residuals()(-1, 6), "got -1 of 6"),
        (lambda: us.UmupConfig(loss_softmax_mult=0), "`loss_softmax_mult`"),
    ],
)
def test_what_is_no_scheme_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
