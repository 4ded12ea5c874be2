"""Functions with unit scale: of their results, and of the gradients of their operands."""

from jax_scalify.unit_scaling.functional.activations import (
    gelu,
    relu,
    sigmoid,
    silu,
    silu_glu,
    tanh,
)
from jax_scalify.unit_scaling.functional.attention import rope, scaled_dot_product_attention
from jax_scalify.unit_scaling.functional.experts import (
    combine,
    dispatch,
    load_balancing_loss,
    ragged_dot,
    top_k_routing,
)
from jax_scalify.unit_scaling.functional.losses import cross_entropy, mse_loss
from jax_scalify.unit_scaling.functional.normalization import dropout, layer_norm, rms_norm, softmax
from jax_scalify.unit_scaling.functional.products import (
    conv,
    einsum,
    embedding,
    linear,
    linear_readout,
    matmul,
)
from jax_scalify.unit_scaling.functional.sums import (
    add,
    residual_add,
    residual_apply,
    residual_split,
    weighted_add,
)

__all__ = [
    "add",
    "combine",
    "conv",
    "cross_entropy",
    "dispatch",
    "dropout",
    "einsum",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "linear_readout",
    "load_balancing_loss",
    "matmul",
    "mse_loss",
    "ragged_dot",
    "relu",
    "residual_add",
    "residual_apply",
    "residual_split",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "silu_glu",
    "softmax",
    "tanh",
    "top_k_routing",
    "weighted_add",
]
