"""Multiply arrays by scales, in at least float32, without leaving the range of float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.filling import filled
from jax_scalify.base.pins import pin_constant
from jax_scalify.scales.algebra import Scale


def multiply(
    data: Any, factor: Scale, dtype: Any = None, *, trusted: float = pow2.MAX_EXPONENT
) -> Any:
    """Return `data * factor`. A factor of 1 emits no operation.

    The product is computed in at least float32, or in bfloat16 for bfloat16 data. A factor that
    float32 may not hold is applied in several multiplications: `2**-20 * 2**140` is computed as
    `2**-20 * 2**126 * 2**14`.

    Args:
        data: the array.
        factor: the scale to multiply by.
        dtype: the dtype of the result; by default the dtype of the computation.
        trusted: the largest span of a dynamic factor that is applied in one multiplication. With
            `inf` the factor is never split. This is for ratios to a larger scale, which may
            underflow to 0 without harm.
    """
    limit = pow2.MAX_EXPONENT if factor.is_static else trusted
    while factor.span > limit and not factor.is_zero:
        within = factor.bounded()
        data, factor = _multiply(data, within), factor / within
        # XLA would merge two constant factors into one, which may be infinite.
        data = _compat.kept_apart(data) if within.is_static else data
        # The span adds up the extents of all factors, so that of a dynamic rest is not smaller, and
        # the loop would not end.
        limit = limit if factor.is_static else np.inf
    data = data if factor.is_one else _multiply(data, factor)
    return data if dtype is None else dtypes.cast(data, dtype)


def _multiply(data: Any, factor: Scale) -> Any:
    # bfloat16 has the range of float32, and its products with powers of two are exact too.
    is_bfloat16 = data.dtype == jnp.bfloat16
    compute = data.dtype if is_bfloat16 else dtypes.compute_dtype(data.dtype)
    if factor.is_static:
        number = np.asarray(factor.value).astype(dtypes.real_dtype(compute))
        number = pin_constant(number) if np.ndim(data) else number
    else:
        number = factor.array.astype(dtypes.real_dtype(compute))
    data = lax.convert_element_type(data, compute)
    if number.ndim and number.shape != data.shape:  # both may have dims of size 1
        shape = jnp.broadcast_shapes(data.shape, number.shape)
        if data.shape == shape:
            number = filled(number, jax.typeof(data))
        else:
            data, number = jnp.broadcast_arrays(data, number)
    if jnp.issubdtype(compute, jnp.complexfloating):
        return dtypes.times(data, number)
    return lax.mul(_compat.for_partial_sums(number, data), data)
