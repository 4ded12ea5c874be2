"""Matmuls of groups, as in a mixture of experts, with separate formats for the two passes."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jax_scalify.nn.fp8_dot import DotGeneral

_ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    out_sharding: Any = None,
    **formats: Any,
) -> jax.Array:
    """Multiply groups of rows like `jax.lax.ragged_dot`, in one format forward, another backward.

    The first `group_sizes[0]` rows are multiplied by `rhs[0]`, the next by `rhs[1]`, and so on.
    Rows after the last group are 0, and so are their gradients. All three matmuls are ragged, and
    take operands in `forward_dtype` and a cotangent in `backward_dtype`.

    Args:
        lhs: `(m, k)`.
        rhs: `(groups, k, n)`.
        group_sizes: `(groups,)`, integers that add up to at most m. A group may be empty.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result; by default the operands' promoted dtype.
        group_offset: must be None: JAX does not implement other offsets.
        out_sharding: as in `jax.lax.ragged_dot`.
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype` of `dot_general`.

    Returns:
        `(m, n)`.

    Raises:
        TypeError: as `dot_general` raises it, or if `group_sizes` are not integers.
        ValueError: if the shapes do not fit, or if sizes are negative or add up to more than m
            (traced sizes are not checked).
        NotImplementedError: if `group_offset` is not None.

    Example:
        >>> x, experts = jnp.full((3, 4), 1.1), jnp.stack([jnp.ones((4, 1)), 2 * jnp.ones((4, 1))])
        >>> print(ragged_dot(x, experts, jnp.array([1, 2])).T)
        [[4.5 9.  9. ]]
    """
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"`lhs` must be (m, k) and `rhs` (groups, k, n), got {lhs.shape} and {rhs.shape}."
        )
    types = precision, preferred_element_type, group_offset, out_sharding
    return ragged_dot_general(lhs, rhs, group_sizes, _ROWS, *types, **formats)


def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    out_sharding: Any = None,
    **formats: Any,
) -> jax.Array:
    """Multiply groups like `jax.lax.ragged_dot_general`, in one format forward, another backward.

    Args:
        lhs: array of a floating dtype. One of its dims is divided into groups: a free dim, or a
            contracted dim. In the second case the result has a leading dim of groups.
        rhs: array of a floating dtype.
        group_sizes: `(groups,)`, integers, or other shapes as in `jax.lax.ragged_dot_general`.
        ragged_dot_dimension_numbers: as in `jax.lax.ragged_dot_general`. If a batch dim is divided
            into groups, the product is dense, as in JAX.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: dtype of the result; by default the operands' promoted dtype.
        group_offset: must be None: JAX does not implement other offsets.
        out_sharding: as in `jax.lax.ragged_dot_general`.
        **formats: `forward_dtype`, `backward_dtype`, `accumulation_dtype` of `dot_general`.

    Raises:
        TypeError: as `dot_general` raises it, or if `group_sizes` are not integers, or if dims do
            not fit.
        ValueError: if sizes are negative or add up to more than the number of rows (traced sizes
            are not checked).
        NotImplementedError: if `group_offset` is not None, and for gradients with several
            contracted dims and `group_sizes` of more than one dim.

    Example:
        >>> dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        >>> x = jnp.full((3, 2), 1.1)
        >>> print(ragged_dot_general(x, x, jnp.array([1, 2]), dims)[:, 0, 0])
        [1.265625 2.53125 ]
    """
    if group_offset is not None:
        raise NotImplementedError("`group_offset` must be None: JAX does not compute another.")
    types = precision, preferred_element_type
    return DotGeneral(**formats).ragged(
        lhs, rhs, group_sizes, ragged_dot_dimension_numbers, *types, out_sharding=out_sharding
    )
