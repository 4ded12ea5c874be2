"""How primitives are evaluated outside of `jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable) -> Callable:
    """Return `function`, a jitted one, so that it is compiled under `jax.disable_jit` too.

    For the evaluation of a primitive by a jitted function that binds it. With jit disabled such a
    function would call the primitive's evaluation again, without end. JAX's own primitives ignore
    `jax.disable_jit` in the same way.
    """

    @functools.wraps(function)
    def evaluate(*args: Any, **params: Any) -> Any:
        if not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return function(*args, **params)
        with jax.disable_jit(False):
            return function(*args, **params)

    return evaluate
