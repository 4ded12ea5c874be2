"""Sums of large leaves, as in the norm of all gradients.

A GPU needs two kernels for the sum of a large array: the sums of its rows, and the sum of these.
Here the sums of the rows of all leaves are one array, so the second kernel is needed only once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_scalify.base.pins import elements
from jax_scalify.optim.arena import SMALL, first_axis_of_rows, may_be_shared


@dataclasses.dataclass(eq=False)
class Sums:
    """Sums that are computed together.

    Attributes:
        depth: the depth of each item.
        items: items of an optimizer's jaxpr, `stacking.Item`. All operands have as many rows.
    """

    depth: int
    items: list[Any]

    def compute(self) -> None:
        """Compute the array of each item."""
        eqn = self.items[0].eqn

        def add(x: Any, first: int) -> Any:
            params = eqn.params | {"axes": tuple(range(first, x.ndim))}
            return eqn.primitive.bind(x, **eqn.primitive.get_bind_params(params))

        arrays = [item.operands[0].array for item in self.items]
        rows = [add(x, first_axis_of_rows(x.shape)).reshape(-1) for x in arrays]
        for item, total in zip(self.items, elements(add(jnp.stack(rows), 1)), strict=True):
            item.known = total


def with_sums(units: Iterable[Any], item_type: type) -> list[Any]:
    """Replace the items that are sums of large arrays by `Sums`, where several have one depth."""
    found: list[Any] = []
    sums: dict[Any, Sums] = {}
    for unit in units:
        rows = _rows(unit) if isinstance(unit, item_type) else None
        if rows is None:
            found.append(unit)
            continue
        key = unit.depth, unit.aval.dtype, rows
        sums.setdefault(key, Sums(unit.depth, [])).items.append(unit)
    return found + [x if len(x.items) > 1 else x.items[0] for x in sums.values()]


def _rows(item: Any) -> int | None:
    """Return the number of rows of a large array whose sum is an item; None for other items.

    If devices share the array, XLA would exchange the sums of its rows instead of one number.
    """
    if item.eqn.primitive is not lax.reduce_sum_p or item.aval.shape or may_be_shared():
        return None
    shape = item.operands[0].aval.shape
    if len(shape) < 2 or math.prod(shape) <= SMALL:
        return None
    return math.prod(shape[: first_axis_of_rows(shape)])
