"""The registry of scale rules, and the context that a rule is called with."""

from __future__ import annotations

import dataclasses
import functools
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
from jax_scalify.base.filling import filled
from jax_scalify.base.jaxprs import sub_jaxprs
from jax_scalify.config import ScalifyConfig
from jax_scalify.interpreter.facts import facts_of
from jax_scalify.interpreter.operand import Facts, Operand
from jax_scalify.interpreter.traits import Traits, declare
from jax_scalify.interpreter.value import Value
from jax_scalify.scales.algebra import GIVEN_EXTENT, ONE, Scale
from jax_scalify.scales.table import ScaleTable, trace_with_table

Rule = Callable[..., Any]


class MissingRuleError(NotImplementedError):
    """A primitive with a scaled operand has no scale rule, and `missing_rule` is "error"."""


class DequantisedWarning(UserWarning):
    """A primitive was evaluated on dequantised values. Its results have the scale 1."""


@dataclasses.dataclass(frozen=True, order=True)
class RuleInfo:
    """The entry of a primitive in the registry, and on the coverage page.

    Attributes:
        family: the section of the page; "custom" for rules from outside this package.
        name: the name of the primitive.
        law: the first line of the rule's docstring.
        dequantises: why the rule dequantises its operands; None if it keeps their scales.
        rule: the rule.
        takes_values: whether the rule gets `Value` objects: plain values stay `Plain`.
        gives_values: whether it returns `Value` objects, complete with facts.
    """

    family: str
    name: str
    law: str
    dequantises: str | None = None
    rule: Rule = dataclasses.field(compare=False, kw_only=True)
    takes_values: bool = False
    gives_values: bool = False

    @property
    def takes_numbers(self) -> bool:
        """Whether an elementwise rule takes 0-d numbers beside arrays: rules of this package do.

        A user's primitive may take operands of one shape only.
        """
        return (self.rule.__module__ or "").startswith("jax_scalify.")


_rules: dict[Primitive | str, RuleInfo] = {}


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

    return _register(primitives, family, dequantises, traits)


def register_value_rule(
    *primitives: Primitive | str, family: str | None = None, elements: str | None = None
) -> Callable[[Rule], Rule]:
    """Register a rule of this package that takes `Value` objects: plain values stay `Plain`.

    Without `elements`, the rule interprets a body and returns `Value` objects with facts.
    """
    forms = dict(takes_values=True, gives_values=elements is None)
    return _register(primitives, family, None, Traits(elements=elements or "new"), **forms)


def _register(
    primitives: Sequence[Primitive | str],
    family: str | None,
    dequantises: str | None,
    traits: Traits,
    **forms: bool,
) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        module = rule.__module__ or ""
        own = module.rpartition(".")[2] if module.startswith("jax_scalify.") else "custom"
        law = (rule.__doc__ or "").strip().partition("\n")[0]
        for primitive in primitives:
            name = primitive if isinstance(primitive, str) else primitive.name
            _rules.pop(name, None)  # `find_rule` would prefer an older rule for the name
            where = family or own.replace("_", " ")
            _rules[primitive] = RuleInfo(where, name, law, dequantises, rule=rule, **forms)
            if traits != Traits():  # a rule without traits keeps the primitive's
                declare(name, traits)
        return rule

    return register


def registered_rules() -> list[RuleInfo]:
    """Return all registered rules, sorted by family and name."""
    return sorted({info.name: info for info in _rules.values()}.values())


def find_rule(primitive: Primitive) -> RuleInfo | None:
    """Return the entry of a primitive, or None."""
    return _rules.get(primitive) or _rules.get(primitive.name)


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

    def unit(self, scale: Scale) -> Scale:
        """Return the unit of a result's array: `scale`, or 1 in a wide dtype."""
        return ONE if self.holds_values else scale

    def array_of(self, x: Operand, scale: Scale, dtype: Any = None) -> Any:
        """Return the data of `x` at a scale, or its values if the result has a wide dtype."""
        return x.value if self.holds_values else x.at_unit(scale, dtype)

    def on_values(self, scale: Scale, *args: Any, **params: Any) -> Operand:
        """Apply the primitive to values. `scale` is the scale that the law gives."""
        values = [x.value if isinstance(x, Operand) else x for x in args]
        return self.of_value(self.bind(*values, **params), scale)

    def of_value(self, value: Any, scale: Scale, unit: Scale = ONE) -> Operand:
        """Return the result with the values `value * unit`. The pending correction is applied."""
        scale = scale * Scale(self.pending.take())
        return Operand(dtypes.cast(value, self.out_dtype), scale, unit=unit)

    def bind(self, *args: Any, **params: Any) -> Any:
        """Apply the primitive itself."""
        return self.primitive.bind(*args, **self.primitive.get_bind_params(params))

    def dequantise(self, x: Any, dtype: Any = None) -> Any:
        """Return the plain values `data * scale`, in at least float32 unless told otherwise."""
        if not isinstance(x, ScaledArray):
            return x
        dtype = dtype or dtypes.compute_dtype(x.dtype)
        if not isinstance(x.scale, Scale):
            return x.to_array(dtype)
        x = Operand.of(x)
        if x.unit.is_one or dtype != x.dtype:
            # A single given scale is applied at once. A product of two may leave float32's range.
            return x.at_unit(ONE, dtype, trusted=2 * GIVEN_EXTENT - 1)
        return x.value

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
        return self.evaluate(closed_jaxpr, inputs, table, self.config, self.hook, wide)

    def describe(self) -> str:
        """Describe the equation for an error message: primitive, operands, and the user's line."""
        operands = ", ".join(
            f"{'scaled' if v.is_scaled else 'plain'} {jax.dtypes.canonicalize_dtype(v.dtype).name}"
            f"{list(v.shape)}"
            if not jnp.issubdtype(v.dtype, jax.dtypes.extended)
            else f"{v.dtype}{list(v.shape)}"
            for v in self.inputs
        )
        where = _compat.source_line(self.eqn)
        return f"primitive `{self.primitive.name}` of ({operands}) at {where}"


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


def report_dequantised(ctx: RuleContext, reason: str | None) -> None:
    """Report, once for each primitive, that its rule dequantises operands, or that it has no rule.

    If the `reason` is None, there is no rule. With `missing_rule="error"`, this raises.
    """
    where = ctx.describe()
    if reason is None and ctx.config.missing_rule == "error":
        raise MissingRuleError(
            f"There is no scale rule for {where}. Register one with "
            '`jsa.register_scale_rule`, or allow dequantising with missing_rule="warn".'
        )
    if ctx.config.missing_rule == "silent" or ctx.primitive.name in _warned:
        return
    _warned.add(ctx.primitive.name)
    found = f"No scale rule for {where}" if reason is None else f"{reason} ({where})"
    warnings.warn(
        f"{found}: it is evaluated on dequantised values. The result is right where the dtype "
        "holds the values themselves, and its scale starts anew.",
        DequantisedWarning,
        stacklevel=2,
    )


def evaluate_plain(
    ctx: RuleContext, args: tuple[Any, ...], params: dict[str, Any], wide: bool
) -> list:
    """Bind a primitive to plain values, in at least float32 if `wide`. Results have scale 1."""
    plain = []
    for x, aval in zip(args, ctx.in_avals, strict=True):
        if dtypes.is_scalable(aval.dtype):
            dtype = dtypes.compute_dtype(aval.dtype) if wide else aval.dtype
            x = filled(dtypes.cast(ctx.dequantise(x, dtype), dtype), aval)
        plain.append(x)
    out = ctx.bind(*plain, **params)
    out = out if ctx.primitive.multiple_results else [out]
    return [
        ScaledArray(dtypes.cast(o, aval.dtype), ONE) if dtypes.is_scalable(aval.dtype) else o
        for o, aval in zip(out, ctx.out_avals, strict=True)
    ]


def dequantising_rule(ctx: RuleContext, *args: Any, **params: Any) -> list[Any]:
    """`scale = 1`; evaluated on dequantised values, in at least float32 if the primitive can."""
    if not sub_jaxprs(params):  # a jaxpr only takes the dtypes that it was traced with
        try:
            return evaluate_plain(ctx, args, params, wide=True)
        except TypeError:  # a parameter may fix a dtype too
            pass
    return evaluate_plain(ctx, args, params, wide=False)
