"""`scale_fwd`, `scale_bwd`, constraints, and the moments of a softmax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import unit_scaling as us
from jax_scalify.unit_scaling.factors import softmax_stds

X = jnp.asarray([1.5, -2.0, 0.0], jnp.float32)


@pytest.mark.parametrize("factor", [3.0, 1.0, 0.0, -0.5, 2.0**-40, 2.0**40])
def test_each_pass_has_its_own_factor(factor):
    out, pull = jax.vjp(lambda x: us.scale_fwd(x, factor), X)
    np.testing.assert_array_equal(out, X * factor)
    np.testing.assert_array_equal(pull(X)[0], X)
    out, pull = jax.vjp(lambda x: us.scale_bwd(x, factor), X)
    np.testing.assert_array_equal(out, X)
    np.testing.assert_array_equal(pull(X)[0], X * factor)
    np.testing.assert_array_equal(jax.jvp(lambda x: us.scale_fwd(x, factor), (X,), (X,))[1], X)
    np.testing.assert_array_equal(
        jax.jvp(lambda x: us.scale_bwd(x, factor), (X,), (X,))[1], X * factor
    )


def both(x):
    return us.scale_bwd(us.scale_fwd(x, 4.0), 0.5)


def test_under_transformations():
    np.testing.assert_array_equal(jax.jit(both)(X), 4 * X)
    grad = jax.grad(lambda x: both(x).sum())
    np.testing.assert_array_equal(jax.vmap(grad)(X[:, None])[:, 0], np.full(3, 0.5))
    np.testing.assert_array_equal(jax.jacfwd(both)(X), np.eye(3) * 0.5)
    np.testing.assert_array_equal(jax.jacrev(both)(X), np.eye(3) * 0.5)

    def scanned(x):
        return jax.lax.scan(lambda c, _: (us.scale_bwd(c, 2.0), None), x, length=5)[0].sum()

    np.testing.assert_array_equal(jax.grad(scanned)(X), np.full(3, 32.0))
    remat = jax.grad(jax.checkpoint(lambda x: (both(x) ** 2).sum()))(X)
    np.testing.assert_array_equal(remat, 2 * 4 * X * 0.5)
    # The factor of the backward pass is a constant in derivatives of the backward pass.
    np.testing.assert_array_equal(jax.hessian(lambda x: (both(x) ** 2).sum())(X), np.eye(3) * 0.5)


def test_factors_may_be_data():
    """A scan over factors does what Python's loop over numbers does, in both passes."""
    factors = jnp.array([0.5, 4.0, 2.0**-3])

    def loop(x, factors):
        for f in factors:
            x = us.scale_bwd(us.scale_fwd(jnp.sin(x), f), 2 * f)
        return x.sum()

    def scanned(x, factors):
        def body(x, f):
            return us.scale_bwd(us.scale_fwd(jnp.sin(x), f), 2 * f), None

        return jax.lax.scan(body, x, factors)[0].sum()

    want = jax.value_and_grad(loop)(X, [0.5, 4.0, 2.0**-3])
    np.testing.assert_allclose(want[1], jax.grad(scanned)(X, factors), rtol=1e-6)
    np.testing.assert_allclose(want[0], scanned(X, factors), rtol=1e-6)
    scaled = jsa.scalify(jax.grad(scanned))(*jsa.as_scaled_array((X, factors)))
    np.testing.assert_allclose(jsa.asarray(scaled), want[1], rtol=1e-6)
    # They are constants in derivatives, and taken in the dtype of what they multiply.
    assert not jax.grad(scanned, 1)(X, factors).any()
    half = jax.jit(lambda f: us.scale_fwd(X.astype(jnp.float16), f))(0.5)
    assert half.dtype == jnp.float16


def test_inside_scalify():
    x = jsa.as_scaled_array(X, 2.0**30)
    value = jsa.asarray(jsa.scalify(both)(x))
    np.testing.assert_array_equal(value, 4 * X)
    grad = jsa.scalify(jax.grad(lambda x: both(x).sum()))(x)
    np.testing.assert_array_equal(jsa.asarray(grad), np.full(3, 0.5))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64])
def test_the_dtype_stays(dtype):
    assert us.scale_fwd(X.astype(dtype), 0.3).dtype == dtype
    assert us.scale_bwd(X.astype(dtype), 0.3).dtype == dtype


def test_what_is_no_factor_is_refused():
    with pytest.raises(TypeError, match="floating or complex dtype, got int32"):
        us.scale_fwd(jnp.arange(2), 2.0)
    with pytest.raises(TypeError, match="must be a number, got list"):
        us.scale_bwd(X, [2.0])
    with pytest.raises(TypeError, match="must be a number"):
        jax.jit(lambda f: us.scale_bwd(X, f))(2)
    with pytest.raises(ValueError, match=r"must be a scalar, got \(3,\)"):
        jax.jit(lambda f: us.scale_fwd(X, f))(X)
    with pytest.raises(ValueError, match="must be finite"):
        us.scale_bwd(X, math.inf)


@pytest.mark.parametrize(
    "name, factor",
    [
        ("gmean", 4.0),
        ("amean", 14 / 3),
        ("hmean", 24 / 7),
        ("to_output_scale", 2.0),
        ("to_left_grad_scale", 4.0),
        ("to_right_grad_scale", 8.0),
        (max, 8.0),
    ],
)
def test_constraints(name, factor):
    found = us.constraints.apply_constraint(name, 2.0, 4.0, 8.0)
    np.testing.assert_allclose(found, [factor] * 3, rtol=1e-12)


def test_constraints_of_one_operand():
    apply = us.constraints.apply_constraint
    assert apply("to_grad_input_scale", 2.0, 8.0) == (8.0, 8.0)
    assert apply(None, 2.0, 8.0) == (2.0, 8.0)
    with pytest.raises(ValueError, match="for one operand, got 2"):
        apply("to_grad_input_scale", 2.0, 4.0, 8.0)
    with pytest.raises(ValueError, match="does not fit an operation with 1 constrained"):
        apply("to_left_grad_scale", 2.0, 8.0)
    with pytest.raises(ValueError, match="must be None, one of 'gmean'"):
        apply("mean", 2.0, 8.0)
    with pytest.raises(ValueError, match="got int"):
        apply(1, 2.0, 8.0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [2, 16, 256])
@pytest.mark.parametrize("mult", [1e-9, 2.0**-11, 2.0**-4, 1.0, 2.0, 16.0, 64.0])
def test_moments_of_a_softmax(length, mult):
    rng = np.random.default_rng(0)
    z = mult * rng.normal(size=(max(2**12, 2**17 // length), length))
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    v = rng.normal(size=p.shape)
    back = p * (v - (p * v).sum(-1, keepdims=True))
    sampled = [np.sum(p**2, -1).mean() ** 0.5, p.std(), np.sum(back**2, -1).mean() ** 0.5]
    # So few softmaxes are dominated by one of their elements that samples differ.
    np.testing.assert_allclose(softmax_stds(length, mult), sampled, rtol=0.15 if mult > 2 else 0.05)


def test_moments_of_causal_softmaxes_are_the_mean_over_lengths():
    single = np.array([softmax_stds(n, 1.0)[0] ** 2 for n in range(1, 41)])
    np.testing.assert_allclose(softmax_stds(40, 1.0, True)[0] ** 2, single.mean(), rtol=1e-6)
    flat = math.sqrt(sum(1 / n for n in range(1, 5001)) / 5000)
    np.testing.assert_allclose(softmax_stds(5000, 1e-3, True)[0], flat, rtol=1e-3)


@pytest.mark.parametrize("is_causal, window, queries", [(True, (5, 0), 40), (False, (3, 6), 33)])
def test_moments_of_windows_are_the_mean_over_queries(is_causal, window, queries):
    seen = [min(t + window[1], 39) - max(t - window[0], 0) + 1 for t in range(queries)]
    single = np.mean([np.square(softmax_stds(n, 1.0))[[0, 2]] for n in seen], 0)
    got = softmax_stds(40, 1.0, is_causal, window, queries)
    np.testing.assert_allclose(np.square(got)[[0, 2]], single, rtol=1e-6)
    everything = softmax_stds(40, 1.0, False, (40, 40), 7)
    np.testing.assert_allclose(everything, softmax_stds(40, 1.0), rtol=1e-12)
