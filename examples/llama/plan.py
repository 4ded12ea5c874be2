"""What a step asks of each device, compiled ahead of time: no array is made, no device is there."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from rich import box
from rich.table import Table

import jax_scalify as jsa
from examples.llama.step import Training

# Bytes of a device's memory, as the makers say: a TPU7x chip is two devices.
MEMORY = {
    "a100": 80e9,
    "h100": 80e9,
    "h200": 141e9,
    "b200": 180e9,
    "v5e": 16e9,
    "v5p": 95e9,
    "v6e": 32e9,
    "tpu7x": 96e9,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a device needs for a training step, in bytes.

    Attributes:
        target: that it was compiled for.
        devices: how many.
        parameters: of the model.
        state: weights and the optimizer's state, a device.
        temporary: activations, gradients and all else that lives within a step.
        available: the device's memory; None if it is not known.
        collectives: bytes by kind and dtype.
        fp8: matmuls in FP8, and all of them.
        seconds: that the compiler took here.
    """

    target: str | None
    devices: int
    parameters: int
    state: int
    temporary: int
    available: float | None
    collectives: dict[str, int]
    fp8: tuple[int, int]
    seconds: float

    @property
    def peak(self) -> int:
        """The most that is in use at once."""
        return self.state + self.temporary

    @property
    def fits(self) -> bool | None:
        """Whether that is less than there is."""
        return None if self.available is None else self.peak < self.available


def make_plan(training: Training, batch: int, target: str | None) -> Plan:
    """Compile a step for a target, or for the devices at hand.

    Raises:
        ValueError: for a target that is not known, or has too few devices.
        ModuleNotFoundError: if the target's compiler is not installed.
    """
    state, layout, sizes = training.abstract_state(), training.layout, training.sizes
    shape = batch, sizes.context + 1
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.batch_sharding())
    report = jsa.numerics.compile_report(training.make_update(state), state, tokens, target=target)
    memory = report.memory
    if memory is None:
        raise ValueError(f"`target`: no plan of memory from the compiler for {target!r}.")
    rows = report.matmuls.rows
    return Plan(
        target=target,
        devices=report.devices,
        parameters=sizes.parameters,
        state=memory.arguments,
        temporary=memory.temporary + memory.results - memory.in_place,
        available=MEMORY.get((target or "").partition(":")[0].lower()),
        collectives={f"{c.kind} {c.dtype}": c.bytes for c in report.collectives},
        fp8=(sum(row.is_fp8 is True for row in rows), len(rows)),
        seconds=report.seconds,
    )


def plan_table(title: str, plans: dict[str, Plan]) -> Table:
    """One row a recipe."""
    table = Table(title=title, box=box.SIMPLE)
    header = ("recipe", "state", "activations", "peak", "fits", "FP8 matmuls", "compile")
    for i, name in enumerate((*header, "collectives")):
        table.add_column(name, justify="right" if 0 < i < len(header) else "left")
    for recipe, plan in plans.items():
        fits = {True: "yes", False: "no", None: "?"}[plan.fits]
        largest = sorted(plan.collectives.items(), key=lambda item: -item[1])
        table.add_row(
            recipe,
            *map(gigabytes, (plan.state, plan.temporary, plan.peak)),
            fits,
            f"{plan.fp8[0]} of {plan.fp8[1]}",
            f"{plan.seconds:.0f} s",
            ", ".join(f"{gigabytes(size)} {kind}" for kind, size in largest[:5]),
        )
    return table


def gigabytes(size: float) -> str:
    """Three digits of an amount of bytes."""
    digits = max(0, 2 - math.floor(math.log10(max(size, 1e6) / 1e9)))
    return f"{size / 1e9:.{min(digits, 3)}f} GB"
