"""Unit scaling of an ordinary model, from its jaxpr."""

from jax_scalify.unit_scaling.automatic.explanation import Explanation, Row
from jax_scalify.unit_scaling.automatic.observing import Measurement, Tensor
from jax_scalify.unit_scaling.automatic.transform import UnitScaled, unit_parameters, unit_scale

__all__ = [
    "Explanation",
    "Measurement",
    "Row",
    "Tensor",
    "UnitScaled",
    "unit_parameters",
    "unit_scale",
]
