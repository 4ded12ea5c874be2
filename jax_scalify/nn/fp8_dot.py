"""Matrix multiplications with separate formats for the two passes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.ops.scaling import cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotGeneral:
    """`dot_general` in chosen formats: what Flax layers take as `dot_general=`.

    The class itself is a `dot_general_cls=`.

    Attributes:
        forward_dtype: format of both operands, or a pair with one for each.
        backward_dtype: format of the cotangent.
        accumulation_dtype: dtype in which the matmuls give their sums; by default that of results
            in bfloat16 or float64, bfloat16 for float16 results of FP8 formats, else float32.

    Raises:
        TypeError: if a format is not floating point.

    Example:
        >>> dot = DotGeneral(forward_dtype=(jnp.float8_e4m3fn, jnp.float8_e5m2))
        >>> print(dot(jnp.full((1, 2), 1.1), jnp.full((2, 1), 1.1), (((1,), (0,)), ((), ()))))
        [[2.25]]
    """

    forward_dtype: Any = jnp.float8_e4m3fn
    backward_dtype: Any = jnp.float8_e5m2
    accumulation_dtype: Any = None

    def __post_init__(self) -> None:
        """Refuse what is no floating-point format."""
        forward = self.forward_dtype
        pair = forward if isinstance(forward, (tuple, list)) else (forward, forward)
        if len(pair) != 2:
            raise TypeError(f"`forward_dtype` must be one dtype or two, got {forward}.")
        forward = tuple(dtypes.as_floating(d, "forward_dtype", real=True) for d in pair)
        accumulation = self.accumulation_dtype
        if accumulation is not None:
            accumulation = dtypes.as_floating(accumulation, "accumulation_dtype", real=True)
        object.__setattr__(self, "forward_dtype", forward)
        object.__setattr__(self, "accumulation_dtype", accumulation)
        backward = dtypes.as_floating(self.backward_dtype, "backward_dtype", real=True)
        object.__setattr__(self, "backward_dtype", backward)

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
        dtypes.as_floating(lhs.dtype, "lhs", real=True)
        dtypes.as_floating(rhs.dtype, "rhs", real=True)
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        dims = (tuple(lhs_contract), tuple(rhs_contract)), (tuple(lhs_batch), tuple(rhs_batch))
        out = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
        explicit = _sharding(lhs) or _sharding(rhs)
        operands = _Operand.of(lhs), _Operand.of(rhs)
        own = out_sharding if explicit else None
        result = _dot(lhs, rhs, _Dot(self, dims, precision, out, own, *operands))
        if out_sharding is None or explicit:
            return result
        return lax.with_sharding_constraint(result, out_sharding)

    def accumulate(self, out: Any) -> Any:
        """The dtype that the matmuls are asked for, for results of dtype `out`.

        The operands' FP8 has left no digit that bfloat16 would lose, and it has float32's range.
        """
        if self.accumulation_dtype is not None:
            return self.accumulation_dtype
        formats = *self.forward_dtype, self.backward_dtype
        is_fp8 = all(map(dtypes.is_narrow_float, formats))
        return dtypes.sum_dtype(jnp.bfloat16 if is_fp8 and out == jnp.float16 else out)


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
) -> jax.Array:
    """Multiply like `jax.lax.dot_general`, in one format forward and another backward.

    Operands are cast to `forward_dtype`, the cotangent to `backward_dtype` (saturating for FP8),
    and all three matmuls take the cast operands. The general linear layer of Balanca et al. 2024
    (Algorithm 6) without its bias. Fits the `dot_general=` argument of Flax layers.

    Args:
        lhs: array of a floating dtype.
        rhs: array of a floating dtype.
        dimension_numbers: as in `jax.lax.dot_general`.
        precision: as in `jax.lax.dot_general`.
        out_sharding: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result; by default that of the operands' promotion.
            Give it for operands that are FP8 already.
        forward_dtype: format of both operands, or a pair with one for each.
        backward_dtype: format of the cotangent.
        accumulation_dtype: dtype in which the matmuls give their sums; by default that of results
            in bfloat16 or float64, bfloat16 for float16 results of FP8 formats, else float32.

    Raises:
        TypeError: if an operand or a format is not floating point.
        NotImplementedError: if it is differentiated twice.

    Example:
        >>> x = jnp.full((2, 4), 1.1)
        >>> print(dot_general(x, x, (((1,), (1,)), ((), ())))[0, 0])
        5.0625
    """
    dot = DotGeneral(
        forward_dtype=forward_dtype,
        backward_dtype=backward_dtype,
        accumulation_dtype=accumulation_dtype,
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
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype` of `dot_general`.

    Raises:
        TypeError: as `dot_general`.
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
    # With batch axes in `b` only, those of `a` come first.
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
    """Contract like `jax.numpy.einsum`, every product of two in the formats of `dot_general`.

    Args:
        subscripts: as in `jax.numpy.einsum`.
        *operands: arrays of floating dtypes.
        optimize: as in `jax.numpy.einsum`.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result.
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype` of `dot_general`.

    Raises:
        TypeError: as `dot_general`.
        ValueError: as `jax.numpy.einsum`.

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
    """The linear layer `x @ kernel + bias`, its matmul in the formats of `dot_general`.

    Algorithm 6 of Balanca et al. 2024; the bias is added to the result, in its dtype.

    Args:
        x: `(..., k)`.
        kernel: `(k, n)`.
        bias: `(n,)`.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result.
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype` of `dot_general`.

    Raises:
        TypeError: as `dot_general`.
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
    return out if bias is None else out + bias.astype(out.dtype)


# The rules for the two passes


@dataclasses.dataclass(frozen=True)
class _Operand:
    """What a gradient has to look like."""

    dtype: Any
    sharding: Any

    @classmethod
    def of(cls, x: Any) -> _Operand:
        return cls(x.dtype, _sharding(x))


@dataclasses.dataclass(frozen=True)
class _Dot:
    """All that a dot and its backward pass need to know besides the operands."""

    formats: DotGeneral
    dims: Any
    precision: Any
    out: Any
    out_sharding: Any
    lhs: _Operand
    rhs: _Operand


def _sharding(x: Any) -> Any:
    """The sharding that is part of an array's type, on a mesh of explicit axes."""
    sharding = jax.typeof(x).sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return sharding if explicit else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(lhs: Any, rhs: Any, dot: _Dot) -> jax.Array:
    return _forward(lhs, rhs, dot)[0]


def _forward(lhs: Any, rhs: Any, dot: _Dot) -> Any:
    lhs_dtype, rhs_dtype = dot.formats.forward_dtype
    lhs, rhs = _once_differentiable((cast(lhs, lhs_dtype), cast(rhs, rhs_dtype)))
    out = _narrow_dot(lhs, rhs, dot.dims, dot, dot.out, dot.out_sharding)
    return out, (lhs, rhs)


@jax.custom_jvp
def _once_differentiable(narrow: Any) -> Any:
    """Return narrow operands; their tangents would be as narrow, and saturate or vanish."""
    return narrow


@functools.partial(_once_differentiable.defjvp, symbolic_zeros=True)
def _once_differentiable_jvp(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "A matmul of `jax_scalify.nn` or `fp8_matmuls` was differentiated twice: the derivative of "
        "its backward pass would be rounded to the operands' format. Use `jax.lax.dot_general` "
        "there, or leave such matmuls out with the `select` of `fp8_matmuls`."
    )


def _backward(dot: _Dot, narrow: Any, cotangent: Any) -> Any:
    lhs, rhs = narrow
    cotangent = cast(cotangent, dot.formats.backward_dtype)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dot.dims

    def gradient(other: Any, contract: Any, batch: Any, own: Any, ndim: int, is_lhs: bool) -> Any:
        own_contract, own_batch = own
        free = [a for a in range(other.ndim) if a not in contract and a not in batch]
        own_free = [a for a in range(ndim) if a not in own_contract and a not in own_batch]
        first = len(own_batch) + (len(own_free) if is_lhs else 0)
        ct_contract = tuple(range(first, first + len(free)))
        ct_batch = tuple(range(len(batch)))
        dims = (ct_contract, tuple(free)), (ct_batch, batch)
        # The result's dims: batch, own free, the other's contracted in ascending order.
        order = sorted(range(len(contract)), key=lambda i: contract[i])
        positions = [*own_batch, *own_free, *(own_contract[i] for i in order)]
        operand = dot.lhs if is_lhs else dot.rhs
        sharding = operand.sharding
        if sharding is not None:
            spec = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
            sharding = sharding.update(spec=jax.P(*(spec[a] for a in positions)))
        out = _narrow_dot(cotangent, other, dims, dot, operand.dtype, sharding)
        return lax.transpose(out, [positions.index(a) for a in range(ndim)])

    lhs_dims, rhs_dims = (lhs_contract, lhs_batch), (rhs_contract, rhs_batch)
    lhs_grad = gradient(rhs, *rhs_dims, lhs_dims, lhs.ndim, True)
    rhs_grad = gradient(lhs, *lhs_dims, rhs_dims, rhs.ndim, False)
    return lhs_grad, rhs_grad


_dot.defvjp(_forward, _backward)


def _narrow_dot(lhs: Any, rhs: Any, dims: Any, dot: _Dot, out: Any, out_sharding: Any) -> jax.Array:
    """Multiply, with dims as they are: merged ones would lose their places on a mesh."""
    accumulate = dot.formats.accumulate(out)
    total = lax.dot_general(lhs, rhs, dims, dot.precision, accumulate, out_sharding=out_sharding)
    return cast(total, out)
