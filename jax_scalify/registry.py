"""The registry of scale rules, and what a rule is given."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive

from jax_scalify import _compat, dtypes
from jax_scalify.array import ScaledArray
from jax_scalify.config import ScalifyConfig
from jax_scalify.pow2 import Scale, ScaleTable
from jax_scalify.values import Value

Rule = Callable[..., Any]


class MissingRuleError(NotImplementedError):
    """A primitive met a scaled value, has no scale rule, and `missing_rule` is "error"."""


class DequantisedWarning(UserWarning):
    """A primitive was evaluated on dequantised values, so its result has scale 1."""


_rules: dict[Primitive | str, Rule] = {}


def register_scale_rule(*primitives: Primitive | str) -> Callable[[Rule], Rule]:
    """Register a scale rule for primitives, given as objects or, where JAX exports none, by name.

    A rule is called as `rule(ctx, *args, **params)` when an operand of the equation is scaled.
    Floating operands arrive as `ScaledArray` (`args[i].scale` supports `*`, `/` and integer `**`,
    and is an array to any `jax.numpy` function), others as plain arrays; `params` are the
    equation's. It returns a `ScaledArray`, or a plain array for outputs without a scale, or a
    sequence of them if the primitive has several results. An output's data must have the shape and
    dtype of the equation's output (`ctx.out_avals`), and its scale must be a power of two.

    Raises:
        TypeError: if `primitives` is empty or holds anything but primitives and names.

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

    def register(rule: Rule) -> Rule:
        for primitive in primitives:
            _rules[primitive] = rule
        return rule

    return register


def find_rule(primitive: Primitive) -> Rule | None:
    """Return the rule of a primitive, or None."""
    return _rules.get(primitive) or _rules.get(primitive.name)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RuleContext:
    """What a rule may know beside its operands.

    Attributes:
        primitive: the equation's primitive.
        in_avals, out_avals: shapes and dtypes of the equation's operands and results.
        inputs: facts about the operands (constants, non-negative values).
        table: the scales of this trace.
        config: the active `ScalifyConfig`.
    """

    primitive: Primitive
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    inputs: tuple[Value, ...]
    table: ScaleTable
    config: ScalifyConfig
    eqn: JaxprEqn
    evaluate: Callable[[Any, list[Value], RuleContext], list[Value]]

    @property
    def out_dtype(self) -> Any:
        """Dtype of the first result."""
        return self.out_avals[0].dtype

    def bind(self, *args: Any, **params: Any) -> Any:
        """Apply the primitive itself."""
        return self.primitive.bind(*args, **params)

    def dequantise(self, x: Any, dtype: Any = None) -> Any:
        """Return the plain values `data * scale`, in at least float32 unless told otherwise."""
        if not isinstance(x, ScaledArray):
            return x
        return to_plain(x, dtype or dtypes.compute_dtype(x.dtype))

    def scale_jaxpr(self, closed_jaxpr: Any, inputs: list[Value]) -> list[Value]:
        """Interpret a sub-jaxpr of the equation with the same scales and configuration."""
        return self.evaluate(closed_jaxpr, inputs, self)


def to_plain(x: ScaledArray, dtype: Any) -> Any:
    """Return `data * scale` of an array inside the transform."""
    if isinstance(x.scale, Scale) and x.scale.is_one:
        return dtypes.cast(x.data, dtype)
    scale = x.scale.array if isinstance(x.scale, Scale) else x.scale
    return ScaledArray(x.data, scale).to_array(dtype)


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
    if config.missing_rule == "warn" and eqn.primitive.name not in _warned:
        _warned.add(eqn.primitive.name)
        warnings.warn(
            f"No scale rule for {describe(eqn, inputs)}: it is evaluated on dequantised values.",
            DequantisedWarning,
            stacklevel=2,
        )
