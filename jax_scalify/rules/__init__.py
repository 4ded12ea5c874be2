"""The scale rules, one file a family."""

from jax_scalify.rules import (
    aligning,
    calls,
    multiplicative,
    nonlinear,
    scaling,
    structural,
    summing,
)

__all__ = [
    "aligning",
    "calls",
    "multiplicative",
    "nonlinear",
    "scaling",
    "structural",
    "summing",
]
