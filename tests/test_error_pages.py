"""docs/errors.md quotes what the library raises: every block of code, and the message below it."""

import re
import warnings
from pathlib import Path

import pytest

from jax_scalify.interpreter import registry

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
SETUP, *EXAMPLES = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, re.DOTALL)


def normal(text):
    """The words of a message, without places."""
    text = re.sub(r"errors\.md:[\d:]+", "errors.md", text)
    return " ".join(re.sub(r"'/\S*/", "'/", text).split())


def raised_by(code, namespace):
    """The message, with the note of jax_scalify, of the error or else the first warning."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            exec(compile(code, "errors.md", "exec"), namespace)
        except Exception as error:
            notes = [n for n in getattr(error, "__notes__", ()) if n.startswith("jax_scalify")]
            return "\n".join([f"{type(error).__name__}: {error}", *notes])
    return f"{type(found[0].message).__name__}: {found[0].message}"


def test_the_page_quotes_what_is_raised(monkeypatch, tmp_path):
    pytest.importorskip("optax")
    pytest.importorskip("equinox")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_warned", set())
    assert len(EXAMPLES) == PAGE.count("```text") > 25
    namespace = {"__name__": "errors"}
    exec(SETUP[0], namespace)
    for code, quoted in EXAMPLES:
        assert normal(raised_by(code, namespace)) == normal(quoted)
