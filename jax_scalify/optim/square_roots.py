"""Second moments in FP8. Their square root is stored, which spans half as many octaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base.stochastic_rounding import round_stochastically


class SquareRoot(NamedTuple):
    """A non-negative leaf of an optimizer's state, stored as its square root in FP8.

    `leaf = root**2`. Squared gradients span twice as many octaves as gradients. E4M3 spans 17
    octaves, so roots in E4M3 cover 34. Rounding keeps the mean of the square.

    Attributes:
        root: `ScaledArray` of the leaf's shape, with FP8 data.

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
    """Return whether a leaf of a state is a `SquareRoot`."""
    return isinstance(leaf, SquareRoot)


def is_leaf(x: Any) -> bool:
    """Return whether `x` is one leaf of a stored state: a `ScaledArray` or a `SquareRoot`."""
    return is_scaled(x) or is_root(x)


def moved_for_square(x: jax.Array, dtype: Any) -> jax.Array:
    """Move numbers so that, rounded stochastically, their squares have the mean `x**2`.

    Of the neighbours `low` and `high`, `high` is then chosen with the probability
    `(x**2 - low**2) / (high**2 - low**2)` instead of `(x - low) / (high - low)`. With the latter,
    the mean of the square would be too large by the variance.

    Args:
        x: non-negative float32 numbers.
        dtype: the dtype to which they will be rounded.

    Example, in E4M3: 17 is between 16 and 18. `(17**2 + 16 * 18) / (16 + 18) = 16.97`, from which
    18 is chosen with the probability `0.485`, and `0.485 * 18**2 + 0.515 * 16**2 = 17**2`.
    """
    bits = np.dtype(f"uint{jnp.finfo(dtype).bits}")
    top = np.array(jnp.finfo(dtype).max, dtype).view(bits)[()]
    # A computed square root may miss a number of the dtype by some ulps.
    slack = np.float32(1 + 2.0**-20)
    size = x * slack
    low = round_stochastically(size, jnp.zeros_like(x, jnp.uint32), dtype)
    pattern = lax.bitcast_convert_type(low, bits)
    high = lax.bitcast_convert_type(jnp.minimum(pattern + bits.type(1), top), dtype)
    low, high = low.astype(x.dtype), high.astype(x.dtype)
    # The quotient may be an ulp too large on a GPU, and `high == low` at the top of the range.
    moved = jnp.minimum((x * x + low * high) / (low + high), high)
    moved = jnp.where(x <= low * slack, low, moved)
    return jnp.where(jnp.isfinite(x), moved, x)
