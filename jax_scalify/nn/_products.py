"""The three products of a matmul, dense or of groups, in formats of both passes.

The backward pass uses the narrow operands of a matmul. Each product has the derivative of the
product of wide arrays, so that gradients can be differentiated again, in the wide dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.blocks.dot import block_dot_general, block_round
from jax_scalify.blocks.formats import BlockFormat
from jax_scalify.blocks.quantising import Quantiser
from jax_scalify.ops.scaling import cast
from jax_scalify.primitives.straight_through import straight_through


@dataclasses.dataclass(frozen=True)
class Form:
    """The dims of two operands that are contracted, batched, or divided into groups.

    Attributes:
        contract, batch: dims of the left and of the right operand.
        ragged: the left operand's dim that is divided into groups; None for a dense product. If it
            is contracted, it is divided in both operands, and the result has a dim of groups.
        group: the right operand's dim with one matrix for each group; None if `ragged` is
            contracted.
    """

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    ragged: int | None = None
    group: int | None = None

    @classmethod
    def of(
        cls, dimension_numbers: Any, ragged: int | None = None, group: int | None = None
    ) -> Form:
        """Return the form of the dimension numbers of `lax.dot_general`."""
        (lhs, rhs), (lhs_batch, rhs_batch) = dimension_numbers
        contract, batch = (tuple(lhs), tuple(rhs)), (tuple(lhs_batch), tuple(rhs_batch))
        return cls(contract, batch, ragged, group)

    @classmethod
    def of_groups(cls, numbers: Any, lhs: Any, rhs: Any, group_sizes: Any) -> Form:
        """Return the form of dimension numbers of `lax.ragged_dot_general`, and check shapes."""
        shapes = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
        kind = jnp.int32 if jnp.issubdtype(group_sizes.dtype, jnp.integer) else jnp.float32
        sizes = jax.ShapeDtypeStruct(group_sizes.shape, kind)
        jax.eval_shape(lambda a, b, n: lax.ragged_dot_general(a, b, n, numbers), *shapes, sizes)
        (ragged,) = numbers.lhs_ragged_dimensions
        _check_group_sizes(group_sizes, lhs.shape[ragged])
        if ragged in numbers.dot_dimension_numbers[1][0]:  # JAX computes a dense product then
            return cls.of(numbers.dot_dimension_numbers)
        return cls.of(numbers.dot_dimension_numbers, ragged, *numbers.rhs_group_dimensions)

    @property
    def numbers(self) -> Any:
        """The dimension numbers that `lax` takes."""
        dims = self.contract, self.batch
        if self.ragged is None:
            return dims
        return lax.RaggedDotDimensionNumbers(dims, [self.ragged], self._groups)

    @property
    def _groups(self) -> tuple[int, ...]:
        """The right operand's group dims."""
        return () if self.group is None else (self.group,)

    @property
    def is_by_group(self) -> bool:
        """Whether the result has a matrix for each group."""
        return self.ragged is not None and self.group is None

    def free(self, side: int, ndim: int) -> list[int]:
        """Return the free dims of an operand: not contracted, batch or group dims."""
        taken = (*self.contract[side], *self.batch[side], *(self._groups if side else ()))
        return [a for a in range(ndim) if a not in taken]

    def multiply(
        self, lhs: Any, rhs: Any, group_sizes: Any, precision: Any, accumulate: Any, sharding: Any
    ) -> Any:
        """Multiply with `lax.dot_general` or `lax.ragged_dot_general`."""
        types = dict(precision=precision, preferred_element_type=accumulate, out_sharding=sharding)
        if self.ragged is None:
            return lax.dot_general(lhs, rhs, self.numbers, **types)
        return lax.ragged_dot_general(lhs, rhs, group_sizes, self.numbers, **types)

    def multiply_densely(
        self, lhs: Any, rhs: Any, group_sizes: Any, precision: Any, accumulate: Any, sharding: Any
    ) -> Any:
        """Multiply differentiably. JAX cannot differentiate a product with contracted groups."""
        if not self.is_by_group:
            return self.multiply(lhs, rhs, group_sizes, precision, accumulate, sharding)
        if group_sizes.ndim != 1:
            raise NotImplementedError(
                "The second derivative of a `ragged_dot` is known for `group_sizes` of shape "
                f"(groups,), got {group_sizes.shape}."
            )
        lhs = jnp.where(self._membership(lhs, group_sizes), lhs, jnp.zeros((), lhs.dtype))
        contract = tuple(a + 1 for a in self.contract[0]), self.contract[1]
        batch = tuple(a + 1 for a in self.batch[0]), self.batch[1]
        out = lax.dot_general(lhs, rhs, (contract, batch), precision, accumulate)
        out = jnp.moveaxis(out, len(batch[0]), 0)
        return out if sharding is None else jax.sharding.reshard(out, sharding)

    def within_groups(self, lhs: Any, rhs: Any, group_sizes: Any) -> tuple[Any, Any]:
        """Return operands with contracted groups, with 0 in the rows after the last group.

        These rows belong to no group, and must not influence the scale of a block.
        """
        if group_sizes.ndim != 1:
            return lhs, rhs
        place = self.contract[0].index(self.ragged)
        out = []
        for x, axes in zip((lhs, rhs), self.contract, strict=True):
            rows = lax.broadcasted_iota(group_sizes.dtype, x.shape, axes[place])
            out.append(jnp.where(rows < jnp.sum(group_sizes), x, jnp.zeros((), x.dtype)))
        return out[0], out[1]

    def _membership(self, lhs: Any, group_sizes: Any) -> Any:
        """Return which rows are in which group: `(groups, ...)`, with 1 for other dims of `lhs`."""
        ends = jnp.cumsum(group_sizes)[:, None]
        rows = jnp.arange(lhs.shape[self.ragged], dtype=group_sizes.dtype)
        member = (ends - group_sizes[:, None] <= rows) & (rows < ends)
        others = [a + 1 for a in range(lhs.ndim) if a != self.ragged]
        return jnp.expand_dims(member, others)

    def gradient(self, side: int, ndims: tuple[int, int], in_order: bool = False) -> Gradient:
        """Return an operand's gradient as a product of the cotangent and the other operand.

        The cotangent has the dims: group, batch, lhs free, rhs free. It is the left operand, except
        with groups, and if only as the right operand it gives dims `in_order`.
        """
        other, count, start = 1 - side, len(self.batch[0]), int(self.is_by_group)
        free, own_free = self.free(other, ndims[other]), self.free(side, ndims[side])
        first = start + count + (0 if side else len(own_free))
        ct_free, ct_batch = _range(first, len(free)), _range(start, count)
        # The result has the other operand's contracted dims, in ascending order.
        order = sorted(range(len(self.contract[other])), key=lambda i: self.contract[other][i])
        contracted = [self.contract[side][i] for i in order]
        batch = self.batch[side]
        positions = (*batch, *own_free, *contracted)
        in_order = in_order and self.ragged is None and list(positions) != sorted(positions)
        if in_order or self.is_by_group or self.ragged is not None and side:
            contract, batches = (tuple(free), ct_free), (self.batch[other], ct_batch)
            if self.is_by_group:
                ragged = self.contract[other][self.contract[0].index(self.ragged)]
                form, group = Form(contract, batches, ragged, 0), ()
            else:
                form, group = Form(contract, batches, self.ragged), self._groups
            return Gradient(form, False, (*group, *batch, *contracted, *own_free))
        ragged = None if self.ragged is None else count + own_free.index(self.ragged)
        form = Form((ct_free, tuple(free)), (ct_batch, self.batch[other]), ragged, self.group)
        return Gradient(form, True, positions)


def _check_group_sizes(group_sizes: Any, rows: int) -> None:
    """Raise if known group sizes are negative or exceed the rows."""
    if _compat.is_traced(group_sizes) or not getattr(group_sizes, "is_fully_addressable", True):
        return
    sizes = np.asarray(group_sizes)
    total = int(np.max(np.sum(sizes, -1), initial=0))
    if np.any(sizes < 0) or total > rows:
        raise ValueError(
            f"`group_sizes` must not be negative, and add up to at most the {rows} rows that "
            f"`lhs` has, got {sizes.tolist()}, which add up to {total}. Count the rows of each "
            "group, as `jnp.bincount(group_of_row, length=groups)` does."
        )


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient as a product.

    Attributes:
        form: the form of the product.
        cotangent_first: whether the cotangent is its left operand.
        positions: for each dim of the product, the operand's dim.
    """

    form: Form
    cotangent_first: bool
    positions: tuple[int, ...]


def _range(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


@dataclasses.dataclass(frozen=True)
class Operand:
    """The dtype and sharding that a gradient must have."""

    dtype: Any
    sharding: Any

    @classmethod
    def of(cls, x: Any) -> Operand:
        return cls(x.dtype, sharding_of(x))


def sharding_of(x: Any) -> Any:
    """Return the sharding of an array if it is part of its type (explicit axes), or None."""
    sharding = jax.typeof(x).sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return sharding if explicit else None


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static description of a matmul and its backward pass.

    Attributes:
        formats: a `DotGeneral`.
        form: the dims.
        precision: as in `lax.dot_general`.
        out: dtype of the result.
        out_sharding: sharding of the result on a mesh of explicit axes; otherwise None.
        operands: dtypes and shardings of the operands' gradients.
    """

    formats: Any
    form: Form
    precision: Any
    out: Any
    out_sharding: Any
    operands: tuple[Operand, Operand]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def multiply(lhs: Any, rhs: Any, group_sizes: Any, matmul: Matmul) -> jax.Array:
    """Multiply in the formats of the forward pass, with derivatives in those of the backward pass.

    Args:
        lhs: array of a floating dtype.
        rhs: array of a floating dtype.
        group_sizes: integers; None for a dense product.
        matmul: the description of the matmul.
    """
    return _forward(lhs, rhs, group_sizes, matmul)[0]


def _forward(lhs: Any, rhs: Any, group_sizes: Any, matmul: Matmul) -> Any:
    wide, formats = (lhs, rhs), matmul.formats.forward_dtype
    narrow = tuple(_narrowed(x, dtype) for x, dtype in zip(wide, formats, strict=True))
    product = _Product(matmul.form, matmul, matmul.out, matmul.out_sharding, formats)
    own = matmul.formats.kept_formats
    kept = narrow if own == formats else tuple(map(_narrowed, wide, own))
    return product(narrow, wide, group_sizes), (kept, wide, group_sizes)


def _backward(matmul: Matmul, residuals: Any, cotangent: Any) -> Any:
    narrow, wide, group_sizes = residuals
    form, formats = matmul.form, matmul.formats
    narrow_cotangent = _narrowed(cotangent, formats.cotangent_format)
    ndims = narrow[0].ndim, narrow[1].ndim
    if form.is_by_group and group_sizes.ndim > 1 and len(form.contract[0]) > 1:
        raise NotImplementedError(
            "The gradient of a `ragged_dot_general` over several contracted dims takes "
            f"`group_sizes` of shape (groups,), got {group_sizes.shape}."
        )

    def gradient(side: int) -> Any:
        of_own, of_other = formats.cotangent_format, formats.kept_formats[1 - side]
        in_order = _are_in_16_bits(of_own, of_other)
        operand, found = matmul.operands[side], form.gradient(side, ndims, in_order)
        positions, sharding = found.positions, operand.sharding
        if sharding is not None:
            spec = (*sharding.spec, *(None,) * (ndims[side] - len(sharding.spec)))
            sharding = sharding.update(spec=jax.P(*(spec[a] for a in positions)))
        own, other = (narrow_cotangent, cotangent), (narrow[1 - side], wide[1 - side])
        if isinstance(of_other, BlockFormat) and formats.keeps_blocks:
            # Quantise along the dims of the forward pass, which gives the numbers that it used.
            dims = form.contract[1 - side], form.batch[1 - side]
            other, of_other = (_in_blocks(other[0], of_other, *dims), other[1]), None
        lhs, rhs, pair = own, other, (of_own, of_other)
        if not found.cotangent_first:
            lhs, rhs, pair = other, own, (of_other, of_own)
        hadamard = formats.hadamard if side else 0
        product = _Product(found.form, matmul, operand.dtype, sharding, pair, hadamard)
        out = product((lhs[0], rhs[0]), (lhs[1], rhs[1]), group_sizes)
        # In a `shard_map`, the gradient of a replicated operand is summed over devices.
        missing = _compat.varying_axes(out) - _compat.varying_axes(wide[side])
        out = lax.psum(out, tuple(sorted(missing, key=str))) if missing else out
        return lax.transpose(out, [positions.index(a) for a in range(ndims[side])])

    return gradient(0), gradient(1), None


multiply.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True, repr=False)
class _Product:
    """One of the three products of a matmul.

    Attributes:
        form: the dims.
        matmul: the matmul that it belongs to.
        out: dtype of the result.
        out_sharding: sharding of the result on a mesh of explicit axes; otherwise None.
        formats: formats of the operands. Operands in block formats are not quantised yet.
        hadamard: length of the transform of both operands, if both have block formats.
    """

    form: Form
    matmul: Matmul
    out: Any
    out_sharding: Any
    formats: tuple[Any, Any]
    hadamard: int = 0

    def __call__(self, narrow: Any, wide: Any, group_sizes: Any) -> Any:
        """Multiply narrow arrays. The derivative is that of the product of wide arrays."""
        sums = self.matmul.formats.accumulate(self.out, self.formats)
        value = self._of_narrow(narrow, group_sizes, sums)
        sizes = () if group_sizes is None else (group_sizes,)
        return straight_through(value, self._of_wide, *narrow, *wide, *sizes)

    def _of_narrow(self, narrow: Any, group_sizes: Any, sums: Any) -> Any:
        """Return the product of operands in their formats."""
        in_blocks = [isinstance(f, BlockFormat) for f in self.formats]
        if not any(in_blocks):
            return self._multiply(self.form.multiply, narrow, group_sizes, sums)
        if all(in_blocks) and self.form.ragged is None:
            total = block_dot_general(
                straight_through(narrow[0]),
                straight_through(narrow[1]),
                self.form.numbers,
                quantisers=tuple(map(Quantiser.of, self.formats)),
                hadamard=self.hadamard,
                precision=self.matmul.precision,
                preferred_element_type=np.dtype(sums),
                out_sharding=self.out_sharding,
            )
            return cast(total, self.out)
        if self.form.is_by_group:
            narrow = self.form.within_groups(narrow[0], narrow[1], group_sizes)
        operands = [
            _in_blocks(x, f, self.form.contract[i], self.form.batch[i]) if in_blocks[i] else x
            for i, (x, f) in enumerate(zip(narrow, self.formats, strict=True))
        ]
        common = dtypes.promoted(*(_exact_16_bits(x.dtype) for x in operands))
        operands = [x.astype(common) for x in operands]
        return self._multiply(self.form.multiply, operands, group_sizes, sums)

    def _of_wide(self, *arrays: Any) -> Any:
        """Return the product of the narrow arrays' numbers, in the dtypes of the wide arrays."""
        pairs = zip(arrays[:2], arrays[2:4], strict=True)
        known = [straight_through(n.astype(w.dtype), _same, w) for n, w in pairs]
        sizes = arrays[4] if len(arrays) > 4 else None
        sums = dtypes.sum_dtype(self.out)
        return self._multiply(self.form.multiply_densely, known, sizes, sums)

    def __repr__(self) -> str:
        return "product"  # a short name, because it is printed in jaxprs

    def _multiply(self, multiply: Callable, operands: Any, sizes: Any, sums: Any) -> Any:
        total = multiply(*operands, sizes, self.matmul.precision, sums, self.out_sharding)
        return cast(total, self.out)


def _same(x: Any) -> Any:
    return x


def _narrowed(x: Any, dtype: Any) -> Any:
    """Cast to the format of a matmul, without a derivative. Block formats are quantised later."""
    return x if isinstance(dtype, BlockFormat) else straight_through(cast(x, dtype))


def _in_blocks(x: Any, format: BlockFormat, contract: Any, batch: Any) -> Any:
    """Round an operand to the numbers of a block format, in bfloat16, without a derivative."""
    return block_round(straight_through(x), Quantiser.of(format), contract, batch)


def _are_in_16_bits(*formats: Any) -> bool:
    """Return whether operands are multiplied in 16 bits: neither both FP8 nor both in blocks.

    XLA:CPU fails to transpose a float32 product of bfloat16 arrays.
    """
    in_blocks = [isinstance(f, BlockFormat) for f in formats]
    in_fp8 = [not b and dtypes.is_fp8(f) for b, f in zip(in_blocks, formats, strict=True)]
    return not (all(in_blocks) or all(in_fp8))


def _exact_16_bits(dtype: Any) -> Any:
    """Return the 16-bit dtype in which an operand is multiplied. bfloat16 holds FP8 exactly."""
    return jnp.bfloat16 if dtypes.is_fp8(dtype) else dtype
