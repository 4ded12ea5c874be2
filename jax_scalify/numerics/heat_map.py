"""A heat map: one row a tensor, one column an exponent, and the limits of dtypes."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_scalify.base import dtypes
from jax_scalify.numerics.rows import Row

_TITLES = {"input": "weights, state, batch"}
# Of Okabe and Ito's colours, which everyone can tell apart.
_LIMITS = ("#000000", "#0072B2", "#CC79A7", "#D55E00")
_DASHES = (":", "--", "-")  # smallest subnormal, smallest normal, largest
_GREYS = ("#d9d9d9", "#efefef")
_SCALE = {"color": "#D55E00", "edgecolors": "white", "linewidths": 0.4}
_SEEN = 0.01  # an exponent is in the picture if that share of a tensor has it
_LABEL = 0.135  # height of a label in inches
_MAX_HEIGHT = 40.0
_WIDTH = 7.4  # on a page 700 pixels wide a label of 7 points is 9 pixels high
_MAX_LABEL = 46
DPI = 120


@dataclasses.dataclass(frozen=True)
class Limits:
    """The range of a dtype, in exponents of two.

    Attributes:
        name: of the dtype.
        subnormal: of the smallest number.
        normal: of the smallest normal number.
        largest: of the largest finite number, no integer.
        is_short: whether they are those of a short range, which are always in the picture.
    """

    name: str
    subnormal: int
    normal: int
    largest: float
    is_short: bool

    @property
    def edges(self) -> tuple[float, float, float]:
        """Where numbers stop being rounded to zero, being subnormal, and being finite."""
        return self.subnormal - 1, self.normal, self.largest

    @classmethod
    def of(cls, dtype: Any) -> Limits:
        """Return those of a dtype."""
        finfo, name = jnp.finfo(dtype), jnp.dtype(dtype).name
        # XLA's settings of the processor may flush a subnormal number that is asked for.
        smallest, largest = finfo.minexp - finfo.nmant, math.log2(float(finfo.max))
        return cls(name, smallest, finfo.minexp, largest, dtypes.is_narrow(dtype))


def label(row: Row) -> tuple[str, ...]:
    """Return the parts of a row's label, from the outermost module to its primitive.

    Example:
        >>> rows = jsa.numerics.report(lambda args: args["layers"][0]["w"] * 2)(
        ...     {"layers": [{"w": jnp.ones(3)}]}
        ... ).rows
        >>> print(label(rows[0]))
        ('layers', '0', 'w')
    """
    if row.phase == "input":
        found = re.findall(r"\['([^']*)'\]|\[([^]]*)\]|\.?(\w+)", row.name)
        parts = [next(filter(None, groups), "") for groups in found]
        # `args[0]` says little, unless it is all there is.
        return tuple(parts[2:] if parts[0] == "args" and len(parts) > 2 else parts)
    place = re.search(r":(\d+) \((.+)\)$", row.line)
    function = place and f"{place[2].split('>.')[-1].removesuffix('.__call__')}:{place[1]}"
    # An update is named by the key path of an argument.
    scopes = re.sub(r"^args\[\d+\]\.?", "", row.name) if row.phase == "update" else row.name
    return tuple(filter(None, (*scopes.split("/"), function, row.primitive)))


def draw(
    matplotlib: Any,
    panels: Mapping[str, list[Row]],
    limits: Sequence[Limits],
    first: int,
    last: int,
) -> Any:
    """Return a figure with a panel for the rows of each phase, from one exponent to another.

    The panels lie below one another, so that a picture is as wide as a column of text.
    """
    rows = [row for found in panels.values() for row in found]
    span = first, last + 1
    has_nonfinite = any(row.nonfinite for row in rows)
    heights = [_height(len(found)) for found in panels.values()]
    around = (1.0 + 0.2 * len(limits)) * len(panels) + 1.4
    figure = matplotlib.figure.Figure(figsize=(_WIDTH, sum(heights) + around), layout="constrained")
    ratios = {"height_ratios": heights}
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw=ratios)[:, 0]
    norm = matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=1)
    image = None
    for ax, height, (phase, found) in zip(axes, heights, panels.items(), strict=True):
        cells = np.ma.masked_equal(_shares(found, *span, has_nonfinite), 0)
        extent = (span[0] - 2, span[0] - 2 + cells.shape[1], len(found), 0)
        image = ax.imshow(
            cells,
            cmap=_color_map(matplotlib),
            norm=norm,
            aspect="auto",
            extent=extent,
            interpolation="nearest" if height * DPI > len(found) else "antialiased",
            zorder=1,
        )
        _draw_labels(ax, found, height)
        _draw_exponents(ax, *span, has_nonfinite)
        _draw_limits(ax, limits, *span, height)
        _draw_scales(ax, found, *span)
        count = "1 tensor" if len(found) == 1 else f"{len(found)} tensors"
        title = f"{_TITLES.get(phase, phase)} ({count})"
        ax.set_title(title, fontsize=11, pad=10 + 14.4 * len(limits))
    bar = figure.colorbar(image, ax=list(axes), location="bottom", aspect=60, shrink=0.8, pad=0.01)
    bar.set_label("share of a tensor's elements that have this exponent", fontsize=9)
    shares = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1)
    bar.set_ticks(shares, labels=[f"{100 * x:.0f}%" for x in shares], fontsize=8)
    scaled = any(row.scale is not None for row in rows)
    _draw_legend(matplotlib, figure, limits, scaled)
    return figure


def _height(rows: int) -> float:
    """The height of a panel in inches: room for all labels if they are few, some pixels a row."""
    return min(max(1.2, min(rows * _LABEL, 6.0), rows * 0.03), _MAX_HEIGHT)


def _color_map(matplotlib: Any) -> Any:
    """Viridis from light to dark, and paler still where hardly anything is."""
    steps = np.linspace(0, 1, 256)[:, None]
    colors = matplotlib.colormaps["viridis_r"](steps[:, 0])
    strength = np.clip(0.15 + steps / 0.25, 0, 1)
    colors[:, :3] = strength * colors[:, :3] + (1 - strength)
    return matplotlib.colors.ListedColormap(colors, "viridis_from_white").with_extremes(bad="#0000")


def shown_exponents(rows: Sequence[Row], limits: Sequence[Limits]) -> tuple[int, int]:
    """Return the range of the exponents that matter, and of short dtypes."""
    seen = [
        e for row in rows for e, n in row.measure.histogram.items() if n >= _SEEN * max(row.size, 1)
    ]
    for limit in limits:
        if limit.is_short:
            seen += [limit.subnormal - 2, math.ceil(limit.largest)]
    return min(seen, default=-1), max(seen, default=0)


def _shares(rows: Sequence[Row], first: int, last: int, has_nonfinite: bool) -> np.ndarray:
    """Return zeros, a gap, exponents `first` to `last - 1`, a gap, what is not finite."""
    cells = np.zeros((len(rows), last - first + 4))
    for line, row in zip(cells, rows, strict=True):
        line[0], line[-1] = row.measure.zeros, row.nonfinite
        for exponent, count in row.measure.histogram.items():
            line[2 + min(max(exponent, first), last - 1) - first] += count
        line /= max(row.size, 1)
    return cells if has_nonfinite else cells[:, :-2]


def _draw_labels(ax: Any, rows: Sequence[Row], height: float) -> None:
    """Name each row, or the runs of rows of a module, as deeply as there is room."""
    labels = [label(row) for row in rows]
    apart = _LABEL * len(rows) / height
    runs, chosen = [], []
    for depth in range(max(map(len, labels)), 0, -1):
        runs = _runs(labels, depth)
        chosen = _apart(runs, apart)
        if sum(b - a for _, a, b in chosen) >= 0.7 * len(rows):
            break
    each = len(chosen) == len(rows)
    texts = [short(parts) for parts, _, _ in chosen]
    ax.set_yticks([(a + b) / 2 for _, a, b in chosen], labels=texts, fontsize=7)
    ax.tick_params(axis="y", length=2 if each else 0)
    for _, start, _ in (_runs(labels, 1) if each else runs)[1:]:
        ax.axhline(start, color="#bbbbbb", linewidth=0.4, zorder=0.9)


def _runs(labels: Sequence[tuple], depth: int) -> list[tuple[tuple, int, int]]:
    """Return label, first row and end of each run of rows that agree in their first parts."""
    runs, start = [], 0
    for parts, group in itertools.groupby(labels, key=lambda parts: parts[:depth]):
        end = start + len(list(group))
        runs.append((parts, start, end))
        start = end
    return runs


def _apart(runs: Sequence[tuple], apart: float) -> list[tuple]:
    """Return the runs whose labels do not touch, the longest first in line."""
    chosen: list[tuple] = []
    middles: list[float] = []
    for run in sorted(runs, key=lambda run: run[1] - run[2]):
        middle = (run[1] + run[2]) / 2
        i = bisect.bisect(middles, middle)
        if all(abs(middle - m) >= 0.99 * apart for m in middles[max(i - 1, 0) : i + 1]):
            middles.insert(i, middle)
            chosen.append(run)
    return sorted(chosen, key=lambda run: run[1])


def short(parts: Sequence[str]) -> str:
    """Join the parts of a label, without the first ones if it is too long."""
    text = "/".join(parts)
    while len(text) > _MAX_LABEL and len(parts) > 1:
        parts = parts[1:]
        text = "…/" + "/".join(parts)
    return text


def _draw_exponents(ax: Any, first: int, last: int, has_nonfinite: bool) -> None:
    step = 4 if last - first <= 50 else 8 if last - first <= 110 else 16
    ticks = [e for e in range(first + step // 2, last + 1) if e % step == 0]
    texts = ["0", *(f"$2^{{{e}}}$" for e in ticks)]
    places = [first - 1.5, *ticks]
    if has_nonfinite:
        places.append(last + 1.5)
        texts.append("nan\ninf")
    ax.set_xticks(places, labels=texts, fontsize=8)
    for left, right in ((first - 1, first), (last, last + 1))[: 1 + has_nonfinite]:
        ax.axvspan(left, right, facecolor="white", zorder=2)
        for edge in (left, right):
            ax.axvline(edge, color="black", linewidth=0.6, zorder=2)


def _draw_limits(ax: Any, limits: Sequence[Limits], first: int, last: int, height: float) -> None:
    """Draw each dtype's range as a bar above, thin where it is subnormal, and as lines."""
    shown = lambda e: min(max(e, first), last)  # noqa: E731
    colors = (_GREYS[0], _GREYS[1], "white", _GREYS[0])
    edges = [first, *map(shown, limits[0].edges), last]
    for low, high, color in zip(edges, edges[1:], colors):
        ax.axvspan(low, high, facecolor=color, zorder=0.5)
    over = ax.get_xaxis_transform()
    for i, (limit, color) in enumerate(zip(limits, itertools.cycle(_LIMITS))):
        y = 1 + (0.12 + 0.2 * i) / height
        edges = [shown(e) for e in (limit.subnormal, limit.normal, limit.largest)]
        line = dict(color=color, transform=over, clip_on=False, solid_capstyle="butt")
        ax.plot(edges[:2], [y, y], linewidth=1.5, **line)
        ax.plot(edges[1:], [y, y], linewidth=6, **line)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        style = dict(ha="center", va="center", fontsize=8, color=color, bbox=box)
        ax.text(sum(edges[1:]) / 2, y, limit.name, transform=over, **style)
        for edge, dashes in zip((limit.subnormal, limit.normal, limit.largest), _DASHES):
            if first < edge < last:
                ax.axvline(edge, color=color, linewidth=1, linestyle=dashes, zorder=1.5)


def _draw_scales(ax: Any, rows: Sequence[Row], first: int, last: int) -> None:
    points = [
        (e + 0.5, i + 0.5)
        for i, row in enumerate(rows)
        for e in sorted(set(row.scale or ()))
        if first <= e < last
    ]
    if points:
        ax.scatter(*zip(*points), **_SCALE, s=6 if len(rows) < 250 else 3, zorder=3)


def _draw_legend(matplotlib: Any, figure: Any, limits: Sequence[Limits], scaled: bool) -> None:
    line, patch = matplotlib.lines.Line2D, matplotlib.patches.Patch
    name = limits[0].name
    texts = ("smallest number", "smallest normal number", "largest number")
    marks = [
        patch(facecolor=_GREYS[0], label=f"out of the range of {name}"),
        patch(facecolor=_GREYS[1], label=f"subnormal in {name}"),
        *(line([], [], color="black", linestyle=d, label=t) for d, t in zip(_DASHES, texts)),
    ]
    if scaled:
        color, edge = _SCALE["color"], _SCALE["edgecolors"]
        dot = dict(marker="o", markersize=5, color=color, markeredgecolor=edge, linestyle="none")
        marks.append(line([], [], **dot, label="exponent of the scale (colours: of the data)"))
    place = dict(loc="outside lower center", fontsize=8, frameon=False)
    figure.legend(handles=marks, ncols=2, **place)
