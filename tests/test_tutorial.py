"""The tutorial shows its script: every cell, in order, and nothing else."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_shows_the_script():
    script = (DOCS / "tutorial.py").read_text()
    page = (DOCS / "tutorial.md").read_text()
    cells = [cell.partition("\n")[2].strip() for cell in re.split(r"(?m)^# %% ", script)[1:]]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert [block.strip() for block in blocks] == cells
