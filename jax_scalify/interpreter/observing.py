"""Equations that show `jsa.numerics` each value of a scalified function, with its scale.

While a report is made, the transform adds an `observe` equation after each interpreted equation of
the user. It is the identity on the results, and also takes the operands and all scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_scalify import _compat
from jax_scalify.base.jaxprs import function_of_jax_nn, makers, sub_jaxprs
from jax_scalify.interpreter.context import RuleContext
from jax_scalify.interpreter.corrections import Corrections, rounds
from jax_scalify.interpreter.operand import Operand
from jax_scalify.interpreter.value import Value
from jax_scalify.primitives.custom_scale import custom_scale_p
from jax_scalify.primitives.definitions import define

# The name of the jitted function that holds the interpreted equations.
CALL_NAME = "jax_scalify_observed"

# `with is_observing(True)`, `scalify` adds `observe` equations, and `is_observing.value` is True.
# The value of a `jax.make_user_context` is part of every `jax.jit` cache key.
is_observing = jax.make_user_context(default_value=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Observed:
    """An equation of the user, and what the operands of its `observe` equation are.

    Attributes:
        eqn: the equation.
        results: the positions of the observed results among the equation's results.
        scaled: whether each observed result, and then each operand, has a scale. In the operands of
            `observe`, a scale follows its array.
        makers: for each variable of the same jaxpr, the equation that computes it.
        names: the names of the equation's results in a calibration.
        line: the line of the user's code that makes the equation or calls a function that makes it.
        function: the function of `jax.nn` that the equation is part of; otherwise empty.
    """

    eqn: Any
    results: tuple[int, ...]
    scaled: tuple[bool, ...]
    makers: Mapping[Any, Any]
    names: tuple[str, ...] = ()
    line: str = ""
    function: str = ""

    @property
    def is_rounding(self) -> bool:
        """Whether it is a rounding cast with a name. Its operand shows what rounding loses."""
        return bool(self.names) and rounds(self.eqn)

    def pairs(self, arrays: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return results and operands as pairs of data and scale, or data and None."""
        rest = iter(arrays)
        return [(next(rest), next(rest) if scaled else None) for scaled in self.scaled]


def _identity(*arrays: Any, observed: Observed) -> list[Any]:
    return [data for data, _ in observed.pairs(arrays)[: len(observed.results)]]


def _jvp(primitive: Primitive, primals: Any, tangents: Any, *, observed: Observed) -> Any:
    moved = [ad.instantiate_zeros(t) for t in _identity(*tangents, observed=observed)]
    return primitive.bind(*primals, observed=observed), moved


def _batch(primitive: Primitive, args: Any, dims: Any, *, observed: Observed) -> Any:
    return primitive.bind(*args, observed=observed), _identity(*dims, observed=observed)


observe_p = define("observe", _identity, _identity, jvp=_jvp, batch=_batch, multiple_results=True)


class Observer(Corrections):
    """The hook of `evaluate` that also shows the results of each equation to `jsa.numerics`."""

    def after(self, ctx: RuleContext, outputs: list[Value], jaxpr: Any) -> list[Value]:
        """Return an equation's results after corrections and `observe`."""
        eqn, outputs = ctx.eqn, super().after(ctx, outputs, jaxpr)
        results = tuple(
            i
            for i, v in enumerate(outputs)
            if v.is_scaled or (v.is_scalable and v.array is not None and v.constant is None)
        )
        # A call or loop is observed inside its body. A `custom_scale` rule is observed as a whole.
        inside = eqn.primitive is not custom_scale_p and sub_jaxprs(eqn.params)
        if inside or not results:
            return outputs
        pairs = [
            (v.data, v.scale.array)
            if isinstance(v, Operand)
            else (v.number if v.array is None else v.array, None)
            for v in (*(outputs[i] for i in results), *ctx.inputs)
        ]
        around = _compat.enclosing()  # includes the equation itself
        observed = Observed(
            eqn,
            results,
            scaled=tuple(scale is not None for _, scale in pairs),
            makers=makers(jaxpr),
            names=self.place(eqn).names,
            line=_compat.own_line(*reversed(around)),
            function=function_of_jax_nn(*around),
        )
        arrays = [jnp.asarray(a) for pair in pairs for a in pair if a is not None]
        values = list(outputs)
        for i, data in zip(results, observe_p.bind(*arrays, observed=observed), strict=True):
            old = outputs[i]
            if isinstance(old, Operand):
                values[i] = old.as_pair(data, old.scale)
            else:
                number = data if old.number is not None else None
                values[i] = dataclasses.replace(old, array=data, number=number)
        return values


def hook_of(corrections: Corrections | None) -> Corrections | None:
    """Return the hook of `evaluate` for corrections, which observes while a report is made."""
    if not is_observing.value:
        return corrections
    return Observer(corrections.places, corrections.choose) if corrections else Observer({})


def as_call(function: Callable) -> Callable:
    """Return the function jitted under `CALL_NAME`, which marks its equations as interpreted."""

    def call(*arrays: Any) -> Any:
        return function(*arrays)

    call.__name__ = CALL_NAME
    return jax.jit(call)
