"""How values cross into a sub-trace and out of it: the body of a loop or a branch.

A body is interpreted once, on arrays, with a scale table of its own. A `Form` says which arrays
stand for a value, and what is known of it on the other side. A scale crosses as an array beside
its data, unless it is static.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import align_scale
from jax_scalify.base import dtypes
from jax_scalify.interpreter.constants import promote
from jax_scalify.interpreter.operand import NOTHING, Facts, Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.interpreter.rescaling import at_home, within_range
from jax_scalify.interpreter.value import Plain, Value, in_dtype
from jax_scalify.scales.algebra import LARGEST_EXTENT, Scale
from jax_scalify.scales.table import ScaleTable


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which a value crosses: as a constant, a number, a plain array, or data and scale.

    Forms are ordered, constant < uniform < plain < scaled, and a known scale is below any other:
    `join` gives the least form that can hold either of two values.

    Attributes:
        shape, dtype: of the value.
        kind: "constant": no array, the number is known; "uniform": a 0-d array that every element
            equals; "plain": the array; "scaled": data and, unless it is static, its scale.
        constant: the number, of a constant.
        scale: a static scale; None if the scale crosses as an array.
        scale_shape: of a scale that crosses: `()`, or the rank of the value with dims 1 or its own.
        extent: of a scale that crosses, as of an `Atom`.
        holds_data: of a scaled value, whether its array is the data; else it is the values.
        facts: about the elements.
        is_home: whether it is at home in its scale: see `interpreter/homes.py`.
        sharding: if it is explicit, a part of types.
        varying: axes of a mesh along which it may differ, inside a `shard_map`; a part of types.
    """

    shape: tuple[int, ...]
    dtype: Any
    kind: str
    constant: Any = None
    scale: Scale | None = None
    scale_shape: tuple[int, ...] = ()
    extent: int = 0
    holds_data: bool = True
    facts: Facts = NOTHING
    is_home: bool = False
    sharding: Any = None
    varying: frozenset[Any] = frozenset()

    @classmethod
    def of(cls, value: Value) -> Form:
        """The strongest form of a value."""
        types: dict[str, Any] = dict(
            sharding=_compat.explicit_sharding(value), varying=_varying_axes(value)
        )
        if isinstance(value, Operand):
            value = at_home(value)
            scale = value.scale
            known: dict[str, Any] = (
                {"scale": scale}
                if scale.is_static
                else {"scale_shape": scale.shape, "extent": min(LARGEST_EXTENT, int(scale.span))}
            )
            known |= {"facts": value.facts, "is_home": value.home == scale} | types
            known["holds_data"] = value.holds_data
            return cls(value.shape, value.dtype, "scaled", **known)
        kind = "plain"
        if value.constant is not None:
            kind = "constant"
        elif value.number is not None and value.array is None:
            kind = "uniform"
        rest: dict[str, Any] = dict(constant=value.constant, facts=value.facts) | types
        return cls(value.shape, value.dtype, kind, **rest)

    def scaled(self) -> Form:
        """The same value with a dynamic scalar scale."""
        known: dict[str, Any] = dict(
            extent=LARGEST_EXTENT, facts=self.facts, sharding=self.sharding, varying=self.varying
        )
        known["holds_data"] = dtypes.has_short_range(self.dtype)
        return Form(self.shape, self.dtype, "scaled", **known)

    def slice(self) -> Form:
        """The form of one step of a scanned value."""
        rest = self.scale_shape[1:]
        rest = () if math.prod(rest) == 1 else rest
        sharding = self.sharding
        if sharding is not None:
            sharding = jax.sharding.NamedSharding(
                sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:])
            )
        return dataclasses.replace(self, shape=self.shape[1:], scale_shape=rest, sharding=sharding)

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays, a scale's dtype left to the table."""
        if self.kind == "constant":
            return []
        if self.kind == "uniform":
            return [_compat.varying_struct((), self.dtype, None, self.varying)]
        return [_compat.varying_struct(self.shape, self.dtype, self.sharding, self.varying)]

    @property
    def has_scale(self) -> bool:
        """Whether a scale array goes with the data."""
        return self.kind == "scaled" and self.scale is None

    @property
    def _is_number(self) -> bool:
        return not self.shape and not jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def array_count(self) -> int:
        """Number of arrays that stand for a value."""
        return len(self.avals()) + self.has_scale

    def pack(self, value: Value, table: ScaleTable) -> list[Any]:
        """The arrays that stand for a value in this form."""
        return [_compat.as_varying(a, self.varying) for a in self._pack(value, table)]

    def _pack(self, value: Value, table: ScaleTable) -> list[Any]:
        if self.kind == "constant":
            return []
        if self.kind == "uniform":
            return [jnp.asarray(in_dtype(value.number, value.dtype))]
        if self.kind == "plain":
            return [jnp.asarray(value.whole())]
        x = at_home(promote(value, table, full=True))
        if not self.has_scale:
            return [jnp.asarray(x.data if self.holds_data else x.value)]
        if self._is_number:
            # The exponent of a number is its scale: it must not drift from step to step of a loop.
            data, exponent = table.split(jnp.asarray(x.source))
            scale = x.unit * exponent
            x = Operand(data, scale) if x.holds_data else x.with_scale(scale)
        if any(atom.limit < LARGEST_EXTENT for atom, _ in x.scale.factors):
            # With a factor that a calibration tries, in each step, scales would run away.
            x = x.with_scale(x.scale.bounded(LARGEST_EXTENT)[0])
        x = within_range(x)
        scale = align_scale(table.output(x.scale), len(self.scale_shape))
        array = jnp.asarray(x.data if self.holds_data else x.value)
        return [array, jnp.broadcast_to(scale, self.scale_shape)]

    def unpack(self, arrays: Sequence[Any], table: ScaleTable) -> Value:
        """The value that arrays in this form stand for."""
        if self.kind == "constant":
            held = not self.shape and self.constant.dtype == self.dtype
            return Plain.of(self.constant) if held else Plain.filled(self, self.constant)
        if self.kind == "uniform":
            return Plain.filled(self, arrays[0], facts=self.facts)
        if self.kind == "plain":
            return Plain.of(arrays[0], facts=self.facts)
        scale = self.scale
        if scale is None:
            scale = table.atom(arrays[1], extent=self.extent, is_number=self._is_number)
        home = scale if self.is_home else None
        x = Operand(arrays[0], scale) if self.holds_data else Operand.of_value(arrays[0], scale)
        return x.as_result(self.facts, home=home)


def _varying_axes(value: Value) -> frozenset[Any]:
    if isinstance(value, Operand):
        return _compat.varying_axes(value.source)
    array = value.number if value.array is None else value.array
    return _compat.varying_axes(array)


def join(a: Form, b: Form) -> Form:
    """The least form that can hold a value of either form."""
    facts = a.facts.join(b.facts)
    types: dict[str, Any] = dict(sharding=a.sharding, varying=a.varying | b.varying)
    if a.kind == b.kind == "constant":
        same = np.array_equal(a.constant, b.constant, equal_nan=dtypes.is_scalable(a.dtype))
        if same:
            return dataclasses.replace(a, varying=a.varying | b.varying)
        # Two constants are scaled values, unless they are numbers whose exponent is their scale.
        kind = "scaled" if a.shape and dtypes.is_scalable(a.dtype) else "plain"
        return Form(a.shape, a.dtype, kind, facts=facts, **types)
    if "scaled" in (a.kind, b.kind):
        return _join_scaled(a, b, dict(facts=facts, **types))
    kind = "plain" if "plain" in (a.kind, b.kind) or not a.shape else "uniform"
    return Form(a.shape, a.dtype, kind, facts=facts, **types)


def _join_scaled(a: Form, b: Form, known_of_both: dict[str, Any]) -> Form:
    known = [f.scale for f in (a, b) if f.kind == "scaled"]
    others = [f for f in (a, b) if f.kind != "scaled"]
    zero = all(f.kind == "constant" and f.constant == 0 for f in others)
    holds_data = all(f.holds_data for f in (a, b) if f.kind == "scaled")
    known_of_both = dict(known_of_both, holds_data=holds_data)
    if zero and None not in known and len(set(known)) == 1:
        return Form(a.shape, a.dtype, "scaled", scale=known[0], **known_of_both)
    shape = jnp.broadcast_shapes(a.scale_shape, b.scale_shape)
    extent = max(a.extent, b.extent)
    return Form(a.shape, a.dtype, "scaled", scale_shape=shape, extent=extent, **known_of_both)


def avals(forms: Sequence[Form], table: ScaleTable) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of all arrays of some forms."""
    out = []
    for form in forms:
        out += form.avals()
        if form.has_scale:
            scale = _compat.varying_struct(form.scale_shape, table.dtype, None, form.varying)
            out.append(scale)
    return out


def pack(forms: Sequence[Form], values: Sequence[Value], table: ScaleTable) -> list[Any]:
    """All arrays of some values, one after the other."""
    return [a for f, v in zip(forms, values, strict=True) for a in f.pack(v, table)]


def unpack(forms: Sequence[Form], arrays: Sequence[Any], table: ScaleTable) -> list[Value]:
    """The values that a sequence of arrays stands for."""
    rest = iter(arrays)
    return [f.unpack([next(rest) for _ in range(f.array_count)], table) for f in forms]


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr that has been interpreted: a function of packed arrays, and the results' forms."""

    jaxpr: Any
    forms: list[Form]

    def __call__(self, arrays: Sequence[Any], forms: Sequence[Form], table_dtype: Any) -> list[Any]:
        """Call the body, and bring its results to weaker forms."""
        results = _compat.inlined(self.jaxpr, arrays)
        if list(forms) == self.forms:
            return results
        table = ScaleTable(table_dtype)
        return pack(forms, unpack(self.forms, results, table), table)


def interpret(ctx: RuleContext, closed: Any, forms: Sequence[Form]) -> Body:
    """Interpret a sub-jaxpr on values of given forms, with a scale table of its own."""
    out_forms: list[Form] = []

    def flat(table: ScaleTable, *arrays: Any) -> list[Any]:
        outputs = ctx.scale_jaxpr(closed, unpack(forms, arrays, table), table)
        out_forms[:] = map(Form.of, outputs)
        return pack(out_forms, outputs, table)

    return Body(ctx.trace(flat, avals(forms, ctx.table)), out_forms)


def fixpoint(
    make: Callable[[list[Form]], Body], start: list[Form], count: int
) -> tuple[Body, list[Form]]:
    """Find the least forms of `count` carries that a body gives back as it gets them."""
    forms = start
    while True:
        body = make(forms)
        joined = [_carried(a, b) for a, b in zip(forms, body.forms[:count], strict=True)]
        if joined == forms:
            return body, forms
        forms = joined


def _carried(before: Form, after: Form) -> Form:
    """The form of a carry; a constant among the elements, which may grow forever, is the first."""
    joined, constant = join(before, after), before.facts.constant
    if constant is None:
        return joined
    return dataclasses.replace(joined, facts=dataclasses.replace(joined.facts, constant=constant))
