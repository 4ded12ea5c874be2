"""The statements that random programs are made of, by family.

A statement is the source of an expression. Its operands stand in braces, and are filled in from
left to right with variables of the program or with new inputs:

| braces | operand |
|---|---|
| `{x}` | any floating array, of rank 0 and empty ones too |
| `{y}` `{z}` | one that broadcasts against `{x}` |
| `{e}` `{g}` | one of the shape and dtype of `{x}` |
| `{a}` | a floating array of rank 1 or more, not empty |
| `{v}` `{w}` | vectors of one length |
| `{A}` `{B}` | matrices that can be multiplied; `{S}` a square one, `{V}` a vector for `{A}` |
| `{T}` | an array of rank 3, `{I}` and `{K}` images and a kernel, in NHWC and HWIO |
| `{t}` `{s}` | a floating array of rank 0 |
| `{p}` `{u}` | like `{x}`, but mostly not negative, or between -0.9 and 0.9 |
| `{n}` `{i}` `{b}` | three integers in 0..2; integers, a mask, of the shape of the first operand |
| `{k}` `{q}` | a traced integer, 0 to 2; a traced bool |
| `{c}` `{d}` `{h}` | a constant that the dtype of the first operand holds, an exponent, a dtype |
"""

from __future__ import annotations

import importlib.util
import re

import jax
import jax.numpy as jnp

CONSTANTS = {
    "float32": "0.0 1.0 -1.0 0.5 3.0 0.1 1e-8 -1e9 1e30 1e-30 2.0**70 2.0**-70 1.38e-23 jnp.inf "
    "-jnp.inf jnp.nan jnp.finfo(jnp.float32).min",
    "bfloat16": "0.0 1.0 -1.0 0.5 3.0 0.1 1e-8 -1e9 1e30 1e-30 2.0**70 2.0**-70 jnp.inf -jnp.inf "
    "jnp.nan",
    "float16": "0.0 1.0 -1.0 0.5 3.0 0.1 2.0**-24 6.2e-5 -1e4 30000.0 1000.0 jnp.inf -jnp.inf "
    "jnp.nan",
}
HAS_OPTAX = importlib.util.find_spec("optax") is not None
EXPONENTS = "0 1 2 3 4 -1 -2 0.5 -0.5 1.5 0.0 2.0"


def _each(template: str, names: str) -> list[str]:
    return [template.replace("FUN", name) for name in names.split()]


ELEMENTWISE = [
    *_each(
        "jnp.FUN({x})",
        "abs absolute fabs negative positive sign square cbrt sin cos tan arctan atan sinh cosh "
        "tanh arcsinh asinh exp exp2 expm1 floor ceil trunc rint round around real conj conjugate "
        "deg2rad rad2deg degrees radians sinc i0 reciprocal nan_to_num angle imag copy array "
        "asarray isnan isinf isfinite isposinf isneginf signbit iscomplex isreal logical_not "
        "nansum nanprod ravel atleast_1d atleast_2d atleast_3d ones_like zeros_like",
    ),
    *_each("jnp.FUN({p})", "sqrt log log2 log10 log1p"),
    *_each("jnp.FUN({u})", "arcsin asin arccos acos arctanh atanh"),
    *_each("jnp.FUN(2 + jnp.abs({x}))", "arccosh acosh"),
    *_each(
        "jnp.FUN({x}, {y})",
        "add subtract multiply divide true_divide maximum minimum fmax fmin arctan2 atan2 hypot "
        "logaddexp logaddexp2 copysign heaviside greater greater_equal less less_equal "
        "equal not_equal isclose logical_and logical_or logical_xor remainder mod fmod "
        "floor_divide",
    ),
    *_each("jnp.FUN({p}, {y})", "power pow float_power"),
    *_each("{x} FUN {y}", "+ - * / < >= == !="),
    *_each("{x} FUN {c}", "+ - * / < > <= == !="),
    *_each("{c} FUN {x}", "+ - * /"),
    "-{x}",
    "{x} % 0.75",
    "jnp.divmod({x}, {y})",
    "jnp.modf({x})",
    "jnp.frexp({x})[0]",
    "jnp.ldexp({x}, {i})",
    "jnp.full_like({x}, {c})",
    "jnp.fabs({x}) ** {d}",
    "{x} ** {d}",
    "{p} ** {y}",
    "{p} ** {t}",
    "2.0 ** {x}",
    "{x} * {i}",
    "{i} * {x}",
    "{x} + {b}",
    "{x} * {b}",
    "{x} / ({i} + 1)",
    "{x} * {k}",
    "{x} * {t}",
    "{x} / (1 + jnp.square({t}))",
    "{n} * 0.3",
    "{x}.astype({h})",
    "jnp.astype({x}, {h})",
    "{x}.astype(jnp.int32)",
    "({i} * {x}).astype({h})",
    "{b}.astype({h}) * {x}",
    "jnp.clip({x}, -0.5, 2.0)",
    "jnp.clip({x}, {c}, None)",
    "jnp.clip({x}, {y}, {z})",
    "jnp.where({b}, {x}, {y})",
    "jnp.where({x} > {y}, {x}, {c})",
    "jnp.where({b}, {x}, {c})",
    "jnp.where({b}, {x}, {t})",
    "jnp.where({b}, {c}, {x})",
    "jnp.select([{x} > 1, {x} < 0], [{x}, {y}], {c})",
    "jnp.piecewise({x}, [{x} > 0], [jnp.sin, jnp.negative])",
    "jnp.allclose({x}, {y})",
    "jnp.array_equal({x}, {y})",
    "jnp.array_equiv({x}, {y})",
    "jnp.iscomplexobj({x}) * {x}",
    "jnp.isrealobj({x}) * {x}",
    "jnp.interp({x}, jnp.sort({v}), {w})",
    "jnp.polyval({v}, {x})",
    "jnp.vectorize(lambda a, b: a * b)({x}, {y})",
    "jnp.frompyfunc(lambda a, b: a * b, 2, 1, identity=1)({x}, {y})",
    "jnp.unwrap({a})",
]

REDUCTIONS = [
    *_each("jnp.FUN({x})", "sum mean max min amax amin prod all any count_nonzero ptp var std"),
    *_each(
        "jnp.FUN({a}, axis=-1)",
        "sum mean max min amax amin prod all any ptp var std median argmax argmin nanargmax "
        "nanargmin nansum nanmean nanmax nanmin nanprod nanstd nanvar nanmedian count_nonzero",
    ),
    *_each("jnp.FUN({a}, axis=0, keepdims=True)", "sum mean max min std"),
    *_each("jnp.FUN({a}, 0.3, axis=-1)", "quantile nanquantile"),
    *_each("jnp.FUN({a}, 30, axis=-1)", "percentile nanpercentile"),
    "jnp.minmax({a}, axis=-1)",
    "jnp.average({a}, axis=-1)",
    "jnp.average({v}, weights=jnp.abs({w}))",
    "jnp.sum({a}, axis=0, where={b})",
    "jnp.max({x}, where={b}, initial={c})",
    "jnp.sum({x}, dtype=jnp.float32)",
    "jnp.trapezoid({a})",
    "jnp.apply_along_axis(jnp.cumsum, -1, {a})",
    "jnp.apply_over_axes(jnp.sum, {A}, [0, 1])",
    "jnp.histogram({a}, bins=3)[0]",
    "jnp.histogram({a}, bins=3, weights=jnp.abs({a}))[0]",
    "jnp.histogram_bin_edges({a}, bins=3)",
    "jnp.histogram2d({v}, {w}, bins=2)[0]",
    "jnp.histogramdd({A}[:, :2], bins=2)[0]",
    "jnp.bincount({n}, weights={V3}, length=4)",
    "jnp.digitize({x}, jnp.array([-1.0, 0.0, 1.0]))",
    "jnp.searchsorted(jnp.sort({v}), {x})",
    "jnp.cov({A})",
    "jnp.corrcoef({A})",
]

CUMULATIVE = [
    *_each("jnp.FUN({a}, axis=-1)", "cumsum nancumsum cumprod nancumprod diff sort argsort"),
    *_each("jnp.FUN({v})", "cumulative_sum cumulative_prod ediff1d"),
    "jnp.cumulative_sum({v}, include_initial=True)",
    "jnp.gradient({v})",
    "jnp.sort({a}, axis=0, descending=True)",
    "jnp.partition({a}, 1)",
    "jnp.argpartition({v}, 1)[:1]",
    "jnp.lexsort(({v}, {w}))",
    "jnp.top_k({a}, 2)",
    "jnp.sort_complex({v}).real",
    "lax.associative_scan(jnp.multiply, {a})",
    "lax.associative_scan(jnp.add, {a}, reverse=True)",
]

SHAPES = [
    "jnp.reshape({x}, (-1,))",
    "{x}.T",
    "jnp.transpose({x})",
    "jnp.permute_dims({A}, (1, 0))",
    "jnp.matrix_transpose({A})",
    "jnp.swapaxes({A}, 0, 1)",
    "jnp.moveaxis({A}, 0, 1)",
    "jnp.rollaxis({A}, 1)",
    "jnp.expand_dims({x}, 0)",
    "jnp.squeeze(jnp.expand_dims({x}, 0))",
    "jnp.broadcast_to({x}, (2, *{x}.shape))",
    "jnp.broadcast_arrays({x}, {y})",
    "jnp.concatenate([{x}, {e}], axis=-1)",
    "jnp.concat([{x}, {e}], axis=0)",
    "jnp.concatenate([{x}, jnp.ones_like({x})], axis=-1)",
    *_each("jnp.FUN([{x}, {e}])", "stack hstack vstack dstack column_stack block"),
    "jnp.append({x}, {y})",
    "jnp.array([{t}, {s}, 1.0])",
    "jnp.split({A}, 2, axis=1)",
    "jnp.array_split({a}, 2)",
    "jnp.hsplit({A}, 2)",
    "jnp.vsplit({S}[:2], 2)",
    "jnp.dsplit({T}, 2)",
    "jnp.unstack({a})",
    "jnp.tile({x}, 2)",
    "jnp.repeat({a}, 2, axis=0)",
    "jnp.repeat({V3}, {n}, total_repeat_length=4)",
    "jnp.pad({a}, 1)",
    "jnp.pad({a}, 1, constant_values={c})",
    *_each(
        'jnp.pad({a}, 1, mode="FUN")',
        "edge linear_ramp maximum mean minimum reflect symmetric wrap",
    ),
    "jnp.flip({a})",
    "jnp.flip({a}, 0)",
    "jnp.fliplr({A})",
    "jnp.flipud({A})",
    "jnp.roll({a}, 1, axis=-1)",
    "jnp.rot90({A})",
    "jnp.resize({a}, (2, 3))",
    "jnp.diag({v})",
    "jnp.diag({A})",
    "jnp.diagonal({A})",
    "jnp.diagflat({v})",
    "jnp.tril({A})",
    "jnp.triu({A}, 1)",
    "jnp.vander({v}, 3)",
    "jnp.meshgrid({v}, {w})",
    "jnp.trace({A})",
    "jnp.outer({v}, {w})",
    "jnp.kron({v}, {w})",
]

INDEXING = [
    "{a}[0]",
    "{a}[..., -1]",
    "{a}[::2]",
    "{a}[::-1]",
    "{x}[None]",
    "{A}[:, 1]",
    "{A}[{n}]",
    "{A}[:, {n}]",
    "{A}[{n}, {n}]",
    "{a}[{k}]",
    "{a}.at[{n}].get(mode='fill', fill_value={c})",
    "jnp.abs({a}).at[{n} + 2].get(mode='fill', fill_value=-1000.0)",
    "jnp.take({a}, {n}, axis=0)",
    "jnp.take({a}, {n} + 2, axis=0)",
    "jnp.take({a}, {n}, axis=-1, mode='clip')",
    "jnp.take_along_axis({a}, jnp.argsort({a}, axis=-1), axis=-1)",
    "jnp.choose({n}, [{V3}, {V3}, {V3}], mode='clip')",
    "jnp.compress(np.array([True, False, True]), {S}, axis=0, size=2)",
    "jnp.extract({b}, {a}, size=3, fill_value=0)",
    "jnp.nonzero({x}, size=2, fill_value=0)[0] if {x}.ndim else {x}",
    "jnp.flatnonzero({x}, size=2)",
    "jnp.argwhere({a}, size=2)",
    "{a}.at[0].set({c})",
    "{a}.at[0].set({t})",
    "{a}.at[0].add({t})",
    "{a}.at[{n}].set({c})",
    "{a}.at[{n}].add({c})",
    "{a}.at[{n}].multiply(0.5)",
    "{a}.at[{n}].divide(3.0)",
    "{a}.at[{n}].max({c})",
    "{a}.at[{n}].min({c})",
    "{a}.at[0].power(2)",
    "{a}.at[0].apply(jnp.sin)",
    "{V3}.at[{n}].add({V3})",
    "{V3}.at[{n}].max({V3})",
    "{V3}.at[{n}].min({V3})",
    "{S}.at[{n}].subtract({S})",
    "{S}.at[:, 1].set({V3})",
    "{S}.at[jnp.array([2, 0]), 1].set({t})",
    "{S}.at[jnp.array([2, 0])].multiply({V3})",
    "jnp.zeros(4).at[{n}].add({V3})",
    "jnp.full((3,), {c}).at[{n}].set({V3}.astype(jnp.float32))",
    "{i}.at[0].add(2) * {x}",
    "{n}.at[{n}].max(1) * {t}",
    "jnp.put({v}, {n}, 1.5, inplace=False)",
    "jnp.put_along_axis({A}, jnp.argmax({A}, axis=1, keepdims=True), 9.0, axis=1, inplace=False)",
    "jnp.place({v}, {v} > 0, {w}, inplace=False)",
    "jnp.fill_diagonal({S}, 2.0, inplace=False)",
    "jnp.fill_diagonal({S}, {V3}, inplace=False)",
    "jnp.insert({v}, 1, {t})",
    "jnp.insert({V3}, {n}, 7.0)",
    "jnp.delete({v}, 1)",
    "jnp.isin({x}, {y})",
    "jnp.unique({v}, size=3, fill_value=0)",
    "jnp.unique_values({v}, size=3)",
    "jnp.unique_counts({v}, size=3)[1]",
    "jnp.unique_inverse({v}, size=4)[0]",
    "jnp.unique_all({v}, size=4)[0]",
    "jnp.union1d({v}, {w}, size=4)",
    "jnp.intersect1d({v}, {w}, size=2)",
    "jnp.setdiff1d({v}, {w}, size=2)",
    "jnp.setxor1d({v}, {w}, size=4)",
    "jax.ops.segment_sum({V3}, {n}, num_segments=3)",
    "jax.ops.segment_max({V3}, {n}, num_segments=3)",
]

PRODUCTS = [
    "jnp.matmul({A}, {B})",
    "{A} @ {B}",
    "{A} @ {V}",
    "jnp.dot({A}, {B})",
    "jnp.dot({v}, {w})",
    "jnp.vdot({v}, {w})",
    "jnp.vecdot({v}, {w})",
    "jnp.matvec({A}, {V})",
    "jnp.vecmat({v}, jnp.outer({w}, {w}))",
    "jnp.inner({v}, {w})",
    "jnp.tensordot({A}, {B}, 1)",
    "jnp.cross({V3}, {V3})",
    "jnp.convolve({v}, {w})",
    "jnp.correlate({v}, {w})",
    "jnp.einsum('ij,jk->ik', {A}, {B})",
    "jnp.einsum('ij,j->i', {A}, {V})",
    "jnp.einsum('ij->j', {A})",
    "jnp.einsum('ii->i', {S})",
    "jnp.einsum('ij,i->ij', {S}, {n})",
    "jnp.einsum('bij,kj->bik', {T}, {A4})",
    "{S} @ {n}",
    "{n} @ {S}",
    "({S} > 1) @ {S}",
    "({A} > 0) @ {B}",
    "jnp.matmul({A}, {B}, preferred_element_type=jnp.float32)",
    "jnp.matmul({S}, {n}, preferred_element_type=jnp.float32)",
    "jnp.polyadd({v}, {w})",
    "jnp.polysub({v}, {w})",
    "jnp.polymul({v}, {w})",
    "jnp.polydiv({v}, jnp.array([2.0, 1.0]))",
    "jnp.polyder({v})",
    "jnp.polyint({v})",
    "jnp.polyfit(jnp.arange(4.0), {v4}, 1)",
    "jnp.poly({V3})",
    "jnp.sort(jnp.abs(jnp.roots({V3}.astype(jnp.float32), strip_zeros=False)))",
]

RANGES = [
    "jnp.linspace({t}, {s}, 3)",
    "jnp.linspace({v}, {w}, 3)",
    "jnp.logspace({t}, 1.0, 3)",
    "jnp.geomspace(1 + jnp.abs({t}), 9.0, 3)",
    "jnp.full((2, 3), {t})",
    "jnp.full((3,), 3.0) * {t}",
    "jnp.ones(3) / jnp.sum({x})",
    "{x} * jax.nn.softmax(jnp.zeros({x}.shape))",
    "jnp.zeros({x}.shape) + {x}",
    "jnp.arange(4.0) * {t}",
    "jnp.eye(3) * {V3}",
    "jnp.identity(3) @ {S}",
    "jnp.tri(3) @ {S}",
    "jnp.fromfunction(lambda i: i * {t}, (3,))",
    "jnp.empty_like({x}) * 0",
    *_each("jnp.FUN(4) * {t}", "bartlett blackman hamming hanning"),
    "jnp.kaiser(4, 2.0) * {t}",
    "jnp.array([1e4, 2.0, -3e-3]) * {t}",
]

LINALG = [
    *_each(
        "jnp.linalg.FUN({S} + 4 * jnp.eye(3))",
        "det inv cholesky slogdet pinv cond matrix_rank svdvals matrix_norm trace diagonal "
        "matrix_transpose tensorinv_",
    )[:-1],
    "jnp.linalg.cholesky({S} @ {S}.T + jnp.eye(3))",
    "jnp.linalg.eigvalsh({S}.astype(jnp.float32))",
    "jnp.linalg.eigh({S}.astype(jnp.float32) + {S}.astype(jnp.float32).T)[0]",
    "jnp.abs(jnp.linalg.eigh({S}.astype(jnp.float32) + {S}.astype(jnp.float32).T)[1])",
    "jnp.sort(jnp.abs(jnp.linalg.eigvals({S}.astype(jnp.float32))))",
    "jnp.sort(jnp.abs(jnp.linalg.eig({S}.astype(jnp.float32))[0]))",
    "jnp.linalg.qr({A}.astype(jnp.float32))[1] ** 2",
    "jnp.linalg.qr({S}.astype(jnp.float32))[0] ** 2",
    "jnp.linalg.svd({A}.astype(jnp.float32), compute_uv=False)",
    "jnp.abs(jnp.linalg.svd({A}.astype(jnp.float32), full_matrices=False)[0])",
    "jnp.linalg.solve({S} + 4 * jnp.eye(3), {V3})",
    "jnp.linalg.lstsq({A43}.astype(jnp.float32), {v4}.astype(jnp.float32))[0]",
    "jnp.linalg.matrix_power({S}, 3)",
    "jnp.linalg.multi_dot([{A}, {B}, {V2}])",
    "jnp.linalg.norm({A})",
    "jnp.linalg.norm({x})",
    "jnp.linalg.norm({A}, axis=1)",
    "jnp.linalg.norm({v}, 1)",
    "jnp.linalg.norm({v}, jnp.inf)",
    "jnp.linalg.norm({A}.astype(jnp.float32), 'nuc')",
    "jnp.linalg.vector_norm({x})",
    "jnp.linalg.cross({V3}, {V3})",
    "jnp.linalg.matmul({A}, {B})",
    "jnp.linalg.outer({v}, {w})",
    "jnp.linalg.tensordot({A}, {B}, axes=1)",
    "jnp.linalg.vecdot({v}, {w})",
    "jnp.linalg.tensorinv(({S} + 4 * jnp.eye(3)).reshape(3, 3, 1), 1)",
    "jnp.linalg.tensorsolve({S} + 4 * jnp.eye(3), {V3})",
]

FFT = [
    *_each("jnp.abs(jnp.fft.FUN({a}.astype(jnp.float32)))", "fft ifft rfft ihfft fftn ifftn rfftn"),
    *_each("jnp.fft.FUN({a}.astype(jnp.float32)).real", "fft rfft ifft"),
    *_each("jnp.fft.FUN({a})", "irfft hfft irfftn fftshift ifftshift"),
    *_each("jnp.fft.FUN({A}.astype(jnp.float32)).real", "fft2 ifft2 rfft2 irfft2"),
    "jnp.fft.fftfreq(4, {t})",
    "jnp.fft.rfftfreq(4, {t})",
]

NN = [
    *_each(
        "jax.nn.FUN({x})",
        "celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu "
        "log_sigmoid mish relu relu6 selu sigmoid silu soft_sign softplus sparse_plus "
        "sparse_sigmoid squareplus swish tanh",
    ),
    "jax.nn.gelu({x}, approximate=False)",
    "jax.nn.elu({x}, {c})",
    "jax.nn.log1mexp(jnp.abs({x}))",
    "jax.nn.glu({A})",
    *_each("jax.nn.FUN({a})", "softmax log_softmax logsumexp standardize logmeanexp"),
    "jax.nn.softmax({a}, axis=0)",
    "jax.nn.softmax(jnp.where({b}, {a}, {c}))",
    "jax.nn.softmax({a}, where={b}, axis=-1)",
    "jax.nn.logsumexp({a}, b={b}, axis=-1)",
    "jax.nn.one_hot({n}, 3) * {V3}",
    "jax.nn.one_hot({n}, 3, dtype={h}) @ {S}",
    "jax.nn.dot_product_attention({Q}, {Q}, {Q})",
    "jax.nn.dot_product_attention({Q}, {Q}, {Q}, is_causal=True)",
    "{a} / jnp.sqrt(jnp.mean(jnp.square({a}), -1, keepdims=True) + 1e-5)",
    "({a} - {a}.mean(-1, keepdims=True)) * lax.rsqrt({a}.var(-1, keepdims=True) + 1e-5)",
    "-jnp.sum(jax.nn.log_softmax({S}) * jax.nn.one_hot({n}, 3), -1)",
    "jax.scipy.special.logsumexp({a}, axis=0)",
]

LAX = [
    *_each(
        "lax.FUN({x})",
        "abs neg sign square cbrt sin cos tan atan sinh cosh tanh asinh exp exp2 expm1 floor ceil "
        "round logistic erf erfc is_finite bessel_i0e bessel_i1e lgamma "
        "stop_gradient optimization_barrier reciprocal one_minus_square",
    ),
    *_each("lax.FUN({p})", "sqrt rsqrt log log1p log2 digamma"),
    *_each("lax.FUN({u})", "asin acos atanh erf_inv"),
    "lax.acosh(2 + jnp.abs({x}))",
    *_each(
        "lax.FUN({x}, {e})",
        "add sub mul div max min rem atan2 eq ne lt le gt ge complex_",
    )[:-1],
    "jnp.abs(lax.complex({x}.astype(jnp.float32), {e}.astype(jnp.float32)))",
    "lax.real(lax.conj(lax.complex({x}.astype(jnp.float32), {e}.astype(jnp.float32))))",
    "lax.imag(lax.complex({x}.astype(jnp.float32), {e}.astype(jnp.float32)))",
    "lax.pow({p}, {e})",
    "lax.pow({x}, 3)",
    "lax.integer_pow({x}, 3)",
    "lax.integer_pow({x}, -2)",
    "lax.clamp(jnp.asarray({c}, {x}.dtype), {x}, jnp.asarray({c}, {x}.dtype))",
    "lax.clamp(-jnp.abs({x}), {e}, {g})",
    "lax.select({b}, {x}, {e})",
    "lax.select_n({b}, {x}, {e})",
    # In float64, JAX's derivatives of these take minutes for much larger arguments.
    "lax.igamma(1 + jnp.minimum(jnp.abs({x}), 1024), jnp.minimum(jnp.abs({e}), 1024))",
    "lax.igammac(1 + jnp.minimum(jnp.abs({x}), 1024), jnp.minimum(jnp.abs({e}), 1024))",
    "lax.igamma_grad_a(1 + jnp.minimum(jnp.abs({x}), 8), jnp.minimum(jnp.abs({e}), 8))",
    "lax.random_gamma_grad(1 + jnp.minimum(jnp.abs({x}), 8), jnp.minimum(jnp.abs({e}), 8))",
    "lax.betainc(1 + jnp.abs({x}), 1 + jnp.abs({e}), 0.5 * jnp.ones_like({x}))",
    "lax.polygamma(jnp.ones_like({x}), 1 + jnp.abs({x}))",
    "lax.zeta(2 + jnp.abs({x}), 1 + jnp.abs({e}))",
    "lax.polynomial({x}, [1.0, 0.5, 2.0])",
    "lax.reduce_precision({x}, 8, 10)",
    "lax.convert_element_type({x}, {h})",
    "lax.broadcast({x}, (2,))",
    "lax.broadcast_in_dim({v}, (2, {v}.shape[0]), (1,))",
    "lax.broadcast_like({t}, {x})",
    "lax.broadcast_to_rank({x}, 3)",
    "lax.collapse({A}, 0)",
    "lax.concatenate([{A}, {A}], 0)",
    "lax.expand_dims({x}, (0,))",
    "lax.squeeze({x}[None], (0,))",
    "lax.reshape({A}, ({A}.size,))",
    "lax.rev({a}, (0,))",
    "lax.transpose({A}, (1, 0))",
    "lax.split({A}, (1, {A}.shape[1] - 1), 1)",
    "lax.stack([{x}, {e}], 0)",
    "lax.unstack({a}, axis=0)",
    "lax.tile({a}, (2,) * {a}.ndim)",
    "lax.pad({v}, jnp.asarray({c}, {v}.dtype), ((1, 2, 0),))",
    "lax.pad({A}, {t}.astype({A}.dtype), ((1, -1, 0), (0, 1, 1)))",
    "lax.full_like({x}, {c})",
    "lax.full((3,), {t})",
    "lax.slice({A}, (0, 1), (2, 2))",
    "lax.slice_in_dim({a}, 0, 2)",
    "lax.dynamic_slice({v}, ({k},), (2,))",
    "lax.dynamic_slice_in_dim({v}, {k}, 2)",
    "lax.index_in_dim({a}, 0)",
    "lax.index_take({A}, ({n}, ), (0,))",
    "lax.dynamic_index_in_dim({a}, {k})",
    "lax.dynamic_update_slice({v}, {w}[:2], ({k},))",
    "lax.dynamic_update_slice_in_dim({v}, {w}[:2], {k}, 0)",
    "lax.dynamic_update_index_in_dim({v}, {t}.astype({v}.dtype), {k}, 0)",
    *_each("lax.FUN({a}, 0)", "cumsum cumprod cummax cummin cumlogsumexp"),
    "lax.cumsum({a}, 0, reverse=True)",
    *_each("lax.FUN({a}, 0, jnp.int32)", "argmax argmin"),
    "lax.sort({a})",
    "lax.sort(({v}, {w}), num_keys=1)",
    "lax.sort_key_val({v}, {w})",
    "lax.top_k({a}, 2)",
    "lax.approx_max_k({v}, 2)",
    "lax.approx_min_k({v}, 2)",
    *_each("lax.FUN({a}, (0,))", "reduce_sum reduce_max reduce_min reduce_prod"),
    "lax.reduce({a}, jnp.zeros((), {a}.dtype), lax.add, (0,))",
    "lax.reduce({a}, jnp.ones((), {a}.dtype), lambda p, q: p * q, (0,))",
    "lax.reduce_window({v}, 0.0, lax.add, (2,), (1,), 'SAME')",
    "lax.reduce_window({v}, -jnp.inf, lax.max, (2,), (1,), 'SAME')",
    "lax.reduce_window({A}, jnp.inf, lax.min, (2, 2), (1, 1), 'VALID')",
    "lax.dot({A}, {B})",
    "lax.dot({A}, {B}, preferred_element_type=jnp.float32)",
    "lax.batch_matmul({T}, jnp.swapaxes({T}, 1, 2))",
    "lax.dot_general({A}, {B}, (((1,), (0,)), ((), ())))",
    "lax.dot_general({A}, {B}, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)",
    "lax.ragged_dot({A43}, {T32}, jnp.array([1, 3]))",
    "lax.ragged_dot_general({A43}, {T32}, jnp.array([1, 3]), lax.RaggedDotDimensionNumbers("
    "(((1,), (1,)), ((), ())), (0,), (0,)))",
    "lax.conv({X}, {X}, (1, 1), 'SAME')",
    "lax.conv_with_general_padding({X}, {X}, (1, 1), ((1, 0), (0, 1)), None, None)",
    "lax.conv_general_dilated({I}, {K}, (1, 1), 'SAME', "
    "dimension_numbers=('NHWC', 'HWIO', 'NHWC'))",
    "lax.conv_transpose({I}, {K}, (2, 2), 'SAME')",
    "lax.conv_general_dilated_patches({X}, (2, 2), (1, 1), 'VALID')",
    "lax.conv_general_dilated_local({X}, jnp.ones((2, 8, 3, 3), {X}.dtype), (1, 1), 'VALID', "
    "(2, 2))",
    "lax.fft(1j * {v}.astype(jnp.float32) + 2, 'fft', {v}.shape).imag",
    "lax.gather({v}, {n}[:, None], lax.GatherDimensionNumbers((), (0,), (0,)), (1,))",
    *_each(
        "lax.FUN({V3}, {n}[:, None], {V3}, lax.ScatterDimensionNumbers((), (0,), (0,)))",
        "scatter scatter_add scatter_sub scatter_mul scatter_min scatter_max",
    ),
    "lax.scatter_apply({V3}, {n}[:, None], jnp.tanh, "
    "lax.ScatterDimensionNumbers((), (0,), (0,)), update_shape=(3,))",
    "lax.bitcast_convert_type({x}, {x}.dtype)",
    "lax.cond({k} > 0, jnp.sin, jnp.square, {x})",
    "lax.cond(jnp.sum({x}) > 0, lambda x: x, lambda x: 0 * x + 1, {x})",
    "lax.switch({k}, [jnp.sin, jnp.negative, lambda x: x * 0.5], {x})",
    "lax.fori_loop(0, 2, lambda i, x: x * 0.5 + i, {x})",
    "lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, {x}))[1]",
    "lax.scan(lambda c, x: (c + x, c * x), jnp.zeros_like({a}[0]), {a})",
    "lax.scan(lambda c, k: (c, lax.cond(k > 0, lambda: {x}, lambda: {g})), 0, jnp.arange(2))[1]",
    "(lambda x, y: lax.map(lambda k: lax.fori_loop(0, k, lambda i, x: y, x), jnp.arange(2)))"
    "({x}, {g})",
    "lax.map(jnp.square, {a})",
    "lax.platform_dependent({x}, cpu=jnp.sin, default=jnp.sin)",
    "lax.composite(lambda x: x * 2, 'test.double')({x})",
    "lax.custom_root(lambda y: y**3 - {t}, {t}, lambda f, y: jnp.cbrt({t}), "
    "lambda g, y: y / g(1.0))",
    "lax.custom_linear_solve(lambda y: 2 * y, {x}, lambda f, y: y / 2, lambda f, y: y / 2)",
    "lax.dce_sink({x}) or {x}",
    *_each(
        "jax.vmap(lambda x: lax.FUN(x, 'i'), axis_name='i')({a})",
        "psum pmean pmax pmin all_gather",
    ),
    "jax.vmap(lambda x: x * lax.axis_index('i') / lax.axis_size('i'), axis_name='i')({a})",
    "jax.vmap(lambda x: lax.ppermute(x, 'i', [(0, 1), (1, 2), (2, 0)]), axis_name='i')({S})",
    "jax.vmap(lambda x: lax.pshuffle(x, 'i', [1, 2, 0]), axis_name='i')({S})",
    "jax.vmap(lambda x: lax.all_to_all(x, 'i', 0, 0), axis_name='i')({S})",
    "jax.vmap(lambda x: lax.pswapaxes(x, 'i', 0), axis_name='i')({S})",
    "jax.vmap(lambda x: lax.psum_scatter(x, 'i'), axis_name='i')({S})",
    "jax.scipy.special.xlogy({x}, {p})",
    "jax.scipy.special.gammaln({p})",
    "jax.scipy.linalg.solve_triangular({S} + 4 * jnp.eye(3), {V3}, lower=True)",
    "jax.scipy.stats.norm.logpdf({x})",
]

# What one condition, number or index decides for a whole array.
CHOICES = [
    "jnp.where({q}, {x}, {e})",
    "jnp.where({q}, {x}, {y})",
    "jnp.where({q}, {x}, {c})",
    "jnp.where({q}, {c}, {x})",
    "jnp.where({q}, {x}, jnp.zeros_like({x}))",
    "jnp.where({q}, {t}, {s})",
    "jnp.where({q}, {t}, {c})",
    "jnp.where(jnp.sum({x}) > 0, {x}, {e})",
    "(lambda old, g: jnp.where(jnp.all(jnp.isfinite(g)), old - 0.5 * g, old))({x}, {e})",
    "lax.select({q}, {x}, {e})",
    "lax.select_n({q}, {x}, {e})",
    "lax.cond({q}, lambda: {x}, lambda: {e})",
    "lax.cond({q}, lambda x, e: (x, e), lambda x, e: (e, x), {x}, {e})",
    "lax.switch({k}, [lambda: {x}, lambda: {e}, lambda: {g}])",
    *_each("jnp.FUN({t}, {s})", "maximum minimum fmax fmin"),
    *_each("jnp.FUN({t}, {c})", "maximum minimum"),
    "jnp.clip({t}, {s}, None)",
    "jnp.clip({t}, None, {s})",
    "jnp.clip({t}, -1.0, 1.0)",
    "jnp.where({t} > {s}, {t}, {s})",
    "{x} * jnp.minimum(1.0, {t})",
    "{x} / jnp.maximum(jnp.abs({t}), {c})",
    "jnp.stack([{x}, {e}, {g}])[{k}]",
    "jnp.stack([{t}, {s}])[{k}]",
    "lax.dynamic_index_in_dim(jnp.stack([{x}, {e}]), {k}, keepdims=False)",
    "lax.scan(lambda c, _: (c * 0.0625, c), {x}, None, length=3)[1][{k}]",
]


def _guarded(quotient: str, *wholes: str) -> list[str]:
    """The quotient, of an array `x` and a number `n` of it that may be 0."""
    return [f"(lambda x, n: {quotient})({{a}}, {whole})" for whole in wholes]


_SUMS = (
    "jnp.sum({a} * {a})",
    "jnp.sum({a} * {a}, -1, keepdims=True)",
    "jnp.sum(jnp.abs({a}))",
    "jnp.sum(jnp.abs({a}), 0)",
    "jnp.max(jnp.abs({a}))",
)
_NORMS = (
    "jnp.sqrt(jnp.sum({a} * {a}))",
    "jnp.linalg.norm({a})",
    "jnp.linalg.norm({a}, axis=-1, keepdims=True)",
)
GUARDS = [
    *_guarded("jnp.where(n == 0, 0.0, jnp.sqrt(jnp.where(n == 0, 1.0, n)))", *_SUMS[:3]),
    *_guarded("jnp.where(n > 0, jnp.log(jnp.where(n > 0, n, 1.0)), 0.0)", *_SUMS[1:4]),
    *_guarded("x / jnp.where(n == 0, 1.0, n)", *_SUMS, *_NORMS),
    *_guarded("jnp.where(n == 0, 0.0, x / jnp.where(n == 0, 1.0, n))", *_SUMS[2:], *_NORMS[:1]),
    *_guarded("x / (n + 1e-3)", *_NORMS),
    *_guarded("x / jnp.maximum(n, 1e-3)", *_NORMS),
    "jnp.where({x} == 0, 0.0, {y} / jnp.where({x} == 0, 1.0, {x}))",
    "jnp.where({x} > 0, jnp.sqrt(jnp.where({x} > 0, {x}, 1.0)), 0.0)",
    "jnp.where({x} > 0, jnp.log(jnp.where({x} > 0, {x}, 1.0)), 0.0)",
]
CLIPPING = [
    *_guarded("jnp.where(n < 1, x, x / n)", *_NORMS),
    *_guarded("lax.select(n < 1, x, (x / n) * 1.0)", *_NORMS[:2]),
    *_guarded("x * jnp.minimum(1.0, 1.0 / n)", *_NORMS),
    *_guarded("x * jnp.minimum(1.0, 1.0 / (n + 1e-3))", *_NORMS),
    "(lambda n: (jnp.where(n < 1, {x}, {x} / n), jnp.where(n < 1, {e}, {e} / n)))"
    "(jnp.sqrt(jnp.sum(jnp.square({x})) + jnp.sum(jnp.square({e}))))",
    "optax.clip_by_global_norm(1.0).update({x}, optax.EmptyState())[0]",
    "optax.clip_by_global_norm(1.0).update(({x}, {e}), optax.EmptyState())[0]",
    "optax.clip_by_block_rms(1.0).update({x}, optax.EmptyState())[0]",
    "optax.safe_norm({x}, 1e-3)",
]
MOMENTS = [
    "{x} / (jnp.sqrt({p}) + 1e-3)",
    "{x} / (jnp.sqrt({x} * {x}) + 1e-5)",
    "{x} * lax.rsqrt({x} * {x} + 1e-5)",
    "0.1 * {x} / (jnp.sqrt(0.001 * {x} * {x}) + 1e-5)",
    "(0.1 * {x} + 0.9 * {e}) / (jnp.sqrt(0.001 * {x} * {x} + 0.999 * {e} * {e}) + 1e-6)",
    "{x} / jnp.sqrt(jnp.mean({x} * {x}) + 1e-6)",
    "0.99 * {x} + 0.01 * {e}",
    "{x} + 0.01 * ({e} - {x})",
]
POLYNOMIALS = [
    *_each("{x} ** FUN", "2 3 4 -1 -2 -3"),
    *_each("jnp.mean({a} ** FUN)", "2 3 4"),
    "{x} * {x} * {x}",
    "{x} * {x} * {x} * {x}",
    "1.0 / {x} ** 2",
    "0.5 * {x} * (1 + jnp.tanh(0.79788 * ({x} + 0.044715 * {x} ** 3)))",
    "{x} * jax.nn.sigmoid(1.702 * {x})",
    "jax.nn.relu({x}) ** 2",
    "({x} + {x} ** 3) / (1 + {x} ** 2)",
    "{x} * {e} * {g}",
    *_each("jax.nn.FUN({x}) * {e}", "silu gelu relu sigmoid"),
    "{a} * lax.rsqrt(jnp.mean({a} ** 2, -1, keepdims=True) + 1e-5)",
    "{a} / jnp.sqrt(jnp.mean({a} ** 2) + 1e-5)",
    "jnp.polyval(jnp.array([0.5, -1.0, 2.0]), {x})",
    "jnp.mean(({a} - jnp.mean({a})) ** 3)",
]

# What models do with powers, with epsilons and in loops.
MODELS = [
    "jax.nn.glu(jnp.concatenate([{a}, 0.5 * {a}], -1))",
    "lax.scan(lambda w, x: (w - 0.1 * x, jax.nn.gelu(w)), {x}, jnp.stack([{e}, {g}]))",
    "jax.jit(lambda x, y: x * jax.nn.silu(y))({x}, {e})",
    *_each("jnp.abs({x}) ** FUN", "0.75 0.25 2.25"),
    *_each("(1 + jnp.abs({x})) ** FUN", "-0.75 -0.25"),
    *_each("{a} / (1 + jnp.linalg.norm({a}, FUN, axis=-1, keepdims=True))", "1 2 4"),
    "jnp.maximum({x}, -{x})",
    "{x} / jnp.maximum(jnp.linalg.norm({x}), 1e-6)",
    "{x} / (jnp.sqrt({p}) + 1e-6)",
]

# Statements that move elements of one operand, whose channels keep their scales.
MOVES = frozenset(
    """{x}.T|jnp.transpose({x})|jnp.permute_dims({A}, (1, 0))|jnp.matrix_transpose({A})
    jnp.swapaxes({A}, 0, 1)|jnp.moveaxis({A}, 0, 1)|jnp.rollaxis({A}, 1)|jnp.expand_dims({x}, 0)
    jnp.flip({a})|jnp.flip({a}, 0)|jnp.fliplr({A})|jnp.flipud({A})|jnp.roll({a}, 1, axis=-1)
    jnp.rot90({A})|jnp.unstack({a})|jnp.split({A}, 2, axis=1)|jnp.array_split({a}, 2)
    jnp.hsplit({A}, 2)|{a}[0]|{a}[..., -1]|{a}[::2]|{a}[::-1]|{x}[None]|{A}[:, 1]|{A}[{n}]
    {A}[:, {n}]|{a}[{k}]|jnp.take({a}, {n}, axis=0)|lax.transpose({A}, (1, 0))|lax.rev({a}, (0,))
    lax.expand_dims({x}, (0,))|lax.slice({A}, (0, 1), (2, 2))|lax.index_in_dim({a}, 0)
    lax.slice_in_dim({a}, 0, 2)|lax.dynamic_index_in_dim({a}, {k})|lax.unstack({a}, axis=0)
    -{x}|jnp.abs({x})|jnp.negative({x})|lax.neg({x})|lax.abs({x})""".replace("\n    ", "|").split(
        "|"
    )
)

TABLE: tuple[str, ...] = (
    *ELEMENTWISE,
    *REDUCTIONS,
    *CUMULATIVE,
    *SHAPES,
    *INDEXING,
    *PRODUCTS,
    *RANGES,
    *LINALG,
    *FFT,
    *NN,
    *LAX,
    *CHOICES,
    *GUARDS,
    *CLIPPING,
    *MOMENTS,
    *POLYNOMIALS,
    *MODELS,
)

_NAME = re.compile(r"\b(jnp\.linalg|jnp\.fft|jnp|jax\.nn|jax\.ops|jax\.scipy\.\w+|lax)\.(\w+)")
MODULES = {
    "jnp": jnp,
    "jnp.linalg": jnp.linalg,
    "jnp.fft": jnp.fft,
    "jax.nn": jax.nn,
    "lax": jax.lax,
}


def names_in(template: str) -> set[tuple[str, str]]:
    """The functions that a statement calls by name: (module, function)."""
    return {(module, name) for module, name in _NAME.findall(template)}


def statements() -> list[str]:
    """The statements whose functions this version of JAX has, in the order of the table."""

    def exists(module: str, name: str) -> bool:
        return module not in MODULES or hasattr(MODULES[module], name)

    found = [t for t in TABLE if all(exists(*found) for found in names_in(t))]
    return found if HAS_OPTAX else [t for t in found if "optax." not in t]
