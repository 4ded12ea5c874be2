"""Functions that set or read scales, casts and rescales, and functions with scale rules."""

from jax_scalify.ops.cast import (
    cast_on_backward,
    cast_on_forward,
    reduce_precision_on_backward,
    reduce_precision_on_forward,
)
from jax_scalify.ops.delayed import amax_history, delayed_rescale
from jax_scalify.ops.rescale import (
    dynamic_rescale_l1,
    dynamic_rescale_l1_grad,
    dynamic_rescale_l2,
    dynamic_rescale_l2_grad,
    dynamic_rescale_max,
    dynamic_rescale_max_grad,
)

__all__ = [
    "amax_history",
    "cast_on_backward",
    "cast_on_forward",
    "delayed_rescale",
    "dynamic_rescale_l1",
    "dynamic_rescale_l1_grad",
    "dynamic_rescale_l2",
    "dynamic_rescale_l2_grad",
    "dynamic_rescale_max",
    "dynamic_rescale_max_grad",
    "reduce_precision_on_backward",
    "reduce_precision_on_forward",
]
