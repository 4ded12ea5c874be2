"""By which factor a sum outgrows its terms."""

from __future__ import annotations

import enum
import math
from typing import Any

import jax.numpy as jnp

from jax_scalify.config import Pow2RoundMode
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.interpreter.rescaling import kept_wide
from jax_scalify.rules.shared.products import for_constants, ratio_of
from jax_scalify.scales.algebra import Scale
from jax_scalify.scales.multiplying import multiply

# A sum of n non-negative terms grows like n. For narrow data the factor stops at 2**10: beyond it
# one confident logit in a softmax over 50,257 classes would give 65536 * 2**-16.
NONNEGATIVE_LIMIT = 10
# A batch of unknown size in an exported function is expected to be about this large.
_SYMBOLIC_COUNT = 256


class Terms(enum.Enum):
    """What is known of the terms of a sum, and so with which power of their number it grows.

    Terms with a factor that was given, as a weight is, are independent of each other. Computed
    values have a part in common, taken to be the `n**-1/8`th part of them: the gradients of the
    examples agree to some extent, and so do the values that attention averages. A sum of such
    values grows like `n**(7/8)`, and one of products of two like `n**(3/4)`, in which the common
    parts are multiplied.

    A sum of peaked terms is anything from one of them to all `n`, and the gradient of a softmax
    divides by its square: float16 has room for both ends only if the scale lies in the middle.
    """

    INDEPENDENT = 1 / 2
    PRODUCTS = 3 / 4
    ALIKE = 7 / 8
    NONNEGATIVE = 1

    @classmethod
    def of(cls, *factors: Operand) -> Terms:
        """The terms that are products of some operands' elements."""
        facts = [x.facts for x in factors]
        if any(f.peaked for f in facts):
            return cls.INDEPENDENT
        if all(f.nonneg for f in facts):
            return cls.NONNEGATIVE
        if not all(f.computed for f in facts):
            return cls.INDEPENDENT
        return cls.PRODUCTS if len(factors) > 1 else cls.ALIKE


def growth(ctx: RuleContext, count: int, terms: Terms) -> Scale:
    """The factor by which a sum of `count` terms of unit RMS outgrows one of them.

    A symbolic count, as that of an exported function's batch, counts as 256.
    """
    count = count if isinstance(count, int) else _SYMBOLIC_COUNT
    if count <= 1:
        return Scale(0)
    exponent = math.log2(count) * terms.value
    if ctx.config.rounding_mode is Pow2RoundMode.UP:
        exponent = math.ceil(exponent)
    exponent = math.floor(exponent)
    if terms is Terms.NONNEGATIVE and jnp.finfo(ctx.out_dtype).bits < 32:
        exponent = min(exponent, NONNEGATIVE_LIMIT)
    return Scale(exponent)


def finish(
    ctx: RuleContext, total: Any, scale: Scale, factor: Scale, unit: Scale | None = None
) -> Operand:
    """Make the result of a sum: values `total * unit`, of the scale `scale * factor`.

    The factor is how much larger than its terms the sum is expected to be, and what a calibration
    has found besides. By default the total is data at the scale without it or, if wide, values.
    """
    unit = ctx.unit(scale) if unit is None else unit
    if ctx.holds_values:
        return ctx.of_value(multiply(total, unit), scale * factor)
    if ctx.pending.exponent:
        factor = factor * Scale(ctx.pending.take())
    scale = scale * factor
    ratio = ratio_of(unit, scale) if not scale.is_zero else factor**-1
    if ctx.stays_wide:
        return kept_wide(multiply(total, ratio), scale, ctx.out_dtype)
    holds = for_constants(ctx, scale)
    ratio = ratio if holds is scale else ratio * scale / holds
    return Operand(multiply(total, ratio, ctx.out_dtype), holds)
