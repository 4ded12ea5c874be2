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
