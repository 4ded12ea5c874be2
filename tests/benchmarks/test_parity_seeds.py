"""All seeds in one program: each is trained as if it were alone; what is stored is `parity`'s."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy import parity, parity_seeds, scale_models

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


def test_a_program_trains_all_seeds_or_leaves_them_as_they_are():
    def step(state, batch):
        return state + batch, state

    program = parity_seeds.make_program(step)
    batches = jnp.arange(6.0).reshape(3, 2)
    state, losses = program(jnp.array([1.0, 10.0]), batches, True)
    np.testing.assert_array_equal(state, [7.0, 19.0])
    np.testing.assert_array_equal(losses, [[1, 10], [1, 11], [3, 14]])
    state, losses = program(state, batches, False)
    np.testing.assert_array_equal(state, [7.0, 19.0])
    np.testing.assert_array_equal(losses, [[7, 19]] * 3)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["dynamic", "frozen"])
def test_seeds_end_where_they_end_alone(mode, monkeypatch):
    monkeypatch.setattr(parity_seeds, "CHUNK", 4)
    for module in (parity, parity_seeds):
        monkeypatch.setattr(module, "HELD_OUT_BATCHES", 4)
    module = functools.partial(scale_models.ResMLP, depth=1)
    model = scale_models.make_model("vit", module, parity.image_batch)
    alone = parity.train(model, "fp8", mode, 1, 8, 2e-3)
    _, second = parity_seeds.train(model, "fp8", mode, 2, 8, 2e-3)
    assert second["loss"] == pytest.approx(alone["loss"], rel=0.01)
    assert second["loss_in_float32"] == pytest.approx(alone["loss_in_float32"], rel=0.01)
    assert second["calibrations"] == (mode == "frozen")
    assert second["first_bad_step"] == -1


def test_cells_are_those_of_parity(tmp_path, capsys, monkeypatch):
    ran = []

    def train(model, variant, mode, seeds, steps, rate, calibrations, track):
        ran.append(variant)
        loss = 1.0 if variant == "float32" else 1.001
        row = {"loss": loss, "loss_in_float32": loss, "first_bad_step": -1, "calibrations": 0}
        return [row | {"seconds": 1.0}] * seeds

    monkeypatch.setattr(parity_seeds, "train", train)
    arguments = ["--models", "vit", "--seeds", "3", "--steps", "50", "--out", str(tmp_path)]
    for _ in range(2):
        parity_seeds.main([*arguments, "--variants", "float32", "fp8-gradients"])
    assert ran == ["float32", "fp8-gradients"]
    (path,) = tmp_path.iterdir()
    assert path.name == f"parity-cpu-jax{jax.__version__}.json"
    keys = [
        f"vit/50/{v}/{seed}"
        for v in ("float32/plain", "fp8-gradients/dynamic")
        for seed in range(3)
    ]
    assert sorted(json.loads(path.read_text())) == sorted(keys)
    assert "+0.10%" in capsys.readouterr().out
    for wrong in (["--steps", "70"], ["--steps", "50", "--modes", "frozen"], ["--seeds", "0"]):
        with pytest.raises(SystemExit):
            parity_seeds.main(wrong)
