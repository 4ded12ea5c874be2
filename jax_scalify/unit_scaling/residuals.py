"""How much each branch of a residual network adds to the stream.

A scheme is a function `tau(index, layers)`: of the index of a branch, from 0 on, and of their
number, 2 for each layer of a transformer, with attention at the even indices. It returns the ratio
of the branch to the skip connection, which `residual_split` and `residual_add` take: their weights
are `tau / √(tau² + 1)` and `1 / √(tau² + 1)`.

By lemma F.1 of *u-µP*, such a network with norms at the start of its branches is a plain one,
`x + Σ weight[l] * f[l](norm(x[l]))`, up to one factor of its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jax_scalify.unit_scaling.functional._common import positive

ResidualScheme = Callable[[int, int], float]


def fixed_tau(tau: float) -> ResidualScheme:
    """Give every branch the same share `tau` of the variance: weights √tau and √(1 - tau).

    What a branch has added decays as later ones follow.

    Args:
        tau: share of the branch, in (0, 1).

    Returns:
        The function `tau(index, layers)`, always √(tau / (1 - tau)).

    Raises:
        TypeError: if `tau` is no number.
        ValueError: if it is not in (0, 1).

    Source: Blake et al., *Unit Scaling* (2023), section 5.3.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.fixed_tau(0.5)(3, 8)
        1.0
    """
    share = positive("tau", tau, "fixed_tau")
    if share >= 1:
        raise ValueError(f"`tau` of `fixed_tau` must be in (0, 1), got {tau}.")

    def ratio(index: int, layers: int) -> float:
        _check(index, layers)
        return math.sqrt(share / (1 - share))

    return ratio


def running_mean() -> ResidualScheme:
    """Make the stream the mean of the embedding and of all branches so far, of equal weights.

    Returns:
        The function `tau(index, layers)`, which is 1 / √(index + 1).

    Source: Blake et al., *Unit Scaling* (2023), section 5.3.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.running_mean()(3, 8)
        0.5
    """

    def ratio(index: int, layers: int) -> float:
        _check(index, layers)
        return 1 / math.sqrt(index + 1)

    return ratio


def umup_residuals(residual_mult: float = 1.0, residual_attn_ratio: float = 1.0) -> ResidualScheme:
    """Give branches of attention, and of MLPs, weights that depend on two hyperparameters.

    With L branches, the stream is the embedding and Σ α / √(L/2) * branch, up to its scale, where
    α_mlp = residual_mult * √(2 / (1 + residual_attn_ratio²)), α_attn = residual_attn_ratio * α_mlp:

        tau(l)² = α(l)² / (L/2 + Σ α(i)² for i < l)

    Args:
        residual_mult: of all branches together, to the embedding.
        residual_attn_ratio: of the branches of attention to those of MLPs.

    Returns:
        The function `tau(index, layers)`.

    Raises:
        TypeError: if an argument is no number.
        ValueError: if one is not positive and finite.

    Source: Blake et al., *u-µP* (2024), section 4.3 and appendix G.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> tau = us.umup_residuals()
        >>> [round(tau(index, 4) ** -2, 2) for index in range(4)]
        [2.0, 3.0, 4.0, 5.0]
    """
    residual_mult = positive("residual_mult", residual_mult, "umup_residuals")
    ratio = positive("residual_attn_ratio", residual_attn_ratio, "umup_residuals")
    mlp = residual_mult**2 * 2 / (1 + ratio**2)
    squares = (ratio**2 * mlp, mlp)

    def tau(index: int, layers: int) -> float:
        _check(index, layers)
        before = (index + 1) // 2 * squares[0] + index // 2 * squares[1]
        return math.sqrt(squares[index % 2] / (layers / 2 + before))

    return tau


def _check(index: int, layers: int) -> None:
    if not 0 <= index < layers:
        raise ValueError(
            f"`index` of a residual branch must be in [0, layers), got {index} of {layers}."
        )
