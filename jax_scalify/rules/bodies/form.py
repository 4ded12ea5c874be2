"""How values enter and leave the trace of a loop's body or a branch.

A body is interpreted on arrays, with a scale table of its own. A `Form` says which arrays carry a
value into or out of the trace, and what is known of the value on the other side. A dynamic scale is
an array beside the data. A static scale stays in the form.

Example: in a `scan` over scaled values, a carry starts as the constant 0 of shape `(8,)`. Its form
is "scaled" with a dynamic scale, so the new `scan` carries two arrays: data of shape `(8,)` and a
scale of shape `()`. If the body returns the carry in a form that this form cannot hold, the two
forms are joined and the body is interpreted again (`fixpoint`).
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
    """The form of a value that enters or leaves a trace.

    Forms are ordered: constant < uniform < plain < scaled, and a static scale < a dynamic scale.
    `join` returns the least form that can hold either of two values.

    Attributes:
        shape, dtype: the shape and dtype of the value.
        kind: "constant": no array, because the number is known. "uniform": a 0-d array that every
            element equals. "plain": the array. "scaled": the data or values, and the array of the
            scale unless the scale is static.
        constant: the number, if the kind is "constant".
        scale: the static scale; None if the scale is an array.
        scale_shape: the shape of a scale array: `()`, or the rank of the value with each dim 1 or
            equal to the value's.
        extent: the extent of a scale array: see `Atom`.
        holds_data: whether the array of a scaled value holds its data. Otherwise it holds values.
        facts: what is known of the elements.
        is_home: whether the value's scale is its home: see `interpreter/homes.py`.
        sharding: the sharding, if it is explicit and therefore part of the type.
        varying: the mesh axes along which the value may vary inside a `shard_map`. They are part of
            the type too.
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
        """Return the least form of a value."""
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
        """Return the form of the same value with a dynamic scalar scale."""
        known: dict[str, Any] = dict(
            extent=LARGEST_EXTENT, facts=self.facts, sharding=self.sharding, varying=self.varying
        )
        known["holds_data"] = dtypes.is_narrow(self.dtype)
        return Form(self.shape, self.dtype, "scaled", **known)

    def slice(self) -> Form:
        """Return the form of one step of a scanned value."""
        rest = self.scale_shape[1:]
        rest = () if math.prod(rest) == 1 else rest
        sharding = self.sharding
        if sharding is not None:
            sharding = jax.sharding.NamedSharding(
                sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:])
            )
        return dataclasses.replace(self, shape=self.shape[1:], scale_shape=rest, sharding=sharding)

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Return the type of the value's array, in a list; `[]` for a constant, which has no array.

        The array of the scale is not included.
        """
        if self.kind == "constant":
            return []
        if self.kind == "uniform":
            return [_compat.varying_struct((), self.dtype, None, self.varying)]
        return [_compat.varying_struct(self.shape, self.dtype, self.sharding, self.varying)]

    @property
    def has_scale(self) -> bool:
        """Whether the value has a scale array beside its data."""
        return self.kind == "scaled" and self.scale is None

    @property
    def _is_number(self) -> bool:
        return not self.shape and not jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def array_count(self) -> int:
        """Number of arrays that stand for a value."""
        return len(self.avals()) + self.has_scale

    def pack(self, value: Value, table: ScaleTable) -> list[Any]:
        """Return the arrays that stand for a value in this form."""
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
            # The scale of a 0-d value is its exponent, so that it cannot drift over a loop's steps.
            data, exponent = table.split(jnp.asarray(x.source))
            scale = x.unit * exponent
            x = Operand(data, scale) if x.holds_data else x.with_scale(scale)
        if any(atom.limit < LARGEST_EXTENT for atom, _ in x.scale.factors):
            # A calibration may multiply the scale by a factor in each step. Keep it in range.
            x = x.with_scale(x.scale.bounded(LARGEST_EXTENT))
        x = within_range(x)
        scale = align_scale(table.output(x.scale), len(self.scale_shape))
        array = jnp.asarray(x.data if self.holds_data else x.value)
        return [array, jnp.broadcast_to(scale, self.scale_shape)]

    def unpack(self, arrays: Sequence[Any], table: ScaleTable) -> Value:
        """Return the value that arrays in this form stand for."""
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
    """Return the least form that can hold a value of either form."""
    facts = a.facts.join(b.facts)
    types: dict[str, Any] = dict(sharding=a.sharding, varying=a.varying | b.varying)
    if a.kind == b.kind == "constant":
        same = np.array_equal(a.constant, b.constant, equal_nan=dtypes.is_scalable(a.dtype))
        if same:
            return dataclasses.replace(a, varying=a.varying | b.varying)
        # Different constants join to a scaled value. A 0-d value stays plain: it is split later.
        kind = "scaled" if a.shape and dtypes.is_scalable(a.dtype) else "plain"
        return Form(a.shape, a.dtype, kind, facts=facts, **types)
    if "scaled" in (a.kind, b.kind):
        return _join_scaled(a, b, dict(facts=facts, **types))
    kind = "plain" if "plain" in (a.kind, b.kind) or not a.shape else "uniform"
    return Form(a.shape, a.dtype, kind, facts=facts, **types)


def _join_scaled(a: Form, b: Form, known_of_both: dict[str, Any]) -> Form:
    known = [f.scale for f in (a, b) if f.kind == "scaled"]
    others = [f for f in (a, b) if f.kind != "scaled"]
    # The constant 0 fits any scale, so a static scale stays static.
    zero = all(f.kind == "constant" and f.constant == 0 for f in others)
    holds_data = all(f.holds_data for f in (a, b) if f.kind == "scaled")
    known_of_both = dict(known_of_both, holds_data=holds_data)
    if zero and None not in known and len(set(known)) == 1:
        at_home = a.is_home and b.is_home and not others
        return Form(a.shape, a.dtype, "scaled", scale=known[0], is_home=at_home, **known_of_both)
    shape = jnp.broadcast_shapes(a.scale_shape, b.scale_shape)
    extent = max(a.extent, b.extent)
    return Form(a.shape, a.dtype, "scaled", scale_shape=shape, extent=extent, **known_of_both)


def avals(forms: Sequence[Form], table: ScaleTable) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of all arrays of the forms."""
    out = []
    for form in forms:
        out += form.avals()
        if form.has_scale:
            scale = _compat.varying_struct(form.scale_shape, table.dtype, None, form.varying)
            out.append(scale)
    return out


def pack(forms: Sequence[Form], values: Sequence[Value], table: ScaleTable) -> list[Any]:
    """Return the arrays of all values, one after the other."""
    return [a for f, v in zip(forms, values, strict=True) for a in f.pack(v, table)]


def unpack(forms: Sequence[Form], arrays: Sequence[Any], table: ScaleTable) -> list[Value]:
    """Return the values that a sequence of arrays stands for."""
    rest = iter(arrays)
    return [f.unpack([next(rest) for _ in range(f.array_count)], table) for f in forms]


@dataclasses.dataclass(frozen=True)
class Body:
    """An interpreted jaxpr: a function of packed arrays, and the forms of its results."""

    jaxpr: Any
    forms: list[Form]

    def __call__(self, arrays: Sequence[Any], forms: Sequence[Form], table_dtype: Any) -> list[Any]:
        """Call the body, and convert its results to `forms`, which must be able to hold them."""
        results = _compat.inlined(self.jaxpr, arrays)
        if list(forms) == self.forms:
            return results
        table = ScaleTable(table_dtype)
        return pack(forms, unpack(self.forms, results, table), table)


def interpret(ctx: RuleContext, closed: Any, forms: Sequence[Form]) -> Body:
    """Interpret a sub-jaxpr on values of these forms, with a scale table of its own."""
    out_forms: list[Form] = []

    def flat(table: ScaleTable, *arrays: Any) -> list[Any]:
        outputs = ctx.scale_jaxpr(closed, unpack(forms, arrays, table), table)
        out_forms[:] = map(Form.of, outputs)
        return pack(out_forms, outputs, table)

    return Body(ctx.trace(flat, avals(forms, ctx.table)), out_forms)


def fixpoint(
    make: Callable[[list[Form]], Body], start: list[Form], count: int
) -> tuple[Body, list[Form]]:
    """Return the body, and the least forms of its `count` carries that the body preserves."""
    forms = start
    while True:
        body = make(forms)
        joined = [_carried(a, b) for a, b in zip(forms, body.forms[:count], strict=True)]
        if joined == forms:
            return body, forms
        forms = joined


def _carried(before: Form, after: Form) -> Form:
    """Return the joined form of a carry. The fact `constant` keeps its first value.

    A body such as `3 * x` would raise the constant in every round, and the iteration would not end.
    """
    joined, constant = join(before, after), before.facts.constant
    if constant is None:
        return joined
    return dataclasses.replace(joined, facts=dataclasses.replace(joined.facts, constant=constant))
