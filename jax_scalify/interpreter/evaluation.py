"""Evaluate a jaxpr on scaled values, one equation after the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray, may_be_powers_of_two
from jax_scalify.base import dtypes
from jax_scalify.base.filling import filled
from jax_scalify.base.jaxprs import is_var, sub_jaxprs
from jax_scalify.config import ScalifyConfig
from jax_scalify.interpreter.constants import captured, promote
from jax_scalify.interpreter.corrections import Corrections
from jax_scalify.interpreter.dequantising import dequantising_rule
from jax_scalify.interpreter.facts import facts_of
from jax_scalify.interpreter.homes import home_of
from jax_scalify.interpreter.operand import NOTHING, Facts, Operand
from jax_scalify.interpreter.registry import (
    RuleContext,
    RuleInfo,
    check_scale_shape,
    describe,
    find_rule,
    report_dequantised,
)
from jax_scalify.interpreter.rescaling import as_operand
from jax_scalify.interpreter.survey import survey
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.uniform import uniform
from jax_scalify.interpreter.value import Plain, Value
from jax_scalify.scales.algebra import Scale
from jax_scalify.scales.table import ScaleTable

_WITHOUT_RULE = RuleInfo("", "", "", rule=dequantising_rule)


def evaluate(
    closed: Any,
    inputs: Sequence[Value],
    table: ScaleTable,
    config: ScalifyConfig,
    hook: Corrections | None = None,
    leaving: Sequence[int] = (),
) -> list[Value]:
    """Evaluate a closed jaxpr on values. Return the values of its results.

    Before and after each equation, `hook` corrects and observes values. `leaving` says which
    results may stay in float32, in the form of `RuleContext.wide`.
    """
    jaxpr = closed.jaxpr
    env: dict[Any, Value] = {}

    def read(atom: Any) -> Value:
        return env[atom] if is_var(atom) else Plain.of(np.asarray(atom.val, atom.aval.dtype))

    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        env[var] = captured(const)
    env.update(zip(jaxpr.invars, inputs, strict=True))
    surveyed = survey(jaxpr, leaving)
    for eqn in surveyed.equations:
        with _compat.equation_context(eqn):
            operands = [read(v) for v in eqn.invars]
            wide = tuple(surveyed.wide.get(v, 0) for v in eqn.outvars)
            known = dict(table=table, config=config, evaluate=evaluate, wide=wide)
            if hook is None:
                outputs = _equation(eqn, operands, known)
            else:
                operands, pending = hook.before(eqn, operands)
                known |= dict(hook=hook.inside(eqn), pending=pending)
                outputs = _equation(eqn, operands, known)
                outputs = hook.after(eqn, operands, outputs, pending, jaxpr)
            env.update(zip(eqn.outvars, map(surveyed.after, eqn.outvars, outputs), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[Value], known: dict[str, Any]) -> list[Value]:
    """Return the results of an equation. `known` are fields of its `RuleContext`."""
    table = known["table"]
    number = uniform(eqn, inputs)
    if number is not None:
        return [number]
    info = _rule_for(eqn, inputs, known["config"])
    if info is None:
        params = eqn.primitive.get_bind_params(eqn.params)
        out = eqn.primitive.bind(*(v.whole() for v in inputs), **params)
        return _checked(eqn, out, inputs, table, facts_of(eqn, inputs))
    # Our elementwise rules get a number as a 0-d operand, unless all operands are numbers.
    gets_numbers = traits_of(eqn.primitive.name).elementwise and info.takes_numbers
    full = not gets_numbers or all(v.number is not None for v in inputs)
    if not full:
        inputs = _with_result_shape(eqn, inputs)
    facts = NOTHING if info.gives_values else facts_of(eqn, inputs)
    ctx = RuleContext(
        primitive=eqn.primitive,
        in_avals=tuple(
            var.aval if v.shape == var.aval.shape else var.aval.update(shape=v.shape)
            for var, v in zip(eqn.invars, inputs, strict=True)
        ),
        out_avals=tuple(v.aval for v in eqn.outvars),
        inputs=tuple(inputs),
        eqn=eqn,
        facts=facts,
        **known,
    )
    arguments: list[Any] = inputs
    if not info.takes_values:
        arguments = [promote(v, table, full) if v.is_scalable else v.whole() for v in inputs]
    out = _apply(info, ctx, arguments)
    return out if info.gives_values else _checked(eqn, out, inputs, table, facts)


def _rule_for(eqn: Any, inputs: list[Value], config: ScalifyConfig) -> RuleInfo | None:
    """Return the rule to apply; None if the equation is evaluated unchanged, on plain values."""
    info = find_rule(eqn.primitive)
    if not any(v.is_scaled for v in inputs):
        return info if info is not None and _makes_scaled(info, eqn, inputs) else None
    if info is None or info.dequantises is not None:
        report_dequantised(eqn, inputs, info.dequantises if info else None, config)
    return info or _WITHOUT_RULE


def _makes_scaled(info: RuleInfo, eqn: Any, inputs: list[Value]) -> bool:
    """Return whether an equation of plain values may have a scaled result."""
    if info.takes_values and sub_jaxprs(eqn.params):
        return True
    if not any(dtypes.is_scalable(v.aval.dtype) for v in eqn.outvars):
        return False
    floating = [v for v in inputs if v.is_scalable]
    # Integers and bools that are cast to float, such as one-hots, get the scale 1.
    becomes_float = eqn.primitive.name == "convert_element_type" and not floating
    # Numbers are scaled from the start: the 1/N of a mean belongs in the scale of every gradient.
    return becomes_float or any(v.number is not None for v in floating)


def _apply(info: RuleInfo, ctx: RuleContext, args: list[Any]) -> Any:
    """Call a rule. If it raises, a note on the error names the innermost equation."""
    try:
        return info.rule(ctx, *args, **ctx.eqn.params)
    except Exception as error:
        if not getattr(error, "_jax_scalify_noted", False):
            where = describe(ctx.eqn, ctx.inputs)
            error.add_note(f"jax_scalify: while applying the scale rule of {where}")
            error._jax_scalify_noted = True  # type: ignore[attr-defined]
        raise


def _with_result_shape(eqn: Any, inputs: list[Value]) -> list[Value]:
    """Broadcast one array to the shape of the result, if no array has this shape.

    Numbers stay 0-d: in `full((2, 3), 3.0) * x` with `x` of shape `(1, 3)`, the rule gets the
    number 3.0 and `x` broadcast to `(2, 3)`.
    """
    aval = eqn.outvars[0].aval
    shape = aval.shape
    arrays = [i for i, v in enumerate(inputs) if v.number is None and v.is_scalable]
    if not arrays or any(v.number is None and v.shape == shape for v in inputs):
        return inputs
    value = inputs[arrays[0]]
    fill = functools.partial(filled, like=aval)
    if isinstance(value, Operand):
        wide = value.moved(fill(value.source), value.scale)
    else:
        wide = dataclasses.replace(value, shape=shape, array=fill(value.array))
    return [wide if v is value else v for v in inputs]


def _checked(
    eqn: Any, out: Any, inputs: list[Value], table: ScaleTable, facts: Facts
) -> list[Value]:
    """Return the results of a rule as values with facts. Their types must be the equation's."""
    outputs = list(out) if isinstance(out, (list, tuple)) else [out]
    if len(outputs) != len(eqn.outvars):
        raise TypeError(
            f"The scale rule of {describe(eqn, inputs)} returned {len(outputs)} results, expected "
            f"{len(eqn.outvars)}."
        )
    values: list[Value] = []
    for o, var in zip(outputs, eqn.outvars, strict=True):
        if isinstance(o, ScaledArray):
            if not isinstance(o, Operand):
                _check_scale(eqn, inputs, o, var.aval)
            o = as_operand(o, table)
            home, returns = home_of(eqn, inputs, o)
            depth = _depth(eqn, inputs, o)
            o = o.known(number=None, facts=facts, depth=depth, home=home, returns=returns)
            _check_type(eqn, o, var.aval, inputs)
        elif not isinstance(o, Plain):
            o = Plain.of(o, facts=facts)
            _check_type(eqn, o, var.aval, inputs)
        values.append(o)
    return values


def _depth(eqn: Any, inputs: Sequence[Value], out: Operand) -> int:
    """Return the number of alignments that XLA may fuse into each kernel that reads a result.

    Sums of wide dtypes at static scales do not count, because they need no alignment.
    """
    traits = traits_of(eqn.primitive.name)
    if not out.shape or not (traits.elementwise or traits.is_view):
        return 0
    aligns = traits.aligns and not (out.scale.is_static and dtypes.is_wide(out.dtype))
    return max(v.depth for v in inputs) + aligns


def _check_scale(eqn: Any, inputs: list[Value], x: ScaledArray, aval: Any) -> None:
    """Check the scale that a user's rule returned."""
    if np.shape(x.data) == aval.shape:
        check_scale_shape(describe(eqn, inputs), x.scale, aval.shape)
    if not isinstance(x.scale, Scale) and not may_be_powers_of_two(x.scale):
        raise ValueError(
            f"The scale rule of {describe(eqn, inputs)} returned a scale that is no power "
            f"of two, {x.scale!r}. Round it down, and multiply the data by the rest."
        )


def _check_type(eqn: Any, value: Value, aval: Any, inputs: list[Value]) -> None:
    if value.shape != aval.shape or value.dtype != aval.dtype:
        raise TypeError(
            f"The scale rule of {describe(eqn, inputs)} returned {value.dtype}{value.shape}, "
            f"expected {aval.dtype}{aval.shape}."
        )
    if isinstance(value, Operand) and not value.holds_data and dtypes.is_narrow(value.dtype):
        raise TypeError(
            f"The scale rule of {describe(eqn, inputs)} returned data at another scale."
        )
