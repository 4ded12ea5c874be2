"""Look at the numbers of a training step: which matmuls are really FP8."""

from jax_scalify.numerics.fp8 import Fp8Report, Matmul, check_fp8

__all__ = ["Fp8Report", "Matmul", "check_fp8"]
