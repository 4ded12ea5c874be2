"""Traits, which rules declare: what is known about a primitive besides its scale law."""

from __future__ import annotations

import dataclasses
import functools

ELEMENTS = tuple("new summed same cast rescaled negated moved picked taken joined placed".split())
"""The relations of a primitive's result elements to its operands: the table of `docs/rules.md`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """What is known about a primitive: see the arguments of `register_scale_rule`.

    If `elements` is not declared, it counts as "new". Of elements that are the operand's own, the
    `degree` is implied, and so is `nonnegative="keeps"`, unless they are negated. In an
    `elementwise` primitive, 0-d operands may stand beside arrays.
    """

    elements: str | None = None
    elementwise: bool = False
    nonnegative: str | None = None
    degree: float | str | None = None

    def __post_init__(self) -> None:
        _check("elements", self.elements, ELEMENTS)
        _check("nonnegative", self.nonnegative, ("always", "keeps"))
        if not isinstance(self.degree, (int, float)):
            _check("degree", self.degree, ("sum", "product", "quotient"), " or a number")

    @functools.cached_property
    def is_view(self) -> bool:
        """Whether the elements are the operand's, moved or picked. Equal elements stay equal."""
        return self.elements in ("moved", "picked")

    @functools.cached_property
    def is_given(self) -> bool:
        """Whether the elements come from one operand, or from several operands side by side.

        Primitives that choose between operands do not count.
        """
        return self.elements not in (None, "new", "summed", "picked", "placed")

    @functools.cached_property
    def is_matmul(self) -> bool:
        """Whether the results are sums of products of two operands."""
        return self.elements == "summed" and self.degree == "product"

    @functools.cached_property
    def keeps_nonnegative(self) -> bool:
        """Whether no result is negative unless an operand is."""
        return self.nonnegative is not None or self.elements not in (None, "new", "negated")


def _check(name: str, got: object, allowed: object, also: str = "") -> None:
    if got is not None and got not in allowed:  # type: ignore[operator]
        raise ValueError(f"`{name}` must be one of {list(allowed)}{also}, got {got!r}.")  # type: ignore[call-overload]


_traits: dict[str, Traits] = {}


def declare(primitive: str, traits: Traits) -> None:
    """Declare the traits of a primitive, given its name. They replace earlier traits."""
    _traits[primitive] = traits


def traits_of(primitive: str) -> Traits:
    """Return the traits of a primitive, given its name; `Traits()` if it has none."""
    return _traits.get(primitive, _UNKNOWN)


_UNKNOWN = Traits()
