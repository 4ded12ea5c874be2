"""How often a loop of a compiled program runs, where its text leaves that to a counter."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from jax_scalify.numerics.hlo import Instruction

_SAME = ("copy", "bitcast", "convert", "copy-done", "reshape")
_DIRECTIONS = ("LT", "LE", "GT", "GE", "NE")


class Instructions(Protocol):
    """A program's instructions, by computation, and by computation and name."""

    @property
    def computations(self) -> Mapping[str, Sequence[Instruction]]: ...

    @property
    def by_name(self) -> Mapping[tuple[str, str], Instruction]: ...


@dataclasses.dataclass(frozen=True)
class _Element:
    """An element of the tuple that a loop carries."""

    index: int


class Counter:
    """The counter of a `while` loop: what it begins with, is compared with, and grows by.

    For example, of a loop that runs 12 times, if element 0 begins as 0::

        condition:  compare(get-tuple-element(p, index=0), constant(12)), direction=LT
        body:       tuple(add(get-tuple-element(p, index=0), constant(1)), ...)
    """

    def __init__(self, program: Instructions, loop: Instruction):
        self._program, self._loop = program, loop
        self._condition, self._body = (
            found[1] if (found := re.search(rf"\b{name}=%?([\w.\-]+)", loop.attributes)) else ""
            for name in ("condition", "body")
        )

    def trip_count(self) -> int | None:
        """How often the loop runs; None if no counter tells."""
        test = self._root(self._condition)
        if test is None or test.opcode != "compare":
            return None
        direction = re.search(r"direction=(\w+)", test.attributes)
        counter, limit = (self._value(self._condition, operand) for operand in test.operands)
        if direction is None or direction[1] not in _DIRECTIONS:
            return None
        if not isinstance(counter, _Element) or not isinstance(limit, int):
            return None
        first, step = self._initial(counter.index), self._step(counter.index)
        if first is None or not step:
            return None
        distance = (limit - first) * (1 if step > 0 else -1) + (direction[1] in ("LE", "GE"))
        return max(0, -(-distance // abs(step)))

    def _root(self, computation: str) -> Instruction | None:
        body = self._program.computations.get(computation, ())
        return next((i for i in body if i.is_root), None)

    def _source(self, computation: str, name: str) -> Instruction | None:
        """An instruction, or what it is a copy of."""
        found = self._program.by_name.get((computation, name))
        while found is not None and found.opcode in _SAME and found.operands:
            found = self._program.by_name.get((computation, found.operands[0]))
        return found

    def _value(self, computation: str, name: str) -> int | _Element | None:
        """A number, an element of the loop's tuple that is not always the same one, or None."""
        found = self._source(computation, name)
        if found is None or found.opcode != "get-tuple-element":
            return _number(found)
        source = self._source(computation, found.operands[0])
        if source is None or source.opcode != "parameter":
            return None
        index = _index(found)
        after = self._after(index)
        if after is not None and after.opcode == "get-tuple-element" and _index(after) == index:
            return self._initial(index)
        return _Element(index)

    def _initial(self, index: int) -> int | None:
        """The number that an element begins as."""
        start = self._source(self._loop.computation, self._loop.operands[0])
        if start is None or start.opcode != "tuple":
            return None
        return _number(self._source(self._loop.computation, start.operands[index]))

    def _after(self, index: int) -> Instruction | None:
        """What the body makes of an element."""
        root = self._root(self._body)
        if root is None or root.opcode != "tuple":
            return None
        return self._source(self._body, root.operands[index])

    def _step(self, index: int) -> int | None:
        """By how much an element grows each time."""
        after = self._after(index)
        if after is None or after.opcode not in ("add", "subtract"):
            return None
        one, other = (self._value(self._body, operand) for operand in after.operands)
        if isinstance(one, int) and after.opcode == "add":
            one, other = other, one
        if one != _Element(index) or not isinstance(other, int):
            return None
        return other if after.opcode == "add" else -other


def _number(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    text = instruction.arguments.strip("()")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _index(instruction: Instruction) -> int:
    found = re.search(r"\bindex=(\d+)", instruction.attributes)
    return int(found[1]) if found else -1
