"""The scale rules, one file a family."""

from jax_scalify.rules import (
    aligning,
    calls,
    collective,
    control_flow,
    custom,
    linear_algebra,
    mixed,
    multiplicative,
    nonlinear,
    plain,
    scale_free,
    scaling,
    structural,
    summing,
    through_zero,
)

__all__ = [
    "aligning",
    "calls",
    "collective",
    "control_flow",
    "custom",
    "linear_algebra",
    "mixed",
    "multiplicative",
    "nonlinear",
    "plain",
    "scale_free",
    "scaling",
    "structural",
    "summing",
    "through_zero",
]
