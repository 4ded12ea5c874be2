"""The scales of what linear layers multiply: propagated, so that nothing is calibrated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_scalify.arrays.nnx_objects import pure_call
from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.numerics.interpreting import Runner, Step, Tagged, trace
from jax_scalify.serving.names import path_of
from jax_scalify.transform import scalify


def input_scales(fun: Callable, params: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Find, for each weight, the scale of what it is multiplied with.

    The function is run once, scalified, on a batch of which the shapes and scales matter and the
    numbers do not, unless the function rescales: scales are propagated. `export` writes them for
    readers that quantise activations, at the scales that FP8 training had.

    Args:
        fun: a function of plain arrays whose first argument is `params`, as the loss or the `apply`
            of a model; not scalified.
        params: with scales.
        *args: its other arguments.
        **kwargs: its keywords.

    Returns:
        By the path of each weight, joined with "/", the largest scale, 1 for what has none.

    Raises:
        TypeError: if `fun` is not callable.

    Example:
        >>> params = jsa.as_scaled_array({"w": jnp.ones((4, 2))}, scale="rms")
        >>> x = jsa.as_scaled_array(jnp.full((3, 4), 0.25), scale="rms")
        >>> jsa.serving.input_scales(lambda params, x: x @ params["w"], params, x)
        {'w': 0.25}
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
    paths = {
        f"args[0]{jax.tree_util.keystr(keys)}": path_of(keys)
        for keys, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled)
    }
    found: dict[str, float] = {}

    def observe(step: Step) -> list[str | None]:
        name = step.eqn.primitive.name
        if name in ("dot_general", "ragged_dot_general"):
            tags = step.tags[:2]
            for own, scale in zip(tags, reversed(step.operand_scales[:2]), strict=True):
                if own is not None and tags.count(None) == 1:
                    size = 1.0 if scale is None else float(np.max(np.asarray(scale)))
                    found[own] = max(size, found.get(own, 0.0))
        kept = traits_of(name).elements in ("same", "cast", "moved") or name == "dynamic_slice"
        return [step.tags[0] if kept else None] * len(step.results)

    closed, arrays, names = trace(pure_call(scalify(fun), (params, *args), kwargs))
    operands = [Tagged(x, paths.get(name)) for x, name in zip(arrays, names, strict=True)]
    Runner(observe).run(closed, operands)
    return found
