"""Matrix multiplications with separate formats for the two passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.blocks.array import is_block_scaled
from jax_scalify.blocks.formats import BlockFormat, as_format
from jax_scalify.nn._products import Form, Matmul, Operand, multiply, sharding_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotGeneral:
    """`dot_general` in chosen formats, for the `dot_general=` argument of Flax layers.

    The class itself is for `dot_general_cls=`.

    Attributes:
        forward_dtype: format of both operands, or a pair with one for each: a dtype, or a block
            format (`jsa.BlockFormat` or its name, `"mxfp8"`, `"mxfp4"`, `"nvfp4"`).
        backward_dtype: format of the cotangent. With a block format, each of the three matmuls
            quantises its operands along its own contracted dims. With a dtype, the cotangent is
            multiplied by the operands of the forward pass, in their formats. In a pair, the second
            is the format of the operand that the cotangent is multiplied by:
            `forward_dtype=jnp.float16, backward_dtype=(jnp.float8_e5m2, jnp.float8_e4m3fn)` is a
            forward pass in float16 with FP8 matmuls for both gradients.
        accumulation_dtype: dtype of the matmuls' sums. By default the result's if it is bfloat16 or
            float64, bfloat16 for float16 results of FP8 and block formats, and otherwise float32.
        hadamard: length of a random Hadamard transform, a power of two, or 0 for no transform. It
            is applied to both operands of the right operand's gradient (a layer's weight gradient)
            before they are quantised. It spreads outliers over this many elements and does not
            change the product. For block formats, but not for matmuls of groups.

    Raises:
        TypeError: if a format is not floating point.
        ValueError: if `hadamard` is not a power of two, or is used without block formats.

    Example:
        >>> dot = DotGeneral(forward_dtype=(jnp.float8_e4m3fn, jnp.float8_e5m2))
        >>> print(dot(jnp.full((1, 2), 1.1), jnp.full((2, 1), 1.1), (((1,), (0,)), ((), ()))))
        [[2.25]]
    """

    forward_dtype: Any = jnp.float8_e4m3fn
    backward_dtype: Any = jnp.float8_e5m2
    accumulation_dtype: Any = None
    hadamard: int = 0

    def __post_init__(self) -> None:
        """Check and normalise the formats."""
        forward = self.forward_dtype
        pair = forward if isinstance(forward, (tuple, list)) else (forward, forward)
        if len(pair) != 2:
            raise TypeError(f"`forward_dtype` must be one dtype or two, got {forward}.")
        forward = tuple(as_format(d, "forward_dtype") for d in pair)
        accumulation = self.accumulation_dtype
        if accumulation is not None:
            accumulation = dtypes.as_floating(accumulation, "accumulation_dtype", real=True)
        object.__setattr__(self, "forward_dtype", forward)
        object.__setattr__(self, "accumulation_dtype", accumulation)
        backward = self.backward_dtype
        if isinstance(backward, (tuple, list)):
            if len(backward) != 2:
                raise TypeError(f"`backward_dtype` must be one dtype or two, got {backward}.")
            backward = tuple(as_format(d, "backward_dtype") for d in backward)
        else:
            backward = as_format(backward, "backward_dtype")
        object.__setattr__(self, "backward_dtype", backward)
        self._check_hadamard()

    @property
    def cotangent_format(self) -> Any:
        """The format of the cotangent."""
        return self.backward_dtype[0] if self.has_own_operands else self.backward_dtype

    @property
    def has_own_operands(self) -> bool:
        """Whether the backward pass casts the operands to a format of its own."""
        return isinstance(self.backward_dtype, tuple)

    @property
    def kept_formats(self) -> tuple[Any, Any]:
        """The formats of the operands in the backward pass."""
        return (self.backward_dtype[1],) * 2 if self.has_own_operands else self.forward_dtype

    @property
    def keeps_blocks(self) -> bool:
        """Whether the backward pass uses the blocks that the forward pass has quantised."""
        return not (self.has_own_operands or isinstance(self.cotangent_format, BlockFormat))

    def _check_hadamard(self) -> None:
        length = self.hadamard
        if type(length) is not int or length < 0 or length & (length - 1) or length == 1:
            raise ValueError(f"`hadamard` must be 0 or a power of two from 2, got {length!r}.")
        formats = self.kept_formats[0], self.cotangent_format
        if length and not all(isinstance(f, BlockFormat) for f in formats):
            raise ValueError(
                f"`hadamard` needs block formats for the right operand's gradient, got {formats}: "
                "its operands are the left one, in `forward_dtype`, and the cotangent, in "
                "`backward_dtype`."
            )

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiply like `jax.lax.dot_general`."""
        form = Form.of(dimension_numbers)
        types = precision, preferred_element_type, out_sharding
        return self._multiply(lhs, rhs, None, form, *types)

    def ragged(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        dimension_numbers: lax.RaggedDotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiply like `jax.lax.ragged_dot_general`: see `jsa.nn.ragged_dot_general`."""
        form = Form.of_groups(dimension_numbers, lhs, rhs, group_sizes)
        types = precision, preferred_element_type, out_sharding
        return self._multiply(lhs, rhs, group_sizes, form, *types)

    def _multiply(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: Any,
        form: Form,
        precision: Any,
        preferred_element_type: Any,
        out_sharding: Any,
    ) -> jax.Array:
        lhs, rhs = (jnp.asarray(x) if is_block_scaled(x) else x for x in (lhs, rhs))
        dtypes.as_floating(lhs.dtype, "lhs", real=True)
        dtypes.as_floating(rhs.dtype, "rhs", real=True)
        out = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
        explicit = sharding_of(lhs) or sharding_of(rhs)
        operands = Operand.of(lhs), Operand.of(rhs)
        own = out_sharding if explicit else None
        matmul = Matmul(self, form, precision, out, own, operands)
        result = multiply(lhs, rhs, group_sizes, matmul)
        if out_sharding is None or explicit:
            return result
        return lax.with_sharding_constraint(result, out_sharding)

    def accumulate(self, out: Any, formats: Any) -> Any:
        """Return the dtype of the sums of a product of two formats, for a result of dtype `out`.

        Sums of FP8 products for a float16 result are bfloat16. It has the range of float32, and
        more digits than FP8 operands have.
        """
        if self.accumulation_dtype is not None:
            return self.accumulation_dtype
        is_fp8 = all(map(_is_narrow, formats))
        return dtypes.sum_dtype(jnp.bfloat16 if is_fp8 and out == jnp.float16 else out)


def _is_narrow(format: Any) -> bool:
    """Return whether a format has few bits. None stands for a block format, expanded to 16 bits."""
    is_block = format is None or isinstance(format, BlockFormat)
    return is_block or dtypes.is_fp8(format)


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    forward_dtype: Any = jnp.float8_e4m3fn,
    backward_dtype: Any = jnp.float8_e5m2,
    accumulation_dtype: Any = None,
    hadamard: int = 0,
) -> jax.Array:
    """Multiply like `jax.lax.dot_general`, in one format forward and another backward.

    Operands are cast to `forward_dtype` and the cotangent to `backward_dtype` (saturating for FP8),
    and all three matmuls take the cast operands. It is the general linear layer of Balanca et al.
    2024 (Algorithm 6) without its bias, and fits the `dot_general=` argument of Flax layers.

    Args:
        lhs: array of a floating dtype.
        rhs: array of a floating dtype.
        dimension_numbers: as in `jax.lax.dot_general`.
        precision: as in `jax.lax.dot_general`.
        out_sharding: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result; by default the operands' promoted dtype. Give
            it if operands are FP8 already.
        forward_dtype: format of both operands, or a pair with one for each: a dtype, or a block
            format (`jsa.BlockFormat` or its name, `"mxfp8"`, `"mxfp4"`, `"nvfp4"`).
        backward_dtype: format of the cotangent, or a pair: this format, and the format of the
            operand that the cotangent is multiplied by. By default that is `forward_dtype`.
        accumulation_dtype: dtype of the matmuls' sums. By default the result's if it is bfloat16 or
            float64, bfloat16 for float16 results of FP8 and block formats, and otherwise float32.
        hadamard: as in `DotGeneral`.

    Raises:
        TypeError: if an operand or a format is not floating point.

    Example:
        >>> x = jnp.full((2, 4), 1.1)
        >>> print(dot_general(x, x, (((1,), (1,)), ((), ())))[0, 0])
        5.0625
    """
    dot = DotGeneral(
        forward_dtype=forward_dtype,
        backward_dtype=backward_dtype,
        accumulation_dtype=accumulation_dtype,
        hadamard=hadamard,
    )
    types = (precision, preferred_element_type)
    return dot(lhs, rhs, dimension_numbers, *types, out_sharding=out_sharding)


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    **formats: Any,
) -> jax.Array:
    """Multiply like `jax.numpy.matmul`, in the formats of `dot_general`.

    Args:
        a: `(..., m, k)` or `(k,)`.
        b: `(..., k, n)` or `(k,)`; leading axes broadcast.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result.
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype`, `hadamard` of
            `dot_general`.

    Raises:
        TypeError: as `dot_general` raises it.
        ValueError: if the shapes do not fit.

    Example:
        >>> print(matmul(jnp.full((2, 4), 1.1), jnp.full(4, 1.1)))
        [5.0625 5.0625]
    """
    inner = -2 if b.ndim > 1 else -1
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[inner]:
        raise ValueError(
            f"`a` must be (..., m, k) and `b` (..., k, n), got {a.shape} and {b.shape}."
        )
    batch = ()
    if a.ndim > 2 and b.ndim > 2:
        batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a = jnp.broadcast_to(a, (*batch, *a.shape[-2:]))
        b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    axes = tuple(range(len(batch)))
    dims = ((a.ndim - 1,), (b.ndim + inner,)), (axes, axes)
    out = DotGeneral(**formats)(a, b, dims, precision, preferred_element_type)
    # With batch axes in `b` only, `dot_general` puts the free axis of `a` first.
    return jnp.moveaxis(out, 0, -2) if a.ndim == 2 and b.ndim > 2 else out


def einsum(
    subscripts: str,
    /,
    *operands: jax.Array,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
    **formats: Any,
) -> jax.Array:
    """Contract like `jax.numpy.einsum`, with each pairwise product in the formats of `dot_general`.

    Args:
        subscripts: as in `jax.numpy.einsum`.
        *operands: arrays of floating dtypes.
        optimize: as in `jax.numpy.einsum`.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result.
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype`, `hadamard` of
            `dot_general`.

    Raises:
        TypeError: as `dot_general` raises it.
        ValueError: as `jax.numpy.einsum` raises it.

    Example:
        >>> print(einsum("ij,j->i", jnp.full((2, 4), 1.1), jnp.full(4, 1.1)))
        [5.0625 5.0625]
    """
    types = {"precision": precision, "preferred_element_type": preferred_element_type}
    return _compat.einsum(DotGeneral(**formats), subscripts, *operands, optimize=optimize, **types)


def linear(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    **formats: Any,
) -> jax.Array:
    """Compute `x @ kernel + bias`, with the matmul in the formats of `dot_general`.

    It is Algorithm 6 of Balanca et al. 2024. The bias is cast to the result's dtype and added.

    Args:
        x: `(..., k)`.
        kernel: `(k, n)`.
        bias: `(n,)`.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result.
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype`, `hadamard` of
            `dot_general`.

    Raises:
        TypeError: as `dot_general` raises it.
        ValueError: if the shapes do not fit.

    Example:
        >>> print(linear(jnp.full((1, 4), 1.1), jnp.full((4, 2), 1.1), jnp.ones(2)))
        [[6.0625 6.0625]]
    """
    if kernel.ndim != 2 or not x.ndim or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"`kernel` must be (k, n) for `x` (..., k), got {kernel.shape}, {x.shape}."
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"`bias` must be {kernel.shape[1:]}, got {bias.shape}.")
    types = {"precision": precision, "preferred_element_type": preferred_element_type}
    out = matmul(x, kernel, **types, **formats)
    if bias is None:
        return out
    return out + lax.broadcast_to_rank(bias.astype(out.dtype), out.ndim)
