"""The scales of constants."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.filling import filled
from jax_scalify.base.pins import pin_constant
from jax_scalify.interpreter.operand import Facts, Operand
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import ONE, ZERO, Scale
from jax_scalify.scales.table import ScaleTable

# In a wide dtype, the data of a constant is at most 2**40: float32 holds the cube of such data.
CONSTANT_ROOM = 40
# The largest exponent of a wide constant's scale. A larger constant may be a mask value, at whose
# scale other operands would underflow, so the rest goes into its data. Powers of two are exempt:
# programs multiply by large powers of two to avoid overflow, as `hypot` does.
_LARGEST_SCALE = 64
# Elements of captured arrays that are at least as large as this are mask values (-1e4, -1e9,
# finfo.min), as they are added to the scores of a softmax.
_MASK = 9_999.0


def captured(const: Any) -> Value:
    """Return the value of a captured constant. Its scale is the RMS of its ordinary elements.

    0, inf, nan and mask values are not ordinary. A mask value may saturate, but stays beyond
    ordinary elements.
    """
    if _compat.is_traced(const) or not dtypes.is_scalable(const.dtype) or not const.shape:
        return Plain.of(const)
    values = np.asarray(const)
    # A captured `np.full((8, 8), 0.5)` is the number 0.5.
    if values.size and np.all(values == values.flat[0]):
        return Plain.filled(values, values.flat[0])
    finfo = jnp.finfo(values.dtype)
    wide = values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
    sizes = np.abs(wide)
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    ordinary = sizes[sizes < min(_MASK, float(finfo.max))]
    scale, constant = ONE, None
    if ordinary.size:
        # The largest element is divided out, because the square of 1e-200 is 0 in float64.
        rms = float(ordinary.max()) * float(np.sqrt(np.mean(np.square(ordinary / ordinary.max()))))
        scale = Scale(pow2.floor_exponent(rms)).bounded()
    if sizes.size > ordinary.size:
        # `np.where(causal, 0, -1e4)` has no ordinary element. In float16 its scale is 2,
        # which holds -1e4 with three octaves to spare.
        largest = float(sizes.max())
        mask = constant_scale(largest, values.dtype)
        scale = algebra.join(scale, mask) if ordinary.size else mask
        if largest < float(finfo.max):  # `finfo.min` may saturate, so no scale needs room for it
            constant = Scale(math.log2(largest))
    data = wide / scale.value
    if not np.iscomplexobj(data):
        # At a scale below 1, `finfo.min` would become infinite data.
        low, high = float(finfo.min), float(finfo.max)
        data = np.where(np.isfinite(data), np.clip(data, low, high), data)
    data = jnp.asarray(data.astype(values.dtype))
    nonneg = not np.iscomplexobj(values) and bool(np.all(values >= 0))
    return Operand(data, scale, facts=Facts(nonneg=nonneg, constant=constant))


def constant_floor(number: Any, dtype: Any) -> Scale:
    """Return the smallest scale at which a constant is finite with three octaves to spare.

    In float16, 3.0 gives 2**-11 and -1e4 gives 2**1. In wide dtypes the scale is at most 1, because
    the data can be the constant itself. `finfo.min` and `finfo.max` are mask values. They may
    saturate, as long as their values stay beyond +-2**10.
    """
    finfo = jnp.finfo(dtype)
    if abs(float(number)) >= float(finfo.max):
        return Scale(max(-pow2.MAX_EXPONENT, 10 - finfo.maxexp))
    exponent = pow2.floor_exponent(number) + room(dtype).exponent
    exponent = exponent if dtypes.is_narrow(dtype) else min(0, exponent)
    return Scale(max(-pow2.MAX_EXPONENT, exponent))


def room(dtype: Any) -> Scale:
    """Return the smallest ratio of a scale to a number at this scale: 2**-12 in float16.

    The number's data is then at least three octaves below the largest number of the dtype.
    """
    return Scale(max(4 - jnp.finfo(dtype).maxexp, -CONSTANT_ROOM))


def constant_scale(number: Any, dtype: Any) -> Scale:
    """Return the scale of a constant that is joined with constants only.

    The scale is at most 1, unless a narrow dtype needs a larger scale to hold the constant. The
    constant's own power of two would be too large: 2**127 for the float32 mask value finfo.min. At
    the scale 1 a mask value is kept, because it may later be added to large values.

    The scale of 1/2 is 1 too. The derivative of `max(x, 0)` is `where(x > 0, 1, tie)` with
    `tie = where(x == 0, 1/2, 0)`. It has the scale of `tie`, and cotangents should keep theirs.
    """
    floor = constant_floor(number, dtype)
    exponent = pow2.split_constant(number)[1]
    return Scale(max(floor.exponent, 0 if exponent >= -1 else exponent))


def align_constant(number: Any, dtype: Any, scale: Scale) -> Any:
    """Return a nonzero finite constant divided by a scale, as a 0-d value or in the scale's shape.

    The result saturates at the largest number of the dtype and at its smallest normal number (in
    float16, its smallest subnormal number).
    """
    finfo = jnp.finfo(dtype)
    largest = float(finfo.max)
    smallest = float(finfo.smallest_subnormal if dtype == jnp.float16 else finfo.tiny)
    size, sign = abs(float(number)), math.copysign(1.0, float(number))
    if scale.is_static:
        inverse = (scale**-1).value
        value = np.asarray(sign * min(max(size * inverse, smallest), largest)).astype(dtype)[()]
        # The data of the 1 in `where(m, x, 1)` differs in layers of different scales. If it is an
        # operand, these layers share one kernel.
        return value if inverse == 1 else pin_constant(value)
    # At a dynamic scale, the data of 3 is `1.5 * (2**1 / scale)`.
    mantissa, exponent = pow2.split_constant(size)
    ratio = (Scale(exponent) / scale).array
    compute = dtypes.compute_dtype(dtype)
    ratio = ratio.astype(compute)
    value = lax.mul(ratio, np.asarray(mantissa, compute))
    value = lax.clamp(np.asarray(smallest, compute), value, np.asarray(largest, compute))
    value = lax.neg(value) if sign < 0 else value
    return lax.convert_element_type(value, dtype)


def promote(value: Value, table: ScaleTable, full: bool) -> Operand:
    """Return a floating value as an operand. A number is split, and an array gets the scale 1.

    If `full`, a number is broadcast to an array of the value's shape.
    """
    if isinstance(value, Operand):
        return value
    if value.number is None:
        return Operand(value.array, ONE, facts=value.facts)
    # A wide number is a source with unit 1. Its scale is used only after a cast to a narrow dtype.
    wide, data, scale = not dtypes.is_narrow(value.dtype), value.number, ONE
    number = value.constant
    if number is None:
        if not jnp.issubdtype(value.dtype, jnp.complexfloating):
            data, scale = table.split(data)
    elif number == 0:
        scale = ZERO
    elif number.dtype.kind != "c" and np.isfinite(np.float64(number)):
        mantissa, exponent = pow2.split_constant(number)
        limit = _LARGEST_SCALE if wide and abs(mantissa) != 1 else pow2.MAX_EXPONENT
        data = np.asarray(mantissa, value.dtype)[()]
        scale = Scale(exponent).bounded(limit)
    data = value.number if wide else data
    data = filled(data, value) if full and value.shape else data
    unit = ONE if wide else scale
    return Operand(data, scale, unit=unit, number=value.number, facts=value.facts)
