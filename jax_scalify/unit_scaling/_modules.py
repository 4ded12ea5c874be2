"""What the modules of both of Flax's interfaces share: all but the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.unit_scaling import functional as F
from jax_scalify.unit_scaling.fp8_scheme import fp8_matmul, fp8_ragged_dot
from jax_scalify.unit_scaling.residuals import ResidualScheme
from jax_scalify.unit_scaling.scaling import scale_bwd
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


def check_heads(width: int, num_heads: int, num_kv_heads: int | None, rope: bool) -> int:
    """Return the number of heads of keys, and refuse heads that cannot share the width."""
    if num_heads < 1 or width % num_heads or rope and (width // num_heads) % 2:
        even = " and each an even number of features" if rope else ""
        raise ValueError(
            f"`num_heads` must divide the width{even}, got {num_heads} heads of width {width}."
        )
    groups = num_heads if num_kv_heads is None else num_kv_heads
    if groups < 1 or num_heads % groups:
        raise ValueError(
            f"`num_kv_heads` must divide the {num_heads} heads of queries, got {num_kv_heads}."
        )
    return groups


def heads_of(x: jax.Array, number: int) -> jax.Array:
    """Heads that lie side by side, `(..., T, number * H)`, as `(..., T, number, H)`."""
    return x.reshape(*x.shape[:-1], number, x.shape[-1] // number)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, rope: bool, **options: Any
) -> jax.Array:
    """Attention of heads, with those of the result side by side: `(..., T, width)`.

    Gradients of keys and values are brought to unit scale where several heads of queries share
    them. The layers that make both, which have fewer outputs, make up for it on the way back.
    """
    if rope:
        query, key = F.rope(query), F.rope(key)
    shared = math.sqrt(key.shape[-2] / query.shape[-2])
    key, value = scale_bwd(key, shared), scale_bwd(value, shared)
    out = F.scaled_dot_product_attention(query, key, value, **options)
    return out.reshape(*out.shape[:-2], -1)


def check_rate(rate: float) -> float:
    """Refuse what is no rate of dropout."""
    if not 0 <= rate < 1:
        raise ValueError(f"`rate` of `Dropout` must be in [0, 1), got {rate}.")
    return rate


def tied(table: Any, is_tied: bool) -> jax.Array:
    """A table; its gradient by 1/√2 if two uses add their gradients."""
    return scale_bwd(table, math.sqrt(0.5)) if is_tied else table


def check_scan(num_layers: int) -> None:
    """Refuse a scan over nothing."""
    if num_layers < 1:
        raise ValueError(
            f"`scan_layers` needs one layer or more, got `num_layers` {num_layers}: leave it out."
        )


def remat_options(remat: bool | Callable[..., bool], scanned: bool) -> dict[str, Any]:
    """Options of `jax.checkpoint`: in a scan XLA cannot undo it."""
    return dict(policy=remat if callable(remat) else None, prevent_cse=not scanned)


def branch_taus(
    config: UmupConfig, residuals: ResidualScheme | None, num_layers: int
) -> tuple[tuple[float, float], ...]:
    """The taus of attention and MLP of each layer."""
    tau = residuals or config.residuals()
    branches = 2 * num_layers
    return tuple((tau(i, branches), tau(i + 1, branches)) for i in range(0, branches, 2))


def check_experts(num_experts: int, k: int, normalize: bool) -> None:
    """Refuse what `us.functional.top_k_routing` would when it is called."""
    if not 1 <= k <= num_experts:
        raise ValueError(f"`k` must be in [1, `num_experts`], got {k} of {num_experts} experts.")
    if k == 1 and normalize:
        raise ValueError(
            "`k=1` needs `normalize=False`: normalised weights are all 1 and leave no gradient to "
            "the router."
        )


def mixture(
    x: jax.Array,
    params: tuple[Any, Any, Any, Any],
    k: int,
    router_mult: float,
    act_mult: float,
    normalize: bool,
    fp8: bool,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """A mixture of MLPs by the kernels of router, up, gate and down; and its balancing loss."""
    tokens = x.reshape(-1, x.shape[-1])
    router, num_experts = params[0], params[0].shape[-1]
    # As an output weight of µP: `mult` has 1/√width, the linear layer the other.
    mult = router_mult / math.sqrt(x.shape[-1])
    wide = dtypes.promoted(x.dtype, router.dtype, jnp.float32)
    logits = F.linear(*promoted(wide, tokens, router))
    weights, indices = F.top_k_routing(logits, k, mult=mult, normalize=normalize)
    tokens, up, gate, down = promoted(dtype, tokens, *params[1:])
    rows, sizes = F.dispatch(tokens, indices, num_experts)
    matmul = fp8_ragged_dot if fp8 else jax.lax.ragged_dot
    # No constraint: what the factors of one matrix are, those of the other are backwards.
    hidden = F.silu_glu(
        F.ragged_dot(rows, up, sizes, None, matmul=matmul),
        F.ragged_dot(rows, gate, sizes, None, matmul=matmul),
        mult=act_mult,
    )
    out = F.combine(F.ragged_dot(hidden, down, sizes, None), weights, indices)
    return out.reshape(x.shape), F.load_balancing_loss(logits, indices, mult)


def with_balance(out: Any) -> tuple[jax.Array, jax.Array | None]:
    """What a layer returns, and its loss for balance, None of one without experts."""
    return out if isinstance(out, tuple) else (out, None)


def total_balance(balances: Any) -> jax.Array | None:
    """The sum over layers, of a list or an array of them: each counts as in a model of its own."""
    arrays = jax.tree.leaves(balances)
    return jnp.sum(jnp.stack(arrays)) if arrays else None
