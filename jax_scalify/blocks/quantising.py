"""How an operand of a matmul is quantised to a block format, along its contracted dims."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.blocks import rounding
from jax_scalify.blocks.formats import BlockFormat
from jax_scalify.blocks.rounding import join_blocks, split_into_blocks, times_power

# Data of unit RMS divided by this has block scales in the middle of what E4M3 can hold: a block of
# NVFP4 may be 80 times as large as is usual, or 300 times as small, and loses nothing.
UNIT_EXPONENT = -4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantiser:
    """How an operand is quantised.

    Attributes:
        format: its format.
        exponent: of the power of two for the whole; None to choose it from the largest element.
        examples: dims whose indices are arrays of their own, as those of `vmap`: with batch dims,
            those that have a power of two of their own.
    """

    format: BlockFormat
    exponent: int | None
    examples: tuple[int, ...] = ()

    @classmethod
    def of(cls, format: BlockFormat) -> Quantiser:
        """The quantiser of an operand outside of `scalify`."""
        chosen = not format.is_mx and format.tensor_scale is not False
        return cls(format=format, exponent=None if chosen else 0)

    def of_unit_data(self, exponent: int) -> Quantiser:
        """The same for data of unit size, `operand * 2**exponent`: nothing needs to be chosen."""
        if self.format.is_mx or self.format.tensor_scale is not None:
            return self
        return dataclasses.replace(self, exponent=UNIT_EXPONENT - exponent)

    def batched(self) -> Quantiser:
        """The same with one more leading dim, of examples."""
        return dataclasses.replace(self, examples=(0, *(a + 1 for a in self.examples)))

    def rows(self, x: jax.Array, contract: Any, batch: Any, unit: int = 1) -> Rows:
        """An operand's rows, filled up so that blocks fit in, and whatever else has this length."""
        return Rows.of(x, contract, batch, self.examples, max(unit, self.format.block_size))

    def quantise(self, rows: Rows) -> Quantised:
        """Quantise along rows."""
        format, x, axis = self.format, rows.x.astype(jnp.float32), rows.axis
        own = {*rows.examples, *rows.batch}
        exponent: Any = self.exponent
        if exponent is None:
            shared = tuple(a for a in range(x.ndim) if a not in own)
            exponent = rounding.tensor_exponent(x, shared)
        if self.exponent != 0:
            x = times_power(x, -exponent)
        sizes = [1] * x.ndim
        sizes[axis] = format.block_size
        free = [a for a in range(x.ndim) if a not in own and a != axis]
        if format.square and free:
            sizes[free[-1]] = format.block_size
        blocks = split_into_blocks(x, sizes)
        bits = rounding.hashed_bits(blocks) if format.rounding == "stochastic" else None
        elements, codes = rounding.round_blocks(blocks, format, bits)
        return Quantised(format, x.shape, axis, elements, codes, exponent)


@dataclasses.dataclass(frozen=True)
class Quantised:
    """Elements in blocks, and the bits of their scales."""

    format: BlockFormat
    shape: tuple[int, ...]
    axis: int
    elements: jax.Array
    codes: jax.Array
    exponent: Any

    def values(self, dtype: Any) -> jax.Array:
        """The numbers that it stands for."""
        values = rounding.times_scales(self.elements, self.codes, self.format)
        values = join_blocks(values, self.shape)
        if not isinstance(self.exponent, int) or self.exponent:
            values = times_power(values, self.exponent)
        return rounding.cast_dequantised(values, dtype)

    def parts(self) -> tuple[jax.Array, jax.Array]:
        """Elements in their dtype, and block scales, one for each row and block."""
        elements = join_blocks(self.elements, self.shape).astype(self.format.dtype)
        per_row = [
            n for pair in zip(self.codes.shape[::2], self.elements.shape[1::2]) for n in pair
        ]
        per_row[2 * self.axis + 1] = 1
        shape = list(self.shape)
        shape[self.axis] //= self.format.block_size
        codes = join_blocks(jnp.broadcast_to(self.codes, per_row), shape)
        return elements, lax.bitcast_convert_type(codes, self.format.scale_dtype)


@dataclasses.dataclass(frozen=True)
class Rows:
    """An operand whose contracted dims are one, of a length that blocks divide.

    Attributes:
        x: the operand.
        axis: the dim that blocks lie along.
        contract, batch, examples: its dims now.
        order: which dims its dims were, if contracted ones were merged; these come last.
    """

    x: jax.Array
    axis: int
    contract: tuple[int, ...]
    batch: tuple[int, ...]
    examples: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @classmethod
    def of(cls, x: Any, contract: Any, batch: Any, examples: Any, unit: int) -> Rows:
        """Merge contracted dims where blocks do not fit into the last, and fill up with zeros."""
        contract, batch, examples = tuple(contract), tuple(batch), tuple(examples)
        order = None
        if not contract:
            x, contract = lax.expand_dims(x, [x.ndim]), (x.ndim,)
        if len(contract) > 1 and x.shape[contract[-1]] % unit:
            others = [a for a in range(x.ndim) if a not in contract]
            order = (*others, *contract)
            x = lax.transpose(x, order)
            x = lax.reshape(x, (*x.shape[: len(others)], math.prod(x.shape[len(others) :])))
            batch, examples = (tuple(map(others.index, dims)) for dims in (batch, examples))
            contract = (len(others),)
        axis = contract[-1]
        missing = -x.shape[axis] % unit
        if missing:
            padding = [(0, missing if a == axis else 0, 0) for a in range(x.ndim)]
            x = lax.pad(x, np.zeros((), x.dtype), padding)
        return cls(x, axis, contract, batch, examples, order)

    def undo(self, values: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Give values of these rows the shape that the operand had."""
        others = math.prod(d for a, d in enumerate(values.shape) if a != self.axis)
        length = math.prod(shape) // max(1, others)
        values = lax.slice_in_dim(values, 0, length, axis=self.axis)
        if self.order is None:
            return lax.reshape(values, shape)
        values = lax.reshape(values, [shape[a] for a in self.order])
        return lax.transpose(values, [self.order.index(a) for a in range(len(shape))])
