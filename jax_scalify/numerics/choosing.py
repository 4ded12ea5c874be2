"""The corrections of values whose data would leave the band of its dtype, chosen while tracing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from jax_scalify.interpreter.operand import Operand
from jax_scalify.numerics.equations import Equations, Result
from jax_scalify.numerics.measuring import Measured, excess
from jax_scalify.scales.algebra import Scale

LOST = 0.01  # share of the elements of a value that is worth an entry
VANISHED = 0.5
# Exponents of the scales at which float16 has all that `exp` and its like tell apart: numbers up to
# 2**8 beyond which they are 0, 1 or infinite in float32, too, and digits down to 2**-16.
_SATURATING = -8, 8


def is_distorted(m: Measured, result: Result, vanished: float) -> bool:
    """Whether a value is not what it would be at another scale.

    Args:
        m: what was measured.
        result: what the value is.
        vanished: the share of elements that may have underflowed.
    """
    if _saturates(result) and m.scale is not None and m.scale >= _SATURATING[0]:
        return m.underflow > vanished
    return bool(m.nonfinite) or m.overflow > LOST or m.underflow > vanished


def _saturates(result: Result) -> bool:
    return bool(result.saturates) and result.dtype == jnp.float16


def _excess(m: Measured, result: Result, scale: int) -> int:
    """The exponent by which the data of a value should be divided that was measured at `m.scale`.

    Args:
        m: what was measured.
        result: what the value is.
        scale: the exponent of the scale that its data will have.
    """
    if _saturates(result):
        low, high = _SATURATING
        return min(max(scale, low), high) - scale
    away = 0 if m.scale is None else m.scale - scale
    return excess(m.log2_rms + away, m.log2_max + away, m.dtype)


class Choice:
    """Chooses the exponents of corrections while a step is interpreted.

    Attributes:
        exponents: those that are not 0, by name.
        found: by name, scale, correction and RMS of data where the scale is static.
        is_guess: whether there are corrections of which only a run tells what they do.
        has_unknown: whether scales outside of loops are not known while tracing.
        needs_frozen_state: whether some of these have data that is out of its band.
    """

    def __init__(
        self,
        seen: Mapping[str, Measured],
        before: Mapping[str, int],
        measured: Mapping[str, Scale] | None = None,
    ):
        """Take what was seen with the corrections of before, and the scales that it had then."""
        self._seen, self._before, self._measured = seen, before, measured or {}
        self._results: Mapping[str, Result] = {}
        self._in_loops: dict[str, int] = {}
        self._moved: set[str] = set()
        self.is_guess = self.has_unknown = self.needs_frozen_state = False
        self.exponents: dict[str, int] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def of(self, equations: Equations) -> Callable[[str, Operand], int]:
        """Take in the equations, and return the chooser."""
        self._results = equations.results
        return self._choose

    def _choose(self, name: str, value: Operand) -> int:
        result, m = self._results.get(name), self._seen.get(name)
        if result is None or not result.can_be_corrected:
            return 0
        exponent = self._before.get(name, 0)
        if m is not None and m.scale is not None and math.isfinite(m.log2_rms):
            if value.scale.is_static:
                exponent = self._settled(name, m, result, int(value.scale.exponent))
            else:
                self.found.pop(name, None)
                is_in_loop = result.runs > 1
                exponent = (self._in_loop if is_in_loop else self._moved_by)(name, m, result, value)
        self.exponents.pop(name, None)
        if exponent:
            self.exponents[name] = exponent
            self.found.setdefault(name, {"correction": exponent})
        return exponent

    def _settled(self, name: str, m: Measured, result: Result, scale: int) -> int:
        """The exponent of a value that has the data which an uncorrected `scale` leaves to it."""
        exponent = _excess(m, result, scale)
        away = (m.scale or 0) - scale - exponent  # from the data to be expected
        data = {"log2_rms": m.log2_rms + away, "log2_max": m.log2_max + away}
        self.found[name] = {"scale": scale + exponent, "correction": exponent, **data}
        if exponent != m.correction:  # by which nothing is lost at the top any more
            self.found[name]["overflow"] = 0.0
        return exponent

    def _moved_by(self, name: str, m: Measured, result: Result, value: Operand) -> int:
        """The exponent of a value whose scale has a part that only a run tells.

        It is measured at `m.scale`, and moves with the part that is known: the exponents of two
        scales of the same factors differ by as much as the scales do.
        """
        self.has_unknown = True
        exponent, scale, before = m.correction, value.scale, self._measured.get(name)
        self.needs_frozen_state |= _excess(m, result, (m.scale or 0) - exponent) != exponent
        if before is None or _factors(before) != _factors(scale):
            return exponent
        moved = int(scale.exponent) - int(before.exponent)
        found = self._settled(name, m, result, (m.scale or 0) - exponent + moved)
        # What has saturated was larger than what was seen, and a maximum may be another one.
        is_exact = all(atom.is_number for atom, _ in scale.factors) and not m.overflow > LOST
        self.is_guess |= found != exponent and not is_exact
        return found

    def _in_loop(self, name: str, m: Measured, result: Result, value: Operand) -> int:
        """The exponent of a value whose scale is not known: of the first in a row that is out.

        In a loop, what comes from step to step gets the correction in each step.
        """
        del value
        if name not in self._in_loops:
            exponent = m.correction
            away = _excess(m, result, m.scale or 0) / result.runs
            # What saturates was larger than what was seen.
            away = math.ceil(away) if max(m.overflow, m.nonfinite) > LOST else round(away)
            if away:
                exponent += away if self._moved.isdisjoint(result.sources) else 0
                self._moved.add(name)
                self.is_guess = True
            self._in_loops[name] = exponent
        return self._in_loops[name]


def _factors(scale: Scale) -> list[tuple[int, int]]:
    """What a scale is made of but its exponent, in a trace of the same function."""
    return [(atom.index, power) for atom, power in scale.factors]
