"""How often loops run where the text does not say it: as XLA leaves them for TPUs."""

import pytest

from jax_scalify.numerics.hlo_costs import count_costs

PROGRAM = """
HloModule jit_f

%body (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %p = (s32[], f32[8], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %one = s32[] get-tuple-element(%p), index=2
  %two = s32[] constant(2)
  %next = s32[] {step}
  %y = f32[8] custom-call(%x), custom_call_target="work"
  ROOT %out = (s32[], f32[8], s32[]) tuple(%next, %y, {kept})
}}

%condition (p: (s32[], f32[8], s32[])) -> pred[] {{
  %limit = s32[] constant({limit})
  %p = (s32[], f32[8], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction={direction}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %first = s32[] constant({first})
  %begin = s32[] copy(%first)
  %one = s32[] constant(1)
  %start = (s32[], f32[8], s32[]) tuple(%begin, %x, %one)
  %loop = (s32[], f32[8], s32[]) while(%start), condition=%condition, body=%body
  ROOT %y = f32[8] get-tuple-element(%loop), index=1
}}
"""
PLAIN = dict(step="add(%i, %one)", kept="%one", limit=12, direction="LT", first=0)


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, 12),
        ({"step": "add(%one, %i)"}, 12),
        ({"step": "add(%i, %two)"}, 6),
        ({"first": 5}, 7),
        ({"first": 5, "step": "add(%i, %two)"}, 4),
        ({"direction": "LE"}, 13),
        ({"direction": "NE"}, 12),
        ({"first": 12, "limit": 0, "direction": "GT", "step": "subtract(%i, %one)"}, 12),
        ({"first": 11, "limit": 0, "direction": "GE", "step": "subtract(%i, %one)"}, 12),
        ({"first": 20}, 0),
    ],
)
def test_a_counter_tells(changes, runs):
    costs = count_costs(PROGRAM.format(**PLAIN | changes))
    calls = [k.runs for k in costs.kernels if k.opcode == "custom-call"]
    assert costs.endless == 0 and sum(calls) == runs


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "multiply(%i, %two)"},
        {"step": "subtract(%one, %i)"},
        {"kept": "%next"},  # what the counter grows by changes
        {"direction": "EQ"},
    ],
)
def test_what_is_no_counter_counts_once(changes):
    costs = count_costs(PROGRAM.format(**PLAIN | changes))
    assert costs.endless == 1
    assert [k.runs for k in costs.kernels if k.opcode == "custom-call"] == [1]
