"""Precision presets: the rows of Table 3 of the Scalify paper, and two that go further.

A preset says which dtypes are used where. The model and the training step are the same for all.
"""

import dataclasses

import jax.numpy as jnp

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2


@dataclasses.dataclass(frozen=True)
class Preset:
    """What is kept and computed in which dtype.

    Attributes:
        scaled: whether the step goes through `scalify`, on a state of `ScaledArray`.
        compute_dtype: of the activations and their cotangents.
        param_dtype: of the weights that the optimizer updates (the master weights).
        moment_dtype: of both moments of Adam, as stored between steps.
        matmul_dtypes: what the operands of the linear layers are rounded to, forward and backward;
            `None` leaves them in `compute_dtype`.
        gradient_dtype: of the weight gradients; `None` leaves them in `param_dtype`.
        rescale_norm_gradient: whether the backward pass of each LayerNorm rescales its gradient.
        rescale_gradients: whether the weight gradients are rescaled before the optimizer.
        moment_exponents: `(j, k)`, when the moments are in float16: the first one is stored at
            `2^j` times the scale of the gradient, the second at `2^k` times its square.
    """

    scaled: bool = True
    compute_dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32
    moment_dtype: jnp.dtype = jnp.float32
    matmul_dtypes: tuple[jnp.dtype, jnp.dtype] | None = None
    gradient_dtype: jnp.dtype | None = None
    rescale_norm_gradient: bool = False
    rescale_gradients: bool = False
    moment_exponents: tuple[int, int] = (0, 0)


_FP16_1 = Preset(compute_dtype=jnp.float16)
_FP16_2 = dataclasses.replace(_FP16_1, param_dtype=jnp.float16, rescale_norm_gradient=True)
# Moving averages lose their small steps in float16's subnormal range, so both moments belong near
# the top of it. Rescaled gradients have data of RMS 1; left alone, theirs is 2^-8 to 2^3 (tiny):
# the moments take smaller scales then. Measured over 100 steps, these keep the largest element a
# factor of 20 below 65,504 and the RMS of each above 2^-10.
_FP16_ALL = dataclasses.replace(
    _FP16_1,
    param_dtype=jnp.float16,
    moment_dtype=jnp.float16,
    moment_exponents=(-6, -6),
)
_FP8_3 = dataclasses.replace(_FP16_2, matmul_dtypes=(E4M3, E5M2), gradient_dtype=E5M2)
_FP8_4 = dataclasses.replace(_FP8_3, moment_dtype=jnp.float16, rescale_gradients=True)

PRESETS = {
    "fp32": Preset(scaled=False),
    "fp32-scaled": Preset(),
    "fp16-1": _FP16_1,
    "fp16-2": _FP16_2,
    # All that lives from step to step in float16, and no statistics anywhere.
    "fp16-all": _FP16_ALL,
    "fp8-3": _FP8_3,
    "fp8-4": _FP8_4,
    "fp8-all": dataclasses.replace(_FP16_ALL, matmul_dtypes=(E4M3, E5M2)),
    # As `fp16-all` without scales, to show what they are for.
    "fp16-plain": dataclasses.replace(_FP16_ALL, scaled=False),
}


def get_preset(name: str) -> Preset:
    """Return the preset called `name`.

    Raises:
        ValueError: for a name that is not in `PRESETS`.
    """
    if name not in PRESETS:
        raise ValueError(f"`preset` must be one of {', '.join(PRESETS)}, got {name!r}.")
    return PRESETS[name]


def short_name(dtype: jnp.dtype) -> str:
    """Return the name of `dtype` as tables show it: `fp32`, `fp16`, `E4M3`, `E5M2`."""
    names = {"float32": "fp32", "float16": "fp16", "float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
    return names.get(jnp.dtype(dtype).name, jnp.dtype(dtype).name)


def describe(preset: Preset) -> dict[str, str]:
    """Return the dtypes of a preset for a table: weights, gradients, moments and matmuls."""
    matmuls = preset.matmul_dtypes or (preset.compute_dtype,)
    return {
        "weights": short_name(preset.param_dtype),
        "gradients": short_name(preset.gradient_dtype or preset.param_dtype),
        "moments": short_name(preset.moment_dtype),
        "matmuls": "/".join(short_name(dtype) for dtype in matmuls),
    }
