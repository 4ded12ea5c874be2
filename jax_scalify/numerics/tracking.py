"""Scales and ranges of a training step's values, each so many steps, without leaving the device."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import is_var
from jax_scalify.conversions.nnx_objects import PureCall, pure_call
from jax_scalify.numerics import device_statistics
from jax_scalify.numerics.host_statistics import as_formats
from jax_scalify.numerics.instrumenting import Place, Watcher, find_places
from jax_scalify.numerics.interpreting import is_array, scaled_arguments, trace
from jax_scalify.numerics.naming import matches

Select = str | Sequence[str] | Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """Statistics of some values at one step: arrays with an element for each, on the device.

    A pytree, with the names in its static part.

    Attributes:
        names: of the values.
        scale_exponent: `log2` of the largest scale; nan for a plain value, -inf if all are zero.
        log2_rms: `log2` of the root mean square of the finite data, masks left out; -inf if all is
            zero.
        zeros: share of the elements that are zero, or would be in the dtype that was asked for.
        underflow: share of the elements that are not zero, and subnormal or zero in that dtype.
        overflow: share of the elements at or beyond its largest finite value.
        nonfinite: share of the elements that are nan or infinite.

    All are nan for a value in a branch that was not taken.
    """

    names: tuple[str, ...]
    scale_exponent: jax.Array
    log2_rms: jax.Array
    zeros: jax.Array
    underflow: jax.Array
    overflow: jax.Array
    nonfinite: jax.Array

    def as_dict(self, step: int) -> dict[str, Any]:
        """Fetch it: return `{"step": step, "tensors": {name: {statistic: number}}}`.

        The numbers are Python's, with `None` for what is not finite: it can be written as JSON.
        """
        fields = [f.name for f in dataclasses.fields(self)][1:]
        arrays = jax.device_get([getattr(self, name) for name in fields])
        rows = zip(self.names, *(array.tolist() for array in arrays), strict=True)
        return {
            "step": step,
            "tensors": {
                name: {f: x if math.isfinite(x) else None for f, x in zip(fields, numbers)}
                for name, *numbers in rows
            },
        }


jax.tree_util.register_dataclass(
    Record, [f.name for f in dataclasses.fields(Record)][1:], ["names"]
)


class Tracker:
    """A training step that returns a record, too, each so many calls: made by `track`.

    Attributes:
        calls: how many there were; set it to the number of the last step to resume a run.
    """

    def __init__(self, update: Callable, select: Select, every: int, dtype: Any):
        self._update, self._select = update, select
        self._every, self._dtype = every, dtype
        self.calls: int = 0
        self._programs: dict[Any, Callable] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Record | None]:
        """Call the step; return what it does, and at each N-th call a record, else None."""
        if not self._programs:
            # What cannot be tracked is told at the first step.
            self._program(pure_call(self._update, args, kwargs))
        self.calls += 1
        if self.calls % self._every == 0:
            return self.record(*args, **kwargs)
        return self._update(*args, **kwargs), None

    @jax.debug_nans(False)  # in a record nan means that there is no number
    def record(self, *args: Any, **kwargs: Any) -> tuple[Any, Record]:
        """Call the step, and record it whatever the number of calls is, which stays."""
        call = pure_call(self._update, args, kwargs)
        program, arrays = self._program(call)
        out, record = program(*arrays)
        return call.finish(out), record

    def names(self, *args: Any, **kwargs: Any) -> list[str]:
        """Return the names of all values that could be selected: nothing is computed.

        They are `args[0]['w']` for an argument, as in a `Report`, and `pass/scopes:primitive` for a
        value that is computed, without a pass in the forward one: `block_0/mlp:dot_general`,
        `backward/block_0/mlp:dot_general`, `backward/block_0/mlp:dot_general#2` for the next of
        that name, `update/args[0]['w']:add` for an update outside of any scope. What a function
        that is called by a `while` loop computes is not among them.
        """
        call = pure_call(self._update, args, kwargs)
        closed, _, arguments = trace(call)
        return [*_arguments(call), *(p.name for p in find_places(closed, arguments))]

    def _program(self, call: PureCall) -> tuple[Callable, list[Any]]:
        """The compiled step with statistics for arguments of a structure, and their arrays."""
        leaves, tree = jax.tree.flatten((call.args, call.kwargs))
        dynamic = tuple(map(is_array, leaves))
        static = tuple(None if is_array(leaf) else leaf for leaf in leaves)
        key = tree, dynamic, static, call.structure
        if key not in self._programs:
            if any(map(_compat.is_traced, leaves)):
                raise ValueError("A tracked step counts its calls: call it outside of `jax.jit`.")
            # Where only arguments are looked at, this is the trace that the step needs anyway.
            observe = self._select is not None
            closed, _, names = trace(call, observe=observe)
            self._choose(closed, names, call)

            def program(*arrays: Any) -> tuple[Any, Record]:
                rest = iter(arrays)
                full = [next(rest) if d else x for d, x in zip(dynamic, static, strict=True)]
                args, kwargs = jax.tree.unflatten(tree, full)
                return self._watched(PureCall(call.fun, args, kwargs))

            self._programs[key] = jax.jit(program, donate_argnums=_donated(closed))
        return self._programs[key], [leaf for leaf in leaves if is_array(leaf)]

    def _watched(self, call: PureCall) -> tuple[Any, Record]:
        """The step and a record of it, inside of a trace."""
        structure: Any = None

        def update(*args: Any, **kwargs: Any) -> Any:
            nonlocal structure
            out = call.fun(*args, **kwargs)
            structure = jax.tree.structure(out)
            return out

        places: list[Place] = []
        if self._select is None:
            chosen, out = _arguments(call), update(*call.args, **call.kwargs)
        else:
            closed, arrays, names = trace(dataclasses.replace(call, fun=update))
            chosen, places = self._choose(closed, names, call)
            if not places:
                out = update(*call.args, **call.kwargs)
            else:
                results, seen = Watcher(places, self._dtype).run(closed, arrays)
                out = jax.tree.unflatten(structure, results)
        rows = [device_statistics.observe(x, scale, self._dtype) for x, scale in chosen.values()]
        rows += [seen[place.position, place.result] for place in places]
        names = (*chosen, *(place.name for place in places))
        return out, Record(names, **device_statistics.finish(jnp.stack(rows)))

    def _choose(
        self, closed: Any, names: list[str], call: PureCall
    ) -> tuple[dict[str, Any], list[Place]]:
        """The arguments and the places that are selected.

        Raises:
            ValueError: if a pattern, or all that there is, selects nothing.
        """
        arguments = _arguments(call)
        if self._select is None:
            if not arguments:
                raise ValueError("`update` has no floating argument: say what to `select`.")
            return arguments, []
        places = find_places(closed, names)
        known = [*arguments, *(place.name for place in places)]
        chosen = set(_selected(self._select, known))
        kept = {name: pair for name, pair in arguments.items() if name in chosen}
        return kept, [place for place in places if place.name in chosen]


def _arguments(call: PureCall) -> dict[str, tuple[Any, Any]]:
    """Data and scale of the floating arguments."""
    arguments = scaled_arguments(call.args, call.kwargs)
    found = ((n, jnp.asarray(x), scale) for n, x, scale in arguments)
    return {n: (x, scale) for n, x, scale in found if dtypes.is_scalable(x.dtype)}


def _selected(select: Any, names: list[str]) -> list[str]:
    if callable(select):
        chosen = [name for name in names if select(name)]
        if not chosen:
            raise ValueError(
                f"`select` is False for all of {len(names)} values. {_near('', names)}"
            )
        return chosen
    chosen = []
    for pattern in [select] if isinstance(select, str) else select:
        exact = [pattern] if pattern in names else []
        found = exact or [name for name in names if matches(name, pattern)]
        if not found:
            raise ValueError(f"`select`: no value is called {pattern!r}. {_near(pattern, names)}")
        chosen += found
    return chosen


def _near(pattern: str, names: list[str]) -> str:
    """Some names, for an error message."""
    near = difflib.get_close_matches(pattern.strip("*"), names, n=5, cutoff=0.3) or names[:5]
    return f"There are {', '.join(map(repr, near))}; `tracked.names(*args)` lists all."


def _donated(closed: Any) -> tuple[int, ...]:
    """The arguments of a traced function that a `jit` inside of it takes over."""
    calls = [eqn for eqn in closed.jaxpr.eqns if any(eqn.params.get("donated_invars", ()))]
    taken = {
        var
        for eqn in calls
        for var, is_donated in zip(eqn.invars, eqn.params["donated_invars"], strict=True)
        if is_donated and is_var(var)
    }
    return tuple(i for i, var in enumerate(closed.jaxpr.invars) if var in taken)


def track(
    update: Callable, select: Select = None, *, every: int = 100, dtype: Any = None
) -> Tracker:
    """Make a training step return scales and ranges of some of its values, each so many calls.

    `tracked(*args)` returns `(update(*args), None)`, and at each N-th call a `Record` in place of
    the None: a few small arrays that stay on the device until they are looked at. There are two
    compiled programs. The first one is `update` as it is, called in N - 1 of N calls; the second
    one computes statistics as well, and is compiled when it is first needed; where values inside of
    the step are selected, XLA may fuse, and so round, differently there. Arguments that the `jit`
    of `update` donates are donated there, too.

    Branches of `cond`, steps of `scan` and what they call are looked into: a value in a loop has
    one entry for all steps. Not looked into are the bodies of `while` and of kernels. Counting
    calls, it cannot be used inside of `jit`.

    Args:
        update: any function of arrays, `ScaledArray` and trees of them; jitted or not, scalified or
            not. Static arguments are to be bound beforehand, by `functools.partial`.
        select: what to look at: one or several names, else parts of names, else patterns of whole
            names with * and ?; or a predicate on names. The names are those of
            `tracked.names(*args)`. By default all floating arguments, as they are before the step.
        every: N, at least 1.
        dtype: the floating dtype whose limits count for underflow and overflow; by default each
            value's own.

    Returns:
        A `Tracker`: `tracked(*args)`, `tracked.record(*args)` for a record now, and
        `tracked.names(*args)`.

    Raises:
        TypeError: if `update` is not callable, `select` is nothing of the kind, `every` is no int,
            or `dtype` is no real floating dtype.
        ValueError: if `every` is less than 1; at the first call, if a pattern selects nothing.

    Example:
        >>> @jax.jit
        ... def update(w, x):
        ...     return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w) / 64
        >>> tracked = jsa.numerics.track(update, ["args[0]", "backward/dot*"], every=2)
        >>> w, x = jnp.ones((4, 4)), jnp.eye(4)
        >>> for step in range(1, 3):
        ...     w, record = tracked(w, x)
        >>> print(record.as_dict(step)["tensors"]["args[0]"]["zeros"], record.names)
        0.0 ('args[0]', 'backward/dot_general')
    """
    if not callable(update):
        raise TypeError(f"`update` must be callable, got {type(update).__name__}.")
    is_list = (
        isinstance(select, (list, tuple))
        and select
        and all(isinstance(pattern, str) for pattern in select)
    )
    if not (select is None or isinstance(select, str) or callable(select) or is_list):
        raise TypeError(f"`select` must be patterns of names or a function, got {select!r}.")
    if not hasattr(every, "__index__"):
        raise TypeError(f"`every` must be an int, got {every!r}.")
    if operator.index(every) < 1:
        raise ValueError(f"`every` must be at least 1, got {every}.")
    kind = None if dtype is None else as_formats([dtype])[0]
    return Tracker(update, select, operator.index(every), kind)
