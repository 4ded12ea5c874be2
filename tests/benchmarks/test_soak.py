"""Short runs of `benchmarks/accuracy/soak.py` and of its situations, and what the tables say."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jax_scalify as jsa
from benchmarks.accuracy import situations, soak
from benchmarks.accuracy.small_problems import PROBLEMS, TrainState, scaled_state

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


@pytest.mark.full
def test_a_short_run_is_stored_compared_and_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(soak, "EVERY", 4)
    monkeypatch.setattr(soak, "LOOK_EVERY", 4)
    arguments = "--problems digits --ways float32 rescale average --situations".split()
    for _ in range(2):  # the second time nothing is left to do
        soak.main([*arguments, "--steps", "8", "--leaves", "--out", str(tmp_path)])
        printed = capsys.readouterr().out
        assert "average of the weights in float16: loss" in printed
        assert "never" in printed and "nu/hidden/kernel" in printed and "FAIL" not in printed
    assert "starting" not in printed
    assert (tmp_path / "soak-digits.png").stat().st_size > 1000
    stored = json.loads((tmp_path / f"soak-jax{jax.__version__}.json").read_text())
    cells = {key: cell["result"] for key, cell in stored.items()}
    assert cells["rescale/digits"]["bytes"] == pytest.approx(6, abs=0.05)
    assert len(cells["rescale/digits"]["history"]["mu/out/bias"]) == 2
    average = cells["average/digits"]
    assert average["bytes"] == pytest.approx(8, abs=0.05)
    assert len(average["history"]["average/out/bias"]) == 2
    assert "reference/out/bias" not in average["history"]
    assert average["average"]["distance"] < 1e-3
    assert average["average"]["loss"] == pytest.approx(average["average"]["reference_loss"], 1e-3)


def test_a_whole_state_is_rescaled_by_role():
    optimizer = soak.make_optimizer(PROBLEMS["digits"], 10)
    state = scaled_state(optimizer, PROBLEMS["digits"].init(0))
    filled = jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-6, x.dtype), state.opt_state[0])
    state = TrainState(state.params, jsa.as_scaled_array((filled,), dtype=jnp.float16))
    sizes = soak.look(soak.rescale(state))
    assert sizes["mu/hidden/kernel"] == (0, 0)
    assert sizes["nu/hidden/kernel"] == (10, 10)
    assert abs(sizes["weights/hidden/kernel"][0]) <= 1


def test_zeros_have_no_size():
    state = TrainState({"w": jnp.zeros(2, jnp.float16)}, ())
    assert soak.look(state) == {"weights/w": (-math.inf, -math.inf)}


def test_what_is_far_or_not_finite_is_said(capsys):
    history = {f"{kind}/w": [[0.5, 2.5], [1.25, 3.0]] for kind in ("weights", "mu", "nu")}
    cell = {"loss": 2.0, "first_bad_step": -1, "bytes": 6.0, "history": history}
    cells = {
        "float32/gpt": cell,
        "gradient/gpt": cell | {"loss": 2.01},
        "rescale/gpt": cell | {"first_bad_step": 17},
        "statistic/gpt": cell | {"loss": 2.03},
    }
    ways = [key.partition("/")[0] for key in cells]
    Console(width=160).print(soak.summarise(cells, "gpt", ways))
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line for line in printed.splitlines() if line.split()}
    assert "pass" in lines["gradient"] and "+0.50%" in lines["gradient"]
    assert "FAIL" in lines["rescale"] and "step 17" in lines["rescale"]
    assert "FAIL" in lines["statistic"]


@pytest.mark.full
@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["statistic", "gradient"])
@pytest.mark.parametrize("name", list(situations.SITUATIONS))
def test_situations(name, policy, monkeypatch):
    monkeypatch.setattr(situations, "STEPS", 60)
    monkeypatch.setattr(situations, "QUIET", 40)
    checks = situations.SITUATIONS[name](policy)
    assert not situations.failures(checks), checks
    assert abs(checks["gap"]) < 1, checks


def test_the_table_of_situations(capsys):
    checks = {"gap": 0.2, "finite": True, "(nearest, %)": 3.0}
    cells = {
        "situations/frozen-parameters/gradient": checks,
        "situations/rare-rows/statistic": checks | {"finite": False},
        "float32/gpt": {},
    }
    Console(width=160).print(situations.summarise(cells))
    frozen, rare = (line for line in capsys.readouterr().out.splitlines() if "nearest" in line)
    assert "pass" in frozen and "nearest, %: +3.00" in frozen
    assert "FAIL" in rare and "finite" in rare


def test_same_bits():
    a, b = {"x": np.float16([1, 2])}, {"x": np.float16([1, 2.001])}
    assert situations.same_bits(a, a) and not situations.same_bits(a, b)


def test_bad_arguments_are_refused(capsys):
    for arguments, message in (
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--ways", "fp4"], "invalid choice: 'fp4'"),
    ):
        with pytest.raises(SystemExit):
            soak.main(arguments)
        assert message in capsys.readouterr().err
