"""Constants: computed while tracing, and the scale that each gets."""

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

# In a wide dtype a constant's data may reach 2**40: there is room for its cube.
CONSTANT_ROOM = 40
# A constant beyond 2**64 may be a mask: what is more stays in data that can hold it, so that what
# it meets is not flushed to 0 at its scale. A power of two dodges an overflow, as in `hypot`.
_LARGEST_SCALE = 64
# A captured constant as large as this is a mask (-1e4, -1e9, finfo.min) and not an ordinary value.
_MASK = 9_999.0
# How NumPy computes what XLA would be asked to compile for two numbers.
_IN_NUMPY = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "square": np.square,
    "sqrt": np.sqrt,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "select_n": lambda which, *cases: cases[int(which)],
}


def fold_constants(eqn: Any, constants: list[Any]) -> Any:
    """Evaluate an equation of NumPy scalars in NumPy; None if only XLA can.

    What float16 does not hold, as `2**24` or `2**-20`, is a number of float32.
    """
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    kinds = {np.dtype(c.dtype).kind for c in constants}
    if dtype == np.float16 or any(c.dtype != v.aval.dtype for c, v in zip(constants, eqn.invars)):
        constants = [np.float64(c) if c.dtype.kind == "f" else c for c in constants]
    with np.errstate(all="ignore"):
        if name == "convert_element_type":
            if not kinds <= set("biuf") or np.dtype(dtype).kind != "f":
                return None
            narrows = dtype == np.float16
            return _held(np.float64(constants[0]), dtype) if narrows else constants[0].astype(dtype)
        if name not in _IN_NUMPY or (name == "div" and kinds != {"f"}):
            return None
        return _held(_IN_NUMPY[name](*constants), dtype)


def _held(number: Any, dtype: Any) -> Any:
    """A number in a dtype, or in float32; None if it is of another kind."""
    if number.dtype == dtype:
        return number
    if number.dtype.kind != np.dtype(dtype).kind:
        return None
    size, finfo = abs(np.float64(number)), np.finfo(dtype)
    holds = size == 0 or not size < finfo.tiny and (not size > finfo.max or np.isinf(size))
    return number.astype(dtype if holds else np.float32)


def captured(const: Any) -> Value:
    """A captured constant has known values: its scale is its RMS over ordinary values.

    Not ordinary are 0, inf, nan and masks. A mask saturates, beyond every ordinary value.
    """
    if _compat.is_traced(const) or not dtypes.is_scalable(const.dtype) or not const.shape:
        return Plain.of(const)
    values = np.asarray(const)
    if values.size and np.all(values == values.flat[0]):
        return Plain.filled(values, values.flat[0])
    finfo = jnp.finfo(values.dtype)
    wide = values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
    sizes = np.abs(wide)
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    ordinary = sizes[sizes < min(_MASK, float(finfo.max))]
    scale = algebra.ONE
    if ordinary.size:
        rms = float(ordinary.max()) * float(np.sqrt(np.mean(np.square(ordinary / ordinary.max()))))
        limit = pow2.MAX_EXPONENT
        scale = Scale(max(-limit, min(limit, pow2.floor_exponent(rms))))
    if sizes.size > ordinary.size:
        mask = constant_scale(sizes.max(), values.dtype)
        scale = algebra.join(scale, mask) if ordinary.size else mask
    data = wide / scale.value
    if not np.iscomplexobj(data):
        low, high = float(finfo.min), float(finfo.max)
        data = np.where(np.isfinite(data), np.clip(data, low, high), data)
    data = jnp.asarray(data.astype(values.dtype))
    nonneg = not np.iscomplexobj(values) and bool(np.all(values >= 0))
    masked = sizes.size > ordinary.size and sizes.max() < float(finfo.max)
    constant = math.log2(sizes.max()) if masked else None
    return Operand(data, scale, facts=Facts(nonneg=nonneg, constant=constant))


def constant_floor(number: Any, dtype: Any) -> Scale:
    """The smallest scale at which a constant is finite with three octaves to spare.

    At a scale of 1, a wide dtype's data is the constant as it is: it does not ask for more.
    `finfo.min` and `finfo.max` are masks: they may saturate as long as they stay beyond 2**10.
    """
    finfo = jnp.finfo(dtype)
    if abs(float(number)) >= float(finfo.max):
        return Scale(max(-pow2.MAX_EXPONENT, 10 - finfo.maxexp))
    exponent = pow2.floor_exponent(number) + room(dtype).exponent
    exponent = exponent if dtypes.has_short_range(dtype) else min(0, exponent)
    return Scale(max(-pow2.MAX_EXPONENT, exponent))


def room(dtype: Any) -> Scale:
    """How much smaller than a number its scale may be: three octaves below the largest data."""
    return Scale(max(4 - jnp.finfo(dtype).maxexp, -CONSTANT_ROOM))


def constant_scale(number: Any, dtype: Any) -> Scale:
    """The scale of a constant beside constants: at most 1, or a mask would ask for 2**127.

    A mask keeps its value: what it is added to, later, may itself be large.
    """
    floor = constant_floor(number, dtype)
    return Scale(max(floor.exponent, min(0, pow2.split_constant(number)[1])))


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
        return value if inverse == 1 else pin_constant(value)
    mantissa, exponent = pow2.split_constant(size)
    ratio = (Scale(exponent) / scale).array
    compute = dtypes.compute_dtype(dtype)
    ratio = ratio.astype(compute)
    value = lax.mul(ratio, np.asarray(mantissa, compute))
    value = lax.clamp(np.asarray(smallest, compute), value, np.asarray(largest, compute))
    value = lax.neg(value) if sign < 0 else value
    return lax.convert_element_type(value, dtype)


def promote(value: Value, table: ScaleTable, full: bool) -> Operand:
    """Make a plain floating value scaled: a constant or scalar splits, an array gets scale 1."""
    if isinstance(value, Operand):
        return value
    if value.number is None:
        return Operand(value.array, ONE, facts=value.facts)
    if not dtypes.has_short_range(value.dtype):
        return _wide_number(value, table, full)
    number = value.constant
    if number is None:
        data, scale = table.split(value.number)
    elif number == 0:
        data, scale = number, ZERO
    elif not np.isfinite(np.float64(number)):
        data, scale = number, ONE
    else:
        exponent = pow2.split_constant(number)[1]
        mantissa = math.ldexp(float(number), -exponent)
        data, scale = np.asarray(mantissa, value.dtype)[()], Scale(exponent)
    if full and value.shape:
        data = filled(data, value)
    return Operand(data, scale, number=value.number, facts=value.facts)


def _wide_number(value: Value, table: ScaleTable, full: bool) -> Operand:
    """A number of a wide dtype, and the scale that it would have in a narrow one."""
    number, scale = value.number, ONE
    if value.constant is None:
        is_complex = jnp.issubdtype(value.dtype, jnp.complexfloating)
        scale = ONE if is_complex else table.split(number)[1]
    elif number == 0:
        scale = ZERO
    elif number.dtype.kind != "c" and np.isfinite(np.float64(number)):
        mantissa, exponent = pow2.split_constant(number)
        limit = pow2.MAX_EXPONENT if abs(mantissa) == 1 else _LARGEST_SCALE
        scale = Scale(max(-limit, min(limit, exponent)))
    array = filled(number, value) if full and value.shape else number
    return Operand.of_value(array, scale, number=number, facts=value.facts)
