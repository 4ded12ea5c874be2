"""Choosing primitives: `max`, `min`, `clamp` and `select_n`.

If one predicate chooses a whole array, it chooses the scale too. If each element is chosen
separately, the operands are brought to the largest vote.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes, pow2
from jax_scalify.base.filling import filled
from jax_scalify.interpreter.constants import align_constant, room
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext, register_scale_rule
from jax_scalify.interpreter.rescaling import at_scale
from jax_scalify.rules.shared.along_axes import scale_array
from jax_scalify.rules.shared.joining import (
    align,
    aligned,
    at_shared_scale,
    same_dtype,
    scale_for,
    shared_scale,
)
from jax_scalify.scales.algebra import NARROW_EXTENT, ONE, ZERO, Scale, join, meet, sorted_factors
from jax_scalify.scales.table import ScaleTable


def _extremum_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> Operand:
    sign = 1 if ctx.primitive is lax.max_p else -1
    args = (lhs, rhs)
    harmless = [x.constant is not None and sign * x.constant <= 0 for x in args]
    bound = None
    if any(harmless):  # max(x, c <= 0): exact for every finite x, even if c saturates
        which = harmless.index(True)
        other = args[which ^ 1]
        scale, limit = other.scale, _bound(args[which])
        if sign < 0 and other.facts.nonneg:  # relu6: 0 <= min(x, 6) <= 6
            scale = meet(scale, limit)
        elif other.facts.bound is not None and sign * other.facts.bound.number > 0:
            bound = other.facts.bound.number  # `other` is the first half of `clip`
            # No element of `clip(x, -1, 2)` is larger than 2.
            own = Scale(pow2.split_constant(bound)[1])
            scale = meet(scale, join(limit, own))
    else:
        scale = shared_scale(lhs, rhs)
    if (number := _own_number(ctx, args, scale, params)) is not None:
        return number
    out = ctx.bind(*aligned(scale, *args), **params)
    if bound is not None and not ctx.holds_values:
        # At the scale 2**30, the first half of `clip(x, -1, 1)` has a bound of -2**-24, the
        # smallest number of float16, and thus the value -64. At the new scale the bound fits.
        again = align_constant(bound, out.dtype, scale)
        out = lax.max(out, again) if sign < 0 else lax.min(out, again)
    return ctx.result(out, scale)


_extremum_rule.__doc__ = (
    "`scale = max(lhs.scale, rhs.scale)`, without a constant c in `max(x, c <= 0)` or "
    "`min(x, c >= 0)`."
)
_register_choice = functools.partial(
    register_scale_rule, family="aligning", elements="placed", elementwise=True
)
_register_choice(lax.max_p, lax.min_p)(_extremum_rule)


def _bound(x: Operand) -> Scale:
    """Return the scale of a constant bound; the largest scale for an infinite bound."""
    return x.scale if np.isfinite(np.float64(x.constant)) else Scale(pow2.MAX_EXPONENT)


@_register_choice(lax.clamp_p)
def clamp_rule(ctx: RuleContext, low: Operand, x: Operand, high: Operand, **params: Any) -> Operand:
    """`scale = max(votes)`; with constant bounds, `x.scale` clamped to the bounds' scales."""
    if low.constant is None or high.constant is None:
        scale = shared_scale(low, x, high)
    else:
        bounds = _bound(low), _bound(high)
        scale = meet(x.scale, join(*bounds))
        # No element of `clip(x, 0.1, 10)` is below 0.1, however small `x.scale` is.
        if low.constant > 0 or high.constant < 0:
            scale = join(scale, meet(*bounds))
    out, operands = ctx.out_avals[0], (low, x, high)
    if (number := _own_number(ctx, operands, scale, params)) is not None:
        return number
    args = [a.value if ctx.holds_values else align(a, scale) for a in operands]
    # `lax.clamp` takes bounds of rank 0 or of the full shape. At a scale with axes, the data of a
    # constant has the shape of the scale.
    args = [a if i != 1 and not np.ndim(a) else filled(a, out) for i, a in enumerate(args)]
    return ctx.result(ctx.bind(*same_dtype(*args), **params), scale)


def _own_number(
    ctx: RuleContext, operands: Sequence[Operand], scale: Scale, params: dict[str, Any]
) -> Operand | None:
    """Return a 0-d choice among operands of different scales at its own exponent; otherwise None.

    At the shared scale 1, `min(1e-9, 1.0)` would have data 1e-9, and float16 data that is
    multiplied by it would underflow. The result has data of about 1 at the scale 2**-30.
    """
    numbers = [x.constant for x in operands]
    zeros = [n is not None and (n == 0 or not np.isfinite(np.float64(n))) for n in numbers]
    scales = {x.scale for x, zero in zip(operands, zeros) if not (zero or x.scale.is_zero)}
    is_number = not ctx.out_avals[0].shape and jnp.issubdtype(ctx.out_dtype, jnp.floating)
    if not (is_number and len(scales) > 1 and ctx.table.narrow and ctx.table.splits_scalars):
        return None
    if ctx.holds_values:
        out = ctx.on_values(ONE, *operands, **params)
        return out.with_scale(ctx.table.split(out.source)[1])
    wide = dtypes.compute_dtype(ctx.out_dtype)
    data = [align(x, scale, wide) for x in operands]
    data, own = ctx.table.split(ctx.bind(*data, **params))
    return Operand(dtypes.cast(data, ctx.out_dtype), scale * own)


def _less(ctx: RuleContext, cases: Sequence[Operand]) -> Scale:
    """Return the factor, at most 1, by which a choice of multiples of one array lowers the scale.

    `hypot` computes `where(x < 0.03, 4096 * x, x)`, which multiplies small elements only. At the
    scale of `4096 * x`, all other elements would underflow.
    """
    first, *others = cases
    multiples = [x.scale / first.scale for x in others]
    are_known = not first.scale.is_zero and all(m.is_static and not m.is_zero for m in multiples)
    if not are_known or any(x.source is not first.source for x in cases):
        return ONE
    exponents = [0, *(m.exponent for m in multiples)]
    dtype = dtypes.compute_dtype(first.dtype) if ctx.stays_wide else first.dtype
    # For `x` and `4096 * x`, 2**-12: the data of `x` stays as it is, and the data of `4096 * x` is
    # multiplied by 4096. float16 has room for 2**12.
    return Scale(max(min(exponents) - max(exponents), room(dtype).exponent))


# Cases whose static exponents differ by at most this share one scale.
_NEAR = 2


def _chosen(ctx: RuleContext, which: Any, cases: Sequence[Operand]) -> Operand | None:
    """Return the case that a 0-d predicate chooses, at its own scale.

    In `where(norm < 1, g, g / norm)`, gradients may be 1e-9 on one side and 1 on the other. A
    chosen constant 0 has the scale 0. The result is None where one shared scale is as good: if the
    cases' scales are nearly equal, or in a step of wide dtypes that returns its state at given
    static scales (`splits_scalars` is False).
    """
    numbers = [None if x.constant is None else np.complex128(x.constant) for x in cases]
    scales = [x.scale for x, n in zip(cases, numbers) if n is None or (n != 0 and np.isfinite(n))]
    scales = [s for s in scales if not s.is_zero]
    # If `where(ok, g, 0)` chooses the zero, the result has the scale 0, so that the old scale of
    # `g` has no effect later. If `g` has a static scale, the result keeps it.
    has_zero = any(n == 0 for n in numbers) and not all(s.is_static for s in scales)
    if not ctx.table.splits_scalars or len(set(scales)) + has_zero < 2:
        return None
    if all(s.is_static for s in scales):
        exponents = [s.exponent for s in scales]
        if max(exponents) - min(exponents) <= _NEAR:
            return None

    each = [
        ZERO if n == 0 else scales[0] if x.scale.is_zero else x.scale
        for x, n in zip(cases, numbers, strict=True)
    ]
    common, own = _apart(each)
    # `select_n` takes the scales as arrays, so they must be in range.
    within = [s.bounded() if s.may_leave_range else s for s in own]
    cases = [
        x if new is old else at_scale(x, common * new)
        for x, old, new in zip(cases, own, within, strict=True)
    ]
    scale = common * _chosen_scale(ctx.table, which, within, common)
    data = same_dtype(*(ctx.array_of(x, x.scale) for x in cases))
    data = [filled(d, ctx.out_avals[0]) for d in data]
    return ctx.result(ctx.bind(which, *data), scale)


def _apart(scales: Sequence[Scale]) -> tuple[Scale, list[Scale]]:
    """Return the common factor of the nonzero scales, and all scales divided by it."""
    nonzero = [s for s in scales if not s.is_zero]
    factors = set.intersection(*(set(s.factors) for s in nonzero))
    common = Scale(min(s.exponent for s in nonzero), sorted_factors(dict(factors)))
    return common, [s / common for s in scales]


def _chosen_scale(table: ScaleTable, which: Any, own: Sequence[Scale], common: Scale) -> Scale:
    """Return the scale that `which` chooses. All arrays with the same choice share one atom.

    Clipping by a norm chooses between the scales `g` and `g / norm` of each gradient. The factor
    `g` is common to both. The choice between 1 and `1 / norm` is made once for all gradients.
    """
    shape = np.broadcast_shapes(*(s.shape for s in own))
    extent = min(max(0, NARROW_EXTENT - int(common.extent)), int(max(s.span for s in own)))

    def make() -> tuple[Any, Scale]:
        arrays = [scale_array(table, s, shape) for s in own]
        known: dict[str, Any] = dict(nonzero=all(s.is_nonzero for s in own), extent=extent)
        atom = table.atom(lax.select_n(which, *arrays), **known)
        return which, atom  # `which` is kept alive, so that its id is not reused

    return table.memoised(("chosen", id(which), tuple(own), extent), make)[1]


@_register_choice(lax.select_n_p)
def select_n_rule(ctx: RuleContext, which: Any, *cases: Operand, **params: Any) -> Any:
    """`scale = max(votes)` of the cases; for multiples of one array, less if all still fit.

    A predicate of equal elements chooses the scale too, that of the chosen case.
    """
    number = ctx.inputs[0].number
    if number is not None:
        # `jnp.where` may have broadcast a 0-d predicate. This is the 0-d predicate itself.
        which = number
        chosen = _chosen(ctx, which, cases)
        if chosen is not None:
            return chosen
    factor = _less(ctx, cases)
    scale = scale_for(cases, factor)
    data = at_shared_scale(ctx, cases, scale, ctx.out_avals[0], grows=not factor.is_one)
    fits = factor.is_one and all(x.fits for x in cases)
    return ctx.result(ctx.bind(which, *data, **params), scale, fits=fits)
