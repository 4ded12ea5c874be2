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
import jax.numpy as jnp
from jax.interpreters import ad, batching

from jax_scalify.base.jaxprs import of_some
from jax_scalify.primitives.definitions import Mapped, define

straight_through_p = define("straight_through", lambda x, *_, **__: x, lambda x, *_, **__: x)


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


def _jvp(primals: Any, tangents: Any, *, function: Callable | None) -> Any:
    out = straight_through_p.bind(*primals, function=function)
    operands = primals[1:]
    moved = [i for i, t in enumerate(tangents[1:]) if type(t) is not ad.Zero]
    if function is None or not moved:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    xs, slopes = [operands[i] for i in moved], [tangents[1 + i] for i in moved]
    return out, jax.jvp(of_some(function, operands, moved), xs, slopes)[1]


def _batch(args: Any, dims: Any, *, function: Callable | None) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    args[0] = batching.bdim_at_front(args[0], None if dims[0] is None else 0, size)
    if function is not None:
        function = Mapped(function, tuple(None if d is None else 0 for d in dims[1:]), size)
    return straight_through_p.bind(*args, function=function), 0


ad.primitive_jvps[straight_through_p] = _jvp
batching.primitive_batchers[straight_through_p] = _batch
