"""FP8 arguments of a function that computes with wider arrays.

JAX has no promotion of float8 dtypes: `x @ kernel` of float16 and float8 is an error while the
function is traced. `scalify` then traces it once more with wider arguments, which have all numbers
of FP8, and puts the casts to where the values are used. A stack of layers that a `scan` goes over
is cast one layer at a time, rows of an embedding after they are gathered, and what an FP8 matmul
would cast back is not cast at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_scalify import _compat
from jax_scalify.base.jaxprs import evaluate, is_var, scan_operands, while_operands
from jax_scalify.interpreter.traits import traits_of

_CALLS = ("jit", "remat2", "scan", "while", "cond")


def wider_dtype(narrow: Any, others: Iterable[Any]) -> Any:
    """The dtype in which a narrow argument meets others of these dtypes.

    It is theirs if they have 16 bits, since a model computes in what its weights and inputs have.
    """
    others = {jnp.dtype(d) for d in others}
    if narrow != jnp.float8_e8m0fnu:  # whose range float16 does not have
        for dtype in (jnp.float16, jnp.bfloat16):
            if jnp.dtype(dtype) in others:
                return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Late:
    """An array that is still to be cast to a wider dtype."""

    array: Any
    dtype: Any

    def cast(self) -> Any:
        return lax.convert_element_type(self.array, self.dtype)


def cast_late(closed: Any, places: Sequence[int]) -> Any:
    """Return a closed jaxpr that casts the operands in some places where they are used.

    Args:
        closed: a closed jaxpr that begins with casts of these operands.
        places: of operands of a narrow dtype.
    """
    marked = [closed.jaxpr.invars[i] for i in places]

    def flat(*args: Any) -> list[Any]:
        return [_cast(x) for x in _run(closed, args, marked)]

    return jax.make_jaxpr(flat)(*closed.in_avals)


def _cast(value: Any) -> Any:
    return value.cast() if isinstance(value, _Late) else value


def _run(closed: Any, args: Sequence[Any], marked: Sequence[Any] = ()) -> list[Any]:
    """Evaluate a jaxpr on arrays some of which are late, casts of marked operands as well."""

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        with _compat.equation_context(eqn):
            is_marked = is_var(eqn.invars[0]) and eqn.invars[0] in marked if eqn.invars else False
            if is_marked and eqn.primitive is lax.convert_element_type_p:
                return [_Late(operands[0], eqn.params["new_dtype"])]
            out = _equation(eqn, operands)
        return out if eqn.primitive.multiple_results else [out]

    return evaluate(closed, args, equation)


def _equation(eqn: Any, operands: list[Any]) -> Any:
    name, params = eqn.primitive.name, eqn.primitive.get_bind_params(eqn.params)
    if not any(isinstance(x, _Late) for x in operands):
        return eqn.primitive.bind(*operands, **params)
    first, *others = operands
    if name in ("convert_element_type", "saturating_cast"):
        target = jnp.dtype(eqn.outvars[0].aval.dtype)
        if target == first.array.dtype and not _has_infinity(target):
            return first.array  # there and back
        if jnp.issubdtype(target, jnp.floating) and jnp.finfo(target).bits >= 16:
            return _Late(first.array, target)
    if _moves(name) and not any(isinstance(x, _Late) for x in others):
        return _Late(eqn.primitive.bind(first.array, *others, **params), first.dtype)
    if name in ("closed_call", "eval_jaxpr"):
        return _run(eqn.params["call_jaxpr"], operands)
    if name in _CALLS:
        return _call(eqn, operands, params)
    return eqn.primitive.bind(*map(_cast, operands), **params)


def _moves(name: str) -> bool:
    """Whether a primitive puts elements of its first operand elsewhere, and does nothing else."""
    return traits_of(name).elements in ("same", "moved") or name in ("dynamic_slice", "gather")


def _has_infinity(dtype: Any) -> bool:
    """Whether a saturating cast changes a number of the dtype itself."""
    return bool(np.isinf(np.array(np.inf, dtype)))


def _call(eqn: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    """An equation with bodies, which get the narrow arrays of what stays the same in them."""
    name = eqn.primitive.name
    inner = list(operands)
    if name == "scan":
        consts, carry, xs = scan_operands(params, operands)
        inner = [*consts, *map(_cast, carry), *xs]
    elif name == "while":
        of_condition, of_body, carry = while_operands(params, operands)
        inner = [*map(_cast, of_condition), *of_body, *map(_cast, carry)]
        first = len(of_condition)
        body = _body(params["body_jaxpr"], [*of_body, *map(_cast, carry)], ())
        params = {**params, "body_jaxpr": body[0]}
        return eqn.primitive.bind(*inner[:first], *map(_narrow, inner[first:]), **params)
    elif name == "cond":
        branches = tuple(_body(b, operands[1:], ())[0] for b in params["branches"])
        params = {**params, "branches": branches}
        return eqn.primitive.bind(operands[0], *map(_narrow, operands[1:]), **params)
    stacked = range(len(carry), len(eqn.outvars)) if name == "scan" else ()
    body, late = _body(params["jaxpr"], inner, stacked)
    out = eqn.primitive.bind(*map(_narrow, inner), **{**params, "jaxpr": body})
    return [_Late(x, late[i]) if i in late else x for i, x in enumerate(out)]


def _narrow(value: Any) -> Any:
    return value.array if isinstance(value, _Late) else value


def _body(body: Any, operands: Sequence[Any], may_be_late: Iterable[int]) -> tuple[Any, dict]:
    """Trace a body anew for operands some of which are late.

    Returns it, and the dtypes of its late results, by their places.
    """
    is_closed = hasattr(body, "consts")
    closed = body if is_closed else _compat.close_jaxpr(body, ())
    pairs = list(zip(operands, closed.in_avals, strict=True))
    avals = [a.update(dtype=x.array.dtype) if isinstance(x, _Late) else a for x, a in pairs]
    late: dict[int, Any] = {}

    def flat(*args: Any) -> list[Any]:
        inner = [
            _Late(arg, x.dtype) if isinstance(x, _Late) else arg
            for arg, x in zip(args, operands, strict=True)
        ]
        out = _run(closed, inner)
        late.update((i, out[i].dtype) for i in may_be_late if isinstance(out[i], _Late))
        return [_narrow(x) if i in late else _cast(x) for i, x in enumerate(out)]

    with _compat.no_name_stack():
        new = jax.make_jaxpr(flat)(*avals)
    return (new if is_closed else _compat.open_jaxpr(new)), late
