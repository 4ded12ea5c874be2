"""The examples of one file: each trains in all three precisions, prints and draws."""

import importlib
import re

import numpy as np
import pytest

import jax_scalify as jsa

pytest.importorskip("sklearn")
common = pytest.importorskip("examples.common")

# What is changed for speed, the loss that guessing has, and the FP8 matmuls of a forward pass.
SMALL = {
    "digits_mlp": ({"SIZES": (64, 32, 32, 10)}, np.log(10), 2),
    "digits_cnn": ({}, np.log(10), 1),
    "digits_equinox": ({"WIDTH": 32}, np.log(10), 3),
    "digits_vit": ({"WIDTH": 16, "LAYERS": 1, "HEADS": 2}, np.log(10), 6),
    "masked_lm": (
        {"WIDTH": 16, "LAYERS": 1, "HEADS": 2, "CONTEXT": 16, "BATCH": 4, "HELD_OUT": 8},
        np.log(257),
        6,
    ),
}
# Of the held-out loss after three steps, from that of float32: float16 rounds to 11 bits, E4M3 to
# 4 and E5M2 to 3.
TOLERANCE = {"float16": 2e-3, "fp8": 2e-2}
LINE = re.compile(
    r"^(float32|float16|fp8) +held-out loss (\S+?)(?: \((\S+)% from float32\))?, accuracy (\S+)%, "
    r"state (\S+) kB, \d+ s$"
)


def count_fp8(example, monkeypatch):
    """How many matmuls of each precision's evaluation have FP8 operands, once it was called."""
    found, make = {}, example.make

    def making(precision, seed, steps):
        state, update, evaluate = make(precision, seed, steps)

        def counting(*args):
            report = jsa.numerics.check_fp8(evaluate, *args, compile=False)
            found[precision] = sum(row.has_fp8_operands for row in report.rows)
            return evaluate(*args)

        return state, update, counting

    monkeypatch.setattr(example, "make", making)
    return found


# FP8 has all that float16 has, and matmuls besides.
PRECISIONS = [
    ("float32", "fp8"),
    pytest.param(("float32", "float16", "fp8"), marks=pytest.mark.full),
]
SLOW = ("digits_cnn", "digits_equinox", "digits_vit", "masked_lm")  # take the longest to compile


@pytest.mark.sampled(16)
@pytest.mark.parametrize("precisions", PRECISIONS, ids="-".join)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.full] * (n in SLOW)) for n in SMALL],
)
def test_every_precision_trains(name, precisions, tmp_path, monkeypatch, capsys):
    if name == "digits_equinox":
        pytest.importorskip("equinox")
    example = importlib.import_module(f"examples.{name}")
    changes, guessing, matmuls = SMALL[name]
    fp8 = count_fp8(example, monkeypatch)
    for attribute, value in changes.items():
        monkeypatch.setattr(example, attribute, value)
    out = tmp_path / "out"
    arguments = [] if len(precisions) == 3 else ["--precision", *precisions]
    assert example.main(["--steps", "3", "--out", str(out), *arguments]) == 0
    lines = [m for m in map(LINE.match, capsys.readouterr().out.splitlines()) if m]
    assert [m[1] for m in lines] == list(precisions)
    reference = float(lines[0][2])
    assert 0.3 * guessing < reference < 2 * guessing
    for line in lines[1:]:
        loss, gap, accuracy, size = (float(line[i]) for i in (2, 3, 4, 5))
        assert abs(loss / reference - 1) < TOLERANCE[line[1]]
        assert gap == pytest.approx(100 * (loss / reference - 1), abs=0.02)
        assert 0 <= accuracy <= 100
        # Half of float32, and four bytes of scale for each array.
        assert 0.5 < size / float(lines[0][5]) < 0.56
    assert fp8 == {precision: matmuls * (precision == "fp8") for precision in precisions}
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "fp4"], "`precision` must be of float32, float16, fp8, got 'fp4'."),
        (["--steps", "0"], "`steps` must be positive, got 0."),
        (["--seed", "-1"], "`seed` must not be negative, got -1."),
        (["--out", "file"], "`out` must be a directory that can be made, got 'file'"),
    ],
)
def test_bad_options_get_one_line_and_status_2(tmp_path, monkeypatch, capsys, arguments, message):
    from examples import digits_mlp

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert digits_mlp.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_batches_are_those_of_seed_and_step_and_never_held_out():
    digits = common.Digits(batch_size=897)
    images, labels = digits.batch(0, 1)
    np.testing.assert_array_equal(images, digits.batch(0, 1)[0])
    assert not np.array_equal(images, digits.batch(0, 2)[0])
    assert not np.array_equal(images, digits.batch(1, 1)[0])
    assert images.shape == (897, 8, 8) and images.min() == -1 and images.max() == 1
    assert labels.dtype == np.int32 and set(labels) == set(range(10))
    seen = {x.tobytes() for x in images}
    assert not seen & {x.tobytes() for x in digits.held_out[0]}


def test_a_run_that_went_wrong_is_told_and_drawn(tmp_path):
    def result(precision, losses, held_out):
        return common.Result(precision, losses, np.array([2, 4]), held_out, 2000, 1.0)

    fine = result("float32", np.full(4, 0.5), np.array([[0.6, 0.8], [0.5, 0.9]]))
    nan = result("fp8", np.array([0.5, 0.5, np.nan, np.nan]), np.array([[0.6, 0.8], [np.nan, 0.1]]))
    assert common.result_line([fine, nan]).startswith("fp8      held-out loss nan, accuracy 10.0%")
    table = common.result_table([fine, nan])
    assert list(table.columns[-1].cells) == ["yes", "NO"]
    assert list(table.columns[3].cells) == ["-", "-"]
    common.plot([fine, nan], tmp_path / "x.png", title="title")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_hidden_bytes():
    masked_lm = pytest.importorskip("examples.masked_lm")
    tokens = np.random.default_rng(1).integers(0, 256, (400, 64)).astype(np.int32)
    shown, targets, selected = masked_lm.hide(tokens, np.random.default_rng(0))
    np.testing.assert_array_equal(targets, tokens)
    np.testing.assert_array_equal(shown[~selected], tokens[~selected])
    assert abs(selected.mean() - 0.15) < 0.01
    masked = shown[selected] == masked_lm.MASK
    assert abs(masked.mean() - 0.8) < 0.02
    # Of the bytes that replace others, one in 256 is the same.
    assert abs((shown[selected] == tokens[selected]).mean() - 0.1) < 0.02
