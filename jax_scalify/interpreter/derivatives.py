"""Derivatives of a scalified function, with the user's derivative rules.

Derivatives that are taken inside `scalify` are ordinary equations of the jaxpr. If the scalified
function itself is differentiated, JAX differentiates the equations that scale rules have emitted,
and does not see the user's `custom_jvp` and `custom_vjp`. A function with such rules is therefore
wrapped: its derivative is the scalified derivative of the plain function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex_core

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import ScaledArray, align_scale, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import all_equations, of_some, replaced

ScaleCall = Callable[[Any, Sequence[Any]], list[Any]]


def with_user_derivatives(scale_call: ScaleCall, closed: Any, operands: Sequence[Any]) -> list[Any]:
    """Interpret a closed jaxpr on operands, and keep its custom derivative rules."""
    rules = _user_rules(closed.jaxpr)
    if not rules:
        return scale_call(closed, operands)
    # Tracers that the user's function closes over may be differentiated too.
    traced = [i for i, c in enumerate(closed.consts) if _compat.is_traced(c)]
    count = len(operands)

    def jaxpr_of(arguments: Sequence[Any]) -> Any:
        consts = replaced(closed.consts, traced, arguments[count:])
        return _compat.close_jaxpr(closed.jaxpr, consts)

    def plain(*arguments: Any) -> list[Any]:
        return jex_core.jaxpr_as_fun(jaxpr_of(arguments))(*arguments[:count])

    def scaled(*arguments: Any) -> list[Any]:
        return scale_call(jaxpr_of(arguments), arguments[:count])

    # A `custom_vjp` has no forward mode, so a single one decides for the whole function.
    wrap = _with_vjp if "vjp" in rules else _with_jvp
    return wrap(scale_call, plain, scaled)(*operands, *(closed.consts[i] for i in traced))


def _constant(error: type[Exception], message: str) -> Callable[[Any], Any]:
    """Return the identity on trees of arrays, whose derivative raises."""

    @jax.custom_jvp
    def constant(tree: Any) -> Any:
        return tree

    @functools.partial(constant.defjvp, symbolic_zeros=True)
    def jvp(primals: Any, tangents: Any) -> Any:
        # `jax.grad` with respect to other arguments gives zero tangents, which are no error.
        if all(isinstance(t, SymbolicZero) for t in jax.tree.leaves(tangents)):
            return primals[0], tangents[0]
        raise error(message)

    return constant


constant_scales = _constant(
    TypeError,
    "A scalified function was differentiated with respect to a `ScaledArray`: its data and "
    "its scale are not two variables of the value. Take the derivative inside, "
    "`scalify(jax.grad(f))(x)`, or with respect to a plain array, "
    "`jax.grad(lambda x: jsa.asarray(jsa.scalify(f)(jsa.as_scaled_array(x))))(x)`.",
)
_once_differentiable = _constant(  # a remat would lose user rules
    NotImplementedError,
    "A scalified function was differentiated twice from outside, through a `jax.checkpoint` "
    "around a function with a derivative rule of its own (as `jax.nn.relu` has). Take the "
    "derivatives inside, `scalify(jax.hessian(f))(x)`, or leave out `jax.checkpoint`.",
)


def _user_rules(jaxpr: Any) -> set[str]:
    return {rule for e in all_equations(jaxpr) if (rule := _compat.derivative_rule(e))}


def _is_floating(x: Any) -> bool:
    return dtypes.is_scalable(x.dtype if is_scaled(x) else dtypes.leaf_dtype(x))


def _of_floating(fun: Callable, values: Any, floating: list[int]) -> tuple[Callable, tuple]:
    """Return `fun` as a function of its floating arguments and results, and these arguments."""

    def floating_results(*full: Any) -> list[Any]:
        return [out for out in fun(*full) if _is_floating(out)]

    return of_some(floating_results, values, floating), tuple(values[i] for i in floating)


def _scalify_plain(scale_call: ScaleCall, fun: Callable, operands: Sequence[Any]) -> list[Any]:
    # A derivative may contain the user's rules again: a second derivative needs them.
    closed = jax.make_jaxpr(fun)(*map(_data, operands))
    return with_user_derivatives(scale_call, closed, operands)


def _unit(x: ScaledArray) -> Any:
    """Return the scale. A scale of 0 counts as 1."""
    return x.scale or 1.0 if x.is_static else jnp.where(x.scale == 0, 1, x.scale)


def _data(x: Any) -> Any:
    return x.data if is_scaled(x) else x


def _with_data(x: Any, data: Any) -> Any:
    return ScaledArray(data, x.scale) if is_scaled(x) else data


def _in_units_of(x: Any, like: Any, inverse: bool = False) -> Any:
    """Return a derivative divided (or, if `inverse`, multiplied) by the scale of `like`."""
    if not is_scaled(like):
        return x.to_array(like.dtype) if is_scaled(x) else x
    # The value 6 is the data 1.5 at the scale 4. A tangent of 2 of the value is one of 0.5 of the
    # data, and a cotangent of 2 of the value is one of 8 of the data.
    compute = dtypes.compute_dtype(like.dtype)
    unit = align_scale(_unit(like) if inverse else 1 / _unit(like), like.ndim)
    if is_scaled(x):
        x = ScaledArray(x.data, align_scale(x.scale, x.ndim) * unit).to_array(compute)
    else:
        x = x.astype(compute) * unit.astype(dtypes.real_dtype(compute))
    return dtypes.cast(x, like.dtype)


def _as_tangent(data: Any, like: Any) -> Any:
    """Return a tangent or cotangent for `like`, given its data. A dynamic scale has tangent 0."""
    if not is_scaled(like):
        return data
    return ScaledArray(data, like.scale if like.is_static else jnp.zeros_like(like.scale))


def _with_jvp(scale_call: ScaleCall, plain: Callable, scaled: Callable) -> Callable:
    call = jax.custom_jvp(scaled)

    @call.defjvp
    def call_jvp(primals: Any, tangents: Any) -> Any:
        floating = [i for i, p in enumerate(primals) if _is_floating(p)]
        # `value = data * scale`, so the tangent of the data has the scale of the primal.
        moved = [_with_data(primals[i], _data(tangents[i])) for i in floating]
        tree = None

        def residuals_of(*values: Any) -> list[Any]:
            nonlocal tree
            of_floating, xs = _of_floating(plain, values, floating)
            # The linear function is a pytree. Its leaves are the residuals, and its structure
            # holds the jaxpr that `slope` evaluates.
            residuals, tree = jax.tree.flatten(jax.linearize(of_floating, *xs)[1])
            return residuals

        def slope(*arguments: Any) -> list[Any]:
            count = len(arguments) - len(floating)
            return jax.tree.unflatten(tree, arguments[:count])(*arguments[count:])

        outputs = call(*primals)
        residuals = _scalify_plain(scale_call, residuals_of, primals)
        closed = jax.make_jaxpr(slope)(*map(_data, [*residuals, *moved]))
        if _user_rules(closed.jaxpr):
            residuals = _once_differentiable(residuals)

        def slope_on_data(*data: Any) -> list[Any]:
            operands = [_with_data(x, d) for x, d in zip(moved, data, strict=True)]
            slopes = scale_call(closed, [*residuals, *operands])
            likes = [out for out in outputs if _is_floating(out)]
            return [_in_units_of(x, like) for x, like in zip(slopes, likes, strict=True)]

        # A linear function is its own derivative at every point. At the point 0, the scales of its
        # results are computed from zeros, so JAX sees that they do not depend on the tangents, even
        # if a remat or a loop returns both.
        data = list(map(_data, moved))
        slopes = iter(jax.jvp(slope_on_data, [jnp.zeros_like(d) for d in data], data)[1])
        return outputs, [
            _as_tangent(next(slopes), out)
            if _is_floating(out)
            # JAX's tangents of integers are zeros of this dtype.
            else np.zeros(out.shape, jax.dtypes.float0)
            for out in outputs
        ]

    return call


def _with_vjp(scale_call: ScaleCall, plain: Callable, scaled: Callable) -> Callable:
    call = jax.custom_vjp(scaled)

    def forward(*primals: Any) -> Any:
        outputs = call(*primals)
        return outputs, (primals, outputs)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        primals, outputs = residuals
        floating = [i for i, p in enumerate(primals) if _is_floating(p)]
        # `value = data * scale`, so a value's cotangent is its data's cotangent over the scale.
        slopes = [
            ScaledArray(c.data, 1 / _unit(out)) if is_scaled(out) else c
            for out, c in zip(outputs, cotangents, strict=True)
            if _is_floating(out)
        ]

        def plain_vjp(*arguments: Any) -> Any:
            values, slopes = arguments[: len(primals)], arguments[len(primals) :]
            of_floating, xs = _of_floating(plain, values, floating)
            return jax.vjp(of_floating, *xs)[1](list(slopes))

        results = iter(_scalify_plain(scale_call, plain_vjp, [*primals, *slopes]))
        return tuple(
            _as_tangent(_in_units_of(next(results), p, inverse=True), p)
            if _is_floating(p)
            # JAX takes None as the cotangent of an integer or a key.
            else None
            for p in primals
        )

    call.defvjp(forward, backward)
    return call
