"""Sums, and the residual connection, a sum whose weights are a choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.unit_scaling.constraints import Constraint
from jax_scalify.unit_scaling.functional._common import floating, inverse, positive, scaled
from jax_scalify.unit_scaling.scaling import scale_bwd, scale_fwd

_DEFAULT = "to_output_scale"


def add(lhs: Any, rhs: Any, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Add: `out = (lhs + rhs) / √2`; a gradient by 1/√(how often its operand is repeated).

    An operand of one element shifts, and does not change the scale: there is no factor.

    Args:
        lhs: a floating array.
        rhs: one whose shape broadcasts with that of `lhs`; one of both may be a Python number.
        constraint: on the factors of the result and of both gradients.

    Returns:
        The sum, in the shape of both.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not broadcast.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.add(jnp.ones(2), jnp.ones(2)).round(3)
        Array([1.414, 1.414], dtype=float32)
    """
    if isinstance(lhs, int | float) or isinstance(rhs, int | float):
        return jnp.add(lhs, rhs)
    lhs, rhs = floating("add", lhs=lhs, rhs=rhs)
    size = math.prod(jnp.broadcast_shapes(lhs.shape, rhs.shape))
    output = 1.0 if size > 1 and min(lhs.size, rhs.size) == 1 else math.sqrt(0.5)
    grads = [inverse(math.sqrt(size * inverse(x.size))) for x in (lhs, rhs)]
    return scaled(jnp.add, [lhs, rhs], output, grads, constraint)


def weighted_add(operands: Sequence[Any], weights: Sequence[float]) -> jax.Array:
    """Add with weights that are brought to unit length: `out = Σ w[i] x[i] / √Σ w²`.

    The gradients have the same factors: a cotangent of unit scale leaves as much to each operand as
    it contributes.

    Args:
        operands: floating arrays of one shape.
        weights: positive numbers, one for each operand.

    Returns:
        The sum.

    Raises:
        TypeError: if an operand is not floating or a weight is no number.
        ValueError: if a weight is not positive, or numbers or shapes differ.

    Source: Blake et al., *Unit Scaling* (2023), section 5.3.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.weighted_add([jnp.ones(1), jnp.ones(1)], [3.0, 4.0]).round(2)
        Array([1.4], dtype=float32)
    """
    arrays = floating("weighted_add", **{f"operands[{i}]": x for i, x in enumerate(operands)})
    numbers = [positive(f"weights[{i}]", w, "weighted_add") for i, w in enumerate(weights)]
    if not arrays or len(arrays) != len(numbers) or len({x.shape for x in arrays}) > 1:
        raise ValueError(
            "`weighted_add` takes operands of one shape and as many weights, got the shapes "
            f"{[x.shape for x in arrays]} and {len(numbers)} weights."
        )
    length = math.hypot(*numbers)
    first, *rest = (x * (w / length) for x, w in zip(arrays, numbers))
    return sum(rest, first)


def residual_split(x: Any, tau: Any = 1.0) -> tuple[jax.Array, jax.Array]:
    """Split into a branch and a skip connection that `residual_add` brings together.

    Inside of the branch gradients have unit scale: its weight is applied to them here, where they
    leave it.

    Args:
        x: a floating array.
        tau: ratio of branch to skip connection, in standard deviations: a number, or a scalar
            array where it is data, as in a scan over layers.

    Returns:
        `(branch, skip)`, both equal to `x`.

    Raises:
        TypeError: if `x` is not floating or `tau` is no number.
        ValueError: if `tau` is a number that is not positive and finite, or an array that is no
            scalar.

    Source: Blake et al., *u-µP* (2024), appendix F; *Unit Scaling* (2023), section 5.3.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> branch, skip = us.functional.residual_split(jnp.ones(2))
        >>> us.functional.residual_add(branch, skip).round(3)
        Array([1.414, 1.414], dtype=float32)
    """
    (x,) = floating("residual_split", x=x)
    branch, skip = _weights(tau, "residual_split")
    return scale_bwd(x, branch), scale_bwd(x, skip)


def residual_add(branch: Any, skip: Any, tau: Any = 1.0) -> jax.Array:
    """Add a branch to its skip connection: `out = (tau * branch + skip) / √(tau² + 1)`.

    Args:
        branch: what the branch has made of what `residual_split` returned.
        skip: the skip connection, of the same shape.
        tau: that of `residual_split`.

    Returns:
        The sum, of unit scale.

    Raises:
        TypeError: if an operand is not floating or `tau` is no number.
        ValueError: if `tau` is a number that is not positive and finite, or an array that is no
            scalar, or the shapes differ.

    Source: Blake et al., *u-µP* (2024), appendix F.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.residual_add(jnp.zeros(1), jnp.ones(1), tau=0.75)
        Array([0.8], dtype=float32)
    """
    branch, skip = floating("residual_add", branch=branch, skip=skip)
    if branch.shape != skip.shape:
        raise ValueError(
            f"`residual_add` takes operands of one shape, got {branch.shape} and {skip.shape}."
        )
    weights = _weights(tau, "residual_add")
    return scale_fwd(branch, weights[0]) + scale_fwd(skip, weights[1])


def residual_apply(function: Callable[[Any], Any], x: Any, tau: Any = 1.0) -> jax.Array:
    """Apply a function as a residual branch: `residual_split`, the function, `residual_add`.

    Args:
        function: of an array, to one of the same shape.
        x: a floating array.
        tau: ratio of branch to skip connection.

    Returns:
        The sum, of unit scale.

    Raises:
        TypeError: if `x` is not floating or `tau` is no number.
        ValueError: if `tau` is a number that is not positive and finite, or an array that is no
            scalar, or the shapes differ.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.residual_apply(lambda x: -x, jnp.ones(2))
        Array([0., 0.], dtype=float32)
    """
    branch, skip = residual_split(x, tau)
    return residual_add(function(branch), skip, tau)


def _weights(tau: Any, of: str) -> tuple[Any, Any]:
    """Weights of branch and skip connection, of unit length."""
    if _compat.is_traced(tau) and jnp.issubdtype(tau.dtype, jnp.floating):
        if tau.shape:
            raise ValueError(f"`tau` of `{of}` must be a scalar, got an array of {tau.shape}.")
        wide = tau.astype(dtypes.compute_dtype(tau.dtype))
        skip = jax.lax.rsqrt(wide * wide + 1)
        return wide * skip, skip
    tau = positive("tau", tau, of)
    length = math.hypot(tau, 1.0)
    return tau / length, 1 / length
