"""The options of `as_scaled_array` for each leaf: constants, or rules."""

from __future__ import annotations

import dataclasses
import operator
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from jax_scalify.arrays.scaled_array import check_scale, check_scale_dtype, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.blocks.formats import NAMES, BlockFormat, block_format


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `as_scaled_array`.

    Attributes:
        scale, dtype, axis, block, key: the arguments with these names, checked unless they are
            rules. A block is a pair of a format and an axis, or None.
        scale_dtype: the dtype of scales.
        matched: the names of rules that have returned a value for a leaf.
    """

    scale: Any
    dtype: Any
    axis: Any
    scale_dtype: Any
    block: Any = None
    key: Any = None
    matched: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def of(
        cls, scale: Any, dtype: Any, axis: Any, scale_dtype: Any, block: Any = None, key: Any = None
    ) -> Options:
        """Check the arguments that are not rules."""
        return cls(
            scale if callable(scale) else _known_statistic(scale),
            dtype if _is_rule(dtype) or dtype is None else dtypes.as_data_dtype(dtype, "dtype"),
            axis if callable(axis) else _own_axes(axis),
            check_scale_dtype(scale_dtype),
            block if callable(block) else _known_block(block),
            key,
        )

    @property
    def rules(self) -> dict[str, Callable]:
        """The arguments that are rules: functions of a path and a leaf."""
        names = ("dtype", "scale", "axis", "block")
        return {name: rule for name in names if _is_rule(rule := getattr(self, name))}

    def of_leaf(self, path: tuple, leaf: Any) -> Options | None:
        """Return the options of a leaf, without rules; None if the leaf is unchanged."""
        said = {name: rule(path, leaf) for name, rule in self.rules.items()}
        self.matched.update(name for name, value in said.items() if value is not None)
        if any(said.get(name, "") is None for name in ("dtype", "scale")):
            return None
        block = None
        if "block" not in said and np.ndim(leaf) > 1 and _is_real(leaf):
            block = self.block
        try:
            scale = _known_statistic(said["scale"]) if "scale" in said else self.scale
            dtype = dtypes.as_data_dtype(said["dtype"], "dtype") if "dtype" in said else self.dtype
            axis = _axes_of(leaf, said["axis"]) if "axis" in said else self.axis
            if not isinstance(scale, str) and scale is not None and "scale" in said:
                check_scale(scale, leaf.data if is_scaled(leaf) else jnp.asarray(leaf))
            if said.get("block") is not None:
                block = _known_block(said["block"])
                if not np.ndim(leaf) or not _is_real(leaf):
                    raise ValueError("a block format is for real arrays of rank 1 and more.")
        except (TypeError, ValueError) as error:
            where = f"`tree{tree_util.keystr(path)}`, {leaf.dtype}{list(np.shape(leaf))}"
            raise type(error)(f"A rule of `as_scaled_array` for {where}: {error}") from None
        return Options(scale, dtype, axis, self.scale_dtype, block, self.key)

    def key_of_leaf(self, path: tuple) -> Any:
        """Return a key that depends on the path of the leaf."""
        if self.key is None:
            raise ValueError(
                "`key` must be a key of `jax.random` for a block format with stochastic rounding."
            )
        # Not `hash`, which differs from process to process.
        return jax.random.fold_in(self.key, zlib.crc32(tree_util.keystr(path).encode()))

    def check_matches(self, paths: list[str]) -> None:
        """Raise if a rule has returned None for every leaf."""
        for name in self.rules.keys() - self.matched if paths else ():
            shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
            raise ValueError(
                f"The rule `{name}` matches no leaf: it returned None for all {len(paths)} of "
                f"them, {shown}. It is given a key path and a leaf; `jax.tree_util.keystr(path)` "
                "is the path as it is written here."
            )


def _is_rule(value: Any) -> bool:
    """Return whether an argument is a rule. Dtypes such as `jnp.float16` are callable too."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "dtype")


def _known_statistic(scale: Any) -> Any:
    if isinstance(scale, str) and scale not in ("rms", "max"):
        raise ValueError(
            f'`scale` must be None, a number, an array, "rms" or "max", got {scale!r}.'
        )
    return scale


def _known_block(block: Any) -> tuple[BlockFormat, int | None] | None:
    """Return a block format and the axis along which blocks lie (None for the default axis)."""
    if block is None:
        return None
    format, axis = block if isinstance(block, (tuple, list)) and len(block) == 2 else (block, None)
    found = block_format(format)
    if found is None or not (axis is None or hasattr(axis, "__index__")):
        raise TypeError(
            f"`block` must be a `jsa.BlockFormat` or one of {list(NAMES)}, or a pair of it and an "
            f"axis, got {block!r}."
        )
    if axis is not None and found.square:
        raise ValueError(
            f"`block` has square blocks, which lie along the last two axes, got {axis}."
        )
    return found, None if axis is None else operator.index(axis)


def _is_real(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _axes_of(leaf: Any, axis: Any) -> tuple[int, ...]:
    """Return the axes that a rule names. The leaf must have all of them."""
    own, ndim = _own_axes(axis), np.ndim(leaf)
    if not all(-ndim <= a < ndim for a in own):
        raise ValueError(f"`axis` must be among the {ndim} axes of the leaf, got {axis!r}.")
    return own


def _own_axes(axis: Any) -> tuple[int, ...]:
    """Return the argument `axis` as a tuple."""
    if axis is None:
        return ()
    try:
        return tuple(map(operator.index, axis if isinstance(axis, Iterable) else [axis]))
    except TypeError:
        raise TypeError(f"`axis` must be an int or a sequence of ints, got {axis!r}.") from None
