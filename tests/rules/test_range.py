"""Range is kept, not just values: float16 data at scales far outside float16.

A rule that dequantised to float16, or returned scale 1, would give infinities and zeros here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base.jaxprs import sub_jaxprs
from jax_scalify.interpreter.registry import find_rule, registered_rules
from tests.cases import CASES as ALL_CASES

KEPT = ("structural", "aligning", "multiplicative", "summing", "linear algebra", "through zero")
# Results whose elements are sums: the error is compared with the largest result.
NORMWISE = ("aligning", "summing", "linear algebra")
# A row with exponents of its own is not homogeneous, or has a bounded domain.
CASES = [c for c in ALL_CASES if c.family in KEPT and not c.exponents]
# Primitives of these families that no call on the CPU, outside of a mesh, contains.
NOT_HERE = {
    "sharding_constraint": "needs a mesh",
    "reshard": "needs a mesh",
    "layout_constraint": "needs a device layout",
    "relayout": "needs a device layout",
    "pvary": "needs a mesh",
    "on_backward": "in tests/primitives/test_primitives.py",
}


def _exponent(case):
    """2**(120 / k) for a function of degree k, and at most 2**40."""
    return min(40, 120 // max(1, sum(map(abs, case.degree or (1,)))))


def _rows(case):
    """Equal exponents, and for homogeneous functions opposed ones."""
    count, exponent = len(case.shapes), _exponent(case)
    signs = (-1,) if case.family == "through zero" or "constant" in case.name else (-1, 1)
    yield from ([sign * exponent] * count for sign in signs)
    if count == 2 and case.degree:
        yield [exponent, -exponent]
        yield [-exponent, exponent]


def _value(x, exponent=0):
    data = np.asarray(getattr(x, "data", x))
    wide = data.astype(np.complex128 if np.iscomplexobj(data) else np.float64)
    return wide * 2.0**exponent * np.asarray(getattr(x, "scale", 1), np.float64)


def _lapack_scales_back(matrix):
    """Tell whether plain JAX finds the eigenvalues of a matrix times 2**40."""
    large, values = (jnp.linalg.eigvals(m) for m in (matrix * 2.0**40, matrix))
    return np.allclose(np.abs(large), np.abs(values) * 2.0**40, rtol=1e-3, atol=0)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("error::jax_scalify.DequantisedWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.family}-{c.name}")
def test_range_is_kept(case):
    dtype = "float16" if "float16" in case.dtypes else "float32"
    eps = float(jnp.finfo(dtype).eps)
    data = [jnp.asarray(d) for d in case.operands(dtype)]
    if case.name == "eig" and not _lapack_scales_back(data[0]):
        pytest.xfail("SciPy 1.17's `geev` scales large matrices and does not scale back")
    with jsa.ScalifyConfig(missing_rule="error"):
        fun, reference = jax.jit(jsa.scalify(case.fun)), jax.jit(case.reference or case.fun)
        for row in _rows(case):
            operands = [ScaledArray(d, jnp.float32(2.0**e)) for d, e in zip(data, row)]
            outputs = jax.tree.leaves(fun(*operands), is_leaf=lambda x: isinstance(x, ScaledArray))
            with jax.enable_x64(True):
                values = (jnp.asarray(_value(d, e)) for d, e in zip(data, row))
                expected = jax.tree.leaves(reference(*values))
            for out, want in zip(outputs, map(np.asarray, expected), strict=True):
                got = _value(out)
                np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
                error, size = np.abs(got - want), np.abs(want)
                if case.family in NORMWISE:
                    error, size = np.max(error, initial=0), np.max(size, initial=0)
                limit = case.tolerance or case.ulps * eps
                finite = np.isfinite(want)
                assert np.all(np.where(finite, error, 0) <= limit * np.where(finite, size, 0)), row


def _primitives(jaxpr):
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for sub in sub_jaxprs(eqn.params):
            found |= _primitives(sub)
    return found


def test_every_primitive_of_the_families_is_tested():
    exported = {
        p.name
        for module in (primitives, lax, lax.linalg)
        for p in vars(module).values()
        if isinstance(p, Primitive)
    }
    named = {i.name for i in registered_rules() if i.family in KEPT}
    used = set()
    for case in CASES:
        data = case.operands(case.dtypes[0])
        used |= _primitives(jax.make_jaxpr(case.fun)(*data).jaxpr)
    assert (named & exported) - used - set(NOT_HERE) == set()


def test_every_exported_primitive_has_a_rule():
    for module in (primitives, lax, lax.linalg):
        for name, p in vars(module).items():
            assert not isinstance(p, Primitive) or find_rule(p), name


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("exponent", [0, 6, 12, 18])
def test_the_gradient_of_an_angle_of_what_is_almost_zero(exponent, static):
    """`softplus(-6682)` is 0, beside 4011: its gradient is 0, and not nan."""

    def loss(x):
        w = lax.cond(True, lambda x: x - 1, lambda x: 2 * x, x)
        return jnp.sum(jnp.arctan2(jax.nn.softplus(w), 1))

    data = jnp.asarray(np.array([-6682, 4011]) / 2.0**exponent, jnp.float16)
    scale = 2.0**exponent if static else jnp.float32(2.0**exponent)
    found = jsa.scalify(jax.grad(loss))(jsa.ScaledArray(data, scale))
    np.testing.assert_allclose(np.asarray(found), [0, 6.2e-8], atol=1e-8)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x + x,
        lambda x: x - (-x),
        lambda x: x * 3,
        lambda x: x / 0.3,
        lambda x: jnp.where(x < 100, x, 2 * x),
    ],
    ids=["sum", "difference", "times 3", "quotient", "choice of a multiple"],
)
def test_narrow_data_saturates_where_the_value_is_finite(fun, static):
    data, scale = jnp.array([40_000, -1], "float16"), 2.0**-8
    got = jax.jit(jsa.scalify(fun))(ScaledArray(data, scale if static else jnp.float32(scale)))
    want = np.asarray(fun(data.astype(jnp.float32) * scale))
    assert np.isfinite(np.asarray(got.data)).all()
    np.testing.assert_allclose(jsa.asarray(got)[1], want[1], rtol=1e-3)
    assert 0.3 * want[0] < jsa.asarray(got)[0] <= want[0]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.filterwarnings("ignore:Casting from complex to real")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "complex64"])
def test_a_cast_to_float16_saturates(dtype, static):
    numbers = [2.0**14, 2.0**18, -(2.0**20), 2.0**26, np.inf, np.nan]
    with jax.enable_x64(dtype == "float64"):
        x = ScaledArray(jnp.array(numbers, dtype), 2.0**-8 if static else jnp.float32(2.0**-8))
        got = jax.jit(jsa.scalify(lambda x: x.astype(jnp.float16)))(x)
    assert float(got.scale) == 2.0**-8
    want = [2.0**14, 65_504, -65_504, np.inf, np.inf, np.nan]
    np.testing.assert_array_equal(np.asarray(got.data), np.asarray(want, "float16"))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("exponent", [-8, -40, -120, -126])
def test_what_is_infinite_or_nan_stays_so_in_narrow_data(exponent, static):
    data = jnp.array([np.inf, -np.inf, np.nan, 60_000, -60_000, 1], "float16")
    scale = 2.0**exponent
    x = ScaledArray(data, scale if static else jnp.float32(scale))
    got = np.asarray(jax.jit(jsa.scalify(lambda x: x * jnp.float16(3) + x))(x).data, np.float64)
    np.testing.assert_array_equal(got[:3], [np.inf, -np.inf, np.nan])
    assert np.isfinite(got[3:]).all()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("data", [43_648, 43_680, 43_712])
def test_a_product_is_infinite_where_it_is_in_plain_float16(data, static):
    """The values are 65,472, which float16 holds, and 65,520 and more, which it rounds to inf."""
    x = ScaledArray(jnp.array([data, -1], "float16"), 0.5 if static else jnp.float32(0.5))
    got = jax.jit(jsa.scalify(lambda x: x * 3))(x)
    assert np.isinf(np.asarray(got.data)).tolist() == [data >= 43_680, False]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("join", [lambda x, y: x * x + y * y, lambda x, y: jnp.maximum(x * x, y)])
def test_what_is_below_every_scale_is_zero(join, dtype):
    """A maximum of dynamic scales of 2**-200 leaves as the smallest scale, or as 0, with data 0."""
    x = ScaledArray(jnp.ones(2, dtype), jnp.float32(2.0**-100))
    y = ScaledArray(jnp.zeros(2, dtype), jnp.float32(2.0**-100))
    got = jax.jit(jsa.scalify(lambda x, y: join(x, y * y)))(x, y)
    np.testing.assert_array_equal(np.asarray(got.data), np.zeros(2, dtype))
    assert float(got.scale) in (2.0**-126, 0.0)
