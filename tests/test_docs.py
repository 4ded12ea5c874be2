"""The documentation: the reference has every public name, code compiles, links lead somewhere.

A page that has `<!-- run` with some lines of set-up in it is run: its python blocks in order, in
one namespace. Blocks with `>>>` are doctests on every page.
"""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += [p for p in sorted(DOCS.rglob("*.md")) if "_build" not in p.parts]

MODULES = {
    "jsa": "jax_scalify",
    **{
        name: f"jax_scalify.{name}"
        for name in (
            *("nn", "nn.linen", "nn.nnx", "ops", "lax", "tree", "optim", "fp8", "numerics"),
            *("checkpoint", "checkpoint_policies", "serving", "testing", "unit_scaling"),
            *("unit_scaling.functional", "unit_scaling.constraints", "unit_scaling.optim"),
            *("unit_scaling.nnx", "unit_scaling.linen", "integrations.keras"),
        )
    },
}
# Functions that a neighbour's example shows, and those of `jax.tree` and `jax.nn`.
NO_EXAMPLE = {
    "jsa": "unpack_scales",
    "nn": "elu geglu gelu glu leaky_relu log_softmax sigmoid silu softplus squared_relu swiglu "
    "swish tanh",
    "nn.linen": "dot_product_attention",
    "nn.nnx": "dot_product_attention",
    "tree": "all flatten leaves structure unflatten",
    "fp8": "everything hidden_layers linear_layers skip_critical skip_embedding skip_head "
    "skip_router",
    "checkpoint": "restore",
}


def _value(page, name):
    return getattr(importlib.import_module(MODULES[page]), name)


def _is_custom(value):
    return isinstance(value, jsa.custom_scale)


def _listed(page):
    """The names in the `api` lists of a page."""
    blocks = re.findall(
        r"^\.\. api::\n\n((?:   .*\n?)+)", (REFERENCE / f"{page}.rst").read_text(), re.M
    )
    return [name for block in blocks for name in block.split()]


def _docstring(page, name):
    """The docstring of a name; of data, the string below its definition."""
    value = _value(page, name)
    if inspect.isclass(value) or inspect.isroutine(value) and value.__name__ == name:
        return inspect.getdoc(value) if value.__doc__ else ""
    if _is_custom(value):
        return value.__doc__
    body = ast.parse(Path(importlib.import_module(MODULES[page]).__file__).read_text()).body
    for node, after in zip(body, body[1:], strict=False):
        target = getattr(node, "targets", [getattr(node, "target", None)])[0]
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(target) == name:
            return after.value.value if isinstance(after, ast.Expr) else ""
    return value.__doc__


def test_every_public_module_has_a_page():
    assert {path.stem for path in REFERENCE.glob("*.rst")} == set(MODULES)
    modules = {n for n in jsa.__all__ if inspect.ismodule(getattr(jsa, n))}
    assert modules <= set(MODULES)
    toctrees = (REFERENCE / "index.md").read_text() + "".join(
        (REFERENCE / f"{page}.rst").read_text() for page in ("nn", "unit_scaling")
    )
    assert [page for page in MODULES if not re.search(rf"^ *{page}$", toctrees, re.M)] == []


@pytest.mark.parametrize("page", MODULES)
def test_the_reference_has_every_public_name_and_no_other(page):
    module = importlib.import_module(MODULES[page])
    assert f".. automodule:: {module.__name__}\n" in (REFERENCE / f"{page}.rst").read_text()
    public = [n for n in module.__all__ if not inspect.ismodule(getattr(module, n))]
    assert sorted(_listed(page)) == sorted(public)


@pytest.mark.parametrize("page", MODULES)
def test_every_public_name_has_a_docstring(page):
    module = importlib.import_module(MODULES[page])
    assert module.__doc__
    assert [name for name in module.__all__ if not _docstring(page, name)] == []


def _raises(docstring):
    """The entries below `Raises:`, each in one line."""
    below = re.search(r"^Raises:\n((?:    .*\n?|\n)+)", docstring, re.M)
    entries = re.findall(r"^    (\S.*(?:\n {5,}.*)*)", below[1], re.M) if below else []
    return [re.sub(r"\s+", " ", entry) for entry in entries]


@pytest.mark.parametrize("page", MODULES)
def test_errors_are_documented_as_conditions(page):
    """The form is "TypeError: if ...", "TypeError: when called, if ..." or "as `f` raises it"."""
    found = []
    for name in _listed(page):
        value = _value(page, name)
        members = vars(value).items() if inspect.isclass(value) else ()
        documented = {name: _docstring(page, name)}
        documented |= {
            f"{name}.{member}": inspect.getdoc(function)
            for member, function in members
            if not member.startswith("_") and inspect.isfunction(function)
        }
        for place, docstring in documented.items():
            found += [
                f"{place}: {entry}"
                for entry in _raises(docstring or "")
                if not re.match(r"\w+: (([\w` ]+, )?if |as `[\w.]+` raises it\b)", entry)
            ]
    assert found == []


@pytest.mark.parametrize("page", MODULES)
def test_every_public_function_has_an_example(page):
    values = {name: _value(page, name) for name in _listed(page)}
    functions = [n for n, v in values.items() if inspect.isroutine(v) or _is_custom(v)]
    without = [n for n in functions if ">>>" not in _docstring(page, n)]
    assert sorted(without) == NO_EXAMPLE.get(page, "").split()


def _blocks(text):
    """The python blocks of a page, as `(line, code)`."""
    for match in re.finditer(r"^( *)```python\n(.*?)^ *```$", text, re.M | re.S):
        code = re.sub(rf"^{match[1]}", "", match[2], flags=re.M)
        yield text[: match.start(2)].count("\n"), code


def _name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_the_code_of_a_page_compiles_and_its_doctests_pass(path):
    text = path.read_text()
    blocks = list(_blocks(text))
    assert len(blocks) == len(re.findall(r"^ *```python", text, re.M))
    names = {"jax": jax, "jnp": jnp, "np": np, "jsa": jsa}
    for line, code in blocks:
        if ">>> " in code:
            test = doctest.DocTestParser().get_doctest(code, {}, path.name, str(path), line)
            test.globs = names
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
            assert not runner.run(test, clear_globs=False).failed
        else:
            compile("\n" * line + code, str(path), "exec")


SET_UP = re.compile(r"^<!-- run\n(.*?)^-->$", re.M | re.S)


@pytest.mark.parametrize("path", [p for p in PAGES if SET_UP.search(p.read_text())], ids=_name)
def test_the_code_of_a_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = path.read_text()
    names = {}
    exec(SET_UP.search(text)[1], names)
    for line, code in _blocks(text):
        exec(compile("\n" * line + code, str(path), "exec"), names)


def _slug(heading):
    """The anchor of a heading, as GitHub and MyST make it."""
    words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return words.replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_lead_to_files_and_headings(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"", text):
        target = unquote("".join(link))
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists():
            broken.append(target)
        elif anchor and found.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            if anchor not in map(_slug, headings):
                broken.append(target)
    assert broken == []
