"""Evaluate a jaxpr on scaled values, one equation after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray, may_be_powers_of_two
from jax_scalify.base import dtypes
from jax_scalify.base.filling import filled
from jax_scalify.base.jaxprs import is_var, sub_jaxprs
from jax_scalify.config import ScalifyConfig
from jax_scalify.interpreter.clips import as_clip
from jax_scalify.interpreter.constants import captured, promote
from jax_scalify.interpreter.context import RuleContext
from jax_scalify.interpreter.corrections import Corrections
from jax_scalify.interpreter.gates import given_of
from jax_scalify.interpreter.homes import home_of
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.registry import (
    RuleInfo,
    check_scale_shape,
    dequantising_rule,
    find_rule,
    report_dequantised,
)
from jax_scalify.interpreter.rescaling import as_operand
from jax_scalify.interpreter.survey import survey
from jax_scalify.interpreter.traits import traits_of
from jax_scalify.interpreter.uniform import uniform
from jax_scalify.interpreter.value import Plain, Value
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
        # JAX 0.12 keeps the 2 of `2 * x` as a `TypedNdArray`, which is no NumPy array.
        return env[atom] if is_var(atom) else Plain.of(np.asarray(atom.val, atom.aval.dtype))

    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        # A captured table of cosines, for example, is known while tracing: its RMS is its scale.
        env[var] = captured(const)
    surveyed = survey(jaxpr, tuple(leaving), given_of(inputs))
    # A function of a gate's source may turn out to be a gate in the backward pass.
    env.update(zip(jaxpr.invars, map(surveyed.gates.marked, jaxpr.invars, inputs), strict=True))
    for eqn in surveyed.equations:
        with _compat.equation_context(eqn):
            ctx = RuleContext(
                eqn=eqn,
                inputs=tuple(map(read, eqn.invars)),
                table=table,
                config=config,
                evaluate=evaluate,
                wide=tuple(surveyed.wide.get(v, 0) for v in eqn.outvars),
            )
            if hook is None:
                outputs = _equation(ctx)
            else:
                ctx = hook.before(ctx)
                outputs = hook.after(ctx, _equation(ctx), jaxpr)
            env.update(zip(eqn.outvars, map(surveyed.after, eqn.outvars, outputs), strict=True))
    return surveyed.gates.known_outside(jaxpr, inputs, [read(v) for v in jaxpr.outvars])


def _equation(ctx: RuleContext) -> list[Value]:
    """Return the results of an equation."""
    number = uniform(ctx.eqn, ctx.inputs)
    if number is not None:
        return [number]
    ctx = as_clip(ctx)
    info = _rule_for(ctx)
    if info is None:
        # Integers, for example, are computed as without `scalify`.
        return _checked(ctx, ctx.bind(*(v.whole() for v in ctx.inputs), **ctx.eqn.params))
    # In `2 * x` our elementwise rules get the 2 as a 0-d operand, so that no array of twos is made.
    # If all operands are numbers, they are broadcast to their shapes. A user's primitive may take
    # operands of one shape only.
    is_own = (info.rule.__module__ or "").startswith("jax_scalify.")
    gets_numbers = is_own and traits_of(ctx.primitive.name).elementwise
    full = not gets_numbers or all(v.number is not None for v in ctx.inputs)
    if not full:
        ctx = _with_result_shape(ctx)
    arguments: Sequence[Any] = ctx.inputs
    if not info.takes_values:
        arguments = [
            promote(v, ctx.table, full) if v.is_scalable else v.whole() for v in ctx.inputs
        ]
    try:
        out = info.rule(ctx, *arguments, **ctx.eqn.params)
    except Exception as error:  # the note names the innermost equation
        if not getattr(error, "_jax_scalify_noted", False):
            error.add_note(f"jax_scalify: while applying the scale rule of {ctx.describe()}")
            error._jax_scalify_noted = True  # type: ignore[attr-defined]
        raise
    return out if info.gives_values else _checked(ctx, out)


def _rule_for(ctx: RuleContext) -> RuleInfo | None:
    """Return the rule to apply; None if the equation is evaluated unchanged, on plain values."""
    info = find_rule(ctx.primitive)
    if not any(v.is_scaled for v in ctx.inputs):
        return info if info is not None and _makes_scaled(info, ctx) else None
    if info is None or info.dequantises is not None:
        report_dequantised(ctx, info.dequantises if info else None)
    return info or _WITHOUT_RULE


def _makes_scaled(info: RuleInfo, ctx: RuleContext) -> bool:
    """Return whether an equation of plain values may have a scaled result."""
    # In the body of a loop over plain arrays, a constant or `jsa.set_scaling` may give a scale.
    if info.takes_values and sub_jaxprs(ctx.eqn.params):
        return True
    if not any(dtypes.is_scalable(aval.dtype) for aval in ctx.out_avals):
        return False
    floating = [v for v in ctx.inputs if v.is_scalable]
    # Integers and bools that are cast to float, such as one-hots, get the scale 1.
    becomes_float = ctx.primitive.name == "convert_element_type" and not floating
    # Numbers are scaled from the start: the 1/N of a mean belongs in the scale of every gradient.
    return becomes_float or any(v.number is not None for v in floating)


def _with_result_shape(ctx: RuleContext) -> RuleContext:
    """Broadcast one array to the shape of the result, if no array has this shape.

    Numbers stay 0-d: in `full((2, 3), 3.0) * x` with `x` of shape `(1, 3)`, the rule gets the
    number 3.0 and `x` broadcast to `(2, 3)`.
    """
    aval = ctx.out_avals[0]
    arrays = [v for v in ctx.inputs if v.number is None]
    floating = [v for v in arrays if v.is_scalable]
    if not floating or any(v.shape == aval.shape for v in arrays):
        return ctx
    value = floating[0]
    if isinstance(value, Operand):
        wide = value.moved(filled(value.source, aval), value.scale)
    else:
        wide = dataclasses.replace(value, shape=aval.shape, array=filled(value.array, aval))
    return dataclasses.replace(ctx, inputs=tuple(wide if v is value else v for v in ctx.inputs))


def _checked(ctx: RuleContext, out: Any) -> list[Value]:
    """Return the results of a rule as values with facts. Their types must be the equation's."""
    outputs = list(out) if isinstance(out, (list, tuple)) else [out]
    if len(outputs) != len(ctx.out_avals):
        raise TypeError(
            f"The scale rule of {ctx.describe()} returned {len(outputs)} results, expected "
            f"{len(ctx.out_avals)}."
        )
    return [
        x if isinstance(x, Plain) else _checked_result(ctx, x, aval)
        for x, aval in zip(outputs, ctx.out_avals, strict=True)
    ]


def _checked_result(ctx: RuleContext, x: Any, aval: Any) -> Value:
    if isinstance(x, ScaledArray):
        if not isinstance(x, Operand):
            _check_scale(ctx, x, aval)
        x = as_operand(x, ctx.table)
        # A rule may return its operand, as the rule of `reduce_precision` does. The operand's
        # facts are then replaced by those of this equation.
        home, returns = home_of(ctx.eqn, ctx.inputs, x)
        known = dict(facts=ctx.facts, depth=_depth(ctx, x), number=None)
        x = x.known(home=home, returns=returns, **known)
    else:
        x = Plain.of(x, facts=ctx.facts)
    if x.shape != aval.shape or x.dtype != aval.dtype:
        raise TypeError(
            f"The scale rule of {ctx.describe()} returned {x.dtype}{x.shape}, "
            f"expected {aval.dtype}{aval.shape}."
        )
    # A narrow source must be the data: the value 2**20 itself is infinite in float16.
    if x.is_scaled and not x.holds_data and dtypes.is_narrow(x.dtype):
        raise TypeError(f"The scale rule of {ctx.describe()} returned data at another scale.")
    return x


def _check_scale(ctx: RuleContext, x: ScaledArray, aval: Any) -> None:
    """Check the scale that a user's rule returned."""
    if np.shape(x.data) == aval.shape:
        check_scale_shape(ctx.describe(), x.scale, aval.shape)
    if not may_be_powers_of_two(x.scale):
        raise ValueError(
            f"The scale rule of {ctx.describe()} returned a scale that is no power "
            f"of two, {x.scale!r}. Round it down, and multiply the data by the rest."
        )


def _depth(ctx: RuleContext, out: Operand) -> int:
    """Return the number of alignments that XLA may fuse into each kernel that reads a result.

    Sums of wide dtypes at static scales do not count, because they need no alignment.
    """
    traits = traits_of(ctx.primitive.name)
    # A chain consists of elementwise equations and views. It ends, for example, at a matmul.
    if not out.shape or not (traits.elementwise or traits.is_view):
        return 0
    # Sums and choices bring their operands to one scale, element by element.
    aligns = traits.elementwise and (traits.degree == "sum" or traits.elements == "placed")
    needs_none = out.scale.is_static and dtypes.is_wide(out.dtype)
    return max(v.depth for v in ctx.inputs) + (aligns and not needs_none)
