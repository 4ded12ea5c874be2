"""The registry of scale rules, and the context that a rule is called with."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.config import ScalifyConfig
from jax_scalify.interpreter.corrections import Corrections, Pending
from jax_scalify.interpreter.operand import Operand, ratio_of
from jax_scalify.interpreter.rescaling import kept_wide, narrowed, to_plain
from jax_scalify.interpreter.traits import Traits, declare
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.scales.algebra import ONE, Scale
from jax_scalify.scales.multiplying import multiply
from jax_scalify.scales.table import ScaleTable, trace_with_table

Rule = Callable[..., Any]


class MissingRuleError(NotImplementedError):
    """A primitive with a scaled operand has no scale rule, and `missing_rule` is "error"."""


class DequantisedWarning(UserWarning):
    """A primitive was evaluated on dequantised values. Its results have the scale 1."""


@dataclasses.dataclass(frozen=True, order=True)
class RuleInfo:
    """The entry of a primitive on the coverage page.

    Attributes:
        family: the section of the page; "custom" for rules from outside this package.
        name: the name of the primitive.
        law: the first line of the rule's docstring.
        dequantises: why the rule dequantises its operands; None if it keeps their scales.
    """

    family: str
    name: str
    law: str
    dequantises: str | None = None


_rules: dict[Primitive | str, Rule] = {}
_infos: dict[str, RuleInfo] = {}
_value_rules: dict[Rule, bool] = {}  # rules that take `Value` objects: whether they return some too


def register_scale_rule(
    *primitives: Primitive | str,
    family: str | None = None,
    dequantises: str | None = None,
    elements: str | None = None,
    elementwise: bool = False,
    nonnegative: str | None = None,
    degree: float | str | None = None,
) -> Callable[[Rule], Rule]:
    """Register a scale rule for primitives, given as objects or by name.

    A rule is called as `rule(ctx, *args, **params)` when an operand of the equation is scaled.
    Floating operands are `ScaledArray` arrays. Their `scale` supports `*`, `/`, integer `**` and
    `.maximum(other)`, and `jnp.asarray(scale)` returns its array. Other operands are plain arrays.
    `params` are the parameters of the equation.

    A rule returns a `ScaledArray`, or a plain array for a result without a scale, or a sequence of
    these if the primitive has several results. The data of a result must have the shape and dtype
    of the equation's result (`ctx.out_avals`), and its scale must be a power of two.
    `jsa.testing.check_scale_rule` tests a rule. Registering a primitive again replaces its rule.

    Args:
        primitives: `jax.extend.core.Primitive` objects, or names of primitives that JAX does not
            export.
        family: the section of the coverage page; by default the module of the rule.
        dequantises: the reason why the rule computes with plain values, if it does. The primitive
            is then reported once, because its scales are lost.
        elements: where the elements of the results come from. "new": they are computed. "summed":
            they are sums along axes. The other choices are for elements that are the operand's own:
            "same", "cast", "rescaled", "negated", "moved", "picked" (extremes), "taken" (by index
            or order), "joined" (side by side) or "placed" (among elements of other operands). Facts
            about the operand hold for its own elements. By default nothing is known.
        elementwise: whether each element of the result is computed from the operands' elements at
            the same index.
        nonnegative: "always", or "keeps" if no result is negative unless an operand is.
        degree: how results grow with operands: a power of the first operand, or the "sum",
            "product" or "quotient" of all operands. Optional for the operand's own elements.

    Raises:
        TypeError: if `primitives` is empty or holds anything but primitives and names.
        ValueError: if `elements`, `nonnegative` or `degree` is unknown.

    Example:
        >>> @jsa.register_scale_rule("my_transpose")
        ... def my_transpose_rule(ctx, x, **params):
        ...     return jsa.ScaledArray(ctx.bind(x.data, **params), x.scale)
    """
    if not primitives or not all(isinstance(p, (Primitive, str)) for p in primitives):
        raise TypeError(
            f"`primitives` must be JAX primitives or their names, got {primitives!r}: write "
            "`@register_scale_rule(lax.add_p)`."
        )
    traits = Traits(
        elements=elements, elementwise=elementwise, nonnegative=nonnegative, degree=degree
    )

    def register(rule: Rule) -> Rule:
        module = rule.__module__ or ""
        own = module.rpartition(".")[2] if module.startswith("jax_scalify.") else "custom"
        law = (rule.__doc__ or "").strip().partition("\n")[0]
        for primitive in primitives:
            name = primitive if isinstance(primitive, str) else primitive.name
            _rules.pop(name, None)  # `find_rule` would prefer an older rule for the name
            _rules[primitive] = rule
            where = family or own.replace("_", " ")
            _infos[name] = RuleInfo(where, name, law, dequantises)
            if traits != Traits():  # a rule without traits keeps the primitive's
                declare(name, traits)
        return rule

    return register


def register_value_rule(
    *primitives: Primitive | str, family: str | None = None, elements: str | None = None
) -> Callable[[Rule], Rule]:
    """Register a rule of this package that takes `Value` objects: plain values stay `Plain`.

    Without `elements`, the rule interprets a body and returns `Value` objects with facts.
    """

    def register(rule: Rule) -> Rule:
        _value_rules[rule] = elements is None
        return register_scale_rule(*primitives, family=family, elements=elements or "new")(rule)

    return register


def takes_numbers(rule: Rule) -> bool:
    """Return whether an elementwise rule takes 0-d numbers beside arrays: rules of this package do.

    A user's primitive may take operands of one shape only.
    """
    return (rule.__module__ or "").startswith("jax_scalify.")


def takes_values(rule: Rule) -> bool:
    """Return whether a rule gets `Value` objects instead of operands."""
    return rule in _value_rules


def gives_values(rule: Rule) -> bool:
    """Return whether a rule returns `Value` objects, complete with facts."""
    return _value_rules.get(rule, False)


def registered_rules() -> list[RuleInfo]:
    """Return all registered rules, sorted by family and name."""
    return sorted(_infos.values())


def find_rule(primitive: Primitive) -> Rule | None:
    """Return the rule of a primitive, or None."""
    return _rules.get(primitive) or _rules.get(primitive.name)


def reason_to_dequantise(primitive: Primitive) -> str | None:
    """Return why the rule of a primitive dequantises its operands; None if it does not."""
    info = _infos.get(primitive.name)
    return info.dequantises if info else None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RuleContext:
    """The context of a rule: everything that it may use besides its operands.

    Attributes:
        primitive: the equation's primitive.
        in_avals, out_avals: shapes and dtypes of the equation's operands and results.
        inputs: the operands as `Value` objects, with facts (constants, non-negative values).
        table: the scales of this trace.
        config: the active `ScalifyConfig`.
        eqn: the equation.
        evaluate: interprets a jaxpr: `interpreter/evaluation.py`.
        corrections: the corrections of a calibration for the jaxprs of the equation.
        pending: the calibration's correction of the result. If the rule does not take it, it is
            applied to the rule's result.
        wide: for each narrow result that may stay in float32 (see `interpreter/wide.py`), how many
            equations read it; 0 for all other results.
    """

    primitive: Primitive
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    inputs: tuple[Value, ...]
    table: ScaleTable
    config: ScalifyConfig
    eqn: JaxprEqn
    evaluate: Callable[..., list[Value]]
    corrections: Corrections | None = None
    pending: Pending = dataclasses.field(default_factory=Pending)
    wide: tuple[int, ...] = ()

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

    def unit(self, scale: Scale) -> Scale:
        """Return the unit of a result's array: `scale`, or 1 in a wide dtype."""
        return ONE if self.holds_values else scale

    def array_of(self, x: Operand, scale: Scale, dtype: Any = None) -> Any:
        """Return the data of `x` at a scale, or its values if the result has a wide dtype."""
        return x.value if self.holds_values else x.at_unit(scale, dtype)

    def on_values(self, scale: Scale, *args: Any, **params: Any) -> Operand:
        """Apply the primitive to values, in at least float32 if the result has a narrow dtype.

        `scale` is the scale that the law gives.
        """
        value = (lambda x: x.value) if self.holds_values else self.dequantise
        values = [value(x) if isinstance(x, Operand) else x for x in args]
        return self.result(self.bind(*values, **params), scale, ONE)

    def of_value(self, value: Any, scale: Scale, unit: Scale = ONE) -> Operand:
        """Return a result of a wide dtype, with the values `value * unit` in this unit."""
        scale = scale * Scale(self.pending.take())
        return Operand(dtypes.cast(value, self.out_dtype), scale, unit=unit)

    def result(
        self, raw: Any, scale: Scale, unit: Scale | None = None, *, saturates: bool = True
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
        """
        unit = self.unit(scale) if unit is None else unit
        if self.holds_values:
            return self.of_value(multiply(raw, unit), scale)
        scale, dtype = scale * Scale(self.pending.take()), self.out_dtype
        raw = multiply(raw, ratio_of(unit, scale))
        if raw.dtype == dtype:  # it was not computed in float32: nothing to round
            return Operand(raw, scale)
        if self.stays_wide:
            return kept_wide(raw, scale, dtype)
        return Operand(narrowed(raw, scale, dtype) if saturates else dtypes.cast(raw, dtype), scale)

    def bind(self, *args: Any, **params: Any) -> Any:
        """Apply the primitive itself."""
        return self.primitive.bind(*args, **self.primitive.get_bind_params(params))

    def dequantise(self, x: Any, dtype: Any = None) -> Any:
        """Return the plain values `data * scale`, in at least float32 unless told otherwise."""
        if not isinstance(x, ScaledArray):
            return x.whole() if isinstance(x, Plain) else x
        return to_plain(x, dtype or dtypes.compute_dtype(x.dtype))

    def trace(self, function: Callable[..., list[Any]], arrays: Sequence[Any]) -> Any:
        """Return the jaxpr of `function(table, *arrays)`, traced with a new table."""
        table = self.table
        options = dict(splits_scalars=table.splits_scalars, narrow=table.narrow)
        return trace_with_table(function, arrays, table.dtype, **options)

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
        return self.evaluate(closed_jaxpr, inputs, table, self.config, self.corrections, wide)


def describe(eqn: JaxprEqn, inputs: list[Value] | tuple[Value, ...]) -> str:
    """Describe an equation for an error message: primitive, operands, and the user's line."""
    operands = ", ".join(
        f"{'scaled' if v.is_scaled else 'plain'} {jax.dtypes.canonicalize_dtype(v.dtype).name}"
        f"{list(v.shape)}"
        if not jnp.issubdtype(v.dtype, jax.dtypes.extended)
        else f"{v.dtype}{list(v.shape)}"
        for v in inputs
    )
    return f"primitive `{eqn.primitive.name}` of ({operands}) at {_compat.source_line(eqn)}"


def check_scale_shape(rule: str, scale: Any, shape: Sequence[int]) -> None:
    """Raise if the scale that a rule returned does not fit the shape of its result."""
    found = np.shape(scale)
    # An array of a lower rank lies along the leading axes. A `Scale` has the full rank.
    ranks = (0, len(shape)) if isinstance(scale, Scale) else range(len(shape) + 1)
    if len(found) in ranks and all(s in (1, n) for s, n in zip(found, shape, strict=False)):
        return
    raise TypeError(
        f"The scale rule of {rule} must return a scale of shape () or one that fits {list(shape)}, "
        f"got {list(found)}. An operand may have one scale for each index of an axis. If the rule "
        "reduces or moves this axis, bring the operand to one scale first: "
        "`data, scale = jsa.get_data_and_scale(x)`."
    )


_warned: set[str] = set()


def report_missing(eqn: JaxprEqn, inputs: list[Value], config: ScalifyConfig) -> None:
    """Report a primitive without a rule: raise, warn once for each primitive, or do nothing."""
    if config.missing_rule == "error":
        raise MissingRuleError(
            f"There is no scale rule for {describe(eqn, inputs)}. Register one with "
            '`jsa.register_scale_rule`, or allow dequantising with missing_rule="warn".'
        )
    _warn_once(eqn, config, f"No scale rule for {describe(eqn, inputs)}")


def report_dequantised(
    eqn: JaxprEqn, inputs: list[Value], reason: str, config: ScalifyConfig
) -> None:
    """Warn, once for each primitive, that a rule dequantises its operands."""
    _warn_once(eqn, config, f"{reason} ({describe(eqn, inputs)})")


def _warn_once(eqn: JaxprEqn, config: ScalifyConfig, message: str) -> None:
    if config.missing_rule == "silent" or eqn.primitive.name in _warned:
        return
    _warned.add(eqn.primitive.name)
    warnings.warn(
        f"{message}: it is evaluated on dequantised values. The result is right where the dtype "
        "holds the values themselves, and its scale starts anew.",
        DequantisedWarning,
        stacklevel=2,
    )
