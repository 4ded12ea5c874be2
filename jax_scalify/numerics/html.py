"""A report as a web page that needs nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape

from jax_scalify.numerics import text
from jax_scalify.numerics.heat_map import Limits, shown_exponents
from jax_scalify.numerics.rows import Row

_HEIGHT = 16  # of the bars
_LIGHT = """
.jsa-report { --page: #fff; --ink: #222; --line: #e4e4e4; --bar: #31688e; --zero: #d55e00;
  --out: #d9d9d9; --subnormal: #efefef; }
"""
# A page follows the reader's choice. A notebook has one of its own, and its tables stay light.
_DARK = """
:root { color-scheme: light dark; }
body.jsa-report { margin: 8px; background: var(--page); }
body.jsa-report div { max-height: 95vh; }
@media (prefers-color-scheme: dark) {
  .jsa-report { --page: #16181b; --ink: #e2e2e2; --line: #34383d; --bar: #7fbde6; --zero: #ff9a4d;
    --out: #4a4e54; --subnormal: #2a2e33; }
}
"""
_STYLE = """
.jsa-report { font: 13px/1.4 system-ui, sans-serif; color: var(--ink); }
.jsa-report table { border-collapse: collapse; background: var(--page); color: var(--ink); }
.jsa-report :is(th, td) { padding: 1px 6px; text-align: left; white-space: nowrap; }
.jsa-report td { border-top: 1px solid var(--line); font-variant-numeric: tabular-nums; }
.jsa-report td.number { text-align: right; }
.jsa-report th { position: sticky; top: 0; z-index: 2; background: var(--page);
  border-bottom: 2px solid var(--ink); white-space: normal; vertical-align: bottom; }
.jsa-report td.name { position: sticky; left: 0; z-index: 1; background: var(--page);
  min-width: 8em; max-width: 20em; white-space: normal; overflow-wrap: anywhere; }
.jsa-report tr.nonfinite td.name { font-weight: 600; color: var(--zero); }
.jsa-report div { overflow: auto; }
.jsa-report button { font: inherit; font-weight: 600; border: 0; background: none; padding: 2px 0;
  color: inherit; cursor: pointer; text-align: inherit; }
.jsa-report th[aria-sort=ascending] button::after { content: " \\2191"; }
.jsa-report th[aria-sort=descending] button::after { content: " \\2193"; }
.jsa-report svg { display: block; width: clamp(110px, 12vw, 240px); height: 16px; }
.jsa-report path { fill: var(--bar); }
.jsa-report path.zero { fill: var(--zero); }
.jsa-report p { max-width: min(60em, calc(100vw - 32px)); }
.jsa-report h1 { font-size: 1.6em; overflow-wrap: anywhere; }
@media (max-width: 1500px) {
  .jsa-report table { font-size: 12px; }
}
@media (max-width: 700px) {
  .jsa-report table { font-size: inherit; }
  .jsa-report :is(th.order, td.order) { display: none; }
  .jsa-report td.name { min-width: 36vw; max-width: 36vw; }
  .jsa-report svg { width: 44vw; }
}
"""
# A click on a title sorts, numbers downwards first; the search looks at all that is written.
_SCRIPT = """
const body = document.querySelector("tbody"), rows = [...body.rows];
const search = document.querySelector("#search"), phase = document.querySelector("#phase");
const count = document.querySelector("#count");
const texts = new Map(rows.map(row =>
  [row, [...row.cells].map(cell => `${cell.textContent} ${cell.title}`).join(" ").toLowerCase()]));
function value(row, i) {
  const cell = row.cells[i], text = cell.dataset.value ?? cell.textContent, number = Number(text);
  return text === "" || Number.isNaN(number) ? text.toLowerCase() : number;
}
function compare(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === "number" ? 1 : -1;
}
document.querySelectorAll("th").forEach((th, i) => th.querySelector("button").onclick = () => {
  const before = th.getAttribute("aria-sort");
  const up = before ? before === "descending" : typeof value(rows[0], i) === "string";
  document.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  rows.sort((a, b) => (up ? 1 : -1) * compare(value(a, i), value(b, i)));
  body.append(...rows);
});
function filter() {
  const words = search.value.toLowerCase().split(/\\s+/);
  let shown = 0;
  for (const row of rows) {
    const hidden = !words.every(word => texts.get(row).includes(word))
      || (phase.value && row.dataset.phase !== phase.value);
    row.hidden = hidden;
    shown += !hidden;
  }
  count.textContent = `${shown} of ${rows.length}`;
}
search.oninput = phase.onchange = filter;
filter();
"""


def page(
    rows: Sequence[Row],
    shown: Sequence[Row],
    formats: Sequence[str],
    summary: str,
    function: str = "",
) -> str:
    """Return a self-contained page: summary, search, and a table that can be sorted.

    The rows are given in the order of computation, and as they are shown at first.
    """
    title = f"{function or 'a function'}: jax_scalify report"
    phases = dict.fromkeys(row.phase for row in rows)
    options = "".join(f"<option>{escape(phase)}</option>" for phase in phases)
    order = {id(row): i for i, row in enumerate(rows, start=1)}
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_LIGHT}{_DARK}</style>
</head>
<body class="jsa-report">
<h1>{escape(title)}</h1>
<p>{escape(summary)}</p>
<p>Bars: the exponents of the elements, their heights the roots of the shares; orange at the left
end: zeros. {_shading(formats)} Of a scaled value it is the data that is shown. Column
&ldquo;#&rdquo;: the order of computation; at first the worst come first. A click on a title sorts.
{escape(text.LOST.capitalize())}. {escape(text.NONFINITE)}.</p>
<p><label>Search <input id="search" type="search"></label>
<label>Pass <select id="phase"><option value="">all</option>{options}</select></label>
<span id="count"></span></p>
{_table(rows, shown, formats, order)}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def table(rows: Sequence[Row], formats: Sequence[str], summary: str, limit: int) -> str:
    """Return a table of the first rows, for a notebook."""
    more = len(rows) - limit
    below = f"<p>... and {more} more</p>" if more > 0 else ""
    return (
        f'<div class="jsa-report"><style>{_LIGHT}</style>'
        f"{_table(rows, rows[:limit], formats)}{below}"
        f"<p>{escape(text.LOST)}<br>{escape(summary)}</p></div>"
    )


def _table(
    rows: Sequence[Row],
    shown: Sequence[Row],
    formats: Sequence[str],
    order: Mapping[int, int] | None = None,
) -> str:
    limits = _limits(formats)
    first, last = shown_exponents(rows, limits)
    last += 1
    name, *others = text.header(formats)
    tag = "button" if order else "span"
    head = '<th class="order"><button>#</button></th>' if order else ""
    for title in (name, "exponents", *others):  # the bars are to be seen on a narrow screen
        head += f"<th><{tag}>{_breakable(title)}</{tag}></th>"
    lines = []
    for row in shown:
        number = [f'<td class="order number">{order[id(row)]}</td>'] if order else []
        name, *others = _cells(row, formats)
        cells = [*number, name, _bars(row, first, last), *others]
        kind = ' class="nonfinite"' if row.nonfinite else ""
        lines.append(f'<tr{kind} data-phase="{escape(row.phase)}">{"".join(cells)}</tr>')
    style = _STYLE + _background(limits[0], first, last)
    body = "\n".join(lines)
    return (
        f"<style>{style}</style><div><table>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cells(row: Row, formats: Sequence[str]) -> list[str]:
    """The cells of a row; those that do not sort as they are written have a value."""
    texts = text.cells(row, formats)
    shares = [sum(row.shares(dtype)) for dtype in (None, *formats)]
    keys: dict[int, float] = {
        4: math.prod(row.shape),
        6: -math.inf if row.scale is None else row.scale[0],
        7: row.log2_rms,
        8: row.measure.smallest,
        9: math.inf if row.nonfinite else row.measure.largest,
        **dict(enumerate(shares, start=10)),
    }
    cells = []
    for i, written in enumerate(texts):
        key = f' class="number" data-value="{_number(keys[i])}"' if i in keys else ""
        title = f' title="{escape(row.line)}"' if i == 3 and row.line else ""
        inside = escape(written)
        if i == 0:  # a line does not end after the mark of a non-finite row
            key, inside = ' class="name"', _breakable(written).replace("! ", "!&nbsp;", 1)
        cells.append(f"<td{key}{title}>{inside}</td>")
    return cells


def _breakable(name: str) -> str:
    """A name that may go on in a second line after each of its words."""
    return re.sub(r"(?<=[/_.])", "<wbr>", escape(name))


def _number(value: float) -> str:
    """A number as JavaScript reads it."""
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return f"{value:.6g}"


def _bars(row: Row, first: int, last: int) -> str:
    """A bar for the zeros, a gap, and a bar for each exponent, as an image."""
    size, counts = max(row.size, 1), dict.fromkeys(range(first, last), 0)
    for exponent, count in row.measure.histogram.items():
        counts[min(max(exponent, first), last - 1)] += count

    def bar(x: int, count: int) -> str:
        height = max(_HEIGHT * math.sqrt(count / size), 1)
        return f"M{x} {_HEIGHT}v-{height:.2g}h1v{height:.2g}z"

    path = "".join(bar(e - first + 2, n) for e, n in counts.items() if n)
    zeros = f'<path class="zero" d="{bar(0, row.measure.zeros)}"/>' if row.measure.zeros else ""
    seen = list(row.measure.histogram)
    words = f"exponents {min(seen)} to {max(seen)}" if seen else "no exponents"
    words += f", {100 * row.measure.zeros / size:.2g}% zeros"
    return (
        f'<td data-value="{_number(row.log2_rms)}" title="{words}"><svg viewBox="0 0 '
        f'{last - first + 2} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{words}">{zeros}<path d="{path}"/></svg></td>'
    )


def _limits(formats: Sequence[str]) -> list[Limits]:
    return [Limits.of(dtype) for dtype in formats or ("float16",)]


def _shading(formats: Sequence[str]) -> str:
    name = escape(_limits(formats)[0].name)
    return f"Grey: out of the range of {name}; light grey: subnormal in it."


def _background(limits: Limits, first: int, last: int) -> str:
    """Where a dtype ends, behind the bars."""
    width = last - first + 2

    def place(exponent: float) -> str:
        return f"{100 * (min(max(exponent, first), last) - first + 2) / width:.2f}%"

    edges = [place(e) for e in (first, *limits.edges, last)]
    colors = ("var(--out)", "var(--subnormal)", "var(--page)", "var(--out)")
    parts = [f"{c} {a} {b}" for c, a, b in zip(colors, edges, edges[1:])]
    gradient = f"linear-gradient(90deg, var(--page) {edges[0]}, {', '.join(parts)})"
    return f".jsa-report svg {{ background: {gradient}; }}\n"
