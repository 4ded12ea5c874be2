"""The scale rules, one module for each family. Importing a module registers its rules."""

from jax_scalify.rules import (  # noqa: F401
    aligning,
    choosing,
    collective,
    dequantised,
    fused_attention,
    linear_algebra,
    multiplicative,
    nonlinear,
    own_primitives,
    scale_free,
    structural,
    summing,
)
from jax_scalify.rules.bodies import calls, control_flow, custom_scale, sharded  # noqa: F401
