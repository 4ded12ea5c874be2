"""How a `BlockScaledArray` is stored: as plain arrays, elements of 4 bits by twos in a byte."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.blocks import rounding
from jax_scalify.blocks.array import (
    BlockScaledArray,
    block_scaled_array,
    is_block_scaled,
)
from jax_scalify.blocks.formats import NAMES, BlockFormat
from jax_scalify.storage.placement import placed_like

_DATA, _SCALES = "block_data", "block_scales"


def stored_parts(name: str, array: BlockScaledArray) -> dict[str, Any]:
    """The arrays that are stored of an array, by name: `w/mxfp4_32x1/block_data`, ..."""
    prefix = f"{name}/" if name else ""
    prefix += f"{kind_of(array)}/"
    data = array.data
    if not array.format.is_fp8 and not _compat.is_traced(data):
        if not isinstance(data, jax.ShapeDtypeStruct):
            data = pack_elements(jnp.asarray(data))
    kind = "static_scale" if array.is_static else "scale"
    parts = {_DATA: data, _SCALES: array.block_scales, kind: array.scale}
    return {prefix + part: value for part, value in parts.items()}


def kind_of(array: BlockScaledArray) -> str:
    """Format and block shape of an array: `mxfp4_32x1`."""
    return f"{array.format.name}_{'x'.join(map(str, array.block_shape))}"


def read_kind(text: str) -> tuple[BlockFormat, tuple[int, ...]]:
    """Read what `kind_of` has written."""
    found = _read(text)
    if found is None:
        raise ValueError(f"{text!r} is no block format; there are {', '.join(NAMES)}.")
    return found


def find_parts(flat: Mapping[str, Any], name: str) -> dict[str, str]:
    """The names under which an array is stored in a block format; none if it is not."""
    prefix = f"{name}/" if name else ""
    for found in flat:
        middle, _, last = found.removeprefix(prefix).rpartition("/")
        if last == _DATA and found.startswith(prefix) and _read(middle) is not None:
            parts = (_DATA, _SCALES, "scale", "static_scale")
            names = {part: f"{prefix}{middle}/{part}" for part in parts}
            return {part: n for part, n in names.items() if n in flat}
    return {}


def is_stored_in_blocks(parts: Mapping[str, Any]) -> bool:
    """Return whether parts of a stored leaf are those of a block format."""
    return _DATA in parts


def shape_difference(parts: Mapping[str, Any], shape: tuple[int, ...]) -> str | None:
    """How stored elements do not fit an array of a shape; None if they do."""
    data = parts[_DATA]
    packed = (*shape[:-1], -(-shape[-1] // 2)) if shape else ()
    wanted = packed if jnp.dtype(data.dtype) == jnp.uint8 else shape
    if tuple(data.shape) == wanted:
        return None
    return f"has elements {data.dtype}{list(data.shape)}, `like` has shape {list(shape)}"


def read_parts(flat: Mapping[str, Any], names: Mapping[str, str], leaf: Any) -> dict[str, Any]:
    """The stored parts of a leaf. What is in a block format is one part, or values for others."""
    parts = {part: flat[name] for part, name in names.items()}
    if not is_stored_in_blocks(parts):
        return parts
    array = _array(parts, names, leaf.shape)
    return {"block": array} if is_block_scaled(leaf) else _parts_of_values(array)


def load_like(parts: Mapping[str, Any], like: BlockScaledArray) -> BlockScaledArray:
    """A stored array in the format of another one: exactly, or of its values."""
    array, kind = parts.get("block"), (like.format.name, like.block_shape)
    if array is None:
        scale = parts.get("scale", parts.get("static_scale", 1.0))
        data = jnp.asarray(parts.get("data", parts.get("plain")))
        array = _quantised_like(ScaledArray(data, scale).to_array(jnp.float32), like)
    elif (array.format.name, array.block_shape) != kind:
        array = _quantised_like(array.to_array(jnp.float32), like)
    scale = np.asarray(array.scale)
    fields = {"data": array.data, "block_scales": array.block_scales}
    fields = {name: placed_like(x, getattr(like, name)) for name, x in fields.items()}
    if like.is_static:
        fields["scale"] = float(scale)
    else:
        scale = np.broadcast_to(scale, like.scale.shape).astype(like.scale.dtype)
        fields["scale"] = placed_like(scale, like.scale)
    return dataclasses.replace(like, **fields)


def _quantised_like(values: jax.Array, like: BlockScaledArray) -> BlockScaledArray:
    own = [a for a, size in enumerate(like.block_shape) if size > 1]
    axis = own[0] - len(like.block_shape) if own else None
    exponent = 0 if like.format.is_mx else rounding.tensor_exponent(values, range(values.ndim))
    power = 2.0 ** int(np.squeeze(exponent))
    return block_scaled_array(values / power, like.format, axis=axis, scale=power)


def _array(parts: Mapping[str, Any], names: Mapping[str, str], shape: Any) -> BlockScaledArray:
    """The array of stored parts."""
    found = _read(names[_DATA].split("/")[-2])
    assert found is not None, names
    data = jnp.asarray(parts[_DATA])
    data = data if found[0].is_fp8 else unpack_elements(data, tuple(shape))
    scale = parts.get("scale")
    scale = float(np.asarray(parts["static_scale"])) if scale is None else jnp.asarray(scale)
    wide = jnp.dtype(jnp.float32)
    return BlockScaledArray(data, jnp.asarray(parts[_SCALES]), scale, *found, wide)


def _parts_of_values(array: BlockScaledArray) -> dict[str, Any]:
    """What would be stored of an array of the same values, in float32."""
    found = array.to_scaled_array()
    if getattr(found.scale, "ndim", 0):  # which the other one may not have room for
        return {"plain": found.to_array()}
    return {"data": found.data, "static_scale" if found.is_static else "scale": found.scale}


@jax.jit
def pack_elements(data: jax.Array) -> jax.Array:
    """Put two elements of 4 bits along the last axis into a byte, the first into its low bits."""
    bits = lax.bitcast_convert_type(data, jnp.uint4)
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, bits.shape[-1] % 2)])
    return lax.bitcast_convert_type(bits.reshape(*bits.shape[:-1], -1, 2), jnp.uint8)


@functools.partial(jax.jit, static_argnames="shape")
def unpack_elements(packed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo `pack_elements` for an array of this shape."""
    bits = lax.bitcast_convert_type(packed, jnp.uint4)
    bits = bits.reshape(*packed.shape[:-1], -1)[..., : shape[-1]]
    return lax.bitcast_convert_type(bits, jnp.float4_e2m1fn)


def _read(text: str) -> tuple[BlockFormat, tuple[int, ...]] | None:
    """Read format and block shape of `mxfp4_32x1`; None of other names."""
    name, _, shape = text.rpartition("_")
    sizes = shape.split("x")
    if name not in NAMES or not all(size.isdigit() for size in sizes):
        return None
    block_shape = tuple(map(int, sizes))
    square = len(block_shape) == 2 and min(block_shape) > 1
    return BlockFormat(name, square=square), block_shape
