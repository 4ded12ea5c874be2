"""One row a primitive rule: a function, its operands, and the law that its scale follows.

`test_rules.py` crosses the rows with dtypes, scales and ways to call. A new rule is a new row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ALL = ("float32", "float16", "bfloat16")
WIDE = ("float32",)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of floating operands and what is to be expected of it.

    Attributes:
        name: of the primitive, with the variant after a dash.
        fun: of plain arrays.
        shapes: one an operand.
        sample: how operands are drawn: normal, positive, unit (in (0, 1)), distinct.
        family: the row of the table of laws.
        degree: for homogeneous functions, that of each operand: scaling operand i by a power of
            two c multiplies the data by nothing and the scale by `c ** degree[i]`.
        unit: whether unit RMS in gives RMS in [1/2, 2] out.
        ulps: tolerance in units of the dtype's epsilon, relative to the largest result.
        grad: whether a gradient is compared.
        zero: whether an operand of scale 0 gives a finite result.
        bounded: the function grows fast or has a bounded domain: no large scales.
        reference: the function in float64, where it is not `fun` itself.
        tolerance: relative to the largest result, instead of `ulps`.
    """

    name: str
    fun: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((4, 6),)
    sample: str = "normal"
    family: str = "structural"
    degree: tuple[int, ...] | None = None
    unit: bool = False
    ulps: float = 4
    grad: bool = True
    zero: bool = True
    bounded: bool = False
    reference: Callable[..., Any] | None = None
    tolerance: float | None = None
    dtypes: tuple[str, ...] = ALL

    def exponents(self) -> tuple[int, ...]:
        """Exponents of the scales that the row is tried with."""
        return (-20, -3, 0) if self.bounded else (-20, 0, 20)

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
            out.append(np.asarray(jnp.asarray(x, dtype)))
        return out


X, XX, V = ((4, 6),), ((4, 6), (4, 6)), ((6,),)
IDX = np.array([2, 0, 3], np.int32)
MASK = np.arange(24).reshape(4, 6) % 3 == 0


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


STRUCTURAL = [
    Case("reshape", lambda x: x.reshape(3, 8), X),
    Case("transpose", lambda x: x.T, X),
    Case("broadcast_in_dim", lambda x: jnp.broadcast_to(x[:, None], (4, 2, 6)), X),
    Case("squeeze", lambda x: jnp.squeeze(x, 1), ((4, 1, 6),)),
    Case("slice", lambda x: x[1:3, ::2], X),
    Case("dynamic_slice", lambda x: lax.dynamic_slice(x, (1, 2), (2, 3)), X),
    Case("rev", lambda x: x[::-1], X),
    Case("neg", lambda x: -x, X),
    Case("abs", jnp.abs, X),
    Case("copy", jnp.array, X),
    Case("stop_gradient", lax.stop_gradient, X, grad=False),
    Case(
        "reduce_precision",
        lambda x: lax.reduce_precision(x, 5, 2),
        X,
        grad=False,
        reference=lambda x: x,
        tolerance=2.0**-3,
    ),
    Case("reduce_max", lambda x: x.max(1), X),
    Case("reduce_min", lambda x: x.min(0), X),
    Case("cummax", lambda x: lax.cummax(x, 1), X),
    Case("cummin", lambda x: lax.cummin(x, 0), X),
    Case("sort", lambda x: jnp.sort(x, 1), X, sample="distinct"),
    Case("sort-two", lambda x, y: lax.sort((x, y), num_keys=1), XX, sample="distinct", grad=False),
    Case("top_k", lambda x: lax.top_k(x, 2)[0], X, sample="distinct"),
    Case("split", lambda x: jnp.split(x, 3, 1), X),
    Case("tile", lambda x: jnp.tile(x, (2, 1)), X),
    Case("optimization_barrier", _barrier, X),
    Case("gather", lambda x: x[IDX], X),
    Case("gather-fill", lambda x: jnp.take(x, np.array([1, 9]), 0, mode="fill", fill_value=3), X),
    Case("gather-nan", lambda x: jnp.take(x, np.array([1, 9]), 0, mode="fill"), X, grad=False),
    Case("jit", jax.jit(lambda x: x[:, ::-1]), X),
]

PLAIN = [
    Case("argmax", lambda x: jnp.argmax(x, 1), X, family="plain", grad=False),
    Case("argmin", lambda x: jnp.argmin(x), X, family="plain", grad=False),
    Case("argsort", lambda x: jnp.argsort(x, 1), X, "distinct", "plain", grad=False),
    Case("top_k-indices", lambda x: lax.top_k(x, 2)[1], X, "distinct", "plain", grad=False),
    Case("is_finite", jnp.isfinite, X, family="plain", grad=False),
    Case("convert-bool", lambda x: (x * 2).astype(bool), X, family="plain", grad=False),
    Case("convert-int", lambda x: x.astype(jnp.int32), X, family="plain", grad=False),
    *(
        Case(f"{name}", getattr(lax, name), XX, family="plain", grad=False)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    ),
    Case("lt-constant", lambda x: x < 0.5, X, family="plain", grad=False),
    Case("ge-zero", lambda x: x >= 0, X, family="plain", grad=False),
    Case("lt-inf", lambda x: x < np.inf, X, family="plain", grad=False),
    Case("eq-self", lambda x: x == x, X, family="plain", grad=False),
]

ALIGNING = [
    Case("add", lax.add, XX, family="aligning"),
    Case("add-constant", lambda x: x + 0.75, X, family="aligning"),
    Case("add-zero", lambda x: 0.0 + x, X, family="aligning"),
    Case("sub", lax.sub, XX, family="aligning"),
    Case("sub-from-one", lambda x: 1 - x, X, family="aligning"),
    Case("add_any", lambda x: jax.grad(lambda v: (v[0] * 2 + v[0]).sum())(x) + x, X),
    Case("max", lax.max, XX, family="aligning"),
    Case("max-zero", lambda x: jnp.maximum(x, 0), X, family="aligning"),
    Case("max-constant", lambda x: jnp.maximum(x, 0.5), X, family="aligning"),
    Case("min", lax.min, XX, family="aligning"),
    Case("min-constant", lambda x: jnp.minimum(x, -0.5), X, family="aligning"),
    Case("clamp", lambda x: lax.clamp(_as(-0.5, x), x, _as(0.5, x)), X, family="aligning"),
    Case("clamp-above", lambda x: lax.clamp(_as(0.25, x), x, _as(0.5, x)), X, family="aligning"),
    Case(
        "clamp-arrays", lambda x, y: lax.clamp(x - abs(y), y / 2, x + abs(y)), XX, family="aligning"
    ),
    Case("select_n", lambda x, y: jnp.where(MASK, x, y), XX, family="aligning"),
    Case("select_n-constant", lambda x: jnp.where(MASK, x, 1), X, family="aligning"),
    Case("select_n-zero", lambda x: jnp.where(MASK, x, 0), X, family="aligning"),
    Case("concatenate", lambda x, y: jnp.concatenate([x, y], 1), XX, family="aligning"),
    Case("concatenate-ones", lambda x: jnp.concatenate([x, jnp.ones_like(x)]), X),
    Case("stack", lambda x, y: jnp.stack([x, y], 1), XX, family="aligning"),
    Case("pad", lambda x: jnp.pad(x, 1), X, family="aligning"),
    Case("pad-one", lambda x: jnp.pad(x, ((0, 1), (2, 0)), constant_values=1), X),
    Case("pad-inner", lambda x, y: lax.pad(x, y[0, 0], ((0, 1, 1), (1, 0, 0))), XX),
    Case(
        "dynamic_update_slice",
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 2)),
        ((4, 6), (2, 3)),
        family="aligning",
    ),
    Case("scatter", lambda x, y: x.at[IDX].set(y), ((4, 6), (3, 6)), family="aligning"),
    Case("scatter-add", lambda x, y: x.at[IDX].add(y), ((4, 6), (3, 6)), family="aligning"),
    Case("scatter-max", lambda x, y: x.at[IDX].max(y), ((4, 6), (3, 6)), "distinct", grad=False),
    Case("scatter-min", lambda x, y: x.at[IDX].min(y), ((4, 6), (3, 6)), "distinct", grad=False),
    Case("scatter-constant", lambda x: x.at[1].set(1), X, family="aligning"),
]

MULTIPLICATIVE = [
    Case("mul", lax.mul, XX, family="multiplicative", degree=(1, 1), unit=True),
    Case("mul-constant", lambda x: 0.995 * x, X, family="multiplicative", degree=(1,), unit=True),
    Case("mul-power", lambda x: x * -8, X, family="multiplicative", degree=(1,), unit=True),
    Case("div", lax.div, XX, "positive", "multiplicative", degree=(1, -1), zero=False),
    Case("div-constant", lambda x: x / 3, X, family="multiplicative", degree=(1,), unit=True),
    Case("div-of-one", lambda x: 1 / x, X, "positive", "multiplicative", (-1,), zero=False),
    Case("square", jnp.square, X, family="multiplicative", degree=(2,), unit=True),
    Case("integer_pow-3", lambda x: x**3, X, family="multiplicative", degree=(3,)),
    Case("integer_pow--2", lambda x: x**-2, X, "positive", "multiplicative", (-2,), zero=False),
    Case("sqrt", jnp.sqrt, X, "positive", "multiplicative", grad=True, zero=False),
    Case("rsqrt", lax.rsqrt, X, "positive", "multiplicative", zero=False),
    Case("cbrt", jnp.cbrt, X, "positive", "multiplicative", zero=False),
    Case("pow-half", lambda x: x**0.5, X, "positive", "multiplicative", zero=False),
    Case(
        "pow--half", lambda x: lax.pow(x, _as(-0.5, x)), X, "positive", "multiplicative", zero=False
    ),
    Case(
        "pow-2.0",
        lambda x: lax.pow(x, _as(2.0, x)),
        X,
        "positive",
        "multiplicative",
        (2,),
        zero=False,
    ),
]

SUMMING = [
    Case("reduce_sum", lambda x: x.sum(1), ((8, 64),), family="summing", degree=(1,), unit=True),
    Case("reduce_sum-all", lambda x: x.sum(), X, family="summing"),
    Case("reduce_mean", lambda x: x.mean(0), X, family="summing", degree=(1,)),
    Case(
        "reduce_sum-nonneg",
        lambda x: (x * x).sum(1),
        ((8, 64),),
        family="summing",
        degree=(2,),
        unit=True,
    ),
    Case("cumsum", lambda x: jnp.cumsum(x, 1), X, family="summing", degree=(1,)),
    Case("cumsum-reverse", lambda x: lax.cumsum(x, 0, reverse=True), X, family="summing"),
    Case(
        "dot_general",
        _dot((((1,), (0,)), ((), ()))),
        ((8, 64), (64, 8)),
        family="summing",
        degree=(1, 1),
        unit=True,
    ),
    Case(
        "dot_general-batch",
        _dot((((2,), (1,)), ((0,), (0,)))),
        ((2, 3, 16), (2, 16, 5)),
        family="summing",
        degree=(1, 1),
        unit=True,
    ),
    Case(
        "dot_general-two",
        _dot((((0, 2), (2, 1)), ((), ()))),
        ((4, 5, 16), (5, 16, 4)),
        family="summing",
        degree=(1, 1),
        unit=True,
    ),
    Case(
        "dot_general-mixed",
        lambda x, y: _dot((((1,), (0,)), ((), ())), jnp.float32)(x, y.astype(jnp.bfloat16)),
        ((3, 16), (16, 5)),
        family="summing",
        reference=jnp.matmul,
        tolerance=2.0**-7,
        grad=False,
        dtypes=WIDE,
    ),
    Case("matmul-vector", jnp.matmul, ((4, 6), (6,)), family="summing", degree=(1, 1)),
]

NONLINEAR = [
    *(
        # Where |f| outgrows |x|, or the domain is bounded, operands are drawn from (0, 1).
        Case(
            name,
            getattr(jnp, name),
            X,
            sample,
            "nonlinear",
            ulps=8,
            zero=zero,
            bounded=sample == "unit",
        )
        for name, sample, zero in (
            ("tanh", "normal", True),
            ("sin", "unit", True),
            ("tan", "unit", True),
            ("arctan", "normal", True),
            ("arcsinh", "normal", True),
            ("expm1", "unit", True),
            ("log1p", "unit", True),
            ("sinh", "unit", True),
            ("arcsin", "unit", True),
            ("arctanh", "unit", True),
            ("cos", "unit", True),
            ("cosh", "unit", True),
            ("exp", "unit", True),
            ("exp2", "unit", True),
            ("log", "positive", False),
            ("log2", "positive", False),
            ("arccos", "unit", True),
        )
    ),
    Case("erf", lax.erf, X, family="nonlinear", ulps=8),
    Case("erfc", lax.erfc, X, family="nonlinear", ulps=16),
    Case("erf_inv", lax.erf_inv, X, "unit", "nonlinear", ulps=32, bounded=True),
    Case("logistic", jax.nn.sigmoid, X, family="nonlinear", ulps=8),
    Case(
        "lgamma",
        lax.lgamma,
        X,
        "positive",
        "nonlinear",
        ulps=64,
        zero=False,
        grad=False,
        bounded=True,
    ),
    Case("atan2", jnp.arctan2, XX, family="nonlinear", ulps=8, zero=False),
    Case(
        "pow-traced",
        lax.pow,
        XX,
        "unit",
        "nonlinear",
        ulps=16,
        zero=False,
        dtypes=("float32", "bfloat16"),
        bounded=True,
    ),
    Case("floor", jnp.floor, X, family="rounding", grad=False),
    Case("ceil", jnp.ceil, X, family="rounding", grad=False),
    Case("round", jnp.round, X, family="rounding", grad=False),
    Case("sign", jnp.sign, X, family="scale-free", grad=False),
]
CONVERT = [
    Case("convert-float32", lambda x: x.astype(jnp.float32), X, family="convert"),
    Case(
        "convert-float16",
        lambda x: x.astype(jnp.float16),
        X,
        family="convert",
        grad=False,
        reference=lambda x: x,
        tolerance=2.0**-11,
    ),
    Case(
        "convert-e4m3fn",
        lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
        X,
        family="convert",
        grad=False,
        reference=lambda x: x,
        tolerance=2.0**-4,
    ),
    Case("convert-from-int", lambda x: x * jnp.arange(6).astype(x.dtype), X, family="convert"),
    Case("convert-from-bool", lambda x: x * (x > 0).astype(x.dtype), X, family="convert"),
]

CALLS = [
    Case("custom_jvp_call", _custom_jvp, X, family="call"),
    Case("custom_vjp_call", _custom_vjp, X, family="call"),
    Case("relu", jax.nn.relu, X, family="call"),
    Case("nested-jit", jax.jit(lambda x: jax.jit(lambda y: y * 2 + 1)(x) - x), X, family="call"),
]

CASES = [
    *STRUCTURAL, *PLAIN, *ALIGNING, *MULTIPLICATIVE, *SUMMING, *NONLINEAR, *CONVERT, *CALLS,
]  # fmt: skip
