"""How the numbers of a report are written."""

from __future__ import annotations

from collections.abc import Sequence

from jax_scalify.numerics.rows import Row

NONFINITE = "!: nan or inf; these rows come first, in the order of computation"
LOST = "lost: to zero / subnormal / at or beyond the largest finite value"


def header(formats: Sequence[str]) -> list[str]:
    """Return the titles of the columns."""
    titles = ["name", "pass", "primitive", "line", "shape", "dtype", "scale", "log2 rms"]
    return [*titles, "smallest", "largest", "lost", *(f"in {name}" for name in formats)]


def cells(row: Row, formats: Sequence[str]) -> list[str]:
    """Return what a row has in each column."""
    line = row.line.rpartition("/")[2].partition(" ")[0]
    return [
        f"! {row.name or '-'}" if row.nonfinite else row.name or "-",
        row.phase,
        row.primitive,
        line,
        shape_text(row.shape),
        row.dtype,
        exponents_text(row.scale),
        f"{row.log2_rms:.1f}",
        f"{row.measure.smallest:.1e}",
        f"{row.measure.largest:.1e}" if not row.nonfinite else f"{row.nonfinite} nonfinite",
        percent(row.shares()),
        *(percent(row.shares(name)) for name in formats),
    ]


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as `[8,64]`."""
    return f"[{','.join(map(str, shape))}]"


def exponents_text(scale: tuple[int, int] | None) -> str:
    """Return lowest and highest exponent of some scales, or the only one; `-` without any."""
    if scale is None:
        return "-"
    low, high = scale
    return str(low) if low == high else f"{low}..{high}"


def percent(shares: Sequence[float]) -> str:
    """Return shares in percent, with one sign for all; "0" if all are."""
    if not any(shares):
        return "0"
    return "/".join(map(_hundredths, shares)) + "%"


def _hundredths(share: float) -> str:
    if not share or share >= 0.1:
        return f"{100 * share:.0f}"
    return f"{100 * share:.1f}" if share >= 0.001 else "<.1"
