"""Scale factors against the formulas of the PyTorch library `unit-scaling` (0.3), written anew.

Where the library interpolates what is an integral here, both are compared with a tolerance, and
`docs/coming_from.md` has the difference.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling import optim
from tests.helpers import compiled

F = us.functional
EXACT = 1e-5
RELU = math.sqrt(2 / (1 - 1 / math.pi))


def normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def between(weight, lower, upper):
    """From `lower` at 0 to `upper` at 1, by equal ratios."""
    return lower ** (1 - weight) * upper**weight


def constant(got, plain):
    got, plain = (np.asarray(x, np.float64).ravel() for x in (got, plain))
    factor = got @ plain / (plain @ plain)
    np.testing.assert_allclose(got, factor * plain, atol=1e-4 * np.abs(got).max())
    return factor


def factors(scaled, plain, *operands):
    """By what a function multiplies the result of a plain one, and its gradients."""

    def both(*xs):
        out, pull = jax.vjp(plain, *xs)
        other, pull_other = jax.vjp(scaled, *xs)
        return (other, *pull_other(jnp.ones_like(out))), (out, *pull(jnp.ones_like(out)))

    got, expected = compiled(both, *operands)
    return [constant(a, b) for a, b in zip(got, expected, strict=True)]


X, W = normal(8, 32), normal(32, 64)[:, :64]
MULTS = (0.25, 1.0, 4.0)


def check(found, expected, tolerance=EXACT):
    np.testing.assert_allclose(found, expected, rtol=tolerance)


def test_products():
    found = factors(lambda a, b: F.matmul(a, b, None), jnp.matmul, X, W)
    check(found, [32**-0.5, 64**-0.5, 8**-0.5])
    bias = jnp.ones(64)
    for layer, power in ((F.linear, 0.5), (F.linear_readout, 1.0)):
        free = functools.partial(layer, bias=None, constraint=None)
        check(factors(free, jnp.matmul, X, W), [32**-power, 64**-0.5, 8**-0.5])
        # The library multiplies the bias by the factor of the result, too; here it is added behind.
        _, pull = jax.vjp(functools.partial(layer, X, W), bias)
        check(pull(jnp.ones((8, 64)))[0], np.full(64, 8 * 8**-0.5))


def test_a_convolution_in_the_middle_of_a_long_input():
    x, kernel = normal(2, 400, 4), normal(5, 4, 8)

    def plain(x, kernel):
        dims = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=dims)

    def scaled(x, kernel):
        return F.conv(x, kernel, padding="VALID", constraint=None)

    rows = 2 * 396
    check(factors(scaled, plain, x, kernel), [20**-0.5, 40**-0.5, rows**-0.5], 0.01)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mult", MULTS)
def test_activations(mult):
    slow, fast = 1 / (1 + 0.25 / mult**2), 1 / (1 + 1 / mult**2)
    x, gate = X, normal(32, 8).T

    def gelu(x):
        return jax.nn.gelu(x * mult, approximate=False) / mult

    def silu(x):
        return x * jax.nn.sigmoid(x * mult)

    found = factors(lambda x: F.gelu(x, mult, None), gelu, x)
    check(found, [between(slow, 2, RELU), between(slow, 2, 2**0.5)])
    # The library has the weight of GELU for SiLU's result: see the paper's appendix B.
    found = factors(lambda x: F.silu(x, mult, None), silu, x)
    check(found, [between(fast, 2, RELU), between(fast, 2, 2**0.5)])
    check(found[0], between(slow, 2, RELU), 0.07)
    found = factors(lambda x, g: F.silu_glu(x, g, mult), lambda x, g: x * silu(g), x, gate)
    check(found, [between(fast, 2, 2**0.5)] * 3)


@pytest.mark.parametrize(
    "mult", [1.0, *(pytest.param(m, marks=pytest.mark.full) for m in (0.25, 4.0))]
)
def test_attention(mult):
    """The library interpolates; here the moment is exact. One factor for all four."""
    length, width = 64, 16
    x = [normal(1, length, 1, width) * scale for scale in (1, 0.9, 1.1)]
    weight = 1 / (1 + 4 * width / mult**2)
    for is_causal in (False, True):
        plain = functools.partial(
            jax.nn.dot_product_attention, is_causal=is_causal, scale=mult / width
        )
        scaled = functools.partial(F.scaled_dot_product_attention, is_causal=is_causal, mult=mult)
        found = factors(scaled, plain, *x)
        np.testing.assert_allclose(found, found[0], rtol=1e-3)
        flat = ((math.log(length) if is_causal else 1) / length) ** 0.5
        check(found[0], 1 / between(weight, flat, 1.0), 0.2)


def test_losses():
    logits, labels = normal(16, 64), jnp.arange(16)

    def plain(x):
        return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1).sum()

    value, grad = factors(lambda x: F.cross_entropy(x, labels), plain, logits)
    check(value, 1 / 16)
    check(grad, 64 / 63**0.5, 0.05)  # there of equal probabilities, here of a softmax of Gaussians
    found = factors(F.mse_loss, lambda x, y: jnp.sum((x - y) ** 2), X, normal(32, 8).T)
    check(found, [1 / X.size, 8**-0.5, 8**-0.5])


def test_norms_and_the_embedding():
    gain, bias = jnp.ones(32), jnp.zeros(32)
    rows = (32 / X.size) ** 0.5

    def plain(x, gain, bias):
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * gain + bias

    out, _, of_gain, of_bias = factors(
        F.layer_norm, plain, X * (1 + jnp.arange(32) / 32), gain, bias
    )
    check([out, of_gain, of_bias], [1, rows, rows])
    ids = jnp.array([3, 1, 3])
    check(factors(lambda t: F.embedding(ids, t), lambda t: t[ids], W), [1, (32 / 3) ** 0.5])


def test_sums_and_residuals():
    found = factors(lambda a, b: F.add(a, b, None), jnp.add, X, jnp.ones(32))
    check(found, [2**-0.5, 1, 8**-0.5])
    for tau in (0.5, 2.0):
        share = tau / (1 + tau**2) ** 0.5
        rest = 1 / (1 + tau**2) ** 0.5

        def plain(x, tau=tau, share=share, rest=rest):
            return share * jnp.sin(x) + rest * x

        found = factors(functools.partial(F.residual_apply, jnp.sin, tau=tau), plain, X)
        check(found, [1, 1])  # the branch's factor is at its start, its gradient inside is not less


@pytest.mark.parametrize("mult, ratio", [(1.0, 1.0), (0.5, 2.0)])
def test_the_rule_of_residual_branches(mult, ratio):
    mlp = mult * (2 / (1 + ratio**2)) ** 0.5
    attention = ratio * mlp
    ours = us.umup_residuals(mult, ratio)
    for index in range(8):
        own = mlp if index % 2 else attention
        before = (index + 1) // 2 * attention**2 + index // 2 * mlp**2
        check(ours(index, 8), own / (4 + before) ** 0.5)


def test_learning_rates():
    """Of Adam, by type and depth; an embedding is a weight there, whose fan-in is its width."""
    for name, expected in (("weight", 16**-0.5), ("output", 1), ("bias", 1), ("norm", 1)):
        check(optim.adam_factor(us.Role(name, fan_in=16)), expected)
        check(optim.adam_factor(us.Role(name, fan_in=16, depth=4)), expected / 2)
        check(optim.sgd_factor(us.Role(name, fan_in=16)), expected)
    check(optim.adam_factor(us.Role("embedding", fan_in=16)), 16**-0.5)


def test_constraints_have_the_same_names_and_values():
    scales = (0.5, 2.0, 4.0)
    c = us.constraints
    check(c.gmean(*scales), 4 ** (1 / 3))
    check(c.hmean(*scales), 3 / (2 + 0.5 + 0.25))
    check(c.amean(*scales), 6.5 / 3)
    found = [c.to_output_scale, c.to_left_grad_scale, c.to_right_grad_scale]
    assert [f(*scales) for f in found] == list(scales)
    assert c.to_grad_input_scale(0.5, 2.0) == 2.0
