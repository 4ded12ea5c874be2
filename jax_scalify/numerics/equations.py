"""The equations of a user's function by name, and what their results are in training.

A name is made of the scopes, the pass, the primitive and a number: it is the same for another batch
size, on another mesh, and when the function is traced again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import evaluate
from jax_scalify.interpreter.corrections import Chooser, Corrections, Place
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.numerics.interpreting import bodies
from jax_scalify.numerics.naming import Phases, has_same_elements, scopes_of, updated
from jax_scalify.primitives.custom_scale import custom_scale_p

# Large numbers are all the same to them, and small ones: near 0 they are near 1, or a half.
_SATURATING = ("exp", "exp2", "logistic", "erfc")
_SUMS = ("add", "sub")  # of a value and a mask, 0 where it is seen
_MATMULS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")


@dataclasses.dataclass
class Result:
    """A floating result of an equation.

    Attributes:
        name: no other result has it.
        line: where the user's code makes it: `file:line (function)`.
        dtype: of the result.
        is_array: whether it has several elements.
        keeps_scale: whether it is a mask, or the user asks for its scale, or an optimizer's state.
        is_operand: of a matmul.
        is_gradient: made by the backward pass for the update, or for the caller.
        saturates: whether nothing takes it but functions such as `exp`; None before anything does.
    """

    name: str
    line: str
    dtype: Any
    is_array: bool
    keeps_scale: bool
    is_operand: bool = False
    is_gradient: bool = False
    saturates: bool | None = None

    @property
    def can_be_corrected(self) -> bool:
        """Whether its data may leave a range, and nothing else decides about its scale."""
        narrow = jnp.issubdtype(self.dtype, jnp.floating) and dtypes.is_narrow(self.dtype)
        return narrow and self.is_array and not self.keeps_scale

    @property
    def role(self) -> str:
        """What a calibration calls it."""
        if self.is_operand:
            return "operand"
        return "gradient" if self.is_gradient else "value"


class _Tag(NamedTuple):
    """Of a value: the argument that it is an update of, and the result that it is.

    A mask holds constants that are chosen, such as 0 and -inf, or booleans as numbers.
    """

    argument: str | None = None
    maker: str | None = None
    phase: str = ""
    is_mask: bool = False

    @property
    def is_constant(self) -> bool:
        return not (self.maker or self.argument)


def _same_elements(primitive: str, tags: Sequence[_Tag]) -> _Tag | None:
    """The tag of the operand whose elements a result has, beside constants; None if there is none.

    A value that is masked has nothing to tell but of what is not: the mask is to be large.
    """
    if primitive == "select_n":
        cases = [tag for tag in tags[1:] if not tag.is_constant]
        return cases[0] if len(cases) == 1 < len(tags[1:]) else None
    if primitive in _SUMS:
        masked = [tag for tag in tags if not (tag.is_mask or tag.is_constant)]
        return masked[0] if len(masked) == 1 and any(tag.is_mask for tag in tags) else None
    if has_same_elements(primitive):
        return tags[0] if tags else _Tag()
    return None


def _is_mask(eqn: Any, tags: Sequence[_Tag]) -> bool:
    """Whether a result is a mask: a choice, a boolean as a number, or arithmetic on a mask."""
    name = eqn.primitive.name
    if name == "select_n":
        return all(tag.is_mask or tag.is_constant for tag in tags[1:])
    if name == "convert_element_type":
        tag, dtype = tags[0], eqn.invars[0].aval.dtype
        is_chosen = tag.is_constant and not dtypes.is_scalable(dtype)
        return tag.is_mask or is_chosen or jnp.issubdtype(dtype, jnp.bool_)
    if name in (*_SUMS, "mul") or has_same_elements(name):
        return any(t.is_mask for t in tags) and all(t.is_mask or t.is_constant for t in tags)
    return False


class Equations:
    """The named equations of a traced function.

    Attributes:
        results: by name.
    """

    def __init__(self, closed: Any, arguments: Sequence[str]):
        """Walk through a jaxpr, given the names of its arguments."""
        self.results: dict[str, Result] = {}
        self._phases = Phases()
        self._counts: collections.Counter[str] = collections.Counter()
        self._closed = closed  # kept, so that no other equation has the id of one
        self._places, out = self._walk(closed, [_Tag(name) for name in arguments], "", "")
        for tag in out:
            if tag.maker:
                self.results[tag.maker].saturates = False
                self.results[tag.maker].is_gradient |= tag.phase == "backward"

    def corrections(
        self,
        exponents: Mapping[str, int],
        *,
        named: bool = False,
        choose: Chooser | None = None,
    ) -> Corrections | None:
        """The corrections of the equations, given exponents by name; None if there are none.

        Args:
            exponents: of some results.
            named: whether values are to be found by these names where they are observed.
            choose: chooses exponents, instead.
        """
        places = _planned(self._places, exponents, named or choose is not None)
        return Corrections(places, choose) if places else None

    def _walk(
        self, closed: Any, tags: Sequence[_Tag], path: str, line: str
    ) -> tuple[dict[int, Place], list[_Tag]]:
        places: dict[int, Place] = {}

        def equation(eqn: Any, found: list[_Tag]) -> list[_Tag]:
            inner = f"{path}/{_compat.name_stack(eqn)}".strip("/")
            own = _compat.own_line(eqn) or line
            held = [] if eqn.primitive is custom_scale_p else bodies(eqn)
            if not held:
                names, out = self._results(eqn, found, inner, own)
                places[id(eqn)] = Place(eqn, names)
                return out
            inside: dict[int, Place] = {}
            outs = []
            for body, first in held:
                of_body, out = self._walk(body, found[first:], inner, own)
                inside |= of_body
                outs.append(out)
            places[id(eqn)] = Place(eqn, inside=inside)
            return outs[0]

        return places, evaluate(closed, tags, equation, lambda _: _Tag(), lambda *_: _Tag())

    def _results(
        self, eqn: Any, tags: list[_Tag], path: str, line: str
    ) -> tuple[tuple[str, ...], list[_Tag]]:
        primitive, avals = eqn.primitive.name, [v.aval for v in eqn.invars]
        phase, same = self._phases.of(path), _same_elements(primitive, tags)
        is_mask = _is_mask(eqn, tags)
        for tag in tags:
            if not tag.maker:
                continue
            maker = self.results[tag.maker]
            maker.is_operand |= primitive in _MATMULS
            maker.is_gradient |= phase == "update" and tag.phase == "backward"
            if same is None:  # else its taker is still to come
                maker.saturates = primitive in _SATURATING and maker.saturates is not False
        names, out = [], []
        for var in eqn.outvars:
            aval = var.aval
            argument = updated(avals, [tag.argument for tag in tags], aval)
            if same or not dtypes.is_scalable(getattr(aval, "dtype", bool)):
                names.append("")
                out.append((same or _Tag())._replace(argument=argument, is_mask=is_mask))
                continue
            name = self._name(scopes_of(path, primitive, phase, argument), primitive, phase)
            is_array = any(size != 1 for size in aval.shape)
            is_rescaled = traits_of(primitive).elements == "rescaled"
            keeps_scale = is_mask or phase == "update" or is_rescaled
            known = name, line, aval.dtype, is_array, keeps_scale
            self.results[name] = Result(*known)
            names.append(name)
            out.append(_Tag(argument, name, phase, is_mask))
        return tuple(names), out

    def _name(self, scopes: str, primitive: str, phase: str) -> str:
        name = f"{scopes}:{primitive}" if scopes else primitive
        name = name if phase == "forward" else f"{phase}/{name}"
        self._counts[name] += 1
        return f"{name}#{self._counts[name]}" if self._counts[name] > 1 else name


def _planned(
    places: Mapping[int, Place], exponents: Mapping[str, int], named: bool
) -> dict[int, Place]:
    """The places that have something to do, with their exponents; with their names if asked."""
    plan = {}
    for number, place in places.items():
        found = tuple(exponents.get(name, 0) for name in place.names)
        found = found if any(found) else ()
        inside = _planned(place.inside, exponents, named)
        names = place.names if named else ()
        if found or inside or any(names):
            plan[number] = Place(place.eqn, names, found, inside)
    return plan


class Planner:
    """A calibration in the making: it names values, and corrects some of them.

    Attributes:
        equations: of the function, when it has been traced.
    """

    def __init__(self, exponents: Mapping[str, int], make_chooser: Callable | None = None):
        """Take exponents by name, or what makes of the equations a function that chooses them."""
        self._exponents, self._make_chooser = exponents, make_chooser
        self.equations: Equations | None = None

    def corrections(self, closed: Any, arguments: Sequence[str]) -> Corrections | None:
        """The corrections of a traced function; see `Calibrated`."""
        self.equations = Equations(closed, arguments)
        choose = None if self._make_chooser is None else self._make_chooser(self.equations)
        return self.equations.corrections(self._exponents, named=True, choose=choose)

    def scale_of(self, argument: str) -> int | None:
        """None: arguments keep the scales that they come with; see `Calibrated`."""
        del argument
        return None
