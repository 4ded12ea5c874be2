"""Files of weights back to trees, and functions that compute with what they hold."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.blocks.array import is_array_of_ours
from jax_scalify.checkpoint import from_storable
from jax_scalify.conversions.trees import asarray
from jax_scalify.serving import safetensors
from jax_scalify.serving.blocks import block_array
from jax_scalify.serving.exporting import CARD
from jax_scalify.serving.names import input_scale_name, path_of, place_in
from jax_scalify.storage.names import name_of


def read_card(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the card of a file that `export` has written.

    Raises:
        FileNotFoundError: if there is no file at `path`.
        ValueError: if it is no safetensors file, or has no card.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> card = jsa.serving.export({"w": jnp.ones(2)}, path, metadata={"steps": 100})
        >>> print(jsa.serving.read_card(path)["metadata"])
        {'steps': 100}
    """
    metadata = _read(path)[1]
    if CARD not in metadata:
        raise ValueError(
            f"`path`: {str(path)!r} has no card: `jsa.serving.export` did not write it."
        )
    return json.loads(metadata[CARD])


def load(
    path: str | os.PathLike[str], like: Any = None, *, dtype: Any = None, partial: bool = False
) -> Any:
    """Read the weights of a file of the format safetensors.

    Scaled weights, in FP8 too, come back bit for bit as `ScaledArray` leaves, and those in block
    formats as `BlockScaledArray` leaves. A file that `export` has not written is read as plain
    arrays, by the names in it.

    Args:
        path: of the file.
        like: a tree, or its shapes from `jax.eval_shape`, which the result is like in structure,
            kinds of leaves, dtypes and devices, as in `checkpoint.from_storable`. By default it is
            of nested dicts, and of the dtypes of the file.
        dtype: of the data, instead of those of `like`.
        partial: leave out what has no place in `like`.

    Raises:
        FileNotFoundError: if there is no file at `path`.
        ValueError: if it is no safetensors file; listing every leaf that differs from `like`.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> params = {"up": {"kernel": jsa.as_scaled_array(jnp.ones((2, 3), jnp.float16))}}
        >>> _ = jsa.serving.export(params, path, format="bfloat16")
        >>> print(jsa.serving.load(path)["up"]["kernel"].dtype)
        bfloat16
        >>> print(jsa.serving.load(path, like=params)["up"]["kernel"].scale)
        1.0
    """
    arrays, metadata = _read(path)
    card = json.loads(metadata.get(CARD, "{}"))
    found: dict[str, Any] = {}
    for name, entry in card.get("tensors", {}).items():
        place = place_in(entry, name)
        if "block" in entry:
            found[place.path] = block_array(entry, place, arrays)
            continue
        data = place.restored(arrays.pop(name))
        if "scale" in entry:
            scale = arrays.pop(f"{name}_scale")
            if "input_scale" in entry:
                arrays.pop(input_scale_name(name))
            if entry["strategy"] == "tensor":
                scale = scale.reshape(())
            elif entry["strategy"] == "channel":
                scale = place.restored(scale)
                scale = scale[tuple(map(slice, entry.get("scale_shape", scale.shape)))]
            fixed = entry["scale"] == "static" and not scale.ndim
            data = ScaledArray(data, float(scale) if fixed else scale)
        found[place.path] = data
    for name, array in arrays.items():  # of other programs
        found[name.replace(".", "/")] = array
    if like is None and dtype is None:
        return _nested(found)
    like = _nested(found) if like is None else like
    for keys, _ in jax.tree_util.tree_leaves_with_path(like, is_leaf=is_array_of_ours):
        if path_of(keys) in found:  # a variable of NNX has one name more
            found[name_of(keys)] = found.pop(path_of(keys))
    return from_storable(found, like, dtype=dtype, partial=partial)


def weight_only(fun: Callable, dtype: Any = jnp.bfloat16) -> Callable:
    """Make a function of plain weights one of weights that are stored in few bits.

    Its first argument may hold `ScaledArray` leaves, in FP8 too. They, and its other floating
    leaves, become `data * scale` in `dtype` where the function is called, under `jit` in the
    compiled program. No `scalify` is needed, and the function, such as the `apply` of a Flax model,
    stays as it is. It computes in `dtype`, if the other arguments have it.

    Args:
        fun: a function of plain arrays.
        dtype: of the weights that it gets.

    Raises:
        TypeError: if `fun` is not callable, or `dtype` not floating point.

    Example:
        >>> params = jsa.serving.to_fp8({"kernel": jnp.full((2, 2), 0.25)})
        >>> layer = lambda params, x: x @ params["kernel"]
        >>> print(jax.jit(jsa.serving.weight_only(layer))(params, jnp.ones(2, jnp.bfloat16)))
        [0.5 0.5]
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
    dtype = dtypes.as_floating(dtype, "dtype")

    @functools.wraps(fun)
    def served(params: Any, *args: Any, **kwargs: Any) -> Any:
        return fun(asarray(params, dtype), *args, **kwargs)

    return served


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"`path`: there is no file at {str(path)!r}.")
    return safetensors.read(path)


def _nested(found: dict[str, Any]) -> Any:
    """A tree of dicts, of leaves by their paths; a leaf that is all of it by itself."""
    if list(found) == [""]:
        return jax.tree.map(jnp.asarray, found[""])
    tree: dict[str, Any] = {}
    for path, leaf in found.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = jax.tree.map(jnp.asarray, leaf)
    return tree
