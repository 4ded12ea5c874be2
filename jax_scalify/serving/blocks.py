"""Weights in block formats, in files of the format safetensors."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_scalify.blocks import storage as block_storage
from jax_scalify.blocks.array import BlockScaledArray
from jax_scalify.serving.names import Place


def block_tensors(array: BlockScaledArray, place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a weight by their names in the file, and what the card says of it.

    Elements are `name`, or `name_packed` with two of 4 bits in a byte along the last axis, the
    first in its low bits; `name_scale` are the block scales, `name_tensor_scale` is that of all.
    """
    lying = array if place.axes is None else _transposed(array, place)
    static, packed = lying.is_static, not lying.format.is_fp8
    entry = {
        "path": place.path,
        "dtype": np.dtype(lying.format.dtype).name,
        "scale": "static" if static else "dynamic",
        "block": block_storage.kind_of(lying),
        "shape": list(lying.shape),
        "values": np.dtype(lying.dtype).name,
    }
    if place.axes is not None:
        entry["axes"] = list(place.axes)
    elements = block_storage.pack_elements(jnp.asarray(lying.data)) if packed else lying.data
    found = {
        _elements_name(place.name, packed): elements,
        f"{place.name}_scale": lying.block_scales,
        f"{place.name}_tensor_scale": np.asarray(lying.scale, np.float32 if static else None),
    }
    return found, entry


def block_array(entry: dict[str, Any], place: Place, arrays: dict[str, Any]) -> BlockScaledArray:
    """Take the arrays of a weight, as `block_tensors` has named them, and put it together."""
    format, block_shape = block_storage.read_kind(entry["block"])
    data = jnp.asarray(arrays.pop(_elements_name(place.name, not format.is_fp8)))
    if not format.is_fp8:
        data = block_storage.unpack_elements(data, tuple(entry["shape"]))
    scale = arrays.pop(f"{place.name}_tensor_scale")
    found = BlockScaledArray(
        data,
        jnp.asarray(arrays.pop(f"{place.name}_scale")),
        float(scale) if entry["scale"] == "static" else jnp.asarray(scale),
        format,
        block_shape,
        jnp.dtype(entry["values"]),
    )
    return found if place.axes is None else found.T


def _elements_name(name: str, packed: bool) -> str:
    return f"{name}_packed" if packed else name


def _transposed(array: BlockScaledArray, place: Place) -> BlockScaledArray:
    if array.ndim != 2 or len(array.block_shape) != 2:
        raise ValueError(
            f"{place.path!r} has shape {array.shape} in blocks of {array.block_shape}: "
            '`layout="torch"` turns matrices in block formats only. Take `layout="jax"`.'
        )
    return array.T
