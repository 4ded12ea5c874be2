"""Evaluate primitives outside `jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable) -> Callable:
    """Return a jitted function that is compiled even under `jax.disable_jit`.

    Use it for a primitive whose `impl` is a jitted function that binds the primitive. With jit
    disabled, such an `impl` would call itself forever. JAX's own primitives ignore
    `jax.disable_jit` in the same way.
    """

    @functools.wraps(function)
    def evaluate(*args: Any, **params: Any) -> Any:
        if not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return function(*args, **params)
        with jax.disable_jit(False):
            return function(*args, **params)

    return evaluate
