"""The golden file: what counts as moved, and a run from end to end."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("flax.linen")
pytest.importorskip("optax")

from benchmarks import golden
from benchmarks.accuracy import scale_models

WIDTH, VOCABULARY = 8, 16


def test_what_has_moved_is_told():
    before = {"losses": [1.0, 2.0], "hlo": 10, "old": 1}
    now = {"losses": [1.0, 2.5], "hlo": 10, "new": 1}
    assert golden.moved(before, before) == []
    assert golden.moved(before, now) == [
        "old is gone",
        "new is new",
        "losses: [1, 2] -> [1, 2.5]",
    ]


def test_tensors_are_told_together_the_farthest_first():
    before = {f"activations/{i}": [0.5, -float(i)] for i in range(5)}
    now = before | {"activations/1": [0.5, -2.0], "activations/3": [-1.5, 0.0]}
    (line,) = golden.moved(before, now)
    assert line.startswith("2 of 5 tensors")
    assert line.index("activations/3 [0.5, -3] -> [-1.5, 0]") < line.index("activations/1")


class Tiny(scale_models.Block):
    @scale_models.linen.compact
    def __call__(self, tokens):
        x = self.make("Embed", VOCABULARY, WIDTH, name="tokens")(tokens)
        return self.make("Dense", VOCABULARY, name="head")(self.layers.gelu(x))


def _batch(seed, step):
    tokens = np.random.default_rng((seed, step)).integers(VOCABULARY, size=(2, 9))
    return {"inputs": tokens[:, :-1].astype(np.int32), "labels": tokens[:, 1:].astype(np.int32)}


@pytest.mark.full
def test_a_run_from_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(golden.MODELS, "tiny", scale_models.make_model("tiny", Tiny, _batch))
    monkeypatch.setattr(golden, "STEPS", 12)
    monkeypatch.setattr(golden, "FORMATS", ("float32", "float16"))
    arguments = ["--models", "tiny", "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert golden.main(arguments) == 1
    assert "0 of 6 cells are as they were" in capsys.readouterr().out
    assert golden.main([*arguments, "--accept"]) == 0
    assert golden.main(arguments) == 0
    assert "6 of 6 cells are as they were" in capsys.readouterr().out

    path = tmp_path / f"golden-jax{jax.__version__}.json"
    stored = json.loads(path.read_text())
    assert len(stored["steps/tiny/float16/frozen"]["losses"]) == 1
    stored["steps/tiny/float16/frozen"]["hlo"] += 1
    stored["scales/tiny/float16"]["activations/head"][1] += 1
    path.write_text(json.dumps(stored))
    assert golden.main(arguments) == 1
    text = capsys.readouterr().out
    assert "steps/tiny/float16/frozen: hlo: " in text
    assert "scales/tiny/float16: 1 of " in text
