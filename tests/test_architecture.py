"""The imports of the package, against the table of layers that docs/architecture.md shows."""

import ast
import functools
import graphlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jax_scalify"


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table = _load(ROOT / "docs" / "make_architecture.py")


def _name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


FILES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _found(node, when):
    """Every imported name below a node, and when: at "import", in a "function", for "types"."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, when) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"a relative import: {ast.unparse(child)}"
            yield from ((f"{child.module}.{alias.name}", when) for alias in child.names)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _found(child, "function")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _found(child, "types")
        else:
            yield from _found(child, when)


@functools.cache
def _imports(module):
    return set(_found(ast.parse(FILES[module].read_text()), "import"))


def _own(module):
    """The modules of the package that one imports, and when."""
    own = set()
    for name, when in _imports(module):
        parts = name.split(".")
        if parts[0] == "jax_scalify":
            names = [".".join(parts[1:n]) for n in (len(parts), len(parts) - 1)]
            own.add((next((n for n in names if n in FILES), "__init__"), when))
    return own


def test_the_table_is_read_as_it_is_written():
    assert {"_compat", "__init__", "rules.summing", "nn", "nn.linen"} <= set(FILES)
    assert ("base.pow2", "import") in _own("scales.algebra")
    assert table.layer_of("rules.summing") == table.layer_of("rules")
    assert table.layer_of("nn.linen") > table.layer_of("nn.fp8_dot")


def test_all_kinds_of_imports_are_seen(tmp_path, monkeypatch):
    source = tmp_path / "module.py"
    source.write_text(
        "from jax_scalify.base import pow2\n"
        "if TYPE_CHECKING:\n    from jax_scalify.scales import table\n"
        "def f():\n    from jax_scalify import transform\n"
    )
    monkeypatch.setitem(FILES, "tried", source)
    found = {("base.pow2", "import"), ("scales.table", "types"), ("transform", "function")}
    assert _own("tried") == found


def test_every_module_has_a_layer_and_every_entry_a_module():
    assert [name for name in FILES if table.layer_of(name) is None] == []
    entries = [entry for layer in table.LAYERS for entry in layer.modules]
    assert len(entries) == len(set(entries))
    assert [entry for entry in entries if entry not in FILES] == []


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module):
    upwards = [o for o, _ in _own(module) if table.layer_of(o) > table.layer_of(module)]
    assert upwards == [], "a module imports only from its own layer or lower ones"


def test_there_are_no_cycles():
    graph = {m: {o for o, _ in _own(m)} for m in FILES}  # those for types, in functions, too
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("base.pow2") < order.index("transform") < order.index("__init__")


@pytest.mark.parametrize("module", FILES)
def test_all_imports_of_the_package_are_at_the_top(module):
    assert [other for other, when in _own(module) if when != "import"] == []


def test_the_root_holds_what_is_public_and_no_file_is_long():
    assert len([name for name in FILES if "." not in name and FILES[name].parent == PACKAGE]) <= 12
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def test_only_one_file_knows_jax_internals():
    private = {m for m in FILES for name, _ in _imports(m) if name.startswith(("jax._", "jaxlib"))}
    assert private == {"_compat"}


@pytest.mark.parametrize("module", FILES)
def test_what_is_imported_from_outside(module):
    allowed = {"jax", "jax_scalify", "ml_dtypes", "numpy", *sys.stdlib_module_names}
    allowed |= table.extras_of(module)
    outside = {name.split(".")[0] for name, when in _imports(module) if when == "import"}
    assert outside <= allowed, "other packages are imported by the functions that need them"


def test_optional_modules_are_imported_by_nobody_else():
    for module in FILES:
        if not table.extras_of(module):
            assert [other for other, _ in _own(module) if table.extras_of(other)] == []


def test_the_picture_shows_the_table():
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    for layer in table.LAYERS:
        for text in (layer.name, *layer.modules):
            assert f">{text}<" in picture, "run `python docs/make_architecture.py`"


def test_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`([\w./]+(?:\.py|/))`", text))
    assert len(named) > 20
    missing = [n for n in named if not ((ROOT / n).exists() or (PACKAGE / n).exists())]
    assert not missing


@pytest.mark.parametrize(
    "where", ["CONTRIBUTING.md", "docs/architecture.md", "docs/how_it_works.md"]
)
def test_pages_name_functions_that_exist(where):
    """Functions that a page names with their file: "`name` in `folder/file.py`"."""
    text = (ROOT / where).read_text()
    pairs = re.findall(r"`(\w+)`(?: in | \()`([\w/]+\.py)`", text)
    for name, file in pairs:
        path = PACKAGE / file if (PACKAGE / file).exists() else ROOT / file
        assert re.search(rf"\b{name}\b", path.read_text()), f"{where}: {name} is not in {file}"
