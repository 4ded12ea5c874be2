"""Pictures of the numbers of a computation: exponents as a heat map, and scales over training."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jax_scalify.numerics import heat_map
from jax_scalify.numerics.host_statistics import as_formats
from jax_scalify.numerics.report import Report
from jax_scalify.numerics.rows import PHASES, Row

# Okabe and Ito's colours, which everyone can tell apart; yellow is too pale for a line.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", ":")
_MAX_CURVES = 12


def plot_histogram(
    report: Report,
    file: Any,
    *,
    formats: Sequence[Any] | None = None,
    phases: Sequence[str] = ("forward", "backward", "input"),
    exponents: tuple[int, int] | None = None,
    title: str | None = None,
) -> None:
    """Draw the exponents of every tensor as a heat map: one row a tensor, one column an exponent.

    Colour is the share of a tensor's elements in `[2^e, 2^(e + 1))`; a column apart, left of the
    exponents, is for those that are zero, one on the right for nan and inf if there are any. Of a
    scaled tensor it is the data that is drawn, and a dot at the exponent of its scale. The passes
    are panels below one another, each in the order of computation; what has only one element is
    left out. What is beyond the exponents of the picture is drawn in its outermost columns.

    Args:
        report: what `jsa.numerics.report` has returned, or a part of it (`Report.filter`).
        file: path of the picture, or a binary file; the suffix says which kind (png, svg, pdf).
        formats: dtypes whose limits are drawn: the smallest subnormal and the smallest normal
            number, and the largest. By default those that the report was asked about, or float16.
        phases: which panels: "forward", "backward", "input" (weights, state, batch), "update".
        exponents: the first and the last one of the picture; by default all that some tensor has
            in more than 1% of its elements, and the range of the formats.
        title: above the picture.

    Raises:
        ImportError: if matplotlib is not installed.
        TypeError: if `report` is no `Report`, or `formats` has no dtypes.
        ValueError: if a phase is unknown, if exponents are not in order, or if no tensor is left to
            be drawn.

    Source: Blake et al., "Unit Scaling", 2023, figures 1 and A.4.

    Example:
        >>> seen = jsa.numerics.report(jnp.exp)(jnp.linspace(-9.0, 9.0))
        >>> jsa.numerics.plot_histogram(seen, "exp.png")  # doctest: +SKIP
    """
    if not isinstance(report, Report):
        raise TypeError(f"`report` must be a `Report`, got {type(report).__name__}.")
    phases = [phases] if isinstance(phases, str) else list(phases)
    _check_phases(phases)
    if exponents is not None and exponents[0] >= exponents[1]:
        raise ValueError(f"`exponents` must be a first and a larger last one, got {exponents}.")
    limits = [heat_map.Limits.of(d) for d in as_formats(formats or report.formats or ("float16",))]
    panels = _panels(report, phases)
    rows = [row for found in panels.values() for row in found]
    first, last = exponents or heat_map.shown_exponents(rows, limits)
    figure = heat_map.draw(_import("plot_histogram"), panels, limits, first, last)
    if title:
        figure.suptitle(title)
    figure.savefig(file, dpi=heat_map.DPI)


def _check_phases(phases: Sequence[str]) -> None:
    for phase in phases:
        if phase not in PHASES:
            raise ValueError(f"`phases` must be of {', '.join(PHASES)}, got {phase!r}.")


def _panels(report: Report, phases: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of more than one element of each phase that has some."""
    panels = {p: [r for r in report if r.phase == p and math.prod(r.shape) > 1] for p in phases}
    panels = {phase: rows for phase, rows in panels.items() if rows}
    if not panels:
        raise ValueError(
            f"`report` has no tensor of more than one element in the phases {', '.join(phases)}."
        )
    return panels


def plot_scales(
    history: str | PathLike[str] | Iterable[Mapping[str, Any]],
    file: Any,
    names: Sequence[str] | None = None,
    *,
    title: str | None = None,
) -> None:
    """Draw scale exponents and the log2 RMS of tensors over training.

    Args:
        history: one record for each step that was looked at, `{"step": int, "tensors": {name:
            {"scale_exponent": float, "log2_rms": float, ...}}}`, or the path of a file of JSON
            lines with them. What is missing, None or not finite leaves a gap: a plain tensor has no
            scale, zeros have no RMS.
        file: path of the picture, or a binary file; the suffix says which kind (png, svg, pdf).
        names: the tensors; by default the twelve whose scale or RMS has moved furthest.
        title: above the picture.

    Raises:
        ImportError: if matplotlib is not installed.
        TypeError: if `history` has something else than records.
        ValueError: if `history` or `names` is empty, or has no tensor of such a name.

    Example:
        >>> w = {"scale_exponent": -3.0, "log2_rms": 0.5}
        >>> history = [{"step": 0, "tensors": {"w": w}}, {"step": 10, "tensors": {"w": w}}]
        >>> jsa.numerics.plot_scales(history, "scales.png")  # doctest: +SKIP
    """
    records = _records(history)
    known = list(dict.fromkeys(name for record in records for name in record["tensors"]))
    if isinstance(names, str):
        names = [names]
    _check_names(names, known)
    curves = {name: _curve(records, name) for name in names or known}
    if names is None:
        curves = _most_moved(curves)

    figure = _import("plot_scales").figure.Figure(figsize=(8, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    lines = _draw_curves(above, below, [record["step"] for record in records], curves)
    _style_axes(above, below)
    texts = [heat_map.short(name.split("/")) for name in curves]
    figure.legend(lines, texts, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    more = len(known) - len(curves)
    if names is None and more:
        text = f"{more} other tensors moved less"
        above.set_title(text, loc="right", fontsize=8, color="#555555")
    if title:
        figure.suptitle(title)
    figure.savefig(file, dpi=heat_map.DPI)


def _check_names(names: Sequence[str] | None, known: Sequence[str]) -> None:
    if not known or names is not None and not names:
        raise ValueError("`names` is empty." if known else "`history` has no tensor.")
    for name in names or ():
        if name not in known:
            some = ", ".join(map(repr, known[:8])) + (", ..." if len(known) > 8 else "")
            raise ValueError(f"`names` must be of {some}, got {name!r}.")


def _most_moved(curves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The curves whose scale or RMS moves furthest, in the order given."""
    moved = sorted(curves, key=lambda name: -_movement(curves[name]))[:_MAX_CURVES]
    return {name: curve for name, curve in curves.items() if name in moved}


def _draw_curves(
    above: Any, below: Any, steps: Sequence[int], curves: Mapping[str, np.ndarray]
) -> list[Any]:
    """Draw scales above and RMS below; return the lines of the scales."""
    few = {"marker": "o", "markersize": 3} if len(steps) < 30 else {}
    lines = []
    for i, (name, (scales, rms)) in enumerate(curves.items()):
        dashes = _STYLES[i // len(_COLORS) % len(_STYLES)]
        style = dict(color=_COLORS[i % len(_COLORS)], linestyle=dashes, linewidth=1.4, **few)
        lines += above.plot(steps, scales, drawstyle="steps-post", label=name, **style)
        below.plot(steps, rms, **style)
    return lines


def _style_axes(above: Any, below: Any) -> None:
    above.set_ylabel("exponent of the scale")
    below.set(xlabel="step", ylabel="log2 of the RMS of the data")
    for ax in (above, below):
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.grid(color="#dddddd", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)


def _records(history: Any) -> list[Mapping[str, Any]]:
    """Return the records of a history, in the order of their steps."""
    source = "`history`"
    if isinstance(history, (str, PathLike)):
        source = f"`history` ({history})"
        lines = Path(history).read_text().splitlines()
        try:
            records = [json.loads(line) for line in lines if line.strip()]
        except json.JSONDecodeError as error:
            raise ValueError(f"{source} must be JSON, one record a line: {error}.") from error
    elif isinstance(history, Iterable) and not isinstance(history, Mapping):
        records = list(history)
    else:
        raise TypeError(f"{source} must be a list of records or a path, got {type(history)}.")
    for record in records:
        if not (
            isinstance(record, Mapping)
            and isinstance(record.get("step"), numbers.Integral)
            and isinstance(record.get("tensors"), Mapping)
            and all(isinstance(tensor, Mapping) for tensor in record["tensors"].values())
        ):
            raise TypeError(
                f'{source} must have records {{"step": int, "tensors": {{name: ...}}}}, got '
                f"{_cut(record)}."
            )
    if not records:
        raise ValueError(f"{source} is empty.")
    return sorted(records, key=lambda record: record["step"])


def _cut(record: Any) -> str:
    text = repr(record)
    return text if len(text) < 80 else f"{text[:77]}..."


def _curve(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Return scale exponents and log2 RMS of a tensor, nan where there is none."""
    found = [record["tensors"].get(name, {}) for record in records]
    keys = ("scale_exponent", "log2_rms")
    values = np.array([[tensor.get(key) for tensor in found] for key in keys], dtype=float)
    return np.where(np.isfinite(values), values, np.nan)


def _movement(curve: np.ndarray) -> float:
    """How far a scale or an RMS moves."""
    known = [values[~np.isnan(values)] for values in curve]
    return max(float(np.ptp(values)) if values.size else 0.0 for values in known)


def _import(function: str) -> Any:
    """Return matplotlib, with what is used of it imported."""
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.lines
        import matplotlib.patches
    except ImportError as error:
        raise ImportError(f"`{function}` needs matplotlib: `pip install matplotlib`.") from error
    return matplotlib
