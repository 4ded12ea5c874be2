"""Modules of Flax linen with unit scale: `from jax_scalify.unit_scaling import linen`.

They are those of `jax_scalify.unit_scaling.nnx`, with the same parameters under the same names.
Weights are unit Gaussians, and each parameter is in a box, `WithRole`, that tells its role, as
`flax.linen.Partitioned` tells partitions: `apply`, optax and `TrainState` take boxes as they are.
`flax.linen.meta.unbox` leaves arrays; take the roles first then, with `us.get_roles`.
"""

try:
    import flax  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("`jax_scalify.unit_scaling.linen` needs Flax: `pip install flax`.") from error

from jax_scalify.unit_scaling.linen.experts import MoEMLP
from jax_scalify.unit_scaling.linen.layers import (
    Dropout,
    Embed,
    LayerNorm,
    Linear,
    LinearReadout,
    RMSNorm,
    WithRole,
    with_role,
)
from jax_scalify.unit_scaling.linen.transformers import (
    MHSA,
    MLP,
    TransformerDecoder,
    TransformerLayer,
)

__all__ = [
    "MHSA",
    "MLP",
    "Dropout",
    "Embed",
    "LayerNorm",
    "Linear",
    "LinearReadout",
    "MoEMLP",
    "RMSNorm",
    "TransformerDecoder",
    "TransformerLayer",
    "WithRole",
    "with_role",
]
