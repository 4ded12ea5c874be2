"""Run a few steps and find, for every value, by how much the scale of its rule is wrong.

A round runs the steps with statistics of all values that count, then interprets the step once more
with the static scales that its state will have. There each scale is known while tracing, and so is
the data of each value: `RMS of the value / scale`. What is outside of its band gets a correction,
and everything that is computed from it is judged with that. Some scales are known at run time
alone: in loops, and where a traced scalar has its part in them, as in the gradients of a loss that
is divided by the number of its tokens. They are computed by a program that computes nothing else,
again and again while their corrections are chosen. Another round is needed only where the first has
seen wrong values, behind what saturated or overflowed. It starts from the state at its static
scales.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.arrays.scaled_array import check_scaled, is_scaled
from jax_scalify.config import ScalifyConfig
from jax_scalify.conversions.freezing import thaw_scales
from jax_scalify.conversions.nnx_objects import PureCall
from jax_scalify.numerics.calibration import Calibration, check_unshared
from jax_scalify.numerics.choosing import VANISHED, Choice, is_distorted
from jax_scalify.numerics.equations import Planner, Result
from jax_scalify.numerics.instrumenting import Place, Watcher, find_places
from jax_scalify.numerics.interpreting import is_array, trace
from jax_scalify.numerics.measuring import (
    LOST,
    Measured,
    ScaleWatcher,
    StatisticsWatcher,
    Steps,
    at_frozen_scale,
    combine,
    combine_each,
    finish,
    measure_state,
)
from jax_scalify.transform import scalify

_ROUNDS = 4
# A program that runs a few steps is not worth the time that costly passes take.
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def calibrate(
    step: Callable,
    state: Any,
    batch: Any,
    *,
    steps: int = 4,
    config: ScalifyConfig | None = None,
) -> Calibration:
    """Run some steps and measure what scales without any statistics have to know.

    The steps start from `state`, which stays what it is. They run with dynamic scales, and compile
    once with statistics: once more, up to three times, where something overflowed, saturated or
    vanished. A value in a `scan` gets one correction for all steps of the loop; values inside of
    `while` loops and kernels are not looked at.

    Args:
        step: `step(state, batch)`, which returns the new state, or a tuple that begins with it: the
            function that `scalify` is given.
        state: a pytree with `ScaledArray` leaves, best after a few steps of training.
        batch: a batch, for all steps, or an iterator of batches, one for each.
        steps: how many to run.
        config: of `scalify`.

    Warns:
        UserWarning: if corrections make the state infinite or nan, and so are not taken.

    Returns:
        A `Calibration`: for `jsa.scalify(step, calibration=c)`, and `c.freeze(state)`.

    Raises:
        TypeError: if `step` is not callable, `steps` no int, `batch` a data loader and not its
            iterator, or the state has no `ScaledArray`.
        ValueError: if `steps` is less than 1, an iterator ends before, `step` does not return its
            state, or NNX objects in the state share a variable: give it what `nnx.split` returns.

    Example:
        >>> def step(w, x):  # which rules take to grow by 2.8 at each product, and grows by 16
        ...     for _ in range(10):
        ...         x = x @ w
        ...     return w, x
        >>> w = jsa.as_scaled_array(2 * jnp.ones((8, 8)), dtype=jnp.float16)
        >>> x = jnp.ones((1, 8), jnp.float16)
        >>> print(jsa.scalify(step)(w, x)[1].data[0, 0])
        inf
        >>> c = jsa.calibrate(step, w, x, steps=1)
        >>> y = jax.jit(jsa.scalify(step, calibration=c))(c.freeze(w), x)[1]
        >>> print(y.data[0, 0], jsa.asarray(y, jnp.float32)[0, 0] == 16.0**10)
        8.0 True
        >>> print(c.exponents)
        {'dot_general#3': 9, 'dot_general#6': 9, 'dot_general#9': 9}
    """
    if not callable(step):
        raise TypeError(f"`step` must be callable, got {type(step).__name__}.")
    if not isinstance(steps, (int, np.integer)):
        raise TypeError(f"`steps` must be an int, got {type(steps).__name__}.")
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    check_scaled(state, "state")
    check_unshared(state)
    if not any(map(is_scaled, jax.tree.leaves(state, is_leaf=is_scaled))):
        raise TypeError(
            "`state` has no `ScaledArray`, so there are no scales to calibrate: begin with "
            "`jsa.as_scaled_array(state)`."
        )
    batches = _batches(batch, int(steps))
    exponents: dict[str, int] = {}
    at_scales: Callable[[Any], Any] = thaw_scales
    last: tuple[_Seen, Choice, dict[str, int]] | None = None
    for _ in range(_ROUNDS):
        seen = _measure(step, config, exponents, at_scales(state), batches, at_scales)
        if last is not None and seen.state_is_lost and not last[0].state_is_lost:
            warnings.warn(
                "`calibrate` found corrections with which the state is not finite after "
                f"{steps} steps, and goes back to the {len(last[2])} of the round before.",
                stacklevel=2,
            )
            seen, chosen, exponents = last
            break
        last = seen, Choice({}, {}), exponents
        before, chosen = exponents, _choose(step, config, exponents, seen, batches)
        exponents = chosen.exponents
        if exponents == before or not seen.is_distorted:
            break
        if at_scales is thaw_scales and not seen.state_is_lost:
            at_scales = Calibration({}, seen.state).freeze
    values = {
        name: dataclasses.replace(
            m, **{"correction": exponents.get(name, 0), **chosen.found.get(name, {})}
        )
        for name, m in seen.values.items()
        if m.role != "value" or exponents.get(name) or is_distorted(m, seen.results[name], LOST)
    }
    operands = [r.name for r in seen.results.values() if r.is_operand]
    unseen = tuple(name for name in operands if name not in values)
    return Calibration(_rounded(values), _rounded(seen.state), int(steps), unseen)


def _batches(batch: Any, steps: int) -> list[Any]:
    """A batch for each step."""
    if isinstance(batch, Iterator):
        batches = list(itertools.islice(batch, steps))
        if len(batches) < steps:
            raise ValueError(
                f"`batch` is an iterator of {len(batches)} batches, fewer than `steps`, {steps}."
            )
        return batches
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, Iterable) and not is_array(leaf) and not isinstance(leaf, (str, bytes)):
            raise TypeError(
                f"`batch` must be a batch or an iterator of batches, got {type(leaf).__name__}: "
                "give `iter(batch)`."
            )
    return [batch] * steps


def _rounded(group: Mapping[str, Measured]) -> dict[str, Measured]:
    """With the digits that a file keeps, so that what is loaded is equal to what was saved."""
    return {name: Measured.from_dict(m.as_dict()) for name, m in group.items()}


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What some steps have shown.

    Attributes:
        values: by name.
        results: what they are.
        state: by name, of the last state where the leaf was not zero, at the scales that it will be
            frozen with.
        last: the state.
        steps: by name, of the steps of loops.
    """

    values: dict[str, Measured]
    results: Mapping[str, Result]
    state: dict[str, Measured]
    last: Any
    steps: dict[str, Steps]

    @property
    def state_is_lost(self) -> bool:
        """Whether the state is not finite."""
        return any(m.nonfinite for m in self.state.values())

    @property
    def is_distorted(self) -> bool:
        """Whether values are not what they would be: behind what overflows, or all but vanishes."""
        return any(
            is_distorted(m, self.results[name], VANISHED)
            for name, m in self.values.items()
            if self.results[name].can_be_corrected
        )


@jax.debug_nans(False)  # statistics of no number are nan
def _measure(
    step: Callable,
    config: ScalifyConfig | None,
    exponents: Mapping[str, int],
    state: Any,
    batches: list[Any],
    at_scales: Callable[[Any], Any],
) -> _Seen:
    """Run the steps with corrections and statistics, each from a state `at_scales`."""
    planner = Planner(exponents)
    scaled = scalify(step, config=config, calibration=planner)
    names: list[str] = []

    def watched(state: Any, batch: Any) -> tuple[Any, list[jax.Array]]:
        out, places, seen = _watch(
            PureCall(scaled, (state, batch), {}), planner, StatisticsWatcher, _counts
        )
        names[:] = [place.name for place in places]
        return out, [seen[place.position, place.result] for place in places]

    program = _compiled(watched)
    found: dict[str, list[Any]] = {}
    of_state: dict[str, Measured] = {}
    for batch in batches:
        out, rows = program(state, batch)
        state = at_scales(_next_state(out, state))
        # Gradients that are accumulated are zero after the step that they are for.
        of_state |= {
            name: m
            for name, m in measure_state(state).items()
            if math.isfinite(m.log2_max) or name not in of_state
        }
        for name, each in zip(names, jax.device_get(rows), strict=True):
            found.setdefault(name, []).append(each)
    assert planner.equations is not None
    results = planner.equations.results
    # Of each value the rows of all batches together, by the steps of its loops.
    rows_of = {name: combine_each(_stacked(each, combine)) for name, each in found.items()}
    rows = jnp.asarray([combine(each) for each in rows_of.values()])
    known = [
        {
            "role": results[name].role,
            "dtype": jnp.dtype(results[name].dtype).name,
            "correction": exponents.get(name, 0),
            "line": results[name].line.rpartition("/")[2],
        }
        for name in found
    ]
    measured = zip(found, finish(rows, known) if found else [], strict=True)
    values = {name: m for name, m in measured if m is not None}
    leaves = {name: at_frozen_scale(m) for name, m in of_state.items()}
    steps = {name: Steps.of(each) for name, each in rows_of.items()}
    return _Seen(values, results, leaves, state, steps)


_ARRAY = object()  # stands for an array among static leaves


def _compiled(function: Callable) -> Callable:
    """Compile a function of pytrees, of which what is no array is static."""

    def flat(static: Any, *arrays: Any) -> Any:
        tree, leaves = static
        rest = iter(arrays)
        args = [next(rest) if leaf is _ARRAY else leaf for leaf in leaves]
        return function(*jax.tree.unflatten(tree, args))

    options = _QUICKLY if jax.default_backend() == "cpu" else None
    program = jax.jit(flat, static_argnums=0, compiler_options=options)

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        static = tree, tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
        return program(static, *(leaf for leaf in leaves if is_array(leaf)))

    return call


def _watch(
    call: PureCall,
    planner: Planner,
    watcher: Callable[[list[Place], Any], Watcher],
    counts: Callable[[Result], bool],
) -> tuple[Any, list[Place], dict[Any, jax.Array]]:
    """The results of a step, inside of a trace, and what is seen of the values that count."""
    structure: Any = None

    def update(*args: Any) -> Any:
        nonlocal structure
        out = call.fun(*args)
        structure = jax.tree.structure(out)
        return out

    closed, arrays, arguments = trace(PureCall(update, call.args, {}))
    assert planner.equations is not None
    known = planner.equations.results
    places = [
        place
        for place in find_places(closed, arguments)
        if place.name in known and counts(known[place.name])
    ]
    results, seen = watcher(places, None).run(closed, arrays)
    return jax.tree.unflatten(structure, results), places, seen


def _counts(result: Result) -> bool:
    """Whether a value is measured: what may leave its range, and what matmuls and updates take."""
    return result.can_be_corrected or result.is_operand or result.is_gradient


def _next_state(out: Any, state: Any) -> Any:
    """The new state among the results of a step."""
    structure = jax.tree.structure(state, is_leaf=is_scaled)
    first = out[0] if isinstance(out, tuple) and out else None
    for candidate in (out, first):
        if jax.tree.structure(candidate, is_leaf=is_scaled) != structure:
            continue
        if not any(map(is_scaled, jax.tree.leaves(candidate, is_leaf=is_scaled))):
            raise ValueError(
                "`step` returns a new state without a `ScaledArray`, so after one step there are "
                "no scales to calibrate: return the state without `stop_scaling`."
            )
        return candidate
    raise ValueError(
        "`step` must return the new state, or a tuple that begins with it: its results have the "
        f"structure {jax.tree.structure(out, is_leaf=is_scaled)}, the state {structure}."
    )


def _stacked(each: Sequence[np.ndarray], combine: Callable[[Any], Any]) -> np.ndarray:
    """What is seen of a value in several batches, side by side by the steps of its loops.

    Of batches whose loops differ in length all steps are combined.
    """
    is_alike = len({len(rows) for rows in each}) == 1
    return np.stack(each if is_alike else [np.asarray(combine(x))[None] for x in each], 1)


def _choose(
    step: Callable,
    config: ScalifyConfig | None,
    exponents: Mapping[str, int],
    seen: _Seen,
    batches: list[Any],
) -> Choice:
    """Choose corrections for static scales: interpret the step, and compile nothing but scales."""
    frozen = Calibration({}, seen.state).freeze(seen.last)
    choice, names = Choice(seen.values, exponents, seen.steps), list(seen.values)
    found: list[str] = []

    def scales(state: Any, batch: Any, factors: jax.Array) -> list[jax.Array]:
        of = functools.partial(choice.of, factors=dict(zip(names, factors, strict=True)))
        planner = Planner({}, of)
        call = PureCall(scalify(step, config=config, calibration=planner), (state, batch), {})
        unknown = choice.unknown_names
        _, places, rows = _watch(call, planner, ScaleWatcher, lambda r: r.name in unknown)
        found[:] = [place.name for place in places]
        return [rows[place.position, place.result] for place in places]

    program, different = _compiled(scales), list({id(batch): batch for batch in batches}.values())

    def scales_of(turned: Mapping[str, int]) -> dict[str, np.ndarray]:
        factors = 2.0 ** np.array([turned.get(name, 0) for name in names], np.float32)
        each = [jax.device_get(program(frozen, batch, factors)) for batch in different]
        # The largest of all batches, as was measured of them.
        highest = [np.fmax.reduce(_stacked(x, np.fmax.reduce), axis=1) for x in zip(*each)]
        with np.errstate(divide="ignore"):
            return {name: np.log2(x) for name, x in zip(found, highest, strict=True)}

    choice.settle(scales_of)
    return choice
