"""The prose of the pages is free of the habits that `scripts/check_prose.py` finds."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "scripts").exists():
    pytest.skip("needs a clone", allow_module_level=True)
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "check_prose.py"))


@pytest.mark.parametrize(
    "line",
    [
        "What its derivatives interpret has none.",
        "It is static if that one's is.",
        "The number is another one at each\nstep.",
        "The scale must not flush the one that is taken.",
        "It takes 6 bytes a\nparameter.",
        "What is not finite is the LSTM.",
        "By its compiler, a step moves more bytes.",
        "Inside of the step, the guard asks for a calibration.",
        "A batch, of which only the shape matters.",
        "Float16 computes in what its operands promote to.",
    ],
)
def test_a_habit_is_found_at_its_line(line):
    found = list(SCRIPT["find"](f"A sentence.\n\n{line}\n"))
    assert found and {number for number, _, _ in found} <= {3, 4}


@pytest.mark.parametrize(
    "text",
    [
        "```python\n# inside of the step\n```",
        "| none | bytes a step |",
        "Call `outside of` or [this](limits.md#outside-of-the-step).",
        "<!-- what is not\nshown -->",
        "None of the steps returns None.",
        "Its bytes.\n\nA step moves them.",
        "Zeros have a scale\n\nA tensor has one scale per step.",
    ],
)
def test_code_tables_and_good_sentences_are_not(text):
    assert not list(SCRIPT["find"](text))


def test_the_pages_are_clean(capsys):
    assert SCRIPT["main"]([]) == 0, capsys.readouterr().out
