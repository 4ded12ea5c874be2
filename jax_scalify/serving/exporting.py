"""Weights to files that others serve: plain, FP8 with scales, or data and scales as they are."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata as versions
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import _compat
from jax_scalify import tree as tree_lib
from jax_scalify.arrays.scaled_array import (
    ScaledArray,
    align_scale,
    along_leading_axes,
    check_scaled,
    is_scaled,
)
from jax_scalify.base import dtypes
from jax_scalify.blocks.array import is_array_of_ours, is_block_scaled
from jax_scalify.conversions.trees import as_scaled_array
from jax_scalify.serving import safetensors
from jax_scalify.serving.blocks import block_tensors
from jax_scalify.serving.kernels import contracted_axes, is_kernel, linear_kernels
from jax_scalify.serving.names import (
    LAYOUTS,
    Layout,
    Place,
    input_scale_name,
    module_of,
    path_of,
    place_of,
)
from jax_scalify.storage.names import is_key

FORMATS = ("float32", "bfloat16", "float16", "fp8", "scaled")
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
CARD = "jax_scalify"  # the card's name in the file's metadata

Select = Callable[[str, Any], bool]
_STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def to_fp8(params: Any, select: Select = linear_kernels) -> Any:
    """Cast the data of some weights to E4M3, as FP8 matmuls do; scales stay as they are.

    A weight without a scale, or in a block format, gets one by RMS. What is E4M3 already stays, bit
    for bit. Data out of range saturates.

    Args:
        params: any tree.
        select: tells of a path, joined with "/", and a leaf whether it is cast.

    Raises:
        ValueError: if nothing is selected.

    Example:
        >>> params = {"up": {"kernel": jnp.full((2, 2), 0.03), "bias": jnp.zeros(2)}}
        >>> small = jsa.serving.to_fp8(params)["up"]
        >>> print(small["kernel"].dtype, small["kernel"].scale, small["bias"].dtype)
        float8_e4m3fn 0.015625 float32
    """
    check_scaled(params, "params")
    chosen = []

    def convert(path: tuple, leaf: Any) -> Any:
        if not _is_floating(leaf) or not select(path_of(path), leaf):
            return leaf
        chosen.append(path)
        leaf = _values(leaf)
        scaled = leaf if is_scaled(leaf) else as_scaled_array(leaf, scale="rms")
        return scaled.astype(E4M3)

    new = jax.tree_util.tree_map_with_path(convert, params, is_leaf=is_array_of_ours)
    if not chosen:
        paths = [path_of(p) for p, _ in jax.tree_util.tree_leaves_with_path(params, is_scaled)]
        raise ValueError(f"`select` must choose at least one leaf; there are {paths}.")
    return new


def export(
    params: Any,
    path: str | os.PathLike[str],
    *,
    format: Literal["float32", "bfloat16", "float16", "fp8", "scaled"] = "float32",
    dtype: Any = jnp.bfloat16,
    select: Select = linear_kernels,
    layout: Layout = "jax",
    rename: Callable[[str], str] | None = None,
    input_scales: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write weights to one file of the format safetensors, for other programs to serve.

    ============================================  ================================================
    `format`                                      what is written of a floating leaf
    ============================================  ================================================
    `"float32"`, `"bfloat16"`, `"float16"`        `data * scale`, rounded once
    `"fp8"`                                       of those that are selected: data in E4M3, and
                                                  `…_scale` in float32, as compressed-tensors and
                                                  vLLM read it: one of shape `(1,)`, or one for each
                                                  output channel; the others in `dtype`
    `"scaled"`                                    data as it is, and `…_scale`: every bit is kept,
                                                  also of weights in block formats (`…_packed`: two
                                                  elements of 4 bits a byte), of which the others
                                                  take the values
    ============================================  ================================================

    Names are paths joined with ".". With `layout="torch"` those of Flax's layers become PyTorch's:
    a `kernel` is the `weight` of shape `(out, in)`, its scales `(out, 1)`. Attention kernels become
    matrices: `(in, heads, head_dim)` is `(heads * head_dim, in)`, and `(heads, head_dim, out)` is
    `(out, heads * head_dim)`. The card has their shapes, and `load` restores them. A file of FP8
    weights has, in its card, the `quantization_config` for the `config.json` of a Hugging Face
    model.

    Args:
        params: any tree; what is no array (functions, strings) is left out.
        path: of the file, usually `model.safetensors`.
        format: see above.
        dtype: with `"fp8"`, of what is not FP8.
        select: with `"fp8"`, which leaves are cast, as in `to_fp8`.
        layout: "jax", or "torch".
        rename: makes the name in the file of that which it would have.
        input_scales: with `"fp8"`, the scale of what each weight is multiplied with, by its path,
            from `input_scales`: written as `input_scale`, for activations in FP8 at static scales.
        metadata: of your own, for the card; what JSON holds.
        overwrite: whether to replace a file at `path`.

    Returns:
        The card, which is in the file's metadata too: format, versions, number of parameters, and
        of each tensor its path in `params`, dtype and scale, and how many elements were
        `saturated`, or `flushed` to zero.

    Raises:
        FileExistsError: if there is a file at `path`.
        TypeError: if a leaf, which the message names, is traced, a key, or of a dtype that the
            format has not.
        ValueError: if the format or layout is unknown; if float16 does not hold a leaf; if a reader
            of FP8 does not know its scales; if it has no input scale where others have one; or if
            two leaves have one name.

    Source: safetensors, https://huggingface.co/docs/safetensors; compressed-tensors,
    https://github.com/vllm-project/compressed-tensors.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> params = {"up": {"kernel": jsa.as_scaled_array(jnp.ones((2, 3)), scale=4.0)}}
        >>> card = jsa.serving.export(params, path, format="fp8", layout="torch")
        >>> print(card["tensors"]["up.weight"]["dtype"], card["parameters"])
        float8_e4m3fn 6
        >>> print(jsa.serving.load(path)["up"]["kernel"].scale)
        4.0
    """
    if format not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}.")
    if layout not in LAYOUTS:
        raise ValueError(f"`layout` must be one of {', '.join(LAYOUTS)}, got {layout!r}.")
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"`path`: {str(path)!r} exists; `overwrite=True` replaces it.")
    check_scaled(params, "params")
    if format != "scaled":
        params = jax.tree.map(_values, params, is_leaf=is_array_of_ours)
    narrow = to_fp8(params, select) if format == "fp8" else params
    arrays: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    before = jax.tree.leaves(params, is_leaf=is_array_of_ours)
    after = jax.tree_util.tree_leaves_with_path(narrow, is_leaf=is_array_of_ours)
    for (keys, leaf), old in zip(after, before, strict=True):
        if dtypes.leaf_dtype(leaf.data if is_array_of_ours(leaf) else leaf) is None:
            continue
        place = place_of(path_of(keys), np.shape(leaf), layout)
        if rename is not None:
            place = dataclasses.replace(place, name=rename(place.name))
        found, entry = _tensor(leaf, old, place, format, dtypes.as_floating(dtype, "dtype"))
        if input_scales is not None and "strategy" in entry:
            found |= _input_scale(input_scales, place, entry)
        twice = arrays.keys() & found.keys()
        if twice:
            raise ValueError(f"Two tensors have the name {min(twice)!r}: `rename` one of them.")
        arrays |= found
        tensors[place.name] = entry
    card = {
        "format": format,
        "layout": layout,
        "versions": _versions(),
        "parameters": tree_lib.size(params),
        "tensors": tensors,
    }
    if format == "fp8":
        ranks = {name: np.ndim(arrays[name]) for name in tensors}
        card["quantization_config"] = _quantization_config(tensors, ranks)
        if input_scales is not None:
            for group in card["quantization_config"]["config_groups"].values():
                group["input_activations"] = {**_STATIC, "strategy": "tensor"}
    if metadata:
        card["metadata"] = dict(metadata)
    kind = "pt" if layout == "torch" else "np"
    safetensors.write(path, arrays, {"format": kind, CARD: json.dumps(card)})
    return card


def _versions() -> dict[str, str]:
    found = {}
    for name in ("jax-scalify", "jax", "ml_dtypes", "numpy"):
        try:
            found[name] = versions.version(name)
        except versions.PackageNotFoundError:  # a source tree that was not installed
            found[name] = "unknown"
    return found


def _values(leaf: Any) -> Any:
    """A leaf; if it is in a block format, its values, in float32."""
    return leaf.to_array(jnp.float32) if is_block_scaled(leaf) else leaf


def _is_floating(leaf: Any) -> bool:
    kind = leaf.dtype if is_array_of_ours(leaf) else dtypes.leaf_dtype(leaf)
    return kind is not None and jnp.issubdtype(kind, jnp.floating)


def _tensor(
    leaf: Any, old: Any, place: Place, format: str, dtype: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a leaf by their names in the file, and what the card says of it."""
    if is_key(leaf) or any(map(_compat.is_traced, jax.tree.leaves(leaf))):
        raise TypeError(f"{place.path!r} must be a concrete array of numbers, got {leaf!r}.")
    if is_block_scaled(leaf):
        return block_tensors(leaf, place)
    data = leaf.data if is_scaled(leaf) else leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    kept = format == "scaled" or (format == "fp8" and is_scaled(leaf) and data.dtype == E4M3)
    entry: dict[str, Any] = {"path": place.path}
    scales = {}
    if kept and is_scaled(leaf):
        entry["scale"] = "static" if leaf.is_static else "dynamic"
        scale, entry["strategy"] = _scale(leaf, place, format)
        if entry["strategy"] == "channel" and place.shape is not None:
            entry["scale_shape"] = list(scale.shape)
            scale = place.transposed(_of_every_output(scale, place))
        elif entry["strategy"] == "channel":
            scale = place.transposed(scale)
        scales[f"{place.name}_scale"] = scale
        if old is not leaf and format == "fp8":
            entry["saturated"] = int(jnp.sum(jnp.abs(_data(old)) > float(jnp.finfo(E4M3).max)))
    elif format != "scaled" and _is_floating(leaf):
        target, given = dtype if format == "fp8" else jnp.dtype(format), data
        wide = leaf.to_array(dtypes.compute_dtype(leaf.dtype)) if is_scaled(leaf) else data
        data = dtypes.cast(jnp.asarray(wide), target)
        entry["flushed"] = int(jnp.sum((data == 0) & (given != 0)))
        if bool(jnp.any(jnp.isinf(data) & jnp.isfinite(given))):
            raise ValueError(
                f"{place.path!r} has elements up to {_largest(leaf):.3g}, which {target} does not "
                f"hold (largest {float(jnp.finfo(target).max):g}): take bfloat16 or float32, or "
                '`format="scaled"`.'
            )
    if safetensors.name_of_dtype(data.dtype) is None:
        raise TypeError(f"{place.path!r} is {data.dtype}, which safetensors does not have.")
    entry["dtype"] = np.dtype(data.dtype).name
    if place.axes is not None:
        entry["axes"] = list(place.axes)
    if place.shape is not None:
        entry["merged"] = {"shape": list(place.shape), "outputs": place.outputs}
    return {place.name: place.transposed(data), **scales}, entry


def _input_scale(scales: Mapping[str, float], place: Place, entry: dict[str, Any]) -> Any:
    """The scale of a weight's input by its name in the file; the card gets it too."""
    if place.path not in scales:
        raise ValueError(
            f"`input_scales` has none for {place.path!r}, which is FP8: give `select` a function "
            "that leaves it out, or run `jsa.serving.input_scales` on one that multiplies by it. "
            f"There are {sorted(scales)}."
        )
    entry["input_scale"] = float(scales[place.path])
    return {input_scale_name(place.name): np.asarray([scales[place.path]], np.float32)}


def _largest(leaf: Any) -> float:
    """The largest finite element, which may be beyond float32."""
    data, scale = (leaf.data, leaf.scale) if is_scaled(leaf) else (leaf, 1.0)
    scale = along_leading_axes(np.asarray(scale, np.float64), np.ndim(data))
    sizes = np.abs(np.asarray(data).astype(np.float64)) * scale
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0))


def _data(leaf: Any) -> jax.Array:
    """The data that was cast to FP8, in float32."""
    scaled = leaf if is_scaled(leaf) else as_scaled_array(leaf, scale="rms")
    return jnp.asarray(scaled.data, jnp.float32)


def _scale(leaf: ScaledArray, place: Place, format: str) -> tuple[np.ndarray, str]:
    """The scale of a leaf as it lies in the file, and whether of the tensor or of channels."""
    if format == "scaled":
        return np.asarray(leaf.scale, np.float32 if leaf.is_static else None), "as it is"
    scale = np.asarray(align_scale(jnp.asarray(leaf.scale, jnp.float32), leaf.ndim))
    scale = np.where(scale == 0, np.float32(1), scale)  # some readers divide by it
    if scale.size == 1:
        return scale.reshape(1), "tensor"
    readings = contracted_axes(place.path, leaf.ndim)[: None if place.axes is None else 1]
    if all(any(scale.shape[a] > 1 for a in axes) for axes in readings):
        outputs = [a for a in range(leaf.ndim) if a not in readings[0]]
        axis = outputs[0] if len(outputs) == 1 else tuple(outputs)
        raise ValueError(
            f"{place.path!r} has scales of shape {scale.shape}: readers of FP8 know one a tensor, "
            f"or one for each output channel, as `as_scaled_array(asarray(x), 'rms', axis={axis})"
            "` makes them."
        )
    return scale, "channel"


def _of_every_output(scale: np.ndarray, place: Place) -> np.ndarray:
    """One scale for each output channel, of scales that several heads may share."""
    axes, shape = place.axes or (), place.shape or ()
    outputs = axes[: place.outputs]
    return np.broadcast_to(scale, [n if a in outputs else 1 for a, n in enumerate(shape)])


def _quantization_config(tensors: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    """What compressed-tensors has to be told: which modules are FP8, and which linear ones not.

    The targets are all linear layers, or names of modules: if there are several strategies, or if a
    weight is no matrix.
    """
    modules: dict[str, list[str]] = {}
    for name, entry in tensors.items():
        if "strategy" in entry:
            modules.setdefault(entry["strategy"], []).append(name)
    narrow = {module_of(n) for names in modules.values() for n in names}
    by_name = len(modules) > 1 or any(ranks[n] != 2 for names in modules.values() for n in names)
    groups = {}
    for number, strategy in enumerate(sorted(modules)):
        groups[f"group_{number}"] = {
            "targets": _named(modules[strategy]) if by_name else ["Linear"],
            "weights": {**_STATIC, "strategy": strategy},
            "input_activations": None,
        }
    floating = (name for name, entry in tensors.items() if "float" in entry["dtype"])
    wide = _named(name for name in floating if is_kernel(tensors[name]["path"], ranks[name]))
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [module for module in wide if module not in narrow],
    }


def _named(tensors: Iterable[str]) -> list[str]:
    """The modules of some weights, without the root, which has no name."""
    return sorted({module_of(name) for name in tensors} - {""})
