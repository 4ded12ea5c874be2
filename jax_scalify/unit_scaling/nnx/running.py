"""How a decoder's layers are run: one after another, or one in a scan; and computed again or kept.

Layers are split into a graph and arrays and merged inside: `nnx.scan` and `nnx.remat` refuse those
of a model that a jitted function closes over.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_scalify.unit_scaling import _modules


def stack(layers: list[Any]) -> Any:
    """One layer with the arrays of all, along a first axis."""
    graph, first = nnx.split(layers[0])
    rest = [nnx.state(layer) for layer in layers[1:]]
    return nnx.merge(graph, jax.tree.map(lambda *arrays: jnp.stack(arrays), first, *rest))


def apply(layer: Any, x: jax.Array, remat: Any) -> Any:
    """Apply one layer, and keep nothing of it, or what a policy says, if it is computed again."""
    if not remat:
        return layer(x)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    options = _modules.remat_options(remat, scanned=False)
    out, rest = jax.checkpoint(functools.partial(_pure, graph), **options)(params, rest, x, None)
    _update(layer, rest)
    return out


def scan(layers: Any, x: jax.Array, taus: jax.Array, remat: Any) -> tuple[jax.Array, Any]:
    """Apply stacked layers, with their taus `(layers, 2)`; also return their losses for balance."""
    graph, params, rest = nnx.split(layers, nnx.Param, ...)

    def step(x: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
        params, rest, taus = xs
        out, rest = _pure(graph, params, rest, x, taus)
        x, balance = _modules.with_balance(out)
        return x, (rest, balance)

    if remat:
        step = jax.checkpoint(step, **_modules.remat_options(remat, scanned=True))
    x, (rest, balances) = jax.lax.scan(step, x, (params, rest, taus))
    _update(layers, rest)
    return x, balances


def _pure(graph: Any, params: Any, rest: Any, x: jax.Array, taus: Any) -> tuple[Any, Any]:
    """A layer as a function: its result, and its state but for the parameters, for keys."""
    layer = nnx.merge(graph, params, rest)
    out = layer(x, taus)
    return out, nnx.split(layer, nnx.Param, ...)[2]


def _update(layer: Any, state: Any) -> None:
    """Let the keys of dropout go on; without it, a model that is closed over is only read."""
    if layer.dropout is not None and not layer.dropout.deterministic:
        nnx.update(layer, state)
