"""Flax NNX objects among the arguments of a function. Writes into them are carried back."""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util

from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.blocks.array import is_array_of_ours


def _stops(nnx: Any) -> Callable[[Any], bool]:
    """Return the `is_leaf` that stops at NNX objects, states and `ScaledArray` arrays.

    A `ScaledArray` must be a leaf, because inside the function an array stands for it.
    """
    return lambda x: is_scaled(x) or isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State))


def _is_object(x: Any, nnx: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["structure", "number"]
)
@dataclasses.dataclass(frozen=True)
class _Object:
    """A placeholder for an object in a pytree: a known object by its number, or a new object."""

    state: Any = None
    structure: Any = None
    number: int | None = None


def _is_placeholder(x: Any) -> bool:
    return isinstance(x, _Object)


def _find(tree: Any) -> tuple[Any, Any, list[Any], list[int]]:
    """Find the NNX objects of a tree.

    Return the module `flax.nnx`, the structure of the tree around objects, its leaves, and the
    positions of objects among them. If NNX is not imported, no object can exist.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None, None, [], []
    leaves, outer = jax.tree.flatten(tree, is_leaf=_stops(nnx))
    return nnx, outer, leaves, [i for i, x in enumerate(leaves) if _is_object(x, nnx)]


def _with_objects(tree: Any, objects: Sequence[Any], nnx: Any) -> Any:
    """Put objects in the place of their placeholders: known objects, or new objects."""

    def restored(x: Any) -> Any:
        if not _is_placeholder(x):
            return x
        return nnx.merge(x.structure, x.state) if x.number is None else objects[x.number]

    return jax.tree.map(restored, tree, is_leaf=_is_placeholder)


def map_states(convert: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function of pytrees to a tree that may hold NNX objects. Return new objects.

    A shared variable stays shared. If the objects were flattened as pytrees, it would become two.
    """
    nnx, outer, leaves, where = _find(tree)
    if not where:
        return convert(tree)
    structure, states = nnx.split(tuple(leaves[i] for i in where))
    for number, i in enumerate(where):
        leaves[i] = _Object(states.get(number, {}), number=number)
    converted = convert(outer.unflatten(leaves))
    found = jax.tree.leaves(converted, is_leaf=_is_placeholder)
    states = nnx.State({x.number: x.state for x in found if _is_placeholder(x)})
    return _with_objects(converted, nnx.merge(structure, states), nnx)


def shares_scaled(tree: Any) -> bool:
    """Return whether NNX objects in a tree share a `ScaledArray`.

    Shared streams of random numbers, as of dropout layers, do not count.
    """
    nnx, _, leaves, where = _find(tree)
    if not where:
        return False
    objects = tuple(leaves[i] for i in where)
    of_all, of_each = (
        sum(map(is_scaled, jax.tree.leaves(x, is_leaf=is_scaled)))
        for x in (nnx.split(objects)[1], objects)
    )
    return of_all != of_each


@dataclasses.dataclass(frozen=True)
class PureCall:
    """A pure function and its arguments, for a function that may write into its arguments.

    Attributes:
        fun: a function of pytrees that returns its results, and the variables that it has written.
        args, kwargs: its arguments, with states in place of NNX objects.
        structure: the static structure of the objects, which `fun` depends on. It is hashable.
        finish: takes the output of `fun`, writes into the objects, and returns the results.
    """

    fun: Callable
    args: tuple
    kwargs: dict[str, Any]
    structure: Any = None
    finish: Callable[[Any], Any] = lambda results: results


def pure_call(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> PureCall:
    """Return a pure call for a function that may write into NNX objects.

    NNX modules, optimizers and streams of random numbers hold variables, which may be shared and
    written to. As `nnx.jit` does, the pure function takes their states and returns the variables
    that were written.

    Returns:
        The pure call. If no argument holds an object, it calls `fun` unchanged.

    Raises:
        ValueError: when the pure function is called, if `fun` adds or removes variables, or changes
            a static attribute.
    """
    nnx, tree, leaves, where = _find((args, kwargs))
    if not where:
        return PureCall(fun, args, kwargs)
    objects = tuple(leaves[i] for i in where)
    structure, state = nnx.split(objects)
    for number, i in enumerate(where):  # a shared variable is in the first object's state
        leaves[i] = state.get(number, {})

    def pure(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        inner = tree.flatten_up_to((args, kwargs))
        states = nnx.State({number: inner[i] for number, i in enumerate(where)})
        given = {path: jax.tree.leaves(v) for path, v in nnx.to_flat_state(states)}
        copies = nnx.merge(structure, states)
        for copy, i in zip(copies, where, strict=True):
            inner[i] = copy
        args, kwargs = tree.unflatten(inner)
        results = fun(*args, **kwargs)
        new_structure, new_states = nnx.split(copies)
        if new_structure != structure:
            raise ValueError(
                "The function adds or removes variables of an NNX object, or changes one of its "
                "static attributes (`model.eval()` does): do that before the call."
            )
        written = [
            (path, variable)
            for path, variable in nnx.to_flat_state(new_states)
            if any(map(operator.is_not, jax.tree.leaves(variable), given[path]))
        ]
        numbers = {id(copy): number for number, copy in enumerate(copies)}

        def returned(x: Any) -> Any:
            if not _is_object(x, nnx):
                return x
            if id(x) in numbers:
                return _Object(number=numbers[id(x)])
            new_structure, state = nnx.split(x)
            return _Object(state, new_structure)

        results = jax.tree.map(returned, results, is_leaf=_stops(nnx))
        return results, nnx.from_flat_state(written)

    def finish(results: tuple[Any, Any]) -> Any:
        nnx.update(objects, results[1])
        return _with_objects(results[0], objects, nnx)

    args, kwargs = tree.unflatten(leaves)
    return PureCall(pure, args, kwargs, structure, finish)


def map_leaves(convert: Callable[[Any, tuple], Any], tree: Any) -> Any:
    """Return the tree with `convert(leaf, path)` for each leaf."""

    def of_pytree(tree: Any) -> Any:
        return tree_util.tree_map_with_path(
            lambda path, leaf: convert(leaf, path), tree, is_leaf=is_array_of_ours
        )

    return map_states(of_pytree, tree)
