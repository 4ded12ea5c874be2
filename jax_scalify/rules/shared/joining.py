"""Bring operands to one scale: votes choose the scale, and `align` brings the data to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes, pow2
from jax_scalify.base.filling import filled
from jax_scalify.interpreter.constants import align_constant, constant_floor, constant_scale, room
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.scales.algebra import ONE, ZERO, Scale, join
from jax_scalify.scales.multiplying import multiply


def votes(*operands: Operand, additive: bool = False) -> list[Scale]:
    """Return the votes of operands: the scales among which the largest is shared.

    An array votes with its scale. In a sum (`additive`), a constant or a traced number votes with
    its own power of two, so that `1 + x` is right for tiny `x`. Elsewhere it votes with the
    smallest scale at which it is finite with three octaves to spare: in float16, -1e4 votes 2**1,
    and 1 votes 2**-12. If all voters are constants, they vote with `constant_scale`. The constants
    0, inf and nan, and empty arrays, do not vote.
    """
    arrays, numbers, constants = _voters(operands)
    if additive:
        return [x.scale for x in (*arrays, *numbers, *constants)]
    own = [constant_scale(x.constant, x.dtype) for x in constants]
    if not arrays and not numbers:
        return own
    found = [x.scale for x in arrays]
    if arrays and constants and dtypes.is_wide(constants[0].dtype):
        found = [_unless_zero(join(*found), join(*own))]
    # In `jnp.where(m, x, lr)` the number may become data of about 2**12, so that small `x`
    # keeps its digits.
    found += [x.scale * room(x.dtype) if arrays else x.scale for x in numbers]
    return found + [constant_floor(x.constant, x.dtype) for x in constants]


def _unless_zero(scale: Scale, other: Scale) -> Scale:
    """Return `scale`, or `other` where it is 0 at run time.

    If `x` is zero, `where(x == 0, 1, x)` then has the scale of the constant 1. The constant's vote
    is much lower: in a wide dtype, data at this scale could be as large as 2**40, and the scale of
    a quotient by it would be wrong by the same factor. In narrow dtypes the vote is close enough.
    """
    if scale.is_nonzero or scale.is_static:
        return scale
    return scale.table.held(scale, other, pow2.MAX_EXPONENT)


def _voters(operands: Sequence[Operand]) -> tuple[list[Operand], list[Operand], list[Operand]]:
    """Return the operands that vote: arrays, traced numbers, and constants."""
    arrays, numbers, constants = [], [], []
    for x in operands:
        # A complex constant votes as a traced number does: `constant_floor` is for real numbers.
        if x.constant is not None and x.constant.dtype.kind != "c":
            if x.constant != 0 and np.isfinite(np.float64(x.constant)):
                constants.append(x)
        elif x.number is not None:
            numbers.append(x)
        elif not x.scale.is_zero and x.size:
            arrays.append(x)
    return arrays, numbers, constants


def shared_scale(*operands: Operand, additive: bool = False) -> Scale:
    """Return the largest vote; without votes, 0 if every operand is 0, else 1.

    If an operand is infinite or nan, a scale that is 0 at run time counts as 1, because 0 * inf is
    nan.
    """
    scales = votes(*operands, additive=additive)
    numbers = [x.constant for x in operands]
    if not scales:
        return ZERO if all(n is None or n == 0 for n in numbers) else Scale(0)
    narrow = any(dtypes.is_narrow(x.dtype) for x in operands)
    joined = join(*scales, narrow=narrow)
    return joined.or_one() if any(n is not None and not np.isfinite(n) for n in numbers) else joined


def align(x: Operand, scale: Scale, dtype: Any = None) -> Any:
    """Return the data of an operand at another scale: `data * (x.scale / scale)`.

    The result is in at least float32, unless the ratio is 1 or `dtype` is given. A constant
    saturates, and a nonzero constant never becomes 0.
    """
    number = x.constant
    is_real = number is not None and number.dtype.kind != "c"
    if is_real and number != 0 and np.isfinite(np.float64(number)):
        return align_constant(number, x.dtype if dtype is None else dtype, scale)
    if is_real or x.scale.is_zero:
        return x.data if dtype is None else dtypes.cast(x.data, dtype)
    # A ratio to a larger scale may underflow to 0 without harm, so it is applied at once.
    return multiply(x.source, x.unit / scale, dtype, trusted=math.inf)


def same_dtype(*arrays: Any) -> list[Any]:
    """Bring aligned operands to one dtype. `align` widens some of them to float32."""
    if len({jnp.dtype(a.dtype) for a in arrays}) == 1:
        return list(arrays)
    wide = dtypes.compute_dtype(arrays[0].dtype)
    return [lax.convert_element_type(a, wide) for a in arrays]


def aligned(scale: Scale, *operands: Operand, dtype: Any = None) -> list[Any]:
    """Return the operands' arrays in one dtype: data at `scale`, or values if they are wide."""
    if not dtypes.is_narrow(operands[0].dtype):
        return [x.value for x in operands]
    return same_dtype(*(align(x, scale, dtype) for x in operands))


def at_shared_scale(
    ctx: RuleContext,
    operands: Sequence[Operand],
    scale: Scale,
    like: Any = None,
    grows: bool = False,
) -> list[Any]:
    """Return the operands' arrays in the shape of `like`: data at `scale`, or values if wide.

    By default operands keep their shapes; the data of a constant is filled.

    If `grows`, `scale` is below the largest vote. Data is then larger, and is returned in float32.
    """
    likes = operands if like is None else [like] * len(operands)
    if ctx.holds_values:
        return [filled(x.value, like) for x, like in zip(operands, likes, strict=True)]
    # Float32 operands are kept if the result is rounded later. A cast here would round twice.
    keeps = grows or ctx.stays_wide or any(x.is_widened for x in operands)
    data = aligned(scale, *operands, dtype=None if keeps else ctx.out_dtype)
    return [filled(d, like) for d, like in zip(data, likes, strict=True)]


def scale_for(operands: Sequence[Operand], factor: Scale = ONE) -> Scale:
    """Return the largest vote times `factor`, or more if a constant does not fit otherwise."""
    scale = shared_scale(*operands) * factor
    if factor.exponent >= 0:
        return scale
    constants = [x for x in operands if x.constant and np.isfinite(x.constant)]
    return join(scale, *(constant_floor(abs(x.constant), x.dtype) for x in constants))
