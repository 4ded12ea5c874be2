"""The Llama of the examples, small, as a model that a training step is compiled for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cost.training import Model, mesh_of
from examples.llama.layout import Layout
from examples.llama.model import CHOSEN, Sizes, init, loss_fn

PyTree = Any
SEQUENCES = 2  # a device
HIDDEN = 2816
SIZES = Sizes(
    layers=4,
    width=1024,
    heads=8,
    groups=4,
    hidden=HIDDEN,
    vocabulary=8192,
    context=1024,
    theta=10_000.0,
)


def make_decoder(
    devices: int = 1,
    sizes: Sizes = SIZES,
    sequences: int = SEQUENCES,
    remat: Callable[[Callable], Callable] = jax.checkpoint,
) -> Model:
    """The model that a training step takes; `remat` goes around a layer."""
    layout = Layout(mesh_of(devices) if devices > 1 else None)

    def loss(params: PyTree, other: PyTree, tokens: jax.Array, dtype: Any) -> Any:
        return loss_fn(params, tokens, sizes, layout, remat), other

    tokens = jax.ShapeDtypeStruct((sequences * devices, sizes.context + 1), jnp.int32)
    return Model(lambda key: (init(sizes, key), ()), loss, tokens)


def mixture(experts: int) -> Sizes:
    """The sizes with experts, of which a token has as many weights as of the dense layer."""
    return dataclasses.replace(SIZES, experts=experts, hidden=HIDDEN // CHOSEN)
