"""Rescales by a statistic of the data, on the forward pass or the backward pass.

They are the paper's remedy for scales that drift (section 3.3). The statistic, rounded to a power
of two, moves from the data into the scale. Outside of `scalify` each function is the identity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_scalify.ops.scaling import on_backward, rescale_leaf

Rescale = Callable[[Any], jax.Array]


def _define(stat: str, norm: str) -> tuple[Rescale, Rescale]:
    rescale = functools.partial(rescale_leaf, stat=stat)

    def forward(x: Any) -> jax.Array:
        return rescale(x)

    def backward(x: Any) -> jax.Array:
        return on_backward(x, rescale)

    forward.__name__ = f"dynamic_rescale_{norm}"
    forward.__doc__ = f"""Rescale a value so that the {stat} of its data is in [1, 2).

    The value stays the same, and so does its cotangent. A zero gets scale 0 ("any scale").

    Example:
        >>> f = jsa.scalify(jsa.ops.dynamic_rescale_{norm})
        >>> print(f(jsa.as_scaled_array(jnp.full(2, 5.0))).scale)
        4.0
    """
    backward.__name__ = f"dynamic_rescale_{norm}_grad"
    backward.__doc__ = f"""Return `x`; rescale its cotangent so that its data's {stat} is in [1, 2).

    Example:
        >>> f = lambda x: 5.0 * jsa.ops.dynamic_rescale_{norm}_grad(x)
        >>> print(jsa.scalify(jax.grad(f))(jsa.as_scaled_array(jnp.float32(1.0))).data)
        1.25
    """
    return forward, backward


dynamic_rescale_l1: Rescale
dynamic_rescale_l1_grad: Rescale
dynamic_rescale_l1, dynamic_rescale_l1_grad = _define("l1", "l1")
dynamic_rescale_l2: Rescale
dynamic_rescale_l2_grad: Rescale
dynamic_rescale_l2, dynamic_rescale_l2_grad = _define("rms", "l2")
dynamic_rescale_max: Rescale
dynamic_rescale_max_grad: Rescale
dynamic_rescale_max, dynamic_rescale_max_grad = _define("max", "max")
