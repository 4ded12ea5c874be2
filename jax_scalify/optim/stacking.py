"""One equation for many leaves: an optimizer's update, evaluated on stacks of small leaves.

optax maps a function over the leaves of a tree, so the jaxpr of an update repeats each equation for
each leaf, and XLA makes kernels for each. Here equations that do the same to several leaves are
evaluated as one equation on their stack: elementwise equations, and reductions of whole leaves. All
other equations are evaluated for each leaf. So this works for any optimizer: masked, wrapped, or
dependent on the shapes of its leaves.

Example: with `mu = {"a": m0, "b": m1}`, the jaxpr has `0.9 * m0 + 0.1 * g0` and
`0.9 * m1 + 0.1 * g1`. They become `0.9 * M + 0.1 * G`, where the stacks `M` and `G` have one row
for each parameter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify.base.jaxprs import evaluate
from jax_scalify.interpreter.traits import traits_of

# Calls that are inlined. Other calls may have derivative rules or scale rules.
_INLINED = frozenset("jit pjit closed_call core_call".split())
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())


@dataclasses.dataclass(eq=False)
class Stack:
    """Values of several leaves, computed by equal equations, in one array.

    Attributes:
        depth: the number of equations between the inputs and the values.
        members: the values by place, the number of their leaf.
        array: the values in the order of their places; None until they are computed.
    """

    depth: int
    members: dict[int, Item] = dataclasses.field(default_factory=dict)
    array: Any = None

    @functools.cached_property
    def pinned(self) -> Any:
        """The array behind a barrier, so that XLA does not recompute it for each leaf."""
        return lax.optimization_barrier(self.array) if self.depth else self.array

    @property
    def places(self) -> list[int]:
        """The numbers of the leaves, in order."""
        return sorted(self.members)


@dataclasses.dataclass(eq=False)
class Item:
    """A value of the jaxpr.

    Attributes:
        depth: the number of equations between the inputs and the value.
        aval: its shape and dtype.
        is_common: whether it depends on several leaves, as a norm over all leaves does.
        eqn, operands: the equation that computes it, and its operands; None for inputs.
        results: all results of this equation.
        stack, place: its stack and place, if the equation is repeated for other leaves.
        known: its array; None until it is computed.
    """

    depth: int
    aval: Any
    is_common: bool = False
    eqn: Any = None
    operands: Sequence[Item] = ()
    results: Sequence[Item] = ()
    stack: Stack | None = None
    place: int = 0
    known: Any = None

    @property
    def array(self) -> Any:
        """The array; a slice of the stack, if it was computed in a stack."""
        if self.known is None:
            assert self.stack is not None
            where = self.stack.places.index(self.place)
            self.known = lax.index_in_dim(self.stack.pinned, where, keepdims=False)
        return self.known


def given_stack(array: jax.Array, places: Sequence[int]) -> list[Item]:
    """Return the items of an input stack; `places` are the leaves' numbers, ascending."""
    stack = Stack(0, array=array)
    aval = jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
    stack.members = {place: Item(0, aval, stack=stack, place=place) for place in places}
    return list(stack.members.values())


def given(array: Any) -> Item:
    """Return the item of an input array."""
    return Item(0, jax.typeof(array), known=array)


def call(closed: Any, operands: Sequence[Item]) -> list[Item]:
    """Evaluate a closed jaxpr on items, with repeated equations in stacks."""
    results = _Graph().trace(closed, operands)
    for unit in _in_order(results):
        _compute(unit)
    return results


class _Graph:
    """The items of a jaxpr. Equal equations on equal operands share one item."""

    def __init__(self) -> None:
        self._stacks: dict[Any, Stack] = {}
        self._alone: dict[Any, Item] = {}
        self._literals: dict[Any, Item] = {}

    def trace(self, jaxpr: Any, operands: Sequence[Any]) -> list[Item]:
        return evaluate(
            jaxpr, operands, self._equation, self._literal, lambda var, value: given(value)
        )

    def _literal(self, atom: Any) -> Item:
        value = np.asarray(atom.val, atom.aval.dtype)
        key = value.dtype, value.shape, value.tobytes(), atom.aval.weak_type
        if key not in self._literals:
            self._literals[key] = Item(0, atom.aval, known=value)
        return self._literals[key]

    def _equation(self, eqn: Any, operands: list[Item]) -> list[Item]:
        if eqn.primitive.name in _INLINED:
            return self.trace(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), operands)
        depth = 1 + max((x.depth for x in operands), default=0)
        made: list[Item] = []
        common = any(x.is_common or x.stack is not None for x in operands)
        made += [Item(depth, var.aval, common, eqn, operands, made) for var in eqn.outvars]
        key = _key(eqn, operands)
        if key is None:
            return made
        [item] = made
        places = {x.place for x in operands if x.stack is not None}
        if not places:
            return [self._alone.setdefault(key, item)]
        if not item.aval.shape and any(x.is_common and x.stack is None for x in operands):
            return made  # `(s0 + s1) + s2`
        [item.place] = places
        item.stack = self._stacks.setdefault(key, Stack(depth))
        return [item.stack.members.setdefault(item.place, item)]


def _key(eqn: Any, operands: Sequence[Item]) -> Any:
    """Return a key that is equal for equations of one stack; None if it must stand alone."""
    if not _may_be_stacked(eqn) or len({x.place for x in operands if x.stack is not None}) > 1:
        return None
    if any(x.stack is not None and x.aval.shape not in _shapes(eqn) for x in operands):
        return None
    key = (
        eqn.primitive,
        tuple(sorted(eqn.params.items())),
        tuple(x.stack or x for x in operands),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _may_be_stacked(eqn: Any) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if eqn.effects or eqn.primitive.multiple_results or params.get("sharding") is not None:
        return False
    if params.get("out_sharding") is not None:
        return False
    if name == "reshape":
        return params["dimensions"] is None
    return name in _REDUCTIONS or name == "broadcast_in_dim" or traits_of(name).elementwise


def _shapes(eqn: Any) -> list[Any]:
    """Return the shapes that an operand from a stack may have."""
    if traits_of(eqn.primitive.name).elementwise:
        return [(), eqn.outvars[0].aval.shape]
    return [v.aval.shape for v in eqn.invars]


def _in_order(results: Sequence[Item]) -> list[Item | Stack]:
    """Return the single items and stacks that results depend on, in order of computation."""
    needed: dict[Item, None] = {}
    rest = list(results)
    while rest:
        item = rest.pop()
        if item not in needed and item.eqn is not None:
            needed[item] = None
            rest += item.operands
    units: dict[Item | Stack, None] = {}
    members: dict[Stack, dict[int, Item]] = {}
    for item in needed:
        if item.stack is None:
            units[item] = None
        else:
            members.setdefault(item.stack, {})[item.place] = item
    for stack, found in members.items():
        stack.members = found
        if len(found) > 1:
            units[stack] = None
        else:
            units[next(iter(found.values()))] = None
    return sorted(units, key=lambda unit: unit.depth)


def _compute(unit: Item | Stack) -> None:
    if isinstance(unit, Stack):
        unit.array = _stacked(unit)
        return
    if unit.known is not None:  # computed with another result of its equation
        return
    eqn = unit.eqn
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(*(x.array for x in unit.operands), **params)
    for item, array in zip(unit.results, out if eqn.primitive.multiple_results else [out]):
        item.known = array


def _stacked(stack: Stack) -> Any:
    """Return the array of a stack whose operands are computed."""
    places = stack.places
    items = [stack.members[p] for p in places]
    eqn, shape, count = items[0].eqn, items[0].aval.shape, len(items)
    name, params = eqn.primitive.name, dict(eqn.params)
    operands = []
    for parts in zip(*(item.operands for item in items), strict=True):
        first = parts[0]
        if first.stack is None:
            operands.append(first.array)
        elif first.stack.places == places:
            operands.append(first.stack.array)
        else:
            operands.append(jnp.stack([part.array for part in parts]))
    stacks = [items[0].operands[i].stack is not None for i in range(len(operands))]
    if name in _REDUCTIONS:
        params["axes"] = tuple(a + 1 for a in params["axes"])
    elif name == "broadcast_in_dim":
        params["shape"] = (count, *shape)
        params["broadcast_dimensions"] = (0, *(d + 1 for d in params["broadcast_dimensions"]))
    elif name == "reshape":
        params["new_sizes"] = (count, *shape)
    else:
        operands = [
            _filled(x, is_stack, (count, *shape), name == "select_n" and i > 0)
            for i, (x, is_stack) in enumerate(zip(operands, stacks, strict=True))
        ]
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))


def _filled(x: Any, is_stack: bool, shape: tuple[int, ...], is_case: bool) -> Any:
    """Broadcast an elementwise operand to the shape of the stack. Numbers stay 0-d if possible."""
    if jnp.shape(x) == shape or not jnp.ndim(x) and not is_case:
        return x
    start = 0 if is_stack else 1
    return lax.broadcast_in_dim(x, shape, tuple(range(start, start + jnp.ndim(x))))


def trace(function: Callable[..., Any], operands: Sequence[Any], tree: Any) -> tuple[Any, Any]:
    """Return the jaxpr and the out tree of a function of a tree, given its leaves or types."""

    def flat(*leaves: Any) -> Any:
        return function(*jax.tree.unflatten(tree, leaves))

    closed, out = jax.make_jaxpr(flat, return_shape=True)(*operands)
    return closed, jax.tree.structure(out)
