"""Names for the values of a computation, and the pass that they belong to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_scalify.interpreter.traits import traits_of
from jax_scalify.numerics.scopes import clean_name


# Results that are what was given, elsewhere: rows that would say the same again.
def has_same_elements(primitive: str) -> bool:
    """Whether results have nothing to show that operands have not shown, or the indices have."""
    return traits_of(primitive).elements in ("same", "moved") or primitive == "iota"


class Phases:
    """Tells the pass of each equation, asked in the order in which they run."""

    def __init__(self):
        self._is_update = False  # the backward pass is over

    def of(self, path: str) -> str:
        """Return "forward", "backward" or "update": what comes after the backward pass."""
        if "transpose(" in path:
            self._is_update = True
            return "forward" if "rematted_computation" in path else "backward"
        return "update" if self._is_update and "jvp(" not in path else "forward"


def scopes_of(path: str, primitive: str, phase: str, argument: str | None) -> str:
    """Return the user's scopes; of an update without any the argument that it updates."""
    return clean_name(f"{path}/{primitive}") or (argument if phase == "update" else None) or ""


def updated(operands: Sequence[Any], tags: Sequence[str | None], result: Any) -> str | None:
    """Return the argument of a result's shape that an operand is, or is an update of."""
    pairs = zip(operands, tags, strict=True)
    return next((tag for x, tag in pairs if tag and np.shape(x) == result.shape), None)


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern is a part of a name or, with * or ?, fits all of it."""
    if pattern in name:
        return True
    expression = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern)
    return re.fullmatch(expression, name) is not None
