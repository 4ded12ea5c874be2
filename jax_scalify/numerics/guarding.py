"""Which tensors have left the band that they were calibrated for, and what to do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.numerics.measuring import Measured, excess, excess_of_state

HYSTERESIS = 3
"""How many octaves the RMS of data may move, once it is outside of the band of its dtype."""

_SATURATED = 1e-3  # share of the elements, if it was less than half of that
_UNDERFLOWN = 0.25  # more of the elements than before: subnormal ones have some digits left
_REMEDIES = {
    "grown": "calibrate again",
    "shrunk": "calibrate again",
    "saturates": "calibrate again",
    "underflows": "calibrate again",
    "nonfinite": "go back to a state that is finite, jsa.numerics.find_nonfinite names the line",
    "zero": "nothing to do for scales: it may have died",
}
_MENDED = ("grown", "shrunk", "saturates", "underflows")


@dataclasses.dataclass(frozen=True)
class Drift:
    """A tensor that is not any more what it was when it was calibrated.

    Attributes:
        name: of the tensor.
        kind: "grown" or "shrunk", "saturates" or "underflows", "nonfinite", or "zero" altogether.
        before, now: `log2` of the RMS of its data; of "saturates", "underflows" and "nonfinite" the
            share of the elements.
    """

    name: str
    kind: str
    before: float
    now: float

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _REMEDIES[self.kind]

    def __str__(self) -> str:
        if self.kind in ("grown", "shrunk"):
            what = f"has {self.kind} by {abs(self.now - self.before):.1f} octaves"
        elif self.kind == "zero":
            what = "is zero"
        elif self.kind == "nonfinite":
            what = f"is nan or infinite in {self.now:.1%} of its elements"
        else:
            what = f"{self.kind} in {self.now:.1%} of its elements, was {self.before:.1%}"
        return f"{self.name} {what}: {self.remedy}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a guard has found; true if the step should be calibrated again.

    Attributes:
        drifts: the tensors that have left their band, those that are not finite first.
    """

    drifts: tuple[Drift, ...] = ()

    def __bool__(self) -> bool:
        return any(drift.kind in _MENDED for drift in self.drifts)

    def __iter__(self) -> Iterator[Drift]:
        return iter(self.drifts)

    def __len__(self) -> int:
        return len(self.drifts)

    def __str__(self) -> str:
        if not self.drifts:
            return "All tensors are in the bands that they were calibrated for."
        return "\n".join(map(str, self.drifts))


def judge(before: Mapping[str, Measured], now: Mapping[str, Mapping[str, float]]) -> Verdict:
    """Compare what is measured now with what was; names that only one of them has are left out.

    Args:
        before: of the calibration.
        now: of some tensors `log2_rms`, `log2_max` (of values -inf for what is not known),
            `underflow`, `overflow` and `nonfinite`.
    """
    drifts = [
        drift
        for name, found in now.items()
        if name in before and (drift := _drift(name, before[name], found)) is not None
    ]
    order = list(_REMEDIES)[::-1]
    return Verdict(tuple(sorted(drifts, key=lambda d: (order.index(d.kind), d.name))))


def _drift(name: str, before: Measured, now: Mapping[str, float]) -> Drift | None:
    """What has become of a tensor; None if it is what it was, or its dtype holds it anyway."""
    if math.isnan(now["nonfinite"]):  # in a branch that was not taken
        return None
    if now["nonfinite"] > 0 and now["nonfinite"] > before.nonfinite:
        return Drift(name, "nonfinite", before.nonfinite, now["nonfinite"])
    if not _is_short(before.dtype):
        return None
    if now["overflow"] > max(_SATURATED, 2 * before.overflow):
        return Drift(name, "saturates", before.overflow, now["overflow"])
    rms = before.log2_rms, now["log2_rms"]
    if not all(map(math.isfinite, rms)):
        return Drift(name, "zero", *rms) if math.isfinite(rms[0]) else None
    of_role = excess_of_state if before.role == "state" else excess
    if abs(rms[1] - rms[0]) > HYSTERESIS and of_role(rms[1], now["log2_max"], before.dtype):
        return Drift(name, "grown" if rms[1] > rms[0] else "shrunk", *rms)
    if before.role == "operand" and now["underflow"] > before.underflow + _UNDERFLOWN:
        return Drift(name, "underflows", before.underflow, now["underflow"])
    return None


def _is_short(dtype: Any) -> bool:
    return dtypes.is_narrow(jnp.dtype(dtype))
