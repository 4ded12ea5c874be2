"""What a compiled program costs, counted in its text: kernels, bytes, collectives.

A *launch* is an instruction that the device runs by itself: a fusion, a library call, a copy, a
collective. Loops count as often as they run. The bytes of a launch are those of its operands and
results; of an operand that it only slices, the slice; of an array that it updates in place, the
update. Caches are not modelled, so that a program is compared with another one, not with a clock.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax_scalify.numerics.hlo import Instruction, parse_instructions
from jax_scalify.numerics.hlo_loops import Counter

TINY = 4096  # bytes: a kernel that moves no more is all launch

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_NO_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "opt-barrier add-dependency partition-id replica-id async-start async-update call-start "
    "domain".split()
)
_NO_KERNEL_TARGETS = ("AllocateBuffer", "Sharding", "xla.sdy", "AssumeGatherIndicesInBound")
_VIEWS = ("bitcast", "get-tuple-element", "reshape")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launch of a program.

    Attributes:
        name: what XLA called it.
        op_name: what JAX called the equation that it was made of, or "".
        opcode: "fusion", "custom-call", "all-reduce", ...
        runs: how often one execution of the program runs it.
        bytes: that one run reads and writes.
    """

    name: str
    op_name: str
    opcode: str
    runs: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of a kind and a dtype.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", ...
        dtype: in HLO's spelling, "f16".
        count: how many one execution runs; one of several dtypes counts for its largest.
        bytes: of the larger side, the operands or the results, on one device, of all of them.
    """

    kind: str
    dtype: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """What an execution of a program costs one device.

    Attributes:
        kernels: the launches, each once.
        collectives: by kind and dtype, the largest first.
        endless: number of loops of which the text does not say how often they run: counted once.
    """

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    endless: int

    @property
    def launches(self) -> int:
        """How many kernels an execution runs."""
        return sum(k.runs for k in self.kernels)

    @property
    def tiny(self) -> int:
        """How many of them move at most 4 KiB."""
        return sum(k.runs for k in self.kernels if k.bytes <= TINY)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(k.runs * k.bytes for k in self.kernels)


def count_costs(text: str) -> Costs:
    """Count what a program in HLO text costs, as `jax.stages.Compiled.as_text()` gives it.

    Example:
        >>> compiled = jax.jit(lambda x: jnp.sum(x * 2)).lower(jnp.ones((8, 128))).compile()
        >>> count_costs(compiled.as_text()).bytes_moved >= 8 * 128 * 4
        True
    """
    program = Program(text)
    kernels: dict[tuple[str, str], Kernel] = {}
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    sizes: collections.Counter[tuple[str, str]] = collections.Counter()
    endless = 0
    for instruction, runs in program.executed(program.entry):
        if instruction.opcode == "while":
            endless += program.trip_count(instruction) is None
            continue
        if not _is_launch(instruction):
            continue
        for sent in program.collectives(instruction):
            kind, by_dtype = _kind(sent), program.collective_bytes(sent)
            found[kind, max(by_dtype, key=by_dtype.__getitem__, default="?")] += runs
            for dtype, size in by_dtype.items():
                sizes[kind, dtype] += runs * size
        key = instruction.computation, instruction.name
        before = kernels[key].runs if key in kernels else 0
        moved = program.bytes_of(instruction)
        kernels[key] = Kernel(
            instruction.name, instruction.op_name, _kind(instruction), before + runs, moved
        )
    collected = [Collective(*key, found[key], size) for key, size in sizes.most_common()]
    return Costs(tuple(kernels.values()), tuple(collected), endless)


def sizes_by_dtype(hlo_type: str) -> dict[str, int]:
    """Bytes of a type in HLO's text, by dtype; arrays in an on-chip memory count nothing.

    Example:
        >>> sizes_by_dtype("(f16[4,8]{1,0}, f32[], pred[3]{0})")
        {'f16': 64, 'f32': 4, 'pred': 3}
    """
    sizes: dict[str, int] = {}
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?", hlo_type):
        bits = _bits(dtype)
        if bits is None or re.search(r"S\([1-9]", layout):
            continue
        count = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
        sizes[dtype] = sizes.get(dtype, 0) + -(-count * bits // 8)
    return sizes


def _bits(dtype: str) -> int | None:
    """Width of a dtype in HLO's spelling; None of what holds no elements."""
    if dtype == "pred":
        return 8
    found = re.match(r"(?:bf|[fsuc])(\d+)", dtype)
    return int(found[1]) if found else None


def _size(hlo_type: str) -> int:
    return sum(sizes_by_dtype(hlo_type).values())


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _is_launch(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in _NO_KERNEL or opcode.endswith("-done"):
        return False
    return not any(f'custom_call_target="{t}' in instruction.attributes for t in _NO_KERNEL_TARGETS)


class Program:
    """The instructions of a program, by computation."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        for instruction in parse_instructions(text):
            self.computations.setdefault(instruction.computation, []).append(instruction)
        entry = re.search(r"^ENTRY %?([\w.\-]+) ", text, re.MULTILINE)
        self.entry = entry[1] if entry else ""
        self.by_name = {
            (i.computation, i.name): i for body in self.computations.values() for i in body
        }

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a loop runs; None if the text does not say.

        XLA's compiler for GPUs notes it, that for TPUs leaves a comparison of a counter.
        """
        found = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes)
        return int(found[1]) if found else Counter(self, loop).trip_count()

    def executed(self, computation: str, runs: int = 1) -> Iterator[tuple[Instruction, int]]:
        """The instructions that are executed, loops and branches included, and how often."""
        for instruction in self.computations.get(computation, ()):
            yield instruction, runs
            if instruction.opcode == "while":
                inner = runs * (1 if (n := self.trip_count(instruction)) is None else n)
            elif instruction.opcode in ("call", "call-start", "conditional", "async-start"):
                inner = runs
            else:
                continue
            for name in _bodies(instruction):
                yield from self.executed(name, inner)

    def collectives(self, instruction: Instruction) -> Iterator[Instruction]:
        """A launch that is a collective, or those that a compiler has fused into it."""
        if _kind(instruction) in _COLLECTIVES:
            yield instruction
        elif instruction.opcode == "fusion":
            for name in instruction.called:
                for inner in self.computations.get(name, ()):
                    yield from self.collectives(inner)

    def bytes_of(self, instruction: Instruction) -> int:
        """Bytes that a launch reads and writes."""
        if instruction.opcode == "fusion" and instruction.called:
            return self._fusion_bytes(instruction, self.computations[instruction.called[0]])
        return self._moved(instruction, self._operand_sizes(instruction))

    def collective_bytes(self, instruction: Instruction) -> Mapping[str, int]:
        """Bytes of the larger side of a collective, by dtype."""
        given: collections.Counter[str] = collections.Counter()
        for operand in instruction.operands:
            given.update(sizes_by_dtype(self._type(instruction, operand)))
        result = collections.Counter(sizes_by_dtype(instruction.type))
        if instruction.opcode.endswith("-start") and result.total() > given.total():
            result -= given  # the type of a start holds its operands as well
        return given if given.total() > result.total() else result

    def _type(self, instruction: Instruction, operand: str) -> str:
        found = self.by_name.get((instruction.computation, operand))
        return found.type if found else ""

    def _operand_sizes(self, instruction: Instruction) -> list[int]:
        return [_size(self._type(instruction, operand)) for operand in instruction.operands]

    def _moved(self, instruction: Instruction, operands: list[int]) -> int:
        """Bytes of one instruction that is no fusion."""
        opcode, result = instruction.opcode, _size(_without_workspace(instruction))
        if opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * result + sum(operands[1:])
        if opcode == "dynamic-update-slice":
            return 2 * operands[1] + sum(operands[2:])
        if opcode.endswith("-start") and result > sum(operands):
            return result  # the type of a start holds its operands as well
        return sum(operands) + result

    def _fusion_bytes(self, instruction: Instruction, body: list[Instruction]) -> int:
        users: dict[str, list[Instruction]] = {}
        for inner in body:
            for operand in inner.operands:
                users.setdefault(operand, []).append(inner)
        sizes, read = self._operand_sizes(instruction), 0
        for inner in body:
            if inner.opcode == "parameter":
                number = int(inner.arguments.strip("()") or 0)
                whole = sizes[number] if number < len(sizes) else _size(inner.type)
                sliced = self._sliced(inner.name, users)
                read += whole if sliced is None else min(whole, sliced)
        roots = [i for i in body if i.is_root]
        return read + sum(self._written(root, body, instruction) for root in roots)

    def _sliced(self, name: str, users: Mapping[str, list[Instruction]]) -> int | None:
        """Bytes that are read of an array of which slices are taken; None if all of it is."""
        total = 0
        for user in users.get(name, ()):
            if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                total += _size(user.type)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # in place
            elif user.opcode in _VIEWS and (inner := self._sliced(user.name, users)) is not None:
                total += inner
            else:
                return None
        return total

    def _written(self, root: Instruction, body: list[Instruction], fusion: Instruction) -> int:
        """Bytes that a fusion writes: of an array that is updated in place, the update."""
        by_name = {i.name: i for i in body}
        if root.opcode == "tuple":
            return sum(self._written(by_name[o], body, fusion) for o in root.operands)
        source = root
        while source.opcode in _VIEWS and source.operands:
            source = by_name[source.operands[0]]
        if source.opcode == "dynamic-update-slice":
            return _size(self._type(source, source.operands[1]))
        return _size(root.type)


def _bodies(instruction: Instruction) -> list[str]:
    """The computations that a loop, branch or call executes."""
    pattern = r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%([\w.\-]+)"
    names = re.findall(pattern, instruction.attributes)
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    return names + (re.findall(r"%([\w.\-]+)", branches[1]) if branches else [])


def _without_workspace(instruction: Instruction) -> Any:
    """The type of a result, without the scratch memory that a library call asks for."""
    if instruction.opcode == "custom-call":
        return re.sub(r",\s*[us]8\[\d*\]\{0\}\)$", ")", instruction.type)
    return instruction.type
