"""Multiplicative primitives. They are homogeneous of degree k: `out.scale = scale**k`."""

from __future__ import annotations

import fractions
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base import dtypes
from jax_scalify.base.filling import filled
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import Rule, RuleContext, register_elementwise
from jax_scalify.rules.nonlinear import wide_rule
from jax_scalify.rules.shared.products import bind_product, widened
from jax_scalify.scales.algebra import ONE, Scale
from jax_scalify.scales.multiplying import multiply

# The largest `|y|` for which `x**y` has a power law. Models have no larger powers, and the scales
# of larger powers would leave the range of every dtype.
_LARGEST_POWER = 32
# The largest root that a law takes: `x**0.3` has the scale of a cube root.
_LARGEST_ROOT = 4
# In float16 and FP8, the scale of a power is 2**3 times the scale of its law, because powers spread
# their data. Normal numbers with an RMS of 1 to 2 have squares with an RMS of 1.7 to 7, and squares
# of sums of squares spread further. In `x**-3`, data of 2**-5 becomes 2**15, close to the largest
# float16. Inverse squares get no such room: the derivative of each quotient, and so of each
# softmax, contains one, and gradients would lose three octaves in each layer of attention.
_SPREAD = 3


# The product of float32 data and a constant may leave the range of float32 if the constant is
# larger than this, or smaller than its inverse.
_LARGEST_FACTOR = 2.0**32


def _mantissa(x: Operand) -> float:
    """Return `constant / scale` of a constant; 0 if the constant is complex, or far from 1."""
    number = x.constant
    if number.dtype.kind == "c" or not 1 / _LARGEST_FACTOR < abs(number) < _LARGEST_FACTOR:
        return 0.0
    return math.ldexp(float(number), -int(x.scale.exponent))


def _by_sign(ctx: RuleContext, x: Operand, constant: Operand, scale: Scale) -> Operand | None:
    """Return `x` times a constant with the data 1 or -1; None for any other operand."""
    if ctx.holds_values or constant.constant is None or constant.data not in (1, -1):
        return None
    data = filled(x.data, ctx.out_avals[0])
    return ctx.result(data if constant.data == 1 else lax.neg(data), scale, fits=x.fits)


def _is_no_larger(ctx: RuleContext, *factors: Operand) -> bool:
    """Return whether one factor is a constant, and the product's data is at most the other's."""
    if ctx.holds_values:
        return False
    # In `0.3 * x` the constant is `0.6 * 2**-1`: its data is at most 1, so no element grows.
    others = [x for x in factors if x.constant is None or not abs(x.data) <= 1]
    return len(others) < 2 and all(x.fits for x in others)


@register_elementwise(lax.mul_p, nonnegative="keeps", degree="product")
def mul_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> Operand:
    """`scale = lhs.scale * rhs.scale`; a constant power of two costs nothing.

    If one factor is a gate, as in `x * sigmoid(x)`, the scale is doubled. A sigmoid has the scale
    1/2, so the product has `x.scale`.
    """
    scale = lhs.scale * rhs.scale
    if lhs.facts.gate != rhs.facts.gate and lhs.number is None and rhs.number is None:
        return bind_product(ctx, (lhs, rhs), scale, params, spread=Scale(1))
    for x, other in ((rhs, lhs), (lhs, rhs)):
        if x.constant is None or ctx.out_dtype != other.dtype:
            continue
        if ctx.holds_values and (mantissa := _mantissa(x)):
            # The source keeps its unit, so that an argument's scale need not be multiplied into it.
            source, unit = other.at_scalar_unit
            out = ctx.bind(*(a.value if a is x else source for a in (lhs, rhs)), **params)
            # Then `(0.001 * g) * g` is known to have no negative element: both factors have the
            # same origin. See `_is_square` in `interpreter/facts.py`.
            known = dict(origin=other.origin, mantissa=other.mantissa * mantissa)
            return ctx.of_value(out, scale, unit).known(**known)
        if (out := _by_sign(ctx, other, x, scale)) is not None:
            return out
    return bind_product(ctx, (lhs, rhs), scale, params, fits=_is_no_larger(ctx, lhs, rhs))


@register_elementwise(lax.div_p, nonnegative="keeps", degree="quotient")
def div_rule(ctx: RuleContext, lhs: Operand, rhs: Operand, **params: Any) -> Operand:
    """`scale = lhs.scale / rhs.scale`; a constant power of two costs nothing."""
    scale = lhs.scale / rhs.scale
    if (out := _by_sign(ctx, lhs, rhs, scale)) is not None:
        return out
    if ctx.holds_values and rhs.constant is not None and _mantissa(rhs):
        source, unit = lhs.at_scalar_unit
        return ctx.of_value(ctx.bind(source, rhs.value, **params), scale, unit)
    return bind_product(ctx, (lhs, rhs), scale, params)


def _spread(ctx: RuleContext) -> Scale:
    return Scale(_SPREAD if dtypes.is_narrow(ctx.out_dtype) else 0)


@register_elementwise(lax.square_p, nonnegative="always", degree=2)
def square_rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
    """`scale = scale**2`; in float16 and FP8, `8 * scale**2`."""
    return bind_product(ctx, (x,), x.scale**2, params, _spread(ctx))


@register_elementwise(lax.integer_pow_p, nonnegative="keeps")
def integer_pow_rule(ctx: RuleContext, x: Operand, *, y: int, **params: Any) -> Operand:
    """`scale = scale**y`; in float16 and FP8, `8 * scale**y` unless -2 <= y <= 1."""
    spread = ONE if -2 <= y <= 1 else _spread(ctx)
    return bind_product(ctx, (x,), x.scale**y, {"y": y, **params}, spread)


def _base(ctx: RuleContext, x: Operand, rest: Scale) -> Any:
    """Return the array that a power is computed of: data times the rest of a root, or values."""
    return x.value if ctx.holds_values else widened(ctx, [multiply(x.data, rest)])[0]


def _root_rule(degree: int, moved: str) -> Rule:
    """Return the rule of a root, or of an inverse root if the degree is negative."""

    def rule(ctx: RuleContext, x: Operand, **params: Any) -> Operand:
        root, rest = x.scale.root(abs(degree))
        scale = root**-1 if degree < 0 else root
        return ctx.result(ctx.bind(_base(ctx, x, rest), **params), scale)

    rule.__doc__ = f"`scale = scale**({'-' * (degree < 0)}1/{abs(degree)})`; {moved} into the data."
    return rule


_ONE_FACTOR = "for an odd exponent, one factor of two moves"
for _primitive, _degree, _moved, _sign in (
    (lax.sqrt_p, 2, _ONE_FACTOR, "always"),
    (lax.rsqrt_p, -2, _ONE_FACTOR, "always"),
    (lax.cbrt_p, 3, "up to two factors of two move", "keeps"),
):
    _register = register_elementwise(_primitive, nonnegative=_sign, degree=1 / _degree)
    _register(_root_rule(_degree, _moved))


@register_elementwise(lax.pow_p, nonnegative="keeps")
def pow_rule(ctx: RuleContext, x: Operand, y: Any, **params: Any) -> Any:
    """`scale = scale**y` for a constant `y` (of the nearest quarter or third), else 1."""
    number = ctx.inputs[1].constant  # an integer `y` is plain
    if number is None or number.imag or not abs(number.real) <= _LARGEST_POWER:
        return wide_rule(ctx, x, y, **params)
    power = fractions.Fraction(float(number.real)).limit_denominator(_LARGEST_ROOT)
    root, rest = x.scale.root(power.denominator) if power.denominator > 1 else (x.scale, ONE)
    if power.denominator > 2 or power != number.real:
        # Evaluated on values, since the scale is near `scale**y` only. The value of `0**-0.75` is
        # infinite, and its scale must not be.
        root = root.or_one() if power < 0 else root
        return ctx.on_values(root**power.numerator, x, y, saturates=False, **params)
    # For `y = 1.5`: with `scale = root**2 * rest`, `x**y` is `(data * rest)**1.5 * root**3`.
    base = _base(ctx, x, rest)
    is_integer = jnp.issubdtype(ctx.in_avals[1].dtype, jnp.integer)
    dtype = ctx.in_avals[1].dtype if is_integer else base.dtype
    exponent = np.asarray(float(power), dtype)[()]
    return ctx.result(ctx.bind(base, exponent, **params), root**power.numerator)
