"""Scales as exponents: float32 arrays, until data is multiplied by a scale.

The exponent of a product is a sum, and that of a maximum is a maximum. The formulas here are those
of scalar scales, which are computed together (`scales/rounds.py`), and of all others, which are
computed at once.

Example: `max(a * b, c)` with the exponents 2, -5 and -1 has the exponent `max(2 - 5, -1) = -1`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base.pins import pin
from jax_scalify.base.pow2 import MAX_EXPONENT, exponent, exponent_layout
from jax_scalify.scales.algebra import Computed, Scale

# The exponent of the scale 0. Exponents below `_ZERO_LIMIT` stand for 0 too: they belong to a root
# of 0, or to 0 times other scales.
ZERO = -float(2**22)
_ZERO_LIMIT = -float(2**18)
# A held scale is computed as a maximum: its first term is raised by this exponent, so that it wins
# unless it is 0.
_HELD = float(2**17)


def of_powers(powers: Any) -> Any:
    """Return the exponents of powers of two."""
    found = exponent(powers).astype(jnp.float32)
    zero = lax.full_like(found, ZERO)
    # In float32 the bits of 0 are those of the exponent -127.
    return lax.select(found < np.float32(-MAX_EXPONENT), zero, found)


def to_powers(exponents: Any, dtype: Any, most: Any) -> Any:
    """Return `2**min(exponents, most)`: 0 below the normal numbers, inf above them."""
    most = np.asarray(most)
    integer, nmant = exponent_layout(dtype)
    bias = jnp.finfo(dtype).maxexp - 1
    # In float32 the biased exponent 0 makes the number 0, and 255 makes inf.
    high = np.minimum(most + bias, 2 * bias + 1).astype(np.float32)
    high = high if np.isfinite(most).any() else high.max()
    biased = lax.clamp(np.zeros_like(high), exponents + np.float32(bias), high).astype(integer)
    return lax.bitcast_convert_type(biased << np.array(nmant, integer), dtype)


def times(exponents: Any, power: Any) -> Any:
    """Return `exponents * power`. A scale of 0 to a negative power counts as 1."""
    power = np.asarray(power, np.float32)
    if (power < 0).any():
        limit = np.where(power < 0, _ZERO_LIMIT, -np.inf).astype(np.float32)
        exponents = lax.select(exponents < limit, jnp.zeros_like(exponents), exponents)
    return exponents * power if (power != 1).any() else exponents


def ranked(scale: Computed) -> tuple[Scale, ...]:
    """Return the monomials whose maximum is computed: see `_HELD`."""
    if not scale.is_held:
        return scale.terms
    first, second = scale.terms
    return Scale(first.exponent + _HELD, first.factors), second


def outcome(found: Any, settings: Sequence[Any]) -> Any:
    """Return the exponents of scales, given the maxima of their monomials: see `Computed`."""
    low, high, degree, is_rest, is_held = map(np.asarray, settings)
    is_root = degree > 1  # roots get infinite bounds: they are not clamped
    low, high = (np.where(is_root, b * np.inf, b).astype(np.float32) for b in (low, high))
    within = found if is_root.all() else lax.clamp(low, found, high)
    within = lax.select(found < np.float32(_ZERO_LIMIT), found, within)
    if is_held.any():
        # With exponents 5 and 9, the maximum is `5 + _HELD`, and `first` is 5. If the first scale
        # is 0, the maximum is 9 and `first` is `9 - _HELD`, so `within` is taken.
        first = found - np.float32(_HELD)
        within = lax.select(first > np.float32(-_HELD / 2), first, within)
    if not is_root.any():
        return within
    root = lax.floor(found * (1 / degree).astype(np.float32))
    root = lax.select(is_rest, found - root * degree.astype(np.float32), root)
    return lax.select(is_root, root, within)


# These functions compute scales at once, one by one. Arrays of one shape share them, so that the
# lowered program has one copy. The factors of a scale are positions in the list of exponents.

exponents_now = jax.jit(of_powers)
_to_powers = jax.jit(to_powers, static_argnums=(1, 2))
_times = jax.jit(times, static_argnums=1)
_outcome = jax.jit(outcome, static_argnums=1)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def computed_now(scale: Computed, exponents: Sequence[Any]) -> jax.Array:
    """Return the exponents of a computed scale, given the exponents of its factors."""
    found = functools.reduce(jnp.maximum, [_sum(term, exponents) for term in ranked(scale)])
    return pin(_outcome(found, scale.settings))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def powers_now(monomial: Scale, dtype: Any, most: float, exponents: Sequence[Any]) -> jax.Array:
    """Return the array of a monomial, given the exponents of its factors."""
    powers = _to_powers(_sum(monomial, exponents), dtype, most)
    return powers if len(monomial.factors) <= 2 else pin(powers)


def _sum(monomial: Scale, exponents: Sequence[Any]) -> Any:
    parts = [exponents[i] if p == 1 else _times(exponents[i], p) for i, p in monomial.factors]
    shift = np.float32(max(monomial.exponent, ZERO))
    return functools.reduce(jnp.add, parts if shift == 0 and parts else [*parts, shift])
