"""Tests of the page on what is lost: how tensors are paired, and what it says of them."""

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("flax")
pytest.importorskip("optax")

from benchmarks.accuracy import numerics_page
from jax_scalify.numerics.host_statistics import measure
from jax_scalify.numerics.report import Report
from jax_scalify.numerics.rows import Row

pytestmark = pytest.mark.newest  # its command runs on the newest JAX

SMALL, LARGE = [2.0**-30, 1.0], [2.0**-3, 1.0]


def row(data, name="block_0", phase="backward", primitive="mul", dtype="float32", underflow=0):
    array = np.asarray(data, dtype)
    place = dict(name=name, phase=phase, primitive=primitive, line="a/model.py:7 (Model.__call__)")
    return Row(
        **place,
        shape=array.shape,
        dtype=dtype,
        scale=(0, 0),
        runs=1,
        measure=measure(array),
        underflow=underflow,
    )


def report(*rows):
    return Report(rows, numerics_page.FORMATS)


def pairs(plain, scalified):
    found, rest = numerics_page.pair(report(*plain), report(*scalified))
    return [(p.plain, p.scalified) for p in found], rest


def test_tensors_of_one_kind_are_paired_in_order():
    plain = [row(SMALL), row(SMALL, name="other"), row(LARGE)]
    scalified = [row(LARGE), row(SMALL), row(SMALL, name="third")]
    found, rest = pairs(plain, scalified)
    assert found == [(plain[0], scalified[0]), (plain[1], None), (plain[2], scalified[1])]
    assert rest == [scalified[2]]


def test_kinds_of_which_one_step_has_more_are_not_paired():
    found, rest = pairs([row(SMALL), row(LARGE)], [row(LARGE)])
    assert [s for _, s in found] == [None, None]
    assert len(rest) == 1


def test_casts_updates_and_numbers_are_not_paired():
    rows = [row(SMALL, primitive="convert_element_type")]
    found, rest = pairs(rows, [row(LARGE, primitive="convert_element_type")])
    assert found == [(rows[0], None)] and len(rest) == 1
    assert pairs([row(SMALL, phase="update"), row(1.0)], []) == ([], [])


@pytest.mark.parametrize(
    ("scalified", "dtype", "lost"),
    [
        (row(LARGE), "float16", 0.0),
        (row([0.0, 1.0]), "float16", 0.5),
        (row(SMALL), "float8_e5m2", 0.5),
        (row([2.0**-20, 1.0], dtype="float16"), "float8_e5m2", 0.5),
        (row(LARGE, dtype="float16", underflow=1), "float16", 0.5),
    ],
)
def test_what_is_lost(scalified, dtype, lost):
    assert numerics_page.Pair(row(SMALL), scalified).lost(dtype) == lost


def test_page_names_what_is_fixed_and_what_is_not():
    plain = [row(SMALL, name=f"block_{i}") for i in range(3)]
    plain += [row(SMALL, name="head"), row(SMALL, name="inside")]
    scalified = [row(LARGE, name=f"block_{i}") for i in range(3)]
    scalified += [row(SMALL, name="head")]
    reports = {"fp32": report(*plain), "fp16-all": report(*scalified)}
    text = numerics_page.page(reports, steps=7)
    assert "after 7 training steps" in text
    assert "5 of 5 tensors of the plain step would lose more than 1% to zero.\n4 of them" in text
    assert "3 are fixed, 1 are not" in text
    fixed, bad = text.index("**Fixed:**"), text.index("**Not fixed:**")
    assert bad < text.index("| `head/Model:7` | mul | backward | 1 | 50% | 50% |") < fixed
    assert text.index("| `block_*/Model:7` | mul | backward | 3 | 50% | 0% |") > fixed
    assert "- `model.py:7 (Model.__call__)`: 1 mul" in text


def test_pictures_show_the_pairs(tmp_path):
    pytest.importorskip("matplotlib")
    reports = {"fp32": report(row(SMALL)), "fp16-all": report(row(LARGE))}
    numerics_page.draw(reports, tmp_path)
    for name in numerics_page.PRESETS.values():
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
