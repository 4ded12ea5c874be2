"""What each leaf of an optimizer's state is, found in the optimizer's own equations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.base.jaxprs import evaluate
from jax_scalify.interpreter.facts import nonnegative_results
from jax_scalify.optim.degrees import Degree, degrees_of_results


@dataclasses.dataclass(frozen=True)
class Role:
    """What is known of a leaf of the state.

    Attributes:
        nonneg: no element is ever negative, as of a second moment or a maximum.
        degree: by which power of a factor it grows if all gradients do: 1 for a first moment, 2 for
            a second one; None if it is not known, or of a weight.
        param: which parameter it belongs to, by number; None for none.
        is_weight: it starts from the parameters: a copy or an average of them.
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
    """Finds the roles of an optimizer's state; once for each structure."""

    def __init__(self, init: Callable, update: Callable):
        self._init, self._update = init, update
        self._known: dict[Any, list[Role]] = {}

    def __call__(self, grads: Any, state: Any, params: Any, extra_args: dict) -> list[Role]:
        """Return the role of each leaf of a state, whose leaves are arrays or their shapes."""
        leaves, tree = jax.tree.flatten(_shapes((grads, state, params)))
        key = (tree, tuple((x.shape, x.dtype) for x in leaves), tuple(sorted(extra_args)))
        if key not in self._known:
            grads, state, params = jax.tree.unflatten(tree, leaves)
            self._known[key] = self._find(grads, state, params, extra_args)
        return self._known[key]

    def _find(self, grads: Any, state: Any, params: Any, extra_args: dict) -> list[Role]:
        like_params = grads if params is None else params
        start = jax.make_jaxpr(self._init)(like_params).jaxpr
        step = jax.make_jaxpr(lambda g, s, p: self._update(g, s, p, **extra_args))(
            grads, state, params
        ).jaxpr
        leaves = jax.tree.leaves(state)
        count = len(jax.tree.leaves(grads))
        flags = _nonnegative(step, start, count, len(leaves))
        owners, weights = owners_of(state, like_params), _depends_on_operands(start)
        degrees = _degrees(step, count, weights)
        return [Role(*role) for role in zip(flags, degrees, owners, weights, strict=True)]

    def at_start(self, state: Any, params: Any) -> list[Role]:
        """Return what is known of the roles without a look at the update."""
        params = _shapes(params)
        weights = _depends_on_operands(jax.make_jaxpr(self._init)(params).jaxpr)
        owners = owners_of(state, params)
        pairs = zip(owners, weights, strict=True)
        return [Role(param=owner, is_weight=weight) for owner, weight in pairs]


def owners_of(state: Any, params: Any) -> list[int | None]:
    """Return for each leaf the parameter whose key path is the longest end of the leaf's."""
    own = {path: i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}

    def owner(path: tuple) -> int | None:
        ends = (path[start:] for start in range(len(path) + 1))
        return next((own[end] for end in ends if end in own), None)

    return [owner(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]


def _nonnegative(step: Any, start: Any, count: int, size: int) -> list[bool]:
    """The largest set of leaves that start without negative elements, and keep it so."""
    flags = nonnegative_results(start, [False] * len(start.invars))
    while True:
        rest = [False] * (len(step.invars) - count - size)
        results = nonnegative_results(step, [False] * count + flags + rest)
        kept = [a and b for a, b in zip(flags, results[len(results) - size :], strict=True)]
        if kept == flags:
            return flags
        flags = kept


def _degrees(step: Any, count: int, weights: list[bool]) -> list[Degree]:
    """The degrees that a step gives back, once those of the state are known."""
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


def _depends_on_operands(jaxpr: Any) -> list[bool]:
    """Tell for each result whether it is made of operands."""
    return evaluate(
        jaxpr,
        [True] * len(jaxpr.invars),
        lambda eqn, moved: [any(moved)] * len(eqn.outvars),
        literal=lambda _: False,
        constant=lambda *_: False,
    )
