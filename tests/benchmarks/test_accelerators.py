"""`benchmarks/cost/accelerators.py`: its cells and tables, on the compiler of this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.linen")
pytest.importorskip("rich")

import jax_scalify as jsa
from benchmarks.cost import accelerators, decoder
from tests.helpers import is_scaled

TINY = decoder.Sizes(layers=2, width=32, heads=4, groups=2, vocabulary=64, sequences=2, tokens=8)


@pytest.mark.parametrize("fp8", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_decoder_of_shapes_is_one_that_trains(fp8):
    """The steps that are compiled for others run on this machine, and agree."""
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 64)
    losses = {}
    for name, step in {
        "plain": decoder.plain_step(TINY, dtype=jnp.float32),
        "scaled": decoder.scaled_step(TINY, fp8=fp8),
    }.items():
        params = decoder.init(TINY, jax.random.key(0))
        if name == "plain":
            state = params, decoder.make_optimizer().init(params)
        else:
            params = jsa.as_scaled_array(params, scale="rms", dtype="float16")
            optimizer = jsa.optim.low_precision(decoder.make_optimizer())
            state = params, jsa.as_scaled_array(optimizer.init(params))
        given = [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(state)]
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(step.state)] == given
        update, found = step.jitted(), []
        for _ in range(3):
            state, loss = update(state, tokens)
            found.append(float(loss))
        losses[name] = found
    assert losses["plain"][2] < losses["plain"][0]
    np.testing.assert_allclose(losses["scaled"], losses["plain"], rtol=2e-2 if fp8 else 2e-3)


def test_a_state_is_cut_over_devices():
    step = decoder.scaled_step(decoder.Sizes(), 8, frozen=True)
    specs = {str(x.sharding.spec) for x in jax.tree.leaves(step.state)}
    assert {s for s in specs if "data" in s} and step.tokens.shape == (16, 1025)
    assert all(isinstance(x.scale, float) for x in jsa.tree.leaves(step.state) if is_scaled(x))


def test_a_run_is_stored_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accelerators, "DEVICES", {"here": accelerators.Device(None, 1)})
    monkeypatch.setattr(accelerators, "Sizes", lambda: TINY)
    for name, number in (("WIDTH", 32), ("BATCH", 2), ("TOKENS", 16)):
        monkeypatch.setattr(accelerators, name, number)
    monkeypatch.setattr(accelerators, "LAYERS", ("bfloat16",))
    monkeypatch.setattr(accelerators, "STEPS", ("plain", "fp8-frozen"))
    page = tmp_path / "page.md"
    for missing in (5, 0):
        accelerators.main(["--targets", "here", "--out", str(tmp_path), "--docs", str(page)])
        assert f"5 cells, {5 - missing} of them finished before" in capsys.readouterr().out
    text = page.read_text()
    assert "## here: a layer" in text and "## here: a training step" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| bfloat16, ")]
    assert [row[0] for row in rows] == [f"| bfloat16, {v}" for v in ("plain", "static", "dynamic")]
    assert rows[0][1:5] == ["1.00", "1.00", "+0", "1.00"]
