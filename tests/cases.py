"""One row a primitive rule: a function, its operands, and the law that its scale follows.

`rules/test_rules.py` crosses the rows with dtypes, scales and ways to call, `rules/test_range.py`
takes them far outside float16. A new rule is a new row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

ALL = ("float32", "float16", "bfloat16")
WIDE = ("float32",)
X, XX = ((4, 6),), ((4, 6), (4, 6))
SQUARE, SQUARES = ((5, 5),), ((5, 5), (5, 5))


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of floating operands and what is to be expected of it.

    Attributes:
        name: of the primitive, with the variant after a dash.
        fun: of plain arrays.
        shapes: one an operand.
        sample: how operands are drawn: normal, positive, unit (in (0, 1)), distinct, dominant
            (matrices of dominant diagonal).
        degree: for homogeneous functions, that of each operand: scaling operand i by a power of
            two c multiplies the data by nothing and the scale by `c ** degree[i]`.
        unit: whether unit RMS in gives RMS in [1/2, 2] out.
        ulps: tolerance in units of the dtype's epsilon, relative to the largest result.
        grad: whether a gradient is compared.
        zero: whether an operand of scale 0 gives a finite result.
        exponents: of the scales that the row is tried with; by default no large ones for functions
            on the unit interval.
        reference: the function in float64, where it is not `fun` itself.
        tolerance: relative to the largest result, instead of `ulps`.
        batched: whether JAX has a batching rule for it.
        family: the row of the table of laws.
    """

    name: str
    fun: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = X
    sample: str = "normal"
    degree: tuple[int, ...] | None = None
    unit: bool = False
    ulps: float = 8
    grad: bool = True
    zero: bool = True
    exponents: tuple[int, ...] = ()
    reference: Callable[..., Any] | None = None
    tolerance: float | None = None
    dtypes: tuple[str, ...] = ALL
    batched: bool = True
    family: str = ""

    def scales(self) -> tuple[float, ...]:
        """Scales that the row is tried with."""
        exponents = self.exponents or ((-20, -3, 0) if self.sample == "unit" else (-20, 0, 20))
        return tuple(2.0**e for e in exponents) + (0.0,) * self.zero

    def operands(self, dtype: Any, seed: int = 0) -> list[np.ndarray]:
        """Draw operands that the dtype represents exactly."""
        rng = np.random.default_rng(seed)
        out = []
        for shape in self.shapes:
            x = rng.normal(size=shape)
            if self.sample == "positive":
                x = np.abs(x) + 0.25
            elif self.sample == "unit":
                x = rng.uniform(0.1, 0.9, size=shape)
            elif self.sample == "distinct":
                x = (rng.permutation(int(np.prod(shape))).reshape(shape) - 5.25) / 4
            elif self.sample == "dominant":
                x = np.tril(x) + 4 * np.eye(shape[0])
            out.append(np.asarray(jnp.asarray(x, dtype)))
        return out


IDX = np.array([2, 0, 3], np.int32)
MASK = np.arange(24).reshape(4, 6) % 3 == 0
# No derivative, no zero; and for functions that grow fast, scales near 1.
_PLAIN = {"grad": False, "zero": False}
_NARROW = {"exponents": (-3, 0, 3), **_PLAIN}


@jax.custom_jvp
def _custom_jvp(x):
    return x * 2.0 - jnp.maximum(x, 0)


_custom_jvp.defjvp(lambda p, t: (_custom_jvp(*p), t[0] * 3))


@jax.custom_vjp
def _custom_vjp(x):
    return x * 2.0


_custom_vjp.defvjp(lambda x: (x * 2.0, None), lambda _, ct: (ct * 3,))


def _dot(dims, out=None):
    return lambda x, y: lax.dot_general(x, y, dims, preferred_element_type=out)


def _as(number, x):
    return jnp.asarray(number, x.dtype)


def _barrier(x):
    return lax.optimization_barrier((x, x * 2))[1]


IMAGE, KERNEL = (2, 5, 6, 3), (3, 2, 3, 4)
NHWC = ("NHWC", "HWIO", "NHWC")
GROUPS = np.array([1, 3], np.int32)
WINDOW = ((2, 3), (1, 1), "SAME")
linalg = lax.linalg


def _conv(*, strides=(1, 1), padding="SAME", **params):
    def conv(x, k):
        return lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=NHWC, **params)

    return conv


def _window(operation, start, window=WINDOW):
    return lambda x: lax.reduce_window(x, np.asarray(start, x.dtype), operation, *window)


def _gather_add(x, t):
    return jax.jvp(_window(lax.max, -np.inf, ((2, 3), (1, 1), "VALID")), (x,), (t,))[1]


def _over_axis(collective):
    return lambda x: jax.vmap(collective, axis_name="i")(x)


def _fft(kind, *lengths):
    """A real function of a real array, for a transform of complex ones."""

    def fft(x):
        if kind is lax.FftType.RFFT:
            return jnp.real(lax.fft(x, kind, lengths)) + jnp.imag(lax.fft(x, kind, lengths))
        out = lax.fft(lax.complex(x, x[::-1] / 2), kind, lengths)
        return out if kind is lax.FftType.IRFFT else jnp.real(out) + jnp.imag(out)

    return fft


def _spd(x):
    """A symmetric, positive definite matrix with well separated eigenvalues."""
    return x @ x.T + jnp.diag(jnp.arange(1, 6).astype(x.dtype)) * jnp.max(abs(x)) ** 2


STRUCTURAL = [
    Case("reshape", lambda x: x.reshape(3, 8)),
    Case("transpose", lambda x: x.T),
    Case("broadcast_in_dim", lambda x: jnp.broadcast_to(x[:, None], (4, 2, 6))),
    Case("squeeze", lambda x: jnp.squeeze(x, 1), ((4, 1, 6),)),
    Case("slice", lambda x: x[1:3, ::2]),
    Case("dynamic_slice", lambda x: lax.dynamic_slice(x, (1, 2), (2, 3))),
    Case("rev", lambda x: x[::-1]),
    Case("neg", lambda x: -x),
    Case("abs", jnp.abs),
    Case("copy", jnp.array),
    Case("copy_p", lambda x: lax.copy_p.bind(x)),
    Case("real", lambda x: jnp.real(lax.complex(x, x)), dtypes=WIDE),
    Case("imag", lambda x: jnp.imag(lax.complex(x, x)), dtypes=WIDE),
    Case("conj", lambda x: jnp.imag(jnp.conj(lax.complex(x, x))), dtypes=WIDE),
    Case("stop_gradient", lax.stop_gradient, grad=False),
    Case("name", lambda x: checkpoint_name(x, "x")),
    Case(
        "reduce_precision",
        lambda x: lax.reduce_precision(x, 5, 2),
        grad=False,
        reference=lambda x: x,
        tolerance=2.0**-3,
    ),
    Case("reduce_max", lambda x: x.max(1)),
    Case("reduce_min", lambda x: x.min(0)),
    Case("cummax", lambda x: lax.cummax(x, 1)),
    Case("cummin", lambda x: lax.cummin(x, 0)),
    Case("reduce_window_max", _window(lax.max, -np.inf), sample="distinct"),
    Case("reduce_window_min", _window(lax.min, np.inf), sample="distinct"),
    Case("select_and_gather_add", _gather_add, XX, sample="distinct"),
    Case("sort", lambda x: jnp.sort(x, 1), sample="distinct"),
    Case("sort-two", lambda x, y: lax.sort((x, y), num_keys=1), XX, sample="distinct", grad=False),
    Case("top_k", lambda x: lax.top_k(x, 2)[0], sample="distinct"),
    Case("approx_top_k", lambda x: lax.approx_max_k(x, 2)[0], sample="distinct"),
    Case("split", lambda x: jnp.split(x, 3, 1)),
    Case("unstack", lambda x: sum(jnp.unstack(x, axis=1))),
    Case("tile", lambda x: jnp.tile(x, (2, 1))),
    Case("optimization_barrier", _barrier),
    Case("device_put", jax.device_put),
    Case("gather", lambda x: x[IDX]),
    Case("gather-nan", lambda x: jnp.take(x, np.array([1, 9]), 0, mode="fill"), grad=False),
    Case("pmax-positional", _over_axis(lambda x: lax.pmax(x, "i")), grad=False),
    Case("pmin-positional", _over_axis(lambda x: lax.pmin(x, "i")), grad=False),
]

SCALE_FREE = [
    Case("argmax", lambda x: jnp.argmax(x, 1), grad=False),
    Case("argmin", lambda x: jnp.argmin(x), grad=False),
    Case("argsort", lambda x: jnp.argsort(x, 1), X, "distinct", grad=False),
    Case("top_k-indices", lambda x: lax.top_k(x, 2)[1], X, "distinct", grad=False),
    Case("is_finite", jnp.isfinite, grad=False),
    Case("sign", jnp.sign, grad=False),
    Case("atan2", jnp.arctan2, XX, ulps=8, zero=False),
    *(Case(name, getattr(lax, name), XX, grad=False) for name in "eq ne lt le gt ge".split()),
    *(
        Case(f"{p}", lambda x, y, p=p: p.bind(x, y), XX, grad=False)
        for p in (lax.eq_to_p, lax.lt_to_p, lax.le_to_p)
    ),
    Case("lt-constant", lambda x: x < 0.5, grad=False),
    Case("ge-zero", lambda x: x >= 0, grad=False),
    Case("lt-inf", lambda x: x < np.inf, grad=False),
    Case("eq-self", lambda x: x == x, grad=False),
]

ALIGNING = [
    Case("add", lax.add, XX),
    Case("add-constant", lambda x: x + 0.75),
    Case("add-zero", lambda x: 0.0 + x),
    Case("sub", lax.sub, XX),
    Case("sub-from-one", lambda x: 1 - x),
    Case("add_any", lambda x: jax.grad(lambda v: (v[0] * 2 + v[0]).sum())(x) + x),
    # A derivative on JAX 0.10 asks which operand equals the result, which float16 may have rounded.
    Case("max", lax.max, XX, grad=False),
    Case("max-near", lax.max, XX, exponents=(-3, 0, 3)),
    Case("max-zero", lambda x: jnp.maximum(x, 0)),
    Case("max-constant", lambda x: jnp.maximum(x, 0.5)),
    Case("min", lax.min, XX, grad=False),
    Case("min-near", lax.min, XX, exponents=(-3, 0, 3)),
    Case("min-constant", lambda x: jnp.minimum(x, -0.5)),
    Case("clamp", lambda x: lax.clamp(_as(-0.5, x), x, _as(0.5, x))),
    Case("clamp-above", lambda x: lax.clamp(_as(0.25, x), x, _as(0.5, x))),
    Case("clamp-arrays", lambda x, y: lax.clamp(-abs(y), x, 2 * abs(y)), XX, exponents=(-3, 0, 3)),
    Case("select_n", lambda x, y: jnp.where(MASK, x, y), XX),
    Case("select_n-constant", lambda x: jnp.where(MASK, x, 1)),
    Case("select_n-zero", lambda x: jnp.where(MASK, x, 0)),
    Case("concatenate", lambda x, y: jnp.concatenate([x, y], 1), XX),
    Case("concatenate-ones", lambda x: jnp.concatenate([x, jnp.ones_like(x)])),
    Case("stack", lambda x, y: jnp.stack([x, y], 1), XX),
    Case("pad", lambda x: jnp.pad(x, 1)),
    Case("pad-one", lambda x: jnp.pad(x, ((0, 1), (2, 0)), constant_values=1)),
    Case("pad-inner", lambda x, y: lax.pad(x, y[0, 0], ((0, 1, 1), (1, 0, 0))), XX),
    Case(
        "dynamic_update_slice",
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 2)),
        ((4, 6), (2, 3)),
    ),
    Case("gather-fill", lambda x: jnp.take(x, np.array([1, 9]), 0, mode="fill", fill_value=3)),
    Case("scatter", lambda x, y: x.at[IDX].set(y), ((4, 6), (3, 6))),
    Case("scatter-add", lambda x, y: x.at[IDX].add(y), ((4, 6), (3, 6))),
    Case("scatter-sub", lambda x, y: x.at[IDX].subtract(y), ((4, 6), (3, 6))),
    Case("scatter-max", lambda x, y: x.at[IDX].max(y), ((4, 6), (3, 6)), "distinct", grad=False),
    Case("scatter-min", lambda x, y: x.at[IDX].min(y), ((4, 6), (3, 6)), "distinct", grad=False),
    Case("scatter-constant", lambda x: x.at[1].set(1)),
    Case(
        "select_and_scatter_add",
        lambda x, y: jax.vjp(_window(lax.max, -np.inf), x)[1](y)[0],
        XX,
        "distinct",
        grad=False,
    ),
    Case("complex", lambda x, y: jnp.abs(lax.complex(x, y)), XX, dtypes=WIDE, zero=False),
]

REMAINDER = [
    Case("rem", lax.rem, XX, "positive", zero=False, grad=False),
    Case("rem-constant", lambda x: lax.rem(x, _as(0.75, x)), grad=False, exponents=(-20, -3, 0)),
]

MULTIPLICATIVE = [
    Case("mul", lax.mul, XX, degree=(1, 1), unit=True),
    Case("mul-constant", lambda x: 0.995 * x, degree=(1,), unit=True),
    Case("mul-power", lambda x: x * -8, degree=(1,), unit=True),
    Case("div", lax.div, XX, "positive", degree=(1, -1), zero=False),
    Case("div-constant", lambda x: x / 3, degree=(1,), unit=True),
    Case("div-of-one", lambda x: 1 / x, X, "positive", (-1,), zero=False),
    Case("square", jnp.square, degree=(2,), unit=True),
    Case("integer_pow-3", lambda x: x**3, degree=(3,)),
    Case("integer_pow--2", lambda x: x**-2, X, "positive", (-2,), zero=False),
    Case("sqrt", jnp.sqrt, X, "positive", zero=False),
    Case("rsqrt", lax.rsqrt, X, "positive", zero=False),
    Case("cbrt", jnp.cbrt, X, "positive", zero=False),
    Case("pow-half", lambda x: x**0.5, X, "positive", zero=False),
    Case("pow--half", lambda x: lax.pow(x, _as(-0.5, x)), X, "positive", zero=False),
    Case("pow-0.75", lambda x: lax.pow(x, _as(0.75, x)), X, "positive", zero=False),
    Case("pow--0.75", lambda x: lax.pow(x, _as(-0.75, x)), X, "positive", zero=False),
    Case("pow-int", lambda x: lax.pow(x, 3), degree=(3,)),
    Case("pow-2.0", lambda x: lax.pow(x, _as(2.0, x)), X, "positive", (2,), zero=False),
]

SUMMING = [
    Case("reduce_sum", lambda x: x.sum(1), ((8, 64),), degree=(1,), unit=True),
    Case("reduce_sum-all", lambda x: x.sum()),
    Case("reduce_mean", lambda x: x.mean(0), degree=(1,)),
    Case("reduce_sum-nonneg", lambda x: (x * x).sum(1), ((8, 64),), degree=(2,), unit=True),
    Case("cumsum", lambda x: jnp.cumsum(x, 1), degree=(1,)),
    Case("cumsum-reverse", lambda x: lax.cumsum(x, 0, reverse=True)),
    Case("reduce_window_sum", _window(lax.add, 0), ((16, 16),), degree=(1,), unit=True),
    Case("reduce_window_sum-strided", _window(lax.add, 0, ((1, 2), (1, 2), "VALID")), degree=(1,)),
    Case("psum-positional", _over_axis(lambda x: lax.psum(x, "i")), degree=(1,)),
    Case(
        "dot_general", _dot((((1,), (0,)), ((), ()))), ((8, 64), (64, 8)), degree=(1, 1), unit=True
    ),
    Case(
        "dot_general-batch",
        _dot((((2,), (1,)), ((0,), (0,)))),
        ((2, 3, 16), (2, 16, 5)),
        degree=(1, 1),
        unit=True,
    ),
    Case(
        "dot_general-two",
        _dot((((0, 2), (2, 1)), ((), ()))),
        ((4, 5, 16), (5, 16, 4)),
        degree=(1, 1),
        unit=True,
    ),
    Case(
        "dot_general-mixed",
        lambda x, y: _dot((((1,), (0,)), ((), ())), jnp.float32)(x, y.astype(jnp.bfloat16)),
        ((3, 16), (16, 5)),
        reference=jnp.matmul,
        tolerance=2.0**-7,
        grad=False,
        dtypes=WIDE,
    ),
    Case("matmul-vector", jnp.matmul, ((4, 6), (6,)), degree=(1, 1)),
    Case(
        "ragged_dot_general",
        lambda x, y: lax.ragged_dot(x, y, GROUPS),
        ((4, 64), (2, 64, 5)),
        degree=(1, 1),
        unit=True,
        batched=False,
    ),
    Case("conv_general_dilated", _conv(), (IMAGE, KERNEL), degree=(1, 1)),
    Case(
        "conv_general_dilated-strided",
        _conv(strides=(2, 1), padding="VALID"),
        (IMAGE, KERNEL),
        degree=(1, 1),
    ),
    Case(
        "conv_general_dilated-dilated",
        _conv(padding=((1, 2), (2, 2)), rhs_dilation=(2, 1)),
        (IMAGE, KERNEL),
        degree=(1, 1),
    ),
    Case(
        "conv_general_dilated-transposed",
        lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"),
        ((1, 8, 8, 16), (3, 3, 16, 8)),
        degree=(1, 1),
        unit=True,
    ),
    Case(
        "conv_general_dilated-depthwise",
        _conv(feature_group_count=3),
        (IMAGE, (3, 2, 1, 6)),
        degree=(1, 1),
    ),
    Case(
        "conv_general_dilated-batch-groups",
        _conv(batch_group_count=2),
        (IMAGE, KERNEL),
        degree=(1, 1),
    ),
    *(
        Case(f"fft-{kind.name}", _fft(kind, *lengths), ((4, 8),), dtypes=WIDE, degree=(1,))
        for kind, lengths in (
            (lax.FftType.FFT, (8,)),
            (lax.FftType.IFFT, (4, 8)),
            (lax.FftType.RFFT, (8,)),
            (lax.FftType.IRFFT, (14,)),
        )
    ),
]

LINEAR_ALGEBRA = [
    Case("cholesky", lambda x: linalg.cholesky(_spd(x)), SQUARE, zero=False),
    Case("eigh", lambda x: [jnp.abs(y) for y in linalg.eigh(_spd(x))], SQUARE, grad=False),
    Case("eigh-gradient", lambda x: linalg.eigh(_spd(x))[1], SQUARE),
    Case("eig", lambda x: jnp.sort(jnp.abs(linalg.eig(x)[0])), SQUARE, grad=False),
    Case(
        "svd",
        lambda x: [jnp.abs(y) for y in linalg.svd(x, full_matrices=False)],
        SQUARE,
        grad=False,
    ),
    Case("svd-values", lambda x: linalg.svd(x, compute_uv=False)[0], SQUARE),
    Case("qr", lambda x: linalg.qr(x, full_matrices=False), SQUARE),
    Case(
        "schur",
        lambda x: jnp.sort(jnp.sum(linalg.schur(_spd(x))[0] * np.eye(5), 0)),
        SQUARE,
        grad=False,
    ),
    Case("triangular_solve", linalg.triangular_solve, SQUARES, "dominant", zero=False),
    Case(
        "triangular_solve-unit",
        lambda a, b: linalg.triangular_solve(
            a, b, left_side=True, lower=True, transpose_a=True, unit_diagonal=True
        ),
        SQUARES,
        exponents=(-20, -3, 0),
    ),
    Case(
        "tridiagonal_solve",
        lambda a, b: linalg.tridiagonal_solve(a[0], 4 * abs(a[1]) + abs(a[0]) + abs(a[2]), a[2], b),
        SQUARES,
        "positive",
        zero=False,
        grad=False,
    ),
    Case(
        "cholesky_update",
        lambda r, w: linalg.cholesky_update(jnp.triu(r), w[0]),
        SQUARES,
        "positive",
        zero=False,
        grad=False,
        batched=False,
    ),
]

NONLINEAR = [
    Case("cos", jnp.cos, X, "unit"),
    Case("cosh", jnp.cosh, X, "unit"),
    Case("exp", jnp.exp, X, "unit"),
    Case("exp2", jnp.exp2, X, "unit"),
    Case("log", jnp.log, X, "positive", zero=False),
    Case("log2", jnp.log2, X, "positive", zero=False),
    Case("acos", jnp.arccos, X, "unit"),
    Case("acosh", lambda x: jnp.arccosh(8 * x), X, "positive", exponents=(0, 3, 20), zero=False),
    Case("erfc", lax.erfc, ulps=16),
    Case("logistic", jax.nn.sigmoid),
    # One element is 0, where the result is 1: `1 - tanh(x)**2` cancels, and its error is a few
    # units of 1 wherever x is (4.9 on processors without fused multiplications and additions).
    Case(
        "one_minus_square",
        lambda x: jax.jvp(jnp.tanh, (x - x[:1, :1],), (jnp.ones_like(x),))[1],
        X,
        "unit",
    ),
    Case("lgamma", lax.lgamma, X, "positive", ulps=64, **_NARROW),
    Case("digamma", lax.digamma, X, "positive", ulps=64, **_NARROW),
    Case(
        "polygamma",
        lambda x: lax.polygamma(jnp.ones_like(x), x),
        X,
        "positive",
        ulps=64,
        **_NARROW,
    ),
    Case("zeta", lambda x: lax.zeta(1 + x, x), X, "positive", ulps=64, **_NARROW),
    Case("igamma", lax.igamma, XX, "positive", ulps=64, **_NARROW),
    Case("igammac", lax.igammac, XX, "positive", ulps=64, **_NARROW),
    Case("igamma_grad_a", lax.igamma_grad_a, XX, "positive", ulps=64, **_NARROW),
    Case(
        "regularized_incomplete_beta",
        lambda a, b, x: lax.betainc(a, b, x / 8),
        XX + X,
        "unit",
        ulps=128,
        **_NARROW,
    ),
    Case("random_gamma_grad", lax.random_gamma_grad, XX, "positive", ulps=256, **_NARROW),
    Case("bessel_i0e", lax.bessel_i0e, ulps=16, exponents=(-20, 0, 3)),
    Case(
        "pow-ints",
        lambda x: lax.pow(x, lax.broadcasted_iota(np.int32, x.shape, x.ndim - 1)),
        zero=False,
        dtypes=("float32", "bfloat16"),
    ),
    Case("pow-traced", lax.pow, XX, "unit", ulps=16, zero=False, dtypes=("float32", "bfloat16")),
]

# Where |f| outgrows |x|, or the domain is bounded, operands are drawn from (0, 1).
THROUGH_ZERO = [
    *(
        Case(name, getattr(lax, name), X, sample)
        for name, sample in (
            ("tanh", "normal"),
            ("sin", "unit"),
            ("tan", "unit"),
            ("atan", "normal"),
            ("asinh", "normal"),
            ("expm1", "unit"),
            ("log1p", "unit"),
            ("sinh", "unit"),
            ("asin", "unit"),
            ("atanh", "unit"),
            ("erf", "normal"),
        )
    ),
    Case("erf_inv", lax.erf_inv, X, "unit", ulps=32),
    Case("bessel_i1e", lax.bessel_i1e, X, "unit", ulps=16, zero=False),
]

ROUNDING = [
    Case("floor", jnp.floor, grad=False),
    Case("ceil", jnp.ceil, grad=False),
    Case("round", jnp.round, grad=False),
]

CONVERT = [
    Case("convert-float32", lambda x: x.astype(jnp.float32)),
    Case(
        "convert-float16",
        lambda x: x.astype(jnp.float16),
        grad=False,
        reference=lambda x: x,
        tolerance=2.0**-11,
    ),
    Case(
        "convert-e4m3fn",
        lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
        grad=False,
        reference=lambda x: x,
        tolerance=2.0**-4,
    ),
    Case("convert-from-int", lambda x: x * jnp.arange(6).astype(x.dtype)),
    Case("convert-from-bool", lambda x: x * (x > 0).astype(x.dtype)),
    Case("convert-bool", lambda x: (x * 2).astype(bool), grad=False),
    Case("convert-int", lambda x: x.astype(jnp.int32), grad=False),
]

DEQUANTISED = [
    Case("reduce_prod", lambda x: lax.reduce_prod(x, (1,)), X, "unit", exponents=(-1, 0)),
    Case("cumprod", lambda x: lax.cumprod(x, 1), X, "unit", exponents=(-1, 0)),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), X, "unit"),
    Case(
        "scatter_mul", lambda x, y: x.at[IDX].multiply(y), ((4, 6), (3, 6)), "positive", **_NARROW
    ),
    Case("lu", lambda x: linalg.lu(x)[0], SQUARE, "dominant", dtypes=WIDE, **_PLAIN),
    Case("hessenberg", lambda x: linalg.hessenberg(x)[0], SQUARE, dtypes=WIDE, **_PLAIN),
    Case("tridiagonal", lambda x: linalg.tridiagonal(x + x.T)[1], SQUARE, dtypes=WIDE, **_PLAIN),
    Case(
        "householder_product",
        lambda x, y: linalg.householder_product(x, y[0]),
        SQUARES,
        dtypes=WIDE,
        exponents=(-3, 0),
        **_PLAIN,
    ),
    Case(
        "symmetric_product",
        lambda x, y: linalg.symmetric_product(x, y + y.T),
        SQUARES,
        dtypes=WIDE,
        **_PLAIN,
    ),
    Case(
        "reduce",
        lambda x: lax.reduce(x, _as(0.0, x), lambda a, b: a + b - a * b, (1,)),
        X,
        "unit",
        exponents=(-1, 0),
        **_PLAIN,
    ),
    Case("nextafter", jnp.nextafter, XX, reference=lambda x, y: x, tolerance=2.0**-7, **_NARROW),
    Case(
        "bitcast_convert_type",
        lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32), x.dtype),
        reference=lambda x: x,
        dtypes=WIDE,
        **_PLAIN,
    ),
]

CALLS = [
    Case("jit", jax.jit(lambda x: x[:, ::-1])),
    Case("custom_jvp_call", _custom_jvp),
    Case("custom_vjp_call", _custom_vjp),
    Case("relu", jax.nn.relu),
    Case("nested-jit", jax.jit(lambda x: jax.jit(lambda y: y * 2 + 1)(x) - x)),
]

FAMILIES = {
    "structural": STRUCTURAL,
    "scale free": SCALE_FREE,
    "aligning": ALIGNING,
    "remainder": REMAINDER,
    "multiplicative": MULTIPLICATIVE,
    "summing": SUMMING,
    "linear algebra": [dataclasses.replace(c, dtypes=WIDE, tolerance=1e-4) for c in LINEAR_ALGEBRA],
    "nonlinear": NONLINEAR,
    "through zero": THROUGH_ZERO,
    "rounding": ROUNDING,
    "convert": CONVERT,
    "dequantised": DEQUANTISED,
    "calls": CALLS,
}
CASES = [
    dataclasses.replace(case, family=family) for family, cases in FAMILIES.items() for case in cases
]
