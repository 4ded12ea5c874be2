"""Summing primitives. The scale grows by `pow2(n**p)`: see `rules/shared/growth.py`.

A sum is accumulated in at least float32. In a narrow dtype, it is divided by this factor and cast
once. In a wide dtype, it keeps its value.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.blocks.dot import block_dot_p
from jax_scalify.interpreter.operand import Operand, ratio_of
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule
from jax_scalify.primitives.narrow_dot import SMALLEST_EXPONENT, narrow_dot_p
from jax_scalify.rules.shared.along_axes import reshaped, uniform_over, varying_axes, windowed_axes
from jax_scalify.rules.shared.growth import Terms, growth
from jax_scalify.scales.algebra import ONE, Scale
from jax_scalify.scales.multiplying import multiply


@register_scale_rule(lax.reduce_sum_p, elements="summed", degree=1)
def reduce_sum_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = scale * pow2(n**p)`: p = 1/2 for given terms, 7/8 if computed, 1 if >= 0."""
    axes = params["axes"]
    count = math.prod(ctx.in_avals[0].shape[a] for a in axes)
    return _sum(ctx, x, axes, count, params, lambda s: lax.squeeze(s, axes))


def _sum(
    ctx: RuleContext, x: Operand, axes: Any, count: int, params: Any, move: Any = None
) -> Operand:
    """Return a sum over axes, accumulated in at least float32. Values are added in their unit."""
    x = uniform_over(x, axes)
    factor = growth(ctx, count, Terms.of(x))
    scale = x.scale.map(move) if move else x.scale
    terms, unit = x.at_scalar_unit if ctx.holds_values else (x.data, scale)
    # JAX sums the gradient of a bias in the dtype of the cotangent. Added one by one in float16,
    # ones would stop at 2048, because 2048 + 1 rounds to 2048.
    total = ctx.bind(lax.convert_element_type(terms, dtypes.compute_dtype(x.dtype)), **params)
    if ctx.holds_values:
        return ctx.of_value(total, scale * factor, unit)
    return ctx.result(total, scale * factor, unit, saturates=False)


@register_scale_rule(lax.cumsum_p, elements="new", nonnegative="keeps", degree=1)
def cumsum_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = scale * pow2(n**p)`: p = 1/2 for given terms, 7/8 if computed, 1 if >= 0."""
    axis = params["axis"]
    return _sum(ctx, x, (axis,), ctx.in_avals[0].shape[axis], params)


@register_scale_rule(lax.reduce_window_sum_p, elements="new", nonnegative="keeps", degree=1)
def reduce_window_sum_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = scale * pow2(n**p)` for windows of n: p = 1/2, 7/8 if computed, 1 if >= 0."""
    count = math.prod(params["window_dimensions"])
    return _sum(ctx, x, windowed_axes(ctx, **params), count, params)


@register_scale_rule(lax.fft_p, elements="new")
def fft_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = scale * pow2(sqrt(n))` for n points; for the inverse, `scale / pow2(sqrt(n))`."""
    lengths = params["fft_lengths"]
    x = uniform_over(x, range(x.ndim - len(lengths), x.ndim))
    # Terms are multiplied by roots of unity, so they have all signs even if `x >= 0`. The inverse
    # divides its sums by n, and `sqrt(n) / n` is `1 / sqrt(n)`.
    factor = growth(ctx, math.prod(lengths), Terms.INDEPENDENT)
    inverse = params["fft_type"] in (lax.FftType.IFFT, lax.FftType.IRFFT)
    return ctx.on_values(x.scale * (factor**-1 if inverse else factor), x, **params)


def _floating(ctx: RuleContext, *operands: Any) -> list[Operand]:
    """Return the operands. Integers and bools become floats, at the scale 1."""
    out = []
    for x, value in zip(operands, ctx.inputs, strict=False):
        if not isinstance(x, Operand):
            # float16 holds every int8, but int32 reaches far beyond its largest number, 65504.
            few = x.dtype == np.bool_ or np.iinfo(x.dtype).bits <= 8
            dtype = ctx.out_dtype if few else dtypes.compute_dtype(ctx.out_dtype)
            x = Operand(lax.convert_element_type(x, dtype), ONE, facts=value.facts)
        out.append(x)
    return out


def _operand_scale(x: Operand, contract: Any, batch: Any, before: int, after: int) -> Scale:
    """Reshape an operand's scale to the result's dims: batch, lhs free, rhs free."""

    def move(scale: Any) -> Any:
        # Contracted dims have length 1, and are dropped. In `(M, K) @ (K, N)` the scales have the
        # shapes (M, 1) and (1, N) in the end.
        free = [a for a in range(x.ndim) if a not in contract and a not in batch]
        scale = lax.transpose(scale, (*batch, *free, *contract))
        shape = scale.shape[: len(batch) + len(free)]
        head, tail = shape[: len(batch)], shape[len(batch) :]
        return lax.reshape(scale, (*head, *(1,) * before, *tail, *(1,) * after))

    return x.scale.map(move)


def _factors_together(
    lhs: Operand, rhs: Operand, contract: tuple[Any, Any], batch: tuple[Any, Any]
) -> tuple[Operand, Operand]:
    """Move the part of rhs's scale that differs along contracted dims to lhs, if both differ there.

    Only the product of both scales matters for a term, and it may be uniform where neither scale
    is. In the gradient of a covariance, one scale is large where the other is small: with scales
    `[8, 1]` and `[1, 8]` along the contracted dim, every term has the scale 8.
    """
    if not (lhs.holds_data and rhs.holds_data):
        return lhs, rhs
    if not all(set(axes) & set(varying_axes(x.scale)) for x, axes in zip((lhs, rhs), contract)):
        return lhs, rhs
    pairs = sorted(zip((*batch[0], *contract[0]), (*batch[1], *contract[1]), strict=True))
    free = [a for a in range(rhs.ndim) if a not in (*batch[1], *contract[1])]

    def along_lhs(scale: Any) -> Any:
        sizes = {a: scale.shape[b] for a, b in pairs}
        return reshaped(lax.transpose(scale, (*(b for _, b in pairs), *free)), lhs.ndim, sizes)

    # In `(M, K) @ (K, N)`, `part` has the shape (K, 1), and (1, K) beside lhs.
    part = rhs.scale.map(lambda s: jnp.max(s, free, keepdims=True, initial=0))
    left, right = lhs.scale * part.map(along_lhs), rhs.scale / part
    return lhs.as_pair(lhs.source, left), rhs.as_pair(rhs.source, right)


# `jax.nn.dot_product_attention` requests these. XLA does not implement them on CPUs and TPUs.
_OF_FLOAT16 = (lax.DotAlgorithmPreset.F16_F16_F16, lax.DotAlgorithmPreset.F16_F16_F32)


@register_scale_rule(lax.dot_general_p, elements="summed", degree="product")
def dot_general_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> Operand:
    """`scale = lhs.scale * rhs.scale * pow2(K**p)`: p = 1/2, 3/4 if both are computed, 1 if >= 0.

    Scales along batch and free dims are carried to the result. Along contracted dims a scale is
    made uniform. If both scales differ there, their product is made uniform.
    """
    params.pop("preferred_element_type", None)
    if params.get("precision") in _OF_FLOAT16:  # `preferred_element_type` works everywhere
        params["precision"] = None
    lhs, rhs, left, right, count = _of_product(ctx, lhs, rhs, params["dimension_numbers"])
    scale, unit = _of_sum(ctx, lhs, rhs, left, right, count)
    kinds = {x.dtype for x in (lhs.source, rhs.source, ctx.out_avals[0])}
    # On a GPU, cuBLAS multiplies its float32 sums by a constant and writes float16. This is for
    # factors from 2**-16 to 1, if no constant among the elements needs a larger scale.
    if ctx.config.sum_dtype != np.float32 and kinds == {np.dtype("float16")}:
        corrected = scale * Scale(ctx.pending.exponent)
        ratio, fits = ratio_of(unit, corrected), ctx.with_room(scale) == scale
        fits = fits and not _compat.is_partial_sum(ctx.out_avals[0])
        if fits and SMALLEST_EXPONENT <= ratio.exponent <= 0:
            ctx.pending.take()
            exponent = int(ratio.exponent)
            total = narrow_dot_p.bind(lhs.source, rhs.source, exponent=exponent, **params)
            return Operand(total, corrected)
    params["preferred_element_type"] = _preferred(ctx, kinds)
    total = lax.dot_general_p.bind(lhs.source, rhs.source, **params)
    return ctx.result(total, scale, unit, saturates=False)


@register_scale_rule(narrow_dot_p, elements="summed", degree="product")
def narrow_dot_rule(
    ctx: RuleContext, lhs: Operand, rhs: Operand, *, exponent: int, **params: Any
) -> Operand:
    """The rule of `dot_general`, times `2**exponent`. A nested `scalify` binds this primitive."""
    out = dot_general_rule(ctx, lhs, rhs, **params)
    return out.moved(out.source, out.scale * Scale(exponent))


def _of_product(
    ctx: RuleContext, lhs: Operand, rhs: Operand, dims: Any
) -> tuple[Operand, Operand, Scale, Scale, int]:
    """Return the operands to multiply, their moved scales, and the number of terms in a sum."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
    lhs, rhs = _floating(ctx, lhs, rhs)
    lhs, rhs = _factors_together(lhs, rhs, *dims)
    lhs, rhs = uniform_over(lhs, lhs_contract), uniform_over(rhs, rhs_contract)
    lhs_free = lhs.ndim - len(lhs_contract) - len(lhs_batch)
    rhs_free = rhs.ndim - len(rhs_contract) - len(rhs_batch)
    left = _operand_scale(lhs, lhs_contract, lhs_batch, 0, rhs_free)
    right = _operand_scale(rhs, rhs_contract, rhs_batch, lhs_free, 0)
    count = math.prod(ctx.in_avals[0].shape[a] for a in lhs_contract)
    return lhs, rhs, left, right, count


def _of_sum(
    ctx: RuleContext, lhs: Operand, rhs: Operand, left: Scale, right: Scale, count: int
) -> tuple[Scale, Scale]:
    """Return scale and unit of a sum of products, given the operands' moved scales."""
    factor = growth(ctx, count, Terms.of(lhs, rhs))
    return left * right * factor, lhs.unit_at(left) * rhs.unit_at(right)


@register_scale_rule(block_dot_p, elements="summed", degree="product")
def block_dot_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> Operand:
    """The rule of `dot_general`; the data chooses block scales, but not the array's scale."""
    lhs, rhs, left, right, count = _of_product(ctx, lhs, rhs, params["dimension_numbers"])
    data = [lhs.data, rhs.data]  # of unit size
    pairs = zip(params["quantisers"], ctx.inputs)
    params["quantisers"] = tuple(q.of_unit_data(0) if v.is_scaled else q for q, v in pairs)
    params["preferred_element_type"] = _preferred(ctx, {ctx.out_dtype})
    scale, _ = _of_sum(ctx, lhs, rhs, left, right, count)
    return ctx.result(block_dot_p.bind(*data, **params), scale, left * right, saturates=False)


def _preferred(ctx: RuleContext, kinds: set[Any]) -> Any:
    """Return the `preferred_element_type` of a matmul, given the dtypes of operands and result."""
    keeps_16_bits = ctx.config.sum_dtype != np.float32
    keeps_16_bits &= all(dtypes.is_fp8(k) or k == jnp.bfloat16 for k in kinds)
    return (dtypes.sum_dtype if keeps_16_bits else dtypes.compute_dtype)(ctx.out_dtype)


def _along_rows(ctx: RuleContext, scale: Any, group_sizes: Any, dims: Any) -> Any:
    """Repeat the scale of each group for the rows of the result that belong to the group."""
    (ragged,), (contract, batch) = dims.lhs_ragged_dimensions, dims.dot_dimension_numbers
    free = [a for a in range(ctx.in_avals[0].ndim) if a not in (*contract[0], *batch[0])]
    place = len(batch[0]) + free.index(ragged)
    count = ctx.out_avals[0].shape[place]
    # Groups of 2 and 1 rows with the scales `[a, b]` give `[a, a, b]`.
    rows = jnp.repeat(jnp.ravel(scale), group_sizes, total_repeat_length=count)
    return reshaped(rows, ctx.out_avals[0].ndim, {place: count})


@register_scale_rule("ragged_dot_general", elements="summed", degree="product")
def ragged_dot_general_rule(
    ctx: RuleContext, lhs: Operand, rhs: Operand, group_sizes: Any, **params: Any
) -> Operand:
    """`scale = lhs.scale * rhs.scale * pow2(K**p)`, one scale each; p as in `dot_general`.

    If rhs has a scale for each group, the result has the largest, and its rows are multiplied by
    `group scale / largest scale` before they are cast. If the contracted axis is the ragged axis,
    K is the mean length of a group.
    """
    dims = params["ragged_dot_dimension_numbers"]
    (contract, _), _ = dims.dot_dimension_numbers
    lhs, rhs = _floating(ctx, lhs, rhs)
    lhs, ratio = uniform_over(lhs), ONE
    others = set(range(rhs.ndim)) - set(dims.rhs_group_dimensions)
    rhs = uniform_over(rhs, sorted(others))
    # In a mixture of experts, weights of shape (experts, in, out) may have a scale for each expert.
    if rhs.scale.ndim and group_sizes.ndim == 1 and rhs.holds_data:
        whole = rhs.scale.largest
        ratio = rhs.scale / whole
        rhs = rhs.as_pair(rhs.source, whole)
    else:
        rhs = uniform_over(rhs)
    data = [lhs.source, rhs.source]
    kinds = {x.dtype for x in (*data, ctx.out_avals[0])}
    params["preferred_element_type"] = _preferred(ctx, kinds)
    total = ctx.bind(*data, group_sizes, **params)
    if not ratio.is_one:
        total = multiply(total, ratio.map(lambda s: _along_rows(ctx, s, group_sizes, dims)))
    count = math.prod(lhs.shape[a] for a in contract)
    if set(contract) & set(dims.lhs_ragged_dimensions):
        count //= max(1, ctx.in_avals[2].shape[-1])
    return ctx.result(total, *_of_sum(ctx, lhs, rhs, lhs.scale, rhs.scale, count), saturates=False)


def _mean_taps(size: int, taps: int, out: int, stride: int, dilation: int, hole: int, pad: Any):
    """Return the mean number of kernel taps, along one axis, that meet an element of the input.

    Other taps meet padding, or the holes of a dilated input. A kernel of 3 taps over 4 elements
    with `SAME` padding has `(2 + 3 + 3 + 2) / 4 = 2.5`.
    """
    # Tap t of output o meets the position `first[t] + o * stride` of the dilated input. From the
    # output `begin[t]` to the output `end[t]` this position lies inside. One in `hole` positions
    # holds an element.
    first = np.arange(taps) * dilation - pad[0]
    begin = np.maximum(0, -(first // stride))
    end = np.minimum(out - 1, ((size - 1) * hole - first) // stride)
    return float(np.sum(np.maximum(0, end - begin + 1))) / max(1, out) / hole


def _convolved_terms(ctx: RuleContext, params: dict[str, Any]) -> int:
    """Return the mean number of products that are summed in one element of a convolution."""
    dims, shapes = params["dimension_numbers"], [a.shape for a in (*ctx.in_avals, *ctx.out_avals)]
    # The specs of lhs, rhs and result begin with the axes of the batch and of the channels.
    sizes = [[shape[a] for a in spec[2:]] for shape, spec in zip(shapes, dims, strict=True)]
    along = ("window_strides", "rhs_dilation", "lhs_dilation", "padding")
    taps = map(_mean_taps, *sizes, *(params[name] for name in along))
    return round(math.prod(taps, start=float(shapes[1][dims.rhs_spec[1]])))


@register_scale_rule(lax.conv_general_dilated_p, elements="summed", degree="product")
def conv_general_dilated_rule(
    ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any
) -> Operand:
    """`scale = lhs.scale * rhs.scale * pow2(n**p)`: p = 1/2, 3/4 if both are computed, 1 if >= 0.

    n is the number of input channels times the mean number of taps that meet no padding. Scales
    along the batch and the output channels are carried to the result. Along other axes a scale is
    made uniform.
    """
    dims = params["dimension_numbers"]
    batched = params["batch_group_count"] > 1
    lhs, rhs = _floating(ctx, lhs, rhs)
    # With groups, rhs has fewer input channels than lhs, so their scales do not form pairs.
    if not batched and params["feature_group_count"] == 1:
        contract = ((dims.lhs_spec[1],), (dims.rhs_spec[1],))
        lhs, rhs = _factors_together(lhs, rhs, contract, ((), ()))
    # The gradient of a grouped kernel has a `batch_group_count`: each group of the batch makes
    # output channels of its own, so the batch axis of the result is not that of lhs.
    lhs = uniform_over(lhs, dims.lhs_spec if batched else dims.lhs_spec[1:])
    rhs = uniform_over(rhs, dims.rhs_spec[1:])
    params["preferred_element_type"] = dtypes.compute_dtype(ctx.out_dtype)
    total = ctx.bind(lhs.source, rhs.source, **params)

    def along(source: int, target: int) -> Any:
        return lambda scale: reshaped(scale, scale.ndim, {target: scale.shape[source]})

    left = lhs.scale.map(along(dims.lhs_spec[0], dims.out_spec[0]))
    right = rhs.scale.map(along(dims.rhs_spec[0], dims.out_spec[1]))
    count = _convolved_terms(ctx, params)
    return ctx.result(total, *_of_sum(ctx, lhs, rhs, left, right, count), saturates=False)
