"""One short run of `benchmarks/accuracy/parity.py`, and what its table says."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jax_scalify as jsa
from benchmarks.accuracy import parity, parity_steps, scale_models

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


@pytest.mark.full
def test_a_short_run_ends_where_float32_does():
    module = functools.partial(scale_models.ResMLP, depth=1)
    model = scale_models.make_model("vit", module, parity.image_batch)
    plain = parity.train(model, "float32", "plain", 0, 3, 2e-3)
    frozen = parity.train(model, "fp8", "frozen", 0, 3, 2e-3)
    assert frozen["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert (plain["calibrations"], frozen["calibrations"]) == (0, 1)
    assert frozen["first_bad_step"] == -1


def test_what_is_finished_is_stored_and_not_run_again(tmp_path, capsys, monkeypatch):
    ran = []

    def train(model, variant, mode, seed, steps, rate):
        ran.append((variant, mode))
        loss = 1.0 if variant == "float32" else 1.001
        losses = {"loss": loss, "loss_in_float32": loss - 0.002}
        return losses | {"first_bad_step": -1, "calibrations": 1, "commit": parity.commit()}

    monkeypatch.setattr(parity, "train", train)
    arguments = ["--models", "vit", "--seeds", "0", "--steps", "3", "--out", str(tmp_path)]
    for variants in (["float32"], ["float32", "fp8"], ["float32", "fp8"]):
        parity.main([*arguments, "--variants", *variants])
    assert ran[0][0] == "float32" and ran[1:] == [("fp8", "dynamic"), ("fp8", "frozen")]
    stored = json.loads((tmp_path / f"parity-jax{jax.__version__}.json").read_text())
    assert list(stored)[:2] == ["vit/3/float32/plain/0", "vit/3/fp8/dynamic/0"]
    assert all(cell["result"]["commit"] for cell in stored.values())
    capsys.readouterr()
    parity.main([*arguments, "--variants", "fp8", "bfloat16", "--table"])
    printed = capsys.readouterr().out
    assert printed.count("+0.10%") == 2 * printed.count("-0.10%") == 4
    assert len(ran) == 3
    file = tmp_path / f"parity-jax{jax.__version__}.json"
    stored = ["--models", "vit", "--steps", "3", "--modes", "frozen", "--table", str(file)]
    parity.main([*stored, "--variants", "fp8"])
    printed = capsys.readouterr().out
    assert "frozen" in printed and "dynamic" not in printed and len(ran) == 3
    parity.main(stored)
    printed = capsys.readouterr().out
    assert "float32" in printed and "fp8" not in printed
    parity.main([*arguments, "--variants", "fp8", "--modes", "frozen", "--seeds", "1"])
    assert "has a float32 one to compare with" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no other.json"):
        parity.main(["--table", "other.json"])


def test_training_and_held_out_images_differ():
    images = parity.digits()[0]
    parts = images[: parity.TRAINING_IMAGES], images[parity.TRAINING_IMAGES :]
    shifts = list(itertools.product((-1, 0, 1), repeat=2))
    for held_out in (False, True):
        batch = parity.image_batch(0, 1, held_out)
        assert batch["inputs"].shape == (32, 8, 8, 1)
        unshifted = np.stack([np.roll(batch["inputs"], shift, (1, 2)) for shift in shifts])
        same, other = (
            (unshifted[:, :, None] == part).all((3, 4, 5)).any((0, 2))
            for part in parts[:: 1 - 2 * held_out]
        )
        assert same.all() and not other.any()
    assert np.array_equal(parity.image_batch(0, 1)["labels"], parity.image_batch(0, 1)["labels"])


def test_a_finish_in_float16_changes_the_step_and_not_the_state():
    assert parity_steps.phases("fp8-finish-20", 1000) == [(0, "fp8-hidden"), (800, "float16")]
    assert parity_steps.phases("float16", 1000) == [(0, "float16")]
    module = functools.partial(scale_models.ResMLP, depth=1)
    model = scale_models.make_model("vit", module, parity.image_batch)
    states = [
        jax.eval_shape(parity_steps.make_step(model, variant, 10, 2e-3)[0], 0)
        for variant in ("fp8-hidden", "float16")
    ]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert jax.tree.leaves(states[0]) == jax.tree.leaves(states[1])


def test_layers_are_chosen_by_their_path():
    def chosen(pattern):
        return [m.scope for m in matmuls if parity_steps.only(pattern)(m)]

    matmuls = []

    def select(matmul):
        matmuls.append(matmul)
        return True

    model = parity.find_models()["llama"]
    params, other = jax.eval_shape(lambda: model.init(0))
    loss = jsa.fp8_matmuls(lambda *x: model.loss(*x, scale_models.PLAIN, jnp.float16)[0], select)
    jax.eval_shape(loss, params, other, model.batch(0, 0))
    names = {options: chosen(options) for options in ("attention/out", "feed_forward/(gate|up)")}
    assert [len(found) for found in names.values()] == [4, 8]
    assert all("out" in scope for scope in names["attention/out"])


def test_the_table_says_what_misses_and_what_is_not_finite(capsys):
    fine = {"first_bad_step": -1, "calibrations": 1, "loss_in_float32": 2.0}
    cells = {
        "bert/5/float32/plain/0": fine | {"loss": 2.0, "calibrations": 0},
        "bert/5/float32/plain/1": fine | {"loss": 1.0, "calibrations": 0},
        "bert/5/fp8/frozen/0": fine | {"loss": 2.02},
        "bert/5/fp8/frozen/1": fine | {"loss": 1.03, "first_bad_step": 7},
        "bert/5/float16/dynamic/0": fine | {"loss": 2.001},
        "vit/5/fp8/frozen/0": fine | {"loss": 2.001},  # nothing to compare it with
    }
    Console(width=140).print(parity.summarise(cells, 5))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "bert" in line]
    assert [line[:4] for line in lines] == [
        ["bert", "float32", "plain", "2"],
        ["bert", "float16", "dynamic", "1"],
        ["bert", "fp8", "frozen", "2"],
    ]
    assert lines[1][5:7] == ["+0.05%", "-"] and lines[1][-2] == "open"
    assert lines[1][8] == "+0.00%"
    assert lines[2][5:7] == ["+2.00%", "1.00"] and "open" in lines[2] and "FINITE" in lines[2]
    assert [parity._verdict(gap, 0.04, 0.15) for gap in (0.19, 0.22, 0.3)] == [
        "ok",
        "open",
        "MISSED",
    ]


def test_bad_arguments_are_refused(capsys):
    for arguments, message in (
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--models", "gpt12"], "invalid choice: 'gpt12'"),
    ):
        with pytest.raises(SystemExit):
            parity.main(arguments)
        assert message in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_told(capsys):
    cell = {"first_bad_step": -1, "calibrations": 0, "loss": 1.0, "loss_in_float32": 1.0}
    lost = cell | {"first_bad_step": 3, "loss": float("nan"), "loss_in_float32": float("nan")}
    cells = {f"vit/3/float32/plain/{seed}": cell for seed in range(2)}
    cells |= {f"vit/3/fp8/frozen/{seed}": lost for seed in range(2)}
    Console(width=150).print(parity.summarise(cells, 3))
    assert "NOT FINITE" in capsys.readouterr().out
