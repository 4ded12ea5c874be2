"""One equation for many leaves: an optimizer's update, evaluated on arenas of small leaves.

optax maps a function over the leaves of a tree, so the jaxpr of an update repeats each equation for
each leaf, and XLA makes kernels for each. Here equations that do the same to several leaves are
evaluated as one equation on an array of all of them: elementwise equations, and reductions of whole
leaves. All other equations are evaluated for each leaf. So this works for any optimizer: masked,
wrapped, or dependent on the shapes of its leaves.

Example: with `mu = {"a": m0, "b": m1}`, the jaxpr has `0.9 * m0 + 0.1 * g0` and
`0.9 * m1 + 0.1 * g1`. They become `0.9 * M + 0.1 * G`, where the arenas `M` and `G` hold the leaves
of both parameters.
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
from jax_scalify.base.pins import elements, slices
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.optim.arena import SMALL, Arena
from jax_scalify.optim.copies import Copies
from jax_scalify.optim.sums import Sums, with_sums

# Calls that are inlined. Other calls may have derivative rules or scale rules.
_INLINED = ("jit", "closed_call")
# Reductions, and the number that does not change their result.
_REDUCTIONS = {
    "reduce_sum": lambda dtype: 0,
    "reduce_prod": lambda dtype: 1,
    "reduce_max": lambda dtype: _ends(dtype)[0],
    "reduce_min": lambda dtype: _ends(dtype)[1],
    "reduce_and": lambda dtype: np.array(-1).astype(dtype),
    "reduce_or": lambda dtype: 0,
}


@dataclasses.dataclass(eq=False)
class Stack:
    """Values of several leaves, computed by equal equations, in one array.

    Attributes:
        depth: the number of equations between the inputs and the values.
        is_full: whether a value has the elements of its leaf, in their order. Otherwise it is one
            number.
        shapes: the shape of every leaf, by place.
        members: the values by place. Places number the leaves in the order of their arena.
        array: the values in the order of their places: the array of the arena, or one number per
            leaf. None until they are computed.
    """

    depth: int
    is_full: bool
    shapes: Sequence[Any]
    members: dict[int, Item] = dataclasses.field(default_factory=dict)
    array: Any = None

    @functools.cached_property
    def parts(self) -> dict[int, Any]:
        """The part of each place. A barrier keeps XLA from recomputing the array for each part."""
        array = lax.optimization_barrier(self.array) if self.depth else self.array
        places, arena = self.places, self.arena
        if not self.is_full:
            return dict(zip(places, elements(array), strict=True))
        parts = slices(array, tuple(arena.starts), tuple(arena.counts))
        return dict(zip(places, parts, strict=True))

    @property
    def places(self) -> list[int]:
        """The places, in order."""
        return sorted(self.members)

    @property
    def arena(self) -> Arena:
        """The arena of the members' leaves."""
        return Arena.of([self.shapes[place] for place in self.places])


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
        number: the 0-d item that every element equals, if the value is a broadcast number.
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
    number: Item | None = None
    known: Any = None

    @property
    def array(self) -> Any:
        """The array; a part of the stack, if it was computed in a stack."""
        if self.known is None:
            assert self.stack is not None
            part = self.stack.parts[self.place]
            self.known = lax.reshape(part, self.aval.shape) if self.aval.shape else part
        return self.known


def given_stack(array: jax.Array, shapes: Sequence[Any], places: Sequence[int]) -> list[Item]:
    """Return the items of an input arena of the leaves at these places, ascending."""
    stack = Stack(0, True, shapes, array=array)
    for place in places:
        aval = jax.ShapeDtypeStruct(shapes[place], array.dtype)
        stack.members[place] = Item(0, aval, stack=stack, place=place)
    return list(stack.members.values())


def given(array: Any) -> Item:
    """Return the item of an input array."""
    return Item(0, jax.typeof(array), known=array)


def call(closed: Any, operands: Sequence[Item]) -> list[Item]:
    """Evaluate a closed jaxpr on items, with repeated equations in stacks."""
    results = _Graph().trace(closed, operands)
    copies = Copies()
    for unit in _in_order(results):
        _compute(unit, copies)
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
        places = {x.place for x in operands if x.stack is not None}
        if not _may_be_stacked(eqn) or len(places) > 1:
            return made
        [item] = made
        if not places:
            item.number = self._number(eqn, operands)
            key = _key(eqn, eqn.params, operands)
            return made if key is None else [self._alone.setdefault(key, item)]
        found = _in_stack(eqn, operands)
        if found is None:
            return made
        params, operands, is_full = found
        key = _key(eqn, params, operands)
        if key is None:
            return made
        if not is_full and any(x.is_common and x.stack is None for x in operands):
            return made  # the sum over leaves `(s0 + s1) + s2` is a chain
        shapes = next(x.stack.shapes for x in operands if x.stack is not None)
        stack = self._stacks.setdefault(key, Stack(depth, is_full, shapes))
        [item.place], item.stack, item.operands = places, stack, operands
        return [stack.members.setdefault(item.place, item)]

    def _number(self, eqn: Any, operands: Sequence[Item]) -> Item | None:
        """Return the 0-d item that every element of a result with axes equals, or None."""
        numbers = [x.number or x for x in operands]
        if not eqn.outvars[0].aval.shape or any(x.aval.shape for x in numbers):
            return None
        if eqn.primitive.name == "broadcast_in_dim":
            return numbers[0]
        key = _key(eqn, eqn.params, numbers)
        if key is None or not traits_of(eqn.primitive.name).elementwise:
            return None
        aval = jax.ShapeDtypeStruct((), eqn.outvars[0].aval.dtype)
        made = Item(1 + max(x.depth for x in numbers), aval, False, eqn, numbers)
        made.results = [made]
        return self._alone.setdefault(key, made)


def _key(eqn: Any, params: dict[str, Any], operands: Sequence[Item]) -> Any:
    """Return a key that is equal for equal equations; None if it has no hash."""
    key = (
        eqn.primitive,
        tuple(sorted(params.items())),
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
    moves = ("broadcast_in_dim", "reshape")
    return name in _REDUCTIONS or name in moves or traits_of(name).elementwise


def _in_stack(eqn: Any, operands: Sequence[Item]) -> tuple[dict[str, Any], list[Item], bool] | None:
    """Return an equation's form on arenas; None if it depends on the shapes of leaves.

    The form consists of the parameters without shapes, the operands with numbers in place of their
    broadcasts, and whether the result has the elements of the leaf.
    """
    name, out, params = eqn.primitive.name, eqn.outvars[0].aval, dict(eqn.params)
    if name in _REDUCTIONS:
        [x] = operands
        is_whole = len(params.pop("axes")) == len(x.aval.shape)
        return (params, list(operands), False) if is_whole else None
    if name in ("broadcast_in_dim", "reshape"):
        [x] = operands
        assert x.stack is not None
        spreads = not x.stack.is_full and name == "broadcast_in_dim" and not x.aval.shape
        is_leaf = spreads and out.shape == x.stack.shapes[x.place]
        stays = x.stack.is_full and (name == "reshape" or out.shape == x.aval.shape)
        stays = stays and params.get("dimensions") is None
        return ({}, list(operands), True) if is_leaf or stays else None
    is_full = any(x.stack is not None and x.stack.is_full for x in operands)
    found = []
    for x in operands:
        x = x.number or x if x.stack is None else x
        if x.aval.shape and (x.stack is None or x.aval.shape != out.shape):
            return None
        found.append(x)
    return (params, found, is_full) if is_full or not out.shape else None


def _in_order(results: Sequence[Item]) -> list[Item | Stack | Sums]:
    """Return the single items, stacks and sums that results depend on, in order of computation."""
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
    return sorted(with_sums(units, Item), key=lambda unit: unit.depth)


def _compute(unit: Item | Stack | Sums, copies: Copies) -> None:
    if isinstance(unit, Sums):
        unit.compute()
        return
    if isinstance(unit, Stack):
        unit.array = _stacked(unit)
        return
    if unit.known is not None:  # computed with another result of its equation
        return
    eqn = unit.eqn
    params = eqn.primitive.get_bind_params(eqn.params)
    operands = [_operand_alone(x, unit, copies) for x in unit.operands]
    if unit.aval.shape:  # an item that is alone in its stack has numbers in place of broadcasts
        operands = [_broadcast(x, v.aval.shape) for x, v in zip(operands, eqn.invars, strict=True)]
    out = eqn.primitive.bind(*operands, **params)
    for item, array in zip(unit.results, out if eqn.primitive.multiple_results else [out]):
        item.known = array


def _operand_alone(x: Item, unit: Item, copies: Copies) -> Any:
    """Return the array of an operand of a single item. Large leaves read numbers as copies."""
    if unit.aval.size <= SMALL:
        return x.array
    if x.number is not None and x.number.known is not None:
        x = x.number
    return x.array if x.aval.shape else copies.of(x.array)


def _ends(dtype: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest number of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf, np.inf
    info = None if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype)
    return (False, True) if info is None else (info.min, info.max)


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    return x if jnp.shape(x) == shape else jnp.broadcast_to(x, shape)


def _stacked(stack: Stack) -> Any:
    """Return the array of a stack whose operands are computed."""
    places, arena = stack.places, stack.arena
    items = [stack.members[p] for p in places]
    eqn = items[0].eqn
    name, params = eqn.primitive.name, dict(eqn.params)
    parts = list(zip(*(item.operands for item in items), strict=True))
    operands = [_operand(part, places) for part in parts]
    if name in _REDUCTIONS:

        def reduce(x: jax.Array, first: int = 1) -> jax.Array:
            axes = tuple(range(first, x.ndim))
            bound = eqn.primitive.get_bind_params(params | {"axes": axes})
            return eqn.primitive.bind(x, **bound)

        [x] = operands
        is_full = parts[0][0].stack.is_full
        neutral = _REDUCTIONS[name](x.dtype)
        return arena.reduced(reduce(x), reduce, neutral) if is_full else x
    if name == "reshape":
        return operands[0]
    if stack.is_full:
        shape = (sum(arena.counts), *arena.row)
        numbers = [x.stack is not None and not x.stack.is_full for x, *_ in parts]
        operands = [
            _broadcast(arena.spread(x), shape) if is_number else x
            for x, is_number in zip(operands, numbers, strict=True)
        ]
    else:
        shape = (len(places),)
    if name == "broadcast_in_dim":
        return operands[0]
    if name == "select_n":  # its cases have one shape
        operands[1:] = [_broadcast(x, shape) for x in operands[1:]]
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))


def _operand(parts: Sequence[Item], places: list[int]) -> Any:
    """Return the array of an operand of a stack: of these leaves, in their order."""
    stack = parts[0].stack
    if stack is None:
        return parts[0].array
    if stack.places == places:
        return stack.array
    which = [stack.places.index(place) for place in places]
    return stack.arena.taken(stack.array, which, is_full=stack.is_full)


def trace(function: Callable[..., Any], operands: Sequence[Any], tree: Any) -> tuple[Any, Any]:
    """Return the jaxpr and the out tree of a function of a tree, given its leaves or types."""

    def flat(*leaves: Any) -> Any:
        return function(*jax.tree.unflatten(tree, leaves))

    closed, out = jax.make_jaxpr(flat, return_shape=True)(*operands)
    return closed, jax.tree.structure(out)
