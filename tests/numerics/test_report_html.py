"""Tests of a report as a page: self-contained, well-formed, escaped, all rows in it."""

import collections
import functools
import html
import html.parser
import math
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.numerics import html as numerics_html
from jax_scalify.numerics.host_statistics import measure
from jax_scalify.numerics.report import Report
from jax_scalify.numerics.rows import Row

EVIL = "<script>alert('&\"')</script>"
VOID = {"meta", "wbr", "input", "path", "br"}


def row(name="block", phase="forward", line="", data=(1.0, 2.0), scale=None):
    array = np.asarray(data, np.float32)
    place = dict(name=name, phase=phase, primitive="mul", line=line, dtype="float32")
    return Row(**place, shape=array.shape, scale=scale, runs=1, measure=measure(array))


class Parser(html.parser.HTMLParser):
    """Checks that tags match, and collects them, their attributes and the table's cells."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells = [], collections.Counter(), []
        self.attributes = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "button", "span") and "tr" in self.open:
            self.cells[-1][-1] += data


@pytest.fixture
def report():
    @jsa.scalify
    def update(w, x):
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    w, x = jsa.as_scaled_array((jnp.ones((4, 4), jnp.float16), jnp.ones((8, 4), jnp.float16)))
    return jsa.numerics.report(update, formats=["float16", "float8_e5m2"])(w, x)


def test_page_has_every_row_and_needs_nothing_else(report, tmp_path):
    file = tmp_path / "report.html"
    text = report.to_html(file)
    assert file.read_text(encoding="utf-8") == text
    page = Parser(text)
    assert len(page.cells) == len(report) + 1
    assert {len(cells) for cells in page.cells} == {len(page.cells[0])}
    assert page.tags["svg"] == len(report)
    assert not re.search(r"https?:|src=|href=|url\(|@import", text)
    assert html.unescape(report.summary) in html.unescape(text)
    titles = page.cells[0]
    assert titles[:4] == ["#", "name", "exponents", "pass"]  # bars without scrolling sideways
    assert titles[-2:] == ["in float16", "in float8_e5m2"]
    assert "<title>update: jax_scalify report</title>" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text


def test_rows_come_worst_first_and_know_their_place():
    rows = (row("fine"), row("bad", data=[math.nan, 1.0]), row("subnormal", data=[2.0**-20, 1.0]))
    page = Parser(Report(rows, ("float16",)).to_html())
    assert [cells[0] for cells in page.cells[1:]] == ["2", "3", "1"]


def test_everything_is_escaped():
    rows = (row(EVIL, line=f"{EVIL}.py:1 (f)"), row("a['b']"))
    for text in (Report(rows).to_html(), Report(rows)._repr_html_()):
        assert "alert('" not in text
        page = Parser(text)
        assert page.tags["script"] == (1 if text.startswith("<!DOCTYPE") else 0)
        assert EVIL in {name for cells in page.cells for name in cells}
        assert ("title", f"{EVIL}.py:1 (f)") in page.attributes


def test_values_to_sort_by_are_numbers():
    rows = (row(data=[0.0, 0.0]), row(scale=(-3, -3)), row(data=[math.inf, 1.0]), row(data=1.0))
    values = [v for k, v in Parser(Report(rows).to_html()).attributes if k == "data-value"]
    assert len(values) == len(rows) * 7
    assert {v for v in values if not re.fullmatch(r"-?[\d.e+-]+", v)} == {"Infinity", "-Infinity"}


def test_bars_are_the_histogram():
    bars = numerics_html._bars(row(data=[0.0, 1.0, 1.0, 2.0**-30]), -2, 3)
    # The zero at the left, 2^-30 in the outermost column, half of the elements at 2^0.
    assert re.findall(r"M(\d+) 16v-([\d.]+)h", bars) == [("0", "8"), ("2", "8"), ("4", "11")]
    assert "exponents -30 to 0, 25% zeros" in bars


def test_the_title_names_the_function():
    class Model:
        def __call__(self, x):
            return x * 2

    for fun, name in (
        (jax.jit(jsa.scalify(lambda x: x * 2)), "&lt;lambda&gt;"),
        (functools.partial(jnp.add, 1.0), "add"),
        (Model(), "Model"),
    ):
        made = jsa.numerics.report(fun)(jnp.ones(2))
        for seen in (made, made.filter(primitive="mul"), made.sort(), made.underflowing("float16")):
            assert f"<title>{name}: jax_scalify report</title>" in seen.to_html()


PROBE = """<script>
for (const frame of document.querySelectorAll("iframe")) frame.onload = () => {
  const page = frame.contentDocument, rows = page.querySelector("tbody").rows;
  const bars = page.querySelector("td svg").getBoundingClientRect();
  const names = () => [...rows].map(row => row.cells[1].textContent).join(" ");
  const button = title => [...page.querySelectorAll("button")].find(b => b.textContent === title);
  const out = [frame.width, bars.left >= 0 && bars.right <= frame.width && bars.width > 100];
  out.push(page.querySelector("p").getBoundingClientRect().right <= frame.width);
  for (const title of ["name", "largest", "largest"]) { button(title).click(); out.push(names()); }
  out.push(frame.contentWindow.getComputedStyle(page.body).backgroundColor);
  document.body.append(Object.assign(document.createElement("pre"), {textContent: out.join(",")}));
};
</script>"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_bars_are_in_view_and_titles_sort(scheme, tmp_path):
    """In a browser, on a wide screen and on a phone."""
    name = "blocks/0/attention/projection/kernel" * 2
    rows = (
        row(name + "b", data=[2.0, 1.0]),
        row(name + "c", data=[8.0]),
        row(name + "a", data=[0.5]),
    )
    page = html.escape(Report(rows, ("float16",), "update").to_html(), quote=True)
    frames = [f'<iframe width="{w}" height="500" srcdoc="{page}"></iframe>' for w in (1300, 400)]
    file = tmp_path / "frames.html"
    file.write_text(PROBE.join(['<meta charset="utf-8">' + "".join(frames), ""]))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--blink-settings=preferredColorScheme={1 if scheme == 'light' else 0}",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    color = "rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 24, 27)"
    order = [" ".join(name + letter for letter in letters) for letters in ("abc", "cba", "abc")]
    found = re.findall("<pre>(.*?)</pre>", done.stdout)
    assert sorted(found) == [",".join([w, "true", "true", *order, color]) for w in ("1300", "400")]


def test_table_for_a_notebook():
    report = Report(tuple(row(f"r{i}") for i in range(50)))
    text = report._repr_html_()
    page = Parser(text)
    assert page.tags["script"] == 0 and page.tags["input"] == 0
    assert len(page.cells) == 41
    assert "... and 10 more" in text


def test_empty_report():
    assert "0 values" in Report(()).to_html()
    assert len(Parser(Report(())._repr_html_()).cells) == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_script_is_javascript(tmp_path):
    script = re.search("<script>(.*)</script>", Report((row(),)).to_html(), re.DOTALL)
    (tmp_path / "script.js").write_text(script[1])
    subprocess.run(["node", "--check", tmp_path / "script.js"], check=True)
