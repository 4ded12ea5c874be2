"""The code of the pages of documentation runs, and prints what the pages say.

The blocks of a page run in order, in one namespace. `<!-- full -->` in the line above a block: only
with `--full`. A `text` block behind a `python` block is what that prints, but for its numbers.
"""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

from jax_scalify.interpreter import registry

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    "start how_it_works tutorial frameworks rules fp8 block_scales optimizers coming_from limits "
    "recipes serving integrations/equinox integrations/haiku integrations/keras".split()
)  # errors: test_error_pages; scale_out: test_sharding, on eight devices
BLOCK = re.compile(
    r"(?P<full><!-- full -->\n)?```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?",
    re.DOTALL,
)
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


def without_numbers(text):
    return re.sub(r"[\s-]+", " ", NUMBER.sub("#", text)).strip()


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, request, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")  # with the extra `examples` everything that pages use is there
    # The page of Keras chooses the backend before it imports Keras.
    if page.startswith("integrations/") and not importlib.util.find_spec(page.partition("/")[2]):
        pytest.skip("the library of this page is not installed")
    monkeypatch.chdir(tmp_path)
    for name in ("_rules", "_warned"):  # a page may register rules
        monkeypatch.setattr(registry, name, getattr(registry, name).copy())
    run_page(page, full=request.config.getoption("--full"))


def run_page(page, *, full):
    """Run the blocks of a page, and compare what they print with what it says."""
    text = (DOCS / f"{page}.md").read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python")
    namespace = {"__name__": page}
    for block in blocks:
        if block["full"] and not full:
            continue
        printed = io.StringIO()
        line = text[: block.start("code")].count("\n")
        code = compile("\n" * line + block["code"], f"{page}.md", "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block["output"] is not None:
            assert without_numbers(printed.getvalue()) == without_numbers(block["output"])


@pytest.mark.parametrize("page", [*PAGES, "scale_out"])
def test_the_links_of_a_page_lead_to_files(page):
    text = (DOCS / f"{page}.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (DOCS / page).parent.joinpath(target).exists(), target


def test_the_first_page_says_what_the_readme_says():
    readme = (DOCS.parent / "README.md").read_text().replace("](docs/", "](")
    index = (DOCS / "index.md").read_text()
    for start, end in (
        ("**Train", "## Install"),
        ("```python", "## What"),
        ("| | float16", "## W"),
    ):
        shared = readme[readme.index(start) :]
        assert shared[: shared.index(f"\n{end}")].strip() in index


def test_the_readme_calls_every_page_by_its_title():
    links = (DOCS.parent / "README.md").read_text().partition("\n## Documentation\n")[2]
    listed = dict(re.findall(r"\[([^]]+)\]\(docs/(\w+)\.md\)", links))
    titles = {}
    for file in DOCS.glob("*.md"):
        title = re.search(r"^# (.+)$", file.read_text(), re.MULTILINE)
        if title and file.stem != "index":
            titles[title[1]] = file.stem
    assert listed == titles
