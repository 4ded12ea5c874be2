"""Interpret a traced computation so that it returns statistics of some of its values, too."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import evaluate, scan_operands
from jax_scalify.interpreter.observing import observe_p
from jax_scalify.numerics import device_statistics
from jax_scalify.numerics.interpreting import bodies, first_known, is_interpreted
from jax_scalify.numerics.naming import Phases, has_same_elements, scopes_of, updated


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value is computed.

    Attributes:
        name: of the value; no other has it.
        position: index of its equation, and of the equations and bodies around it.
        result: its index among the equation's results.
        lengths: of the equations around it how often they run their bodies, outermost first.
    """

    name: str
    position: tuple[int, ...]
    result: int
    lengths: tuple[int, ...] = ()


def find_places(closed: Any, arguments: Sequence[str]) -> list[Place]:
    """Return the floating values of a jaxpr, given the names of its arguments.

    Not those that are moved only, nor those inside of a `while`.
    """
    finder = _Finder()
    finder.walk(closed, list(arguments), "", (), False)
    return finder.places


class _Finder:
    """Walks through a jaxpr as a `Runner` does; a tag is the argument that a value updates."""

    def __init__(self):
        self.places: list[Place] = []
        self._phases = Phases()
        self._counts: collections.Counter[str] = collections.Counter()

    def walk(
        self,
        closed: Any,
        tags: Sequence[Any],
        path: str,
        position: tuple[int, ...],
        inside: bool,
        lengths: tuple[int, ...] = (),
    ) -> list[Any]:
        count = itertools.count()

        def equation(eqn: Any, found: list[Any]) -> list[Any]:
            inner = f"{path}/{_compat.name_stack(eqn)}".strip("/")
            return self._equation(eqn, found, inner, (*position, next(count)), inside, lengths)

        return evaluate(closed, tags, equation, lambda _: None, lambda *_: None)

    def _equation(
        self,
        eqn: Any,
        tags: list[Any],
        path: str,
        position: tuple[int, ...],
        inside: bool,
        lengths: tuple[int, ...],
    ) -> list[Any]:
        held = bodies(eqn)
        if held:
            inside = inside or is_interpreted(eqn)
            length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            outs = [
                self.walk(body, tags[first:], path, (*position, i), inside, (*lengths, length))
                for i, (body, first) in enumerate(held)
            ]
            return outs[0]
        if inside and eqn.primitive is not observe_p:
            return [first_known(tags, None)] * len(eqn.outvars)
        primitive, avals, tags = _observed(eqn, tags)
        phase, results = self._phases.of(path), [v.aval for v in eqn.outvars]
        arguments = [updated(avals, tags, aval) for aval in results]
        known = _known_names(eqn)
        for i, aval in enumerate(results):
            if not has_same_elements(primitive) and dtypes.is_scalable(aval.dtype):
                name = known[i] if known else self._name(path, primitive, phase, arguments[i])
                self.places.append(Place(name, position, i, lengths))
        return arguments

    def _name(self, path: str, primitive: str, phase: str, argument: str | None) -> str:
        """A name for a value that no other one has."""
        scopes = scopes_of(path, primitive, phase, argument)
        name = f"{scopes}:{primitive}" if scopes else primitive
        name = name if phase == "forward" else f"{phase}/{name}"
        self._counts[name] += 1
        count = self._counts[name]
        return f"{name}#{count}" if count > 1 else name


def _observed(eqn: Any, tags: list[Any]) -> tuple[str, list[Any], list[Any]]:
    """The primitive, operands and tags of an equation, or of the one that it observes."""
    avals = [v.aval for v in eqn.invars]
    if eqn.primitive is not observe_p:
        return eqn.primitive.name, avals, tags
    observed = eqn.params["observed"]
    pairs = observed.pairs(list(zip(avals, tags, strict=True)))[len(observed.results) :]
    given = [data for data, _ in pairs]
    return observed.eqn.primitive.name, [aval for aval, _ in given], [tag for _, tag in given]


def _known_names(eqn: Any) -> list[str]:
    """The names that a calibration gives to what is observed; none without one."""
    observed = eqn.params["observed"] if eqn.primitive is observe_p else None
    return [observed.names[i] for i in observed.results] if observed and observed.names else []


class Watcher:
    """Evaluates a jaxpr inside of a trace, with statistics of the values at some places."""

    def __init__(self, places: Sequence[Place], dtype: Any):
        """Take the places to look at, and the dtype whose limits count (None: their own)."""
        self._dtype = dtype
        self._lengths = {(p.position, p.result): p.lengths for p in places}
        self._keys = list(self._lengths)
        self._around = {p.position[:i] for p in places for i in range(1, len(p.position), 2)}

    def run(
        self, closed: Any, operands: Sequence[Any], position: tuple[int, ...] = ()
    ) -> tuple[list[Any], dict[Any, jax.Array]]:
        """Return the results of a jaxpr, and by position and result what was looked at."""
        seen: dict[Any, jax.Array] = {}
        count = itertools.count()

        def equation(eqn: Any, values: list[Any]) -> list[Any]:
            with _compat.equation_context(eqn):
                return self._equation(eqn, values, (*position, next(count)), seen)

        return evaluate(closed, operands, equation), seen

    def _equation(
        self, eqn: Any, values: list[Any], here: tuple[int, ...], seen: dict[Any, jax.Array]
    ) -> list[Any]:
        if here in self._around:
            results, found = self._with_bodies(eqn, values, here)
            seen.update(zip(self._inside(here), found, strict=True))
            return results
        if eqn.primitive is observe_p:
            observed, all_pairs = eqn.params["observed"], eqn.params["observed"].pairs(values)
            pairs, given = all_pairs[: len(observed.results)], all_pairs[len(observed.results) :]
            is_rounding = observed.is_rounding
        else:
            out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            pairs = [(x, None) for x in (out if eqn.primitive.multiple_results else [out])]
            given, is_rounding = pairs, False
        for i, (data, scale) in enumerate(pairs):
            if (here, i) not in self._keys:
                continue
            if is_rounding:  # what it rounds, by the limits of what it rounds to
                (wide, own), limits = given[0], self._dtype or data.dtype
                seen[here, i] = self.observe(wide, own, limits)
            else:
                seen[here, i] = self.observe(data, scale, self._dtype)
        return [data for data, _ in pairs]

    def observe(self, data: jax.Array, scale: Any, dtype: Any) -> jax.Array:
        """The statistics of a value, of its scale or None, by the limits of a dtype."""
        return device_statistics.observe(data, scale, dtype)

    def absent(self, lengths: Sequence[int]) -> jax.Array:
        """What is seen of a value that is not computed, in loops of these lengths."""
        del lengths
        return device_statistics.absent()

    def combine(self, found: jax.Array) -> jax.Array:
        """What is seen of a value in a loop, given what is in each of its steps."""
        return device_statistics.combine(found)

    def _inside(self, here: tuple[int, ...]) -> list[Any]:
        """The values to look at in the bodies of an equation."""
        return [key for key in self._keys if key[0][: len(here)] == here]

    def _body(self, jaxpr: Any, here: tuple[int, ...], index: int = 0) -> Callable:
        """A body of an equation as a function that returns all statistics of the equation."""
        keys, around = self._inside(here), (len(here) + 1) // 2

        def body(*operands: Any) -> tuple[list[Any], list[jax.Array]]:
            results, seen = self.run(jaxpr, operands, (*here, index))
            return results, [
                seen[key] if key in seen else self.absent(self._lengths[key][around:])
                for key in keys
            ]

        return body

    def _with_bodies(
        self, eqn: Any, values: list[Any], here: tuple[int, ...]
    ) -> tuple[list[Any], list[jax.Array]]:
        """Evaluate an equation that holds values to look at."""
        name, params = eqn.primitive.name, eqn.params
        calls = [self._body(body, here, i) for i, (body, _) in enumerate(bodies(eqn))]
        if name == "scan":
            return self._scan(params, values, calls[0])
        if name == "cond":
            return _branch(params, values, calls)
        if name not in ("jit", "remat2"):
            return calls[0](*values)
        with _compat.no_name_stack():
            longer = jax.make_jaxpr(lambda *xs: [x for both in calls[0](*xs) for x in both])(
                *values
            )
        if name == "jit":
            out = _compat.bind_longer_jit(eqn, longer, values)
        else:
            opened = _compat.open_jaxpr(longer)
            out = eqn.primitive.bind(*longer.consts, *values, **{**params, "jaxpr": opened})
        count = len(eqn.outvars)
        return out[:count], out[count:]

    def _scan(
        self, params: dict[str, Any], values: list[Any], call: Callable
    ) -> tuple[list[Any], list[jax.Array]]:
        consts, start, xs = scan_operands(params, values)

        def step(carry: list[Any], sliced: list[Any]) -> Any:
            out, found = call(*consts, *carry, *sliced)
            return out[: len(start)], (out[len(start) :], found)

        carry, (ys, found) = lax.scan(
            step,
            start,
            xs,
            params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys], [self.combine(rows) for rows in found]


def _branch(
    params: dict[str, Any], values: list[Any], calls: list[Callable]
) -> tuple[list[Any], list[jax.Array]]:
    platforms = params.get("branches_platforms")
    if platforms is None:
        return lax.switch(values[0], calls, *values[1:])
    pairs = zip(calls, platforms, strict=True)
    named = {name: call for call, names in pairs for name in names or ["default"]}
    return lax.platform_dependent(*values[1:], **named)
