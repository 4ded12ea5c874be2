"""Makes a failing program as small as it can be while it fails in the same way."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np

from tests.fuzz.programs import Discarded, Input, Program, Statement, check_avals
from tests.fuzz.running import Failure, check


def shrink(
    program: Program,
    failure: Failure,
    check: Callable[[Program], Failure | None] = check,
    attempts: int = 150,
) -> tuple[Program, Failure]:
    """Return the smallest program found that fails in the same way, and its failure.

    A step is kept if the program still fails alike: an exception with an exception of the same
    type, a wrong value with a wrong value. After each the search starts again, until no step of
    `_smaller` is left or `attempts` programs were run.
    """
    left = attempts
    again = True
    while again and left:
        again = False
        for smaller in _smaller(program):
            if not left:
                break
            left -= 1
            try:
                found = check(smaller)
            except Discarded:
                continue
            if found is not None and _cause(found) == _cause(failure):
                program, failure, again = smaller, found, True
                break
    return program, failure


def _cause(failure: Failure) -> tuple[str, str]:
    return failure.kind, failure.detail.split(":")[0] if failure.kind == "raises" else ""


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that are one step simpler, the largest steps first."""
    if program.wrapper != "plain":
        yield _tidy(dataclasses.replace(program, wrapper="plain", inputs=_unstacked(program)))
    if program.wrapper in ("remat", "jvp"):
        yield dataclasses.replace(program, wrapper="grad")
    if len(program.outputs) > 1:
        for output in program.outputs:
            yield _tidy(dataclasses.replace(program, outputs=(output,)))
    for k in reversed(range(len(program.statements) - 1)):
        yield _tidy(dataclasses.replace(program, outputs=(program.statements[k].target,)))
    for k in range(len(program.statements)):
        yield from _without(program, k)
    if program.jitted:
        yield dataclasses.replace(program, jitted=False)
    for k, i in enumerate(program.inputs):
        for simpler in _simpler(i):
            inputs = (*program.inputs[:k], simpler, *program.inputs[k + 1 :])
            yield dataclasses.replace(program, inputs=inputs)


def _tidy(program: Program) -> Program:
    """Leave out what no output needs."""
    needed = set(re.findall(r"[rxnm]\d+", " ".join(program.outputs)))
    statements: list[Statement] = []
    for s in reversed(program.statements):
        if s.target in needed:
            statements.insert(0, s)
            needed |= s.uses()
    inputs = [i for i in program.inputs if i.name in needed]
    if not any(i.is_float for i in inputs) or program.wrapper in ("scan", "while", "cond"):
        first = program.inputs[0]
        inputs = [first] + [i for i in inputs if i is not first]
    return dataclasses.replace(program, inputs=tuple(inputs), statements=tuple(statements))


def _without(program: Program, number: int) -> Iterator[Program]:
    """Without one statement: its result becomes a variable or a new input of the same shape."""
    removed = program.statements[number]
    avals = check_avals(program)
    for name in sorted(n for n in avals if n.split("[")[0] == removed.target):
        aval = avals[name]
        if name not in _text(program):
            continue
        same = [
            n
            for n, a in avals.items()
            if (a.shape, a.dtype) == (aval.shape, aval.dtype) and n.split("[")[0] in removed.uses()
        ]
        new = _input_like(f"x{90 + number}", aval) if not same else None
        if new is None and not same:
            continue
        other = same[0] if same else new.name  # pyright: ignore
        pattern = re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w\[])")
        statements = tuple(
            dataclasses.replace(s, source=pattern.sub(other, s.source))
            for s in program.statements
            if s is not removed
        )
        outputs = tuple(o for o in program.outputs if o.split("[")[0] != removed.target)
        inputs = program.inputs if new is None else (new, *program.inputs)
        if outputs and statements and not any(removed.target in s.uses() for s in statements):
            yield _tidy(Program(inputs, statements, outputs, program.wrapper, program.jitted))


def _text(program: Program) -> str:
    return " ".join(s.source for s in program.statements)


def _input_like(name: str, aval) -> Input | None:
    """A scaled input of the shape and dtype of a result."""
    dtype = str(aval.dtype)
    size = int(np.prod(aval.shape))
    if dtype in ("float32", "float16", "bfloat16"):
        data = (np.arange(size, dtype=np.float64).reshape(aval.shape) - 1) / 2
        return Input(name, data, dtype, np.asarray(1.0))
    return None


def _unstacked(program: Program) -> tuple[Input, ...]:
    return tuple(_first(i) if i.stacked else i for i in program.inputs)


def _first(i: Input) -> Input:
    scale = i.scale
    if isinstance(scale, np.ndarray) and scale.ndim:
        scale = scale[0]
    return dataclasses.replace(i, data=i.data[0], scale=scale, stacked=False)


def _simpler(i: Input) -> Iterator[Input]:
    """The input with a simpler scale, dtype, or numbers."""
    if not i.is_float:
        if np.any(i.data):
            yield dataclasses.replace(i, data=np.zeros_like(i.data))
        return
    one = np.ones((2,) if i.stacked else ())
    if i.scale is not None:
        yield dataclasses.replace(i, scale=None, shift=0)
        if not (isinstance(i.scale, np.ndarray) and np.array_equal(i.scale, one)):
            yield dataclasses.replace(i, scale=one, shift=0)
    if i.dtype != "float32":
        yield dataclasses.replace(i, dtype="float32")
    whole = np.sign(i.data) * np.ceil(np.abs(i.data))
    if not np.array_equal(whole, i.data):
        yield dataclasses.replace(i, data=whole)
    if i.data.ndim and i.data.size and not np.array_equal(whole, np.ones_like(whole)):
        yield dataclasses.replace(i, data=np.ones_like(whole))
