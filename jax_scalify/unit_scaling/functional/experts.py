"""A mixture of experts: routing, rows sorted by expert, their products, and a loss for balance.

A token's result is Σ w[j] * expert[j](x) / √k over its k experts, with weights w of RMS 1: so the
sum has unit scale, and each expert is a layer like any other. `dispatch` and `combine` are made for
each other: the gradients between them have unit scale, and from one end to the other the factors of
both passes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.unit_scaling.constraints import Constraint
from jax_scalify.unit_scaling.factors import balancing_std, top_k_stds
from jax_scalify.unit_scaling.functional._common import floating, inverse, positive, scaled
from jax_scalify.unit_scaling.scaling import scale_bwd

_DEFAULT = "to_output_scale"


def top_k_routing(
    logits: Any,
    k: int,
    *,
    mult: float = 1.0,
    normalize: bool = True,
    constraint: Constraint = _DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """Choose the k experts of the largest logits, and weights for them, of RMS 1.

    The weights are `softmax(mult * logits)` at the chosen experts, divided by their sum if
    `normalize`, and multiplied by √k / √(the mean of Σ w²). That mean, and the size of what a unit
    cotangent leaves to the logits, are exact for Gaussian logits: an integral over the largest that
    is not chosen, `top_k_stds` in `unit_scaling/factors.py`.

    Args:
        logits: `(..., experts)`, of unit scale.
        k: number of experts for each row.
        mult: of the operand of the softmax. For a router as µP has it, `1 / √width`.
        normalize: whether the weights, before they are scaled, add up to 1.
        constraint: on the factors of the weights and of the gradient of the logits.

    Returns:
        `(weights, indices)`, both `(..., k)`, the largest first: weights in the dtype of `logits`,
        indices int32.

    Raises:
        TypeError: if `logits` are not floating, `k` is no integer or `mult` no number.
        ValueError: if `k` is not in `[1, experts]`, or `mult` not positive and finite; if `k` is 1
            and `normalize`, as all weights were 1 and the router learned nothing.

    Source: Shazeer et al., *Outrageously Large Neural Networks* (2017), for normalised weights;
    Fedus et al., *Switch Transformers* (2021), equation 1, for those that are not.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> weights, indices = us.functional.top_k_routing(jnp.array([0.0, 2.0, 1.0]), 2)
        >>> [round(float(w), 1) for w in weights], indices.tolist()
        ([1.3, 0.5], [1, 2])
    """
    (logits,) = floating("top_k_routing", logits=logits)
    experts = logits.shape[-1] if logits.ndim else 0
    _check_k(k, experts, "top_k_routing")
    mult = positive("mult", mult, "top_k_routing")
    if k == 1 and normalize:
        raise ValueError(
            "`top_k_routing` with `k=1` needs `normalize=False`: normalised weights are all 1 and "
            "leave no gradient to the router."
        )
    indices = lax.top_k(lax.stop_gradient(logits), k)[1]
    std, back = top_k_stds(experts, k, mult, normalize)

    def weigh(logits: Any) -> jax.Array:
        wide = mult * logits.astype(dtypes.compute_dtype(logits.dtype))
        if not normalize:
            wide = jax.nn.log_softmax(wide, -1)
        chosen = jnp.take_along_axis(wide, indices, -1)
        weights = jax.nn.softmax(chosen, -1) if normalize else jnp.exp(chosen)
        # Scaled before they are cast: of many experts all are small.
        return (weights * math.sqrt(k)).astype(logits.dtype)

    grad = inverse(mult * back * math.sqrt(k / experts))
    return scaled(weigh, [logits], 1 / std, [grad], constraint), indices


def dispatch(x: Any, indices: Any, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Repeat each row for its k experts, sorted by expert; the gradient of `x` by 1/√k.

    Experts get as many rows as have chosen them: none is dropped, and none is padded. All rows are
    sorted together: on several devices, inside of `jax.shard_map`, those of each device.

    Args:
        x: `(rows, width)`.
        indices: integers `(rows, k)` in `[0, num_experts)`, as `top_k_routing` returns them.
        num_experts: how many there are.

    Returns:
        `(sorted, group_sizes)`: `(rows * k, width)`, and int32 `(num_experts,)`, the number of rows
        of each expert.

    Raises:
        TypeError: if `x` is not floating, or `indices` not integers.
        ValueError: if the shapes do not fit.

    Source: Gale et al., *MegaBlocks* (2022), for experts without a capacity.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> x = jnp.array([[1.0], [2.0]])
        >>> rows, group_sizes = us.functional.dispatch(x, jnp.array([[2, 0], [0, 1]]), 3)
        >>> print(rows[:, 0], group_sizes)
        [1. 2. 2. 1.] [2 1 1]
    """
    (x,) = floating("dispatch", x=x)
    indices = _indices("dispatch", indices)
    if x.ndim != 2 or indices.shape[0] != x.shape[0]:
        raise ValueError(
            "`dispatch` takes x (rows, width) and indices (rows, k), got "
            f"{x.shape} and {indices.shape}."
        )
    k = indices.shape[1]
    x = scale_bwd(x, inverse(math.sqrt(k)))
    return x[_order(indices) // max(k, 1)], _group_sizes(indices, num_experts)


def ragged_dot(
    x: Any,
    weight: Any,
    group_sizes: Any,
    constraint: Constraint = _DEFAULT,
    *,
    matmul: Callable[..., jax.Array] = lax.ragged_dot,
) -> jax.Array:
    """Apply a linear layer of each expert to its rows: `out = x @ weight[expert] / √fan_in`.

    The gradient of the weights, whose edge is a cut-edge, is multiplied by √(experts / rows): a
    sum over `rows / experts` rows on average, and over all experts together exactly, whatever the
    balance.

    Args:
        x: `(rows, fan_in)`, sorted by expert.
        weight: `(experts, fan_in, fan_out)`, of unit scale.
        group_sizes: integers `(experts,)`: the number of rows of each.
        constraint: on the factors of the result (1/√fan_in) and of the gradient of `x`
            (1/√fan_out).
        matmul: what multiplies: `jax.lax.ragged_dot` or a function like it.

    Returns:
        `(rows, fan_out)`; rows behind the last group are 0.

    Raises:
        TypeError: if `x` or `weight` is not floating, or `group_sizes` are not integers.
        ValueError: if the shapes do not fit.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> x, weight = jnp.ones((3, 4)), jnp.stack([jnp.ones((4, 1)), 2 * jnp.ones((4, 1))])
        >>> print(us.functional.ragged_dot(x, weight, jnp.array([1, 2])).T)
        [[2. 4. 4.]]
    """
    x, weight = floating("ragged_dot", x=x, weight=weight)
    sizes = jnp.asarray(group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"`group_sizes` of `ragged_dot` must be integers, got {sizes.dtype}.")
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1:] != weight.shape[1:2]:
        raise ValueError(
            "`ragged_dot` takes x (rows, fan_in) and a weight (experts, fan_in, fan_out), got "
            f"{x.shape} and {weight.shape}."
        )
    experts, fan_in, fan_out = weight.shape
    if sizes.shape != (experts,):
        raise ValueError(
            f"`group_sizes` of `ragged_dot` must have shape ({experts},), got {sizes.shape}."
        )
    grads = [inverse(math.sqrt(fan_out)), math.sqrt(experts * inverse(x.shape[0])) or 1.0]

    def multiply(x: Any, weight: Any) -> jax.Array:
        return matmul(x, weight, sizes)

    output = inverse(math.sqrt(fan_in))
    return scaled(multiply, [x, weight], output, grads, constraint, [True, False])


def combine(x: Any, weights: Any, indices: Any, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Add the results of each row's experts: `out = Σ weights[j] * x[j] / √k`.

    The gradient of `x` keeps the factor 1, as one product only leaves it: with weights of RMS 1 it
    has unit scale, and `dispatch` divides by √k in its place. That of the weights, a sum over the
    width, has 1/√width.

    Args:
        x: `(rows * k, width)`, results of experts in the order of `dispatch`.
        weights: `(rows, k)`, of RMS 1.
        indices: integers `(rows, k)`, both as `top_k_routing` returns them.
        constraint: on the factors of the result and of the gradient of the weights: as the way
            through the router begins and ends where that through the experts does, its factors
            must be the same in both passes unless it is cut.

    Returns:
        `(rows, width)`.

    Raises:
        TypeError: if `x` or `weights` are not floating, or `indices` not integers.
        ValueError: if the shapes do not fit.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> x, indices = jnp.array([[1.0], [2.0], [3.0], [4.0]]), jnp.array([[2, 0], [0, 1]])
        >>> us.functional.combine(x, jnp.ones((2, 2)), indices)[:, 0].round(2)
        Array([3.54, 3.54], dtype=float32)
    """
    x, weights = floating("combine", x=x, weights=weights)
    indices = _indices("combine", indices)
    if x.ndim != 2 or weights.shape != indices.shape or indices.size != x.shape[0]:
        raise ValueError(
            "`combine` takes x (rows * k, width), weights (rows, k) and indices (rows, k), got "
            f"{x.shape}, {weights.shape} and {indices.shape}."
        )
    by_row = x[jnp.argsort(_order(indices))].reshape(*indices.shape, x.shape[1])
    output = inverse(math.sqrt(indices.shape[1]))

    def add_up(x: Any, weights: Any) -> jax.Array:
        return jnp.einsum("rkd,rk->rd", x, weights.astype(x.dtype))

    grads = [1.0, inverse(math.sqrt(x.shape[1]))]
    return scaled(add_up, [by_row, weights], output, grads, constraint, [False, True])


def load_balancing_loss(logits: Any, indices: Any, mult: float = 1.0) -> jax.Array:
    """Return `experts * Σ f * p`: 1 if all experts get as many rows, more if some get more.

    f is an expert's share of the rows, a constant in derivatives, and p the mean of its
    probabilities. The gradient is that of the sum over rows, a force against the imbalance, and 0
    without one. Its factor gives it unit scale where the router has collapsed, so that all rows
    have chosen the same k experts, and in between it grows with the imbalance: for that f the RMS
    of `mult * experts * p * (f - Σ p * f)` is exact for Gaussian logits (`balancing_std` in
    `unit_scaling/factors.py`). So a coefficient of this loss is the gradient of a collapsed router
    next to unit-scaled ones, whatever the numbers of rows and experts and the width.

    Args:
        logits: `(..., experts)`.
        indices: integers `(..., k)`, as `top_k_routing` returns them.
        mult: that of `top_k_routing`.

    Returns:
        A scalar of float32 or wider, to be added to a loss with a small coefficient.

    Raises:
        TypeError: if `logits` are not floating, `indices` not integers or `mult` is no number.
        ValueError: if the shapes do not fit, or `mult` is not positive and finite.

    Source: Fedus et al., *Switch Transformers* (2021), equations 4 to 6, for k experts a row.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> logits = 4 * jnp.eye(2)
        >>> us.functional.load_balancing_loss(logits, jnp.array([[0], [1]]))
        Array(1., dtype=float32)
        >>> print(us.functional.load_balancing_loss(logits[:1], jnp.array([[0]])).round(1))
        2.0
    """
    (logits,) = floating("load_balancing_loss", logits=logits)
    indices = _indices("load_balancing_loss", indices)
    mult = positive("mult", mult, "load_balancing_loss")
    if logits.ndim != indices.ndim or logits.shape[:-1] != indices.shape[:-1]:
        raise ValueError(
            "`load_balancing_loss` takes logits (..., experts) and indices (..., k), got "
            f"{logits.shape} and {indices.shape}."
        )
    experts, k = logits.shape[-1], indices.shape[-1]
    _check_k(k, experts, "load_balancing_loss")
    rows = max(1, math.prod(logits.shape[:-1]))
    factor = inverse(mult * experts * balancing_std(experts, k, mult))
    # The mean over rows; its gradient is that of the sum.
    wide = logits.astype(dtypes.compute_dtype(logits.dtype))
    p = jax.nn.softmax(mult * scale_bwd(wide, factor * rows), -1)
    shares = _group_sizes(indices, experts).astype(p.dtype) / (rows * k)
    return experts * jnp.sum(jnp.mean(p.reshape(-1, experts), 0) * shares)


def _indices(name: str, indices: Any) -> jax.Array:
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"`indices` of `{name}` must be integers, got {indices.dtype}.")
    if indices.ndim < 1 or name in ("dispatch", "combine") and indices.ndim != 2:
        raise ValueError(f"`indices` of `{name}` must be (rows, k), got {indices.shape}.")
    return indices


def _check_k(k: Any, experts: int, name: str) -> None:
    if not isinstance(k, int):
        raise TypeError(f"`k` of `{name}` must be an integer, got {type(k).__name__}.")
    if not 1 <= k <= experts:
        raise ValueError(f"`k` of `{name}` must be in [1, {experts}], the experts, got {k}.")


def _order(indices: jax.Array) -> jax.Array:
    """Which entry of the indices, row by row, comes first among those sorted by expert."""
    return jnp.argsort(indices.reshape(-1), stable=True)


def _group_sizes(indices: jax.Array, experts: int) -> jax.Array:
    return jnp.bincount(indices.reshape(-1), length=experts).astype(jnp.int32)
