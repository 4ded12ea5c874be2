"""The names that the examples in docstrings use."""

import jax
import jax.numpy as jnp
import pytest

import jax_scalify as jsa


@pytest.fixture(autouse=True)
def names(doctest_namespace):
    doctest_namespace.update(jax=jax, jnp=jnp, jsa=jsa)
