"""Small leaves in one array, an arena, so that XLA makes one kernel for all of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base.pins import slices

# Leaves with at most this many elements lie in an arena.
SMALL = 2**16
# The number of elements of a row in which leaves of several shapes share an arena.
_LANES = 128

Shape = tuple[int, ...]


def row_of(shape: Shape) -> Shape:
    """Return the shape of the rows in which a leaf lies in an arena.

    If devices may share a leaf, its row has the leaf's own shape. To cut the leaf into other rows,
    XLA would have to gather it.
    """
    size = math.prod(shape)
    fits = size > 0 and size % _LANES == 0
    return (_LANES,) if fits and not may_be_shared() else shape


def may_be_shared() -> bool:
    """Return whether devices may share an array."""
    return jax.device_count() > 1 or not jax.sharding.get_abstract_mesh().empty


# The number of elements that a thread block of a GPU reduces without a second kernel.
_ROW = 2**13


def first_axis_of_rows(shape: Shape) -> int:
    """Return the first axis of the rows of a large array: as many as a thread block can reduce."""
    first = len(shape) - 1
    while first > 1 and math.prod(shape[first - 1 :]) <= _ROW:
        first -= 1
    return first


def rank(shape: Shape) -> tuple[Any, ...]:
    """Return a key that sorts shapes for an arena: leaves of equal size stand together."""
    return math.prod(shape), shape


@dataclasses.dataclass(frozen=True)
class Arena:
    """The places of leaves in an array of shape `(rows, *row)`: one leaf after the other.

    Attributes:
        shapes: the shapes of the leaves, sorted by `rank`.
        row: the shape of a row. Each leaf fills a whole number of rows.
    """

    shapes: tuple[Shape, ...]
    row: Shape

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> Arena:
        """Return the arena of leaves whose rows have one shape."""
        return _arena(tuple(shapes), row_of(shapes[0]))

    @functools.cached_property
    def counts(self) -> list[int]:
        """The number of rows of each leaf."""
        size = math.prod(self.row)
        return [math.prod(shape) // size if size else 1 for shape in self.shapes]

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first row of each leaf."""
        return [0, *itertools.accumulate(self.counts[:-1])]

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def pack(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Return the array in which these leaves lie."""
        if set(self.shapes) == {self.row}:
            return jnp.stack(leaves)
        pairs = zip(leaves, self.counts, strict=True)
        return lax.concatenate([lax.reshape(x, (n, *self.row)) for x, n in pairs], 0)

    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def unpack(self, array: jax.Array) -> list[jax.Array]:
        """Return the leaves that lie in an array."""
        parts = slices(array, tuple(self.starts), tuple(self.counts))
        return [lax.reshape(x, shape) for x, shape in zip(parts, self.shapes, strict=True)]

    def spread(self, numbers: Any) -> Any:
        """Repeat one number per leaf, `(leaves,)`, for its rows, in a shape that broadcasts."""
        shape = (sum(self.counts), *(1,) * len(self.row))
        if isinstance(numbers, np.ndarray):
            return np.repeat(numbers, self.counts).reshape(shape)
        if set(self.counts) != {1}:
            places = np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)
            numbers = _at(numbers, places)
        return lax.reshape(numbers, shape)

    def reduced(
        self, rows: jax.Array, reduce: Callable[[jax.Array], jax.Array], neutral: Any
    ) -> jax.Array:
        """Reduce one number per row, `(rows,)`, to one number per leaf.

        Args:
            rows: the numbers.
            reduce: reduces the last axis of an array of two axes.
            neutral: the number that does not change the result, such as 0 in a sum.
        """
        most = max(self.counts)
        if set(self.counts) == {most}:
            return rows if most == 1 else reduce(lax.reshape(rows, (len(self.counts), most)))
        counts, starts = (np.array(x, np.int32)[:, None] for x in (self.counts, self.starts))
        place = lax.broadcasted_iota(np.int32, (len(counts), most), 1)
        found = _at(rows, jnp.minimum(starts + place, len(rows) - 1))
        return reduce(jnp.where(place < counts, found, np.array(neutral, rows.dtype)))

    def taken(self, array: jax.Array, which: Sequence[int], *, is_full: bool) -> jax.Array:
        """Return the rows of the leaves at these positions; if not `is_full`, their numbers."""
        starts, counts = (self.starts, self.counts) if is_full else (range(len(self.shapes)), None)
        # Leaves that lie side by side are taken as one slice.
        runs: list[list[int]] = []
        for i in which:
            start, count = starts[i], 1 if counts is None else counts[i]
            if runs and runs[-1][1] == start:
                runs[-1][1] += count
            else:
                runs.append([start, start + count])
        return jnp.concatenate([lax.slice_in_dim(array, *run) for run in runs])


def _at(numbers: jax.Array, places: Any) -> jax.Array:
    return numbers.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


@functools.lru_cache(maxsize=128)
def _arena(shapes: tuple[Shape, ...], row: Shape) -> Arena:
    return Arena(shapes, row)
