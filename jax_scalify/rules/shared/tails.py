"""Functions that fall off to 0 far from 0, and so does any power times them.

The derivatives of activations are such functions times their argument: that of an exact GELU has
the term `x * exp(-x**2 / 2)`, which is at most 0.6 whatever the scale of x is. By the law of
products it has the scale of x. With weights at a scale of 1 and an RMS of 2**-4, three layers
give pre-activations a scale 2**7 above their RMS, and every gradient before the activation too.

Where another equation multiplies x, a function of float16 that falls off has a scale of `1 / s`,
for an argument of a scale `s > 1`. The product with the argument has a scale of 1 then. Without it
the function is the derivative by one of the readers of x. It is added to that by the other reader,
which has the larger scale. If nothing multiplies x, as in a network of `tanh`, the scale is 1.

Example: x is `0.0078 * 2**7`, and `exp(-x**2 / 2)` is `77.6 * 2**-7`. The product is
`0.605 * 2**0`.
"""

from __future__ import annotations

from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import ONE, Scale

# The data of a function that is at most 1 may be this large: in float16 there are 8 octaves above.
_LARGEST_TAIL = 8


def tail_scale(ctx: RuleContext, argument: Scale) -> Scale:
    """The scale of a function that falls off, of an argument of a scale; 1 in wide dtypes."""
    if not dtypes.has_short_range(ctx.out_dtype) or argument.ndim:
        return ONE
    scale, _ = algebra.join(ONE, argument).bounded(_LARGEST_TAIL)
    return scale**-1


def product_tail(ctx: RuleContext, lhs: Operand, rhs: Operand) -> Scale:
    """The scale of a tail, of a product `f(x) * (1 - f(x))`; 1 of another one."""
    a, b = lhs.saturated, rhs.saturated
    if a is None or b is None or a.argument != b.argument or a.falls * b.falls != -1:
        return ONE
    return tail_scale(ctx, a.argument)


def bell_scale(ctx: RuleContext, x: Operand) -> Scale:
    """The scale of `exp(x)`: that of a tail, if x is a square times a negative number."""
    is_bell = x.facts.square < 0 and x.facts.reused
    return tail_scale(ctx, x.scale.root(2)[0]) if is_bell else ONE
