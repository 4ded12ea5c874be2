"""Matmuls in FP8 as u-µP has them: operands are cast as they are.

Inputs, weights and gradients of unit scale are in the range of E4M3 and E5M2, so there are no
scales to find and no statistics. The inputs of the critical matmuls, those of attention's output
projection and of the feed-forward layer's down projection, grow in training, and the readout makes
logits: they stay in the wider dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import nn


def fp8_matmul(
    lhs: Any,
    rhs: Any,
    *,
    forward_dtype: Any = jnp.float8_e4m3fn,
    backward_dtype: Any = jnp.float8_e5m2,
) -> jax.Array:
    """Multiply matrices that are cast to E4M3, and cotangents that are cast to E5M2.

    The casts saturate. All three matmuls are of FP8 operands, and add up in at least float32.

    Args:
        lhs: `(..., m, k)`, of a floating dtype.
        rhs: `(..., k, n)`, likewise; leading axes broadcast.
        forward_dtype: format of both operands, or a pair with one for each.
        backward_dtype: format of the cotangent.

    Returns:
        `(..., m, n)`, in the dtype to which those of the operands promote, and so do gradients have
        the dtypes of their operands.

    Raises:
        TypeError: if an operand or a format is not floating point.
        ValueError: if the shapes do not fit.

    Source: Blake et al., *u-µP* (2024), section 4.2.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> print(us.fp8_matmul(jnp.full((1, 1), 1.1), jnp.ones((1, 1))))
        [[1.125]]
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    return nn.matmul(lhs, rhs, forward_dtype=forward_dtype, backward_dtype=backward_dtype)


def fp8_ragged_dot(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
    """Multiply rows by their experts' matrices as `fp8_matmul` multiplies."""
    formats: dict[str, Any] = dict(forward_dtype=jnp.float8_e4m3fn, backward_dtype=jnp.float8_e5m2)
    return nn.ragged_dot(lhs, rhs, group_sizes, **formats)
