"""One short run of `benchmarks/cost/gpu_steps.py` without a GPU."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.cost import gpu_steps
from benchmarks.cost.training import Model

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


def linear(size):
    """A layer that turns 4 integers into a loss."""

    def init(key):
        return {"w": jax.random.normal(key, (4, 4))}, ()

    def loss(params, other, batch, dtype):
        return jnp.mean((batch.astype(dtype) @ params["w"]) ** 2), other

    return Model(init, loss, jax.ShapeDtypeStruct((2, 4), jnp.int32))


def test_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_steps, "MODELS", {"gpt": linear, "llama": linear})
    variants = ["bfloat16", "float16", "float16-frozen", "fp8-frozen"]
    arguments = ["--models", "gpt", "--sizes", "tiny", "--variants", *variants, "--steps", "1"]
    gpu_steps.main([*arguments, "--rounds", "2", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert path.name == f"gpu_steps-cpu-jax{jax.__version__}.json"
    stored = json.loads(path.read_text())
    assert list(stored) == [f"gpt/tiny/{variant}" for variant in variants]
    rows = [row["result"] for row in stored.values()]
    assert all(0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"] for row in rows)
    assert "to bfloat16" in capsys.readouterr().out
    gpu_steps.main([*arguments, "--rounds", "2", "--minutes", "0", "--out", str(tmp_path)])
    assert "are left out" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_steps.main(["--rounds", "1"])
