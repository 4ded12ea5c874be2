"""Convolutions with separate formats for the two passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.nn.fp8_dot import DotGeneral
from jax_scalify.ops.cast import reduce_precision_on_backward, reduce_precision_on_forward
from jax_scalify.ops.scaling import cast


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    **formats: Any,
) -> jax.Array:
    """Convolve like `jax.lax.conv_general_dilated`, in one format forward and another backward.

    The operands and the cotangent are rounded to the values of their formats and convolved in the
    operands' dtype: XLA has no convolution of FP8 arrays. Fits the `conv_general_dilated=` argument
    of Flax's convolutions.

    Args:
        lhs: images, in the layout that `dimension_numbers` says.
        rhs: kernel.
        window_strides: as in `jax.lax.conv_general_dilated`, as all up to `precision`.
        padding: likewise.
        lhs_dilation: likewise.
        rhs_dilation: likewise.
        dimension_numbers: likewise.
        feature_group_count: likewise.
        batch_group_count: likewise.
        precision: likewise.
        preferred_element_type: dtype of the result; by default that of the operands' promotion.
        out_sharding: constraint on the result.
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype` of `dot_general`.

    Raises:
        TypeError: as `dot_general`.

    Example:
        >>> x = jnp.full((1, 1, 4), 1.1)
        >>> print(conv_general_dilated(x, x, (1,), "VALID"))
        [[[5.0625]]]
    """
    dtypes.as_floating(lhs.dtype, "lhs", real=True)
    dtypes.as_floating(rhs.dtype, "rhs", real=True)
    dot = DotGeneral(**formats)
    common = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = (
        reduce_precision_on_forward(x.astype(common), dtype)
        for x, dtype in zip((lhs, rhs), dot.forward_dtype, strict=True)
    )
    out = lax.conv_general_dilated(
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
        dot.accumulation_dtype,
    )
    out = cast(out, preferred_element_type or common)
    if out_sharding is not None:
        out = lax.with_sharding_constraint(out, out_sharding)
    return reduce_precision_on_backward(out, dot.backward_dtype)
