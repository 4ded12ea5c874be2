"""The scale rules, one file a family; importing them registers them."""

from jax_scalify.rules import (
    aligning,
    collective,
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
from jax_scalify.rules.bodies import calls, control_flow, custom_scale

__all__ = [
    "aligning",
    "calls",
    "collective",
    "control_flow",
    "custom_scale",
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
