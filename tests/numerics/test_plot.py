"""Tests of the pictures: what is in them, how they are labelled, and what is refused."""

import builtins
import functools
import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.numerics import heat_map
from jax_scalify.numerics.host_statistics import measure
from jax_scalify.numerics.report import Report
from jax_scalify.numerics.rows import Row

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.figure")


def row(name="block_0", phase="forward", primitive="mul", data=(1.0, 2.0), scale=None, line=""):
    array = np.asarray(data, np.float32)
    dtype = str(array.dtype)
    place = dict(name=name, phase=phase, primitive=primitive, line=line)
    return Row(**place, shape=array.shape, dtype=dtype, scale=scale, runs=1, measure=measure(array))


def synthetic(count):
    """A report with `count` rows: a model of blocks, of which most have six values in each pass."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        phase = ("input", "forward", "backward")[3 * i // count]
        block, part = divmod(i, 6)
        data = rng.normal(size=512) * 2.0 ** rng.integers(-20, 2)
        line = f"model.py:{40 + part // 2} (Attention.__call__)"
        name = f"block_{block}/attention"
        if phase == "input":
            name, line = f"args[0].params['blocks'][{block}]['attention']['w{part}']", ""
        scale = (-3, -3) if phase == "backward" else None
        rows.append(row(name, phase, ("dot_general", "add")[part % 2], data, scale, line))
    return Report(tuple(rows), ("float16",))


def saved(monkeypatch, draw):
    """The figure that a function saves."""
    figures = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *_, **__: figures.append(self)
    )
    draw()
    return figures[0]


def image(ax):
    return np.ma.filled(ax.images[0].get_array(), 0.0)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("count", [20, 500])
def test_pictures_of_small_and_large_reports(tmp_path, count, suffix):
    file = tmp_path / f"heat.{suffix}"
    jsa.numerics.plot_histogram(synthetic(count), file, title="a title")
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize("phases", [["input"], ["input", "forward"]], ids=len)
def test_the_legend_is_inside_of_the_picture(monkeypatch, phases):
    rows = tuple(row(phase=phase, scale=(0,)) for phase in phases)
    options = dict(phases=phases, formats=["float8_e4m3fn"])
    draw = functools.partial(jsa.numerics.plot_histogram, Report(rows), "x.png", **options)
    figure = saved(monkeypatch, draw)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_report_of_a_scalified_step(tmp_path):
    @jsa.scalify
    def update(w, x):
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    w, x = jsa.as_scaled_array((jnp.ones((4, 4), jnp.float16), jnp.ones((8, 4), jnp.float16)))
    report = jsa.numerics.report(update)(w, x)
    for phases in (("forward", "backward", "input"), ("update",), "input"):
        file = io.BytesIO()
        jsa.numerics.plot_histogram(report, file, phases=phases)
        assert file.getvalue()[:4] == b"\x89PNG"


def test_cells_are_shares_in_the_column_of_their_exponent(monkeypatch):
    data = [0.0, 0.0, 1.0, 1.5, 2.0**-20, -3.0, 2.0**-20, 1.0]
    report = Report((row(data=data),))
    draw = functools.partial(jsa.numerics.plot_histogram, report, "x.png")
    (ax,) = (a for a in saved(monkeypatch, draw).axes if a.get_title())
    (cells,) = image(ax)
    left = ax.images[0].get_extent()[0]
    assert cells.sum() == 1
    found = {i + left: share for i, share in enumerate(cells) if share}
    first = left + 2  # zeros, then a gap
    assert found == {first - 2: 2 / 8, -20: 2 / 8, 0: 3 / 8, 1: 1 / 8}
    assert first == -26 and left + len(cells) == 17  # two below float16's range, and its end


def test_rare_exponents_are_in_the_outermost_column(monkeypatch):
    data = np.ones(1000)
    data[0] = 2.0**-100
    report = Report((row(data=data),))
    draw = functools.partial(jsa.numerics.plot_histogram, report, "x.png")
    ax = saved(monkeypatch, draw).axes[0]
    assert image(ax)[0, 2] == 1 / 1000


def test_exponents_can_be_chosen(monkeypatch):
    report = Report((row(data=[2.0**-30, 1.0, 2.0**3, 2.0**9]),))
    draw = functools.partial(jsa.numerics.plot_histogram, report, "x.png", exponents=(-2, 4))
    ax = saved(monkeypatch, draw).axes[0]
    assert image(ax).tolist() == [[0, 0, 0.25, 0, 0.25, 0, 0, 0.25, 0.25]]


def test_what_is_not_finite_has_a_column(monkeypatch):
    report = Report((row(data=[1.0, math.nan, math.inf, 1.0]),))
    draw = functools.partial(jsa.numerics.plot_histogram, report, "x.png")
    ax = saved(monkeypatch, draw).axes[0]
    assert image(ax)[0, -1] == 0.5
    assert ax.get_xticklabels()[-1].get_text() == "nan\ninf"


def test_rows_are_in_the_order_of_computation_and_numbers_left_out(monkeypatch):
    rows = [row(primitive="add"), row(primitive="sum", data=1.0), row(primitive="mul")]
    rows += [row(phase="backward", primitive="neg")]
    draw = functools.partial(jsa.numerics.plot_histogram, Report(tuple(rows)), "x.png")
    forward, backward, *_ = saved(monkeypatch, draw).axes
    assert forward.get_title() == "forward (2 tensors)"
    assert backward.get_title() == "backward (1 tensor)"
    assert [t.get_text() for t in forward.get_yticklabels()] == ["block_0/add", "block_0/mul"]


def test_labels_of_many_rows_are_those_of_modules_and_do_not_touch(monkeypatch):
    draw = functools.partial(jsa.numerics.plot_histogram, synthetic(500), "x.png")
    figure = saved(monkeypatch, draw)
    figure.draw_without_rendering()
    assert figure.get_figwidth() < 7.5  # labels can be read on a page of 700 pixels
    for ax in figure.axes[:3]:
        places = np.asarray(ax.get_yticks())
        height = figure.get_figheight() * ax.get_position().height
        assert len(places) >= 20
        assert np.diff(places).min() / 170 * height > 0.1


@pytest.mark.parametrize(
    ("formats", "styles"), [(None, 3), (["float8_e4m3fn"], 3), (["float16", "float8_e4m3fn"], 6)]
)
def test_limits_are_lines(monkeypatch, formats, styles):
    draw = functools.partial(
        jsa.numerics.plot_histogram, Report((row(),)), "x.png", formats=formats
    )
    ax = saved(monkeypatch, draw).axes[0]
    lines = [x.get_xdata()[0] for x in ax.lines if list(x.get_ydata()) == [0, 1]]
    limits = [x for x in lines if x not in (ax.get_xlim()[0], ax.get_xlim()[0] + 1)]
    expected = {"float16": {-24, -14}, "float8_e4m3fn": {-9, -6, math.log2(448)}}
    for name in formats or ["float16"]:
        assert expected[name] <= set(limits)


def test_the_scale_is_a_dot(monkeypatch):
    report = Report((row(scale=(-3, -3)), row(), row(scale=(-2, 4))))
    draw = functools.partial(jsa.numerics.plot_histogram, report, "x.png")
    figure = saved(monkeypatch, draw)
    (dots,) = figure.axes[0].collections
    assert dots.get_offsets().tolist() == [[-2.5, 0.5], [-1.5, 2.5], [4.5, 2.5]]
    texts = [t.get_text() for t in figure.legends[0].get_texts()]
    assert "exponent of the scale (colours: of the data)" in texts


@pytest.mark.parametrize(
    ("name", "phase", "line", "expected"),
    [
        ("args[0].params['a'][0]['w']", "input", "", ("params", "a", "0", "w")),
        ("args[0]", "input", "", ("args", "0")),
        ("kwargs['lr']", "input", "", ("kwargs", "lr")),
        ("args[1].nu['w.b']", "input", "", ("nu", "w.b")),
        ("a/b", "forward", "/x/m.py:7 (A.__call__)", ("a", "b", "A:7", "mul")),
        ("", "forward", "m.py:7 (f.<locals>.loss)", ("loss:7", "mul")),
        ("", "backward", "", ("mul",)),
        ("args[0].params['w']", "update", "", ("params['w']", "mul")),
    ],
)
def test_labels(name, phase, line, expected):
    assert heat_map.label(row(name, phase, line=line)) == expected


def test_histogram_refuses_what_it_cannot_draw():
    with pytest.raises(TypeError, match="`report` must be a `Report`, got list"):
        jsa.numerics.plot_histogram([], "x.png")
    with pytest.raises(ValueError, match="no tensor of more than one element"):
        jsa.numerics.plot_histogram(Report(()), "x.png")
    with pytest.raises(ValueError, match="no tensor of more than one element"):
        jsa.numerics.plot_histogram(Report((row(phase="update"),)), "x.png")
    with pytest.raises(ValueError, match="`phases` must be of .*, got 'weights'"):
        jsa.numerics.plot_histogram(Report((row(),)), "x.png", phases=["weights"])
    with pytest.raises(ValueError, match=r"`exponents` must be .*, got \(3, 3\)"):
        jsa.numerics.plot_histogram(Report((row(),)), "x.png", exponents=(3, 3))
    with pytest.raises(TypeError, match="`formats` must name real floating dtypes"):
        jsa.numerics.plot_histogram(Report((row(),)), "x.png", formats=["int8"])


@pytest.mark.parametrize("draw", ["histogram", "scales"])
def test_without_matplotlib(monkeypatch, draw):
    real = builtins.__import__

    def fails(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fails)
    with pytest.raises(ImportError, match=r"needs matplotlib: `pip install matplotlib`"):
        if draw == "histogram":
            jsa.numerics.plot_histogram(Report((row(),)), "x.png")
        else:
            jsa.numerics.plot_scales(history(["w"]), "x.png")


def history(names, steps=3):
    return [
        {
            "step": 10 * i,
            "tensors": {
                n: {"scale_exponent": -float(i * k), "log2_rms": 0.5} for k, n in enumerate(names)
            },
        }
        for i in range(steps)
    ]


def curves(ax):
    return {line.get_label(): line.get_ydata().tolist() for line in ax.lines}


def test_scales_over_training(tmp_path, monkeypatch):
    jsa.numerics.plot_scales(history(["a", "b"]), tmp_path / "x.png", title="scales")
    assert (tmp_path / "x.png").stat().st_size > 5_000
    draw = functools.partial(jsa.numerics.plot_scales, history(["a", "b"]), "x.png", "b")
    above, below = saved(monkeypatch, draw).axes
    assert curves(above) == {"b": [0, -1, -2]}
    assert [line.get_ydata().tolist() for line in below.lines] == [[0.5] * 3]
    assert above.lines[0].get_xdata().tolist() == [0, 10, 20]


def test_scales_of_a_file(tmp_path, monkeypatch):
    file = tmp_path / "scales.jsonl"
    lines = [json.dumps(record) for record in history(["a", "b"])[::-1]]
    file.write_text("\n".join([*lines, ""]))
    draw = functools.partial(jsa.numerics.plot_scales, file, "x.png")
    assert curves(saved(monkeypatch, draw).axes[0]) == {"a": [0, 0, 0], "b": [0, -1, -2]}


def test_scales_that_are_missing_are_gaps(monkeypatch):
    records = history(["a", "b"])
    records[1]["tensors"] = {"a": {"scale_exponent": None, "log2_rms": -math.inf}}
    draw = functools.partial(jsa.numerics.plot_scales, records, "x.png", ["a", "b"])
    above, below = saved(monkeypatch, draw).axes
    for ax in (above, below):
        assert [math.isnan(y) for line in ax.lines for y in line.get_ydata()] == [0, 1, 0] * 2


def test_by_default_the_tensors_that_move_most_are_drawn(monkeypatch):
    names = [f"w{i}" for i in range(15)]
    draw = functools.partial(jsa.numerics.plot_scales, history(names), "x.png")
    above, _ = saved(monkeypatch, draw).axes
    assert list(curves(above)) == names[3:]
    assert above.get_title(loc="right") == "3 other tensors moved less"


@pytest.mark.parametrize(
    ("records", "names", "error", "text"),
    [
        ({"step": [1]}, None, TypeError, "`history` must be a list of records or a path"),
        ([{"a": 1}], None, TypeError, "must have records"),
        ([{"step": 1, "tensors": {"a": 1.0}}], None, TypeError, "must have records"),
        ([], None, ValueError, "`history` is empty"),
        ([{"step": 1, "tensors": {}}], None, ValueError, "`history` has no tensor"),
        (history(["a"]), ["b"], ValueError, "`names` must be of 'a', got 'b'"),
        (history(["a"]), [], ValueError, "`names` is empty"),
    ],
)
def test_scales_refuse_what_they_cannot_draw(records, names, error, text):
    with pytest.raises(error, match=text):
        jsa.numerics.plot_scales(records, "x.png", names)


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "scales.jsonl"
    file.write_text("step 1\n")
    with pytest.raises(ValueError, match="must be JSON, one record a line"):
        jsa.numerics.plot_scales(file, "x.png")
    with pytest.raises(FileNotFoundError):
        jsa.numerics.plot_scales(tmp_path / "none.jsonl", "x.png")


@pytest.mark.parametrize(
    "phases", [["forward"], ["forward", "backward"], ["input", "forward", "backward"]]
)
def test_the_legend_fits_into_the_picture(monkeypatch, phases):
    rows = [row("a", phase, scale=(3, 3)) for phase in phases]
    seen = Report(tuple(rows), ("float8_e4m3fn",))
    figure = saved(monkeypatch, lambda: jsa.numerics.plot_histogram(seen, "x.png", phases=phases))
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
