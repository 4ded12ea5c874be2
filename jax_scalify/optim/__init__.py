"""Optimizer state in float16, bfloat16 or FP8, for any optax `GradientTransformation`."""

from jax_scalify.optim.applying import apply_updates
from jax_scalify.optim.averaging import EmaState, ema, incremental_update
from jax_scalify.optim.low_precision import low_precision
from jax_scalify.optim.square_roots import SquareRoot
from jax_scalify.optim.stateless import from_stateless

__all__ = [
    "EmaState",
    "SquareRoot",
    "apply_updates",
    "ema",
    "from_stateless",
    "incremental_update",
    "low_precision",
]
