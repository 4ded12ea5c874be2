"""Functions of neural networks, with scale rules for the forward and the backward pass."""

from jax_scalify.nn.activations import (
    elu,
    geglu,
    gelu,
    glu,
    leaky_relu,
    relu,
    sigmoid,
    silu,
    softplus,
    squared_relu,
    swiglu,
    swish,
    tanh,
)
from jax_scalify.nn.attention import dot_product_attention
from jax_scalify.nn.conv import conv_general_dilated
from jax_scalify.nn.fp8_dot import DotGeneral, dot_general, einsum, linear, matmul
from jax_scalify.nn.layers import dropout, embed, residual_add
from jax_scalify.nn.losses import (
    cross_entropy,
    sigmoid_binary_cross_entropy,
    softmax_cross_entropy,
    softmax_cross_entropy_with_integer_labels,
    squared_error,
)
from jax_scalify.nn.normalization import batch_norm, group_norm, layer_norm, rms_norm, standardize
from jax_scalify.nn.ragged import ragged_dot, ragged_dot_general
from jax_scalify.nn.softmax import log_softmax, logsumexp, softmax
from jax_scalify.nn.stored import store_inputs

__all__ = [
    "DotGeneral",
    "batch_norm",
    "conv_general_dilated",
    "cross_entropy",
    "dot_general",
    "dot_product_attention",
    "dropout",
    "einsum",
    "elu",
    "embed",
    "geglu",
    "gelu",
    "glu",
    "group_norm",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "logsumexp",
    "matmul",
    "ragged_dot",
    "ragged_dot_general",
    "relu",
    "residual_add",
    "rms_norm",
    "sigmoid",
    "sigmoid_binary_cross_entropy",
    "silu",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "softplus",
    "squared_error",
    "squared_relu",
    "standardize",
    "store_inputs",
    "swiglu",
    "swish",
    "tanh",
]
