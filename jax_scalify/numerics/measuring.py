"""What a calibration knows of a tensor, and how it is measured on the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.base import dtypes
from jax_scalify.base.pow2 import MAX_EXPONENT
from jax_scalify.conversions.freezing import octaves_too_high
from jax_scalify.numerics import device_statistics
from jax_scalify.numerics.host_statistics import mask_limit
from jax_scalify.numerics.instrumenting import Watcher
from jax_scalify.numerics.interpreting import scaled_arguments

ROLES = ("operand", "gradient", "value", "state")
# How many octaves the RMS of data may be away from 1. FP8 has room for little else than its digits;
# float16 has normal numbers for eight octaves below, and its squares have, for ten above.
_BANDS = {8: 2, 16: 6}
_LOWEST = -6  # exponent of the largest element of state
_SPREAD = 6  # octaves by which it is to be above the smallest normal number, for the others
LOST = 0.01  # share of the elements of a value that is worth an entry
_DIGITS = 4  # octaves by which the RMS is above the smallest normal number, for most digits
_STEPS = 256  # of loops that are told apart; of more, neighbours are taken together
_TOGETHER = 2**20  # elements of several values that are looked at together
_STACKED = 32  # values that are: of more, XLA makes one kernel that takes the longer to compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a tensor, with its correction.

    Attributes:
        role: "operand" of a matmul, "gradient" of the state, another "value" or "state".
        dtype: that it is stored in, or that a cast stores it in.
        log2_rms: `log2` of the root mean square of the finite data; -inf if all is zero.
        log2_max: `log2` of the largest finite element.
        scale: exponent of its largest scale; None for a plain value, and for scale 0.
        underflow: share of the elements that are not zero, and subnormal or zero in `dtype`.
        overflow: share at or beyond its largest finite value: a cast to FP8 saturates them.
        nonfinite: share that is nan or infinite.
        correction: exponent of the power of two that moves from the data to the scale.
        line: where the user's code makes it; empty for state.
    """

    role: str
    dtype: str
    log2_rms: float
    log2_max: float
    scale: int | None = None
    underflow: float = 0.0
    overflow: float = 0.0
    nonfinite: float = 0.0
    correction: int = 0
    line: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, `None` for what is not finite."""
        fields = dataclasses.asdict(self)
        numbers = {n: round(x, 6) for n, x in fields.items() if isinstance(x, float)}
        return fields | {n: x if math.isfinite(x) else None for n, x in numbers.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Measured:
        """Make it of what `as_dict` returns."""
        missing = {n: -math.inf for n in ("log2_rms", "log2_max") if fields.get(n) is None}
        return cls(**{**fields, **missing})


def excess(log2_rms: float, log2_max: float, dtype: Any) -> int:
    """The exponent by which data should be divided: 0 for data within the band of its dtype.

    The band: the RMS is within some octaves of 1, and the largest element an octave below the
    largest number. Data outside is brought to RMS 1 or, where its largest element would be less
    than two octaves from the top then, to that.
    """
    dtype = jnp.dtype(dtype)
    if not dtypes.is_narrow(dtype) or not math.isfinite(log2_rms):
        return 0
    top = math.log2(float(jnp.finfo(dtype).max))
    if abs(log2_rms) <= _BANDS[jnp.finfo(dtype).bits] and log2_max <= top - 1:
        return 0
    exponent = round(log2_rms)
    return max(exponent, math.ceil(log2_max - top + 2)) if math.isfinite(log2_max) else exponent


def excess_of_state(log2_rms: float, log2_max: float, dtype: Any) -> int:
    """The same of state, whose band is where its largest element is: squares fill the range.

    What is stored in float16 may grow by three octaves; in FP8, which saturates, by one.
    """
    dtype = jnp.dtype(dtype)
    if not dtypes.is_narrow(dtype) or not math.isfinite(log2_max):
        return 0
    finfo = jnp.finfo(dtype)
    highest = math.log2(float(finfo.max)) - (1 if finfo.bits <= 8 else 3)
    lowest = max(_LOWEST, int(finfo.minexp) + _SPREAD)
    least = math.ceil(log2_max - highest + 1)
    if log2_max > highest:
        return least
    return max(round(log2_rms), least) if log2_max < lowest else 0


def at_frozen_scale(m: Measured) -> Measured:
    """A leaf of state at the static scale that it will get.

    It leaves room above the largest element. A gradient that is a thousand times as large as those
    before makes a second moment a thousand times as large (1 - b2 of its square): at the top of the
    range it would saturate, and be divided by.
    """
    exponent = excess_of_state(m.log2_rms, m.log2_max, m.dtype)
    exponent = int(max(exponent, octaves_too_high(m.log2_max, jnp.dtype(m.dtype))))
    if m.scale is None or not exponent:
        return m
    exponent = max(-MAX_EXPONENT, min(MAX_EXPONENT, m.scale + exponent)) - m.scale
    moved = dict(log2_rms=m.log2_rms - exponent, log2_max=m.log2_max - exponent)
    return dataclasses.replace(m, scale=m.scale + exponent, **moved)


def at_scale_of(m: Measured, other: Measured | None) -> Measured:
    """What was measured, as it would be at the scale of another measurement."""
    if other is None or other.scale is None:
        return m
    away = (m.scale or 0) - other.scale  # a plain leaf is its values
    moved = dict(log2_rms=m.log2_rms + away, log2_max=m.log2_max + away)
    return dataclasses.replace(m, scale=other.scale, **moved)


def observe(data: jax.Array, scale: Any = None, dtype: Any = None) -> jax.Array:
    """What `device_statistics.observe` returns, and the largest size of an element, not masks."""
    row = device_statistics.observe(data, scale, dtype)
    size = jnp.abs(data).astype(jnp.float32)
    limit = mask_limit(data.dtype)
    ordinary = jnp.isfinite(size)
    if limit is not None and jnp.issubdtype(data.dtype, jnp.floating):
        ordinary &= data > np.array(-limit, data.dtype)
    return jnp.append(row, jnp.max(jnp.where(ordinary, size, 0), initial=0))


def combine(rows: jax.Array) -> jax.Array:
    """What `observe` would return of several arrays together."""
    return jnp.append(device_statistics.combine(rows[:, :-1]), jnp.max(rows[:, -1]))


combine_each = jax.jit(jax.vmap(combine))


def _absent() -> jax.Array:
    """What `observe` would return of no array."""
    return jnp.append(device_statistics.absent(), 0)


def _rows(lengths: Sequence[int]) -> int:
    """How many rows there are of a value in loops of these lengths, outermost first."""
    count = 1
    for length in reversed(lengths):
        count = min(_STEPS, length * count)
    return count


def _few(rows: jax.Array, absent: jax.Array, combine: Callable[[jax.Array], jax.Array]) -> Any:
    """Rows of the steps of loops, neighbours combined where there are too many."""
    rows = rows.reshape(-1, *absent.shape)
    if len(rows) <= _STEPS:
        return rows
    rest = jnp.broadcast_to(absent, (-len(rows) % _STEPS, *absent.shape))
    return jax.vmap(combine)(jnp.concatenate([rows, rest]).reshape(_STEPS, -1, *absent.shape))


class _Waiting(NamedTuple):
    """What `observe` is to look at, together with others."""

    data: jax.Array
    scale: Any
    dtype: Any

    @property
    def kind(self) -> tuple[Any, ...]:
        """What those have in common that are looked at together."""
        return self.data.size, self.data.dtype, self.scale is None, self.dtype


class StatisticsWatcher(Watcher):
    """A `Watcher` that keeps the largest element as well, and rows of the steps of loops.

    Small values of one size wait until all of them are there: one `observe` of many compiles in a
    fraction of the time of many of it, and next to no memory is held for that.
    """

    def absent(self, lengths: Sequence[int]) -> jax.Array:
        """Rows of what is not computed."""
        return jnp.broadcast_to(_absent(), (_rows(lengths), len(_absent())))

    def combine(self, found: jax.Array) -> jax.Array:
        """Rows of a value in a loop."""
        return _few(found, _absent(), combine)

    def observe(self, data: jax.Array, scale: Any, dtype: Any) -> Any:
        """The statistics of a value, or that it waits; see `observe`."""
        if data.size > _TOGETHER:
            return observe(data, scale, dtype)[None]
        if scale is not None:
            scale = jnp.max(scale, initial=0) if jnp.ndim(scale) else jnp.asarray(scale)
        return _Waiting(jnp.ravel(data), scale, dtype)

    def run(
        self, closed: Any, operands: Sequence[Any], position: tuple[int, ...] = ()
    ) -> tuple[list[Any], dict[Any, jax.Array]]:
        """Look at what waits in this body, too."""
        results, seen = super().run(closed, operands, position)
        waiting = {key: one for key, one in seen.items() if isinstance(one, _Waiting)}
        kinds: dict[Any, list[Any]] = {}
        for key, one in waiting.items():
            kinds.setdefault(one.kind, []).append(key)
        for (size, _, _, dtype), keys in kinds.items():
            count = min(_STACKED, max(1, _TOGETHER // max(1, size)))
            for some in (keys[i : i + count] for i in range(0, len(keys), count)):
                data = jnp.stack([waiting[key].data for key in some])
                scales = [waiting[key].scale for key in some]
                scale = None if scales[0] is None else jnp.stack(scales)
                rows = jax.vmap(lambda x, s, dtype=dtype: observe(x, s, dtype))(data, scale)
                seen.update(zip(some, rows[:, None], strict=True))
        return results, seen


class ScaleWatcher(Watcher):
    """A `Watcher` of nothing but scales, in as many rows; nan where there is none."""

    def absent(self, lengths: Sequence[int]) -> jax.Array:
        """Rows of what is not computed."""
        return jnp.full(_rows(lengths), jnp.nan, jnp.float32)

    def combine(self, found: jax.Array) -> jax.Array:
        """Rows of a value in a loop."""
        return _few(found, jnp.float32(jnp.nan), jnp.nanmax)

    def observe(self, data: jax.Array, scale: Any, dtype: Any) -> jax.Array:
        """The largest scale of a value."""
        del data, dtype
        scale = jnp.nan if scale is None else jnp.max(scale, initial=0)
        return jnp.float32(scale)[None]


@jax.jit
def _finish(rows: jax.Array) -> dict[str, jax.Array]:
    largest = rows[:, -1]
    return device_statistics.finish(rows[:, :-1]) | {"log2_max": jnp.log2(largest)}


def finish(rows: jax.Array, known: Sequence[dict[str, Any]]) -> list[Measured | None]:
    """Make of rows what they tell; None of a value that was never computed.

    Args:
        rows: of `observe` or `combine`, one for each value.
        known: of each value its role, dtype, correction and line.
    """
    found = {name: np.asarray(x, np.float64) for name, x in _finish(rows).items()}
    shares = ("underflow", "overflow", "nonfinite")
    out = []
    for i, fields in enumerate(known):
        if math.isnan(found["log2_rms"][i]):
            out.append(None)
            continue
        scale = found["scale_exponent"][i]
        numbers = {n: float(found[n][i]) for n in ("log2_rms", "log2_max", *shares)}
        exponent = int(scale) if math.isfinite(scale) else None
        out.append(Measured(**{**fields, **numbers, "scale": exponent}))
    return out


@dataclasses.dataclass(frozen=True)
class Steps:
    """What was measured of a value in each step of the loops around it; one step is no loop.

    Attributes:
        log2_rms, log2_max: of its data; nan where it was not computed.
        scale: exponents.
        lost: share that is infinite, nan or at the largest finite value, or beyond it.
    """

    log2_rms: np.ndarray
    log2_max: np.ndarray
    scale: np.ndarray
    lost: np.ndarray

    @classmethod
    def of(cls, rows: jax.Array) -> Steps:
        """Make them of rows of `observe` or `combine`, one for each step."""
        found = {name: np.asarray(x, np.float64) for name, x in _finish(rows).items()}
        lost = found["overflow"] + found["nonfinite"]
        return cls(found["log2_rms"], found["log2_max"], found["scale_exponent"], lost)

    def at(self, m: Measured, scale: np.ndarray) -> Measured:
        """What of a value was measured, as it would be with the scales of other exponents."""
        away = self.scale - scale
        rms = self.log2_rms + away
        if not np.isfinite(rms).any():
            return m
        rms = _mean(rms[~np.isnan(rms)])
        largest, highest = float(np.nanmax(self.log2_max + away)), int(np.nanmax(scale))
        return dataclasses.replace(m, log2_rms=rms, log2_max=largest, scale=highest)

    def excess(self, scale: np.ndarray, dtype: Any) -> tuple[int, float]:
        """The exponent by which data should be divided that has the scales of other exponents.

        If no step is above its band, and none so far below that it has lost digits, that is what
        brings the RMS to 1; else it balances the two. It comes with how far they are away. What has
        saturated was larger than what was seen, and is not below.
        """
        away, finfo = self.scale - scale, jnp.finfo(dtype)
        rms, largest = self.log2_rms + away, self.log2_max + away
        known = np.isfinite(rms)
        if not known.any():
            return 0, 0.0
        high, top = float(rms[known].max()), float(largest[known].max())
        low = float(rms.min(where=known & (self.lost <= LOST), initial=high))
        band = _BANDS[finfo.bits]
        above, below = high - band, -low - max(band, -finfo.minexp - _DIGITS)
        room = excess(0.0, top, dtype)
        far = max(above, below, room, 0.0)
        middle = round((above - below) / 2 if far else _mean(rms[known]))
        return max(middle, room) if room > 0 else middle, far


def _mean(log2_rms: np.ndarray) -> float:
    """`log2` of the RMS of all, given those of some."""
    top = log2_rms.max()
    return float(top + math.log2(np.mean(4.0 ** (log2_rms - top))) / 2)


def state_leaves(state: Any) -> dict[str, tuple[Any, Any]]:
    """Data and scale of the floating leaves of a step's first argument, by its names."""
    found = ((name, jnp.asarray(x), scale) for name, x, scale in scaled_arguments((state,), {}))
    return {n: (x, scale) for n, x, scale in found if dtypes.is_scalable(x.dtype)}


_observe_one = jax.jit(observe)
_stack = jax.jit(jnp.stack)


@jax.debug_nans(False)  # statistics of no number are nan
def measure_state(state: Any) -> dict[str, Measured]:
    """Measure the floating leaves of a state.

    Leaves of one shape, dtype and sharding share a program: one of all leaves compiles as long as
    there are layers.
    """
    leaves = state_leaves(state)
    if not leaves:
        return {}
    rows = _stack([_observe_one(x, scale) for x, scale in leaves.values()])
    known = [{"role": "state", "dtype": jnp.dtype(x.dtype).name} for x, _ in leaves.values()]
    found = finish(rows, known)
    return {name: m for name, m in zip(leaves, found, strict=True) if m is not None}
