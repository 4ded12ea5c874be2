"""What a leaf of a model is called in a file, and how it lies there."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
from jax.tree_util import GetAttrKey

from jax_scalify.storage.names import name_of

Layout = Literal["jax", "torch"]
LAYOUTS = ("jax", "torch")
# How a layer of PyTorch names what Flax calls so.
_TORCH_NAMES = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "var": "running_var",
}
# Flax has input and output features last, PyTorch first, output before input.
_TORCH_AXES = {2: (1, 0), 4: (3, 2, 0, 1)}


def path_of(keys: tuple) -> str:
    """The path of a leaf, joined with "/"; that of a variable of NNX without its `value`."""
    is_variable = bool(keys) and keys[-1] == GetAttrKey("value")
    return name_of(keys[:-1] if is_variable and len(keys) > 1 else keys)


def input_scale_name(name: str) -> str:
    """What the scale of a weight's input is called: `up.input_scale`, of `up.weight`."""
    module, _, last = name.rpartition(".")
    if last not in ("kernel", "weight"):
        return f"{name}_input_scale"
    return f"{module}.input_scale" if module else "input_scale"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a leaf is in a file.

    Attributes:
        path: of the leaf in its tree, joined with "/".
        name: of the tensor.
        axes: the order of the leaf's axes there; None for as they are.
    """

    path: str
    name: str
    axes: tuple[int, ...] | None = None

    def transposed(self, array: Any) -> Any:
        """The array as it lies in the file."""
        return array if self.axes is None else array.transpose(self.axes)

    def restored(self, array: Any) -> Any:
        """An array of the file as it lay in its tree."""
        return array if self.axes is None else array.transpose(np.argsort(self.axes))


def place_of(path: str, ndim: int, layout: str) -> Place:
    """The place of a leaf with a path and a rank.

    Raises:
        ValueError: for a kernel whose axes could be any features.
    """
    *parents, last = path.split("/")
    axes = None
    if layout == "torch":
        if last == "kernel":
            if ndim not in _TORCH_AXES:
                raise ValueError(
                    f'{path!r} is a kernel of rank {ndim}: `layout="torch"` does not know which of '
                    "its axes are output features. Reshape it to two dims, or rename the leaf."
                )
            axes = _TORCH_AXES[ndim]
        last = _TORCH_NAMES.get(last, last)
    return Place(path, ".".join([*parents, last]) or "array", axes)
