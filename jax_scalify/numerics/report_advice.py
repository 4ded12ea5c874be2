"""What a report suggests, in sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_scalify import nn
from jax_scalify.numerics.host_statistics import as_formats
from jax_scalify.numerics.report import Report
from jax_scalify.numerics.rows import Row

_SHARE = 0.01  # of the elements, that is worth a word
_OCTAVES = 3  # that the RMS of data may be away from 1
_NAMED = 6  # places of the same cause
# Functions of `jsa.nn` whose scales are better than those of what they are made of.
_BETTER = {
    "exp": "jsa.nn.softmax",
    "logistic": "jsa.nn.sigmoid or jsa.nn.silu",
    "erf": "jsa.nn.gelu",
    "tanh": "jsa.nn.tanh or jsa.nn.gelu",
    "rsqrt": "jsa.nn.layer_norm or jsa.nn.rms_norm",
    "gather": "jsa.nn.embed",
}


def suggest(report: Report, dtype: Any = None, *, limit: int = 20) -> list[str]:
    """Say which tensors are badly scaled for a dtype, and what to do about each.

    What a scalified optimizer computes in more bits than those of `dtype` is left out: it is stored
    in few, and seen then. Tensors of one module, pass and line are taken together, and so are
    places of one cause: of those that have no scale, say, the worst is described, and the others
    are named behind it. Numbers that are not finite come first, in the order of computation, then
    what loses most. Nobody edits a function of `jax.nn`: for a value inside one, the advice is on
    its argument or its result, or names the function of `jsa.nn`.

    Args:
        report: what `report` returned.
        dtype: to fit into; by default the first of the report's `formats`, or else each value's
            own dtype.
        limit: of the number of places that are looked at.

    Returns:
        Sentences, the most important first; a single one if nothing is lost.

    Raises:
        ValueError: if nothing is known of this dtype: name it in `formats` of `report`.
        TypeError: if `report` is no `Report`, or `dtype` no real floating dtype.

    Example:
        >>> x = jnp.full(8, 2.0**-20)
        >>> seen = jsa.numerics.report(lambda x: x, formats=["float8_e5m2"])(x)
        >>> print(jsa.numerics.suggest(seen)[0])
        input of `args[0]`: in float8_e5m2 100% of the elements become zero (RMS 2^-20).
        It needs a scale of 2^-20: jsa.scalify gives it one, with its state from
        jsa.as_scaled_array.
    """
    if not isinstance(report, Report):
        raise TypeError(f"`report` must be a `Report`, got {type(report).__name__}.")
    names = [d.name for d in as_formats([dtype])] if dtype is not None else report.formats[:1]
    name = names[0] if names else None
    groups: dict[tuple, list[Row]] = {}
    for row in report.rows:
        is_bad = max(row.shares(name)) > _SHARE and not _is_wide_on_purpose(row, name)
        if row.nonfinite or is_bad:
            place = row.name, row.phase, row.line, row.function, row.nonfinite > 0
            groups.setdefault(place, []).append(row)
    if not groups:
        return [f"Nothing is lost in {name or 'the dtypes that values have'}: no value needs care."]
    worst = sorted((_worst(rows, name) for rows in groups.values()), key=lambda r: _order(r, name))
    causes: dict[Any, list[Row]] = {}
    for row in worst[:limit]:
        causes.setdefault(_cause(row, name), []).append(row)
    found = []
    for first, *others in causes.values():
        found.append(_sentence(first, name))
        if others:
            found[-1] += f" The same at {_named(others)}."
    if len(worst) > limit:
        found.append(f"{len(worst) - limit} more places lose more than {_SHARE:.0%}.")
    return found


def _is_wide_on_purpose(row: Row, dtype: str | None) -> bool:
    """Return whether a scalified optimizer computes a value in more bits than are asked about."""
    if dtype is None or row.phase != "update" or row.scale is None:
        return False
    return jnp.finfo(row.dtype).bits > jnp.finfo(dtype).bits


def _cause(row: Row, dtype: str | None) -> Any:
    """What is the same of rows that have one remedy."""
    if row.nonfinite:
        return "not finite"
    return re.sub(r"-?\d+", "#", _remedy(row, dtype)), row.scale is None or row.phase


def _named(rows: Sequence[Row]) -> str:
    """The first places and, where it is known, the exponent of the RMS of each."""
    named = [
        f"{_place(row)} (2^{row.log2_rms:.0f})" if math.isfinite(row.log2_rms) else _place(row)
        for row in rows[:_NAMED]
    ]
    if len(rows) > _NAMED:
        named.append(f"and {len(rows) - _NAMED} more")
    return "; ".join(named)


def _order(row: Row, dtype: str | None) -> tuple[float, ...]:
    if row.nonfinite:
        return 0, row.nonfinite_at or math.inf
    return 1, row.size == 1, -row.badness([dtype] if dtype else ())


def _worst(rows: Sequence[Row], dtype: str | None) -> Row:
    return min(rows, key=lambda row: _order(row, dtype))


def _place(row: Row) -> str:
    place = f"{row.phase} pass" if row.phase != "input" else "input"
    place += f" of `{row.name}`" if row.name else ""
    place += f", {row.primitive}" if row.phase != "input" else ""
    place += f" inside jax.nn.{row.function}" if row.function else ""
    return place + (f" at {row.line.rpartition('/')[2].partition(' ')[0]}" if row.line else "")


def _sentence(row: Row, dtype: str | None) -> str:
    place = _place(row)
    if row.nonfinite:
        return (
            f"{place}: {row.nonfinite} of {row.size} elements are nan or infinite; "
            "jsa.numerics.find_nonfinite tells where they come from."
        )
    return f"{place}: {_loss(row, dtype)} {_remedy(row, dtype)}"


def _loss(row: Row, dtype: str | None) -> str:
    under, subnormal, over = row.shares(dtype)
    parts = [
        f"{share:.0%} of the elements {what}"
        for share, what in (
            (under, "become zero"),
            (subnormal, "are subnormal"),
            (over, "are at or beyond the largest value"),
        )
        if share > _SHARE
    ]
    rms = f" (RMS 2^{row.log2_rms:.0f})" if math.isfinite(row.log2_rms) else ""
    return f"in {dtype or row.dtype} {', '.join(parts)}{rms}."


def _remedy(row: Row, dtype: str | None) -> str:
    under, subnormal, over = row.shares(dtype)
    if not row.measure.histogram:  # its own dtype has made all of it zero
        if row.scale is None:
            return (
                "Nothing is left of it: jsa.scalify gives it a scale, with its state from "
                "jsa.as_scaled_array."
            )
        made_of = f"the argument of jax.nn.{row.function}" if row.function else "what it is made of"
        return (
            f"Nothing is left of it that tells its scale: rescale {made_of}; a report of the same "
            "step with float32 data shows its range."
        )
    low, high = min(row.measure.histogram), max(row.measure.histogram)
    away = math.isfinite(row.log2_rms) and abs(row.log2_rms) > _OCTAVES
    if (under + subnormal > _SHARE and over > _SHARE) or not away:
        wider = "Keep it in a dtype of wider range, or split what it is made of."
        if row.function:
            wider = f"Give jax.nn.{row.function} an argument in a dtype of wider range."
        return (
            f"Its elements span {high - low + 1} octaves, and its RMS is where it should be: no "
            f"scale helps. {wider}"
        )
    to = round(row.log2_rms)
    if row.scale is None:
        return (
            f"It needs a scale of 2^{to}: jsa.scalify gives it one, with its state from "
            "jsa.as_scaled_array."
        )
    where = f"Its scale is 2^{row.scale[1]} and should be 2^{row.scale[1] + to}:"
    if row.phase == "update" and row.name.startswith(("args", "kwargs")):
        return f"{where} jsa.dynamic_rescale of the state, or jsa.optim for an optimizer's state."
    if row.phase == "input":
        return f"{where} jsa.dynamic_rescale between steps, or jsa.as_scaled_array with 'rms'."
    if row.function:
        way = "_l2_grad on its result" if row.phase == "backward" else "_l2 on its argument"
        return f"{where} jsa.ops.dynamic_rescale{way}{_instead(row)}."
    if row.phase == "backward":
        return f"{where} jsa.ops.dynamic_rescale_l2_grad on the value that it is the gradient of."
    rule = _BETTER.get(row.primitive)
    better = f", or use {rule}" if rule else ", or give its function a rule (jsa.custom_scale)"
    return f"{where} jsa.rebalance_scale(x, 2.0**{to}) there{better}."


def _instead(row: Row) -> str:
    """What to use in the place of the function of `jax.nn` that a row lies in."""
    name = row.function
    if name in nn.__all__:
        return f", or use jsa.nn.{name} for jax.nn.{name}"
    return f", or give a function that calls jax.nn.{name} a rule (jsa.custom_scale)"
