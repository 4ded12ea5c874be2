"""`benchmarks/cost/kept.py`: its cases are steps that can be traced."""

import dataclasses

import pytest

from benchmarks.cost import kept


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fp8, recompute", marks=pytest.mark.full),
        "fp8, operands and dots saved",
    ],
)
def test_cases_are_steps(name, monkeypatch):
    sizes = dict(width=16, heads=2, groups=1, hidden=32, vocabulary=32, context=8)
    monkeypatch.setattr(kept, "SIZES", dataclasses.replace(kept.SIZES, **sizes))
    kind, policy = kept.CASES[name]
    step = kept.make_step(kind, kept.make("llama", 2, policy))
    assert step.jitted().eval_shape(step.state, step.batch)[1].shape == ()


def test_gpt_layers_are_rematerialised():
    model = kept.make("gpt", 1, "dots")
    assert model.batch.shape == (kept.SEQUENCES, 1025)
