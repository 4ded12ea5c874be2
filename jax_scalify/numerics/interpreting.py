"""Run a jaxpr equation by equation, and look at every value on the way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base.jaxprs import (
    applied,
    evaluate,
    function_of_jax_nn,
    makers,
    scan_operands,
    while_operands,
)
from jax_scalify.conversions.nnx_objects import PureCall
from jax_scalify.interpreter import observing
from jax_scalify.interpreter.observing import Observed, observe_p
from jax_scalify.interpreter.tracing import argument_name, is_static_result


@dataclasses.dataclass(frozen=True)
class Tagged:
    """A value, and what an observer wants to remember of it."""

    value: Any
    tag: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """An equation that was run.

    Attributes:
        eqn: of the user's function.
        path: its scopes, with the transforms and calls around it.
        line: where the user's code makes it: `file:line (function)`.
        function: of `jax.nn`, that it is a part of; empty if it is a part of none.
        operands, results: their values; data, if they are scaled.
        operand_scales, result_scales: arrays, or None for a value without a scale.
        tags: of the operands.
        iterations: how often each loop around it has been through, outermost first.
        makers: of each variable of its jaxpr the equation that makes it.
    """

    eqn: Any
    path: str
    line: str
    function: str
    operands: list[Any]
    results: list[Any]
    operand_scales: list[Any]
    result_scales: list[Any]
    tags: list[Any]
    iterations: tuple[int, ...]
    makers: Mapping[Any, Any]


Observer = Callable[[Step], Sequence[Any]]


def trace(call: PureCall, *, observe: bool = True) -> tuple[Any, list[Any], list[str]]:
    """Trace a function with its scales visible; return jaxpr, flat arguments and their names.

    Data and scale of a `ScaledArray` have its name. Without `observe` scales stay hidden.
    """
    flat, found = flat_function(call, is_array)
    arrays = [jnp.asarray(leaf) for _, leaf in found]
    with observing.is_observing(True) if observe else contextlib.nullcontext():
        closed = jax.make_jaxpr(flat)(*arrays)
    arguments = scaled_arguments(call.args, call.kwargs)
    scaled = {name for name, _, scale in arguments if scale is not None}
    names = [argument_name(path) for path, _ in found]
    whole = [name.rpartition(".")[0] for name in names]
    return closed, arrays, [w if w in scaled else n for n, w in zip(names, whole, strict=True)]


def flat_function(
    call: PureCall, is_dynamic: Callable[[Any], bool]
) -> tuple[Callable[..., list[Any]], list[tuple[Any, Any]]]:
    """Return a function from arrays to arrays, and the key paths and values of its arguments.

    The data and the scale of a `ScaledArray` are two arrays. Arguments that are not dynamic keep
    their values.
    """
    paths, tree = jax.tree.flatten_with_path((call.args, call.kwargs))
    dynamic = [i for i, (_, leaf) in enumerate(paths) if is_dynamic(leaf)]

    def flat(*arrays: Any) -> list[Any]:
        full = [leaf for _, leaf in paths]
        for i, array in zip(dynamic, arrays, strict=True):
            full[i] = array
        args, kwargs = jax.tree.unflatten(tree, full)
        out = jax.tree.leaves(call.fun(*args, **kwargs))
        return [leaf for leaf in out if not is_static_result(leaf)]

    return flat, [paths[i] for i in dynamic]


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array or a number; a bool is static."""
    return hasattr(leaf, "dtype") or (
        isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
    )


def scaled_arguments(args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return name, data and scale (or None) of each array among some arguments."""
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_scaled)
    return [
        (argument_name(path), leaf.data, leaf.scale)
        if is_scaled(leaf)
        else (argument_name(path), leaf, None)
        for path, leaf in leaves
        if is_scaled(leaf) or is_array(leaf)
    ]


def bodies(eqn: Any) -> list[tuple[Any, int]]:
    """Return the jaxprs of a call, of branches or a scan, and how many operands are not theirs.

    Not that of a `while`, of which it is not known how often it runs.
    """
    name, params = eqn.primitive.name, eqn.params
    call = applied(eqn)
    if call is not None:
        return [(call, 0)]
    if name == "cond":
        return [(branch, 1) for branch in params["branches"]]
    return [(params["jaxpr"], 0)] if name == "scan" and params["length"] else []


def is_interpreted(eqn: Any) -> bool:
    """Return whether a call computes with data and scales: only `observe` is of interest inside."""
    return eqn.params.get("name") == observing.CALL_NAME


class Runner:
    """Runs jaxprs and tells an observer of each equation; what it returns are the results' tags."""

    def __init__(self, observer: Observer, unknown: Any = None):
        """Start; `unknown` is the tag of literals, and of what no equation has made."""
        self._observer = observer
        self._unknown = unknown

    def run(
        self,
        closed: Any,
        operands: Sequence[Tagged],
        path: str = "",
        *,
        inside: bool = False,
        line: str = "",
        function: str = "",
        iterations: tuple[int, ...] = (),
    ) -> list[Tagged]:
        """Run a closed jaxpr.

        Args:
            closed: the jaxpr.
            operands: its arguments.
            path: scopes around it.
            inside: whether it computes with data and scales: only `observe` is of interest.
            line: of the call, for equations that name none of the user's.
            function: of `jax.nn`, that calls it.
            iterations: of the loops around it.
        """
        made_by = makers(getattr(closed, "jaxpr", closed))

        def equation(eqn: Any, found: list[Tagged]) -> list[Tagged]:
            inner = f"{path}/{_compat.name_stack(eqn)}".strip("/")
            around = dict(
                inside=inside,
                line=_compat.own_line(eqn) or line,
                function=function or function_of_jax_nn(eqn),
                iterations=iterations,
            )
            return self._equation(eqn, found, inner, around, made_by)

        return evaluate(
            closed,
            operands,
            equation,
            lambda atom: Tagged(np.asarray(atom.val, atom.aval.dtype), self._unknown),
            lambda _, const: Tagged(const, self._unknown),
        )

    def _equation(
        self,
        eqn: Any,
        operands: list[Tagged],
        path: str,
        around: dict[str, Any],
        makers: Mapping[Any, Any],
    ) -> list[Tagged]:
        name, params = eqn.primitive.name, eqn.params
        if name == "cond":
            branch = params["branches"][int(operands[0].value)]
            return self.run(branch, operands[1:], path, **around)
        if name == "while":
            return self._while(params, operands, path, around)
        if name == "scan" and params["length"]:
            return self._scan(params, operands, path, around)
        held = bodies(eqn)
        if held:
            around["inside"] |= is_interpreted(eqn)
            return self.run(held[0][0], operands, path, **around)
        if eqn.primitive is observe_p:
            return self._observed(params["observed"], operands, path, around)
        values = [t.value for t in operands]
        with _compat.equation_context(eqn):
            out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
        results = list(out) if eqn.primitive.multiple_results else [out]
        tags = [t.tag for t in operands]
        if around["inside"]:  # what an operand was made of is told by the next `observe`
            return [Tagged(r, first_known(tags, self._unknown)) for r in results]
        none = [None] * max(len(values), len(results))
        step = Step(
            eqn=eqn,
            path=path,
            line=around["line"],
            function=around["function"],
            operands=values,
            results=results,
            operand_scales=none[: len(values)],
            result_scales=none[: len(results)],
            tags=tags,
            iterations=around["iterations"],
            makers=makers,
        )
        return [Tagged(*pair) for pair in zip(results, self._observer(step), strict=True)]

    def _observed(
        self,
        observed: Observed,
        operands: list[Tagged],
        path: str,
        around: dict[str, Any],
    ) -> list[Tagged]:
        pairs = observed.pairs(operands)
        results, given = pairs[: len(observed.results)], pairs[len(observed.results) :]
        step = Step(
            eqn=observed.eqn,
            path=path,
            line=observed.line or around["line"],
            function=around["function"] or observed.function,
            operands=[data.value for data, _ in given],
            results=[data.value for data, _ in results],
            operand_scales=[None if scale is None else scale.value for _, scale in given],
            result_scales=[None if scale is None else scale.value for _, scale in results],
            tags=[data.tag for data, _ in given],
            iterations=around["iterations"],
            makers=observed.makers,
        )
        tags = self._observer(step)
        return [Tagged(data.value, tag) for (data, _), tag in zip(results, tags, strict=True)]

    def _while(
        self, params: dict[str, Any], operands: list[Tagged], path: str, around: dict[str, Any]
    ) -> list[Tagged]:
        cond_consts, body_consts, carry = while_operands(params, operands)
        cond_consts = [t.value for t in cond_consts]
        goes_on = jax.jit(jex_core.jaxpr_as_fun(params["cond_jaxpr"]))
        iterations, count = around["iterations"], 0
        while bool(np.all(goes_on(*cond_consts, *(t.value for t in carry))[0])):
            around = around | {"iterations": (*iterations, count)}
            carry = self.run(params["body_jaxpr"], [*body_consts, *carry], path, **around)
            count += 1
        return carry

    def _scan(
        self, params: dict[str, Any], operands: list[Tagged], path: str, around: dict[str, Any]
    ) -> list[Tagged]:
        consts, carry, xs = scan_operands(params, operands)
        num_carry, length = len(carry), params["length"]
        order = range(length)[::-1] if params["reverse"] else range(length)
        iterations, stacked = around["iterations"], []
        for i in order:
            around = around | {"iterations": (*iterations, i)}
            element = [Tagged(x.value[i], x.tag) for x in xs]
            out = self.run(params["jaxpr"], [*consts, *carry, *element], path, **around)
            carry = out[:num_carry]
            stacked.append(out[num_carry:])
        if params["reverse"]:
            stacked.reverse()
        ys = [
            Tagged(
                jnp.stack([y.value for y in each]),
                first_known([y.tag for y in each], self._unknown),
            )
            for each in zip(*stacked)
        ]
        return [*carry, *ys]


def first_known(tags: Sequence[Any], unknown: Any) -> Any:
    """The first tag that says something."""
    return next((tag for tag in tags if tag is not None and tag != unknown), unknown)
