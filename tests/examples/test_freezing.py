"""`--freeze-after` and `--rescale-every` of `examples/gpt`: how often the step is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from examples.gpt import step
from examples.gpt.checkpoint import Checkpoints
from examples.gpt.cli import main
from examples.gpt.config import SIZES, Config
from examples.gpt.presets import get_preset
from examples.gpt.records import read_lines
from examples.gpt.train import Run

SMALL = Config(layers=1, width=16, heads=2, context=8, batch=4, steps=8)


@pytest.fixture(autouse=True)
def compile_anew(counts_compilations):
    step.make_update.cache_clear()


def make_run(corpus, directory=None, preset="fp32-scaled", **options):
    return Run(preset, SMALL, 0, corpus, directory, 100, checkpoint_every=2, **options)


def compilations(preset="fp32-scaled"):
    """Return how often the step was compiled, with dynamic scales and with frozen ones."""
    updates = [step.make_update(SMALL, get_preset(preset), frozen=f) for f in (False, True)]
    return tuple(update._cache_size() for update in updates)


def final_state(run):
    like = step.init_state(run.config, get_preset(run.preset), seed=9)
    checkpoints = Checkpoints(run.directory / "checkpoints", run.settings)
    return checkpoints.restore(run.config.steps, jsa.freeze_scales((like, jnp.int32(0))))[0]


def double_one_scale(state):
    """Change the scale of a single leaf, not its value."""
    norm = state.params["final_norm"]
    norm["scale"] = jsa.rebalance_scale(norm["scale"], 2.0)
    return state


@pytest.mark.parametrize(
    "preset", [pytest.param(p, marks=pytest.mark.full) for p in ("fp32-scaled", "fp16-all")]
)
def test_freezing_compiles_once_more(corpus, preset):
    free = make_run(corpus, preset=preset).train()
    assert compilations(preset) == (1, 0)
    frozen = make_run(corpus, preset=preset, freeze_after=3).train()
    assert compilations(preset) == (1, 1)
    tolerance = 1e-5 if preset == "fp32-scaled" else 1e-3
    assert frozen.validation_loss == pytest.approx(free.validation_loss, rel=tolerance)
    assert frozen.first_bad_step is None


def test_plain_presets_have_nothing_to_freeze(corpus):
    make_run(corpus, preset="fp32", freeze_after=2, rescale_every=3).train()
    assert compilations("fp32") == (1, 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rescale", "count"), [(lambda state: state, 1), (double_one_scale, 2)], ids=["same", "other"]
)
def test_a_rescale_compiles_only_if_it_changes_a_scale(corpus, monkeypatch, rescale, count):
    rescaled = []

    def once(state):
        rescaled.append(state)
        return rescale(state) if len(rescaled) == 1 else state

    monkeypatch.setattr(step, "rescale", once)
    make_run(corpus, freeze_after=2, rescale_every=3).train()
    assert len(rescaled) == 2  # after steps 3 and 6
    assert compilations() == (1, count)


@pytest.mark.full
@pytest.mark.parametrize(
    "preset", [pytest.param("fp32-scaled", marks=pytest.mark.full), "fp16-all"]
)
def test_rescaled_data_is_near_one(preset):
    state = step.init_state(SMALL, get_preset(preset), seed=0)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 9)).astype(np.int32)
    for _ in range(3):
        state, _ = step.make_update(SMALL, get_preset(preset))(state, tokens)
    before = [np.array(np.asarray(leaf, np.float32)) for leaf in jsa.tree.leaves(state)]
    state = jsa.freeze_scales(step.rescale(state))
    again = jsa.freeze_scales(step.rescale(jsa.thaw_scales(jax.tree.map(jnp.copy, state))))
    assert jax.tree.structure(again) == jax.tree.structure(state)  # nothing to compile
    adam = state.opt_state[1][0]
    for leaf in jsa.tree.leaves((state.params, adam.mu)):
        assert 0.9 <= np.sqrt(np.mean(np.square(leaf.data, dtype=np.float64))) <= 2.1
    for leaf in jsa.tree.leaves(adam.nu):
        assert step.NU_TARGET * 0.9 <= np.max(leaf.data) <= step.NU_TARGET * 2.1
    for got, want in zip(jsa.tree.leaves(state), before, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2e-3, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    "preset, killed_at",
    [
        pytest.param("fp32-scaled", 2, id="dynamic-fp32-scaled", marks=pytest.mark.full),
        pytest.param("fp16-all", 5, id="frozen-fp16-all"),
        pytest.param("fp32-scaled", 5, id="frozen-fp32-scaled", marks=pytest.mark.full),
        pytest.param("fp16-all", 2, id="dynamic-fp16-all", marks=pytest.mark.full),
    ],
)
def test_resume_continues_exactly(tmp_path, corpus, preset, killed_at):
    options = {"preset": preset, "freeze_after": 3, "rescale_every": 5}
    whole = make_run(corpus, tmp_path / "whole", **options)
    result = whole.train()

    def kill(number, *_):
        if number > killed_at:
            raise KeyboardInterrupt

    killed = make_run(corpus, tmp_path / "killed", **options)
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(killed, evaluate_every=1).train(progress=kill)
    resumed = killed.train(resume=True)

    assert resumed.validation_loss == result.validation_loss
    states = [final_state(run) for run in (whole, killed)]
    assert all(leaf.is_static for leaf in jsa.tree.leaves(states[0].params))
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    for got, want in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    losses = [
        [line["loss"] for line in read_lines(run.directory / "metrics.jsonl") if "loss" in line]
        for run in (whole, killed)
    ]
    assert losses[0] == losses[1]


def test_a_run_of_other_scales_is_not_resumed(tmp_path, corpus):
    make_run(corpus, tmp_path, freeze_after=3).train()
    with pytest.raises(ValueError, match="was made with freeze_after=3 .this run: None."):
        make_run(corpus, tmp_path).train(resume=True)


def test_command_line_freezes(tmp_path, monkeypatch, capsys, corpus):
    monkeypatch.setitem(SIZES, "tiny", SMALL)
    arguments = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    for option, message in {
        "--freeze-after=1": "`freeze_after` must be at least 2",
        "--rescale-every=0": "`rescale_every` must be positive",
    }.items():
        assert main([*arguments, option]) == 2
        assert message in capsys.readouterr().err
    options = ["--preset", "fp32-scaled", "--steps", "8", "--freeze-after", "2"]
    assert main([*arguments, *options]) == 0
    assert compilations() == (1, 1)
