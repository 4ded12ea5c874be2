"""A check of the invariants that every scale rule must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes, pow2
from jax_scalify.config import ScalifyConfig, current_config
from jax_scalify.conversions.trees import as_scaled_array, asarray
from jax_scalify.transform import scalify

__all__ = ["WAYS", "check_scale_rule"]

WAYS = ("eager", "jit", "vmap", "scan", "grad", "grad_outside")
"""The ways in which `check_scale_rule` can call a function."""


def check_scale_rule(
    fun: Callable,
    *args: Any,
    ways: str | Sequence[str] = ("eager", "jit", "vmap", "scan"),
    scales: Sequence[float] = (2.0**-20, 1.0, 2.0**20, 0.0),
    static_scale: float | None = 8.0,
    reference: Callable | None = None,
    tolerance: float | None = None,
) -> None:
    """Check the scale rule of a primitive, given a function that uses the primitive.

    The scalified `fun` is called on `ScaledArray` operands with the given data: with all operands
    at each of the scales, with operands at different scales, with one plain operand, and with one
    scale for each index of an axis. Results are compared with `fun` in float64 on the values
    `data * scale`. These invariants are checked:

    1. *Meaning*: the value is that of the plain function.
    2. *Power of two*: every scale is a power of two, or 0 where the data is 0.
    3. *No hidden precision*: the data has the shape and dtype of the plain result, and all dynamic
       scales have `config.scale_dtype`.
    4. *No hidden statistics*: different data of the same shape gives the same scales.
    5. *Nothing silent*: every primitive has a rule.

    Args:
        fun: a function of arrays, preferably a single equation of the primitive.
        args: arrays. Floating arrays are the data of `ScaledArray` operands.
        ways: how `fun` is called: "eager", "jit", "vmap" and "scan" (two examples with different
            scales), "grad" (of all results, inside `scalify`), "grad_outside" (the derivative of
            the scalified function with respect to plain arrays).
        scales: powers of two, and 0 for an operand that is zero. Omit scales at which the plain
            function is not finite or not defined.
        static_scale: a static scale to check too; None to skip this case.
        reference: the function to evaluate in float64; by default `fun`.
        tolerance: largest error relative to the largest result. By default 4 times the epsilon of
            the result's dtype, and 16 times for derivatives.

    Raises:
        AssertionError: if an invariant is broken. It names invariant, way of calling and scales.
        ValueError: if a way is unknown, a scale is no power of two, or no argument is floating.

    Example:
        >>> jsa.testing.check_scale_rule(jnp.negative, np.float16([[1.0, -2.5]]))
    """
    _check_powers_of_two((*scales, static_scale))
    data = [np.asarray(a) for a in args]
    floating = [i for i, d in enumerate(data) if dtypes.is_scalable(d.dtype)]
    if not floating:
        raise ValueError(f"`args` must hold a floating array, got {[d.dtype for d in data]}.")
    with ScalifyConfig(missing_rule="error", scale_dtype=current_config().scale_dtype):
        for way in _checked_ways(ways):
            calls = _Calls(fun, reference or fun, way, floating)
            rows = list(_rows(data, floating, scales, static_scale, way))
            places = [f"{way}, scales {[_shown(s) for s in row]}" for row in rows]
            operands = [_operands(data, floating, row, way) for row in rows]
            if way == "grad_outside":
                for x, where in zip(operands, places, strict=True):
                    _check_outside(calls, x, tolerance, where)
            else:
                _check_calls(calls, operands, tolerance, places)


def _checked_ways(ways: str | Sequence[str]) -> Sequence[str]:
    ways = (ways,) if isinstance(ways, str) else ways
    unknown = [w for w in ways if w not in WAYS]
    if unknown:
        raise ValueError(f"`ways` must be among {list(WAYS)}, got {unknown}.")
    return ways


def _check_powers_of_two(scales: Sequence[float | None]) -> None:
    known = [s for s in scales if s is not None]
    wrong = [s for s in known if s != 0 and not pow2.is_power_of_two(s)]
    if wrong:
        raise ValueError(f"`scales` and `static_scale` must be powers of two or 0, got {wrong}.")


def _rows(
    data: list[np.ndarray], floating: list[int], scales: Sequence[float], static: Any, way: str
) -> Iterator[tuple[Any, ...]]:
    """Yield scales of the floating operands. A float is static, None is a plain operand."""
    count = len(floating)
    dynamic = [np.float32(s) for s in scales if s != 0]
    yield from ((s,) * count for s in dynamic)
    if 0 in scales:
        yield from _in_turn(np.float32(0), np.float32(1), count)
    if static is not None:
        yield (float(static),) * count
    if count > 1 and dynamic:
        yield from dict.fromkeys(_in_turn(max(dynamic), np.float32(1), count))
    if way != "jit":
        return
    if count > 1 and dynamic:
        yield from _in_turn(None, sorted(dynamic)[len(dynamic) // 2], count)
    yield from _rows_along_axes([data[i] for i in floating])


def _in_turn(one: Any, others: Any, count: int) -> Iterator[tuple[Any, ...]]:
    """Yield rows in which one operand after the other has `one`, and the rest `others`."""
    return (tuple(one if j == i else others for j in range(count)) for i in range(count))


def _rows_along_axes(operands: list[np.ndarray]) -> Iterator[tuple[Any, ...]]:
    """Yield rows with one scale for each index of an axis."""
    for axis in range(max(x.ndim for x in operands)):
        yield tuple(_along(x, axis) for x in operands)


def _along(data: np.ndarray, axis: int) -> np.ndarray:
    """Return one scale for each index of an axis: 4, 1, 1/4, 4, ..."""
    if axis >= data.ndim or data.ndim < 2:
        return np.float32(1)  # type: ignore[return-value]
    shape = [1] * data.ndim
    shape[axis] = data.shape[axis]
    return np.exp2(2 - 2 * (np.arange(shape[axis]) % 3)).astype(np.float32).reshape(shape)


def _shown(scale: Any) -> str:
    if scale is None:
        return "plain"
    kind = " static" if type(scale) is float else f" {scale.shape}" if scale.ndim else ""
    return f"{float(np.max(scale)):g}{kind}"


def _operands(data: list[np.ndarray], floating: list[int], row: Any, way: str) -> list[Any]:
    operands: list[Any] = list(data)
    batched = way in ("vmap", "scan")
    for i, scale in zip(floating, row, strict=True):
        zero = scale is not None and not np.any(scale)
        operands[i] = np.zeros_like(data[i]) if zero else data[i]
    if batched:
        operands = [np.stack([x, x]) for x in operands]
    for i, scale in zip(floating, row, strict=True):
        operands[i] = jnp.asarray(operands[i])
        if scale is not None:
            if type(scale) is not float:
                scale = np.stack([scale, scale / 2]) if batched else scale
                scale = jnp.asarray(scale, current_config().scale_dtype)
            operands[i] = ScaledArray(operands[i], scale)
    return operands


def _weights(out: jax.Array, unit: Any) -> jax.Array:
    """Return weights, different for each element, for a sum of `out / unit`."""
    weights = np.cos(np.arange(out.size)).reshape(out.shape) + 1.5
    return jnp.asarray(weights, out.dtype) / jnp.asarray(unit, out.dtype)


def _weighted_sum(outputs: Any, units: Sequence[Any] | None = None) -> Any:
    total = 0.0
    outputs = [o for o in jax.tree.leaves(outputs) if dtypes.is_scalable(o.dtype)]
    for out, unit in zip(outputs, units or [1.0] * len(outputs), strict=True):
        wide = out.astype(dtypes.compute_dtype(out.dtype))
        total += jnp.sum(jnp.real(wide * _weights(wide, unit)))
    return total


class _Calls:
    """A function under one way of calling, scalified and plain.

    Attributes:
        way: the way of calling.
        floating: positions of the floating operands.
        run: the scalified function.
        plain: the function of plain arrays.
        wanted: the compiled reference, for float64 arrays.
    """

    def __init__(self, fun: Callable, reference: Callable, way: str, floating: list[int]) -> None:
        self.way, self.floating = way, floating
        self.run = self._called(fun, scalify)
        self.plain = self._called(fun)
        self.wanted = jax.jit(self._called(reference))
        self._together = jax.jit(self._all_leaves, static_argnums=1)
        self._slopes = jax.jit(jax.grad(self._weighted_values))
        self._wanted_slopes = jax.jit(jax.grad(self._weighted_wanted))

    def results(self, rows: list[list[Any]], places: Sequence[str]) -> list[list[Any]]:
        """Return the leaves of the scalified function's results for each row of operands.

        Rows of all structures are compiled as one program: compiling takes most of the time.
        """
        if self.way == "eager":
            return [self._leaves(x, where) for x, where in zip(rows, places, strict=True)]
        groups: dict[Any, list[int]] = {}
        for i, operands in enumerate(rows):
            leaves, tree = jax.tree.flatten(operands)
            groups.setdefault((tree, *map(jax.typeof, leaves)), []).append(i)
        firsts = tuple(places[group[0]] for group in groups.values())
        found: dict[int, list[Any]] = {}
        for k in range(max(map(len, groups.values()))):
            chosen = [group[min(k, len(group) - 1)] for group in groups.values()]
            together = self._together([rows[i] for i in chosen], firsts)
            found |= dict(zip(chosen, together, strict=True))
        return [found[i] for i in range(len(rows))]

    def _all_leaves(self, rows: list[list[Any]], places: tuple[str, ...]) -> list[list[Any]]:
        return [self._leaves(x, where) for x, where in zip(rows, places, strict=True)]

    def _leaves(self, operands: Sequence[Any], where: str) -> list[Any]:
        try:
            return jax.tree.leaves(self.run(*operands), is_leaf=is_scaled)
        except Exception as error:
            error.add_note(f"check_scale_rule: {where}")
            raise

    def _called(self, fun: Callable, transform: Callable = lambda f: f) -> Callable:
        if self.way == "grad":
            inner = fun
            fun = jax.grad(lambda *xs: _weighted_sum(inner(*xs)), tuple(self.floating))
        call = transform(fun)
        if self.way == "vmap":
            return jax.vmap(call)
        return _scanned(call) if self.way == "scan" else call

    def scaled(self, arrays: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Return the operands with the values of `arrays`, at the same scales."""
        full = list(operands)
        for i, array in zip(self.floating, arrays, strict=True):
            like = operands[i]
            scale = like.scale
            if not like.is_static:
                scale = jnp.where(jnp.asarray(scale) == 0, 1, scale)  # at 0 the derivative is 0
            full[i] = as_scaled_array(array, scale, dtype=like.dtype)
        return full

    def _weighted_values(self, arrays: list[Any], operands: list[Any], units: list[Any]) -> Any:
        out = asarray(self.run(*self.scaled(arrays, operands)), jnp.float32)
        return _weighted_sum(out, units)

    def _weighted_wanted(self, arrays: list[Any], operands: list[Any], units: list[Any]) -> Any:
        full = list(operands)
        for i, array in zip(self.floating, arrays, strict=True):
            full[i] = array
        return _weighted_sum(self.wanted(*full), units)

    def slopes(self, values: list[Any], operands: list[Any], units: list[Any]) -> list[Any]:
        """Return the derivatives of a weighted sum of the scalified function's results."""
        pairs = zip(values, self.floating, strict=True)
        wide = [jnp.asarray(v, dtypes.compute_dtype(operands[i].dtype)) for v, i in pairs]
        return self._slopes(wide, operands, units)

    def wanted_slopes(self, values: list[Any], operands: list[Any], units: list[Any]) -> list[Any]:
        """Return the derivatives of the same sum for the reference, in float64."""
        rest = [None if is_scaled(x) else x for x in operands]
        with jax.enable_x64(True):
            return self._wanted_slopes([jnp.asarray(v) for v in values], rest, units)


def _scanned(fun: Callable) -> Callable:
    return lambda *xs: lax.scan(lambda carry, x: (carry, fun(*x)), 0, xs)[1]


def _value(x: Any) -> np.ndarray:
    """Return the values of an operand or result in float64 or complex128."""
    if not is_scaled(x):
        return np.asarray(x)
    data = np.asarray(x.data)
    data = data.astype(np.complex128 if np.iscomplexobj(data) else np.float64)
    scale = np.asarray(x.scale, np.float64)
    return data * scale.reshape(scale.shape + (1,) * (data.ndim - scale.ndim) * bool(scale.ndim))


def _in_float64(fun: Callable, operands: list[Any]) -> list[np.ndarray]:
    """Call the plain function on the operands' values in float64."""
    values = [_value(x) for x in operands]
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(v, jnp.complex128 if np.iscomplexobj(v) else jnp.float64)
            if dtypes.is_scalable(v.dtype)
            else jnp.asarray(v)
            for v in values
        ]
        return [np.asarray(out) for out in jax.tree.leaves(fun(*wide))]


def _check_calls(
    calls: _Calls, rows: list[list[Any]], tolerance: float | None, places: Sequence[str]
) -> None:
    """Check the results for each row of operands; `places` describe the rows."""
    results = calls.results(rows, places)
    plain = (getattr(x, "data", x) for x in rows[0])
    avals = jax.tree.leaves(jax.eval_shape(calls.plain, *plain))
    for operands, outputs, where in zip(rows, results, places, strict=True):
        _check_results(calls, operands, outputs, avals, tolerance, where)
    if calls.way != "jit":
        return
    others = calls.results([[_other_data(x) for x in operands] for operands in rows], places)
    for outputs, changed, where in zip(results, others, places, strict=True):
        for before, after in zip(outputs, changed, strict=True):
            if is_scaled(before) and not np.array_equal(before.scale, after.scale):
                raise AssertionError(
                    f"No hidden statistics ({where}): the scale is {before.scale}, and "
                    f"{after.scale} for other data."
                )


def _check_results(
    calls: _Calls,
    operands: list[Any],
    outputs: list[Any],
    avals: list[Any],
    tolerance: float | None,
    where: str,
) -> None:
    expected = _in_float64(calls.wanted, operands)
    factor = 16 if calls.way == "grad" else 4
    for out, number, aval in zip(outputs, expected, avals, strict=True):
        if (out.shape, out.dtype) != (aval.shape, aval.dtype):
            raise AssertionError(
                f"No hidden precision ({where}): the result is {out.dtype}{list(out.shape)}, the "
                f"plain function's {aval.dtype}{list(aval.shape)}."
            )
        if is_scaled(out):
            _check_scale(out, where)
        _check_values(_value(out), number, _tolerance(out.dtype, tolerance, factor), where)


def _other_data(x: Any) -> Any:
    if not is_scaled(x) or x.ndim == 0:  # the scale of a 0-d value may be its exponent
        return x
    return ScaledArray((x.data * jnp.asarray(0.625, x.dtype)).astype(x.dtype), x.scale)


def _tolerance(dtype: Any, tolerance: float | None, factor: int) -> float:
    if tolerance is not None or not dtypes.is_scalable(dtype):
        return tolerance or 0.0
    return factor * float(jnp.finfo(dtype).eps)


def _check_scale(x: ScaledArray, where: str) -> None:
    scale = np.asarray(x.scale)
    if not x.is_static and scale.dtype != current_config().scale_dtype:
        raise AssertionError(
            f"No hidden precision ({where}): the scale is {scale.dtype}, not "
            f"{current_config().scale_dtype}."
        )
    if not np.all(np.isfinite(scale)) or np.any(np.frexp(scale[scale != 0])[0] != 0.5):
        raise AssertionError(f"Power of two ({where}): the scale is {scale}.")
    full = scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim) * bool(scale.ndim))
    zeros = np.asarray(x.data)[np.broadcast_to(full == 0, x.shape)]
    if np.any(~np.isnan(zeros) & (zeros != 0)):
        raise AssertionError(f"Scale 0 means data 0 ({where}): the data is {zeros}.")


def _check_values(got: np.ndarray, want: np.ndarray, tolerance: float, where: str) -> None:
    if not dtypes.is_scalable(got.dtype):
        if not np.array_equal(got, want):
            raise AssertionError(f"Meaning ({where}): got {got}, expected {want}.")
        return
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        raise AssertionError(f"Meaning ({where}): not finite where expected; {got} for {want}.")
    largest = np.max(np.abs(want[finite]), initial=0.0)
    error = np.max(np.abs(got[finite] - want[finite]), initial=0.0)
    if error > tolerance * largest:
        raise AssertionError(
            f"Meaning ({where}): largest error {error:.3g} of {largest:.3g}, allowed "
            f"{tolerance:.3g} of it. Got {got}, expected {want}."
        )


def _check_outside(calls: _Calls, operands: list[Any], tolerance: float | None, where: str) -> None:
    """Check the derivative of the scalified function, in units of its results' scales."""
    floating = calls.floating
    if any(not is_scaled(operands[i]) for i in floating):
        return
    values = [_value(operands[i]) for i in floating]
    outputs = calls.run(*calls.scaled(values, operands))
    outputs = [o for o in jax.tree.leaves(outputs, is_leaf=is_scaled) if is_scaled(o)]
    units = [np.where(np.asarray(o.scale) == 0, 1, o.scale) for o in outputs]
    units = [u.reshape(u.shape + (1,) * (o.ndim - u.ndim)) for u, o in zip(units, outputs)]
    got = calls.slopes(values, operands, units)
    expected = calls.wanted_slopes(values, operands, units)
    for g, e, i in zip(got, expected, floating, strict=True):
        limit = _tolerance(operands[i].dtype, tolerance, 16)
        _check_values(np.asarray(g), np.asarray(e), limit, where)
