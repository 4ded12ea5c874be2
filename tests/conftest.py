"""Options and settings that all tests share."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "standard")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run every test, not only a sample")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="runs with --full")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def counts_compilations():
    """Make room in JAX's cache: a test that counts a function's entries finds them all there.

    A process keeps some thousand compiled functions, and a full cache has dropped new ones.
    """
    jax.clear_caches()


@pytest.fixture(scope="module")
def compile_quickly():
    """Compile without costly passes: for whole training steps, where they change nothing tested."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
