"""Matrix products, contractions, convolutions, and the embedding: sums of products.

A sum of `n` products of independent unit numbers has the standard deviation √n, in the forward
pass as in the backward pass: each factor is 1/√ of the number of terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_scalify.unit_scaling.constraints import Constraint
from jax_scalify.unit_scaling.functional._common import floating, inverse, scaled
from jax_scalify.unit_scaling.scaling import scale_bwd, scale_fwd

_DEFAULT = "to_output_scale"


def matmul(lhs: Any, rhs: Any, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Multiply matrices: `out = (lhs @ rhs) / √m`, gradients by 1/√n and 1/√b.

    Args:
        lhs: `(..., b, m)`.
        rhs: `(..., m, n)`; leading axes broadcast, as in `jnp.matmul`.
        constraint: on the factors of the result and of both gradients.

    Returns:
        `(..., b, n)`.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit, or an operand has no axis.

    Source: Blake et al., *Unit Scaling* (2023), table A.2.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.matmul(jnp.ones((2, 16)), jnp.ones((16, 3)))[0]
        Array([4., 4., 4.], dtype=float32)
    """
    lhs, rhs = floating("matmul", lhs=lhs, rhs=rhs)
    out = jax.eval_shape(jnp.matmul, lhs, rhs)
    terms = out.size * lhs.shape[-1]
    return _sum_of_products(jnp.matmul, [lhs, rhs], out.size, terms, constraint)


def einsum(subscripts: str, *operands: Any, constraint: Constraint = _DEFAULT) -> jax.Array:
    """Contract: the result by 1/√(number of terms), and so each operand's gradient.

    Args:
        subscripts: as `jnp.einsum` takes them.
        operands: floating arrays.
        constraint: on the factors of the result and of all gradients.

    Returns:
        The contraction.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the subscripts do not fit the operands.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.einsum("bk,kn->bn", jnp.ones((2, 16)), jnp.ones((16, 3)))[0]
        Array([4., 4., 4.], dtype=float32)
    """
    arrays = floating("einsum", **{f"operands[{i}]": x for i, x in enumerate(operands)})

    def contract(*xs: Any) -> jax.Array:
        return jnp.einsum(subscripts, *xs)

    out = jax.eval_shape(contract, *arrays)
    terms = _count_terms(subscripts, arrays)
    return _sum_of_products(contract, arrays, out.size, terms, constraint)


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    constraint: Constraint = _DEFAULT,
    *,
    matmul: Callable[[Any, Any], jax.Array] = jnp.matmul,
) -> jax.Array:
    """Apply a linear layer: `out = (x @ weight) / √fan_in + bias`.

    The gradients of weight and bias, whose edges are cut-edges, are multiplied by
    1/√(number of rows), whatever the constraint.

    Args:
        x: `(..., fan_in)`.
        weight: `(fan_in, fan_out)`, of unit scale.
        bias: `(fan_out,)` or None.
        constraint: on the factors of the result (1/√fan_in) and of the gradient of `x`
            (1/√fan_out).
        matmul: what multiplies, such as `us.fp8_matmul`.

    Returns:
        `(..., fan_out)`.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit.

    Source: Blake et al., *u-µP* (2024), table 2 and appendix B.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.linear(jnp.ones((2, 16)), jnp.ones((16, 3)))[0]
        Array([4., 4., 4.], dtype=float32)
    """
    return _linear("linear", x, weight, bias, constraint, matmul)


def linear_readout(
    x: Any, weight: Any, bias: Any = None, constraint: Constraint = _DEFAULT
) -> jax.Array:
    """Apply the last linear layer: `out = (x @ weight) / fan_in + bias`.

    At initialisation it has the scale 1/√fan_in, as µP asks for; in the backward pass it is scaled
    like `linear`, which the cut-edge at the end of the network allows.

    Args:
        x: `(..., fan_in)`.
        weight: `(fan_in, fan_out)`, of unit scale.
        bias: `(fan_out,)` or None.
        constraint: on the gradient of `x`: 1/√fan_out without one, 1/√fan_in by default.

    Returns:
        `(..., fan_out)`.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit.

    Source: Blake et al., *u-µP* (2024), table 2.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.linear_readout(jnp.ones((2, 16)), jnp.ones((16, 3)))[0]
        Array([1., 1., 1.], dtype=float32)
    """
    return _linear("linear_readout", x, weight, bias, constraint, jnp.matmul, readout=True)


def _linear(
    name: str,
    x: Any,
    weight: Any,
    bias: Any,
    constraint: Constraint,
    multiply: Callable[[Any, Any], jax.Array],
    readout: bool = False,
) -> jax.Array:
    x, weight = floating(name, x=x, weight=weight)
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"`{name}` takes x of shape (..., fan_in) and a weight of shape (fan_in, fan_out), "
            f"got {x.shape} and {weight.shape}."
        )
    fan_in, fan_out = weight.shape
    rows = math.prod(x.shape[:-1])
    out = scaled(
        multiply,
        [x, weight],
        inverse(math.sqrt(fan_in)),
        [inverse(math.sqrt(fan_out)), inverse(math.sqrt(rows))],
        constraint,
        [True, False],
    )
    if readout:
        out = scale_fwd(out, inverse(math.sqrt(fan_in)))
    if bias is None:
        return out
    (bias,) = floating(name, bias=bias)
    if bias.shape != (fan_out,):
        raise ValueError(f"`bias` of `{name}` must have shape ({fan_out},), got {bias.shape}.")
    bias = scale_bwd(bias, inverse(math.sqrt(rows)))
    return out + lax.broadcast_to_rank(bias, out.ndim)


def conv(
    x: Any,
    kernel: Any,
    bias: Any = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    constraint: Constraint = _DEFAULT,
) -> jax.Array:
    """Convolve: factors 1/√ of the numbers of terms, which are counted, padding left out.

    The gradients of kernel and bias keep their own factors.

    Args:
        x: `(batch, *spatial, features_in)`.
        kernel: `(*window, features_in / groups, features_out)`, of unit scale.
        bias: `(features_out,)` or None.
        strides: of the window, one number for all spatial axes or one each.
        padding: "SAME", "VALID", "SAME_LOWER", or `(low, high)` for each spatial axis.
        kernel_dilation: of the window.
        feature_group_count: into how many groups the features are divided.
        constraint: on the factors of the result and of the gradient of `x`.

    Returns:
        `(batch, *spatial, features_out)`.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> x, kernel = jnp.ones((1, 9, 4)), jnp.ones((4, 4, 8))
        >>> us.functional.conv(x, kernel, padding="VALID")[0, 0, :2]
        Array([4., 4.], dtype=float32)
    """
    x, kernel = floating("conv", x=x, kernel=kernel)
    rank = x.ndim - 2
    if rank < 1 or kernel.ndim != x.ndim:
        raise ValueError(
            "`conv` takes x of shape (batch, *spatial, features) and a kernel of shape (*window, "
            f"features / groups, features_out), got {x.shape} and {kernel.shape}."
        )
    spatial = "DHW"[-rank:] if rank <= 3 else "".join(map(str, range(rank)))
    numbers = lax.conv_dimension_numbers(
        x.shape, kernel.shape, (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    )
    options: dict[str, Any] = dict(
        window_strides=(strides,) * rank if isinstance(strides, int) else tuple(strides),
        padding=padding,
        rhs_dilation=(kernel_dilation,) * rank
        if isinstance(kernel_dilation, int)
        else tuple(kernel_dilation),
        dimension_numbers=numbers,
    )

    def convolve(x: Any, kernel: Any) -> jax.Array:
        return lax.conv_general_dilated(
            x, kernel, **options, feature_group_count=feature_group_count
        )

    out = jax.eval_shape(convolve, x, kernel)
    terms = out.size * kernel.shape[-2] * _count_windows(x, kernel, out, options)
    sizes = [inverse(math.sqrt(inverse(size) * terms)) for size in (out.size, x.size, kernel.size)]
    result = scaled(convolve, [x, kernel], sizes[0], sizes[1:], constraint, [True, False])
    if bias is None:
        return result
    (bias,) = floating("conv", bias=bias)
    if bias.shape != (out.shape[-1],):
        raise ValueError(f"`bias` of `conv` must have shape ({out.shape[-1]},), got {bias.shape}.")
    bias = scale_bwd(bias, inverse(math.sqrt(out.size // out.shape[-1])))
    return result + lax.broadcast_to_rank(bias, result.ndim)


def _count_windows(x: Any, kernel: Any, out: Any, options: dict[str, Any]) -> float:
    """Positions of the window that lie inside of `x`, on average over the results."""
    spatial, window = x.shape[1:-1], kernel.shape[:-2]
    dilation, strides = options["rhs_dilation"], options["window_strides"]
    padding = options["padding"]
    if isinstance(padding, str):
        dilated = [(k - 1) * d + 1 for k, d in zip(window, dilation)]
        padding = lax.padtype_to_pads(spatial, dilated, strides, padding)
    share = 1.0
    for size, k, d, stride, (low, _), results in zip(
        spatial, window, dilation, strides, padding, out.shape[1:-1], strict=True
    ):
        starts = [i * stride - low for i in range(results)]
        inside = sum(0 <= start + j * d < size for start in starts for j in range(k))
        share *= inside * inverse(results)
    return share


def embedding(ids: Any, table: Any) -> jax.Array:
    """Look rows up: `out = table[ids]`; the gradient of the table by √(rows / ids).

    Args:
        ids: integers of any shape, in `[0, rows)`; beyond, as `jnp.take` does, nan.
        table: `(rows, width)`, of unit scale. Its edge is a cut-edge: there is no constraint.

    Returns:
        `(*ids.shape, width)`.

    Raises:
        TypeError: if `ids` are not integers or `table` is not floating.
        ValueError: if `table` has not two axes.

    Source: Blake et al., *u-µP* (2024), appendix B.

    Examples:
        >>> from jax_scalify import unit_scaling as us
        >>> us.functional.embedding(jnp.array([1]), jnp.eye(2))
        Array([[0., 1.]], dtype=float32)
    """
    (table,) = floating("embedding", table=table)
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"`ids` of `embedding` must be integers, got {ids.dtype}.")
    if table.ndim != 2:
        raise ValueError(f"`table` of `embedding` must be (rows, width), got {table.shape}.")
    factor = math.sqrt(table.shape[0] * inverse(ids.size)) or 1.0
    return jnp.take(scale_bwd(table, factor), ids, axis=0)


def _sum_of_products(
    function: Any, operands: list[Any], results: int, terms: int, constraint: Constraint
) -> jax.Array:
    """Factors from the number of terms in one element of the result, and of each gradient."""
    output, *grads = (
        inverse(math.sqrt(terms * inverse(size))) for size in (results, *(x.size for x in operands))
    )
    return scaled(function, operands, output, grads, constraint)


def _count_terms(subscripts: str, operands: Sequence[jax.Array]) -> int:
    """The product of the sizes of all labels."""
    sides = subscripts.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    widest: list[tuple[int, ...]] = []
    for labels, x in zip(sides, operands, strict=True):
        before, dots, after = labels.partition("...")
        inner = x.ndim - len(before) - len(after)
        if dots:
            widest.append(x.shape[len(before) : len(before) + inner])
        named = [*x.shape[: len(before)], *x.shape[len(before) + inner :]]
        for label, size in zip(before + after, named, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    shared = math.prod(jnp.broadcast_shapes(*widest)) if widest else 1
    return shared * math.prod(sizes.values())
