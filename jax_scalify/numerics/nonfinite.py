"""Find the equation that makes the first nan or infinity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.base import dtypes
from jax_scalify.conversions.nnx_objects import pure_call
from jax_scalify.numerics import nonfinite_advice
from jax_scalify.numerics.host_statistics import Measure, measure
from jax_scalify.numerics.interpreting import Runner, Step, Tagged, trace
from jax_scalify.numerics.naming import Phases
from jax_scalify.numerics.rows import exponent_range
from jax_scalify.numerics.scopes import clean_name
from jax_scalify.numerics.text import exponents_text, shape_text


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of the equation at fault.

    Attributes:
        shape, dtype: of the value.
        scale: lowest and highest exponent of its scales; None for a plain value.
        measure: statistics of its data; None if it is not floating point.
        source: "value", "constant", or the argument's name.
    """

    shape: tuple[int, ...]
    dtype: str
    scale: tuple[int, int] | None
    measure: Measure | None
    source: str

    def __str__(self) -> str:
        text = f"{self.dtype}{shape_text(self.shape)}"
        text += f" ({self.source})" if self.source != "value" else ""
        text += f", scale 2^{exponents_text(self.scale)}" if self.scale is not None else ""
        m = self.measure
        if m is None or not m.size:
            return text
        counts = {"zero": m.zeros, "nan": m.nans, "inf": m.infs, "masked": m.masks}
        counted = "".join(f", {count} {name}" for name, count in counts.items() if count)
        of = "data of " if self.scale is not None else ""
        sizes = f", {of}{m.smallest:.3g} to {m.largest:.3g}" if m.largest else ""
        return f"{text}: {m.size} elements{counted}{sizes}"


@dataclasses.dataclass(frozen=True, repr=False)
class Nonfinite:
    """Where the first nan or infinity comes from; printed, with its operands and a remedy.

    Attributes:
        kind: "nan" or "inf", what was made.
        primitive: of the equation that makes it; of the first that reads it, if it was given.
        line: of the user's code: `file:line (function)`.
        name: module path or name scopes, joined with "/".
        phase: "forward", "backward" or "update", which comes after the backward pass.
        iterations: of the loops around the equation, outermost first.
        shape, dtype: of the result.
        count: of its elements that are not finite.
        operands: of the equation.
        argument: the name of the argument that it was in; None if an equation makes it.
        constant: whether it was in a constant, or in what the function closes over.
        reaches_result: whether a result of the function is not finite because of it.
        remedy: what is likely to help.
    """

    kind: str
    primitive: str
    line: str
    name: str
    phase: str
    iterations: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    count: int
    operands: tuple[Operand, ...]
    argument: str | None
    constant: bool
    reaches_result: bool
    remedy: str

    def __str__(self) -> str:
        if self.argument:
            what = f"The argument `{self.argument}` has {self.kind}; it is read by"
        elif self.constant:
            what = f"A constant that is {self.kind} is read by"
        else:
            what = f"The first {self.kind} is made by"
        where = f" in {self.name}" if self.name else ""
        turn = ", ".join(map(str, self.iterations))
        where += f", iteration {turn} of the loop" if turn else ""
        phase = self.phase if self.phase == "update" else f"{self.phase} pass"
        lines = [
            f"{what} `{self.primitive}`{where} ({phase})",
            f"  at {self.line or 'an unknown line'}",
            f"  result: {self.dtype}{shape_text(self.shape)}, {self.count} elements not finite",
            *(f"  operand: {operand}" for operand in self.operands),
            f"  remedy: {self.remedy}",
        ]
        if not self.reaches_result:
            lines.append("  No result of the function is affected.")
        return "\n".join(lines)

    __repr__ = __str__


def find_nonfinite(fun: Callable) -> Callable[..., Nonfinite | None]:
    """Make a function that runs `fun` once and tells where its first nan or infinity comes from.

    That is the equation that makes it out of finite operands, and on which the result depends:
    masks of `-inf`, which a softmax takes away again, are none. It is looked for equation by
    equation, through `jit`, loops, remat, derivatives, and in scalified functions.

    Args:
        fun: any function of arrays, `ScaledArray` and trees of them; jitted or not, scalified or
            not.

    Returns:
        A function of the arguments of `fun` that returns a `Nonfinite`, which prints where it is
        and what may help, or None if everything is finite.

    Raises:
        TypeError: if `fun` is not callable.

    Example:
        >>> found = jsa.numerics.find_nonfinite(lambda x: x / jnp.sum(x))(jnp.zeros(3))
        >>> print(found.primitive, found.kind)
        div nan
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")

    @jax.debug_nans(False)  # it would raise before the nan is traced back
    def run(*args: Any, **kwargs: Any) -> Nonfinite | None:
        closed, arrays, names = trace(pure_call(fun, args, kwargs))
        watcher = _Watcher()
        operands = [
            Tagged(array, _Argument(name, *_nonfinite(array)) if any(_nonfinite(array)) else None)
            for array, name in zip(arrays, names, strict=True)
        ]
        results = Runner(watcher).run(closed, operands)
        events = [r.tag for r in results if isinstance(r.tag, _Event) and any(_nonfinite(r.value))]
        found = [_culprit(event) for event in events]
        if found:
            return _describe(*min(found, key=lambda f: f[0].number), True)
        made = [event for event in watcher.events if event.makes and not _is_of_masks(event)]
        return _describe(*_culprit(made[0]), False) if made else None

    return run


@dataclasses.dataclass(frozen=True)
class _Argument:
    """An argument that is not finite."""

    name: str
    nan: bool
    inf: bool


@dataclasses.dataclass(frozen=True)
class _Source:
    """An operand that is not finite.

    Attributes:
        origin: the `_Event` that made it, an `_Argument`, or None for a constant.
        nan, inf: what it has.
        masks: whether all that is not finite in it is -inf.
    """

    origin: Any
    nan: bool
    inf: bool
    masks: bool


@dataclasses.dataclass(frozen=True, eq=False)
class _Event:
    """An equation of which a result is not finite.

    Attributes:
        number: in the order of execution.
        phase: "forward", "backward" or "update".
        step: the equation; None if all that is wrong with it came from other equations.
        nan, inf: what its results have.
        sources: its operands that are not finite.
        makes: whether all of them are finite.
    """

    number: int
    phase: str
    step: Step | None
    nan: bool
    inf: bool
    sources: tuple[_Source, ...]

    @property
    def makes(self) -> bool:
        return not self.sources


def _nonfinite(array: Any) -> tuple[bool, bool]:
    """Whether an array has nan, and whether it has inf."""
    if not dtypes.is_scalable(array.dtype):
        return False, False
    values = np.asarray(array)
    if values.dtype.kind != "c" and jnp.finfo(values.dtype).bits < 32:
        values = values.astype(np.float32)
    if np.isfinite(values).all():
        return False, False
    return bool(np.isnan(values).any()), bool(np.isinf(values).any())


def _has_positive_infinity(array: Any) -> bool:
    values = np.asarray(array)
    return bool((values.astype(np.result_type(values, np.float32)) == np.inf).any())


class _Watcher:
    """Takes note of equations whose results are not finite; they are their results' tags."""

    def __init__(self):
        self.events: list[_Event] = []
        self._phases = Phases()

    def __call__(self, step: Step) -> list[_Event | None]:
        phase = self._phases.of(step.path)
        kinds = [_nonfinite(result) for result in step.results]
        if not any(map(any, kinds)):
            return [None] * len(kinds)
        sources = tuple(
            _Source(tag, *kind, masks=not kind[0] and not _has_positive_infinity(operand))
            for operand, tag in zip(step.operands, step.tags, strict=True)
            if any(kind := _nonfinite(operand))
        )
        nan, inf = (any(found) for found in zip(*kinds, strict=True))
        makes_nan = nan and not any(s.nan for s in sources)
        passes_on = bool(sources) and all(isinstance(s.origin, _Event) for s in sources)
        keep = step if makes_nan or not passes_on else None
        event = _Event(len(self.events), phase, keep, nan, inf, sources)
        self.events.append(event)
        return [event if any(kind) else None for kind in kinds]


def _is_of_masks(event: _Event) -> bool:
    """Whether finite masks have become -inf: as of scores less their maximum, in float16."""
    if event.nan or event.step is None:
        return False
    results, operands = event.step.results, event.step.operands
    floating = [x for x in operands if dtypes.is_scalable(x.dtype)]
    is_masked = any(measure(x).masks for x in floating)
    return is_masked and not any(map(_has_positive_infinity, results))


def _culprit(event: _Event) -> tuple[_Event, _Source | None]:
    """Go back to the equation that made what is not finite, or that read it from outside.

    A nan is followed to where there was none; the infinities that made it, if there are any, to
    theirs. If these were masks, constants of -inf, the equation that made the nan is to blame.
    """
    wants_nan, maker = event.nan, None
    while True:
        found = [s for s in event.sources if (s.nan if wants_nan else s.inf)]
        if not found and event.sources:
            wants_nan, maker = not wants_nan, event if wants_nan else maker
            continue
        made = [s for s in found if s.origin is not None]
        if not found:
            return event, None
        if not made:
            if maker is not None and found[0].masks:
                return maker, None
            return event, found[0]
        if isinstance(made[0].origin, _Argument):
            return event, made[0]
        event = made[0].origin


def _describe(event: _Event, source: _Source | None, reaches_result: bool) -> Nonfinite:
    step = event.step
    assert step is not None  # an equation that only passes on is never to blame
    argument = source.origin.name if source and source.origin is not None else None
    result = next(r for r in step.results if any(_nonfinite(r)))
    seen = measure(result)
    primitive = step.eqn.primitive.name
    operands = tuple(
        _operand(*given)
        for given in zip(step.operands, step.operand_scales, step.eqn.invars, strict=True)
    )
    return Nonfinite(
        kind="nan" if (source or event).nan else "inf",
        primitive=primitive,
        line=step.line,
        name=clean_name(f"{step.path}/{primitive}"),
        phase=event.phase,
        iterations=step.iterations,
        shape=tuple(result.shape),
        dtype=jnp.dtype(result.dtype).name,
        count=seen.nans + seen.infs,
        operands=operands,
        argument=argument,
        constant=source is not None and argument is None,
        reaches_result=reaches_result,
        remedy=nonfinite_advice.remedy(step, operands, argument, source is not None),
    )


def _operand(array: Any, scale: Any, atom: Any) -> Operand:
    floating = dtypes.is_scalable(array.dtype)
    return Operand(
        shape=tuple(np.shape(array)),
        dtype=str(array.dtype),
        scale=exponent_range(scale),
        measure=measure(array) if floating else None,
        source="constant" if hasattr(atom, "val") else "value",
    )
