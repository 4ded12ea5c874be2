"""When a value is right: tolerances, and what is compared of factorisations that are not unique."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far a value may be from the reference.

    The error is counted in units of `eps * max(|reference|, floor * largest, tiny)`, `largest`
    being the largest finite reference of the array and `tiny` the smallest normal number. A unit
    is the spacing of the output's dtype at the reference.

    Attributes:
        float32: the most units for outputs of float32.
        narrow: the most units for outputs of 16 bits.
        floor: share of the array's largest value below which errors are absolute.
        conditioned: whether also right is what the plain function gives in the harness's dtype,
            or twice its error.
    """

    float32: float
    narrow: float
    floor: float
    conditioned: bool = False


# Elementwise and structural primitives: computed in float32 and rounded once. XLA's own float32
# functions are off by up to 28 units. One scale serves the array, so values far below its largest
# lose bits in float16.
ELEMENTWISE = Tolerance(32, 2, 2**-14)
# Sums of terms of both signs: the error is relative to the terms, not to what they leave.
SUM = Tolerance(32, 2, 2**-4)
# Series and recurrences whose rounding adds up, near roots and poles most, in JAX as here.
SERIES = Tolerance(32, 2, 2**-14, conditioned=True)
# Solvers and factorisations: the error is relative to the matrix and grows with its condition.
SOLVER = Tolerance(32, 2, 2**-2, conditioned=True)
# An arbitrary computation runs in its operands' dtype, and rounds (or overflows) at each step.
STEPWISE = Tolerance(32, 2, 2**-4, conditioned=True)
# A plain function whose own error is larger than this is no yardstick.
LARGEST_RELATIVE = 1e-3
TOLERANCES = {
    r"reduce_sum|cumsum|cumlogsumexp|dot_general|conv_general_dilated|fft|scatter_add"
    r"|select_and_(gather|scatter)_add": SUM,
    r"reduce|reduce_window_(add|mul)": STEPWISE,
    r"digamma|lgamma|igammac?|regularized_incomplete_beta|bessel_i[01]e|random_gamma": SERIES,
    r"cholesky|qr|svd|eigh?|lu|(triangular|tridiagonal|custom_linear)_solve": SOLVER,
}


def is_float(x: Any) -> bool:
    """Tell whether an array is floating-point, real or complex."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def precision(dtype: Any) -> Any:
    """The real dtype of a complex one, and any other itself."""
    return jnp.finfo(dtype).dtype


def in_precision(x: Any, dtype: Any) -> np.ndarray:
    """Cast floating values to a real dtype, or to the complex one of its precision."""
    x = np.asarray(x)
    if not is_float(x):
        return x
    return x.astype(np.result_type(dtype, np.complex64) if np.iscomplexobj(x) else dtype)


def to_float64(x: Any) -> np.ndarray:
    """Cast floating values to float64 or complex128."""
    return in_precision(x, np.float64)


# --- Factorisations: not unique, or unique up to signs, so judged by what they reconstruct. Each
# function returns (value, wanted value) pairs; `args`, `out` and `want` are wide values.


def _transposed(x: np.ndarray) -> np.ndarray:
    return np.conj(np.swapaxes(x, -1, -2))


def _identity(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.eye(x.shape[-1]), x.shape)


def _qr(harness: Any, args: list, out: list, want: list) -> list:
    q, r = out
    gram = _transposed(q) @ q
    return [(q @ r, args[0]), (gram, _identity(gram))]


def _cholesky(harness: Any, args: list, out: list, want: list) -> list:
    return [(np.tril(out[0]), np.tril(want[0]))]  # what is above the diagonal is unspecified


def _svd(harness: Any, args: list, out: list, want: list) -> list:
    pairs = [(out[0], want[0])]
    if len(out) == 3:
        s, u, vh = out
        k = s.shape[-1]
        grams = [_transposed(u) @ u, vh @ _transposed(vh)]
        pairs.append(((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], args[0]))
        pairs += [(g, _identity(g)) for g in grams]
    return pairs


def _eigh(harness: Any, args: list, out: list, want: list) -> list:
    lower = np.tril(args[0]) if "lower_True" in harness.fullname else _transposed(np.triu(args[0]))
    matrix = lower + _transposed(lower) - lower * np.eye(lower.shape[-1])
    v, w = out
    gram = _transposed(v) @ v
    return [
        ((v * w[..., None, :]) @ _transposed(v), matrix),
        (gram, _identity(gram)),
        (w, want[1]),
    ]


def _nearest(values: np.ndarray, among: np.ndarray) -> np.ndarray:
    """For each value, in any order, the one nearest to it."""
    if not values.size:
        return among
    distance = np.abs(values[..., :, None] - among[..., None, :])
    return np.take_along_axis(among, distance.argmin(-1), -1)


def _eig(harness: Any, args: list, out: list, want: list) -> list:
    matrix, values, *vectors = args[0], *out
    pairs = [(values, _nearest(values, want[0])), (_nearest(want[0], values), want[0])]
    if harness.params["compute_left_eigenvectors"]:
        left = _transposed(vectors.pop(0))
        pairs.append((left @ matrix, values[..., :, None] * left))
    for right in vectors:
        pairs.append((matrix @ right, right * values[..., None, :]))
    return pairs


def _lu(harness: Any, args: list, out: list, want: list) -> list:
    lu, pivots, permutation = out
    k = min(lu.shape[-2:])
    lower = np.tril(lu[..., :, :k], -1) + np.eye(lu.shape[-2], k)
    rows = np.take_along_axis(args[0], permutation[..., None], -2)
    return [(lower @ np.triu(lu[..., :k, :]), rows), (pivots, want[1])]


def _approx_top_k(harness: Any, args: list, out: list, want: list) -> list:
    taken = np.take_along_axis(args[0], out[1], -1)  # indices of equal values may differ
    return [(out[0], want[0]), (taken, want[0])]


RECONSTRUCTIONS: dict[str, Callable] = {
    "cholesky": _cholesky,
    "qr": _qr,
    "svd": _svd,
    "eigh": _eigh,
    "eig": _eig,
    "lu": _lu,
    "approx_top_k": _approx_top_k,
}


# --- Judging


def tolerance_of(group: str) -> Tolerance:
    """Return the tolerance class of a group of harnesses."""
    for names, tolerance in TOLERANCES.items():
        if re.fullmatch(names, group):
            return tolerance
    return ELEMENTWISE


def _units(got: np.ndarray, want: np.ndarray, dtype: Any, floor: float) -> np.ndarray:
    """The error of every element in units of `Tolerance`."""
    finfo = jnp.finfo(dtype)
    size = np.abs(want)
    ordinary = np.isfinite(want) & (size <= float(finfo.max))
    held = np.isfinite(want) & np.isfinite(got)
    largest = size[held].max(initial=0.0)
    unit = float(finfo.eps) * np.maximum(
        np.maximum(np.where(ordinary, size, largest), floor * largest), float(finfo.tiny)
    )
    with np.errstate(all="ignore"):
        units = np.abs(got - want) / unit
        beyond = ~ordinary & ~np.isnan(want)
        # Beyond the range of the dtype: infinite, as in the plain function, or the value itself.
        real = not np.iscomplexobj(got)
        infinite = np.isinf(got) & (np.sign(got) == np.sign(want) if real else True)
        close = np.abs(got - want) <= 8 * float(finfo.eps) * size
        units = np.where(beyond, np.where(infinite | close, 0.0, np.inf), units)
        units = np.where(np.isnan(want), np.where(np.isnan(got), 0.0, np.inf), units)
    return np.where(np.isnan(units), np.inf, units)


def judge(
    got: np.ndarray, want: np.ndarray, plain: np.ndarray | None, dtype: Any, tolerance: Tolerance
) -> tuple[float, str]:
    """Compare one output with its reference.

    Args:
        got: the values as computed.
        want: the values as they should be.
        plain: value of the plain function in the harness's dtype, if its inputs are representable.
        dtype: of the output's data.
        tolerance: of the harness's group.

    Returns:
        The largest error in units, and what is wrong ("" if nothing is).
    """
    if got.shape != want.shape:
        return np.inf, f"shape {got.shape} instead of {want.shape}"
    if not jnp.issubdtype(got.dtype, jnp.inexact):
        differ = int(np.sum(got != want))
        return (np.inf, f"{differ} of {got.size} differ") if differ else (0.0, "")
    units = _units(got, want, dtype, tolerance.floor)
    limit = tolerance.float32 if jnp.finfo(dtype).bits >= 32 else tolerance.narrow
    if tolerance.conditioned and plain is not None:
        units = np.where((got == plain) | (np.isnan(got) & np.isnan(plain)), 0.0, units)
        units_of_plain = _units(plain, want, dtype, tolerance.floor)
        finite = units_of_plain[np.isfinite(units_of_plain)]
        most = LARGEST_RELATIVE / float(jnp.finfo(dtype).eps)
        limit = max(limit, min(2 * finite.max(initial=0.0), most))
    worst = float(units.max(initial=0.0))
    if worst <= limit:
        return worst, ""
    at = np.unravel_index(int(units.argmax()), units.shape)
    return worst, (
        f"{int(np.sum(units > limit))} of {got.size} off by up to {worst:.3g} units of "
        f"{np.dtype(dtype).name}: {got[at]:.6g} instead of {want[at]:.6g}"
    )


def judge_all(
    harness: Any, values: list, got: list, want: list, plain: list | None, dtypes: list
) -> tuple[float, str]:
    """Judge every output of a case.

    Args:
        harness: the case.
        values: its dequantised arguments.
        got: outputs as computed.
        want: outputs of the reference.
        plain: outputs of the plain function in the harness's dtype, if it can be evaluated.
        dtypes: of the outputs.

    Returns:
        The largest error in units, and the first complaint ("" if there is none).
    """
    make = RECONSTRUCTIONS.get(harness.group_name)
    if make is None:
        pairs = list(zip(got, want, strict=True))
        plains = plain if plain is not None else [None] * len(got)
    else:
        pairs = make(harness, values, got, want)
        plains = [None] * len(pairs)
        if plain is not None:
            plains = [p for p, _ in make(harness, values, plain, want)]
        dtypes = [dtypes[0]] * len(pairs)
    tolerance = tolerance_of(harness.group_name)
    verdicts = [
        judge(g, w, p, d, tolerance) for (g, w), p, d in zip(pairs, plains, dtypes, strict=True)
    ]
    complaints = [text for _, text in verdicts if text]
    return max((u for u, _ in verdicts), default=0.0), complaints[0] if complaints else ""
