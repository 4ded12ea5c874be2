"""Every public function that takes floats is in the catalogue, or listed with the reason."""

import collections

import jax.numpy as jnp
import pytest

from tests.fuzz.catalogue import MODULES, MOVES, TABLE, names_in, statements
from tests.fuzz.not_covered import NOT_COVERED
from tests.fuzz.programs import is_taken

COVERED = set().union(*map(names_in, TABLE))
PUBLIC = {
    (module, name)
    for module, namespace in MODULES.items()
    for name in dir(namespace)
    if not name.startswith("_")
    and callable(getattr(namespace, name))
    and not isinstance(getattr(namespace, name), type)
    and not isinstance(getattr(namespace, name), jnp.dtype)
}
# Namespaces of JAX that export a type as a function.
PUBLIC -= {("lax", "DotDimensionNumbers"), ("lax", "PrecisionLike")}
PUBLIC -= {("lax", "ConvGeneralDilatedDimensionNumbers")}


def test_every_public_function_is_covered_or_listed():
    assert sorted(PUBLIC - COVERED - set(NOT_COVERED)) == []


def test_what_is_covered_is_not_listed():
    assert sorted(COVERED & set(NOT_COVERED)) == []


def test_every_statement_is_there_once():
    counts = collections.Counter(TABLE)
    assert [t for t, n in counts.items() if n > 1] == []


def test_statements_that_move_elements_are_in_the_table():
    assert sorted(MOVES - set(TABLE)) == []


def test_this_version_of_jax_has_nearly_all_functions():
    assert len(TABLE) - len(statements()) < 10


@pytest.mark.parametrize("module", MODULES)
def test_names_are_read_from_sources(module):
    assert names_in(f"1 + {module}.sum({{x}})") == {(module, "sum")}


@pytest.mark.parametrize("template", statements())
def test_jax_takes_every_statement(template):
    assert any(is_taken(template, "float32", k) for k in range(12))
