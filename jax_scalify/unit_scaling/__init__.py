"""Unit Scaling and u-µP: models whose tensors all have unit scale at initialisation.

Nothing here needs `scalify`, and everything composes with it.

Sources: Blake et al., *Unit Scaling: Out-of-the-Box Low-Precision Training* (2023); Blake et al.,
*u-µP: The Unit-Scaled Maximal Update Parametrization* (2024).
"""

from jax_scalify.unit_scaling import constraints, functional
from jax_scalify.unit_scaling.automatic import unit_parameters, unit_scale
from jax_scalify.unit_scaling.fp8_scheme import fp8_matmul
from jax_scalify.unit_scaling.residuals import fixed_tau, running_mean, umup_residuals
from jax_scalify.unit_scaling.roles import Role, get_roles
from jax_scalify.unit_scaling.scaling import scale_bwd, scale_fwd
from jax_scalify.unit_scaling.umup import UmupConfig

__all__ = [
    "Role",
    "UmupConfig",
    "constraints",
    "fixed_tau",
    "fp8_matmul",
    "functional",
    "get_roles",
    "running_mean",
    "scale_bwd",
    "scale_fwd",
    "umup_residuals",
    "unit_parameters",
    "unit_scale",
]
