"""Flax NNX objects among the arguments of a function: what it writes into them comes back."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class PureCall:
    """A pure function and its arguments, for a function that may write into some of them.

    Attributes:
        fun: of pytrees; returns what has been written beside its results.
        args, kwargs: its arguments: the states of objects in place of the objects.
        structure: what `fun` depends on beside its arguments; can be hashed.
        finish: takes the results of `fun`, writes into the objects, returns the results alone.
    """

    fun: Callable
    args: tuple
    kwargs: dict[str, Any]
    structure: Any = None
    finish: Callable[[Any], Any] = lambda results: results


def pure_call(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> PureCall:
    """Return a call of a pure function for that of one that may write into NNX objects.

    An NNX module, optimizer or stream of random numbers holds variables, which may be shared and
    are written to: `nnx.jit` and this function give them to a pure function and back.

    Returns:
        `fun` as it is where no argument holds an object.

    Raises:
        ValueError: by the function, if `fun` adds or removes variables, or changes a static
            attribute.
    """
    nnx = sys.modules.get("flax.nnx")  # where it is not imported there are no objects
    if nnx is None:
        return PureCall(fun, args, kwargs)
    leaves, tree = jax.tree.flatten(
        (args, kwargs), is_leaf=lambda x: isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State))
    )
    where = [i for i, x in enumerate(leaves) if isinstance(x, (nnx.Pytree, nnx.Variable))]
    if not where:
        return PureCall(fun, args, kwargs)
    objects = tuple(leaves[i] for i in where)
    structure, state = nnx.split(objects)
    for number, i in enumerate(where):  # the state of a shared variable is the first object's
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
        return results, nnx.from_flat_state(written)

    def finish(results: tuple[Any, Any]) -> Any:
        nnx.update(objects, results[1])
        return results[0]

    args, kwargs = tree.unflatten(leaves)
    return PureCall(pure, args, kwargs, structure, finish)
