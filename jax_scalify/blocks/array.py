"""`BlockScaledArray`: an array as it is stored in a block format."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.blocks import rounding
from jax_scalify.blocks.formats import BlockFormat


@dataclasses.dataclass(frozen=True, eq=False)
class BlockScaledArray:
    """An array in 8 or 4 bits an element: `data * block_scales * scale`, a block sharing a scale.

    It is a class of its own beside `ScaledArray`, since a block scale is no scale that functions
    propagate: it is read from the data, as an exponent of a float is, and only means something
    together with the elements. So this is what weights are stored as, for inference, adapters and
    checkpoints. Nothing computes with it: `jnp` functions and those of `jsa.nn` take its values,
    and `scalify` takes it for a `ScaledArray` of them with the same `scale`. Make one with
    `jsa.as_scaled_array(x, block="mxfp4")`.

    Attributes:
        data: elements, in the format's dtype and the array's shape.
        block_scales: in the format's scale dtype; along an axis of n elements in blocks of b there
            are `ceil(n / b)`.
        scale: power of two of the whole: a Python float is static, an array of shape `()` (or with
            the rank of `data` and dims 1 or equal) is a leaf.
        format: a `jsa.BlockFormat`.
        block_shape: of the last axes, as `(32, 1)` or `(32, 32)`; others have blocks of 1, so that
            `vmap` and `scan` may take leading axes away.
        dtype: of the values.

    Example:
        >>> w = jsa.as_scaled_array(jnp.full((64, 3), 0.3), block="mxfp4")
        >>> print(w.data.dtype, w.block_scales.shape, w.block_shape, w.nbytes)
        float4_e2m1fn (2, 3) (32, 1) 102
        >>> print((jnp.ones(64) @ w)[0])
        16.0
    """

    data: Any
    block_scales: Any
    scale: Any
    format: BlockFormat
    block_shape: tuple[int, ...]
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Rank of the array."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the values."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of elements and block scales, two elements of 4 bits in a byte.

        So much a checkpoint has, and memory where XLA packs them, as JAX 0.12 does.
        """
        elements = self.size if self.format.is_fp8 else -(-self.size // 2)
        return elements + math.prod(self.block_scales.shape)

    @property
    def is_static(self) -> bool:
        """Whether the scale of the whole is known while tracing."""
        return type(self.scale) in (float, int)

    @property
    def T(self) -> BlockScaledArray:  # noqa: N802  (NumPy's name)
        """The transpose of a matrix, exactly; square blocks lie as they did."""
        if self.ndim != 2 or len(self.block_shape) != 2:
            raise ValueError(f"`T` is of matrices, got shape {self.shape}.")
        scale = self.scale.T if getattr(self.scale, "ndim", 0) else self.scale
        fields = dict(scale=scale, block_shape=self.block_shape[::-1])
        return dataclasses.replace(
            self, data=self.data.T, block_scales=self.block_scales.T, **fields
        )

    def to_scaled_array(self) -> ScaledArray:
        """Return elements times block scales, in `dtype`, with the scale of the whole."""
        sizes = self._block_sizes
        values = _values(self.data, self.block_scales, self.format, sizes, jnp.dtype(self.dtype))
        return ScaledArray(values, self.scale)

    def to_array(self, dtype: Any = None) -> jax.Array:
        """Return the values, multiplied in float32 and cast once to `dtype`."""
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        wide = dataclasses.replace(self, dtype=jnp.dtype(jnp.float32)).to_scaled_array()
        if not dtypes.is_narrow(dtype):
            return wide.to_array(dtype)
        return rounding.cast_dequantised(wide.to_array(jnp.float32), dtype)

    def __jax_array__(self) -> jax.Array:
        return self.to_array()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "A BlockScaledArray has no buffer of its values: `copy` cannot be False."
            )
        return np.asarray(self.to_array(dtype))

    def block_until_ready(self) -> BlockScaledArray:
        """Wait until it is computed, and return the array."""
        return jax.block_until_ready(self)

    @property
    def _block_sizes(self) -> tuple[int, ...]:
        """The size of a block along each axis."""
        return (1,) * (self.ndim - len(self.block_shape)) + self.block_shape

    def __repr__(self) -> str:
        parts = f"data={self.data!r}, block_scales={self.block_scales!r}, scale={self.scale!r}"
        return f"BlockScaledArray({self.format.name}, {self.block_shape}, {parts})"


def is_block_scaled(leaf: Any) -> bool:
    """Return whether a leaf is a `BlockScaledArray`."""
    return isinstance(leaf, BlockScaledArray)


def is_array_of_ours(leaf: Any) -> bool:
    """Return whether a leaf is a `ScaledArray` or a `BlockScaledArray`."""
    return isinstance(leaf, (ScaledArray, BlockScaledArray))


def block_axis(shape: Sequence[int], axis: int | None) -> int:
    """The axis that blocks lie along, counted from the end: by default that of a kernel's inputs.

    Raises:
        ValueError: for an axis that the array does not have.
    """
    if axis is None:
        return -2 if len(shape) > 1 else -1
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"`block` has the axis {axis}, the leaf has shape {tuple(shape)}.")
    return axis % len(shape) - len(shape)


def block_scaled_array(
    data: Any,
    format: BlockFormat,
    *,
    axis: int | None = None,
    scale: Any = 1.0,
    dtype: Any = None,
    key: Any = None,
) -> BlockScaledArray:
    """Quantise an array `data * scale`.

    Args:
        data: array of a real floating dtype, of rank 1 or more.
        format: the format; with square blocks they lie along the last two axes.
        axis: that blocks lie along; by default the one before the last.
        scale: power of two, static or dynamic. Block scales are of `data`.
        dtype: of the values; by default that of the data.
        key: of `jax.random`, for stochastic rounding.
    """
    data = jnp.asarray(data)
    if not data.ndim:
        raise ValueError("A block format needs an array of rank 1 or more, got a scalar.")
    place = block_axis(data.shape, axis)
    size = format.block_size
    if format.square and data.ndim > 1:
        block_shape = (size, size)
    else:
        block_shape = (size, *(1,) * (-place - 1))
        block_shape = block_shape if data.ndim == 1 or len(block_shape) > 1 else (1, size)
    sizes = (1,) * (data.ndim - len(block_shape)) + block_shape
    bits = None
    if key is not None:
        padded = [-(-n // b) * b for n, b in zip(data.shape, sizes, strict=True)]
        bits = jax.random.bits(key, tuple(padded), jnp.uint32)
    elements, scales = _quantised(data, format, sizes, bits)
    dtype = jnp.dtype(data.dtype if dtype is None else dtype)
    return BlockScaledArray(elements, scales, scale, format, block_shape, dtype)


@functools.partial(jax.jit, static_argnames=("format", "sizes"), inline=True)
def _quantised(data: Any, format: BlockFormat, sizes: tuple[int, ...], bits: Any) -> Any:
    blocks = rounding.split_into_blocks(data.astype(jnp.float32), sizes)
    bits = None if bits is None else bits.reshape(blocks.shape)
    elements, codes = rounding.round_blocks(blocks, format, bits)
    elements = rounding.join_blocks(elements, data.shape).astype(format.dtype)
    scales = lax.bitcast_convert_type(codes.reshape(codes.shape[::2]), format.scale_dtype)
    return elements, scales


@functools.partial(jax.jit, static_argnames=("format", "sizes", "dtype"), inline=True)
def _values(
    data: Any, scales: Any, format: BlockFormat, sizes: tuple[int, ...], dtype: Any
) -> jax.Array:
    elements = rounding.split_into_blocks(data.astype(jnp.float32), sizes)
    codes = lax.bitcast_convert_type(scales, jnp.uint8)
    codes = codes.reshape([n for length in codes.shape for n in (length, 1)])
    values = rounding.times_scales(elements, codes, format)
    return rounding.cast_dequantised(rounding.join_blocks(values, data.shape), dtype)


def _aux(array: BlockScaledArray) -> tuple:
    scale = float(array.scale) if array.is_static else None
    return array.format, array.block_shape, str(jnp.dtype(array.dtype)), scale


def _flatten_with_keys(array: BlockScaledArray) -> tuple[tuple, tuple]:
    names = ("data", "block_scales", *(() if array.is_static else ("scale",)))
    return tuple((tree_util.GetAttrKey(n), getattr(array, n)) for n in names), _aux(array)


def _flatten(array: BlockScaledArray) -> tuple[tuple, tuple]:
    children = (array.data, array.block_scales)
    return children if array.is_static else (*children, array.scale), _aux(array)


def _unflatten(aux: tuple, children: Iterable[Any]) -> BlockScaledArray:
    format, block_shape, dtype, static = aux
    data, scales, *dynamic = children
    scale = dynamic[0] if static is None else static
    return BlockScaledArray(data, scales, scale, format, block_shape, jnp.dtype(dtype))


tree_util.register_pytree_with_keys(BlockScaledArray, _flatten_with_keys, _unflatten, _flatten)
