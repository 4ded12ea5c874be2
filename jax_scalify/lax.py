"""The names of the published package for the functions that speak about scales."""

from jax_scalify.ops.scaling import get_data_and_scale, set_scaling, stop_scaling
from jax_scalify.ops.scaling import get_data_and_scale as get_data_scale
from jax_scalify.ops.scaling import rebalance_scale as rebalance

__all__ = ["get_data_and_scale", "get_data_scale", "rebalance", "set_scaling", "stop_scaling"]
