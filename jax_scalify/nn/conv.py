"""Convolutions with separate formats for the two passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.blocks.formats import BlockFormat
from jax_scalify.nn._patches import patches_of
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

    If windows do not overlap and nothing is padded, as with 1 x 1 kernels and patch embeddings, it
    is a matmul, `jsa.nn.dot_general`. Otherwise the operands and the cotangent are rounded to the
    values of their formats and convolved in the operands' dtype, because XLA has no convolution of
    FP8 arrays. It fits the `conv_general_dilated=` argument of Flax's convolutions.

    Args:
        lhs: images, in the layout of `dimension_numbers`.
        rhs: kernel.
        window_strides: as in `jax.lax.conv_general_dilated`.
        padding: as in `jax.lax.conv_general_dilated`.
        lhs_dilation: as in `jax.lax.conv_general_dilated`.
        rhs_dilation: as in `jax.lax.conv_general_dilated`.
        dimension_numbers: as in `jax.lax.conv_general_dilated`.
        feature_group_count: as in `jax.lax.conv_general_dilated`.
        batch_group_count: as in `jax.lax.conv_general_dilated`.
        precision: as in `jax.lax.conv_general_dilated`.
        preferred_element_type: dtype of the result; by default the operands' promoted dtype.
        out_sharding: sharding constraint on the result.
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype` of `dot_general`.

    Raises:
        TypeError: as `dot_general` raises it. If the convolution is not a matmul, also for block
            formats and pairs as `backward_dtype`.

    Example:
        >>> x = jnp.full((1, 1, 4), 1.1)
        >>> print(conv_general_dilated(x, x, (1,), "VALID"))
        [[[5.0625]]]
    """
    dtypes.as_floating(lhs.dtype, "lhs", real=True)
    dtypes.as_floating(rhs.dtype, "rhs", real=True)
    dot = DotGeneral(**formats)
    common = jnp.promote_types(lhs.dtype, rhs.dtype)
    ones = (1,) * len(window_strides)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    patches = patches_of(
        lhs.shape,
        rhs.shape,
        window_strides=window_strides,
        padding=_pads(lhs.shape, rhs.shape, numbers, window_strides, padding, rhs_dilation or ones),
        lhs_dilation=lhs_dilation or ones,
        rhs_dilation=rhs_dilation or ones,
        dimension_numbers=numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
    )
    if patches is not None:
        types = precision, preferred_element_type or common
        out = patches.arrange(dot(patches.cut(lhs), rhs, patches.dimension_numbers, *types))
        return out if out_sharding is None else lax.with_sharding_constraint(out, out_sharding)
    if dot.has_own_operands:
        raise TypeError(
            f"`backward_dtype` must be one dtype, got {dot.backward_dtype}: the gradients of this "
            "convolution, which is no matmul, take the operands of its forward pass."
        )
    blocks = [f for f in (*dot.forward_dtype, dot.backward_dtype) if isinstance(f, BlockFormat)]
    if blocks:
        raise TypeError(
            f"`conv_general_dilated` takes dtypes, got {blocks[0].name!r}: blocks lie along one "
            "contracted dim, and this convolution has several. Use float8_e4m3fn."
        )
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


def _pads(
    lhs: Sequence[int], rhs: Sequence[int], numbers: Any, strides: Any, padding: Any, dilation: Any
) -> Any:
    """Return the padding of each spatial dim, in pixels."""
    if not isinstance(padding, str):
        return padding
    images, windows = [lhs[a] for a in numbers[0][2:]], [rhs[a] for a in numbers[1][2:]]
    windows = [(k - 1) * d + 1 for k, d in zip(windows, dilation, strict=True)]
    return lax.padtype_to_pads(images, windows, strides, padding)
