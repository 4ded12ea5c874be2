"""`benchmarks/cost/accelerators.py`: its cells and tables, on the compiler of this machine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.linen")
pytest.importorskip("rich")

import jax_scalify as jsa
from benchmarks.cost import accelerators, decoder, flax_models, training
from examples.llama.model import Sizes
from tests.helpers import is_scaled

pytestmark = pytest.mark.newest  # its command runs on the newest JAX

TINY = Sizes(2, 32, 4, 2, hidden=64, vocabulary=64, context=8)
TINY_GPT = flax_models.GptSizes(layers=1, width=32, vocabulary=64, sequences=2, tokens=8)
TINY_RESNET = flax_models.ResNetSizes(widths=(8, 16), classes=5, images=4, pixels=16)
full = pytest.mark.full


@pytest.mark.parametrize(
    ("model", "fp8"),
    [
        pytest.param("llama", False, marks=full),
        pytest.param("llama", True, marks=full),
        pytest.param("moe", True, marks=full),
        pytest.param("gpt", True, marks=full),
        pytest.param("resnet", True, marks=full),
    ],
)
def test_a_step_of_shapes_is_one_that_trains(model, fp8):
    """The steps that are compiled for others run on this machine, and agree."""
    made = {
        "llama": lambda: decoder.make_decoder(sizes=TINY),
        "moe": lambda: decoder.make_decoder(sizes=dataclasses.replace(TINY, experts=4)),
        "gpt": lambda: flax_models.make_gpt(TINY_GPT),
        "resnet": lambda: flax_models.make_resnet(TINY_RESNET),
    }[model]()

    def draw(leaf):
        if leaf.dtype == jnp.int32:
            return jax.random.randint(jax.random.key(1), leaf.shape, 0, 5)
        return jax.random.normal(jax.random.key(1), leaf.shape, leaf.dtype)

    batch = jax.tree.map(draw, made.batch)
    losses = {}
    for name, step in {
        "plain": training.plain_step(made, dtype=jnp.float32),
        "scaled": training.scaled_step(made, fp8=fp8),
    }.items():
        params, other = made.init(jax.random.key(0))
        if name == "plain":
            state = params, other, training.make_optimizer().init(params)
        else:
            params = jsa.as_scaled_array(params, scale="rms", dtype="float16", static=True)
            optimizer = jsa.optim.low_precision(training.make_optimizer())
            state = params, *jsa.as_scaled_array((other, optimizer.init(params)))
        given = [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(state)]
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(step.state)] == given
        update, found = step.jitted(), []
        for _ in range(3):
            state, loss = update(state, batch)
            found.append(float(loss))
        losses[name] = found
    assert losses["plain"][2] < losses["plain"][0]
    np.testing.assert_allclose(losses["scaled"], losses["plain"], rtol=2e-2 if fp8 else 2e-3)


def test_a_state_is_cut_over_devices():
    step = training.scaled_step(decoder.make_decoder(8), 8, frozen=True)
    specs = {str(x.sharding.spec) for x in jax.tree.leaves(step.state)}
    assert {s for s in specs if "data" in s} and step.batch.shape == (16, 1025)
    assert all(isinstance(x.scale, float) for x in jsa.tree.leaves(step.state) if is_scaled(x))


@pytest.mark.full
def test_a_run_is_stored_and_shown(tmp_path, monkeypatch, capsys):
    device = accelerators.Device(None, 1, (1e12, 2e12), 1e11, others=True)
    monkeypatch.setattr(accelerators, "DEVICES", {"here": device})
    models = {"llama": lambda devices: decoder.make_decoder(devices, TINY)}
    monkeypatch.setattr(accelerators, "MODELS", models)
    monkeypatch.setattr(accelerators, "OTHERS", ("flax",))
    for name, number in (("WIDTH", 32), ("BATCH", 2), ("TOKENS", 16)):
        monkeypatch.setattr(accelerators, name, number)
    monkeypatch.setattr(accelerators, "LAYERS", ("bfloat16",))
    monkeypatch.setattr(accelerators, "STEPS", ("plain", "fp8-frozen"))
    page = tmp_path / "page.md"
    for missing in (6, 0):
        accelerators.main(["--targets", "here", "--out", str(tmp_path), "--docs", str(page)])
        assert f"6 cells, {6 - missing} of them finished before" in capsys.readouterr().out
    text = page.read_text()
    assert "## here: a layer" in text and "## here: a training step" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| bfloat16, ")]
    assert [row[0] for row in rows] == [f"| bfloat16, {v}" for v in ("plain", "static", "dynamic")]
    assert rows[0][1:5] == ["1.00", "1.00", "+0", "1.00"]
    assert "| flax |" in text and "| here, llama, fp8-frozen |" in text
    assert "](accelerators.png)" in text and (tmp_path / "accelerators.png").stat().st_size > 5000
