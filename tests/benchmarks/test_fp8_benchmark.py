"""One short run of `benchmarks/accuracy/fp8.py`, and what its table says."""

import dataclasses
import json

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from benchmarks.accuracy import fp8
from examples.gpt import model

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


@pytest.mark.full
def test_a_short_run_is_stored_and_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fp8, "CONFIG", dataclasses.replace(fp8.CONFIG, layers=1))
    monkeypatch.setattr(fp8, "HELD_OUT_BATCHES", 2)
    arguments = "--models nnx --variants float32 ours flax --seeds 0 --steps 2 --repeats 2".split()
    for _ in range(2):  # the second time nothing is left to do
        fp8.main([*arguments, "--out", str(tmp_path)])
        printed = capsys.readouterr().out
        assert "nnx/flax: not run" in printed and "ours" in printed
    assert "starting" not in printed
    stored = json.loads((tmp_path / f"fp8-jax{jax.__version__}.json").read_text())
    losses = [stored["cells"][f"nnx/{variant}/0"]["loss"] for variant in ("float32", "ours")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert stored["costs"]["nnx/ours"]["hlo"] > 0
    assert stored["gradients"]["nnx/float32"] == 0 < stored["gradients"]["nnx/ours"] < 0.2


@pytest.mark.full
def test_a_short_run_of_experts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fp8, "CONFIG", dataclasses.replace(fp8.CONFIG, layers=1))
    monkeypatch.setattr(fp8, "HELD_OUT_BATCHES", 2)
    arguments = "--models moe --variants float32 ours flax --seeds 0 --steps 2 --repeats 1".split()
    fp8.main([*arguments, "--out", str(tmp_path)])
    assert "moe/flax: not run" in capsys.readouterr().out
    stored = json.loads((tmp_path / f"fp8-jax{jax.__version__}.json").read_text())
    losses = [stored["cells"][f"moe/{variant}/0"]["loss"] for variant in ("float32", "ours")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert 0 < stored["gradients"]["moe/ours"] < 0.3


def test_the_table(capsys):
    cells = {
        f"linen/{variant}/{seed}": {"loss": loss + seed}
        for variant, loss in (("float32", 2.0), ("flax", 2.02))
        for seed in (0, 1)
    }
    costs = {
        "linen/float32": {"first_call_s": 2.0, "hlo": 1000, "step_ms": 10.0},
        "linen/flax": {"first_call_s": 3.0, "hlo": 2000, "step_ms": 30.0},
    }
    results = {"cells": cells, "costs": costs, "gradients": {"linen/flax": 0.123}}
    Console(width=120).print(fp8.summarise(results, ["linen"], [0, 1]))
    printed = capsys.readouterr().out
    assert (
        "+0.83%" in printed
        and "+1.00%" in printed
        and "12.3%" in printed
        and "2,000 (2.0x)" in printed
    )


def test_the_example_with_the_layers_of_flax():
    plain = fp8.example_gpt(nnx).GPT(fp8.CONFIG, rngs=nnx.Rngs(0))
    ours = model.GPT(fp8.CONFIG, rngs=nnx.Rngs(0))
    assert type(plain.final_norm) is flax.nnx.LayerNorm is not type(ours.final_norm)
    tokens = np.zeros((1, 8), np.int32)
    np.testing.assert_allclose(plain(tokens), ours(tokens), rtol=1e-4, atol=1e-4)
    assert plain(tokens).dtype == jnp.float32


def test_bad_arguments_are_refused(capsys):
    for arguments, message in (
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--variants", "torch"], "invalid choice: 'torch'"),
    ):
        with pytest.raises(SystemExit):
            fp8.main(arguments)
        assert message in capsys.readouterr().err
