"""What a report tells of one value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_scalify.numerics.host_statistics import Fit, Measure

PHASES = ("input", "forward", "backward", "update")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A value of a computation.

    Attributes:
        name: module path or name scopes, joined with "/"; of an update without any the argument
            that it updates; the key path of an argument.
        phase: "input", "forward", "backward" or "update".
        primitive: that made it; "argument" for an input.
        line: of the user's code: `file:line (function)`; empty for an input.
        function: of `jax.nn`, that it is computed in, such as "silu"; empty if it is not.
        shape, dtype: of the value.
        scale: lowest and highest exponent of its scales; None for a plain value.
        runs: how often it was computed: by loops, and by calls of one jitted function.
        measure: statistics of its data, over all runs.
        underflow: elements that are zero, and would not be if its equation were computed in
            float64; 0 for inputs, and for dtypes of at least 32 bits.
        nonfinite_at: place of its first nan or infinity in the order of computation, over all runs;
            None if it has none.
    """

    name: str
    phase: str
    primitive: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    scale: tuple[int, int] | None
    runs: int
    measure: Measure
    underflow: int = 0
    nonfinite_at: int | None = None
    function: str = ""

    @property
    def size(self) -> int:
        """Number of elements, over all runs."""
        return self.measure.size

    @property
    def log2_rms(self) -> float:
        """`log2` of the root mean square of the finite data; -inf if all is zero."""
        return self.measure.log2_rms

    @property
    def nonfinite(self) -> int:
        """Number of elements that are nan or infinite."""
        return self.measure.nans + self.measure.infs

    def fit(self, dtype: Any = None) -> Fit:
        """Return how many elements a dtype does not hold well; by default its own dtype.

        Raises:
            ValueError: if nothing is known of this dtype: name it in `formats` of `report`.
        """
        name = self.dtype if dtype is None else jnp.dtype(dtype).name
        found = self.measure.fits.get(name)
        if found is None and dtype is None:
            found = Fit(overflow=self.measure.infs)
        if found is None:
            known = ", ".join(self.measure.fits)
            raise ValueError(f"`dtype` must be one of {known}, or be in `formats`, got {name}.")
        return dataclasses.replace(found, underflow=self.underflow) if name == self.dtype else found

    def shares(self, dtype: Any = None) -> tuple[float, float, float]:
        """Return the shares of elements that underflow, are subnormal, and overflow."""
        size = max(self.size, 1)
        return tuple(n / size for n in dataclasses.astuple(self.fit(dtype)))  # pyright: ignore

    def badness(self, formats: Sequence[str] = ()) -> float:
        """Return the share of elements that are lost, most of all what is not finite.

        Subnormal elements count a tenth. Of several formats the worst counts.
        """
        worst = 0.0
        for dtype in formats or (None,):
            under, subnormal, over = self.shares(dtype)
            worst = max(worst, under + subnormal / 10 + over)
        return worst + 10 * self.nonfinite / max(self.size, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return everything about it as plain values, `None` for what is not finite."""
        m = self.measure
        return {
            "name": self.name,
            "phase": self.phase,
            "primitive": self.primitive,
            "line": self.line,
            "function": self.function,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "scale": None if self.scale is None else list(self.scale),
            "runs": self.runs,
            "size": m.size,
            "log2_rms": m.log2_rms if math.isfinite(m.log2_rms) else None,
            "largest": m.largest,
            "smallest": m.smallest if math.isfinite(m.smallest) else None,
            "zeros": m.zeros,
            "nans": m.nans,
            "infs": m.infs,
            "nonfinite_at": self.nonfinite_at,
            "underflow": self.underflow,
            "subnormal": self.fit().subnormal,
            "overflow": self.fit().overflow,
            "fits": {name: dataclasses.asdict(found) for name, found in m.fits.items()},
            "histogram": {str(e): n for e, n in m.histogram.items()},
        }


def exponent_range(scale: Any) -> tuple[int, int] | None:
    """Return lowest and highest exponent of some scales; (0, 0) if none is positive and finite."""
    if scale is None:
        return None
    values = np.asarray(scale, np.float64)
    values = values[(values > 0) & np.isfinite(values)]
    if not values.size:
        return 0, 0
    exponents = np.log2(values)
    return round(float(exponents.min())), round(float(exponents.max()))
