"""Averages that stand still in 16 bits: found in a jaxpr, and said."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_scalify import _compat
from jax_scalify.base.jaxprs import is_var, makers, sub_jaxprs

_warned: set[str] = set()


def report_lost_averages(jaxpr: Any) -> None:
    """Warn, once a line, of `step * new + (1 - step) * old` in a dtype that loses such a step.

    The numbers of float16 beside 1 are `eps = 2**-10` apart. Two kinds of averages are found:

    * `optax.incremental_update`, by the name in an equation's traceback. With steps of at most
      `64 * eps` differences of a hundredth are lost. Steps that are not known are reported too.
    * what looks like an average: the step is a number, `old` an argument of the function (or of
      the body of its loop), and the sum a result. Only steps of at most `eps` are reported, which
      lose all that differs by less than half. Larger ones may be meant: a BatchNorm averages
      noise, which carries it on.
    """
    for average in _averages(jaxpr):
        if average.line in _warned:
            continue
        _warned.add(average.line)
        step = "small steps are" if average.step is None else f"a step of {average.step:.2g} is"
        what, remedy = "An average", "`jsa.optim.ema`, and `jsa.optim.low_precision` for moments"
        if average.is_of_optax:
            what = "`optax.incremental_update`"
            remedy = "`jsa.optim.incremental_update` or `jsa.optim.ema`"
        warnings.warn(
            f"{what} at {average.line}: {step} lost in {average.dtype.name}, "
            f"whose numbers lie further apart. Use {remedy}: they round stochastically.",
            stacklevel=3,
        )


class _Average(NamedTuple):
    dtype: Any
    step: float | None  # None if it is not known
    is_of_optax: bool
    line: str


def _averages(jaxpr: Any, around: tuple[Any, ...] = ()) -> Iterator[_Average]:
    """The averages whose steps are lost, of a jaxpr and of all that it holds."""
    made_by: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.add_p and _is_short(eqn.outvars[0].aval):
            made_by = made_by or makers(jaxpr)
            dtype, is_of_optax = eqn.outvars[0].aval.dtype, _is_of_optax(eqn)
            step = _smaller_factor(eqn, made_by) if is_of_optax else _step(eqn, made_by, jaxpr)
            eps = float(jnp.finfo(dtype).eps)
            if is_of_optax if step is None else step <= (64 * eps if is_of_optax else eps):
                line = _compat.own_line(eqn, *reversed(around))
                line = line or _compat.calling_line() or "an unknown line"
                yield _Average(dtype, step, is_of_optax, line)
        for sub in sub_jaxprs(eqn.params):
            yield from _averages(sub, (*around, eqn))


def _is_short(aval: Any) -> bool:
    """Return whether a value is an array of few bits."""
    is_float = jnp.issubdtype(aval.dtype, jnp.floating)
    return aval.ndim > 0 and is_float and jnp.finfo(aval.dtype).bits < 32


def _is_of_optax(eqn: Any) -> bool:
    return _compat.is_called_by(eqn, "optax", "incremental_update")


def _smaller_factor(total: Any, made_by: dict[Any, Any]) -> float | None:
    """The smaller of the factors of the terms of a sum; None if none is a number."""
    factors = [_multiple(term, made_by)[0] for term in total.invars]
    return min((f for f in factors if f is not None), default=None)


def _step(total: Any, made_by: dict[Any, Any], jaxpr: Any) -> float | None:
    """The step of a sum that is a result of a jaxpr, and an average with an argument of it.

    Either `step * new + kept * old`, and `step + kept` is 1 but for a rounding, or
    `step * (new - old) + old`.
    """
    var = total.outvars[0]
    if not any(var is result for result in jaxpr.outvars):
        return None
    for term, rest in (total.invars, total.invars[::-1]):
        step, new = _multiple(term, made_by)
        kept, old = _multiple(rest, made_by)
        if step is None or not 0 < step <= 0.5 or new.aval.shape != var.aval.shape:
            continue
        if kept is None:
            old, change = rest, made_by.get(new)
            if change is None or change.primitive is not lax.sub_p:
                continue
            is_average = change.invars[1] is old
        else:
            is_average = abs(step + kept - 1) <= float(jnp.finfo(var.aval.dtype).eps)
        if is_average and any(old is argument for argument in jaxpr.invars):
            return step
    return None


def _multiple(atom: Any, made_by: dict[Any, Any]) -> tuple[float | None, Any]:
    """The number and the variable of which an atom is the product."""
    eqn = made_by.get(atom) if is_var(atom) else None
    if eqn is not None and eqn.primitive is lax.mul_p:
        for number, value in (eqn.invars, eqn.invars[::-1]):
            if not is_var(number) and is_var(value) and not number.aval.ndim:
                return float(number.val), value
    return None, None
