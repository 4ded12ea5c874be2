"""The registry of scale rules."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Primitive

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.base.filling import filled
from jax_scalify.base.jaxprs import sub_jaxprs
from jax_scalify.interpreter.context import RuleContext
from jax_scalify.interpreter.traits import Traits, declare
from jax_scalify.scales.algebra import ONE, Scale

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


# The keys are primitives, or names of primitives that JAX does not export.
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
    return functools.partial(_register, primitives, family, dequantises, traits)


# For rules of this package: each element of a result is computed from the elements at its index.
register_elementwise = functools.partial(register_scale_rule, elements="new", elementwise=True)


def register_value_rule(
    *primitives: Primitive | str, family: str | None = None, elements: str | None = None
) -> Callable[[Rule], Rule]:
    """Register a rule of this package that takes `Value` objects: plain values stay `Plain`.

    Without `elements`, the rule interprets a body and returns `Value` objects with facts.
    """
    forms = dict(takes_values=True, gives_values=elements is None)
    traits = Traits(elements=elements or "new")
    return functools.partial(_register, primitives, family, None, traits, **forms)


def _register(
    primitives: Sequence[Primitive | str],
    family: str | None,
    dequantises: str | None,
    traits: Traits,
    rule: Rule,
    **forms: bool,
) -> Rule:
    module = rule.__module__ or ""
    own = module.rpartition(".")[2] if module.startswith("jax_scalify.") else "custom"
    law = (rule.__doc__ or "").strip().partition("\n")[0]
    for primitive in primitives:
        name = primitive if isinstance(primitive, str) else primitive.name
        _rules.pop(name, None)  # `find_rule` would prefer an older rule for the name
        if isinstance(primitive, str):
            for key in [k for k in _rules if isinstance(k, Primitive) and k.name == name]:
                del _rules[key]
        where = family or own.replace("_", " ")
        _rules[primitive] = RuleInfo(where, name, law, dequantises, rule=rule, **forms)
        if traits != Traits():  # a rule without traits keeps the primitive's
            declare(name, traits)
    return rule


def registered_rules() -> list[RuleInfo]:
    """Return all registered rules, sorted by family and name."""
    return sorted({info.name: info for info in _rules.values()}.values())


def find_rule(primitive: Primitive) -> RuleInfo | None:
    """Return the entry of a primitive, or None."""
    return _rules.get(primitive) or _rules.get(primitive.name)


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

    Nothing is reported for integer results of wide operands. If the `reason` is None, there is no
    rule. With `missing_rule="error"`, this raises.
    """
    where = ctx.describe()
    if reason is None and ctx.config.missing_rule == "error":
        raise MissingRuleError(
            f"There is no scale rule for {where}. Register one with "
            '`jsa.register_scale_rule`, or allow dequantising with missing_rule="warn".'
        )
    if ctx.config.missing_rule == "silent" or ctx.primitive.name in _warned:
        return
    # The bits of a float32 value, for example: nothing is lost, and no scale starts anew.
    is_exact = all(dtypes.is_wide(v.dtype) for v in ctx.inputs if v.is_scaled)
    if reason and is_exact and not any(dtypes.is_scalable(aval.dtype) for aval in ctx.out_avals):
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
