"""Tests of `examples/gpt`: bad input, exact resume, and two steps of every preset."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from examples.gpt import data, step
from examples.gpt.checkpoint import Checkpoints
from examples.gpt.cli import main
from examples.gpt.config import SIZES, Config, get_size
from examples.gpt.presets import PRESETS, describe, get_preset
from examples.gpt.records import read_lines
from examples.gpt.report import plot_losses, result_table
from examples.gpt.train import Run

SMALL = Config(layers=1, width=16, heads=2, context=8, batch=4, steps=6)
TRAINED = ("fp32", "fp16-all", "fp8-4")  # the others with --full


def make_run(corpus, directory=None, preset="fp16-all", **changes):
    config = dataclasses.replace(SMALL, **changes)
    return Run(preset, config, 0, corpus, directory, evaluate_every=100, checkpoint_every=2)


class Killed(Exception):
    """Stands for a kill in the middle of a run."""


def train_and_kill(run, at):
    def progress(step, loss, tokens_per_second):
        if step >= at:
            raise Killed

    with pytest.raises(Killed):
        run.train(progress=progress)


def final_state(run):
    like = step.init_state(run.config, get_preset(run.preset), seed=9)
    checkpoints = Checkpoints(run.directory / "checkpoints", run.settings)
    assert checkpoints.latest_step() == run.config.steps
    return checkpoints.restore(run.config.steps, (like, jnp.int32(0)))


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def shapes_and_dtypes(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


# Data


def test_python_carries_enough_english():
    corpus = data.load_corpus(None, context=64)
    assert corpus.train.size > 300_000
    assert b"statement" in corpus.train.tobytes()
    assert 0.09 < corpus.held_out.size / corpus.train.size < 0.12


def test_batches_depend_on_seed_and_step_only(corpus):
    def batch(seed, step):
        return data.train_batch(corpus, seed=seed, step=step, batch=4, context=8)

    assert batch(0, 3).shape == (4, 9)
    np.testing.assert_array_equal(batch(0, 3), batch(0, 3))
    assert (batch(0, 3) != batch(0, 4)).any()
    assert (batch(0, 3) != batch(1, 3)).any()


def test_held_out_batches_span_the_held_out_part(corpus):
    batches = data.held_out_batches(corpus, batches=2, batch=3, context=8)
    np.testing.assert_array_equal(batches[0][0], corpus.held_out[:9])
    np.testing.assert_array_equal(batches[-1][-1], corpus.held_out[-9:])


def test_files_are_joined_as_bytes(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, text in zip(paths, (b"\xff" * 90, b"\x00" * 109), strict=True):
        path.write_bytes(text)
    corpus = data.load_corpus(paths, context=8)
    assert (
        corpus.train.tobytes() + corpus.held_out.tobytes() == b"\xff" * 90 + b"\n" + b"\x00" * 109
    )


def test_text_that_is_missing_empty_or_a_directory(tmp_path):
    (tmp_path / "empty").touch()
    for name, message in {"none": "No such file", "empty": "is empty", "": "directory"}.items():
        with pytest.raises(ValueError, match=f"`text`.*{message}"):
            data.load_corpus([tmp_path / name], context=8)


@pytest.mark.parametrize("text", ["book.txt", b"book.txt", [3]])
def test_text_of_the_wrong_type(text):
    with pytest.raises(TypeError, match="`text` must"):
        data.load_corpus(text, context=8)


@pytest.mark.parametrize(
    ("size", "part"), [(5, "training"), (9, "held-out"), (89, "held-out"), (90, None)]
)
def test_text_shorter_than_one_context(tmp_path, text, size, part):
    path = tmp_path / "text.txt"
    path.write_bytes(text[:size])
    if part is None:
        assert data.load_corpus([path], context=8).held_out.size == 9
    else:
        with pytest.raises(ValueError, match=f"`text` is too short: its {part} part"):
            data.load_corpus([path], context=8)


# Settings


def test_gpt2_168m_has_168_million_parameters():
    state = jax.eval_shape(
        lambda: step.init_state(get_size("gpt2-168m"), get_preset("fp32"), seed=0)
    )
    assert step.count_parameters(state) == pytest.approx(168e6, rel=0.005)


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(ValueError, match="`size` must be one of tiny, small.*'huge'"):
        get_size("huge")
    with pytest.raises(ValueError, match="`preset` must be one of fp32, fp32-scaled.*'fp4'"):
        get_preset("fp4")


@pytest.mark.parametrize(
    ("name", "value"), [("steps", 0), ("width", 15), ("b2", 1.0), ("learning_rate", -1.0)]
)
def test_settings_that_make_no_model(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        dataclasses.replace(SMALL, **{name: value})


# Training


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "name",
    [name if name in TRAINED else pytest.param(name, marks=pytest.mark.full) for name in PRESETS],
)
def test_two_steps_of_every_preset(corpus, name):
    preset = get_preset(name)
    state = step.init_state(SMALL, preset, seed=0)
    update = step.make_update(SMALL, preset)
    structure, first = jax.tree.structure(state), shapes_and_dtypes(state)
    for number in range(2):
        tokens = data.train_batch(corpus, seed=0, step=number, batch=4, context=8)
        state, loss = update(state, tokens)
    assert 5.0 < float(loss) < 7.0  # log 256 is 5.5
    assert jax.tree.structure(state) == structure
    assert shapes_and_dtypes(state) == first
    assert bool(step.state_is_finite(state))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].scaled])
def test_every_primitive_of_a_preset_has_a_rule(name):
    config, preset = dataclasses.replace(get_size("tiny"), layers=1), get_preset(name)
    state = step.init_state(config, preset, seed=0)
    tokens = np.zeros((config.batch, config.context + 1), np.int32)
    with jsa.ScalifyConfig(missing_rule="error"):
        step.make_update.__wrapped__(config, preset).trace(state, tokens)
        step.make_evaluate.__wrapped__(config, preset).trace(state.params, tokens)


def test_shared_functions_stay_shared():
    config = dataclasses.replace(SMALL, layers=4)
    tokens = np.zeros((config.batch, config.context + 1), np.int32)

    def count_functions(name):
        preset = get_preset(name)
        state = step.init_state(config, preset, seed=0)
        return step.make_update(config, preset).lower(state, tokens).as_text().count("func.func")

    plain, ours = count_functions("fp32"), count_functions("fp32-scaled")
    print(f"functions: plain {plain}, ours {ours}")  # `pytest -rP` shows it
    assert ours <= 1.1 * plain


@pytest.mark.full
def test_scales_do_not_change_the_result_in_float32(corpus):
    results = [make_run(corpus, preset=name).train() for name in ("fp32", "fp32-scaled")]
    assert results[0].validation_loss == pytest.approx(results[1].validation_loss, rel=1e-5)


def test_a_value_that_is_not_finite_is_found_at_its_first_step():
    good = {"x": jnp.ones(3, jnp.float16), "count": jnp.int32(0)}
    bad = good | {"x": jnp.array([1, jnp.inf, 1], jnp.float16)}
    found = jnp.int32(-1)
    for number, state in enumerate([good, bad, good, bad]):
        found = step.first_bad_step(found, state, np.int32(number))
    assert int(found) == 1


def test_metrics_and_result(tmp_path, corpus):
    run = make_run(corpus, tmp_path / "run")
    result = run.train()
    lines = read_lines(run.directory / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert lines[-1] == {"step": 6, "validation_loss": result.validation_loss}
    assert result.bits_per_byte == pytest.approx(result.validation_loss / np.log(2))
    assert result.first_bad_step is None
    assert json.loads((run.directory / "result.json").read_text()) == dataclasses.asdict(result)


# Checkpoints


@pytest.mark.sampled(16)
@pytest.mark.parametrize("preset", ["fp16-all", "fp32"])
def test_resume_continues_exactly(tmp_path, corpus, preset):
    whole = make_run(corpus, tmp_path / "whole", preset)
    result = whole.train()

    killed = make_run(corpus, tmp_path / "killed", preset)
    train_and_kill(killed, at=5 if preset == "fp32" else 3)
    # What a kill in the middle of a save and of a line leaves behind:
    (killed.directory / "checkpoints" / "6.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with (killed.directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    resumed = killed.train(resume=True)

    assert_same_bits(final_state(killed), final_state(whole))
    assert resumed.validation_loss == result.validation_loss
    losses = [
        [line["loss"] for line in read_lines(run.directory / "metrics.jsonl") if "loss" in line]
        for run in (whole, killed)
    ]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_resume_of_a_finished_run_returns_its_result(tmp_path, corpus):
    run = make_run(corpus, tmp_path / "run")
    result = run.train()
    assert run.train(resume=True) == result
    (run.directory / "result.json").unlink()  # killed just before it was written
    assert run.train(resume=True).validation_loss == result.validation_loss


def test_a_checkpoint_of_other_settings_is_refused_and_stays(tmp_path, corpus):
    run = make_run(corpus, tmp_path / "run")
    run.train()
    kept = final_state(run)
    files = sorted(run.directory.rglob("*"))
    for other, name in (
        (make_run(corpus, run.directory, width=32), "width=16"),
        (make_run(corpus, run.directory, preset="fp32"), "preset='fp16-all'"),
        (make_run(corpus, run.directory, b2=0.5), "b2=0.95"),
    ):
        with pytest.raises(ValueError, match=f"`resume`.*was made with.*{name}"):
            other.train(resume=True)
    assert sorted(run.directory.rglob("*")) == files
    assert_same_bits(final_state(run), kept)


def test_a_directory_with_checkpoints_is_not_overwritten(tmp_path, corpus):
    run = make_run(corpus, tmp_path / "run")
    run.train()
    with pytest.raises(ValueError, match="`out`.*holds the checkpoints of another run"):
        run.train()
    assert run.train(resume=True).first_bad_step is None


def test_every_dtype_survives_a_checkpoint(tmp_path):
    dtypes = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int32)
    tree = [{"x": jnp.array([0.3, -7.0, 0.0]).astype(dtype)} for dtype in dtypes]
    checkpoints = Checkpoints(tmp_path, {"preset": "none"})
    checkpoints.save(3, tree)
    assert checkpoints.latest_step() == 3
    assert_same_bits(checkpoints.restore(3, tree), tree)


# Command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "fp4"], "`preset` must be one of fp32, "),
        (["--size", "huge"], "`size` must be one of tiny, "),
        (["--steps", "0"], "`steps` must be positive"),
        (["--seed", "-1"], "`seed` must not be negative"),
        (["--b2", "1.5"], "`b2` must be in"),
        (["--text", "no-such-file"], "`text`: cannot read 'no-such-file'"),
        (["--resume"], "`resume` needs `out`"),
        (["--resume", "--out", "no-such-run"], "`resume` needs `out`"),
        (["--checkpoint-every", "0"], "`checkpoint_every` must be positive"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_command_line_trains_and_reports(tmp_path, monkeypatch, capsys, corpus):
    monkeypatch.setitem(SIZES, "tiny", SMALL)
    out = tmp_path / "out"
    arguments = ["--text", str(tmp_path / "text.txt"), "--out", str(out), "--steps", "6"]
    assert main([*arguments, "--preset", "fp32", "fp16-all"]) == 0
    printed = capsys.readouterr().out
    for word in ("tokens/s", "left", "fp16-all", "gap", "loss.png"):
        assert word in printed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--preset", "fp32"]) == 2
    assert "`out`" in capsys.readouterr().err
    assert main([*arguments, "--preset", "fp32", "--resume", "--untied"]) == 2
    assert "`resume`" in capsys.readouterr().err
    shutil.rmtree(out / "fp32")
    assert main([*arguments, "--preset", "fp32", "fp16-all", "--resume"]) == 0


def test_table_and_plot_of_a_run_that_went_wrong(tmp_path, corpus):
    result = make_run(corpus).train()
    broken = dataclasses.replace(
        result, preset="fp16-plain", validation_loss=float("nan"), first_bad_step=4
    )
    table = result_table([result, broken], title="title")
    assert list(table.columns[-1].cells) == ["never", "4"]
    assert list(table.columns[7].cells) == ["-", "-"]  # no fp32 to compare with
    lines = [{"step": i, "loss": 3.0 if i < 4 else float("nan")} for i in range(1, 9)]
    plot_losses({"fp32": lines, "fp16-plain": lines}, tmp_path / "x.png", title="title")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_every_linear_layer_multiplies_fp8_in_both_passes():
    config, preset = dataclasses.replace(SMALL, layers=2), get_preset("fp8-all")
    state = jax.eval_shape(lambda: step.init_state(config, preset, seed=0))
    tokens = jax.ShapeDtypeStruct((config.batch, config.context + 1), jnp.int32)
    update = step.make_update(config, preset)
    report = jsa.numerics.check_fp8(update, state, tokens, compile=False)
    # qkv, projection, up and down: forward, and the gradients of the input and of the weights.
    expected = {"forward": ("f8e4m3fn", "f8e4m3fn", 4), "backward": ("f8e5m2", "f8e4m3fn", 8)}
    for block in range(config.layers):
        for phase, (lhs, rhs, count) in expected.items():
            rows = [r for r in report.rows if (r.name, r.phase) == (f"block_{block}", phase)]
            narrow = [r for r in rows if r.has_fp8_operands]
            assert [(r.lhs, r.rhs, r.out) for r in narrow] == [(lhs, rhs, "bf16")] * count
            attention = [(r.lhs, r.rhs) for r in rows if not r.has_fp8_operands]
            assert attention == [("f16", "f16")] * (2 if phase == "forward" else 4)
    others = [(r.lhs, r.rhs) for r in report.rows if not r.name.startswith("block_")]
    assert others == [("f16", "f16")] * 3  # the head


def test_presets_are_described_by_their_dtypes():
    assert describe(get_preset("fp8-4")) == {
        "weights": "fp16",
        "gradients": "E5M2",
        "moments": "fp16",
        "matmuls": "E4M3/E5M2",
    }
