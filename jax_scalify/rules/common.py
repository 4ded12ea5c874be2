"""What the rules share: moving powers of two into data, and bringing operands to one scale."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat, algebra, dtypes, pow2
from jax_scalify.algebra import ONE, ZERO, Scale
from jax_scalify.array import ScaledArray
from jax_scalify.config import Pow2RoundMode
from jax_scalify.deferred import LARGEST_EXPONENT, Deferred, can_defer, defer
from jax_scalify.registry import RuleContext
from jax_scalify.scale_table import ScaleTable
from jax_scalify.values import Value

# A sum of n non-negative terms grows like n. For narrow data the factor stops at 2**10: beyond it
# one confident logit in a softmax over 50,257 classes would give 65536 * 2**-16.
NONNEGATIVE_LIMIT = 10
# In a wide dtype a constant's data may reach 2**40: there is room for its cube.
_CONSTANT_ROOM = 40
# A constant beyond 2**64 is a mask or dodges an overflow (`hypot`): it stays in data that can hold
# it, so that the scale of what it meets stays where it was.
_LARGEST_CONSTANT = 64


def multiply(data: Any, factor: Scale, dtype: Any = None) -> Any:
    """Return `data * factor`, multiplied in at least float32; a factor 1 costs nothing.

    Without `dtype` the result stays in the dtype that it was computed in.
    """
    if not factor.is_one:
        compute = dtypes.compute_dtype(data.dtype)
        if factor.is_static:
            number = np.asarray(factor.value).astype(dtypes.real_dtype(compute))
            number = _compat.pin_constant(number) if np.ndim(data) else number
        else:
            number = factor.array.astype(dtypes.real_dtype(compute))
        data = lax.convert_element_type(data, compute)
        if jnp.issubdtype(compute, jnp.complexfloating):
            number = lax.convert_element_type(number, compute)
        if number.ndim and number.shape != data.shape:  # either may have dims of size 1
            data, number = jnp.broadcast_arrays(data, number)
        data = lax.mul(number, data)
    return data if dtype is None else dtypes.cast(data, dtype)


def moved(x: ScaledArray, factor: Scale, dtype: Any = None) -> Any:
    """Return `x.data * factor` as `multiply` does, with one factor for a deferred array."""
    if isinstance(x, Deferred) and not factor.is_static:
        return multiply(x.raw, factor * Scale(x.exponent), dtype)
    if isinstance(x, Deferred) and x.reaches(factor):
        return x.times(factor) if dtype is None else dtypes.cast(x.times(factor), dtype)
    return multiply(x.data, factor, dtype)


def times(raw: Any, factor: Scale, scale: Scale, dtype: Any) -> ScaledArray:
    """Make an array with `data = raw * factor`, cast once; if the factor can wait, it does."""
    if factor.is_static and not factor.is_zero and can_defer(dtype):
        return defer(dtypes.cast(raw, dtype), factor.exponent, scale)
    return ScaledArray(multiply(raw, factor, dtype), scale)


def filled(data: Any, shape: tuple[int, ...]) -> Any:
    """Give the data of a constant or of a broadcast scalar its full shape."""
    return data if np.shape(data) == shape else jnp.broadcast_to(data, shape)


def uniform_over(x: ScaledArray, axes: Sequence[int] | None = None) -> ScaledArray:
    """Make a scale that is not scalar the same along some axes (by default all: a scalar)."""
    if x.scale.ndim == 0:
        return x
    axes = range(x.ndim) if axes is None else axes
    axes = tuple(a % x.ndim for a in axes if x.scale.shape[a] != 1)
    everything = all(x.scale.shape[a] == 1 for a in range(x.ndim) if a not in axes)
    if not axes and not everything:
        return x
    reduced = tuple(range(x.ndim)) if everything else axes
    scale = x.scale.map(lambda s: jnp.max(s, reduced, keepdims=not everything, initial=0))
    return ScaledArray(moved(x, x.scale / scale, x.dtype), scale)


class Terms(enum.Enum):
    """What is known of the terms of a sum, and so with which power of their number it grows.

    Terms with a factor that was given, as a weight is, are independent of each other. Computed
    values have a part in common, taken to be the `n**-1/8`th part of them: the gradients of the
    examples agree to some extent, and so do the values that attention averages. A sum of such
    values grows like `n**(7/8)`, and one of products of two like `n**(3/4)`, in which the common
    parts are multiplied.

    A sum of peaked terms is anything from one of them to all `n`, and the gradient of a softmax
    divides by its square: float16 has room for both ends only if the scale lies in the middle.
    """

    INDEPENDENT = 1 / 2
    PRODUCTS = 3 / 4
    ALIKE = 7 / 8
    NONNEGATIVE = 1

    @classmethod
    def of(cls, *factors: Value) -> Terms:
        """The terms that are products of some values' elements."""
        if any(v.peaked for v in factors):
            return cls.INDEPENDENT
        if all(v.nonneg for v in factors):
            return cls.NONNEGATIVE
        if not all(v.computed for v in factors):
            return cls.INDEPENDENT
        return cls.PRODUCTS if len(factors) > 1 else cls.ALIKE


def growth(ctx: RuleContext, count: int, terms: Terms) -> Scale:
    """The factor by which a sum of `count` terms of unit RMS outgrows one of them."""
    if count <= 1:
        return Scale(0)
    exponent = math.log2(count) * terms.value
    if ctx.config.rounding_mode is Pow2RoundMode.UP:
        exponent = math.ceil(exponent)
    exponent = math.floor(exponent)
    if terms is Terms.NONNEGATIVE and jnp.finfo(ctx.out_dtype).bits < 32:
        exponent = min(exponent, NONNEGATIVE_LIMIT)
    return Scale(exponent)


def finish(
    ctx: RuleContext, total: Any, scale: Scale, factor: Scale, exponent: int = 0
) -> ScaledArray:
    """Divide a total, yet to be multiplied by `2**exponent`, by the factor that it has grown by."""
    return times(total, Scale(exponent) / factor, scale * factor, ctx.out_dtype)


def windowed_axes(ctx: RuleContext, *, window_dimensions: Any, **_: Any) -> list[int]:
    """The axes along which a window mixes or moves elements."""
    shapes = {aval.shape for aval in (*ctx.in_avals, *ctx.out_avals)}
    return [
        a
        for a, size in enumerate(window_dimensions)
        if size != 1 or len({shape[a] for shape in shapes}) > 1
    ]


def constant_floor(number: Any, dtype: Any) -> Scale:
    """The smallest scale at which a constant is finite with three octaves to spare.

    `finfo.min` and `finfo.max` are masks: they may saturate as long as they stay beyond 2**10.
    """
    finfo = jnp.finfo(dtype)
    if abs(float(number)) >= float(finfo.max):
        return Scale(max(-pow2.MAX_EXPONENT, 10 - finfo.maxexp))
    return Scale(pow2.floor_exponent(number) + max(4 - finfo.maxexp, -_CONSTANT_ROOM))


def constant_scale(number: Any, dtype: Any) -> Scale:
    """The scale of a constant beside constants: at most 1, or a mask would ask for 2**127."""
    floor = constant_floor(number, dtype)
    if abs(float(number)) >= float(jnp.finfo(dtype).max):
        return floor
    return Scale(max(floor.exponent, min(0, pow2.split_constant(number)[1])))


def votes(
    ctx: RuleContext, operands: dict[int, ScaledArray], *, additive: bool = False
) -> list[Scale]:
    """What each operand, by its index, has to say about the scale of a result that they share.

    Arrays vote with their scales. A constant votes, in a sum, with its own power of two; elsewhere
    with the smallest scale at which it can be written. 0, inf and nan do not vote.
    """
    arrays, constants = [], []
    for i, x in operands.items():
        number = ctx.inputs[i].constant
        if number is None or number.dtype.kind == "c":
            arrays.append(x.scale)
        elif number != 0 and np.isfinite(np.float64(number)):
            constants.append((number, x))
    arrays = [s for s in arrays if not s.is_zero]
    if additive:
        return arrays + [x.scale for _, x in constants]
    ask = constant_floor if arrays else constant_scale
    return arrays + [ask(number, x.dtype) for number, x in constants]


def shared_scale(
    ctx: RuleContext, operands: dict[int, ScaledArray], *, additive: bool = False
) -> Scale:
    """Return the largest vote; without votes 0 if every operand is 0, else 1."""
    scales = votes(ctx, operands, additive=additive)
    if scales:
        return algebra.join(*scales)
    numbers = [ctx.inputs[i].constant for i in operands]
    return ZERO if all(n is None or n == 0 for n in numbers) else Scale(0)


def align(ctx: RuleContext, index: int, x: ScaledArray, scale: Scale, dtype: Any = None) -> Any:
    """Return the data of an operand at another scale, `data * (x.scale / scale)`.

    In at least float32 unless the ratio is 1 or a `dtype` is given. A constant saturates, and one
    that is not zero does not become zero.
    """
    number = ctx.inputs[index].constant
    if number is None or number.dtype.kind == "c":
        if x.scale.is_zero:
            return x.data if dtype is None else dtypes.cast(x.data, dtype)
        return moved(x, algebra.alignment(x.scale, scale), dtype)
    if number == 0 or not np.isfinite(np.float64(number)):
        return x.data if dtype is None else dtypes.cast(x.data, dtype)
    return align_constant(number, x.dtype, scale)


def bring_together(
    ctx: RuleContext, operands: dict[int, ScaledArray], scale: Scale, dtype: Any = None
) -> tuple[list[Any], int]:
    """Align operands at a scale, up to a factor `2**exponent` that a result has yet to get.

    It is the factor that most elements would need: they are left as they are. Among equals those
    stay that were given: a state's new value often returns to the scale of the old one.
    """
    exponent = _common_exponent(ctx, operands, scale)
    scale = scale * Scale(exponent)
    return [align(ctx, i, x, scale, dtype) for i, x in operands.items()], exponent


def _common_exponent(ctx: RuleContext, operands: dict[int, ScaledArray], scale: Scale) -> int:
    sizes: dict[int, tuple[int, bool]] = {}
    for i, x in operands.items():
        number = ctx.inputs[i].constant
        ratio = x.scale / scale
        if not can_defer(x.dtype) or not (ratio.is_static or number is not None):
            return 0
        if number is not None:
            if number == 0 or not np.isfinite(number):
                continue
            distance = pow2.floor_exponent(number) - scale.exponent
            if not scale.is_static or abs(distance) > _CONSTANT_ROOM:  # it may saturate
                return 0
        elif not ratio.is_zero:
            mantissa, own = (x.mantissa, x.exponent) if isinstance(x, Deferred) else (1, 0)
            given = not ctx.inputs[i].computed
            if mantissa != 1 and not given:  # it is multiplied anyhow
                continue
            exponent = int(ratio.exponent) + own
            size, some_given = sizes.get(exponent, (0, False))
            sizes[exponent] = size + x.size, some_given or given
    best = max(sizes, key=lambda e: (*sizes[e], -abs(e)), default=0)
    # More than half would be too much for a matmul of two such arrays: there, it costs a kernel.
    return best if abs(best) <= LARGEST_EXPONENT // 2 else 0


def align_constant(number: Any, dtype: Any, scale: Scale) -> Any:
    """Return a non-zero finite constant divided by a scale, as a 0-d value (or keep-dims)."""
    finfo = jnp.finfo(dtype)
    largest = float(finfo.max)
    smallest = float(
        finfo.smallest_subnormal if finfo.bits == 16 and finfo.nmant == 10 else finfo.tiny
    )
    size, sign = abs(float(number)), math.copysign(1.0, float(number))
    if scale.is_static:
        inverse = (scale**-1).value
        value = np.asarray(sign * min(max(size * inverse, smallest), largest)).astype(dtype)[()]
        return value if inverse == 1 else _compat.pin_constant(value)
    mantissa, exponent = pow2.split_constant(size)
    ratio = (Scale(exponent) / scale).array
    compute = dtypes.compute_dtype(dtype)
    ratio = ratio.astype(compute)
    value = lax.mul(ratio, np.asarray(mantissa, compute))
    value = lax.clamp(np.asarray(smallest, compute), value, np.asarray(largest, compute))
    value = lax.neg(value) if sign < 0 else value
    return lax.convert_element_type(value, dtype)


def same_dtype(*arrays: Any) -> list[Any]:
    """Bring aligned operands to one dtype: some were widened to float32, some were not."""
    if len({jnp.dtype(a.dtype) for a in arrays}) == 1:
        return list(arrays)
    wide = dtypes.compute_dtype(arrays[0].dtype)
    return [lax.convert_element_type(a, wide) for a in arrays]


def promote(value: Value, table: ScaleTable, full: bool) -> ScaledArray:
    """Make a plain floating value scaled: a constant or scalar splits, an array gets scale 1."""
    if value.is_scaled:
        return value.array
    if value.uniform is None:
        return ScaledArray(value.plain(), ONE)
    number = value.constant
    if number is None:
        if jnp.issubdtype(value.dtype, jnp.complexfloating):
            data, scale = value.uniform, ONE
        else:
            data, scale = table.split(value.uniform)
    elif number == 0:
        data, scale = number, ZERO
    elif number.dtype.kind == "c" or not np.isfinite(np.float64(number)):
        data, scale = number, ONE
    else:
        mantissa, exponent = pow2.split_constant(number)
        if abs(exponent) > _LARGEST_CONSTANT and jnp.finfo(value.dtype).maxexp > pow2.MAX_EXPONENT:
            mantissa, exponent = float(number), 0
        data, scale = np.asarray(mantissa, value.dtype)[()], Scale(exponent)
    if full and value.shape:
        data = lax.broadcast(jnp.asarray(data), value.shape)
    return ScaledArray(data, scale)
