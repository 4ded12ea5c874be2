"""What `as_scaled_array` does with each leaf: the same with all, or what rules say."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import tree_util

from jax_scalify.arrays.scaled_array import check_scale, check_scale_dtype, is_scaled
from jax_scalify.base import dtypes


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `as_scaled_array`.

    Attributes:
        scale, dtype, axis: its arguments, checked unless they are rules.
        scale_dtype: dtype of scales.
        matched: the rules that have said something of a leaf.
    """

    scale: Any
    dtype: Any
    axis: Any
    scale_dtype: Any
    matched: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, scale: Any, dtype: Any, axis: Any, scale_dtype: Any) -> Options:
        """Check the arguments, as far as they are no rules."""
        return cls(
            scale if callable(scale) else _known_statistic(scale),
            dtype if _is_rule(dtype) or dtype is None else dtypes.as_floating(dtype, "dtype"),
            axis if callable(axis) else _own_axes(axis),
            check_scale_dtype(scale_dtype),
        )

    @property
    def rules(self) -> dict[str, Callable]:
        """The arguments that are functions of a path and a leaf."""
        found = {"dtype": self.dtype, "scale": self.scale, "axis": self.axis}
        return {name: rule for name, rule in found.items() if _is_rule(rule)}

    def of_leaf(self, path: tuple, leaf: Any) -> tuple[Any, Any, Any, Any] | None:
        """Scale, dtype, dtype of the scale and axes of a leaf; None if it stays as it is."""
        said = {name: rule(path, leaf) for name, rule in self.rules.items()}
        self.matched.update(name for name, value in said.items() if value is not None)
        if any(said.get(name, "") is None for name in ("dtype", "scale")):
            return None
        try:
            scale = _known_statistic(said["scale"]) if "scale" in said else self.scale
            dtype = dtypes.as_floating(said["dtype"], "dtype") if "dtype" in said else self.dtype
            axis = _axes_of(leaf, said["axis"]) if "axis" in said else self.axis
            if not isinstance(scale, str) and scale is not None and "scale" in said:
                check_scale(scale, leaf.data if is_scaled(leaf) else jnp.asarray(leaf))
        except (TypeError, ValueError) as error:
            where = f"`tree{tree_util.keystr(path)}`, {leaf.dtype}{list(np.shape(leaf))}"
            raise type(error)(f"A rule of `as_scaled_array` for {where}: {error}") from None
        return scale, dtype, self.scale_dtype, axis

    def check_matches(self, paths: list[str]) -> None:
        """Refuse rules that have said nothing of any leaf."""
        for name in self.rules.keys() - self.matched if paths else ():
            shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
            raise ValueError(
                f"The rule `{name}` matches no leaf: it returned None for all {len(paths)} of "
                f"them, {shown}. It is given a key path and a leaf; `jax.tree_util.keystr(path)` "
                "is the path as it is written here."
            )


def _is_rule(value: Any) -> bool:
    """Tell a function from a dtype: `jnp.float16` can be called as well."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "dtype")


def _known_statistic(scale: Any) -> Any:
    if isinstance(scale, str) and scale not in ("rms", "max"):
        raise ValueError(
            f'`scale` must be None, a number, an array, "rms" or "max", got {scale!r}.'
        )
    return scale


def _axes_of(leaf: Any, axis: Any) -> tuple[int, ...]:
    """The axes that a rule names, all of which its leaf has."""
    own, ndim = _own_axes(axis), np.ndim(leaf)
    if not all(-ndim <= a < ndim for a in own):
        raise ValueError(f"`axis` must be among the {ndim} axes of the leaf, got {axis!r}.")
    return own


def _own_axes(axis: Any) -> tuple[int, ...]:
    """The axes that `axis` names."""
    if axis is None:
        return ()
    try:
        return tuple(map(operator.index, axis if isinstance(axis, Iterable) else [axis]))
    except TypeError:
        raise TypeError(f"`axis` must be an int or a sequence of ints, got {axis!r}.") from None
