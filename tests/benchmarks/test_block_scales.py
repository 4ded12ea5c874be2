"""The pieces of `benchmarks/accuracy/block_scales.py`, and what its tables say."""

import functools
import json

import jax
import numpy as np
import pytest

from benchmarks.accuracy import block_scales, scale_models
from benchmarks.accuracy.parity import image_batch

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


@pytest.fixture
def small(monkeypatch):
    module = functools.partial(scale_models.ResMLP, depth=1)
    models = {"llama": scale_models.make_model("llama", module, image_batch)}
    monkeypatch.setattr(block_scales, "find_models", lambda: models)
    caches = block_scales.record, block_scales.make_step
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.full
def test_a_short_run(small):
    layers = block_scales.record("llama", 1)
    assert all(x.shape[1] == w.shape[0] and np.any(ct) for x, w, ct in layers)
    for format, way, limit in (("bfloat16", "plain", 0.01), ("nvfp4", "scalify", 0.3)):
        found = block_scales.errors("llama", format, way, 1)
        assert all(0 < mean <= worst < limit for mean, worst in found.values())
    plain = block_scales.train("llama", "float32", "plain", 0, 3)
    for format, way in (("mxfp8", "scalify"), ("fp8", "axis")):
        scaled = block_scales.train("llama", format, way, 0, 3)
        assert scaled["loss"] == pytest.approx(plain["loss"], rel=0.02)


def test_what_is_finished_is_stored_and_not_run_again(tmp_path, capsys, monkeypatch):
    ran = []

    def train(model, format, way, seed, steps):
        ran.append((format, way))
        return {"loss": 1.0 if format == "float32" else 1.02}

    def errors(model, format, way, steps):
        ran.append(format)
        return dict.fromkeys(("forward", "input", "weight"), [0.01, 0.02])

    monkeypatch.setattr(block_scales, "train", train)
    monkeypatch.setattr(block_scales, "errors", errors)
    arguments = ["--models", "llama", "--seeds", "0", "--steps", "3", "--out", str(tmp_path)]
    for formats in (["nvfp4"], ["nvfp4", "fp8"], ["nvfp4", "fp8"]):
        block_scales.main([*arguments, "--formats", *formats])
    printed = capsys.readouterr().out
    assert (
        ran.count("nvfp4") == 2 and ran.count("fp8") == 3 and ran.count(("float32", "plain")) == 1
    )
    assert "+2.00%" in printed and "1.0% MISSED" in printed and "1.00 (2.00)" in printed
    stored = json.loads((tmp_path / f"block_scales-jax{jax.__version__}.json").read_text())
    assert "errors/llama/fp8/axis" in stored and "errors/llama/nvfp4/axis" not in stored
