"""The corrections of values whose data would leave the band of its dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.base.pow2 import MAX_EXPONENT
from jax_scalify.interpreter.operand import Operand
from jax_scalify.numerics.equations import Equations, Result
from jax_scalify.numerics.measuring import LOST, Measured, Steps, excess
from jax_scalify.scales.algebra import ONE, Scale

VANISHED = 0.5
# Exponents of the scales at which float16 has all that `exp` and its like tell apart: numbers up to
# 2**8 beyond which they are 0, 1 or infinite in float32, too, and digits down to 2**-16.
_SATURATING = -8, 8
# Runs nothing but scales, given exponents of factors by name: their exponents, by name.
ScalesOf = Callable[[Mapping[str, int]], Mapping[str, np.ndarray]]
_PASSES, _TURNS = 3, 8  # through all values whose scales only a run tells, and at each of them
_BEYOND = 300  # stands for the exponent of a scale that is infinite, or minus that for one of 0


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
    """Chooses the exponents of corrections.

    Where a value's scale is known while tracing, so is its correction. What is in a loop, or has a
    traced scalar as a part of its scale, gets a factor there that a run is given: `settle` turns
    these, one after the other, and looks at the scales that come of them.

    Attributes:
        exponents: those that are not 0, by name.
        found: by name, scale, correction and RMS of data where scales are static.
        unknown_names: of values whose scales only a run tells.
    """

    def __init__(
        self,
        seen: Mapping[str, Measured],
        before: Mapping[str, int],
        steps: Mapping[str, Steps] | None = None,
    ):
        """Take what was seen with the corrections of before, and in the steps of loops."""
        self._seen, self._before, self._steps = seen, before, steps or {}
        self._results: Mapping[str, Result] = {}
        self.unknown_names: set[str] = set()
        self.exponents: dict[str, int] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def of(
        self, equations: Equations, factors: Mapping[str, jax.Array]
    ) -> Callable[[str, Operand], Scale]:
        """Take in the equations, and return the chooser.

        Args:
            equations: of the step.
            factors: of scales that only a run tells, powers of two, by name.
        """
        self._results = equations.results

        def choose(name: str, value: Operand) -> Scale:
            result = self._results.get(name)
            if result is None or not result.can_be_corrected:
                return ONE
            m, exponent = self._seen.get(name), self._before.get(name, 0)
            self.unknown_names.discard(name)
            if m is not None and m.scale is not None and math.isfinite(m.log2_rms):
                if not value.scale.is_static:
                    self.unknown_names.add(name)
                    table = value.scale.table
                    return table.atom(factors[name], nonzero=True, extent=0, limit=0)
                scale = int(value.scale.exponent)
                exponent = _excess(m, result, scale)
                self._find(name, m, scale + exponent, exponent)
            self._correct(name, exponent)
            return Scale(exponent)

        return choose

    def settle(self, scales_of: ScalesOf) -> None:
        """Choose the exponents of values whose scales only a run tells.

        In a loop, what comes from step to step gets a correction in each step: the scale moves by
        more than the exponent does.

        Args:
            scales_of: runs nothing but the scales, given exponents of the factors by name, and
                returns those of the scales in each step of their loops, by name.
        """
        turned: dict[str, int] = {}
        scales = scales_of(turned)
        unknown = [name for name in self._results if name in self.unknown_names]
        for _ in range(_PASSES):
            before = dict(turned)
            for name in unknown:
                scales = self._turn(name, turned, scales, scales_of)
            if turned == before:
                break
        for name in unknown:
            exponent = turned.get(name, 0)
            if not np.isnan(scales[name]).all():  # else it was not computed
                m = self._steps[name].at(self._seen[name], _bounded(scales[name]))
                self._find(name, m, m.scale or 0, exponent)
            self._correct(name, exponent)

    def _turn(
        self,
        name: str,
        turned: dict[str, int],
        scales: Mapping[str, np.ndarray],
        scales_of: ScalesOf,
    ) -> Mapping[str, np.ndarray]:
        """Turn the factor of a value that is out of its band; return the scales then."""
        result = self._results[name]
        tried: dict[int, tuple[int, float]] = {}  # by exponent: what it lacks, how far it is away
        for _ in range(_TURNS):
            exponent, scale = turned.get(name, 0), _bounded(scales[name])
            m = self._steps[name].at(self._seen[name], scale)
            is_out = tried or _excess(m, result, m.scale or 0)
            if np.isnan(scale).all() or not is_out:
                break
            tried[exponent] = self._away(name, scale)
            turned[name] = _next({e: away for e, (away, _) in tried.items()}, exponent)
            if turned[name] == exponent:
                break
            scales = scales_of(turned)
        if tried:
            best = min(tried, key=lambda e: (tried[e][1], abs(tried[e][0]), abs(e)))
            if best != turned[name]:
                turned[name] = best
                scales = scales_of(turned)
        return scales

    def _away(self, name: str, scale: np.ndarray) -> tuple[int, float]:
        """By how much an exponent should be larger, and how far away it is, at some scales."""
        result = self._results[name]
        if _saturates(result):
            away = _excess(self._seen[name], result, int(np.nanmax(scale)))
            return away, float(abs(away))
        return self._steps[name].excess(scale, result.dtype)

    def _find(self, name: str, m: Measured, scale: int, exponent: int) -> None:
        """Keep what a value's data will be at a scale, of which its correction is a part."""
        away = (m.scale or 0) - scale
        data = {"log2_rms": m.log2_rms + away, "log2_max": m.log2_max + away}
        self.found[name] = {"scale": scale, "correction": exponent, **data}
        if exponent != m.correction:  # by which nothing is lost at the top any more
            self.found[name]["overflow"] = 0.0

    def _correct(self, name: str, exponent: int) -> None:
        self.exponents.pop(name, None)
        if exponent:
            self.exponents[name] = exponent
            self.found.setdefault(name, {"correction": exponent})


def _bounded(exponents: np.ndarray) -> np.ndarray:
    return np.clip(exponents, -_BEYOND, _BEYOND)


def _next(tried: Mapping[int, int], exponent: int) -> int:
    """The next exponent to try, the last again if it is the best or there is none.

    A scale grows by at least as much as the exponent does. So the last one and what it lacks is
    beyond the one that is looked for, or that itself.
    """
    away = tried[exponent]
    low = max((e for e, a in tried.items() if a > 0), default=None)
    high = min((e for e, a in tried.items() if a < 0), default=None)
    if not away or low is None or high is None:
        return max(-MAX_EXPONENT, min(MAX_EXPONENT, exponent + away))
    width = high - low
    if width <= 1:
        return exponent
    between = round(width * tried[low] / (tried[low] - tried[high]))
    return low + max(1, min(width - 1, between))
