"""The RMS of every tensor of a unit-scaled function, on arguments that are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify.base import dtypes
from jax_scalify.unit_scaling.automatic.evaluation import run
from jax_scalify.unit_scaling.automatic.measuring import call_now
from jax_scalify.unit_scaling.automatic.planning import Plan
from jax_scalify.unit_scaling.automatic.program import Value

KINDS = ("activation", "gradient", "argument's gradient")
_FEW = 16  # elements, of which an RMS tells little


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor and its size.

    Attributes:
        kind: "activation", "gradient" (of an activation) or "argument's gradient".
        name: the operation that makes it, or the path of the argument.
        scope: modules and transforms around it.
        line: of the user's code, `file:line (function)`.
        shape: its own.
        rms: the root of the mean square.
    """

    kind: str
    name: str
    scope: str
    line: str
    shape: tuple[int, ...]
    rms: float


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The tensors of a function, in order, those of a kind together; its `str` is a table."""

    tensors: tuple[Tensor, ...]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def of(self, kind: str) -> Measurement:
        """Return the tensors of a kind.

        Raises:
            ValueError: if there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {kind!r}.")
        return Measurement(tuple(t for t in self.tensors if t.kind == kind))

    def outside(self, low: float = 0.5, high: float = 2.0) -> Measurement:
        """Return the tensors whose RMS is not within these bounds."""
        return Measurement(tuple(t for t in self.tensors if not low <= t.rms <= high))

    def share_within(self, low: float = 0.5, high: float = 2.0) -> float:
        """Return the share of tensors whose RMS is within these bounds, 1 of none."""
        return 1 - len(self.outside(low, high)) / max(len(self), 1)

    def __str__(self) -> str:
        table = [("kind", "rms", "shape", "name", "scope", "line")]
        table += [
            (t.kind, f"{t.rms:.3g}", str(list(t.shape)), t.name, t.scope, t.line.rpartition("/")[2])
            for t in self.tensors
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in table)
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """RMS values of the results of a program's operations, of their gradients, of arguments'."""

    forward: dict[Value, float]
    backward: dict[Value, float]
    arguments: dict[Value, float]


def measure_sizes(plan: Plan, operands: Sequence[Any]) -> Sizes:
    """Run a program once in both passes; gradients are those of its loss.

    Without a loss they are of all results, for unit Gaussians as their gradients. A loop's tensor
    has the RMS over all steps.
    """
    inputs = [i for i, v in enumerate(plan.scope.inputs) if v.is_inexact]
    order: list[Value] = []

    def forward(shifts: Any, inexact: Any, operands: Any) -> Any:
        full, seen = list(operands), []
        for i, x in zip(inputs, inexact, strict=True):
            full[i] = x

        def observe(value: Value, x: Any) -> Any:
            if not value.is_inexact:
                return x
            if shifts is None:
                order.append(value)
            else:
                x = x + shifts[len(seen)]
            seen.append(x)
            return x

        out = run(plan, full, observe)
        ends = [x for v, x in zip(plan.scope.outputs, out, strict=True) if _is_end(v, plan)]
        return ends, seen

    def both(operands: Any) -> Any:
        inexact = [jnp.asarray(operands[i]) for i in inputs]
        shapes = jax.eval_shape(lambda xs: forward(None, xs, operands)[1], inexact)
        shifts = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        ends, pull, seen = jax.vjp(
            lambda shifts, xs: forward(shifts, xs, operands), shifts, inexact, has_aux=True
        )
        seeds = [_seed(i, x) for i, x in enumerate(ends)]
        grads, arguments = pull(seeds)
        return [[_mean_square(x) for x in xs] for xs in (seen, grads, arguments)]

    values, grads, arguments = call_now(both, list(operands))
    return Sizes(
        _by_value(order, values),
        _by_value(order, grads),
        _by_value([plan.scope.inputs[i] for i in inputs], arguments),
    )


def _is_end(value: Value, plan: Plan) -> bool:
    return value is plan.loss if plan.loss is not None else value.is_inexact


def _seed(number: int, x: jax.Array) -> jax.Array:
    if not x.shape:
        return jnp.ones_like(x)
    return jax.random.normal(jax.random.key(number), x.shape).astype(x.dtype)


def _mean_square(x: jax.Array) -> jax.Array:
    wide = dtypes.promoted(x.dtype, jnp.float32)
    return jnp.mean(jnp.square(jnp.abs(x.astype(wide)))) if x.size else jnp.zeros(())


def _by_value(values: Sequence[Value], squares: Sequence[Any]) -> dict[Value, float]:
    found: dict[Value, list[float]] = {}
    for value, square in zip(values, squares, strict=True):
        found.setdefault(value, []).append(float(square))
    return {value: (sum(xs) / len(xs)) ** 0.5 for value, xs in found.items()}


def describe(sizes: Sizes, rows: dict[Value, Any], names: dict[Value, str]) -> Measurement:
    """Return the tensors, with what is known of the operations that make them."""

    def tensors(kind: str, found: dict[Value, float]) -> list[Tensor]:
        return [
            Tensor(
                kind=kind,
                name=rows[v].operation,
                scope=rows[v].scope,
                line=rows[v].line,
                shape=v.shape,
                rms=rms,
            )
            for v, rms in found.items()
            if v.size >= _FEW
        ]

    arguments = [
        Tensor(kind=KINDS[2], name=names[v], scope="", line="", shape=v.shape, rms=rms)
        for v, rms in sizes.arguments.items()
        if v.size >= _FEW
    ]
    found = tensors(KINDS[0], sizes.forward), tensors(KINDS[1], sizes.backward), arguments
    return Measurement(tuple(t for part in found for t in part))
