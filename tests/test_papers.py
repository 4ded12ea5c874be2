"""docs/papers.md: no cell is empty, and each command and path that it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "papers.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith("| ---")]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
CODES = sorted(set(re.findall(r"`([^`]+)`", PAGE)))
COMMANDS = [code for code in CODES if code.startswith(("make ", "python -m ", "pytest "))]
FOLDERS = ("jax_scalify/", "benchmarks/", "examples/", "tests/", "docs/")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_no_cell_is_empty(row):
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert len(cells) in (4, 5) and all(cells)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists(command):
    if command.startswith("make "):
        assert command.split()[1] in TARGETS
    elif command.startswith("python -m "):
        module = ROOT / command.split()[2].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()
    else:
        assert all((ROOT / file).exists() for file in command.split()[1:] if "/" in file)


def test_paths_exist():
    paths = [code for code in CODES if code.startswith(FOLDERS)]
    assert len(paths) > 30
    assert not [path for path in paths if not (ROOT / path).exists()]
