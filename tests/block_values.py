"""Block formats in float64, written from their specifications and with ml_dtypes alone."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

EMAX = {"mxfp8": 8, "mxfp8_e5m2": 15, "mxfp4": 2}  # the exponents of their largest elements
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def nearest(values, dtype):
    """The nearest numbers of a dtype, ties to even; what is beyond them saturates."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -largest, largest).astype(dtype).astype(np.float64)


def quantised(blocks, form):
    """Elements and scales of blocks, `(blocks, n)`, of finite numbers.

    OCP Microscaling Formats (MX) Specification v1.0, section 6.3, with its rule ("floor") and with
    that of arXiv 2506.08027 ("up"); NVFP4 of arXiv 2509.25149, appendix C, without a scale of all.
    """
    blocks = np.float64(blocks)
    dtype = np.dtype(form.dtype)
    amax = np.max(np.abs(blocks), 1, initial=0, keepdims=True)
    if form.is_mx:
        largest = float(ml_dtypes.finfo(dtype).max)
        exponent = np.frexp(np.where(amax == 0, 1, amax))[1] - 1 - EMAX[form.name]
        if form.scale_rounding == "up":
            exponent += amax > largest * np.exp2(exponent)
        scale = np.exp2(np.clip(np.where(amax == 0, -127, exponent), -127, 127))
    else:
        scale = nearest(amax / 6, E4M3)
    with np.errstate(divide="ignore", invalid="ignore"):
        elements = np.where(scale == 0, 0.0, nearest(blocks / scale, dtype))
    return elements, scale


def rounded(x, form, axis):
    """The values of an array in a format whose blocks lie along an axis, in float64."""
    x = np.moveaxis(np.float64(x), axis, -1)
    shape, n = x.shape, form.block_size
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -shape[-1] % n)])
    power = 1.0
    if not form.is_mx and form.tensor_scale is not False and np.any(x):
        power = np.exp2(np.ceil(np.log2(np.max(np.abs(x)) / 2688)))
    elements, scales = quantised(padded.reshape(-1, n) / power, form)
    values = (elements * scales * power).reshape(padded.shape)[..., : shape[-1]]
    return np.moveaxis(values, -1, axis)


def matmul(lhs, rhs, forms):
    """The product of two matrices in block formats, in float64."""
    return rounded(lhs, forms[0], 1) @ rounded(rhs, forms[1], 0)


def error(got, want):
    """How far an array is from another one, relative to its largest element."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.abs(got - want).max(initial=0) / np.abs(want).max(initial=1e-300)


def normal(*shape, seed=0, dtype=jnp.float32):
    """Normal numbers of sizes that differ by octaves."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * np.exp2(rng.integers(-3, 4, shape)), dtype)
