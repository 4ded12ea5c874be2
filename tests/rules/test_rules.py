"""Every rule against the plain function in float64, and the invariants of scales."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.testing import WAYS, check_scale_rule
from tests.cases import CASES
from tests.helpers import leaves, value

pytestmark = pytest.mark.usefixtures("every_primitive_has_a_rule")


def check_scale(x):
    """A scale is a power of two, or 0 with data that is 0 (or nan), and of one dtype."""
    scale = np.asarray(x.scale)
    assert scale.dtype == np.float32 or isinstance(x.scale, float)
    mantissa = np.frexp(scale[scale != 0])[0]
    assert np.all(mantissa == 0.5) and np.all(np.isfinite(scale))
    scale = scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim) * bool(scale.ndim))
    any_scale = np.asarray(x.data)[np.broadcast_to(scale, x.shape) == 0]
    assert np.all((any_scale == 0) | np.isnan(any_scale))


def _parameters():
    for index, case in enumerate(CASES):
        for dtype in case.dtypes:
            for way in WAYS:
                if way.startswith("grad") and not case.grad or way == "vmap" and not case.batched:
                    continue
                only = case.dtypes[index % len(case.dtypes)]
                sampled = dtype == only and (
                    way == "jit" or zlib.crc32(f"{case.name}{way}".encode()) % 5 == 0
                )
                sampled = sampled and case.name != "random_gamma_grad"  # takes as long as 20 others
                marks = () if sampled else pytest.mark.full
                yield pytest.param(case, dtype, way, id=f"{case.name}-{dtype}-{way}", marks=marks)


# On the lowest version of JAX as many of these as of all tests together would be few.
@pytest.mark.sampled(1 / 2)
@pytest.mark.filterwarnings("ignore::jax_scalify.DequantisedWarning")
@pytest.mark.parametrize(("case", "dtype", "way"), list(_parameters()))
def test_values(case, dtype, way):
    ulps = case.ulps * float(jnp.finfo(dtype).eps) * (4 if way.startswith("grad") else 1)
    scales = case.scales()
    if way == "grad_outside" and case.family == "nonlinear" and dtype == "float16":
        # The cotangent of float16 data is float16 as well, and has no scale.
        scales = tuple(s for s in scales if s == 0 or s >= 2.0**-8)
    check_scale_rule(
        case.fun,
        *case.operands(dtype),
        ways=(way,),
        scales=scales,
        static_scale=8.0 if max(scales) > 1 else 0.5,
        reference=case.reference,
        tolerance=case.tolerance or ulps,
    )


@pytest.mark.filterwarnings("ignore::jax_scalify.DequantisedWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "float16"])
def test_static_scales_give_static_scales(case, dtype):
    if dtype not in case.dtypes:
        pytest.skip("not a dtype of this row")
    if case.name == "random_gamma_grad":
        pytest.skip("a loop on this JAX, not a primitive")
    exponent = 3 if max(case.scales()) > 1 else -3
    args = [ScaledArray(jnp.asarray(d), 2.0**exponent) for d in case.operands(dtype)]
    dynamic = [ScaledArray(a.data, jnp.float32(a.scale)) for a in args]
    static_out = jax.eval_shape(jsa.scalify(case.fun), *args)
    dynamic_out = jax.eval_shape(jsa.scalify(case.fun), *dynamic)
    for static, moved in zip(leaves(static_out), leaves(dynamic_out), strict=True):
        assert isinstance(static, ScaledArray) == isinstance(moved, ScaledArray)
        assert (static.shape, static.dtype) == (moved.shape, moved.dtype)
        if isinstance(static, ScaledArray):
            known = not static.ndim or static.is_static
            assert known, static
            assert moved.scale.dtype == jnp.float32 and moved.scale.shape == ()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [c for c in CASES if c.degree], ids=lambda c: c.name)
def test_a_homogeneous_function_moves_only_the_scale(case):
    fun = jax.jit(jsa.scalify(case.fun))
    data = [jnp.asarray(d) for d in case.operands("float32")]
    exponents = [4 + 3 * i for i in range(len(data))]
    before = fun(*(ScaledArray(d, jnp.float32(1)) for d in data))
    after = fun(*(ScaledArray(d, jnp.float32(2.0**e)) for d, e in zip(data, exponents)))
    moved = sum(k * e for k, e in zip(case.degree, exponents, strict=True))
    np.testing.assert_array_equal(before.data, after.data)
    assert float(after.scale) == float(before.scale) * 2.0**moved


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", [c for c in CASES if c.unit], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", ["float16"])
def test_unit_rms_in_gives_unit_rms_out(case, dtype):
    data = [jnp.asarray(d) for d in case.operands(dtype, seed=1)]
    data = [d / jnp.sqrt(jnp.mean(jnp.square(d.astype(jnp.float32)))).astype(d.dtype) for d in data]
    out = jsa.scalify(case.fun)(*(ScaledArray(d, jnp.float32(2.0**9)) for d in data))
    rms = float(np.sqrt(np.mean(np.square(np.asarray(out.data, np.float64)))))
    assert 0.5 <= rms <= 2


AXIS_FUNCTIONS = {
    "transpose": (lambda x: x.T, 1),
    "broadcast": (lambda x: jnp.broadcast_to(x, (2, 4, 6)), 1),
    "expand": (lambda x: x[:, None] * 1, 1),
    "reduce_sum-0": (lambda x: x.sum(0), 1),
    "reduce_sum-1": (lambda x: x.sum(1), 1),
    "reduce_max-0": (lambda x: x.max(0), 1),
    "reduce_max-all": (lambda x: x.max(), 1),
    "argmax": (lambda x: jnp.argmax(x, 0), 1),
    "cumsum": (lambda x: jnp.cumsum(x, 1), 1),
    "slice": (lambda x: x[1:3, 1:], 1),
    "reshape": (lambda x: x.reshape(8, 3), 1),
    "merge": (lambda x: x.reshape(24), 1),
    "split": (lambda x: x.reshape(2, 2, 1, 3, 2), 1),
    "gather": (lambda x: x[np.array([0, 2])], 1),
    "neg": (lambda x: -x, 1),
    "sqrt": (lambda x: jnp.sqrt(jnp.abs(x)), 1),
    "square": (lambda x: x**2, 1),
    "exp": (lambda x: jnp.exp(-jnp.abs(x)), 1),
    "tanh": (jnp.tanh, 1),
    "floor": (jnp.floor, 1),
    "compare": (lambda x: x < 0.25, 1),
    "where": (lambda x: jnp.where(x > 0, x, 1), 1),
    "relu": (jax.nn.relu, 1),
    "concatenate": (lambda x: jnp.concatenate([x, x]), 1),
    "pad": (lambda x: jnp.pad(x, 1), 1),
    "flip": (lambda x: x[::-1, ::-1], 1),
    "sort": (lambda x: jnp.sort(x, 0), 1),
    "softmax": (jax.nn.softmax, 1),
    "add": (lambda x, y: x + y, 2),
    "sub-scalar": (lambda x: x - 1, 1),
    "mul": (lambda x, y: x * y, 2),
    "mul-row": (lambda x, y: x * y[:1], 2),
    "div": (lambda x, y: x / y, 2),
    "max": (lambda x, y: jnp.maximum(x, y), 2),
    "dot": (lambda x, y: x @ y.T, 2),
    "dot-0": (lambda x, y: x.T @ y, 2),
    "dot-self": (lambda x: x @ x.T, 1),
    "dot-batch": (lambda x, y: jnp.einsum("ab,ab->a", x, y), 2),
    "grad": (lambda x, y: jax.grad(lambda v: jnp.sum((v @ y.T) ** 2))(x), 2),
}
AXIS_SCALES = {
    "rows": 2.0 ** np.array([[-9], [0], [3], [6]]),
    "columns": 2.0 ** np.array([[-9, 0, 3, 6, 1, -2]]),
    "leading": 2.0 ** np.array([-9, 0, 3, 6]),
    "both": 2.0 ** (np.arange(24).reshape(4, 6) % 5),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        pytest.param(n, s, marks=() if i % 4 == j else pytest.mark.full)
        for i, n in enumerate(AXIS_FUNCTIONS)
        for j, s in enumerate(AXIS_SCALES)
    ],
)
def test_scales_per_axis(name, scale):
    fun, count = AXIS_FUNCTIONS[name]
    rng = np.random.default_rng(3)
    data = [rng.normal(size=(4, 6)).astype(np.float32) for _ in range(count)]
    # The second operand has one scale, then the same kind as the first.
    first = ScaledArray(jnp.asarray(data[0]), jnp.asarray(AXIS_SCALES[scale], jnp.float32))
    seconds = [()]
    if count == 2:
        seconds = [
            (ScaledArray(jnp.asarray(data[1]), jnp.asarray(s, jnp.float32)),)
            for s in (4.0, AXIS_SCALES[scale], AXIS_SCALES["columns"])
        ]
    for second in seconds:
        args = (first, *second)
        expected = fun(*(jnp.asarray(value(a), jnp.float32) for a in args))
        out = jax.jit(jsa.scalify(fun))(*args)
        if isinstance(out, ScaledArray):
            check_scale(out)
            assert np.ndim(out.scale) in (0, out.ndim)
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
        largest = np.max(np.abs(np.asarray(expected, np.float64)))
        np.testing.assert_allclose(value(out), expected, rtol=1e-5, atol=1e-6 * largest)


def test_scales_per_axis_are_kept():
    x = ScaledArray(jnp.ones((4, 6)), jnp.asarray(AXIS_SCALES["rows"], jnp.float32))
    for fun, shape in (
        (lambda v: v.T, (1, 4)),
        (lambda v: v * 2, (4, 1)),
        (lambda v: v.sum(1), (4,)),
        (lambda v: v.sum(1, keepdims=True), (4, 1)),
        (lambda v: v @ v.T, (4, 4)),
        (lambda v: v[:, 1:3], (4, 1)),
        (lambda v: v.sum(0), ()),
    ):
        assert jnp.shape(jsa.scalify(fun)(x).scale) == shape


@pytest.mark.sampled(16)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), ()])
def test_empty_arrays_and_scalars(shape):
    functions = (
        jnp.sum, jnp.tanh, jnp.sort, jnp.cumsum, jnp.ravel, lambda x: x @ x.T, lambda x: x * 2 + x,
        lambda x: jnp.pad(x, 1), lambda x: jnp.concatenate([x, x]), lambda x: x > 0,
    )  # fmt: skip
    scale = jnp.ones(shape[:1] + (1,) * (len(shape) - 1), jnp.float32)
    x = ScaledArray(jnp.ones(shape, jnp.float16), scale)
    for fun in functions:
        try:
            expected = fun(x.data)
        except (TypeError, ValueError):  # not for this rank
            continue
        out = jax.jit(jsa.scalify(fun))(x)
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(value(out), np.asarray(expected))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2])
@pytest.mark.parametrize("reduction", [jnp.max, jnp.min, jnp.sum, jnp.prod])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_the_initial_value_of_an_empty_reduction(reduction, dtype, scale):
    x = ScaledArray(jnp.zeros((0, 3), dtype), jnp.float32(scale))
    out = jax.jit(jsa.scalify(lambda x: reduction(x, axis=0, initial=2.0)))(x)
    np.testing.assert_array_equal(value(out), 2.0)  # not `0 * -inf`, at the scale 0


@pytest.mark.parametrize(
    ("before", "scale", "after", "expected"),
    [
        ((2, 3, 8), (2, 3, 1), (6, 8), (6, 1)),
        ((2, 3, 8), (1, 3, 1), (6, 8), (6, 1)),
        ((6, 8), (6, 1), (2, 3, 8), (2, 3, 1)),
        ((6, 8), (1, 8), (2, 3, 8), (1, 1, 8)),
        ((6, 8), (6, 1), (6, 1, 8), (6, 1, 1)),
        ((6, 1, 8), (6, 1, 1), (6, 8), (6, 1)),
        ((6, 8), (6, 1), (48,), ()),  # a scale for every element is none
        ((6, 8), (6, 8), (48,), (48,)),
        ((6, 8), (6, 1), (4, 12), ()),
        ((0, 8), (1, 8), (8, 0), ()),
    ],
)
def test_a_reshape_keeps_scales_along_the_axes_that_it_keeps(before, scale, after, expected):
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.normal(size=before), jnp.float32)
    scales = jnp.asarray(2.0 ** rng.integers(-3, 3, size=scale), jnp.float32)
    out = jsa.scalify(lambda x: x.reshape(after))(ScaledArray(data, scales))
    assert out.scale.shape == expected
    np.testing.assert_array_equal(value(out), value(ScaledArray(data, scales)).reshape(after))


@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
def test_a_matmul_in_bfloat16_is_asked_for_bfloat16(scale):
    """A power of two behind it is exact, and of a result in float32 a GPU keeps two copies."""
    rng = np.random.default_rng(0)
    data = [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((16, 2048), (2048, 8))]
    x, y = ScaledArray(data[0], jnp.float32(scale)), ScaledArray(data[1], jnp.float32(0.5))
    program = jax.jit(jsa.scalify(jnp.matmul))
    (dot,) = (
        e for e in all_equations(program.trace(x, y).jaxpr) if e.primitive is lax.dot_general_p
    )
    assert dot.outvars[0].aval.dtype == jnp.bfloat16
    out, want = program(x, y), value(x) @ value(y)
    assert out.dtype == jnp.bfloat16
    # As near as the rounding of the result, at every element: nothing was added up in bfloat16.
    np.testing.assert_allclose(value(out), want, rtol=2.0**-8, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("unit_diagonal", [False, True])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (2.0**-8, 2.0**8), (2.0**-20, 2.0**-12)])
def test_float16_solves_a_triangular_system(scales, unit_diagonal):
    """In float16 the data of a unit diagonal is not 1: the values are solved, in float32."""
    rng = np.random.default_rng(0)
    matrix, right = np.tril(rng.normal(size=(4, 4))) + 4 * np.eye(4), rng.normal(size=(4, 2))
    a, b = (
        jsa.ScaledArray(jnp.asarray(x, jnp.float16), jnp.float32(s))
        for x, s in zip((matrix, right), scales, strict=True)
    )

    def solve(a, b):
        return jax.lax.linalg.triangular_solve(
            a, b, left_side=True, lower=True, unit_diagonal=unit_diagonal
        )

    out = jax.jit(jsa.scalify(solve))(a, b)
    assert out.dtype == jnp.float16
    a, b = (np.asarray(x.data, np.float64) * float(x.scale) for x in (a, b))
    if unit_diagonal:
        a = np.tril(a, -1) + np.eye(4)
    expected = np.linalg.solve(a, b)
    got = np.asarray(out.data, np.float64) * float(out.scale)
    np.testing.assert_allclose(got, expected, rtol=2e-3, atol=1e-3 * np.abs(expected).max())
