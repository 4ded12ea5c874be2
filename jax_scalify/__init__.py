"""Train neural networks in float16 and FP8 without loss scaling, by propagating scales."""

from importlib import metadata as _metadata

from jax_scalify import (
    checkpoint,
    checkpoint_policies,
    fp8,
    lax,
    nn,
    numerics,
    ops,
    optim,
    serving,
    testing,
    tree,
    unit_scaling,
)
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.blocks.array import BlockScaledArray
from jax_scalify.blocks.formats import BlockFormat
from jax_scalify.config import Pow2RoundMode, ScalifyConfig
from jax_scalify.conversions.freezing import freeze_scales, thaw_scales
from jax_scalify.conversions.trees import as_scaled_array, asarray, scaled_array, to_numbers
from jax_scalify.fp8 import fp8_matmuls
from jax_scalify.interpreter.registry import (
    DequantisedWarning,
    MissingRuleError,
    register_scale_rule,
)
from jax_scalify.numerics.calibrating import calibrate
from jax_scalify.numerics.calibration import Calibration
from jax_scalify.ops.custom_scale import custom_scale
from jax_scalify.ops.delayed import delayed_rescale, init_delayed_rescale
from jax_scalify.ops.scaling import (
    dynamic_rescale,
    get_data_and_scale,
    match_scales,
    rebalance_scale,
    set_scaling,
    stop_scaling,
)
from jax_scalify.passes.setup import SetupWarning
from jax_scalify.storage.packing import pack_scales, unpack_scales
from jax_scalify.transform import scalify

try:
    __version__ = _metadata.version("jax-scalify")
except _metadata.PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0.0.0"

__all__ = [
    "BlockFormat",
    "BlockScaledArray",
    "Calibration",
    "DequantisedWarning",
    "MissingRuleError",
    "Pow2RoundMode",
    "ScaledArray",
    "ScalifyConfig",
    "SetupWarning",
    "as_scaled_array",
    "asarray",
    "calibrate",
    "checkpoint",
    "checkpoint_policies",
    "custom_scale",
    "delayed_rescale",
    "dynamic_rescale",
    "fp8",
    "fp8_matmuls",
    "freeze_scales",
    "get_data_and_scale",
    "init_delayed_rescale",
    "lax",
    "match_scales",
    "nn",
    "numerics",
    "ops",
    "optim",
    "pack_scales",
    "rebalance_scale",
    "register_scale_rule",
    "scaled_array",
    "scalify",
    "serving",
    "set_scaling",
    "stop_scaling",
    "testing",
    "thaw_scales",
    "to_numbers",
    "tree",
    "unit_scaling",
    "unpack_scales",
]
