"""The context that a scale rule is called with."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.config import ScalifyConfig
from jax_scalify.interpreter.constants import room
from jax_scalify.interpreter.facts import facts_of
from jax_scalify.interpreter.operand import Facts, Operand, ratio_of
from jax_scalify.interpreter.rescaling import narrowed
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.scales import algebra
from jax_scalify.scales.algebra import GIVEN_EXTENT, ONE, Scale
from jax_scalify.scales.multiplying import multiply
from jax_scalify.scales.table import ScaleTable

# The exponent of the largest constant among the elements that a narrow scale leaves room for. A
# larger constant is a mask value, or is infinite in plain float16 too. It saturates, so that the
# other elements keep their precision.
_LARGEST_WITH_ROOM = 20


# How many operands of an equation an error message lists.
_MOST_DESCRIBED = 8


@dataclasses.dataclass
class Pending:
    """The correction of an equation's result, which its rule may apply before it rounds.

    Attributes:
        exponent: the data is divided by `2**exponent`, and the scale is multiplied by it.
        taken: whether the rule has applied it.
    """

    exponent: int = 0
    taken: bool = False

    def take(self) -> int:
        """Return the exponent, or 0 without a correction. The calling rule must apply it."""
        self.taken = self.exponent != 0
        return self.exponent


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RuleContext:
    """The context of a rule: everything that it may use besides its operands.

    Attributes:
        eqn: the equation.
        inputs: the operands as `Value` objects, with facts (constants, non-negative values).
        table: the scales of this trace.
        config: the active `ScalifyConfig`.
        evaluate: interprets a jaxpr: `interpreter/evaluation.py`.
        wide: for each narrow result that may stay in float32, how many equations read it; 0 for all
            other results. See `interpreter/survey.py`.
        hook: the hook of `evaluate` for the jaxprs of the equation.
        pending: the calibration's correction of the result. If the rule does not take it, it is
            applied to the rule's result.
    """

    eqn: JaxprEqn
    inputs: tuple[Value, ...]
    table: ScaleTable
    config: ScalifyConfig
    evaluate: Callable[..., list[Value]]
    wide: tuple[int, ...] = ()
    hook: Any = None
    pending: Pending = dataclasses.field(default_factory=Pending)

    @property
    def primitive(self) -> Primitive:
        """The equation's primitive."""
        return self.eqn.primitive

    @functools.cached_property
    def in_avals(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the operands. A number that stands for an array is 0-d."""
        avals: list[Any] = [v.aval for v in self.eqn.invars]
        return tuple(
            aval if v.shape == aval.shape else aval.update(shape=v.shape)
            for aval, v in zip(avals, self.inputs, strict=True)
        )

    @functools.cached_property
    def out_avals(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the results."""
        return tuple(v.aval for v in self.eqn.outvars)

    @functools.cached_property
    def facts(self) -> Facts:
        """What is known about the elements of the results."""
        return facts_of(self.eqn, self.inputs)

    @property
    def stays_wide(self) -> bool:
        """Whether the first result has a narrow dtype, but may stay in float32."""
        return bool(self.wide and self.wide[0])

    @property
    def out_dtype(self) -> Any:
        """The dtype of the first result."""
        return self.out_avals[0].dtype

    @property
    def holds_values(self) -> bool:
        """Whether the first result has a wide dtype. Its array then holds values, not data."""
        return not dtypes.is_narrow(self.out_dtype)

    def array_of(self, x: Operand, scale: Scale, dtype: Any = None) -> Any:
        """Return the data of `x` at a scale, or its values if the result has a wide dtype."""
        return x.value if self.holds_values else x.at_unit(scale, dtype)

    def on_values(self, scale: Scale, *args: Any, saturates: bool = True, **params: Any) -> Operand:
        """Apply the primitive to values, in at least float32 if the result has a narrow dtype.

        A wide dtype holds the values, and is computed as it is. XLA would store a bfloat16 result
        that is computed in float32 twice, once for each dtype. `scale` and `saturates` are those of
        `result`.
        """
        value = (lambda x: x.value) if self.holds_values else self.dequantise
        values = [value(x) if isinstance(x, Operand) else x for x in args]
        return self.result(self.bind(*values, **params), scale, ONE, saturates=saturates)

    def of_value(self, value: Any, scale: Scale, unit: Scale = ONE) -> Operand:
        """Return a result of a wide dtype, with the values `value * unit` in this unit."""
        scale = scale * Scale(self.pending.take())
        return Operand(dtypes.cast(value, self.out_dtype), scale, unit=unit)

    def with_room(self, scale: Scale) -> Scale:
        """Return `scale`, raised so that constants among the elements fit into narrow data.

        Data that stays in float32 holds them at every scale. The equation that rounds it to its own
        dtype raises the scale.

        In `(3 * where(mask, x, 1))**3` with tiny `x`, some elements are 27, far above the scale of
        `x`. A larger constant than `_LARGEST_WITH_ROOM` saturates. It comes from a mask value, and
        may no longer be among the elements: `square(relu(where(mask, x, -1e4)))` has no element
        1e8.
        """
        constant = self.facts.constant
        if self.holds_values or self.stays_wide or constant is None:
            return scale
        size = Scale(math.floor(constant.exponent), constant.factors)
        if size.exponent > _LARGEST_WITH_ROOM:
            return scale
        return algebra.join(scale, size * room(self.out_dtype), narrow=True)

    def result(
        self,
        raw: Any,
        scale: Scale,
        unit: Scale | None = None,
        *,
        saturates: bool = True,
        fits: bool = False,
    ) -> Operand:
        """Return the result with the values `raw * unit` and the scale that the law gives.

        A pending correction is applied before the result is rounded, so that corrected data does
        not overflow on the way. The result is multiplied once and rounded once.

        Args:
            raw: an array, often in float32.
            scale: the scale that the law gives, without the correction.
            unit: the unit of `raw`. By default `raw` is data at `scale` for narrow dtypes, and
                values for wide dtypes.
            saturates: whether data saturates in float16 where the value is finite: see `narrowed`.
            fits: whether no element of the data is larger than an operand's, so that it need not
                saturate: see `Operand.fits`.
        """
        if self.holds_values:
            return self.of_value(raw if unit is None else multiply(raw, unit), scale)
        unit = scale if unit is None else unit
        # At dynamic scales such data saturates nevertheless. Otherwise XLA for GPUs would fuse the
        # `where` of a causal mask into the softmax, and compile this kernel for each layer, because
        # the scale that it reads lies in another place.
        fits = fits and scale.is_static and not self.pending.exponent
        dtype = self.out_dtype
        # `raw` may come from float32 operands, whose scale leaves no room for constants in float16.
        # If it is rounded already, a larger scale is too late.
        if raw.dtype != dtype:
            scale = self.with_room(scale)
        scale *= Scale(self.pending.take())
        raw = multiply(raw, ratio_of(unit, scale))
        if raw.dtype == dtype:
            return Operand(raw, scale)
        if self.stays_wide:
            wide = lax.convert_element_type(raw, dtypes.compute_dtype(dtype))
            return Operand(wide, scale, declared=dtype, fits=fits or not saturates)
        if saturates and not fits:
            return Operand(narrowed(raw, scale, dtype), scale)
        return Operand(dtypes.cast(raw, dtype), scale)

    def bind(self, *args: Any, **params: Any) -> Any:
        """Apply the primitive itself."""
        return self.primitive.bind(*args, **self.primitive.get_bind_params(params))

    def dequantise(self, x: Any, dtype: Any = None) -> Any:
        """Return the plain values `data * scale`, in at least float32 unless told otherwise."""
        if not isinstance(x, ScaledArray):
            return x.whole() if isinstance(x, Plain) else x
        dtype = dtype or dtypes.compute_dtype(x.dtype)
        if not isinstance(x.scale, Scale):
            return x.to_array(dtype)
        x = Operand.of(x)
        if x.unit.is_one or dtype != x.dtype:
            # A single given scale is applied at once. A product of two may leave float32's range.
            return x.at_unit(ONE, dtype, trusted=2 * GIVEN_EXTENT - 1)
        return x.value

    def scale_jaxpr(
        self,
        closed_jaxpr: Any,
        inputs: list[Value],
        table: ScaleTable | None = None,
        *,
        wide: Sequence[int] = (),
    ) -> list[Value]:
        """Interpret a sub-jaxpr of the equation: in place, or in a new trace, given its `table`.

        `wide` is `RuleContext.wide` for the results of the sub-jaxpr.
        """
        table = table or self.table
        return self.evaluate(closed_jaxpr, inputs, table, self.config, self.hook, wide)

    def describe(self) -> str:
        """Describe the equation for an error message: primitive, operands, and the user's line."""
        operands = [
            f"{'scaled' if v.is_scaled else 'plain'} {jax.dtypes.canonicalize_dtype(v.dtype).name}"
            f"{list(v.shape)}"
            if not jnp.issubdtype(v.dtype, jax.dtypes.extended)
            else f"{v.dtype}{list(v.shape)}"
            for v in self.inputs
        ]
        if len(operands) > _MOST_DESCRIBED:  # an optimizer's `custom_scale` has hundreds
            rest = len(operands) - _MOST_DESCRIBED
            operands = [*operands[:_MOST_DESCRIBED], f"and {rest} more"]
        where = _compat.source_line(self.eqn)
        return f"primitive `{self.primitive.name}` of ({', '.join(operands)}) at {where}"
