"""Second moments in FP8: what is stored is their square root, which has half of their octaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base.stochastic_rounding import round_stochastically


class SquareRoot(NamedTuple):
    """Stands in an optimizer's state for a leaf that is never negative: its square root, in FP8.

    `leaf = root**2`. Squared gradients spread over twice the octaves that gradients do: E4M3 has
    17, the roots of second moments in it cover 34. Rounding keeps the mean of the square.

    Attributes:
        root: `ScaledArray` of the leaf's shape, of data in FP8.

    Example:
        >>> import optax
        >>> opt = jsa.optim.low_precision(optax.adam(1e-3), second_moment_dtype=jnp.float8_e4m3fn)
        >>> params = jnp.ones(2)
        >>> _, state = opt.update(jnp.float32([3e-6, 1e-9]), opt.init(params), params)
        >>> root = state[0].nu.root
        >>> print(root.dtype, jnp.square(root.to_array(jnp.float32)))
        float8_e4m3fn [9.3813846e-15 1.0720261e-21]
    """

    root: Any


def is_root(leaf: Any) -> bool:
    """Tell whether a leaf of a state is a `SquareRoot`."""
    return isinstance(leaf, SquareRoot)


def is_leaf(x: Any) -> bool:
    """Tell whether something is one leaf of a stored state: a `ScaledArray` or a `SquareRoot`."""
    return is_scaled(x) or is_root(x)


def moved_for_square(x: jax.Array, dtype: Any) -> jax.Array:
    """Move numbers so that, rounded stochastically, their squares have the mean `x**2`.

    Between neighbours `low` and `high` the upper one is taken with the probability
    `(x**2 - low**2) / (high**2 - low**2)`, and not with `(x - low) / (high - low)`: the square of
    a root that is right on average is too large by its variance.

    Args:
        x: that are not negative, in float32.
        dtype: that they will be rounded to.

    Example, in E4M3: 17 is between 16 and 18. `(17**2 + 16 * 18) / (16 + 18) = 16.97`, from which
    18 is chosen with the probability `0.485`, and `0.485 * 18**2 + 0.515 * 16**2 = 17**2`.
    """
    bits = np.dtype(f"uint{jnp.finfo(dtype).bits}")
    top = np.array(jnp.finfo(dtype).max, dtype).view(bits)[()]
    # A square root may be some ulp beside a number of the dtype, which it ought to be.
    slack = np.float32(1 + 2.0**-20)
    size = x * slack
    low = round_stochastically(size, jnp.full_like(x, 2**32 - 1, jnp.uint32), dtype)
    pattern = lax.bitcast_convert_type(low, bits)
    high = lax.bitcast_convert_type(jnp.minimum(pattern + bits.type(1), top), dtype)
    low, high = low.astype(x.dtype), high.astype(x.dtype)
    # A GPU's quotient may be an ulp too large, and `high` is `low` at the top of the range.
    moved = jnp.minimum((x * x + low * high) / (low + high), high)
    moved = jnp.where(x <= low * slack, low, moved)
    return jnp.where(jnp.isfinite(x), moved, x)
