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
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import align_scale
from jax_scalify.base import dtypes
from jax_scalify.interpreter.constants import promote
from jax_scalify.interpreter.operand import NOTHING, Facts, Operand
from jax_scalify.interpreter.registry import RuleContext
from jax_scalify.interpreter.rescaling import at_home, within_range
from jax_scalify.interpreter.value import Plain, Value, in_dtype
from jax_scalify.scales.algebra import LARGEST_EXTENT, ONE, Scale
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
        is_operand = isinstance(value, Operand)
        array = value.source if is_operand else value.array
        known: dict[str, Any] = dict(
            facts=value.facts.outside_of_trace(),
            sharding=_compat.explicit_sharding(value),
            varying=_compat.varying_axes(value.number if array is None else array),
        )
        if is_operand:
            value = at_home(value)
            scale = value.scale
            if scale.is_static:
                known["scale"] = scale
            else:
                known |= dict(scale_shape=scale.shape, extent=min(LARGEST_EXTENT, int(scale.span)))
            known |= dict(holds_data=value.holds_data, is_home=value.home == scale)
            return cls(value.shape, value.dtype, "scaled", **known)
        kind = "uniform" if array is None else "plain"
        kind = "constant" if value.constant is not None else kind
        return cls(value.shape, value.dtype, kind, constant=value.constant, **known)

    def slice(self) -> Form:
        """Return the form of one step of a scanned value."""
        rest = self.scale_shape[1:]
        # Scales of shape (3, 1, 1), for three steps, give each step a scalar scale.
        rest = () if math.prod(rest) == 1 else rest
        sharding = self.sharding
        if sharding is not None:
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        return dataclasses.replace(self, shape=self.shape[1:], scale_shape=rest, sharding=sharding)

    def as_array(self) -> Form:
        """Return a form in which a "uniform" value is an array: its numbers may differ."""
        return dataclasses.replace(self, kind="plain") if self.kind == "uniform" else self

    def avals(self, scale_dtype: Any) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the arrays that stand for a value; `[]` for a constant."""
        if self.kind == "constant":
            return []
        shape, sharding = ((), None) if self.kind == "uniform" else (self.shape, self.sharding)
        arrays = [(shape, self.dtype, sharding)]
        arrays += [(self.scale_shape, scale_dtype, None)] if self.has_scale else []
        return [_compat.varying_struct(*array, self.varying) for array in arrays]

    @property
    def has_scale(self) -> bool:
        """Whether the value has a scale array beside its data."""
        return self.kind == "scaled" and self.scale is None

    @property
    def keeps_scale(self) -> bool:
        """Whether a loop's carry keeps its nonzero scale from step to step.

        A rule's scale is an estimate, and its error compounds over the steps. A scale that doubles
        in each of 1,000 steps leaves the range of every dtype, even if the values do not grow. A
        0-d carry cannot drift, because its scale is its exponent. A carry of 16 bits takes the
        scale of each step, because layers of small weights would make its data underflow at a
        constant scale.
        """
        is_array = self.has_scale and bool(self.shape) and not self.holds_data
        return is_array and jnp.finfo(self.dtype).bits >= 32

    @property
    def _is_number(self) -> bool:
        return not self.shape and not jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def array_count(self) -> int:
        """Number of arrays that stand for a value. The array of a scale is the last."""
        return (self.kind != "constant") + self.has_scale

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
            # If float16 does not hold a constant, the number is in float32: see `Plain`.
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
        unit = scale if self.holds_data else ONE
        return Operand(arrays[0], scale, unit=unit, facts=self.facts, home=home)


def join(a: Form, b: Form) -> Form:
    """Return the least form that can hold a value of either form."""
    kinds, varying = {a.kind, b.kind}, a.varying | b.varying
    known: dict[str, Any] = {}
    if "scaled" in kinds:
        kind, known = "scaled", _joined_scales(a, b)
    elif kinds == {"constant"}:
        if np.array_equal(a.constant, b.constant, equal_nan=dtypes.is_scalable(a.dtype)):
            return dataclasses.replace(a, varying=varying)
        # Different constants join to a scaled value. A 0-d value stays plain: it is split later.
        kind = "scaled" if a.shape and dtypes.is_scalable(a.dtype) else "plain"
    else:
        kind = "plain" if "plain" in kinds or not a.shape else "uniform"
    known |= dict(facts=a.facts.join(b.facts), sharding=a.sharding, varying=varying)
    return Form(a.shape, a.dtype, kind, **known)


def _joined_scales(a: Form, b: Form) -> dict[str, Any]:
    scaled = [f for f in (a, b) if f.kind == "scaled"]
    # The constant 0 fits any scale, so a static scale stays static.
    zero = all(f.kind == "scaled" or f.kind == "constant" and f.constant == 0 for f in (a, b))
    known: dict[str, Any] = dict(holds_data=all(f.holds_data for f in scaled))
    scales = {f.scale for f in scaled}
    if zero and None not in scales and len(scales) == 1:
        return known | dict(scale=scaled[0].scale, is_home=a.is_home and b.is_home)
    # Static scales that differ, as in `cond(p, lambda: x, lambda: 4 * x)`, become an array.
    shape = jnp.broadcast_shapes(a.scale_shape, b.scale_shape)
    return known | dict(scale_shape=shape, extent=max(a.extent, b.extent))


def scales_of(forms: Sequence[Form]) -> dict[int, Form]:
    """Return the position of each scale among the arrays of all forms, with its form."""
    ends = itertools.accumulate(form.array_count for form in forms)
    return {end - 1: form for form, end in zip(forms, ends, strict=True) if form.has_scale}


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
    table_dtype: Any

    def __call__(self, arrays: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
        """Call the body, and convert its results to `forms`, which must be able to hold them."""
        results = _compat.inlined(self.jaxpr, arrays)
        if list(forms) == self.forms:
            return results
        # For example, this branch returns a static scale, and another branch a dynamic scale.
        table = ScaleTable(self.table_dtype)
        return pack(forms, unpack(self.forms, results, table), table)


def interpret(ctx: RuleContext, closed: Any, forms: Sequence[Form]) -> Body:
    """Interpret a sub-jaxpr on values of these forms, with a scale table of its own."""
    out_forms: list[Form] = []

    def flat(table: ScaleTable, *arrays: Any) -> list[Any]:
        outputs = ctx.scale_jaxpr(closed, unpack(forms, arrays, table), table)
        out_forms[:] = map(Form.of, outputs)
        return pack(out_forms, outputs, table)

    avals = [aval for form in forms for aval in form.avals(ctx.table.dtype)]
    return Body(ctx.table.trace(flat, avals), out_forms, ctx.table.dtype)


def fixpoint(make: Callable[[list[Form]], Body], forms: list[Form]) -> tuple[Body, list[Form]]:
    """Return the body and the least forms of its carries that hold `forms` and its results."""
    # `join` only moves up in the order of forms, so this ends.
    while True:
        body = make(forms)
        joined = [_carried(a, b) for a, b in zip(forms, body.forms[: len(forms)], strict=True)]
        if joined == forms:
            return body, forms
        forms = joined


def _carried(before: Form, after: Form) -> Form:
    """Return the joined form of a carry. The facts `constant` and `computed` stay as first.

    A body such as `3 * x` would raise the constant in every round, and the iteration would not end.
    Weights that a loop of training steps updates are given. If they counted as computed, the scales
    of activations would be too large by `pow2(K**(1/4))` for each matmul. A carry that starts from
    constants, as zeros do, is computed.
    """
    joined, first = join(before, after), before.facts
    kept: dict[str, Any] = {} if first.constant is None else dict(constant=first.constant)
    if before.kind == "scaled" and not first.computed:
        kept |= dict(computed=False)
    return dataclasses.replace(joined, facts=dataclasses.replace(joined.facts, **kept))
