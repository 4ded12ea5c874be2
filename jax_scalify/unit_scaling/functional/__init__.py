"""Functions with unit scale: of their results, and of the gradients of their operands."""

from jax_scalify.unit_scaling.functional.products import (
    conv,
    einsum,
    embedding,
    linear,
    linear_readout,
    matmul,
)

__all__ = ["conv", "einsum", "embedding", "linear", "linear_readout", "matmul"]
