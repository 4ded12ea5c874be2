"""Matrix multiplication with separate formats for the two passes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify import dtypes
from jax_scalify.primitives import cast


@dataclasses.dataclass(frozen=True)
class _Formats:
    forward: Any
    backward: Any
    out: Any


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
) -> jax.Array:
    """Multiply like `jax.lax.dot_general`, in one format forward and another backward.

    Operands are cast to `forward_dtype`, the cotangent to `backward_dtype` (saturating for FP8),
    and all three matmuls take the cast operands; they accumulate in at least float32. The general
    linear layer of Balanca et al. 2024 (Algorithm 6) without its bias. Fits the `dot_general=`
    argument of Flax layers.

    Args:
        lhs: array of a floating dtype.
        rhs: array of a floating dtype.
        dimension_numbers: as in `jax.lax.dot_general`.
        precision: as in `jax.lax.dot_general`.
        out_sharding: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result; by default that of the operands' promotion.
        forward_dtype: format of both operands.
        backward_dtype: format of the cotangent.

    Raises:
        TypeError: if an operand or a format is not floating point.

    Example:
        >>> x = jnp.full((2, 4), 1.1)
        >>> print(dot_general(x, x, (((1,), (1,)), ((), ())))[0, 0])
        5.0625
    """
    for name, dtype in (
        ("lhs", lhs.dtype),
        ("rhs", rhs.dtype),
        ("forward_dtype", jnp.dtype(forward_dtype)),
        ("backward_dtype", jnp.dtype(backward_dtype)),
    ):
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"`{name}` must be floating point, got {dtype}.")
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    dims = (tuple(lhs_contract), tuple(rhs_contract)), (tuple(lhs_batch), tuple(rhs_batch))
    out = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    formats = _Formats(jnp.dtype(forward_dtype), jnp.dtype(backward_dtype), jnp.dtype(out))
    result = _dot(lhs, rhs, dims, precision, formats)
    return result if out_sharding is None else lax.with_sharding_constraint(result, out_sharding)


def _narrow_dot(lhs: Any, rhs: Any, dims: Any, precision: Any, out: Any) -> jax.Array:
    total = lax.dot_general(
        lhs, rhs, dims, precision=precision, preferred_element_type=dtypes.compute_dtype(out)
    )
    return cast(total, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _dot(lhs: Any, rhs: Any, dims: Any, precision: Any, formats: _Formats) -> jax.Array:
    return _forward(lhs, rhs, dims, precision, formats)[0]


def _forward(lhs: Any, rhs: Any, dims: Any, precision: Any, formats: _Formats) -> Any:
    lhs_narrow = cast(lhs, formats.forward)
    rhs_narrow = cast(rhs, formats.forward)
    out = _narrow_dot(lhs_narrow, rhs_narrow, dims, precision, formats.out)
    # Empty arrays carry the operands' dtypes to the backward pass.
    return out, (lhs_narrow, rhs_narrow, jnp.zeros(0, lhs.dtype), jnp.zeros(0, rhs.dtype))


def _backward(dims: Any, precision: Any, formats: _Formats, residuals: Any, ct: Any) -> Any:
    lhs, rhs, lhs_like, rhs_like = residuals
    ct = cast(ct, formats.backward)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims

    def gradient(other: Any, contract: Any, batch: Any, own: Any, ndim: int, is_lhs: bool) -> Any:
        own_contract, own_batch = own
        free = [a for a in range(other.ndim) if a not in contract and a not in batch]
        own_free = [a for a in range(ndim) if a not in own_contract and a not in own_batch]
        first = len(own_batch) + (len(own_free) if is_lhs else 0)
        ct_contract = tuple(range(first, first + len(free)))
        ct_batch = tuple(range(len(batch)))
        like = lhs_like if is_lhs else rhs_like
        out = _narrow_dot(
            ct, other, ((ct_contract, tuple(free)), (ct_batch, batch)), precision, like.dtype
        )
        # The result's dims: batch, own free, the other's contracted in ascending order.
        order = sorted(range(len(contract)), key=lambda i: contract[i])
        positions = [*own_batch, *own_free, *(own_contract[i] for i in order)]
        return lax.transpose(out, [positions.index(a) for a in range(ndim)])

    lhs_dims, rhs_dims = (lhs_contract, lhs_batch), (rhs_contract, rhs_batch)
    lhs_grad = gradient(rhs, *rhs_dims, lhs_dims, lhs.ndim, True)
    rhs_grad = gradient(lhs, *lhs_dims, rhs_dims, rhs.ndim, False)
    return lhs_grad, rhs_grad


_dot.defvjp(_forward, _backward)
