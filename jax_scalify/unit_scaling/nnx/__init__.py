"""Modules of Flax NNX with unit scale: `from jax_scalify.unit_scaling import nnx`.

Weights are unit Gaussians, and each parameter has its role in its metadata: `nnx.Param.role`. In
`jax_scalify.unit_scaling.linen` are the same modules for Flax linen.
"""

try:
    import flax  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("`jax_scalify.unit_scaling.nnx` needs Flax: `pip install flax`.") from error

from jax_scalify.unit_scaling.nnx.experts import MoEMLP
from jax_scalify.unit_scaling.nnx.layers import (
    Dropout,
    Embed,
    LayerNorm,
    Linear,
    LinearReadout,
    RMSNorm,
)
from jax_scalify.unit_scaling.nnx.transformers import (
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
]
