"""Options and settings that all tests share."""

import gc
import zlib

import jax
import pytest

import jax_scalify as jsa
from jax_scalify.interpreter import registry

jax.config.update("jax_numpy_dtype_promotion", "standard")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run every test, not only a sample")
    parser.addoption(
        "--sample", type=int, default=1, metavar="N", help="run one test in N, chosen by its name"
    )


def pytest_collection_modifyitems(config, items):
    """Leave out what runs with `--full` only; thousands of skipped tests would take their time.

    Of the parameters of a test that is marked `sampled(n)` one in n runs, but at least one.
    """
    if config.getoption("--full"):
        return
    sample = config.getoption("--sample")
    by_function = {}
    for item in items:
        if not item.get_closest_marker("full"):
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set()
    for function in by_function.values():
        running = [item for item in function if _runs(item, sample)]
        chosen.update(running or function[: sample == 1])
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _runs(item, sample):
    marker = item.get_closest_marker("sampled")
    one_in = marker.args[0] if marker else 1
    if sample > 1 and item.get_closest_marker("newest"):
        return False
    return zlib.crc32(item.nodeid.encode()) % max(1, round(sample * one_in)) == 0


def pytest_collection_finish():
    """Spare the garbage collector the modules and items, which live until the end.

    What tracing and compiling make lives in caches: looking through it often frees nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Compile without costly passes: most tests compile for longer than they run.

    The marker `optimized` is for tests that compare what only optimised programs have in common.
    With `--full` every program is compiled as users compile it.
    """
    optimized = item.config.getoption("--full") or item.get_closest_marker("optimized")
    jax.config.update("jax_disable_most_optimizations", not optimized)


@pytest.fixture
def every_primitive_has_a_rule(monkeypatch):
    """A primitive without a rule is an error; a test has its own memory of what was warned of."""
    monkeypatch.setattr(registry, "_warned", set())
    with jsa.ScalifyConfig(missing_rule="error"):
        yield


@pytest.fixture(scope="module")
def counts_compilations():
    """Make room in JAX's cache: tests that count a function's entries find them all there.

    A process keeps some thousand compiled functions, and a full cache has dropped new ones.
    """
    jax.clear_caches()
