"""Unit Scaling and u-µP: models whose tensors all have unit scale at initialisation.

Nothing here needs `scalify`, and everything composes with it.

Sources: Blake et al., *Unit Scaling: Out-of-the-Box Low-Precision Training* (2023); Blake et al.,
*u-µP: The Unit-Scaled Maximal Update Parametrization* (2024).
"""

from jax_scalify.unit_scaling import constraints, functional
from jax_scalify.unit_scaling.automatic import unit_parameters, unit_scale
from jax_scalify.unit_scaling.scaling import scale_bwd, scale_fwd

__all__ = [
    "constraints",
    "functional",
    "scale_bwd",
    "scale_fwd",
    "unit_parameters",
    "unit_scale",
]
