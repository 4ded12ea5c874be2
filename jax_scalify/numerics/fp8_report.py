"""What `check_fp8` tells: a row for each matmul."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping

from jax_scalify.numerics import hlo
from jax_scalify.numerics.hlo import Sizes


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One matmul of a computation, as it was traced and as it was compiled.

    Attributes:
        name: the scopes that it was traced in, joined with "/".
        path: the same with the transforms, calls and loops around it.
        line: where the model calls it: `file:line (function)`.
        op: its primitive.
        phase: "forward", "backward", or "recompute" for the forward pass again, under remat.
        sizes: `batch` products of an `(m, k)` by a `(k, n)` matrix.
        lhs, rhs, out: dtypes as traced, in HLO's spelling: "f8e4m3fn", "f16"; or block formats.
        runs: how often an execution runs it, by the lengths of the scans around it; None in a
            `while` loop. A branch counts as if it were taken.
        eligible: whether a GPU could run it as an FP8 kernel of cuBLASLt, as it was traced.
        kernel: what was compiled: the library and the dtypes that it multiplies.
        is_fp8: whether this kernel multiplies FP8 numbers; None where it is not known.
        notes: why it is not eligible, why it fell back, and what is not certain.
    """

    name: str
    path: str
    line: str
    op: str
    phase: str
    sizes: Sizes
    lhs: str
    rhs: str
    out: str
    runs: int | None
    eligible: bool
    kernel: str
    is_fp8: bool | None
    notes: tuple[str, ...]

    @property
    def has_fp8_operands(self) -> bool:
        """Whether both operands were traced as FP8, or in block formats."""
        return all(hlo.is_fp8(x) or self.is_of_blocks for x in (self.lhs, self.rhs))

    @property
    def is_of_blocks(self) -> bool:
        """Whether its operands are in block formats."""
        return self.op == "block_dot_general"

    @property
    def library(self) -> str:
        """What computes it, without the dtypes."""
        return " or ".join(dict.fromkeys(k.split(" ")[0] for k in self.kernel.split(" or ")))


@dataclasses.dataclass(frozen=True, repr=False)
class Fp8Report:
    """What `check_fp8` found; printed, a table.

    Attributes:
        rows: one for each matmul, in the order of the trace.
        backend: that the computation was compiled for; None if it was not compiled.
        unmatched: kernels of compiled matmuls that belong to no traced one.
    """

    rows: tuple[Matmul, ...]
    backend: str | None
    unmatched: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """How many matmuls have FP8 operands, what the others have, and how many run as FP8."""
        if not self.rows:
            return "No matmul in this computation."
        if self.backend is None:
            return f"{self._operands}; {self._eligible} (not compiled)."
        text = f"{self._operands}; {self._runs}"
        if not self._on_gpu:
            return f"{text}; {self._eligible}."
        fallen = sum(r.eligible and r.is_fp8 is False for r in self.rows)
        return f"{text}, {fallen} eligible ones fell back." if fallen else f"{text}."

    @property
    def _on_gpu(self) -> bool:
        return self.backend in ("gpu", "cuda", "rocm")

    @property
    def _eligible(self) -> str:
        """How many matmuls a GPU could run as FP8 kernels, and how many only a Blackwell GPU."""
        eligible = [r for r in self.rows if r.eligible]
        blocks = sum(r.is_of_blocks for r in eligible)
        if blocks and blocks == len(eligible):
            return f"{blocks} would be eligible on a Blackwell GPU"
        text = f"{len(eligible)} would be eligible on a GPU"
        return f"{text}, {blocks} of them on a Blackwell GPU" if blocks else text

    @property
    def _operands(self) -> str:
        """How many matmuls have FP8 operands, and what the others have."""
        total, narrow = len(self.rows), sum(r.has_fp8_operands for r in self.rows)
        others = collections.Counter(
            f"{r.lhs} x {r.rhs}" for r in self.rows if not r.has_fp8_operands
        )
        text = f"{narrow} of {total} matmuls have FP8 operands"
        return text + "".join(f", {n} {operands}" for operands, n in others.most_common())

    @property
    def _runs(self) -> str:
        """How many matmuls run as FP8, in which libraries, and of how many it is not known."""
        fast = collections.Counter(r.library for r in self.rows if r.is_fp8)
        text = f"{fast.total()} run as FP8"
        counts = [f"{name}: {n}" for name, n in fast.items()] if len(fast) > 1 else list(fast)
        text += f" ({', '.join(counts)})" if counts else ""
        text += "" if self._on_gpu else f" on this {self.backend}"
        unknown = sum(r.is_fp8 is None for r in self.rows)
        return f"{text}, {unknown} unknown" if unknown else text

    def __str__(self) -> str:
        if not self.rows:
            return self.summary
        counts = collections.Counter(note for r in self.rows for note in r.notes)
        numbers = {note: i for i, note in enumerate(counts, start=1)}
        header = ["name", "line", "pass", "batch", "M", "K", "N", "runs"]
        header += ["operands", "result", "eligible", "kernel", "notes"]
        table = [header, *(_cells(r, numbers) for r in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in table]
        lines += [f"[{numbers[note]}] {count}x: {note}" for note, count in counts.items()]
        if self.unmatched:
            kinds = collections.Counter(self.unmatched)
            found = ", ".join(f"{kernel} ({count}x)" for kernel, count in kinds.items())
            lines.append(f"Compiled matmuls that match no traced one: {found}")
        return "\n".join([*lines, self.summary])

    __repr__ = __str__

    def to_json(self) -> str:
        """Return rows and summary as JSON."""
        return json.dumps({"summary": self.summary, **dataclasses.asdict(self)}, indent=2)


def _cells(row: Matmul, numbers: Mapping[str, int]) -> list[str]:
    """A matmul as a line of the table, given the numbers of the notes."""
    sizes = map(str, dataclasses.astuple(row.sizes))
    runs = "?" if row.runs is None else str(row.runs)
    line = row.line.rpartition("/")[2].partition(" ")[0]
    cells = [row.name or "-", line, row.phase, *sizes, runs, f"{row.lhs} x {row.rhs}", row.out]
    notes = " ".join(f"[{numbers[note]}]" for note in row.notes)
    return [*cells, "yes" if row.eligible else "no", row.kernel, notes]
