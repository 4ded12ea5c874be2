"""Run a few steps and find, for every value, by how much the scale of its rule is wrong.

A round runs the steps with statistics of all values that count, then interprets the step once more
with the static scales that its state will have. There each scale is known while tracing, and so is
the data of each value: `RMS of the value / scale`. What is outside of its band gets a correction,
and everything that is computed from it is judged with that. Another round is needed only where the
first has seen wrong values, behind what saturated or overflowed, or in loops, whose scales are
known at run time alone.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify.arrays.conversions import thaw_scales
from jax_scalify.arrays.nnx_objects import PureCall
from jax_scalify.arrays.scaled_array import check_scaled, is_scaled
from jax_scalify.config import ScalifyConfig
from jax_scalify.interpreter.operand import Operand
from jax_scalify.numerics.calibration import Calibration
from jax_scalify.numerics.equations import Equations, Planner, Result
from jax_scalify.numerics.instrumenting import Place, find_places
from jax_scalify.numerics.interpreting import is_array, trace
from jax_scalify.numerics.measuring import (
    Measured,
    StatisticsWatcher,
    at_frozen_scale,
    combine,
    excess,
    finish,
    measure_state,
)
from jax_scalify.transform import scalify

_ROUNDS = 4
_LOST = 0.01  # share of the elements of a value that is worth an entry
_VANISHED = 0.5
# Exponents of the scales at which float16 has all that `exp` and its like tell apart: numbers up to
# 2**8 beyond which they are 0, 1 or infinite in float32, too, and digits down to 2**-16.
_SATURATING = -8, 8
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
    vanished, or is out of its band in a loop. Values inside of `while` loops and kernels are not
    looked at.

    Args:
        step: `step(state, batch)`, which returns the new state, or a tuple that begins with it: the
            function that `scalify` is given.
        state: a pytree with `ScaledArray` leaves, best after a few steps of training.
        batch: a batch, for all steps, or an iterator of batches, one for each.
        steps: how many to run.
        config: of `scalify`.

    Returns:
        A `Calibration`: for `jsa.scalify(step, calibration=c)`, and `c.freeze(state)`.

    Raises:
        TypeError: if `step` is not callable, or the state has no `ScaledArray`.
        ValueError: if `steps` is less than 1, or `step` does not return its state.

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
    if operator.index(steps) < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    check_scaled(state, "state")
    if not any(map(is_scaled, jax.tree.leaves(state, is_leaf=is_scaled))):
        raise TypeError(
            "`state` has no `ScaledArray`, so there are no scales to calibrate: begin with "
            "`jsa.as_scaled_array(state)`."
        )
    batches = (
        [next(batch) for _ in range(steps)] if isinstance(batch, Iterator) else [batch] * steps
    )
    state, exponents = thaw_scales(state), {}
    for _ in range(_ROUNDS):
        seen = _measure(step, config, exponents, state, batches)
        before, chosen = exponents, _choose(step, config, exponents, seen, batches[-1])
        exponents = chosen.exponents
        if exponents == before or not (seen.is_distorted or chosen.is_guess):
            break
    values = {
        name: dataclasses.replace(
            m, **{"correction": exponents.get(name, 0), **chosen.found.get(name, {})}
        )
        for name, m in seen.values.items()
        if m.role != "value" or exponents.get(name) or _is_distorted(m, seen.results[name], _LOST)
    }
    operands = [r.name for r in seen.results.values() if r.is_operand]
    unseen = tuple(name for name in operands if name not in values)
    return Calibration(_rounded(values), _rounded(seen.state), operator.index(steps), unseen)


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
    """

    values: dict[str, Measured]
    results: Mapping[str, Result]
    state: dict[str, Measured]
    last: Any

    @property
    def is_distorted(self) -> bool:
        """Whether values are not what they would be: behind what overflows, or all but vanishes."""
        return any(
            _is_distorted(m, self.results[name], _VANISHED)
            for name, m in self.values.items()
            if self.results[name].can_be_corrected
        )


def _is_distorted(m: Measured, result: Result, vanished: float) -> bool:
    if _saturates(result) and m.scale is not None and m.scale >= _SATURATING[0]:
        return m.underflow > vanished
    return bool(m.nonfinite) or m.overflow > _LOST or m.underflow > vanished


def _saturates(result: Result) -> bool:
    return bool(result.saturates) and result.dtype == jnp.float16


def _excess(m: Measured, result: Result, scale: int) -> int:
    """The exponent by which the data of a value should be divided that was measured at `m.scale`.

    Args:
        m: what was measured.
        result: what the value is.
        scale: the exponent of the scale that its data will have.
    """
    if _saturates(result):
        low, high = _SATURATING
        return min(max(scale, low), high) - scale
    away = 0 if m.scale is None else m.scale - scale
    return excess(m.log2_rms + away, m.log2_max + away, m.dtype)


def _measure(
    step: Callable,
    config: ScalifyConfig | None,
    exponents: Mapping[str, int],
    state: Any,
    batches: list[Any],
) -> _Seen:
    """Run the steps with corrections and statistics."""
    planner = Planner(exponents)
    scaled = scalify(step, config=config, calibration=planner)
    names: list[str] = []

    def watched(static: Any, *arrays: Any) -> tuple[Any, jax.Array]:
        tree, leaves = static
        rest = iter(arrays)
        full = [next(rest) if leaf is _ARRAY else leaf for leaf in leaves]
        call = PureCall(scaled, jax.tree.unflatten(tree, full), {})
        out, places, seen = _watch(call, planner)
        names[:] = [place.name for place in places]
        rows = [seen[place.position, place.result] for place in places]
        return out, jnp.stack(rows) if rows else jnp.zeros((0, 0))

    options = _QUICKLY if jax.default_backend() == "cpu" else None
    program = jax.jit(watched, static_argnums=0, compiler_options=options)
    found: dict[str, list[Any]] = {}
    of_state: dict[str, Measured] = {}
    for batch in batches:
        leaves, tree = jax.tree.flatten((state, batch))
        static = tree, tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
        out, rows = program(static, *(leaf for leaf in leaves if is_array(leaf)))
        state = _next_state(out, state)
        # Gradients that are accumulated are zero after the step that they are for.
        of_state |= {
            name: m
            for name, m in measure_state(state).items()
            if math.isfinite(m.log2_max) or name not in of_state
        }
        for name, row in zip(names, np.asarray(rows), strict=True):
            found.setdefault(name, []).append(row)
    assert planner.equations is not None
    results = planner.equations.results
    rows = jnp.asarray([combine(jnp.asarray(np.stack(each))) for each in found.values()])
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
    return _Seen(values, results, leaves, state)


_ARRAY = object()  # stands for an array among static leaves


def _watch(call: PureCall, planner: Planner) -> tuple[Any, list[Place], dict[Any, jax.Array]]:
    """The results of a step, inside of a trace, and statistics of the values that count."""
    structure: Any = None

    def update(*args: Any) -> Any:
        nonlocal structure
        out = call.fun(*args)
        structure = jax.tree.structure(out)
        return out

    closed, arrays, arguments = trace(PureCall(update, call.args, {}))
    assert planner.equations is not None
    known = planner.equations.results
    places = [p for p in find_places(closed, arguments) if _counts(known.get(p.name))]
    results, seen = StatisticsWatcher(places, None).run(closed, arrays)
    return jax.tree.unflatten(structure, results), places, seen


def _counts(result: Result | None) -> bool:
    """Whether a value is measured: what may leave its range, and what matmuls and updates take."""
    if result is None:
        return False
    return result.can_be_corrected or result.is_operand or result.is_gradient


def _next_state(out: Any, state: Any) -> Any:
    """The new state among the results of a step."""
    structure = jax.tree.structure(state, is_leaf=is_scaled)
    first = out[0] if isinstance(out, tuple) and out else None
    for candidate in (out, first):
        if jax.tree.structure(candidate, is_leaf=is_scaled) == structure:
            return thaw_scales(candidate)
    raise ValueError(
        "`step` must return the new state, or a tuple that begins with it: its results have the "
        f"structure {jax.tree.structure(out, is_leaf=is_scaled)}, the state {structure}."
    )


def _choose(
    step: Callable,
    config: ScalifyConfig | None,
    exponents: Mapping[str, int],
    seen: _Seen,
    batch: Any,
) -> _Choice:
    """Choose corrections for static scales: interpret the step, and compile nothing."""
    choice = _Choice(seen.values, exponents)
    planner = Planner({}, choice.of)
    frozen = Calibration({}, seen.state).freeze(seen.last)
    scaled = scalify(step, config=config, calibration=planner)
    trace(PureCall(scaled, (frozen, batch), {}), observe=False)
    return choice


class _Choice:
    """Chooses the exponents of corrections while a step is interpreted.

    Attributes:
        exponents: those that are not 0, by name.
        found: by name, scale, correction and RMS of data where the scale is static.
        is_guess: whether there are corrections in loops, of which only a run tells what they do.
    """

    def __init__(self, seen: Mapping[str, Measured], before: Mapping[str, int]):
        self._seen, self._before = seen, before
        self._results: Mapping[str, Result] = {}
        self._in_loops: dict[str, int] = {}
        self._moved: set[str] = set()
        self.is_guess = False
        self.exponents: dict[str, int] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def of(self, equations: Equations) -> Callable[[str, Operand], int]:
        """Take in the equations, and return the chooser."""
        self._results = equations.results
        return self._choose

    def _choose(self, name: str, value: Operand) -> int:
        result, m = self._results.get(name), self._seen.get(name)
        if result is None or not result.can_be_corrected:
            return 0
        exponent = self._before.get(name, 0)
        if m is not None and m.scale is not None and math.isfinite(m.log2_rms):
            if value.scale.is_static:
                exponent = _excess(m, result, int(value.scale.exponent))
                scale = int(value.scale.exponent) + exponent
                away = m.scale - scale  # from the data to be expected
                data = {"log2_rms": m.log2_rms + away, "log2_max": m.log2_max + away}
                self.found[name] = {"scale": scale, "correction": exponent, **data}
                if exponent != m.correction:  # by which nothing is lost at the top any more
                    self.found[name]["overflow"] = 0.0
            else:
                self.found.pop(name, None)
                exponent = self._in_loop(name, m, result)
        self.exponents.pop(name, None)
        if exponent:
            self.exponents[name] = exponent
            self.found.setdefault(name, {"correction": exponent})
        return exponent

    def _in_loop(self, name: str, m: Measured, result: Result) -> int:
        """The exponent of a value whose scale is not known: of the first in a row that is out.

        In a loop, what comes from step to step gets the correction in each step.
        """
        if name not in self._in_loops:
            exponent = m.correction
            away = _excess(m, result, m.scale or 0) / result.runs
            # What saturates was larger than what was seen.
            away = math.ceil(away) if max(m.overflow, m.nonfinite) > _LOST else round(away)
            if away:
                exponent += away if self._moved.isdisjoint(result.sources) else 0
                self._moved.add(name)
                self.is_guess = True
            self._in_loops[name] = exponent
        return self._in_loops[name]
