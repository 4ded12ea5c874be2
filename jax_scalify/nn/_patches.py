"""Convolutions whose windows do not overlap, as matmuls of patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Patches:
    """A convolution as a matmul: `transpose(dot_general(patches(lhs), rhs))`.

    Attributes:
        limits: the limits of the slice of the images that windows cover.
        strides: the strides of this slice, for windows of one pixel.
        shape: the shape of the patches. Each spatial dim becomes two: windows, and their pixels.
        dimension_numbers: the dimension numbers of the matmul.
        order: the permutation of the matmul's result to the convolution's layout.
    """

    limits: tuple[int, ...]
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    dimension_numbers: Any
    order: tuple[int, ...]

    def cut(self, lhs: jax.Array) -> jax.Array:
        """Return the patches of images."""
        cut = lax.slice(lhs, [0] * lhs.ndim, self.limits, self.strides)
        return cut.reshape(self.shape)

    def arrange(self, out: jax.Array) -> jax.Array:
        """Return the convolution's result, given the matmul's."""
        return lax.transpose(out, self.order)


def patches_of(
    lhs: Sequence[int],
    rhs: Sequence[int],
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    **_: Any,
) -> Patches | None:
    """Return how a convolution of these shapes is computed as a matmul; None if it is not one.

    It is a matmul if, along each dim, a window is one pixel, or as large as its stride, or the only
    window: pointwise convolutions and patch embeddings. Parameters are those of
    `lax.conv_general_dilated`.

    Example:
        >>> layout = "NHWC", "HWIO", "NHWC"
        >>> numbers = lax.conv_dimension_numbers((2, 8, 8, 3), (4, 4, 3, 5), layout)
        >>> found = patches_of(
        ...     (2, 8, 8, 3), (4, 4, 3, 5), window_strides=(4, 4), padding=((0, 0), (0, 0)),
        ...     lhs_dilation=(1, 1), rhs_dilation=(1, 1), dimension_numbers=numbers,
        ...     feature_group_count=1, batch_group_count=1)
        >>> found.shape, found.dimension_numbers
        ((2, 2, 4, 2, 4, 3), (((2, 4, 5), (0, 1, 2)), ((), ())))
    """
    images, kernel, result = dimension_numbers
    sizes = [rhs[a] for a in kernel[2:]]
    if feature_group_count != 1 or batch_group_count != 1:
        return None
    if any(n != 1 for n in lhs_dilation) or any(low or high for low, high in padding):
        return None
    if any(k > 1 and d > 1 for k, d in zip(sizes, rhs_dilation)):
        return None
    counts = [(lhs[a] - k) // s + 1 for a, k, s in zip(images[2:], sizes, window_strides)]
    each = list(zip(counts, sizes, window_strides, strict=True))
    if not all(n > 0 and (k == 1 or k == s or n == 1) for n, k, s in each):
        return None
    limits, strides, shape, names = list(lhs), [1] * len(lhs), [], []
    for axis, size in enumerate(lhs):
        if axis not in images[2:]:
            shape.append(size)
            names.append("batch" if axis == images[0] else "channels")
            continue
        i = images[2:].index(axis)
        count, window, stride = each[i]
        if window == 1:
            strides[axis], limits[axis] = stride, (count - 1) * stride + 1
        else:
            limits[axis] = count * window
        shape += [count, window]
        names += [("windows", i), ("pixels", i)]
    pixels = [names.index(("pixels", i)) for i in range(len(sizes))]
    contract = (*pixels, names.index("channels")), (*kernel[2:], kernel[1])
    free = [n for a, n in enumerate(names) if a not in contract[0]] + ["features"]
    wanted = dict(zip(result, ["batch", "features", *(("windows", i) for i in range(len(sizes)))]))
    order = tuple(free.index(wanted[axis]) for axis in range(len(free)))
    dims = contract, ((), ())
    return Patches(tuple(limits), tuple(strides), tuple(shape), dims, order)
