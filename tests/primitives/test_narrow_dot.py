"""Matmuls that write float16: both lowerings against float64, and what transforms make of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.primitives import narrow_dot
from jax_scalify.primitives.narrow_dot import narrow_dot_p

PARAMS = dict(dimension_numbers=(((1,), (0,)), ((), ())), precision=None, out_sharding=None)
LOWERINGS = {"float32 sums": narrow_dot._wide, "float16 sums": narrow_dot._narrow}


def operands(m=24, k=256, n=16, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s), jnp.float16) for s in ((m, k), (k, n))]


def exact(a, b, exponent):
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64) * 2.0**exponent


@pytest.mark.parametrize("exponent", [0, -1, -4, -6, -10, -16])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_both_lowerings_against_float64(lowering, exponent):
    """The factor is a power of two: rounding before it, as after it, is half an ulp."""
    a, b = operands()
    got = jax.jit(functools.partial(LOWERINGS[lowering], exponent=exponent, **PARAMS))(a, b)
    assert got.dtype == jnp.float16
    want = exact(a, b, exponent)
    ulp = np.spacing(np.abs(want).astype(np.float16)).astype(np.float64)
    error = np.abs(np.asarray(got, np.float64) - want)
    # A factor in front may leave an operand's smallest elements fewer digits.
    rounded = 2e-6 if exponent >= narrow_dot._SMALLEST_BEHIND else 4e-4
    assert (error <= 0.5 * ulp + rounded * np.abs(want).max()).all()


def test_elements_of_a_thousand_times_the_expected_size_are_finite_in_both():
    a, b = operands(k=4096)
    a = a.at[0].set(0).at[0, 0].set(2.0**8)
    b = b.at[0, 0].set(2.0**7)  # an element of 2**9 after a factor of 2**-6
    for exponent in (-6, -9, narrow_dot.SMALLEST_EXPONENT):
        for lowering in LOWERINGS.values():
            got = lowering(a, b, exponent=exponent, **PARAMS)
            assert got[0, 0] == 2.0 ** (15 + exponent)


@pytest.mark.parametrize("rms", [2.0**-9, 1.0, 2.0**4])
def test_weight_gradients_of_many_tokens(rms):
    """What a factor in front costs operands of any RMS that gradients come with."""
    a, b = operands(k=2**14)
    b = (b * rms).astype(jnp.float16)
    want = exact(a, b, -12)
    for lowering in LOWERINGS.values():
        got = np.asarray(lowering(a, b, exponent=-12, **PARAMS), np.float64)
        error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
        assert error < 2.0**-9


def test_the_smaller_operand_gets_the_factor_in_front():
    a, b = operands(m=64, k=256, n=16)
    for x, y in ((a, b), (b.T, a.T)):
        jaxpr = jax.make_jaxpr(functools.partial(narrow_dot._narrow, exponent=-8, **PARAMS))(x, y)
        (first, *_) = jaxpr.eqns
        assert first.primitive.name == "mul" and first.outvars[0].aval.size == b.size


def bound(f, *args):
    jaxpr = jax.make_jaxpr(jsa.scalify(f))(*args)
    return [e for e in all_equations(jaxpr) if e.primitive is narrow_dot_p]


def scaled(x, exponent, dtype=jnp.float16):
    return jsa.ScaledArray(x.astype(dtype), jnp.float32(2.0**exponent))


def test_which_matmuls_are_asked_for_float16():
    a, b = operands()
    assert len(bound(jnp.matmul, scaled(a, 3), scaled(b, -5))) == 1
    assert not bound(jnp.matmul, scaled(a, 3, jnp.bfloat16), scaled(b, -5, jnp.bfloat16))
    assert not bound(jnp.matmul, scaled(a, 3, jnp.float32), scaled(b, -5))
    # So small a factor would leave an operand too few digits.
    for k, count in ((2**20, 1), (2**23, 0)):
        long, other = operands(m=1, k=k, n=1)
        f = bound(lambda x, y: jnp.sin(x) @ jnp.sin(y), scaled(long, 0), scaled(other, 0))
        assert len(f) == count
    with jsa.ScalifyConfig(sum_dtype=jnp.float32):
        assert not bound(jnp.matmul, scaled(a, 3), scaled(b, -5))


@pytest.mark.parametrize("exponents", [(0, 0), (40, -40), (-40, -20), (40, 40)])
def test_the_lowering_of_a_gpu_in_a_scalified_function(exponents, monkeypatch):
    a, b = operands()

    def f(x, y):
        out, pull = jax.vjp(jnp.matmul, x, y)
        return out, *pull(jnp.ones_like(out))

    args = scaled(a, exponents[0]), scaled(b, exponents[1])
    results = [jsa.scalify(f)(*args)]
    monkeypatch.setattr(
        narrow_dot.narrow_dot_p, "bind", lambda *x, **p: narrow_dot._narrow(*x, **p)
    )
    results.append(jsa.scalify(f)(*args))
    i, j = exponents
    ones = np.ones((a.shape[0], b.shape[1]))
    want = exact(a, b, 0), exact(ones, b.T, 0), exact(a.T, ones, 0)
    for out in results:
        for got, value, exponent in zip(out, want, (i + j, j, i), strict=True):
            found = np.asarray(got.data, np.float64) * (float(got.scale) / 2.0**exponent)
            np.testing.assert_allclose(found, value, rtol=2e-3, atol=2e-3 * np.abs(value).max())


def test_transforms_of_a_scalified_matmul():
    a, b = operands(k=16)
    x, y = scaled(a, 3), scaled(b, -5)
    matmul = jsa.scalify(jnp.matmul)

    def values(x, y):
        return jsa.asarray(matmul(x, y), jnp.float32)

    want = exact(a, b, -2)
    np.testing.assert_allclose(values(x, y), want, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(jsa.asarray(jsa.scalify(matmul)(x, y)), want, rtol=2e-3, atol=1e-2)
    grad = jax.grad(lambda d: jnp.sum(values(jsa.ScaledArray(d, x.scale), y)))(x.data)
    want = exact(np.ones((24, 16)), b.T, -2)
    np.testing.assert_allclose(grad, want, rtol=5e-3, atol=5e-3)
    stacked = jsa.ScaledArray(jnp.stack([x.data, 2 * x.data]), jnp.stack([x.scale, x.scale]))
    both = jax.vmap(matmul, (0, None))(stacked, y)
    np.testing.assert_array_equal(both.data[0], matmul(x, y).data)
    np.testing.assert_array_equal(both.data[1], 2 * matmul(x, y).data)


def test_eager_and_with_batch_dims():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(3, 8, 8)), jnp.float16) for _ in range(2))
    dims = (((2,), (1,)), ((0,), (0,)))
    got = narrow_dot_p.bind(a, b, exponent=-1, **{**PARAMS, "dimension_numbers": dims})
    assert got.shape == (3, 8, 8) and got.dtype == jnp.float16
    np.testing.assert_allclose(got, jnp.matmul(a, b) / 2, rtol=2e-3, atol=1e-3)


def test_sum_dtype_is_checked_and_followed():
    for wrong in (jnp.float16, "int8", "nonsense", 3, [jnp.float32]):
        with pytest.raises(TypeError, match="`sum_dtype` must be float32 or float8_e5m2, or None"):
            jsa.ScalifyConfig(sum_dtype=wrong)
    for dtype in (jnp.float32, jnp.float8_e5m2):
        for name in (dtype, jnp.dtype(dtype), jnp.dtype(dtype).name):
            assert jsa.ScalifyConfig(sum_dtype=name).sum_dtype == dtype
    a, b = (scaled(x, 0, jnp.bfloat16) for x in operands())

    def asked(**options):
        with jsa.ScalifyConfig(**options):
            jaxpr = jax.make_jaxpr(jsa.scalify(jnp.matmul))(a, b)
        (eqn,) = [e for e in all_equations(jaxpr) if e.primitive.name == "dot_general"]
        return eqn.outvars[0].aval.dtype

    assert asked() == jnp.bfloat16 and asked(sum_dtype=jnp.float32) == jnp.float32


def test_check_fp8_finds_the_kernel():
    a, b = operands()
    report = jsa.numerics.check_fp8(jsa.scalify(jnp.matmul), scaled(a, 3), scaled(b, -5))
    (row,) = report.rows
    assert (row.lhs, row.out) == ("f16", "f16") and row.kernel != "not found"
    assert not report.unmatched
