"""Weights for other programs to serve: files in the format safetensors, FP8 among them."""

from jax_scalify.serving.activations import fp8_kernels, input_scales
from jax_scalify.serving.exporting import export, to_fp8
from jax_scalify.serving.kernels import linear_kernels
from jax_scalify.serving.loading import load, read_card, weight_only

__all__ = [
    "export",
    "fp8_kernels",
    "input_scales",
    "linear_kernels",
    "load",
    "read_card",
    "to_fp8",
    "weight_only",
]
