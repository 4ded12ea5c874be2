"""The factor by which a sum is larger than its terms."""

from __future__ import annotations

import enum
import math

import jax.numpy as jnp

from jax_scalify.config import Pow2RoundMode
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.scales.algebra import Scale

# A sum of n non-negative terms grows like n. For dtypes of at most 16 bits, the factor is at most
# 2**10. Example: in a softmax over 128,256 classes with one confident logit, the sum is 1. With a
# factor of 2**16 its data would be 2**-16, and the probability 1 would be 65536 * 2**-16. float16
# does not hold 65536.
NONNEGATIVE_LIMIT = 10
# The assumed size of a symbolic dimension, such as the batch of an exported function.
_SYMBOLIC_COUNT = 256


class Terms(enum.Enum):
    """What is known of the terms of a sum. The member's value `p` gives its growth, `n**p`.

    INDEPENDENT: terms with a given factor, such as a weight, have random signs. Their sum has RMS
    `sqrt(n)`: 64 for `n = 4096`.
    ALIKE: computed values have a part in common, assumed to be `n**(-1/8)` of their size. The
    gradients of a batch's examples agree in part, and so do the values that attention averages.
    Their sum grows like `n**(7/8)`: 1448 for `n = 4096`.
    PRODUCTS: in products of two computed values the common parts are multiplied: `n**(-1/4)` of
    their size. Their sum grows like `n**(3/4)`: 512 for `n = 4096`.
    NONNEGATIVE: the sum grows like `n`.

    Peaked terms (exponentials, masks cast to numbers) count as independent. Their sum may be as
    small as one term or as large as `n` terms, and the gradient of a softmax divides by the square
    of the sum. float16 has room for both ends only if the scale lies in the middle.
    """

    INDEPENDENT = 1 / 2
    PRODUCTS = 3 / 4
    ALIKE = 7 / 8
    NONNEGATIVE = 1

    @classmethod
    def of(cls, *factors: Operand) -> Terms:
        """Return what is known of terms that are products of the operands' elements."""
        facts = [x.facts for x in factors]
        if any(f.peaked for f in facts):
            return cls.INDEPENDENT
        if all(f.nonneg for f in facts):
            return cls.NONNEGATIVE
        if not all(f.computed for f in facts):
            return cls.INDEPENDENT
        return cls.PRODUCTS if len(factors) > 1 else cls.ALIKE


def growth(ctx: RuleContext, count: int, terms: Terms) -> Scale:
    """Return `pow2(count**p)`, the expected size of a sum of `count` terms of unit RMS.

    A symbolic count, such as the batch of an exported function, counts as 256.
    """
    count = count if isinstance(count, int) else _SYMBOLIC_COUNT
    if count <= 1:
        return Scale(0)
    rounded = math.ceil if ctx.config.rounding_mode is Pow2RoundMode.UP else math.floor
    exponent = rounded(math.log2(count) * terms.value)
    if terms is Terms.NONNEGATIVE and jnp.finfo(ctx.out_dtype).bits < 32:
        exponent = min(exponent, NONNEGATIVE_LIMIT)
    return Scale(exponent)
