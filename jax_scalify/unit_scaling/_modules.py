"""What the modules of both of Flax's interfaces share: all but the parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.fp8_scheme import fp8_matmul
from jax_scalify.unit_scaling.residuals import ResidualScheme
from jax_scalify.unit_scaling.umup import UmupConfig


def promoted(dtype: Any, *arrays: Any) -> list[Any]:
    """Arrays in a dtype, by default the one they promote to; None stays."""
    dtype = dtype or jnp.result_type(*(x for x in arrays if x is not None))
    return [None if x is None else x.astype(dtype) for x in arrays]


def linear(
    x: Any, kernel: Any, bias: Any, constraint: Any, fp8: bool, readout: bool, dtype: Any
) -> jax.Array:
    """Apply a linear layer."""
    x, kernel, bias = promoted(dtype, x, kernel, bias)
    if readout:
        return F.linear_readout(x, kernel, bias, constraint)
    return F.linear(x, kernel, bias, constraint, matmul=fp8_matmul if fp8 else jnp.matmul)


def check_heads(width: int, num_heads: int, rope: bool) -> None:
    """Refuse a width that heads cannot share."""
    if num_heads < 1 or width % num_heads or rope and (width // num_heads) % 2:
        even = " and each an even number of features" if rope else ""
        raise ValueError(
            f"`num_heads` must divide the width{even}, got {num_heads} heads of width {width}."
        )


def attend(
    query: Any, key: Any, value: Any, num_heads: int, mult: float, is_causal: bool, rope: bool
) -> jax.Array:
    """Attention of `(..., T, width)`, with its heads side by side."""
    heads = (*query.shape[:-1], num_heads, query.shape[-1] // num_heads)
    q, k, v = (x.reshape(heads) for x in (query, key, value))
    if rope:
        q, k = F.rope(q), F.rope(k)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, mult=mult)
    return out.reshape(query.shape)


def branch_taus(
    config: UmupConfig, residuals: ResidualScheme | None, num_layers: int
) -> list[tuple[float, float]]:
    """The taus of attention and MLP of each layer."""
    tau = residuals or config.residuals()
    return [(tau(2 * i, 2 * num_layers), tau(2 * i + 1, 2 * num_layers)) for i in range(num_layers)]
