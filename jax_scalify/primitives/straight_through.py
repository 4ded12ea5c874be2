"""A value with the derivative of another function.

JAX gives a tangent the dtype of its value, and float8 tangents underflow. `straight_through` gives
a value that was computed from narrow arrays the derivative of a function of wide arrays. Without
differentiation, only the value is computed, and the wide arrays are dead code. XLA drops them, even
from loops, and `scalify` drops them earlier (`passes/pruning.py`).

`straight_through` is a primitive because JAX 0.10 forgets the rule of a `jax.custom_jvp` function
inside a `scan` that is differentiated in reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import ad

from jax_scalify.primitives.definitions import batch_function, define, first, jvp_of_moved


def straight_through(value: jax.Array, function: Callable | None = None, *operands: Any) -> Any:
    """Return `value`, with the derivative of `function(*operands)`.

    Args:
        value: array.
        function: returns an array of the shape and dtype of `value`, and is differentiable as often
            as needed. Without a function the derivative is zero.
        *operands: arrays.

    Example:
        >>> f = lambda x: straight_through(jnp.round(x), jnp.square, x)
        >>> print(f(3.2), jax.grad(f)(3.2))
        3.0 6.4
    """
    return straight_through_p.bind(value, *operands, function=function)


def _jvp(primitive: Any, primals: Any, tangents: Any, *, function: Callable | None) -> Any:
    out = primitive.bind(*primals, function=function)
    if function is None or all(type(t) is ad.Zero for t in tangents[1:]):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, jvp_of_moved(function, primals[1:], tangents[1:])[1]


straight_through_p = define("straight_through", first, first, jvp=_jvp, batch=batch_function)
