"""`benchmarks/cost/steps.py`: what it counts, its models, a short run, and what its tables say."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cost import steps as cost
from benchmarks.cost.models import MODELS, VARIANTS, make_gpt, make_mlp, make_scanned_gpt
from benchmarks.cost.programs import count_hlo, count_stablehlo, scalar_arithmetic
from examples.gpt.config import Config

TINY = Config(layers=2, width=16, heads=2, context=8, batch=2)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(MODELS, "mlp-8x64", functools.partial(make_mlp, (8, 4, 4)))
    monkeypatch.setattr(cost, "first_call_in_new_process", cost.first_call)


# Counts


def test_values_and_scalars_are_counted():
    lowered = jax.jit(lambda x: x * (2 * x[0])).lower(jnp.ones(3)).as_text()
    # slice, reshape, 2, multiply, broadcast, multiply
    assert count_stablehlo(lowered) == {"stablehlo": 6, "scalars": 3}
    assert scalar_arithmetic(lowered) == {"reshape f32": 1, "multiply f32": 1}


def test_scalar_arithmetic_is_that_of_scales():
    def fun(x, count, bits):
        return x.max() * 2, count + 1, bits ^ 1, x > 0

    text = jax.jit(fun).lower(jnp.ones(3), jnp.int32(0), jnp.uint32(0)).as_text()
    assert scalar_arithmetic(text) == {"reduce f32": 1, "multiply f32": 1, "xor ui32": 1}


def test_instructions_of_fused_computations_are_counted():
    text = """
%fused (p: f32[3]) -> f32[3] {
  %p = f32[3]{0} parameter(0)
  ROOT %add = f32[3]{0} add(%p, %p)
}

ENTRY %main (x: f32[3]) -> f32[3] {
  %x = f32[3]{0} parameter(0)
  ROOT %f = f32[3]{0} fusion(%x), kind=kLoop, calls=%fused
}
"""
    assert count_hlo(text) == {"hlo": 4, "fusions": 1}


# Models


def test_variants_are_the_same_computation():
    problem = make_mlp((8, 4, 4))
    losses, scales = {}, problem.find_scales()
    for variant in VARIANTS:
        update, state = problem.setting(variant, scales)
        losses[variant] = []
        for _ in range(3):
            state, loss = update(state, problem.batch)
            losses[variant].append(float(loss))
    for variant in VARIANTS:
        np.testing.assert_allclose(losses[variant], losses["plain"], rtol=1e-5)


@pytest.mark.full
def test_scanned_layers_are_the_same_model():
    plain, scanned = make_gpt(TINY), make_scanned_gpt(TINY)
    losses = [problem.loss(*problem.init(), problem.batch)[0] for problem in (plain, scanned)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    state = scanned.scaled_state()
    kernel = state.params["blocks"]["feed_forward"]["up"]["kernel"]
    assert kernel.shape == (2, 16, 64) and kernel.scale.shape == (2, 1, 1)
    frozen = scanned.frozen_state([1.0] * len(jax.tree.leaves(scanned.plain_state())))
    assert frozen.params["blocks"]["feed_forward"]["up"]["kernel"].is_static


# Runs


def test_a_short_run_is_stored_and_shown(tmp_path, tiny, capsys):
    page = tmp_path / "cost.md"
    arguments = "--models mlp-8x64 --repeats 2 --steps 2".split()
    for _ in range(2):  # the second time nothing is left to do
        cost.main([*arguments, "--out", str(tmp_path), "--docs", str(page)])
        printed = capsys.readouterr().out
        assert "ratios to the plain step" in printed and "sizes of the programs" in printed
    assert "1 of them finished before" in printed
    stored = json.loads((tmp_path / f"cost-jax{jax.__version__}.json").read_text())
    result = stored["mlp-8x64"]["result"]
    assert list(result) == [v for v in VARIANTS if v != "static-weights"]  # of recipes only
    assert result["dynamic"]["scalars"] > result["frozen"]["scalars"]
    for variant in result:
        first, median, third = result[variant]["first_call"]
        assert 0 < first <= median <= third
    text = page.read_text()
    assert f"## JAX {jax.__version__}" in text and "| mlp-8x64 | frozen |" in text


@pytest.mark.full
def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="KeyError: 'no-such-model'"):
        cost.first_call_in_new_process("no-such-model", "plain", ())


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--repeats", "-1"], ["--models", "x"]])
def test_bad_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        cost.main(arguments)
    assert arguments[0] in capsys.readouterr().err
