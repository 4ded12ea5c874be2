"""Find the matmuls in the text of a compiled program."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

MATMULS = (
    *("dot_general", "narrow_dot_general", "ragged_dot_general", "conv_general_dilated"),
    "block_dot_general",
)
_FP8_LIBRARIES = ("cuBLASLt", "cuDNN", "Triton")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A product of `batch` pairs of matrices, `(m, k)` and `(k, n)`."""

    batch: int
    m: int
    k: int
    n: int


@dataclasses.dataclass(frozen=True)
class CompiledMatmul:
    """A matmul of a compiled program.

    Attributes:
        op_name: what JAX called it, or "".
        library: "cuBLASLt", "cuBLAS", "cuDNN", "Triton", "oneDNN", or "XLA" for code of the
            compiler's own; another kind of fusion or custom call by its own name.
        lhs, rhs: dtypes of the operands, in HLO's spelling: "f8e4m3fn", "f16".
        sizes: None where the text does not tell.
    """

    op_name: str
    library: str
    lhs: str
    rhs: str
    sizes: Sizes | None

    @property
    def kernel(self) -> str:
        """Library and operands in one line."""
        return f"{self.library} {self.lhs} x {self.rhs}"

    @property
    def is_fp8(self) -> bool | None:
        """Whether it multiplies numbers of 8 or 4 bits; None if by who knows what library."""
        if not all(x.startswith(("f8", "f4")) for x in (self.lhs, self.rhs)):
            return False
        return True if self.library in _FP8_LIBRARIES else None


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled program says about matmuls.

    Attributes:
        matmuls: the ones that it has.
        others: opcodes of what else came from a matmul, by `op_name`: a product with a vector may
            become "multiply" and "reduce".
    """

    matmuls: tuple[CompiledMatmul, ...]
    others: dict[str, frozenset[str]]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a program's text.

    Attributes:
        name: without the "%".
        computation: that it stands in.
        type: of its result, with layouts.
        opcode: "fusion", "custom-call", "parameter", ...
        operands: names of instructions in the same computation.
        arguments: what stands between the parentheses, as "(0)" of a parameter.
        attributes: what stands behind them.
        is_root: whether it is the result of its computation.
    """

    name: str
    computation: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """What JAX called it, or ""."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        """The computations that it is a call of."""
        return re.findall(r"\bcalls=%([\w.\-]+)", self.attributes)


def is_fp8(dtype: str) -> bool:
    """Return whether a dtype in HLO's spelling is one of 8-bit floating point.

    Example:
        >>> is_fp8("f8e5m2"), is_fp8("f16")
        (True, False)
    """
    return dtype.startswith("f8")


def parse_program(text: str) -> Program:
    """Find every matmul of a program in HLO text, as `jax.stages.Compiled.as_text()` gives it.

    Example:
        >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile()
        >>> [(m.lhs, m.sizes) for m in parse_program(compiled.as_text()).matmuls]
        [('f32', Sizes(batch=1, m=8, k=16, n=4))]
    """
    instructions = list(parse_instructions(text))
    types = {(i.computation, i.name): i.type for i in instructions}
    callers = {name: i for i in instructions for name in i.called}
    users: dict[tuple[str, str], list[Instruction]] = {}
    for instruction in instructions:
        for operand in instruction.operands:
            users.setdefault((instruction.computation, operand), []).append(instruction)
    matmuls = []
    others: dict[str, frozenset[str]] = {}
    for instruction in instructions:
        library = _library(instruction, callers)
        if library is not None and len(instruction.operands) > 1:
            operands = [types.get((instruction.computation, o), "") for o in instruction.operands]
            lhs, rhs = (o.partition("[")[0] or "?" for o in operands[:2])
            name = instruction.op_name or _name_of_users(instruction, users)
            matmuls.append(CompiledMatmul(name, library, lhs, rhs, _sizes(instruction, operands)))
        elif _is_matmul_name(instruction.op_name):
            found = others.get(instruction.op_name, frozenset())
            others[instruction.op_name] = found | {instruction.opcode}
    return Program(tuple(matmuls), others)


def product_sizes(
    lhs: Sequence[int], rhs: Sequence[int], dimension_numbers: Any, rhs_groups: Sequence[int] = ()
) -> Sizes:
    """Return the sizes of a `dot_general` of two shapes.

    Example:
        >>> product_sizes((2, 8, 4), (4, 6), (((2,), (0,)), ((), ())))
        Sizes(batch=1, m=16, k=4, n=6)
    """
    contract, batch = dimension_numbers

    def free(shape: Sequence[int], *taken: Sequence[int]) -> int:
        return math.prod(s for a, s in enumerate(shape) if not any(a in t for t in taken))

    return Sizes(
        batch=math.prod(lhs[a] for a in batch[0]),
        m=free(lhs, contract[0], batch[0]),
        k=math.prod(lhs[a] for a in contract[0]),
        n=free(rhs, contract[1], batch[1], rhs_groups),
    )


def _is_matmul_name(op_name: str) -> bool:
    return op_name.rpartition("/")[2] in MATMULS


def parse_instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a program in HLO text, in order."""
    computation = ""
    for line in text.splitlines():
        if line.endswith("{") and "->" in line:
            found = re.match(r"(?:ENTRY )?%?([\w.\-]+) ", line)
            computation = found[1] if found else ""
            continue
        found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
        if found is None:
            continue
        rest = line[found.end() :]
        # A tuple's type has spaces and parentheses of its own.
        end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
        call = re.match(r"\s*([\w\-]+)(?=\()", rest[end:])
        if end < 0 or call is None:
            continue
        start = end + call.end()
        stop = _closing(rest, start)
        operands = tuple(re.findall(r"%([\w.\-]+)", rest[start:stop]))
        is_root = line.lstrip().startswith("ROOT ")
        arguments, attributes = rest[start:stop], rest[stop:]
        yield Instruction(
            found[1], computation, rest[:end], call[1], operands, arguments, attributes, is_root
        )


def _closing(text: str, start: int) -> int:
    """Return the position behind the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.end()
    return len(text)


def _name_of_users(
    instruction: Instruction, users: dict[tuple[str, str], list[Instruction]], steps: int = 3
) -> str:
    """Look for the name on what slices, reshapes or transposes the result."""
    for user in users.get((instruction.computation, instruction.name), ()) if steps else ():
        if _is_matmul_name(user.op_name):
            return user.op_name
        if not user.op_name:
            name = _name_of_users(user, users, steps - 1)
            if name:
                return name
    return ""


def _library(instruction: Instruction, callers: dict[str, Instruction]) -> str | None:
    """Name what computes a matmul; None for any other instruction."""
    if instruction.opcode == "custom-call":
        found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        target = found[1] if found else ""
        for prefix, library in (
            ("__cublas$lt$", "cuBLASLt"),
            ("__cublas$", "cuBLAS"),
            ("__cudnn$conv", "cuDNN"),
            ("__cudnn$blockScaledDot", "cuDNN"),
            ("__onednn$matmul", "oneDNN"),
        ):
            if target.startswith(prefix):
                return library
        return target if _is_matmul_name(instruction.op_name) else None
    if instruction.opcode not in ("dot", "convolution", "ragged-dot", "scaled-dot"):
        return None
    # A fusion says who compiles it, and what it holds may be called through others.
    seen = set()
    computation = instruction.computation
    while computation in callers and computation not in seen:
        seen.add(computation)
        caller = callers[computation]
        found = re.search(r'"kind":"([^"]+)"', caller.attributes)
        if caller.opcode == "fusion" and found:
            kind = found[1].strip("_")
            known = {"triton": "Triton", "cudnn": "cuDNN", "onednn": "oneDNN"}
            return next((name for start, name in known.items() if kind.startswith(start)), kind)
        computation = caller.computation
    return "XLA"


def _sizes(instruction: Instruction, operands: list[str]) -> Sizes | None:
    lhs, rhs = (re.match(r"\w+\[([\d,]*)\]", operand) for operand in operands[:2])
    if instruction.opcode == "dot":
        dims = _dot_dimensions(instruction.attributes)
    else:
        dims = _backend_dimensions(instruction.attributes)
    if lhs is None or rhs is None or dims is None:
        return None
    return product_sizes(_integers(lhs[1]), _integers(rhs[1]), dims)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _dot_dimensions(attributes: str) -> tuple[Any, Any]:
    def dims(name: str) -> list[int]:
        found = re.search(name + r"=\{([\d,]*)\}", attributes)
        return _integers(found[1]) if found else []

    contract = dims("lhs_contracting_dims"), dims("rhs_contracting_dims")
    return contract, (dims("lhs_batch_dims"), dims("rhs_batch_dims"))


def _backend_dimensions(attributes: str) -> tuple[Any, Any] | None:
    _, _, text = attributes.partition("backend_config=")
    try:
        config = json.JSONDecoder().raw_decode(text)[0]
        config = json.loads(config) if isinstance(config, str) else config
        config = config.get("gemm_backend_config", config)["dot_dimension_numbers"]
    except (ValueError, KeyError, AttributeError, TypeError):
        return None

    def dims(name: str) -> list[int]:
        return [int(d) for d in config.get(name, [])]

    contract = dims("lhs_contracting_dimensions"), dims("rhs_contracting_dimensions")
    return contract, (dims("lhs_batch_dimensions"), dims("rhs_batch_dimensions"))
