"""The pictures of docs/how_it_works.md can be drawn."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "make_pictures.py"
PICTURES = {
    "data_and_scale": ["how-data-and-scale.png"],
    "one_operation_each": ["how-operations.png"],
    "both_passes": ["how-plain.png", "how-scaled.png"],
    "over_training": ["how-training.png"],
}


@pytest.mark.parametrize(
    "name",
    [n if n == "data_and_scale" else pytest.param(n, marks=pytest.mark.full) for n in PICTURES],
)
def test_a_picture_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("optax")
    runpy.run_path(str(SCRIPT))[name](*(tmp_path / file for file in PICTURES[name]))
    page = (SCRIPT.parent / "how_it_works.md").read_text()
    for file in PICTURES[name]:
        assert (tmp_path / file).stat().st_size > 1000
        assert (SCRIPT.parent / file).exists() and f"({file})" in page
