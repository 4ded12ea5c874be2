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
from jax_scalify.multiplying import moved, multiply, within_range
from jax_scalify.registry import RuleContext
from jax_scalify.scale_table import ScaleTable
from jax_scalify.values import Value, filled

# A sum of n non-negative terms grows like n. For narrow data the factor stops at 2**10: beyond it
# one confident logit in a softmax over 50,257 classes would give 65536 * 2**-16.
NONNEGATIVE_LIMIT = 10
# A batch of unknown size in an exported function is expected to be about this large.
_SYMBOLIC_COUNT = 256
# In a wide dtype a constant's data may reach 2**40: there is room for its cube.
_CONSTANT_ROOM = 40
# A constant beyond 2**64 may be a mask: what is more stays in data that can hold it, so that what
# it meets is not flushed to 0 at its scale. A power of two dodges an overflow, as in `hypot`.
_LARGEST_CONSTANT = 64
# What a product in float32 may put into its data, if the values are ordinary and the scales are
# not, and what the multiplication by one power of two can bring back.
_LARGEST_PRODUCT = 108
# A power has no partner that makes up for it: the square of a gradient of 1e-8 at a scale of 2**40,
# as in a second moment, would be 2**-132 in float32. The scale of a square is within 2**+-16 first.
_LARGEST_POWER = 64


def factors_in_range(
    ctx: RuleContext, *operands: ScaledArray, powers: Sequence[int] | None = None
) -> list[ScaledArray]:
    """Bring factors nearer to their values where their product might leave the range of float32.

    The values may be ordinary where the scales are not: 1 is `2**-40 * 2**40`, and the data of its
    fourth power would be `2**-160`. Narrow data cannot be so far from 1; but a constant among it
    may be nearly as large as it gets, as in `where(mask, x, 1)**2`.
    """
    powers = powers or (1,) * len(operands)
    if dtypes.has_short_range(ctx.out_dtype):
        return _with_constants_in_range(ctx, operands, powers)
    extents = [
        0 if ctx.inputs[i].constant is not None else abs(p) * x.scale.extent
        for i, (x, p) in enumerate(zip(operands, powers, strict=True))
    ]
    total = sum(map(abs, powers))
    if total < 2:
        return list(operands)
    share, limit = 2 * algebra.LARGEST_EXTENT // total, _LARGEST_PRODUCT
    is_power = all(v is ctx.eqn.invars[0] for v in ctx.eqn.invars[: len(operands)])
    # A cast to float16 has to find the scale without a limit: of a scalar scale it is known.
    followed = all(x.scale.factors and not x.scale.ndim for x in operands)
    if is_power and (followed or not ctx.table.narrow):
        share = _LARGEST_POWER // total**2
        limit = share * total
    if sum(extents) <= limit:
        return list(operands)
    return [
        within_range(x, share) if extent > share * abs(p) else x
        for x, extent, p in zip(operands, extents, powers, strict=True)
    ]


def _with_constants_in_range(
    ctx: RuleContext, operands: Sequence[ScaledArray], powers: Sequence[int]
) -> list[ScaledArray]:
    """Give constants that are multiplied with each other an equal share of the range."""
    constants = [v.facts.constant if p > 0 else None for v, p in zip(ctx.inputs, powers)]
    total = sum(p for c, p in zip(constants, powers) if c is not None)
    if total < 2:
        return list(operands)
    within = []
    for x, constant in zip(operands, constants, strict=True):
        if constant is not None:
            share = math.ceil(room(x.dtype).exponent / total)
            scale = algebra.join(x.scale, Scale(constant + share), narrow=True)
            x = ScaledArray(moved(x, x.scale / scale, x.dtype), scale)
        within.append(x)
    return within


def times(raw: Any, factor: Scale, scale: Scale, dtype: Any) -> ScaledArray:
    """Make an array with `data = raw * factor`, cast once; if the factor can wait, it does."""
    if factor.is_static and not factor.is_zero and can_defer(dtype):
        return defer(dtypes.cast(raw, dtype), factor.exponent, scale)
    return ScaledArray(multiply(raw, factor, dtype), scale)


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
    """The factor by which a sum of `count` terms of unit RMS outgrows one of them.

    A symbolic count, as that of an exported function's batch, counts as 256.
    """
    count = count if isinstance(count, int) else _SYMBOLIC_COUNT
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
    exponent = pow2.floor_exponent(number) + room(dtype).exponent
    return Scale(max(-pow2.MAX_EXPONENT, exponent))


def room(dtype: Any) -> Scale:
    """How much smaller than a number its scale may be: three octaves below the largest data."""
    return Scale(max(4 - jnp.finfo(dtype).maxexp, -_CONSTANT_ROOM))


def constant_scale(number: Any, dtype: Any) -> Scale:
    """The scale of a constant beside constants: at most 1, or a mask would ask for 2**127.

    A mask keeps its value: what it is added to, later, may itself be large.
    """
    floor = constant_floor(number, dtype)
    return Scale(max(floor.exponent, min(0, pow2.split_constant(number)[1])))


def votes(
    ctx: RuleContext, operands: dict[int, ScaledArray], *, additive: bool = False
) -> list[Scale]:
    """What each operand, by its index, has to say about the scale of a result that they share.

    Arrays vote with their scales. A constant or a traced number votes, in a sum, with its own
    power of two; elsewhere with the smallest scale at which it can be written. 0, inf, nan and
    empty arrays do not vote.
    """
    arrays, numbers, constants = [], [], []
    for i, x in operands.items():
        number = ctx.inputs[i].constant
        if number is not None and number.dtype.kind != "c":
            if number != 0 and np.isfinite(np.float64(number)):
                constants.append((number, x))
        elif ctx.inputs[i].uniform is not None and not ctx.inputs[i].is_scaled:
            numbers.append(x)
        elif not x.scale.is_zero and ctx.in_avals[i].size:
            arrays.append(x.scale)
    if additive or not arrays:
        arrays += [x.scale for x in numbers]
    else:
        arrays += [x.scale * room(x.dtype) for x in numbers]
    if additive:
        return arrays + [x.scale for _, x in constants]
    ask = constant_floor if arrays else constant_scale
    return arrays + [ask(number, x.dtype) for number, x in constants]


def shared_scale(
    ctx: RuleContext, operands: dict[int, ScaledArray], *, additive: bool = False
) -> Scale:
    """Return the largest vote; without votes 0 if every operand is 0, else 1.

    A vote that may be 0 at run time counts as 1 there, if an operand is infinite.
    """
    scales = votes(ctx, operands, additive=additive)
    numbers = [ctx.inputs[i].constant for i in operands]
    if not scales:
        return ZERO if all(n is None or n == 0 for n in numbers) else Scale(0)
    narrow = any(dtypes.has_short_range(x.dtype) for x in operands.values())
    joined = algebra.join(*scales, narrow=narrow)
    return joined.or_one() if any(n is not None and not np.isfinite(n) for n in numbers) else joined


def align(ctx: RuleContext, index: int, x: ScaledArray, scale: Scale, dtype: Any = None) -> Any:
    """Return the data of an operand at another scale, `data * (x.scale / scale)`.

    In at least float32 unless the ratio is 1 or a `dtype` is given. A constant saturates, and one
    that is not zero does not become zero.
    """
    number = ctx.inputs[index].constant
    if number is None or number.dtype.kind == "c":
        if x.scale.is_zero:
            return x.data if dtype is None else dtypes.cast(x.data, dtype)
        return moved(x, algebra.alignment(x.scale, scale), dtype, trusted=math.inf)
    if number == 0 or not np.isfinite(np.float64(number)):
        return x.data if dtype is None else dtypes.cast(x.data, dtype)
    constant = align_constant(number, x.dtype, scale)
    return constant if dtype is None else dtypes.cast(constant, dtype)


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
        if abs(mantissa) != 1 and not dtypes.has_short_range(value.dtype):
            exponent = max(-_LARGEST_CONSTANT, min(_LARGEST_CONSTANT, exponent))
        mantissa = math.ldexp(float(number), -exponent)
        data, scale = np.asarray(mantissa, value.dtype)[()], Scale(exponent)
    if full and value.shape:
        data = filled(data, value)
    return ScaledArray(data, scale)
