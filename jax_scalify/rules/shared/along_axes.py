"""Scales along axes, in operations that move elements.

The same operation moves the operand's scale, along the axes on which the scale differs. For `W` of
shape `(1000, 64)` and a scale of shape `(1, 64)`, `W[rows]` keeps the scale, and `W[:, columns]`
has the scale `scale[:, columns]`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes, pow2
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.rules.shared.joining import shared_scale
from jax_scalify.scales.algebra import ONE, ZERO, Scale
from jax_scalify.scales.table import ScaleTable


def varying_axes(*scales: Scale) -> list[int]:
    """Return the axes along which at least one of the scales differs."""
    return sorted({a for scale in scales for a, n in enumerate(scale.shape) if n != 1})


def lies_along(x: Operand, axis: int) -> bool:
    """Return whether an array has one scale for each index of an axis.

    On an axis of length 1, this is true if the whole array has one scale that kept its axes.
    """
    count, shape = x.shape[axis], x.scale.shape
    return bool(shape) and shape[axis] == count and (count != 1 or math.prod(shape) == 1)


def scale_of(table: ScaleTable, array: Any) -> Scale:
    """Return the scale of an array of scales: scalar if it has one element, 0 if it is empty."""
    if 0 in array.shape:
        return table.atom(jnp.zeros((), table.dtype))
    return table.atom(lax.reshape(array, ()) if math.prod(array.shape) == 1 else array)


def scale_array(table: ScaleTable, scale: Scale, shape: Sequence[int] | None = None) -> jax.Array:
    """Return the array of a scale, broadcast to `shape` if given."""
    value = np.asarray(scale.value, table.dtype) if scale.is_static else scale.array
    return jnp.asarray(value) if shape is None else jnp.broadcast_to(value, tuple(shape))


def scale_along(
    table: ScaleTable, scale: Scale, axes: Container[int], shape: Sequence[int]
) -> jax.Array:
    """Return the array of a scale, broadcast along some axes of an array of this shape."""
    return scale_array(table, scale, [n if a in axes else 1 for a, n in enumerate(shape)])


def reshaped(array: jax.Array, rank: int, sizes: dict[int, int]) -> jax.Array:
    """Reshape an array of scales to a rank: axes that have no size get the length 1."""
    return lax.reshape(array, [sizes.get(a, 1) for a in range(rank)])


def own_scales(*operands: Operand) -> list[Scale]:
    """Return the scale of each operand, where operands keep different scales.

    Arrays keep their scales. A constant 0 gets the scale 0, so that any update sets the scale. So
    does inf, at the smallest scale, because `0 * inf` is nan. Any other constant gets the scale
    that all operands would share.
    """
    together = [x.as_pair(x.source, x.scale.largest) for x in operands]  # only for their votes
    own = []
    for x in operands:
        if x.constant is None:
            # An array of scales holds only scales that are in range.
            own.append(x.scale.bounded() if x.scale.is_static else x.scale)
        elif not np.isfinite(np.complex128(x.constant)):
            own.append(Scale(-pow2.MAX_EXPONENT))
        else:
            own.append(ZERO if x.constant == 0 else shared_scale(*together))
    return own


def least_scales(*arrays: Operand) -> list[Operand]:
    """Make the scale of an array scalar if it is equal everywhere, or if the array is empty."""
    return [x if varying_axes(x.scale) and 0 not in x.shape else uniform_over(x) for x in arrays]


def comparable(x: Operand, axes: Sequence[int]) -> Operand:
    """Bring elements that are compared along axes to one scale.

    Data with several scales is widened to at least float32 for this. Other data is unchanged.
    """
    if all(a % x.ndim not in varying_axes(x.scale, x.unit) for a in axes):
        return x
    if not dtypes.is_narrow(x.dtype):
        return uniform_over(Operand(x.value, x.scale, unit=ONE), axes)
    # In float16, `3 * 2**-30` at the scale 1 would be 0, and `argsort` would confuse it with zeros.
    wide = lax.convert_element_type(x.data, dtypes.compute_dtype(x.dtype))
    return uniform_over(x.as_pair(wide, x.scale), axes)


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows that a gather reads or a scatter writes, as one array of windows.

    For `x[rows]` with `x` of shape `(1000, 64)` and 8 rows, the windows array has shape `(8, 64)`:
    `sizes = (1, 64)` and `inside = {1: 1}`.

    Attributes:
        dims: the dimension numbers of the gather; for a scatter, of the gather of its windows.
        sizes: the size of a window along each axis of the operand.
    """

    dims: lax.GatherDimensionNumbers
    sizes: tuple[int, ...]

    @classmethod
    def scattered(cls, dims: Any, rank: int, updates: tuple[int, ...]) -> Windows:
        """Return the windows of a scatter, given the operand's rank and the updates' shape."""
        # The fields of `ScatterDimensionNumbers` are the same, in the same order.
        windows = cls(lax.GatherDimensionNumbers(*dims), (1,) * rank)
        sizes = {a: updates[d] for d, a in windows.inside.items()}
        return dataclasses.replace(windows, sizes=tuple(sizes.get(a, 1) for a in range(rank)))

    @property
    def inside(self) -> dict[int, int]:
        """The axes of the windows array that run inside a window, and their axes of the operand.

        The other axes of the windows array enumerate the windows.
        """
        left_out = {*self.dims.collapsed_slice_dims, *self.dims.operand_batching_dims}
        axes = [a for a in range(len(self.sizes)) if a not in left_out]
        return dict(zip(self.dims.offset_dims, axes, strict=True))

    @property
    def batch(self) -> dict[int, int]:
        """The batch axes of the operand, and their axes of the indices."""
        dims = self.dims
        return dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))

    def partial_axes(self, shape: Sequence[int]) -> set[int]:
        """Return the axes of an operand of this shape that a window covers only in part."""
        return {a for a, (size, n) in enumerate(zip(self.sizes, shape, strict=True)) if size != n}

    def along(self, axes: Sequence[int], indices: jax.Array) -> tuple[Windows, jax.Array]:
        """Return the windows and indices for an operand whose length is 1 except along `axes`."""
        sizes = tuple(n if a in axes else 1 for a, n in enumerate(self.sizes))
        batch = {a: b for a, b in self.batch.items() if a in axes}
        # If all examples share their scales, the batch axis has length 1 here. It is collapsed,
        # because a batch axis of the operand must be as long as that of the indices.
        apart = {*self.inside.values(), *batch}
        dims = self.dims._replace(
            collapsed_slice_dims=tuple(a for a in range(len(sizes)) if a not in apart),
            operand_batching_dims=tuple(batch),
            start_indices_batching_dims=tuple(batch.values()),
        )
        # The only index of an axis of length 1 is 0.
        columns = np.array([a in axes for a in dims.start_index_map], indices.dtype)
        return Windows(dims, sizes), indices if columns.all() else indices * columns

    def shape_along(self, axes: Sequence[int], shape: Sequence[int]) -> list[int]:
        """Return the shape of the windows array of `along(axes)`, given the full array's shape."""
        whole = {d for d, a in self.inside.items() if a not in axes}
        return [1 if d in whole else n for d, n in enumerate(shape)]

    def take(self, array: jax.Array, indices: jax.Array) -> jax.Array:
        """Gather the windows of an array. Windows that reach outside are moved inside."""
        return lax.gather(array, indices, self.dims, self.sizes, mode="clip")

    def write(self, scatter: Any, array: Any, indices: Any, updates: Any, mode: Any) -> jax.Array:
        """Scatter updates into the windows of an array."""
        dims = lax.ScatterDimensionNumbers(*self.dims)
        return scatter(array, indices, updates, dims, mode=mode)

    def on_windows(self, array: jax.Array, rank: int) -> jax.Array:
        """Reshape an array from the operand's axes to the axes of the windows array.

        The array has length 1 along the partial axes.
        """
        return reshaped(array, rank, {d: array.shape[a] for d, a in self.inside.items()})

    def on_operand(self, array: jax.Array) -> jax.Array:
        """Invert `on_windows`."""
        return reshaped(array, len(self.sizes), {a: array.shape[d] for d, a in self.inside.items()})


def gathered_scale(ctx: RuleContext, scale: Scale, indices: Any, windows: Windows) -> Scale:
    """Return the scale of gathered windows, given the scale of the operand."""
    axes = varying_axes(scale)
    if not axes:
        return scale
    rank = ctx.out_avals[0].ndim
    if not windows.partial_axes(ctx.in_avals[0].shape) & set(axes):
        # `x[rows]` with a scale for each column: no index chooses a scale.
        return scale_of(ctx.table, windows.on_windows(scale.array, rank))
    inner, columns = windows.along(axes, indices)
    return scale_of(ctx.table, inner.take(scale.array, columns))


def uniform_over(x: Operand, axes: Sequence[int] | None = None) -> Operand:
    """Replace the scale with its maximum along `axes`; by default, with one scalar for all axes."""
    if x.scale.ndim == 0:
        return x
    axes = range(x.ndim) if axes is None else axes
    axes = tuple(a % x.ndim for a in axes if x.scale.shape[a] != 1)
    everything = all(x.scale.shape[a] == 1 for a in range(x.ndim) if a not in axes)
    if not axes and not everything:
        return x
    reduced = tuple(range(x.ndim)) if everything else axes
    scale = x.scale.map(lambda s: jnp.max(s, reduced, keepdims=not everything, initial=0))
    return x.with_scale(scale)


def windowed_axes(ctx: RuleContext, *, window_dimensions: Any, **_: Any) -> list[int]:
    """Return the axes along which a window mixes or moves elements."""
    # A window of size 1 moves elements too, if it has a stride or padding.
    shapes = {aval.shape for aval in (*ctx.in_avals, *ctx.out_avals)}
    return [
        a
        for a, size in enumerate(window_dimensions)
        if size != 1 or len({shape[a] for shape in shapes}) > 1
    ]
