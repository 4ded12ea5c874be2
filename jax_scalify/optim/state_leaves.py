"""The roles of the leaves of an optimizer's state, found in the optimizer's equations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.base.jaxprs import depends
from jax_scalify.interpreter.facts import nonnegative_results
from jax_scalify.optim.degrees import Degree, degrees_of_results


@dataclasses.dataclass(frozen=True)
class Role:
    """What is known of a leaf of the state.

    Attributes:
        nonneg: whether no element is ever negative, as in a second moment or a maximum.
        degree: the leaf is multiplied by `c**degree` if all gradients are multiplied by `c`: 1 for
            a first moment, 2 for a second moment. None if it is unknown, and for weights.
        param: the number of its parameter; None if it belongs to no parameter.
        is_weight: whether it starts from the parameters, as a copy or an average of them.
    """

    nonneg: bool = False
    degree: Degree = None
    param: int | None = None
    is_weight: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether the elements spread over a wide range, as squares do."""
        return self.nonneg or self.degree == 2


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


class RoleFinder:
    """A function that returns the roles of an optimizer's state, cached for each structure."""

    def __init__(self, init: Callable, update: Callable):
        self._init, self._update = init, update
        self._known: dict[Any, list[Role]] = {}

    def __call__(
        self, grads: Any, state: Any, params: Any, extra_args: dict, step: Any = None
    ) -> list[Role]:
        """Return the role of each leaf of a state, given arrays or their shapes and dtypes.

        `step` is the jaxpr of the update, if it was traced.
        """
        leaves, tree = jax.tree.flatten(_shapes((grads, state, params)))
        key = (tree, tuple((x.shape, x.dtype) for x in leaves), tuple(sorted(extra_args)))
        if key not in self._known:
            grads, state, params = jax.tree.unflatten(tree, leaves)
            if step is None:
                update = functools.partial(self._update, **extra_args)
                step = jax.make_jaxpr(update)(grads, state, params).jaxpr
            self._known[key] = self._find(grads, state, params, step)
        return self._known[key]

    def _find(self, grads: Any, state: Any, params: Any, step: Any) -> list[Role]:
        like_params = grads if params is None else params
        start = jax.make_jaxpr(self._init)(like_params).jaxpr
        leaves = jax.tree.leaves(state)
        count = len(jax.tree.leaves(grads))
        flags = _nonnegative(step, start, count, len(leaves))
        owners, weights = owners_of(state, like_params), depends(start, [True] * len(start.invars))
        degrees = _degrees(step, count, weights)
        return [Role(*role) for role in zip(flags, degrees, owners, weights, strict=True)]

    def at_start(self, state: Any, params: Any) -> list[Role]:
        """Return the roles that are known without tracing the update: parameters and weights."""
        params = _shapes(params)
        start = jax.make_jaxpr(self._init)(params).jaxpr
        weights = depends(start, [True] * len(start.invars))
        owners = owners_of(state, params)
        pairs = zip(owners, weights, strict=True)
        return [Role(param=owner, is_weight=weight) for owner, weight in pairs]


def owners_of(state: Any, params: Any) -> list[int | None]:
    """Return for each leaf the parameter whose key path is the longest suffix of its path."""
    own = {path: i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}

    def owner(path: tuple) -> int | None:
        ends = (path[start:] for start in range(len(path) + 1))
        return next((own[end] for end in ends if end in own), None)

    return [owner(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]


def _nonnegative(step: Any, start: Any, count: int, size: int) -> list[bool]:
    """Return for each leaf whether it starts and stays non-negative (the largest fixed point)."""
    flags = nonnegative_results(start, [False] * len(start.invars))
    while True:
        rest = [False] * (len(step.invars) - count - size)
        results = nonnegative_results(step, [False] * count + flags + rest)
        kept = [a and b for a, b in zip(flags, results[len(results) - size :], strict=True)]
        if kept == flags:
            return flags
        flags = kept


def _degrees(step: Any, count: int, weights: list[bool]) -> list[Degree]:
    """Return the degree of each leaf of the state; None if it still changes after two steps."""
    size = len(weights)
    known: list[Degree] = [None] * size
    rounds = []
    for _ in range(3):
        rest = [None] * (len(step.invars) - count - size)
        results = degrees_of_results(step, [1] * count + known + rest)
        out = results[len(results) - size :]
        known = [None if w else d for d, w in zip(out, weights, strict=True)]
        rounds.append(known)
    return [a if a == b else None for a, b in zip(*rounds[-2:], strict=True)]
