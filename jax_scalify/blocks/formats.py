"""The formats in which a block of elements shares a scale: MXFP8, MXFP4 and NVFP4."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_scalify.base import dtypes

E8M0 = np.dtype(jnp.float8_e8m0fnu)
E4M3 = np.dtype(jnp.float8_e4m3fn)
E5M2 = np.dtype(jnp.float8_e5m2)
E2M1 = np.dtype(jnp.float4_e2m1fn)

# Dtype of the elements, dtype of the block scales, elements that share one.
_FORMATS = {
    "mxfp8": (E4M3, E8M0, 32),
    "mxfp8_e5m2": (E5M2, E8M0, 32),
    "mxfp4": (E2M1, E8M0, 32),
    "nvfp4": (E2M1, E4M3, 16),
}
NAMES = tuple(_FORMATS)
_ROUNDINGS = ("nearest", "stochastic")


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """Elements of 8 or 4 bits, and for each block of 16 or 32 of them a scale of 8 bits.

    A block scale is chosen from the block's largest element, as the exponent of a floating-point
    number is. It is part of how numbers are written, and not of what is propagated: the scale of a
    `ScaledArray` stays outside. Where a format is taken its name will do: `forward_dtype="mxfp8"`.

    `value = element * block_scale * scale`, with the power of two `scale` of the whole array.

    Attributes:
        name: `"mxfp8"` (E4M3 elements, E8M0 scales, 32 a block), `"mxfp8_e5m2"`, `"mxfp4"` (E2M1,
            E8M0, 32) or `"nvfp4"` (E2M1, E4M3, 16).
        square: blocks of 32 x 32 (16 x 16) instead of 32 (16) in a row, so that the transpose of a
            matrix has the same values: for weights. In a matmul they lie along the last contracted
            and the last free dim.
        rounding: of the elements, to `"nearest"` even or `"stochastic"`.
        scale_rounding: of block scales. `"up"`: the smallest power of two with which no element
            saturates (the default of MX formats); `"floor"`: the OCP's rule, with which up to 1/8
            (1/4 of E2M1) of the largest element is cut off; `"nearest"` of E4M3 scales.
        tensor_scale: of `"nvfp4"`, whose block scales have a short range: whether a power of two
            for the whole array is chosen from its largest element. By default it is, but not inside
            `scalify`, where data is of unit size already.

    Raises:
        ValueError: if the name is unknown, or the format does not have an option that is given.

    Source: OCP Microscaling Formats (MX) Specification v1.0, 2023; "up": Mishra et al., Recipes for
    Pre-training LLMs with MXFP8, arXiv 2506.08027; NVFP4 and square blocks: NVIDIA, Pretraining
    Large Language Models with NVFP4, arXiv 2509.25149, whose scale of the whole is a float32.

    Example:
        >>> weights = jsa.BlockFormat("nvfp4", square=True)
        >>> print(weights.dtype, weights.scale_dtype, weights.block_size, weights.bits_per_element)
        float4_e2m1fn float8_e4m3fn 16 4.03125
    """

    name: str
    _: dataclasses.KW_ONLY
    square: bool = False
    rounding: str = "nearest"
    scale_rounding: str | None = None
    tensor_scale: bool | None = None

    def __post_init__(self) -> None:
        if self.name not in _FORMATS:
            raise ValueError(f"`name` must be one of {list(NAMES)}, got {self.name!r}.")
        if self.rounding not in _ROUNDINGS:
            raise ValueError(
                f"`rounding` must be one of {list(_ROUNDINGS)}, got {self.rounding!r}."
            )
        allowed = ("up", "floor") if self.is_mx else ("nearest",)
        if self.scale_rounding is None:
            object.__setattr__(self, "scale_rounding", allowed[0])
        if self.scale_rounding not in allowed:
            raise ValueError(
                f"`scale_rounding` of {self.name!r} must be one of {list(allowed)}, got "
                f"{self.scale_rounding!r}."
            )
        if self.is_mx and self.tensor_scale:
            raise ValueError(
                f"`tensor_scale` must be False or None for {self.name!r}, got {self.tensor_scale}: "
                "E8M0 has the range of float32."
            )

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""
        return _FORMATS[self.name][0]

    @property
    def scale_dtype(self) -> Any:
        """Dtype of the block scales."""
        return _FORMATS[self.name][1]

    @property
    def block_size(self) -> int:
        """Elements along an axis that share a scale."""
        return _FORMATS[self.name][2]

    @property
    def is_mx(self) -> bool:
        """Whether block scales are powers of two, of E8M0."""
        return self.scale_dtype == E8M0

    @property
    def is_fp8(self) -> bool:
        """Whether elements have 8 bits."""
        return self.dtype != E2M1

    @property
    def bits_per_element(self) -> float:
        """Bits that an element takes, with its share of a block scale."""
        own = 8 if self.is_fp8 else 4
        return own + 8 / self.block_size ** (2 if self.square else 1)


def as_format(value: Any, name: str) -> Any:
    """Return a real floating dtype or a `BlockFormat`, given as such or by its name.

    Raises:
        TypeError: for what is neither; the message says what `name` is.
    """
    found = block_format(value)
    if found is not None:
        return found
    try:
        return dtypes.as_floating(value, name, real=True)
    except TypeError as error:
        raise TypeError(f"{error} Block formats are {', '.join(map(repr, NAMES))}.") from None


def block_format(value: Any) -> BlockFormat | None:
    """A `BlockFormat`, given as such or by its name; None for anything else."""
    if isinstance(value, BlockFormat):
        return value
    return BlockFormat(value) if isinstance(value, str) and value in _FORMATS else None
