"""What is in a program: counts from the text of StableHLO and of compiled HLO."""

import collections
import re

_STABLEHLO = re.compile(r'^\s+%\S+ = "?(?:stablehlo\.|chlo\.)?([\w.]+)')
_TENSOR = re.compile(r"tensor<([^>]*)>")
_HLO = re.compile(r"^\s+(?:ROOT )?%?\S+ = ", re.M)
_NUMBERS = re.compile(r"f\d+\w*|bf16|ui\d+")


def count_stablehlo(text: str) -> dict[str, int]:
    """Count the lines of a lowered module that define a value, and those that define a scalar."""
    lines = [line for line in text.splitlines() if _STABLEHLO.match(line)]
    return {"stablehlo": len(lines), "scalars": sum(_result(line) is not None for line in lines)}


_NO_ARITHMETIC = ("constant", "call", "func.call", "optimization_barrier")


def scalar_arithmetic(text: str) -> collections.Counter:
    """Count the operations on floating or unsigned scalars of a lowered module, by name and dtype.

    Constants, calls and barriers are no arithmetic. This is where dynamic scales are computed: a
    scale is a floating scalar, its bits are an unsigned one.
    """
    counts: collections.Counter = collections.Counter()
    for line in text.splitlines():
        match, dtype = _STABLEHLO.match(line), _result(line)
        if not match or dtype is None or not _NUMBERS.fullmatch(dtype):
            continue
        if match.group(1) not in _NO_ARITHMETIC:
            counts[f"{match.group(1)} {dtype}"] += 1
    return counts


def count_hlo(text: str) -> dict[str, int]:
    """Count the instructions of a compiled program, fused ones included, and its fusions."""
    return {"hlo": len(_HLO.findall(text)), "fusions": text.count(" fusion(")}


def _result(line: str) -> str | None:
    """The dtype of what a line defines, if it is a scalar."""
    shapes = _TENSOR.findall(line)
    return shapes[-1] if shapes and "x" not in shapes[-1] else None
