"""The notebooks: what is stored in them, and that they run."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ("quickstart", "fp8")
RESULT = re.compile(r"held-out loss: float32 (\S+), .* (\S+) \((\S+)%\)")
PATHS = re.compile(r"/(home|root|tmp|usr|opt|work|Users|var|private)/|site-packages|[A-Z]:\\")


def read(name):
    return nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell shows: text, pictures."""
    found = []
    for output in cell.outputs:
        assert output.output_type in ("stream", "execute_result", "display_data"), output
        assert output.get("name") != "stderr", output.text  # warnings
        kind = sorted(output.get("data", {"stream": None}))
        if kind != ["stream"] or kind not in found[-1:]:  # a stream comes in one piece or in many
            found.append(kind)
    return found


def text(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "\n".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)


def check_result(notebook):
    (found,) = RESULT.findall(text(notebook))
    plain, narrow, gap = map(float, found)
    assert 0.05 < plain < 0.4 and abs(gap) < 5
    assert narrow == pytest.approx(plain * (1 + gap / 100), abs=1e-3)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_stored_was_executed_in_order(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not PATHS.search(text(notebook))
    assert not any(re.search("warning", str(cell.outputs), re.IGNORECASE) for cell in cells)
    pictures = [kind for cell in cells for kind in kinds(cell) if "image/png" in kind]
    assert len(pictures) == 3
    check_result(notebook)
    assert (ROOT / "examples" / f"{name}.ipynb").stat().st_size < 500_000


@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    stored, fresh = read(name), read(name)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(fresh, timeout=240, resources=resources).execute()
    assert list(map(kinds, code_cells(fresh))) == list(map(kinds, code_cells(stored)))
    check_result(fresh)
