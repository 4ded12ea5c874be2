"""What a leaf of a model is called in a file, and how it lies there."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from jax.tree_util import GetAttrKey

from jax_scalify.serving.kernels import is_stacked, merged_outputs
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


def module_of(name: str) -> str:
    """Return the module of a weight: `up`, of `up.weight`; a leaf without a module is its own."""
    module, _, last = name.rpartition(".")
    return module if last in ("kernel", "weight", "w") else name


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a leaf is in a file.

    Attributes:
        path: of the leaf in its tree, joined with "/".
        name: of the tensor.
        axes: the order of the leaf's axes there; None for as they are.
        shape: of the leaf in its tree, if some axes are merged in the file; None otherwise.
        outputs: how many axes, the first in the file's order, are merged into output features. The
            others are merged into input features.
    """

    path: str
    name: str
    axes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    outputs: int = 0

    def transposed(self, array: Any) -> Any:
        """The array as it lies in the file."""
        array = array if self.axes is None else array.transpose(self.axes)
        return array if self.shape is None else array.reshape(self._merged(array.shape))

    def restored(self, array: Any) -> Any:
        """An array of the file as it lay in its tree: the leaf, or its scales with as many dims."""
        if self.shape is not None:
            shape = tuple(self.shape[a] for a in self.axes or range(len(self.shape)))
            is_scale = array.shape != self._merged(shape)  # (out, 1)
            array = array.reshape(
                tuple(1 if is_scale and i >= self.outputs else n for i, n in enumerate(shape))
            )
        return array if self.axes is None else array.transpose(np.argsort(self.axes))

    def _merged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file, of one in the file's order of axes."""
        groups = shape[: self.outputs], shape[self.outputs :]
        return tuple(math.prod(group) for group in groups if group)


def place_of(path: str, shape: tuple[int, ...], layout: str) -> Place:
    """The place of a leaf with a path and a shape.

    Raises:
        ValueError: for a kernel whose axes could be any features.
    """
    *parents, last = path.split("/")
    axes, merged, ndim = None, None, len(shape)
    if layout == "torch":
        if last in ("kernel", "bias"):
            merged = merged_outputs(path, ndim)
        if merged is not None and last == "kernel":
            axes = (*range(ndim - merged, ndim), *range(ndim - merged))
        elif last == "kernel":
            if is_stacked(path, shape):
                raise ValueError(
                    f'{path!r} holds a stack of kernels, and `layout="torch"` has one array for '
                    "each. Unstack the layers: one subtree of parameters for each."
                )
            if ndim not in _TORCH_AXES:
                raise ValueError(
                    f'{path!r} is a kernel of rank {ndim}: `layout="torch"` does not know which of '
                    "its axes are output features. Reshape it to two dims, or rename the leaf."
                )
            axes = _TORCH_AXES[ndim]
        last = _TORCH_NAMES.get(last, last)
    name = ".".join([*parents, last]) or "array"
    return Place(path, name, axes, None if merged is None else shape, merged or 0)


def place_in(entry: dict[str, Any], name: str) -> Place:
    """The place that the card's entry of a tensor describes."""
    axes, merged = entry.get("axes"), entry.get("merged")
    return Place(
        entry["path"],
        name,
        None if axes is None else tuple(axes),
        None if merged is None else tuple(merged["shape"]),
        0 if merged is None else merged["outputs"],
    )
