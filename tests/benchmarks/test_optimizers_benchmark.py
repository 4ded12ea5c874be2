"""Short runs of `benchmarks/accuracy/optimizers.py`, and what its tables say."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from benchmarks.accuracy import alternatives, optimizers
from benchmarks.accuracy.small_problems import PROBLEMS
from benchmarks.cells import Cells, Store

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


def test_every_optimizer_of_optax_is_run_or_skipped_with_a_reason():
    found = optimizers.find_optimizers()
    assert {"optax.adam", "optax.lbfgs", "contrib.muon", "contrib.sophia"} <= set(found)
    assert not set(found) & set(optimizers.SKIPPED)
    named = {*optimizers.SKIPPED, *optimizers.ARGUMENTS, *optimizers.EXTRA, *optimizers.NO_DECAY}
    for name in named:
        module, _, function = name.partition(".")
        module = optax if module == "optax" else optax.contrib
        assert hasattr(module, function.partition(":")[0]), name


@pytest.mark.full
def test_a_short_run_is_stored_and_compared(tmp_path, capsys):
    arguments = "--parts optimizers --optimizers optax.adam --problems digits --seeds 0 1".split()
    for _ in range(2):  # the second time nothing is left to do
        optimizers.main([*arguments, "--steps", "5", "--out", str(tmp_path)])
        printed = capsys.readouterr().out
        assert "pass" in printed and "not run: contrib.dpsgd" in printed
    assert "1 of them finished before" in printed
    stored = json.loads((tmp_path / f"optimizers-jax{jax.__version__}.json").read_text())
    cell = stored["optax.adam/digits"]["result"]
    assert cell["bytes"] == pytest.approx(6, abs=0.05)
    assert cell["float32_bytes"] == pytest.approx(12, abs=0.05)
    assert cell["losses"] == pytest.approx(cell["float32"], rel=0.01)


def test_the_smallest_good_rate_is_chosen():
    losses = {rate: abs(math.log10(rate) + 2) + 1 for rate in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)}
    tried = []

    def train(rate):
        tried.append(rate)
        return losses.get(rate, 1.05 if rate < 1e-2 else math.nan)

    assert optimizers.choose_rate(train) == 3e-3
    assert len(tried) == 6


def test_what_misses_or_fails_is_said(capsys):
    good = {"rate": 0.1, "float32": [1.0, 1.0], "rounded": [1.0, 1.001], "losses": [1.0, 1.002]}
    good |= {"first_bad_step": -1, "bytes": 6.0, "float32_bytes": 12.0}
    cells = {
        "optax.good/digits": good,
        "optax.far/digits": good | {"losses": [1.02, 1.03]},
        "optax.bad/digits": good | {"first_bad_step": 3},
        "optax.broken/digits": good | {"error": "TypeError: no"},
        "optax.good/gpt": good | {"rate": 0.7},
    }
    Console(width=140).print(optimizers.summarise(cells, "digits"))
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line for line in printed.splitlines() if "optax." in line}
    assert "pass" in lines["optax.good"] and "0.7" not in printed
    assert all("FAIL" in lines[f"optax.{name}"] for name in ("far", "bad", "broken"))
    assert "TypeError: no" in lines["optax.broken"] and "1.0250" in lines["optax.far"]


@pytest.mark.full
@pytest.mark.parametrize("variant", ["dynamic", "float16", "bfloat16", "ours-fp8"])
def test_alternatives(variant):
    cell = alternatives.train(variant, PROBLEMS["digits"], [0], 3)
    sizes = {"dynamic": 12, "float16": 6, "bfloat16": 6, "ours-fp8": 5}
    assert cell["bytes"] == pytest.approx(sizes[variant], abs=0.06)
    assert cell["first_bad_step"] == -1 or variant == "float16"


def test_a_loss_scale_is_halved_by_what_is_not_finite_and_doubled_in_time():
    scale = alternatives.LossScale(jnp.float32(8), jnp.int32(3))
    bad = scale.adjust(jnp.bool(False))
    assert (float(bad.scale), int(bad.good)) == (4, 0)
    for _ in range(alternatives.GOOD_STEPS):
        bad = bad.adjust(jnp.bool(True))
    assert (float(bad.scale), int(bad.good)) == (8, 0)


def test_a_step_that_overflows_is_skipped_and_changes_nothing():
    problem = PROBLEMS["digits"]
    first, step, _ = alternatives.make_variant("dynamic", problem, 4)
    state, scale = first(problem.init(0))
    scale = scale._replace(scale=jnp.float32(2.0**60))
    batch = jax.tree.map(lambda x: x[0], problem.batches(0, 1))
    (after, scale), _, skipped = jax.jit(step)((state, scale), batch)
    assert int(skipped) == 1 and float(scale.scale) == 2.0**59
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_a_cell_of_other_settings_is_run_again(tmp_path, capsys):
    calls = []

    def task():
        calls.append(1)
        return {"x": len(calls)}

    for settings, wanted in (({"steps": 1}, 1), ({"steps": 1}, 1), ({"steps": 2}, 2)):
        cells = Cells(Store(tmp_path / "x.json"), False, Console())
        cells.add({"a": task}, settings)
        assert cells.run() == {"a": {"x": wanted}}


def test_bad_arguments_are_refused(capsys):
    for arguments, message in (
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--optimizers", "optax.none"], "invalid choice: 'optax.none'"),
    ):
        with pytest.raises(SystemExit):
            optimizers.main(arguments)
        assert message in capsys.readouterr().err
