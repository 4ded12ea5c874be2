"""What a step costs on a device that need not be there: launches, bytes, memory, collectives."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from jax_scalify.numerics.check_fp8 import fp8_report, matmuls
from jax_scalify.numerics.compiling import Memory, compile_traced, find_target, trace
from jax_scalify.numerics.fp8_report import Fp8Report
from jax_scalify.numerics.hlo_costs import TINY, Collective, Kernel, count_costs

_LARGEST = 10  # kernels that the printed report shows


@dataclasses.dataclass(frozen=True, repr=False)
class CompileReport:
    """What `compile_report` found; printed, a few lines and tables.

    All counts are exact, of one execution on one device, and the same on every machine.

    Attributes:
        target: as it was asked for; None for the devices at hand.
        platform: "cpu", "cuda", "tpu".
        devices: that the program runs on together.
        launches: kernels, library calls, copies and collectives; in a loop, as often as it runs.
        tiny: of these, those that move at most 4 KiB: what they cost is their launch.
        bytes_moved: that the launches read and write, see `Kernel`.
        memory: temporary, arguments, results, in bytes; None where the compiler does not say.
        collectives: by kind and dtype, the largest first.
        kernels: the launches, each once, in the order of the program.
        matmuls: what `check_fp8` says of this program.
        unknown_loops: `while` loops of unknown length, whose bodies count once.
        seconds: that the compiler took on this machine.
        processor_seconds: of all its threads: what else runs here changes them little.
        text: the compiled program, in HLO.
    """

    target: str | None
    platform: str
    devices: int
    launches: int
    tiny: int
    bytes_moved: int
    memory: Memory | None
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    matmuls: Fp8Report
    unknown_loops: int
    seconds: float
    processor_seconds: float
    text: str

    @property
    def summary(self) -> str:
        """Launches, bytes and memory in one line."""
        where = self.target or self.platform
        parts = [
            f"{self.launches:,} launches, {self.tiny:,} of them of at most {TINY:,} bytes",
            f"{_amount(self.bytes_moved)} moved",
        ]
        if self.memory is not None:
            memory = self.memory
            parts.append(
                f"{_amount(memory.temporary)} temporary, {_amount(memory.arguments)} of arguments, "
                f"{_amount(memory.results)} of results ({_amount(memory.in_place)} in place)"
            )
        if self.unknown_loops:
            parts.append(f"{self.unknown_loops} loops of unknown length counted once")
        one = "device" if self.devices == 1 else "devices"
        return f"{where}, {self.devices} {one}: {'; '.join(parts)}."

    def __str__(self) -> str:
        lines = [self.summary]
        if self.collectives:
            rows = [(c.kind, c.dtype, f"{c.count:,}", _amount(c.bytes)) for c in self.collectives]
            lines += ["", *_table(("collective", "dtype", "count", "bytes"), rows)]
        largest = sorted(self.kernels, key=lambda k: k.runs * k.bytes, reverse=True)[:_LARGEST]
        if largest:
            rows = [
                (_amount(k.runs * k.bytes), f"{k.runs:,}", k.opcode, k.op_name) for k in largest
            ]
            lines += ["", *_table(("bytes", "runs", "largest kernels", "of"), rows)]
        if self.matmuls.rows:
            rows = [(*key, f"{count:,}") for key, count in _kinds(self.matmuls).items()]
            header = ("matmuls", "traced", "compiled", "count")
            lines += ["", *_table(header, rows), self.matmuls.summary]
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> str:
        """Return all but the program's text as JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["text"]
        fields["memory"] = self.memory and dataclasses.asdict(self.memory)
        for name in ("collectives", "kernels"):
            fields[name] = [dataclasses.asdict(x) for x in fields[name]]
        fields["matmuls"] = json.loads(self.matmuls.to_json())
        return json.dumps({"summary": self.summary, **fields}, indent=2)


def compile_report(
    fun: Callable, *args: Any, target: str | None = None, **kwargs: Any
) -> CompileReport:
    """Compile a function for a device that need not be there, and tell what it costs.

    XLA's compilers for GPUs and TPUs run on any machine; what they make is exact, and nothing is
    executed. No time is told: compare counts of two functions, of one target. On GPUs, matmuls are
    left to cuBLAS, and nothing is tuned on the device.

    The function is traced in this process, and compiled in another one, since a compiler reads its
    settings when JAX starts. No device of this process is used for it.

    Args:
        fun: a function, jitted or scalified or both, or what its `trace` method returned. With
            `jax.jit(..., donate_argnums=...)` it is compiled as it will run.
        args: of `fun`: arrays, `ScaledArray` or `jax.ShapeDtypeStruct`, and trees of them: no
            array has to be made. A sharding over a `jax.sharding.AbstractMesh` needs no devices.
        target: "a100", "h100", "h200" or "b200"; of several, "h100:8", "h100:HOSTSxGPUS" or
            "h100:SLICESxHOSTSxGPUS"; a TPU topology, "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x1"; `None`
            for the devices at hand, or those of the arguments' shardings.
        kwargs: of `fun`.

    Returns:
        A report; `print` shows it, `to_json` is for programs.

    Raises:
        TypeError: as `check_fp8` raises it.
        ValueError: if `target` is unknown, or has too few devices.
        ModuleNotFoundError: if the compiler of the target is not installed, saying what to install.
        RuntimeError: if it fails.

    Example:
        >>> x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
        >>> report = jsa.numerics.compile_report(lambda x: jax.nn.relu(x @ x), x)
        >>> report.platform, report.memory.arguments
        ('cpu', 131072)
    """
    device = find_target(target)  # before the trace, which may take its time
    traced = trace(fun, args, kwargs, "compile_report")
    rows = matmuls(traced)
    program = compile_traced(traced, device)
    costs = count_costs(program.text)
    return CompileReport(
        target=target,
        platform=program.platform,
        devices=program.devices,
        launches=costs.launches,
        tiny=costs.tiny,
        bytes_moved=costs.bytes_moved,
        memory=program.memory,
        collectives=costs.collectives,
        kernels=costs.kernels,
        matmuls=fp8_report(rows, program),
        unknown_loops=costs.endless,
        seconds=program.seconds,
        processor_seconds=program.processor_seconds,
        text=program.text,
    )


def _kinds(report: Fp8Report) -> dict[tuple[str, str, str], int]:
    """How many matmuls there are of a pass, operands as traced, and a kernel."""
    keys = ((r.phase, f"{r.lhs} x {r.rhs} -> {r.out}", r.kernel) for r in report.rows)
    return dict(collections.Counter(keys).most_common())


def _amount(size: int) -> str:
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= power:
            return f"{size / power:.3g} {unit}"
    return f"{size} B"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in (header, *rows)]
