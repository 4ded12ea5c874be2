"""Optimizers that are not optax's: a pure function from state, gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Optimizer(NamedTuple):
    """An optimizer with the interface of optax."""

    init: Any
    update: Any


def from_stateless(init: Callable, apply: Callable) -> Any:
    """Return an optimizer with optax's interface, for `low_precision`.

    The update is the difference of the new and the old parameters. `low_precision` computes it in
    float32, so for a float32 `apply` the parameters differ from those of `apply` by rounding only.

    Args:
        init: a function from parameters to the state of the optimizer.
        apply: a pure function `apply(state, grads, params)` that returns the new parameters and the
            new state. Keras calls it `stateless_apply`.

    Returns:
        A named tuple of `init(params)` and `update(grads, state, params)`.

    Raises:
        TypeError: if `init` or `apply` is not callable.
        ValueError: when called, if `update` gets no parameters.

    Example:
        >>> def init(params):
        ...     return {"velocity": jax.tree.map(jnp.zeros_like, params)}
        >>> def apply(state, grads, params):
        ...     add = lambda v, g: 0.9 * v + g
        ...     velocity = jax.tree.map(add, state["velocity"], grads)
        ...     new = jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity)
        ...     return new, {"velocity": velocity}
        >>> optimizer = jsa.optim.low_precision(jsa.optim.from_stateless(init, apply))
        >>> params = jnp.ones(2)
        >>> updates, state = optimizer.update(jnp.ones(2), optimizer.init(params), params)
        >>> print(updates, state["velocity"].dtype)
        [-0.10000002 -0.10000002] float16
    """
    for name, function in (("init", init), ("apply", apply)):
        if not callable(function):
            raise TypeError(f"`{name}` must be callable, got {type(function).__name__}.")

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError("`update` needs the parameters: `update(grads, state, params)`.")
        new, state = apply(state, grads, params)
        return jax.tree.map(lambda after, before: after - before, new, params), state

    return Optimizer(init, update)
