"""What `jax.checkpoint` keeps of FP8 matmuls: policies, as those in `jax.checkpoint_policies`.

A layer that is rematerialised computes its forward pass again for its backward pass, but for what
its policy has kept. The operands of FP8 matmuls are the smallest arrays that are worth it.

Use them inside of `scalify`. In plain JAX 0.12 `jax.checkpoint` rounds FP8 that it keeps once more,
by `reduce_precision`: E4M3 above 240 becomes nan, and below 2**-6 becomes 0. A policy of JAX that
keeps FP8 arrays does the same.

Example:
    >>> policy = jsa.checkpoint_policies.fp8_operands
    >>> layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=policy)
    >>> loss = jsa.fp8_matmuls(lambda w, x: layer(w, x).sum())
    >>> args = jsa.as_scaled_array((jnp.ones((4, 2)), jnp.ones((8, 4))))
    >>> jsa.scalify(jax.grad(loss))(*args).shape
    (4, 2)
"""

from __future__ import annotations

from typing import Any

import jax

from jax_scalify.base import dtypes
from jax_scalify.primitives.definitions import cast_p, stochastic_cast_p
from jax_scalify.primitives.straight_through import straight_through_p

__all__ = ["fp8_operands", "fp8_operands_and_dots"]


def fp8_operands(prim: Any, *avals: Any, **params: Any) -> bool:
    """Keep what was cast to FP8; matmuls are computed again, from FP8 operands that were kept.

    Args:
        prim: the primitive of an equation, as `jax.checkpoint` gives it.
        *avals: shapes and dtypes of its operands.
        **params: its parameters.

    Returns:
        Whether its results are kept.

    Example:
        >>> cast = jax.make_jaxpr(lambda x: x.astype(jnp.float8_e4m3fn))(1.0).eqns[0]
        >>> fp8_operands(cast.primitive, *(v.aval for v in cast.invars), **cast.params)
        True
    """
    if prim is straight_through_p:  # a cast that has a derivative of its own
        return dtypes.is_fp8(avals[0].dtype)
    if prim.name not in _CASTS:
        return False
    return dtypes.is_fp8(params.get("new_dtype", params.get("dtype")))


def fp8_operands_and_dots(prim: Any, *avals: Any, **params: Any) -> bool:
    """Keep what was cast to FP8 and the results of matmuls: none is computed twice.

    Arguments and result as those of `fp8_operands`. A grouped matmul is one too.

    Example:
        >>> dot = jax.make_jaxpr(jnp.dot)(jnp.ones(2), jnp.ones(2)).eqns[0]
        >>> fp8_operands_and_dots(dot.primitive, *(v.aval for v in dot.invars), **dot.params)
        True
    """
    if prim.name == "ragged_dot_general" or fp8_operands(prim, *avals, **params):
        return True
    return bool(jax.checkpoint_policies.dots_saveable(prim, *avals, **params))


_CASTS = ("convert_element_type", cast_p.name, stochastic_cast_p.name)
