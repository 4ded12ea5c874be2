"""`--track` of `examples/gpt`: what is in `track.jsonl`, and for TensorBoard."""

import shutil
import types

import pytest

import jax_scalify as jsa
from examples.gpt import step, tracking
from examples.gpt.cli import main
from examples.gpt.config import SIZES, Config
from examples.gpt.presets import get_preset
from examples.gpt.records import read_lines
from examples.gpt.train import Run

SMALL = Config(layers=1, width=16, heads=2, context=8, batch=4, steps=6)
PARAMETER = "args[0].params['blocks'][0]['attention']['qkv']['kernel']"


@pytest.fixture(autouse=True)
def compile_anew():
    step.make_update.cache_clear()


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
    monkeypatch.setattr(tracking, "tensorboardX", None)


def make_run(corpus, directory, preset="fp16-all", **options):
    return Run(preset, SMALL, 0, corpus, directory, 100, checkpoint_every=2, **options)


def records(directory):
    lines = read_lines(directory / "track.jsonl")
    return [line["step"] for line in lines], [line["tensors"] for line in lines]


@pytest.mark.full
def test_a_record_every_n_steps_changes_nothing_else(corpus, tmp_path):
    plain = make_run(corpus, tmp_path / "plain").train()
    assert not (tmp_path / "plain" / "track.jsonl").exists()
    tracked = make_run(corpus, tmp_path / "tracked", track_every=2).train()
    assert tracked.validation_loss == plain.validation_loss
    steps, tensors = records(tmp_path / "tracked")
    assert steps == [2, 4, 6]
    state = step.init_state(SMALL, get_preset("fp16-all"), seed=0)
    leaves = [x for x in jsa.tree.leaves(state) if isinstance(x, jsa.ScaledArray)]
    for each in tensors:
        assert len(each) == len(leaves)
        found = each[PARAMETER]
        assert found["scale_exponent"] < 0 and abs(found["log2_rms"]) < 2
        assert found["overflow"] == found["nonfinite"] == 0 <= found["underflow"] < 0.05


@pytest.mark.full
def test_tracking_through_freezing_rescales_and_resuming(corpus, tmp_path):
    options = dict(track_every=2, freeze_after=3, rescale_every=4)
    run = make_run(corpus, tmp_path, "fp32-scaled", **options)
    run.train()
    whole = records(tmp_path)
    assert whole[0] == [2, 4, 6]
    (tmp_path / "result.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    assert run.check_directory(resume=True) == 4
    run.train(resume=True)
    assert records(tmp_path) == whole


@pytest.mark.full
def test_selected_values(corpus, tmp_path):
    select = ["backward/*block_0*", "args[0].params"]
    run = make_run(corpus, tmp_path, "fp32", track_every=6, track_select=select)
    run.train()
    steps, (tensors,) = records(tmp_path)
    assert steps == [6] and PARAMETER in tensors
    assert any(name.startswith("backward/block_0") for name in tensors)
    assert tensors[PARAMETER]["scale_exponent"] is None
    with pytest.raises(ValueError, match="no value is called 'blok'"):  # at the first step
        make_run(corpus, tmp_path / "other", "fp32", track_every=6, track_select=["blok"]).train()


class Writer:
    """What tensorboardX offers."""

    def __init__(self, directory, purge_step):
        self.directory, self.purge_step, self.scalars, self.flushed = directory, purge_step, [], 0

    def add_scalar(self, tag, value, global_step):
        self.scalars.append((tag, value, global_step))

    def flush(self):
        self.flushed = len(self.scalars)


@pytest.mark.newest
def test_events_for_tensorboard(corpus, tmp_path, monkeypatch):
    writers = []

    def make(*args, **kwargs):
        writers.append(Writer(*args, **kwargs))
        return writers[-1]

    monkeypatch.setattr(tracking, "tensorboardX", types.SimpleNamespace(SummaryWriter=make))
    select = ["args[0].params"]
    make_run(corpus, tmp_path, "fp32", track_every=3, track_select=select).train()
    (writer,) = writers
    assert writer.directory == str(tmp_path / "tensorboard") and writer.purge_step == 1
    assert writer.flushed == len(writer.scalars)
    _, tensors = records(tmp_path)
    found = {(tag, at): value for tag, value, at in writer.scalars}
    assert found[f"log2_rms/{PARAMETER}", 6] == tensors[1][PARAMETER]["log2_rms"]


@pytest.mark.full
def test_command_line(tmp_path, monkeypatch, capsys, text):
    monkeypatch.setitem(SIZES, "tiny", SMALL)
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    arguments = ["--preset", "fp16-all", "--steps", "4", "--text", str(path)]
    out = tmp_path / "out"
    assert main([*arguments, "--out", str(out), "--track", "2"]) == 0
    printed = capsys.readouterr().out
    assert "track.jsonl" in printed and "pip install tensorboardX" in printed
    assert records(out / "fp16-all")[0] == [2, 4]
    assert main([*arguments, "--out", str(tmp_path / "no"), "--track", "0"]) == 2
    assert "`track_every` must be positive, got 0" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "no"), "--track-select", "x"]) == 2
    assert "`track_select` needs `track`" in capsys.readouterr().err
