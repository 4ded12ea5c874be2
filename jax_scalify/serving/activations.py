"""What linear layers multiply: propagated scales instead of calibration, and FP8 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base import dtypes
from jax_scalify.conversions.nnx_objects import pure_call
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
    found: dict[str, float] = {}

    def look(path: str, weight: Any, other: Any) -> None:
        del weight
        size = 1.0 if other[1] is None else float(np.max(np.asarray(other[1])))
        found[path] = max(size, found.get(path, 0.0))

    _run(fun, look, params, args, kwargs)
    return found


def fp8_kernels(
    fun: Callable, params: Any, *args: Any, **kwargs: Any
) -> Callable[[str, Any], bool]:
    """Find the weights that FP8 matmuls multiply, for the `select` of `export` and `to_fp8`.

    The function is run once, as by `input_scales`. Unlike `linear_kernels`, this looks at no names:
    the result fits every model, and every predicate of `jsa.fp8_matmuls`.

    Args:
        fun: a function of plain arrays whose first argument is `params`, with FP8 matmuls, as
            `jsa.fp8_matmuls(loss, select)`; not scalified.
        params: with or without scales.
        *args: its other arguments.
        **kwargs: its keywords.

    Returns:
        A function of a path and a leaf, which returns whether all matmuls of the leaf are FP8.

    Raises:
        TypeError: if `fun` is not callable.

    Example:
        >>> params = {"first": jnp.ones((4, 2)), "last": jnp.ones((2, 3))}
        >>> model = lambda params, x: x @ params["first"] @ params["last"]
        >>> forward = jsa.fp8_matmuls(model, jsa.fp8.skip("last"))
        >>> select = jsa.serving.fp8_kernels(forward, params, jnp.ones((1, 4)))
        >>> print(select("first", params["first"]), select("last", params["last"]))
        True False
    """
    narrow: dict[str, bool] = {}

    def look(path: str, weight: Any, other: Any) -> None:
        del other
        narrow[path] = narrow.get(path, True) and dtypes.is_fp8(weight[0].dtype)

    _run(fun, look, params, args, kwargs)
    return lambda path, leaf: narrow.get(path, False)


Look = Callable[[str, tuple[Any, Any], tuple[Any, Any]], None]


def _run(fun: Callable, look: Look, params: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Tell of each weight's matmuls its path, and data and scale of both operands."""
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
    paths = {
        f"args[0]{jax.tree_util.keystr(keys)}": path_of(keys)
        for keys, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled)
    }

    def observe(step: Step) -> list[str | None]:
        name = step.eqn.primitive.name
        if name in ("dot_general", "ragged_dot_general"):
            tags = step.tags[:2]
            pairs = list(zip(step.operands[:2], step.operand_scales[:2], strict=True))
            for own, pair, other in zip(tags, pairs, reversed(pairs), strict=True):
                if own is not None and tags.count(None) == 1:
                    look(own, pair, other)
        kept = traits_of(name).elements in ("same", "cast", "moved") or name == "dynamic_slice"
        return [step.tags[0] if kept else None] * len(step.results)

    closed, arrays, names = trace(pure_call(scalify(fun), (params, *args), kwargs))
    operands = [Tagged(x, paths.get(name)) for x, name in zip(arrays, names, strict=True)]
    Runner(observe).run(closed, operands)
