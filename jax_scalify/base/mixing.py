"""Pseudo-random bits from numbers, for stochastic rounding without a key."""

from __future__ import annotations

import jax
import numpy as np


def mixed(bits: jax.Array) -> jax.Array:
    """Hash `uint32` numbers: different numbers give independent-looking bits.

    Source: the finaliser of MurmurHash3 by Austin Appleby.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))
