"""Scales along axes, in operations that move elements.

The same operation moves the operand's scale, along the axes on which the scale differs. For `W` of
shape `(1000, 64)` and a scale of shape `(1, 64)`, `W[rows]` keeps the scale, and `W[:, columns]`
has the scale `scale[:, columns]`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes, pow2
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.rules.shared.joining import shared_scale
from jax_scalify.scales.algebra import ZERO, Scale
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


def largest(scale: Scale) -> Scale:
    """Return the maximum of a scale over all its axes, as a scalar scale."""
    return scale.map(lambda s: jnp.max(s, initial=0))


def own_scales(*operands: Operand) -> list[Scale]:
    """Return the scale of each operand, where operands keep different scales.

    Arrays keep their scales. A constant 0 gets the scale 0, so that any update sets the scale. Any
    other constant gets the scale that all operands would share.
    """
    together = [x.as_pair(x.source, largest(x.scale)) for x in operands]  # only for their votes
    own = []
    for x in operands:
        if x.constant is None:
            limit = pow2.MAX_EXPONENT  # the largest exponent that an array of scales holds
            static = x.scale.is_static and not x.scale.is_zero
            own.append(Scale(max(-limit, min(limit, x.scale.exponent))) if static else x.scale)
        else:
            own.append(ZERO if x.constant == 0 else shared_scale(*together))
    return own


def least_scales(*arrays: Operand) -> list[Operand]:
    """Make the scale of an array scalar if it is equal everywhere, or if the array is empty."""
    return [x if varying_axes(x.scale) and 0 not in x.shape else uniform_over(x) for x in arrays]


def comparable(x: Operand, axes: Sequence[int] | None = None) -> Operand:
    """Bring elements that are compared along axes (by default all) to one scale.

    Data with several scales is widened to at least float32 for this. Other data is unchanged.
    """
    axes = range(x.ndim) if axes is None else axes
    if all(a % x.ndim not in varying_axes(x.scale, x.unit) for a in axes):
        return x
    if not dtypes.is_narrow(x.dtype):
        return uniform_over(Operand.of_value(x.value, x.scale), axes)
    wide = lax.convert_element_type(x.data, dtypes.compute_dtype(x.dtype))
    return uniform_over(x.as_pair(wide, x.scale), axes)


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows that a gather reads or a scatter writes, as one array of windows.

    For `x[rows]` with `x` of shape `(1000, 64)` and 8 rows, the windows array has shape `(8, 64)`:
    `sizes = (1, 64)`, `dims = (1,)`, `axes = (1,)` and `starts = (0,)`.

    Attributes:
        sizes: the size of a window along each axis of the operand.
        dims: the axes of the windows array that run inside a window. The other axes enumerate the
            windows.
        axes: the operand axis of each of `dims`.
        starts: the operand axis that each column of the indices refers to.
        batch: pairs of a batch axis of the operand and the matching axis of the indices.
    """

    sizes: tuple[int, ...]
    dims: tuple[int, ...]
    axes: tuple[int, ...]
    starts: tuple[int, ...]
    batch: tuple[tuple[int, int], ...]

    @classmethod
    def gathered(cls, dims: Any, slice_sizes: Sequence[int]) -> Windows:
        """Return the windows of a gather."""
        batch = tuple(zip(dims.operand_batching_dims, dims.start_indices_batching_dims))
        left_out = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
        axes = tuple(a for a in range(len(slice_sizes)) if a not in left_out)
        return cls(tuple(slice_sizes), dims.offset_dims, axes, dims.start_index_map, batch)

    @classmethod
    def scattered(cls, dims: Any, rank: int, updates: tuple[int, ...]) -> Windows:
        """Return the windows of a scatter, given the operand's rank and the updates' shape."""
        batch = tuple(zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims))
        left_out = {*dims.inserted_window_dims, *dims.operand_batching_dims}
        axes = tuple(a for a in range(rank) if a not in left_out)
        sizes = [1] * rank
        for a, dim in zip(axes, dims.update_window_dims, strict=True):
            sizes[a] = updates[dim]
        starts = dims.scatter_dims_to_operand_dims
        return cls(tuple(sizes), dims.update_window_dims, axes, starts, batch)

    def partial_axes(self, shape: Sequence[int]) -> set[int]:
        """Return the axes of an operand of this shape that a window covers only in part."""
        return {a for a, (size, n) in enumerate(zip(self.sizes, shape, strict=True)) if size != n}

    def along(self, axes: Sequence[int], indices: jax.Array) -> tuple[Windows, jax.Array]:
        """Return the windows and indices for an operand whose length is 1 except along `axes`."""
        sizes = tuple(n if a in axes else 1 for a, n in enumerate(self.sizes))
        batch = tuple(pair for pair in self.batch if pair[0] in axes)
        # The only index of an axis of length 1 is 0.
        columns = np.array([a in axes for a in self.starts], indices.dtype)
        indices = indices if columns.all() else indices * columns
        return dataclasses.replace(self, sizes=sizes, batch=batch), indices

    def shape_along(self, axes: Sequence[int], shape: Sequence[int]) -> list[int]:
        """Return the shape of the windows array of `along(axes)`, given the full array's shape."""
        whole = {d for d, a in zip(self.dims, self.axes, strict=True) if a not in axes}
        return [1 if d in whole else n for d, n in enumerate(shape)]

    @property
    def _left_out(self) -> tuple[int, ...]:
        batch = [a for a, _ in self.batch]
        return tuple(a for a in range(len(self.sizes)) if a not in (*self.axes, *batch))

    def take(self, array: jax.Array, indices: jax.Array) -> jax.Array:
        """Gather the windows of an array. Windows that reach outside are moved inside."""
        dims = lax.GatherDimensionNumbers(
            offset_dims=self.dims,
            collapsed_slice_dims=self._left_out,
            start_index_map=self.starts,
            operand_batching_dims=tuple(a for a, _ in self.batch),
            start_indices_batching_dims=tuple(b for _, b in self.batch),
        )
        return lax.gather(array, indices, dims, self.sizes, mode="clip")

    def write(self, scatter: Any, array: Any, indices: Any, updates: Any, mode: Any) -> jax.Array:
        """Scatter updates into the windows of an array."""
        dims = lax.ScatterDimensionNumbers(
            update_window_dims=self.dims,
            inserted_window_dims=self._left_out,
            scatter_dims_to_operand_dims=self.starts,
            operand_batching_dims=tuple(a for a, _ in self.batch),
            scatter_indices_batching_dims=tuple(b for _, b in self.batch),
        )
        return scatter(array, indices, updates, dims, mode=mode)

    def on_windows(self, array: jax.Array, rank: int) -> jax.Array:
        """Reshape an array from the operand's axes to the axes of the windows array.

        The array has length 1 along the partial axes.
        """
        shape = [1] * rank
        for d, a in zip(self.dims, self.axes, strict=True):
            shape[d] = array.shape[a]
        return lax.reshape(array, shape)

    def on_operand(self, array: jax.Array) -> jax.Array:
        """Invert `on_windows`."""
        shape = [1] * len(self.sizes)
        for d, a in zip(self.dims, self.axes, strict=True):
            shape[a] = array.shape[d]
        return lax.reshape(array, shape)


def gathered_scale(ctx: RuleContext, scale: Scale, indices: Any, windows: Windows) -> Scale:
    """Return the scale of gathered windows, given the scale of the operand."""
    axes = varying_axes(scale)
    if not axes:
        return scale
    rank = ctx.out_avals[0].ndim
    if not windows.partial_axes(ctx.in_avals[0].shape) & set(axes):
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
    shapes = {aval.shape for aval in (*ctx.in_avals, *ctx.out_avals)}
    return [
        a
        for a, size in enumerate(window_dimensions)
        if size != 1 or len({shape[a] for shape in shapes}) > 1
    ]
