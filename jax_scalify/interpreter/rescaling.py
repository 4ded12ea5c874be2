"""Round operands to narrow dtypes, and bring operands to other scales."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays.scaled_array import ScaledArray, align_scale
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.pins import pin_constant, store
from jax_scalify.interpreter.operand import Operand
from jax_scalify.primitives.overflow import unless_infinite
from jax_scalify.scales.algebra import Scale
from jax_scalify.scales.table import ScaleTable

# `x * _TO_INFINITY * 2**112` is infinite from 65,520 on, where a cast to float16 is infinite.
_TO_INFINITY = np.nextafter(np.float32(2**16 / 65520), np.float32(2))


def narrowed(data: Any, scale: Scale, dtype: Any) -> Any:
    """Cast float32 or float64 data to `dtype`. Data saturates if float16 holds the value itself.

    Data of `2**17` at the scale `2**-10` is the value 128, which float16 holds: the data saturates.
    At the scale 1 the value overflows float16 too, and the data becomes infinite.

    `data * factor` is infinite where the value is: see `unless_infinite`.
    """
    # At such scales, data that overflows is a value that overflows float16 too.
    is_large = scale.is_zero or (scale.is_static and scale.exponent >= 0)
    if data.dtype == dtype or dtype != jnp.float16 or is_large:
        return dtypes.cast(data, dtype)
    data = lax.convert_element_type(data, dtypes.compute_dtype(data.dtype))
    info = jnp.finfo(data.dtype)
    if scale.is_static:
        factor = store(pin_constant(np.ldexp(_TO_INFINITY, 112 + int(scale.exponent))))
    else:
        # A scale above 1 counts as 1: data within the range of float16 stays finite, as in a cast.
        factor = scale.table.request(scale * Scale(112), most=112)
        factor = lax.convert_element_type(factor, data.dtype) * _TO_INFINITY.astype(data.dtype)
    factor = lax.convert_element_type(factor, data.dtype)
    factor = factor if info.maxexp == 128 else factor * 2.0 ** (info.maxexp - 128)
    largest = np.asarray(jnp.finfo(dtype).max, data.dtype)
    within, overflow = lax.clamp(-largest, data, largest), data * factor
    return lax.convert_element_type(unless_infinite(within, overflow), dtype)


# If an array holds values, a wrong scale has no effect until the array is divided by it. So a scale
# that may be farther from 1 than `_FAR` octaves is first brought within `_NEAR` octaves.
_FAR, _NEAR = 84, 42


def within_range(x: Operand) -> Operand:
    """Clamp the scale to the range of scales. The data is multiplied by the rest."""
    if not x.scale.may_leave_range:
        return x
    is_value = not (dtypes.is_narrow(x.dtype) or x.holds_data)
    near = _NEAR if is_value and x.scale.span > _FAR else pow2.MAX_EXPONENT
    within = x.scale.bounded(near)
    return x if within == x.scale else at_scale(x, within)


def at_home(x: Operand) -> Operand:
    """Return a sum that replaces a leaf at the leaf's scale; return any other operand unchanged.

    This is done where a value leaves a function or a loop's body.
    """
    return x if not x.returns or x.home is None else x.with_scale(x.home)


def at_scale(x: Operand, scale: Scale) -> Operand:
    """Return a value at a scale that is not 0. Infinities in FP8 stay infinite."""
    before, moved = x.source, x.with_scale(scale)
    # A cast to float8_e5m2 saturates, but its own infinities must not. float8_e4m3fn has none.
    if not dtypes.is_fp8(before.dtype) or not np.isinf(np.array(np.inf, before.dtype)):
        return moved
    return x.as_pair(lax.select(lax.is_finite(before), moved.source, before), scale)


def as_operand(x: ScaledArray, table: ScaleTable) -> Operand:
    """Return a rule's result as an operand. A scale that is a number or array becomes a `Scale`.

    A scale of many factors becomes one atom: see `Scale.settled`.
    """
    if not isinstance(x, Operand):
        scale = x.scale
        if type(scale) in (float, int):
            scale = Scale.of(scale)
        elif not isinstance(scale, Scale):
            scale = table.atom(align_scale(scale, np.ndim(x.data)).astype(table.dtype))
        x = Operand(x.data, scale)
    scale = x.scale.settled()
    if scale is x.scale:
        return x
    return x.as_pair(x.source, scale) if x.holds_data else x.with_scale(scale)
