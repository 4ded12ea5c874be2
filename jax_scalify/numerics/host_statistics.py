"""What is measured of an array: its exponents, its range, and what a dtype makes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_scalify.base import dtypes

# The floating dtypes that every array is tried in.
DTYPES = tuple(
    np.dtype(d)
    for d in (
        np.float32,
        ml_dtypes.bfloat16,
        np.float16,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e4m3fn,
    )
)


_MASK = 2.0**100  # masks are less than the negative of that


@dataclasses.dataclass(frozen=True)
class Fit:
    """How many elements of an array a dtype does not hold well.

    Attributes:
        underflow: not zero, but rounded to zero.
        subnormal: rounded to a number below the smallest normal one, so with fewer bits.
        overflow: at or beyond the largest finite value.
    """

    underflow: int = 0
    subnormal: int = 0
    overflow: int = 0

    def __add__(self, other: Fit) -> Fit:
        return Fit(
            self.underflow + other.underflow,
            self.subnormal + other.subnormal,
            self.overflow + other.overflow,
        )


@dataclasses.dataclass(frozen=True)
class Measure:
    """Statistics of the elements of one or several arrays; complex numbers count as two.

    Attributes:
        size: number of elements.
        zeros, nans, infs: how many of them there are.
        masks: finite elements so negative that they can only be masks, as those of attention; not
            part of what follows.
        sum_of_squares: of the finite elements, in float64.
        largest, smallest: of the absolute values that are finite and not zero; 0 and inf without
            any.
        histogram: for an exponent `e` the number of elements in `[2**e, 2**(e + 1))`.
        fits: by the dtype's name, what it would make of the elements.
    """

    size: int = 0
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    masks: int = 0
    sum_of_squares: float = 0.0
    largest: float = 0.0
    smallest: float = math.inf
    histogram: Mapping[int, int] = dataclasses.field(default_factory=dict)
    fits: Mapping[str, Fit] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Measure) -> Measure:
        histogram = dict(self.histogram)
        for exponent, count in other.histogram.items():
            histogram[exponent] = histogram.get(exponent, 0) + count
        names = {**self.fits, **other.fits}
        fits = {n: self.fits.get(n, Fit()) + other.fits.get(n, Fit()) for n in names}
        return Measure(
            size=self.size + other.size,
            zeros=self.zeros + other.zeros,
            nans=self.nans + other.nans,
            infs=self.infs + other.infs,
            masks=self.masks + other.masks,
            sum_of_squares=self.sum_of_squares + other.sum_of_squares,
            largest=max(self.largest, other.largest),
            smallest=min(self.smallest, other.smallest),
            histogram=dict(sorted(histogram.items())),
            fits=fits,
        )

    @property
    def log2_rms(self) -> float:
        """`log2` of the root of the mean square of the finite elements; -inf if all are zero."""
        finite = self.size - self.nans - self.infs - self.masks
        if not finite or not self.sum_of_squares:
            return -math.inf
        return math.log2(self.sum_of_squares / finite) / 2


def measure(array: Any, formats: Sequence[np.dtype] = DTYPES) -> Measure:
    """Measure an array of a floating or complex dtype; it is brought to the host."""
    own = jnp.dtype(array.dtype)
    values = np.asarray(array).ravel()
    if own.kind == "c":
        values = values.view(np.finfo(own).dtype)
    # Every narrow format fits into float32 exactly, its subnormals too.
    wide = values.astype(np.float64 if values.dtype == np.float64 else np.float32)
    size = np.abs(wide)
    finite = np.isfinite(size)
    nans = int(np.isnan(size).sum())
    masks = _masks(wide, own) & finite
    some = size[finite & (size > 0) & ~masks]
    masked = int(np.count_nonzero(masks))
    zeros = int(np.count_nonzero(wide == 0))
    infs = wide.size - nans - zeros - masked - some.size
    largest, smallest = (float(some.max()), float(some.min())) if some.size else (0.0, math.inf)
    exponents = np.frexp(some)[1] - 1
    first = int(exponents.min()) if some.size else 0
    counts = np.bincount(exponents - first) if some.size else ()
    return Measure(
        size=wide.size,
        zeros=zeros,
        nans=nans,
        infs=infs,
        masks=masked,
        sum_of_squares=float(np.sum(np.square(some, dtype=np.float64))),
        largest=largest,
        smallest=smallest,
        histogram={first + e: int(n) for e, n in enumerate(counts) if n},
        fits={d.name: fit(some, d, largest, smallest, infs) for d in formats},
    )


def _masks(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Which elements are masks: at the negative end, while the positive end is far away."""
    limit = mask_limit(dtype)
    if limit is None or not values.size or np.nanmax(values, initial=0) >= limit:
        return np.zeros(values.shape, bool)
    return values <= -limit


def mask_limit(dtype: Any) -> float | None:
    """Return the size from which on negative numbers of a dtype may be masks, or None."""
    finfo = jnp.finfo(dtype)
    return None if finfo.bits < 16 else min(float(finfo.max), _MASK)


def fit(some: np.ndarray, dtype: Any, largest: float, smallest: float, infs: int = 0) -> Fit:
    """Count what a dtype does not hold well, among positive finite numbers of a known range."""
    dtype = np.dtype(dtype)
    finfo = jnp.finfo(dtype)
    top, tiny = float(finfo.max), float(finfo.tiny)
    overflow = infs + (int(np.count_nonzero(some >= top)) if largest >= top else 0)
    if smallest >= tiny:
        return Fit(overflow=overflow)
    with np.errstate(under="ignore"):
        rounded = some[some < tiny].astype(dtype).astype(np.float64)
    underflow = int(np.count_nonzero(rounded == 0))
    subnormal = int(np.count_nonzero((rounded > 0) & (rounded < tiny)))
    return Fit(underflow, subnormal, overflow)


def as_formats(names: Sequence[Any]) -> tuple[np.dtype, ...]:
    """Return dtypes by their names.

    Raises:
        TypeError: for what is no real floating dtype.
    """
    formats = []
    for name in names:
        try:
            dtype = None if name is None else jnp.dtype(name)
        except TypeError:
            dtype = None
        if dtype is None or not dtypes.is_scalable(dtype) or dtype.kind == "c":
            raise TypeError(f"`formats` must name real floating dtypes, got {name!r}.")
        formats.append(np.dtype(dtype))
    return tuple(formats)
