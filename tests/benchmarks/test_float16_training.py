"""One short run of `benchmarks/accuracy/float16_training.py`, and what its table says."""

import functools
import json

import jax
import pytest
from rich.console import Console

from benchmarks.accuracy import float16_training, scale_models

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


@pytest.mark.full
def test_a_short_run_is_stored_and_compared(tmp_path, capsys, monkeypatch):
    module = functools.partial(scale_models.LanguageModel, depth=1, llama=True)
    model = scale_models.make_model("llama", module, scale_models.next_byte_batch)
    monkeypatch.setitem(float16_training.MODELS, "llama", model)
    monkeypatch.setattr(float16_training, "HELD_OUT_BATCHES", 2)
    arguments = "--models llama --precisions float32 float16 --seeds 0 --steps 2".split()
    for _ in range(2):  # the second time nothing is left to do
        float16_training.main([*arguments, "--out", str(tmp_path)])
        assert "0.5% ok" in capsys.readouterr().out
    stored = json.loads((tmp_path / f"float16_training-jax{jax.__version__}.json").read_text())
    losses = [stored[f"llama/{precision}/0"]["loss"] for precision in ("float32", "float16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.005)


def test_what_misses_its_limit_or_is_not_finite_is_said(capsys):
    cells = {
        "bert/float32/0": {"loss": 2.0, "first_bad_step": -1},
        "bert/float16/0": {"loss": 2.1, "first_bad_step": 7},
    }
    Console(width=120).print(float16_training.summarise(cells, ["bert"], [0]))
    printed = capsys.readouterr().out
    assert "+5.00%" in printed and "MISSED" in printed and "NOT FINITE" in printed


def test_bad_arguments_are_refused(capsys):
    for arguments, message in (
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--models", "vit"], "invalid choice: 'vit'"),
    ):
        with pytest.raises(SystemExit):
            float16_training.main(arguments)
        assert message in capsys.readouterr().err
