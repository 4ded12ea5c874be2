"""What was measured of a training step once, so that it needs no statistics from then on."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.conversions.freezing import largest_finite, times_power
from jax_scalify.conversions.nnx_objects import shares_scaled
from jax_scalify.interpreter.corrections import Corrections
from jax_scalify.interpreter.observing import is_observing
from jax_scalify.interpreter.tracing import argument_name
from jax_scalify.numerics.equations import Equations, Result
from jax_scalify.numerics.guarding import Verdict, judge
from jax_scalify.numerics.measuring import Measured, at_scale_of, measure_state
from jax_scalify.numerics.tracking import Record

FILE_NAME = "calibration.json"
_VERSION = 1
_SHOWN, _NAMED = 40, 5


def check_unshared(state: Any) -> None:
    """Refuse NNX objects that share a variable: as a pytree, it would become two."""
    if shares_scaled(state):
        raise ValueError(
            "NNX objects in `state` share a variable, as tied weights do: calibrate a step of what "
            "`nnx.split` returns."
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Calibration:
    """Hold what `calibrate` has measured. Printed, it is a table: what loses most comes first.

    `jsa.scalify(step, calibration=c)` corrects the scales of values whose data would leave the band
    of its dtype, `freeze` gives the state its static scales, and `guard` tells when to calibrate
    again. The corrections are constants of the compiled step: no statistic is left in it.

    Names are those of `jsa.numerics.track`. They are made of scopes, pass, primitive and a number,
    and so are the same on another mesh, for another batch size, and after a restart.

    Attributes:
        values: by name, what was measured of matmul operands in both passes, of gradients, and of
            other values that were corrected or lose something.
        state: by name, what was measured of weights and moments.
        steps: that were run.
        unseen: names of matmul operands that were not computed: constants, results of `while`
            loops and kernels, what is in branches that were not taken.

    Example:
        >>> @jax.jit
        ... def step(w, x):
        ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        >>> w = jsa.as_scaled_array(jnp.ones((4, 4)), scale="rms", dtype=jnp.float16)
        >>> c = jsa.calibrate(step, w, jnp.eye(4, dtype=jnp.float16), steps=2)
        >>> print(c.freeze(w).scale, c.state["args[0]"].dtype)
        1.0 float16
    """

    values: Mapping[str, Measured]
    state: Mapping[str, Measured]
    steps: int = 1
    unseen: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values) + len(self.state)

    def __iter__(self) -> Iterator[str]:
        yield from self.state
        yield from self.values

    def __getitem__(self, name: str) -> Measured:
        """What was measured of a value, or of a leaf of the state."""
        found = self.state.get(name) or self.values.get(name)
        if found is None:
            raise KeyError(f"{name!r} was not calibrated.{_near(name, list(self))}")
        return found

    @property
    def exponents(self) -> dict[str, int]:
        """The corrections that are not 1, as exponents of powers of two, by name."""
        return {name: m.correction for name, m in self.values.items() if m.correction}

    def corrections(self, closed: Any, arguments: Sequence[str]) -> Corrections | None:
        """Return what `scalify` corrects in a traced function, or None if that is nothing.

        Raises:
            ValueError: if less than half of the values that were calibrated are in the function.

        Warns:
            UserWarning: if some are not, or if matmul operands of it were not calibrated.
        """
        equations = Equations(closed, arguments)
        self._check(equations.results)
        return equations.corrections(self.exponents, named=is_observing.value)

    def scale_of(self, argument: str) -> int | None:
        """Return the exponent of the scale that a leaf was calibrated with, if it has a scale."""
        m = self.state.get(argument)
        return None if m is None else m.scale

    def _check(self, results: Mapping[str, Result]) -> None:
        missing = [name for name in self.values if name not in results]
        known = {*self.values, *self.unseen}
        new = [r for r in results.values() if r.is_operand and r.name not in known]
        if not missing and not new:
            return
        text = []
        if missing:
            text.append(f"{len(missing)} of its {len(self.values)} values are not in the step, as ")
            text[-1] += _some(missing)
        if new:
            lines = [f"{r.name} at {_short(r.line)}" if r.line else r.name for r in new]
            text.append(f"{len(new)} matmul operands of the step are not in it, as {_some(lines)}")
        message = f"`calibration` does not fit the step: {'; '.join(text)}."
        if len(missing) > len(self.values) / 2:
            raise ValueError(f"{message} It is that of another step: `jsa.calibrate` this one.")
        warnings.warn(f"{message} `jsa.calibrate` the step again.", stacklevel=4)

    def freeze(self, state: Any) -> Any:
        """Give a state the static scales that it was calibrated with.

        Scales that are not scalar stay as they are, and so do plain leaves. A leaf that is zero,
        as a moment before the first step, gets its scale as well.

        Args:
            state: that of the step, with concrete arrays; its scales may be dynamic or static.

        Raises:
            TypeError: if a scale is traced.
            ValueError: if it has other leaves than the state that was calibrated, or one that the
                calibrated scale would make infinite; if NNX objects in it share a variable.
        """
        check_unshared(state)
        leaves = jax.tree_util.tree_leaves_with_path(((state,), {}), is_leaf=is_scaled)
        scaled = [argument_name(path) for path, leaf in leaves if is_scaled(leaf)]
        known = [name for name, m in self.state.items() if m.scale is not None]
        other = [f"{n} was not calibrated" for n in scaled if n not in self.state]
        plain = {argument_name(path) for path, _ in leaves} - {*scaled}
        other += [
            f"{n} is plain: `jsa.as_scaled_array(state)`" if n in plain else f"{n} is missing"
            for n in known
            if n not in scaled
        ]
        if other:
            raise ValueError(
                f"`state` is not the state that was calibrated: {_some(other, sep='; ')}."
            )

        def freeze(path: tuple, leaf: Any) -> Any:
            if not is_scaled(leaf) or (not leaf.is_static and np.ndim(leaf.scale)):
                return leaf
            name = argument_name(
                (jax.tree_util.SequenceKey(0), jax.tree_util.SequenceKey(0), *path)
            )
            return _frozen(leaf, self.state[name], name)

        return jax.tree_util.tree_map_with_path(freeze, state, is_leaf=is_scaled)

    def watches(self, name: str) -> bool:
        """Return whether a guard looks at a value of the step: the `select` of `track`."""
        return name in self.values

    def guard(self, state: Any = None, metrics: Record | None = None) -> Verdict:
        """Tell which tensors have left the bands that they were calibrated for, and what to do.

        A tensor has left its band if the RMS of its data is outside of that of its dtype, and has
        moved by more than 3 octaves; if more than one element in a thousand saturates, and twice as
        many as when it was calibrated; or if 25% more of a matmul operand's elements underflow.
        What has the range of float32 has no band: it may be not finite only.

        Args:
            state: that of the step now, measured by small programs; or None. What has another
                scale than `freeze` gives it is judged as if it had that.
            metrics: what `jsa.numerics.track(step, c.watches, ...)` returns with a step, where
                `step` is `scalify(step, calibration=c)`; or None.

        Returns:
            A `jsa.numerics.Verdict`: true if the step should be calibrated again, it prints why.

        Raises:
            TypeError: if `metrics` is no `Record`.
            ValueError: if there is nothing in common with what was calibrated.
        """
        now: dict[str, Mapping[str, float]] = {}
        if state is not None:
            found = measure_state(state).items()
            now |= {name: vars(at_scale_of(m, self.state.get(name))) for name, m in found}
        if metrics is not None:
            if not isinstance(metrics, Record):
                raise TypeError(f"`metrics` must be a Record, got {type(metrics).__name__}.")
            now |= {n: row for n, row in _rows(metrics).items() if n not in self.state}
        if (state is not None or metrics is not None) and now.keys().isdisjoint(self):
            raise ValueError(
                "Nothing of `state` and `metrics` was calibrated: give the state of the step, and "
                "a record of `jsa.numerics.track(step, calibration.watches)`."
            )
        return judge({**self.values, **self.state}, now)

    def diff(self, other: Calibration) -> list[str]:
        """Say in which ways another calibration differs, a sentence for each tensor.

        Differences are names that one of them lacks, other dtypes and corrections, scales of state,
        and data that differs by more than an octave.
        """
        lines = []
        for name in dict.fromkeys([*self, *other]):
            mine, theirs = (c.state.get(name) or c.values.get(name) for c in (self, other))
            if mine is None or theirs is None:
                lines.append(
                    f"{name}: {'only in the other' if mine is None else 'not in the other'}"
                )
                continue
            found = [
                f"{label} {a}, {b} in the other"
                for label, a, b in (
                    ("dtype", mine.dtype, theirs.dtype),
                    ("correction 2^", mine.correction, theirs.correction),
                    (
                        "scale 2^",
                        *((m.scale if m.role == "state" else None) for m in (mine, theirs)),
                    ),
                )
                if a != b
            ]
            if _apart(mine.log2_rms, theirs.log2_rms) > 1:
                found.append(f"RMS 2^{mine.log2_rms:.1f}, 2^{theirs.log2_rms:.1f} in the other")
            if found:
                lines.append(f"{name}: {'; '.join(found).replace('^ ', '^')}")
        return lines

    def __str__(self) -> str:
        every = {**self.state, **self.values}
        order = sorted(every, key=lambda n: _badness(every[n]), reverse=True)
        table = [("name", "role", "dtype", "scale", "log2 rms", "log2 max", "lost", "correction")]
        table += [_cells(name, every[name]) for name in order[:_SHOWN]]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in table]
        if len(order) > _SHOWN:
            lines.append(f"... and {len(order) - _SHOWN} more")
        lines.append("lost: underflow / at or beyond the largest finite value")
        return "\n".join([*lines, self.summary])

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """How many tensors there are, how many are corrected, and how many still lose."""
        every = [*self.state.values(), *self.values.values()]
        lossy = sum(max(m.underflow, m.overflow, m.nonfinite) > 0.01 for m in every)
        operands = sum(m.role == "operand" for m in every)
        return (
            f"{len(self.state)} leaves of state, {operands} matmul operands, "
            f"{len(self.values) - operands} other values; {len(self.exponents)} corrected, "
            f"{lossy} lose more than 1%; {self.steps} steps."
        )

    def to_json(self) -> str:
        """Return it as JSON, a line for each tensor."""
        head = {"version": _VERSION, "steps": self.steps, "unseen": self.unseen}
        parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
        for key, group in (("state", self.state), ("values", self.values)):
            rows = (f"{json.dumps(n)}: {json.dumps(m.as_dict())}" for n, m in group.items())
            parts.append(f'"{key}": {{\n' + ",\n".join(rows) + "\n}")
        return "{" + ",\n".join(parts) + "}\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Make it of what `to_json` returns.

        Raises:
            ValueError: if that is nothing of the kind.
        """
        try:
            found = json.loads(text)
            if found["version"] != _VERSION:
                raise ValueError(f"it has version {found['version']}, this is {_VERSION}")
            groups = [
                {name: Measured.from_dict(m) for name, m in found[key].items()}
                for key in ("values", "state")
            ]
            return cls(*groups, steps=found["steps"], unseen=tuple(found["unseen"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The text is no calibration of `to_json`: {error}.") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file or, beside what is there, to `calibration.json` in a directory.

        The directory may be a checkpoint, which can be restored as before.
        """
        _file(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `save` has written.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is no calibration.

        Example:
            >>> import tempfile
            >>> path = tempfile.mkdtemp()
            >>> jsa.Calibration({}, {}, steps=3).save(path)
            >>> jsa.Calibration.load(path).steps
            3
        """
        return cls.from_json(_file(path).read_text())


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def _frozen(leaf: ScaledArray, m: Measured, name: str) -> ScaledArray:
    if _compat.is_traced(leaf.data) or _compat.is_traced(leaf.scale):
        raise TypeError(
            f"`state`: {name} must be concrete: call `freeze` outside of `jit`, between two steps."
        )
    exponent, own = m.scale, float(leaf.scale)
    if exponent is None:  # it was zero in all steps
        return ScaledArray(leaf.data, own)
    if not own:
        return ScaledArray(leaf.data, 2.0**exponent)
    factor = round(math.log2(own)) - exponent
    if not factor:
        return ScaledArray(leaf.data, own)
    if math.ldexp(float(largest_finite(leaf.data)), factor) > float(jnp.finfo(leaf.dtype).max):
        raise ValueError(
            f"`state`: {name} has grown beyond the scale 2^{exponent} that it was calibrated with: "
            "`jsa.calibrate` the step with this state."
        )
    return ScaledArray(times_power(leaf.data, factor), 2.0**exponent)


def _rows(record: Record) -> dict[str, dict[str, float]]:
    """What a record tells of each value, on the host."""
    fields = ("log2_rms", "underflow", "overflow", "nonfinite")
    arrays = jax.device_get([getattr(record, field) for field in fields])
    return {
        name: dict(zip(fields, map(float, numbers)), log2_max=-math.inf)
        for name, *numbers in zip(record.names, *arrays, strict=True)
    }


def _badness(m: Measured) -> tuple[float, int]:
    return 10 * m.nonfinite + m.overflow + m.underflow + (m.correction != 0), abs(m.correction)


def _apart(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b)


def _cells(name: str, m: Measured) -> tuple[str, ...]:
    lost = f"{m.underflow:.2%} / {m.overflow:.2%}" if m.underflow or m.overflow else "0"
    lost = f"{m.nonfinite:.1%} not finite" if m.nonfinite else lost
    scale = "-" if m.scale is None else str(m.scale)
    numbers = f"{m.log2_rms:.1f}", f"{m.log2_max:.1f}"
    return name, m.role, m.dtype, scale, *numbers, lost, str(m.correction) if m.correction else ""


def _short(line: str) -> str:
    return line.rpartition("/")[2].partition(" ")[0]


def _some(names: Sequence[str], sep: str = ", ") -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return sep.join(names[:_NAMED]) + more


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
    return f" There are {', '.join(map(repr, near))}." if near else ""
