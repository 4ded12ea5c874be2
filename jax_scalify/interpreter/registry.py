"""The registry of scale rules, and what a rule is given."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.config import ScalifyConfig
from jax_scalify.interpreter.corrections import Corrections, Pending
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.rescaling import to_plain
from jax_scalify.interpreter.traits import Traits, declare
from jax_scalify.interpreter.value import Value
from jax_scalify.scales.algebra import ONE, Scale
from jax_scalify.scales.table import ScaleTable, trace_with_table

Rule = Callable[..., Any]


class MissingRuleError(NotImplementedError):
    """A primitive met a scaled value, has no scale rule, and `missing_rule` is "error"."""


class DequantisedWarning(UserWarning):
    """A primitive was evaluated on dequantised values, so its result has scale 1."""


@dataclasses.dataclass(frozen=True, order=True)
class RuleInfo:
    """What the coverage page says of a registered primitive.

    Attributes:
        family: the row of the table of laws; "custom" for rules from outside this package.
        name: of the primitive.
        law: the first line of the rule's docstring.
        dequantises: why the rule gives up its operands' scales, or None if it keeps them.
    """

    family: str
    name: str
    law: str
    dequantises: str | None = None


_rules: dict[Primitive | str, Rule] = {}
_infos: dict[str, RuleInfo] = {}
_takes_values: set[Rule] = set()
_gives_values: set[Rule] = set()


def register_scale_rule(
    *primitives: Primitive | str,
    family: str | None = None,
    dequantises: str | None = None,
    elements: str | None = None,
    elementwise: bool = False,
    nonnegative: str | None = None,
    degree: float | str | None = None,
) -> Callable[[Rule], Rule]:
    """Register a scale rule for primitives, given as objects or, where JAX exports none, by name.

    A rule is called as `rule(ctx, *args, **params)` when an operand of the equation is scaled.
    Floating operands arrive as `ScaledArray` (`args[i].scale` supports `*`, `/`, integer `**` and
    `.maximum(other)`; `jnp.asarray` makes an array of it), others as plain arrays; `params` are the
    equation's. It returns a `ScaledArray`, or a plain array for outputs without a scale, or a
    sequence of them if the primitive has several results. An output's data must have the shape and
    dtype of the equation's output (`ctx.out_avals`), and its scale must be a power of two.
    `jsa.testing.check_scale_rule` tests a rule. Registering a primitive again replaces its rule.

    Args:
        primitives: `jax.extend.core.Primitive` objects or their names.
        family: of the rule, for the coverage page; by default the module that it is written in.
        dequantises: for a rule that computes with plain values, the reason: the primitive is
            reported, once, as one that loses its scales.
        elements: what the elements of the results are: "new", "summed", or the operand's own, which
            are "same", "cast", "rescaled", "negated", "moved", "picked" (extremes), "taken" (by
            index or order), "joined" (side by side) or "placed" (among those of others). Facts
            about the operands hold for these; by default nothing is known.
        elementwise: whether each element is computed from those in its place.
        nonnegative: "always", or "keeps" if no result is negative where no operand is.
        degree: the power of the operand with which the results grow, or the "sum", "product" or
            "quotient" of all operands'; for the operand's own elements it is known.

    Raises:
        TypeError: if `primitives` is empty or holds anything but primitives and names.
        ValueError: for an unknown `elements`, `nonnegative` or `degree`.

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
            _rules.pop(name, None)  # an object would hide behind an older rule of its name
            _rules[primitive] = rule
            where = family or own.replace("_", " ")
            _infos[name] = RuleInfo(where, name, law, dequantises)
            if traits != Traits():  # another rule is no other primitive
                declare(name, traits)
        return rule

    return register


def register_value_rule(*primitives: Primitive | str, elements: str) -> Callable[[Rule], Rule]:
    """Register a rule of our own that is given values, `Plain` ones too, instead of operands."""

    def register(rule: Rule) -> Rule:
        _takes_values.add(rule)
        return register_scale_rule(*primitives, elements=elements)(rule)

    return register


def register_body_rule(
    *primitives: Primitive | str, family: str | None = None
) -> Callable[[Rule], Rule]:
    """Register a rule of our own that interprets a body: it gets values and gives values back."""

    def register(rule: Rule) -> Rule:
        _takes_values.add(rule)
        _gives_values.add(rule)
        return register_scale_rule(*primitives, family=family, elements="new")(rule)

    return register


def takes_values(rule: Rule) -> bool:
    """Tell whether a rule is given values instead of operands."""
    return rule in _takes_values


def gives_values(rule: Rule) -> bool:
    """Tell whether a rule's results are values of which all is known."""
    return rule in _gives_values


def registered_rules() -> list[RuleInfo]:
    """Return what is registered, sorted by family and name."""
    return sorted(_infos.values())


def find_rule(primitive: Primitive) -> Rule | None:
    """Return the rule of a primitive, or None."""
    return _rules.get(primitive) or _rules.get(primitive.name)


def reason_to_dequantise(primitive: Primitive) -> str | None:
    """Return why the rule of a primitive gives up scales, or None if it does not."""
    info = _infos.get(primitive.name)
    return info.dequantises if info else None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RuleContext:
    """What a rule may know beside its operands.

    Attributes:
        primitive: the equation's primitive.
        in_avals, out_avals: shapes and dtypes of the equation's operands and results.
        inputs: facts about the operands (constants, non-negative values).
        table: the scales of this trace.
        config: the active `ScalifyConfig`.
        pending: the correction of the result that a calibration asks for. A rule need not look at
            it: it is applied to what the rule returns.
        wide: for each result, how many equations read it in float32; 0 if one needs its dtype.
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
        """Whether the first result may stay in float32, whatever its dtype is."""
        return bool(self.wide and self.wide[0])

    @property
    def out_dtype(self) -> Any:
        """Dtype of the first result."""
        return self.out_avals[0].dtype

    @property
    def holds_values(self) -> bool:
        """Whether the first result, of a wide dtype, is an array of its values."""
        return not dtypes.has_short_range(self.out_dtype)

    def unit(self, scale: Scale) -> Scale:
        """The unit of an array that is data at a scale or, of a wide dtype, values."""
        return ONE if self.holds_values else scale

    def array_of(self, x: Operand, scale: Scale, dtype: Any = None) -> Any:
        """Data at a scale or, of a wide dtype, values."""
        return x.value if self.holds_values else x.at_unit(scale, dtype)

    def on_values(self, scale: Scale, *args: Any, **params: Any) -> Operand:
        """Apply the primitive to values of wide dtypes; `scale` is what the law gives."""
        values = [x.value if isinstance(x, Operand) else x for x in args]
        return self.of_value(self.bind(*values, **params), scale)

    def of_value(self, value: Any, scale: Scale, unit: Scale = ONE) -> Operand:
        """The result of values `value * unit`, with the correction that waits."""
        scale = scale * Scale(self.pending.take())
        return Operand(dtypes.cast(value, self.out_dtype), scale, unit=unit)

    def bind(self, *args: Any, **params: Any) -> Any:
        """Apply the primitive itself."""
        return self.primitive.bind(*args, **self.primitive.get_bind_params(params))

    def dequantise(self, x: Any, dtype: Any = None) -> Any:
        """Return the plain values `data * scale`, in at least float32 unless told otherwise."""
        if not isinstance(x, ScaledArray):
            return x
        return to_plain(x, dtype or dtypes.compute_dtype(x.dtype))

    def trace(self, function: Callable[..., list[Any]], arrays: Sequence[Any]) -> Any:
        """Make a jaxpr of `function(table, *arrays)`, with a table for a trace of its own."""
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
        """Interpret a sub-jaxpr of the equation, in place or, in a new trace, with its table.

        `wide` says of its results what `RuleContext.wide` says of an equation's.
        """
        table = table or self.table
        return self.evaluate(closed_jaxpr, inputs, table, self.config, self.corrections, wide)


def describe(eqn: JaxprEqn, inputs: list[Value] | tuple[Value, ...]) -> str:
    """Name an equation for an error message: primitive, operands, and the user's line."""
    operands = ", ".join(
        f"{'scaled' if v.is_scaled else 'plain'} {jax.dtypes.canonicalize_dtype(v.dtype).name}"
        f"{list(v.shape)}"
        if not jnp.issubdtype(v.dtype, jax.dtypes.extended)
        else f"{v.dtype}{list(v.shape)}"
        for v in inputs
    )
    return f"primitive `{eqn.primitive.name}` of ({operands}) at {_compat.source_line(eqn)}"


_warned: set[str] = set()


def report_missing(eqn: JaxprEqn, inputs: list[Value], config: ScalifyConfig) -> None:
    """Raise, warn (once a primitive) or stay silent about a primitive without a rule."""
    if config.missing_rule == "error":
        raise MissingRuleError(
            f"There is no scale rule for {describe(eqn, inputs)}. Register one with "
            '`jsa.register_scale_rule`, or allow dequantising with missing_rule="warn".'
        )
    _warn_once(eqn, config, f"No scale rule for {describe(eqn, inputs)}")


def report_dequantised(
    eqn: JaxprEqn, inputs: list[Value], reason: str, config: ScalifyConfig
) -> None:
    """Warn (once a primitive) that a rule gives up the scales of its operands."""
    _warn_once(eqn, config, f"{reason} ({describe(eqn, inputs)})")


def _warn_once(eqn: JaxprEqn, config: ScalifyConfig, message: str) -> None:
    if config.missing_rule == "silent" or eqn.primitive.name in _warned:
        return
    _warned.add(eqn.primitive.name)
    warnings.warn(
        f"{message}: it is evaluated on dequantised values.", DequantisedWarning, stacklevel=2
    )
