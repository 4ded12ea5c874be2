"""One short run of `benchmarks/accuracy/parity.py`, and what its table says."""

import functools
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks.accuracy import parity, scale_models

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


@pytest.mark.full
def test_a_short_run_ends_where_float32_does():
    module = functools.partial(scale_models.ResMLP, depth=1)
    model = scale_models.make_model("vit", module, parity.image_batch)
    plain = parity.train(model, "float32", "plain", 0, 3, 2e-3)
    frozen = parity.train(model, "fp8", "frozen", 0, 3, 2e-3)
    assert frozen["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert (plain["calibrations"], frozen["calibrations"]) == (0, 1)
    assert frozen["first_bad_step"] == -1


def test_what_is_finished_is_stored_and_not_run_again(tmp_path, capsys, monkeypatch):
    ran = []

    def train(model, variant, mode, seed, steps, rate):
        ran.append((variant, mode))
        loss = 1.0 if variant == "float32" else 1.001
        losses = {"loss": loss, "loss_in_float32": loss - 0.002}
        return losses | {"first_bad_step": -1, "calibrations": 1, "commit": parity.commit()}

    monkeypatch.setattr(parity, "train", train)
    arguments = ["--models", "vit", "--seeds", "0", "--steps", "3", "--out", str(tmp_path)]
    for variants in (["float32"], ["float32", "fp8"], ["float32", "fp8"]):
        parity.main([*arguments, "--variants", *variants])
    assert ran[0][0] == "float32" and ran[1:] == [("fp8", mode) for mode in parity.MODES]
    stored = json.loads((tmp_path / f"parity-jax{jax.__version__}.json").read_text())
    assert list(stored)[:2] == ["vit/3/float32/plain/0", "vit/3/fp8/calibrated/0"]
    assert all(cell["result"]["commit"] for cell in stored.values())
    capsys.readouterr()
    parity.main([*arguments, "--variants", "float32", "fp8", "bfloat16", "--table"])
    printed = capsys.readouterr().out
    assert printed.count("+0.10%") == 2 * printed.count("-0.10%") == 2 * len(parity.MODES)
    assert len(ran) == 4


def test_training_and_held_out_images_differ(monkeypatch):
    images = parity.digits()[0]
    monkeypatch.setattr(parity.np, "roll", lambda image, *_: image)
    for held_out in (False, True):
        batch = parity.image_batch(0, 1, held_out)
        part = images[: parity.TRAINING_IMAGES] if held_out else images[parity.TRAINING_IMAGES :]
        same = (batch["inputs"][:, None] == part).all((2, 3, 4)).any()
        assert batch["inputs"].shape == (32, 8, 8, 1) and not same
    assert np.array_equal(parity.image_batch(0, 1)["labels"], parity.image_batch(0, 1)["labels"])


def test_the_table_says_what_misses_and_what_is_not_finite(capsys):
    fine = {"first_bad_step": -1, "calibrations": 1, "loss_in_float32": 2.0}
    cells = {
        "bert/5/float32/plain/0": fine | {"loss": 2.0, "calibrations": 0},
        "bert/5/float32/plain/1": fine | {"loss": 1.0, "calibrations": 0},
        "bert/5/fp8/frozen/0": fine | {"loss": 2.02},
        "bert/5/fp8/frozen/1": fine | {"loss": 1.03, "first_bad_step": 7},
        "bert/5/float16/dynamic/0": fine | {"loss": 2.001},
        "vit/5/fp8/frozen/0": fine | {"loss": 2.001},  # nothing to compare it with
    }
    Console(width=140).print(parity.summarise(cells, 5))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "bert" in line]
    assert [line[:4] for line in lines] == [
        ["bert", "float32", "plain", "2"],
        ["bert", "float16", "dynamic", "1"],
        ["bert", "fp8", "frozen", "2"],
    ]
    assert lines[1][5:7] == ["+0.05%", "-"] and lines[1][-2] == "open"
    assert lines[1][8] == "+0.00%"
    assert lines[2][5:7] == ["+2.00%", "1.00"] and "open" in lines[2] and "FINITE" in lines[2]
    assert [parity._verdict(gap, 0.04, 0.15) for gap in (0.19, 0.22, 0.3)] == [
        "ok",
        "open",
        "MISSED",
    ]


def test_bad_arguments_are_refused(capsys):
    for arguments, message in (
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--models", "gpt12"], "invalid choice: 'gpt12'"),
    ):
        with pytest.raises(SystemExit):
            parity.main(arguments)
        assert message in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_told(capsys):
    cell = {"first_bad_step": -1, "calibrations": 0, "loss": 1.0, "loss_in_float32": 1.0}
    lost = cell | {"first_bad_step": 3, "loss": float("nan"), "loss_in_float32": float("nan")}
    cells = {f"vit/3/float32/plain/{seed}": cell for seed in range(2)}
    cells |= {f"vit/3/fp8/frozen/{seed}": lost for seed in range(2)}
    Console(width=150).print(parity.summarise(cells, 3))
    assert "NOT FINITE" in capsys.readouterr().out
