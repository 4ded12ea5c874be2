"""Warnings about a step that is likely not set up as meant: found in a jaxpr, and said once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import is_scaled
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import all_equations, evaluate, is_var, makers, sub_jaxprs

_MATMULS = frozenset(
    "dot_general conv_general_dilated ragged_dot_general narrow_dot_general".split()
)
_MOST_NAMES = 3


class SetupWarning(UserWarning):
    """Nothing is scaled in a function under `scalify`, or its matmuls are in float32 by mistake."""


def nothing_scaled(name: str, operands: Sequence[Any], names: Sequence[str]) -> str | None:
    """Say that no argument is a `ScaledArray`, if any is an array of floats."""
    plain = [n for n, x in zip(names, operands, strict=True) if _is_float(x) and jnp.ndim(x)]
    if not plain:
        return None
    return (
        f"Nothing is scaled in `{name}`: none of its arguments is a ScaledArray. Pass "
        f"{_listed(plain)} through `jsa.as_scaled_array`."
    )


def wide_matmuls(
    name: str, jaxpr: Any, operands: Sequence[Any], names: Sequence[str]
) -> str | None:
    """Say that scaled arguments do not reach the matmuls, or only widened to float32.

    A float32 batch beside float16 weights is computed in float32, weights included.
    """
    matmuls = [eqn for eqn in all_equations(jaxpr) if eqn.primitive.name in _MATMULS]
    if not matmuls or any(max(map(_bits, eqn.invars[:2])) < 32 for eqn in matmuls):
        return None
    pairs = list(zip(names, operands, strict=True))
    wide = [n for n, x in pairs if _is_float(x) and jnp.ndim(x) and jnp.finfo(x.dtype).bits >= 32]
    line = _compat.source_line(matmuls[0])
    if not _reach_matmuls(jaxpr, list(map(is_scaled, operands))):
        return (
            f"No matmul of `{name}` has a scaled operand; the first is at {line}. Pass "
            f"{_listed(wide)} through `jsa.as_scaled_array`."
        )
    widening = _widening(jaxpr)
    if widening is None:
        return None
    message = f"Every matmul of `{name}` is in float32, the first at {line}: beside float32 "
    if not wide:
        return (
            f"{message}constants, JAX widens operands of fewer bits, here at "
            f"{_compat.source_line(widening)}. Give the constants the dtype of the operands."
        )
    return (
        f"{message}arguments, JAX widens those of fewer bits. Cast {_listed(wide)}, so that all "
        "have one dtype."
    )


def _listed(names: Sequence[str]) -> str:
    shown = [f"`{n}`" for n in names[:_MOST_NAMES]]
    return ", ".join(shown) + (" and others" if len(names) > _MOST_NAMES else "")


def _is_float(x: Any) -> bool:
    kind = x.dtype if is_scaled(x) else dtypes.leaf_dtype(x)
    return kind is not None and jnp.issubdtype(kind, jnp.floating)


def _bits(atom: Any) -> int:
    dtype = getattr(atom.aval, "dtype", np.int32)
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 32


def _reach_matmuls(jaxpr: Any, marked: Sequence[bool]) -> bool:
    """Return whether a marked operand reaches a matmul."""
    found = False

    def equation(eqn: Any, operands: list[bool]) -> list[bool]:
        nonlocal found
        inner = [e for sub in sub_jaxprs(eqn.params) for e in all_equations(sub)]
        if any(e.primitive.name in _MATMULS for e in [eqn, *inner]):
            found = found or any(operands)
        return [any(operands)] * len(eqn.outvars)

    evaluate(jaxpr, marked, equation, lambda _: False, lambda *_: False)
    return found


def _widening(jaxpr: Any) -> Any:
    """Return the equation of a matmul's operand that is, or was cast from, a dtype of fewer bits.

    It is the cast, or the matmul; None if there is none.
    """
    made = makers(jaxpr)
    for eqn in jaxpr.eqns:
        for atom in eqn.invars[:2] if eqn.primitive.name in _MATMULS else ():
            cast = made.get(atom) if is_var(atom) else None
            is_cast = cast is not None and cast.primitive.name == "convert_element_type"
            if _bits(cast.invars[0] if cast is not None and is_cast else atom) < 32:
                return cast if is_cast else eqn
        inner = next(filter(None, map(_widening, sub_jaxprs(eqn.params))), None)
        if inner is not None:
            return inner
    return None
