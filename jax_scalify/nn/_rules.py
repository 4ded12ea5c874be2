"""Scale rules of functions of neural networks: evaluate in float32, with the scale of a law."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.ops.custom_scale import custom_scale
from jax_scalify.rules.shared.along_axes import uniform_over
from jax_scalify.rules.shared.growth import NONNEGATIVE_LIMIT
from jax_scalify.rules.shared.products import made
from jax_scalify.scales.algebra import ONE, Scale


def axes_of(x: Any, axis: Any) -> tuple[int, ...]:
    """Return one axis, several axes, or all axes of `x` (None) as a tuple.

    Raises:
        TypeError: if `axis` is none of these.
        ValueError: if `x` has no such axis.
    """
    if axis is None:
        return tuple(range(x.ndim))
    try:
        axes = tuple(
            operator.index(a) for a in (axis if isinstance(axis, (tuple, list)) else [axis])
        )
    except TypeError:
        raise TypeError(f"`axis` must be an int or a tuple of ints, got {axis!r}.") from None
    if not all(-x.ndim <= a < x.ndim for a in axes):
        raise ValueError(
            f"`axis` must be at least {-x.ndim} and less than {x.ndim} for an array of shape "
            f"{tuple(x.shape)}, got {axis}."
        )
    return axes


def scale_rules(
    *,
    scale: Callable[..., Scale],
    slopes: Callable[..., Any],
    static_argnames: Any = (),
    prepare: Callable[[Operand], Operand] = uniform_over,
) -> Callable[[Callable], Any]:
    """Return a decorator that makes a `custom_scale` function with these scale laws.

    Both passes evaluate the function on values in at least float32.

    Args:
        scale: `(*args)` -> the scale of the result.
        slopes: `(*args)` -> the scale of the derivative, one for all floating arguments or a tuple
            with one for each. The gradient has the cotangent's scale times it.
        static_argnames: static arguments of the function. Both laws get them by keyword.
        prepare: applied to each operand first; by default it makes the operand's scale scalar.
    """

    def define(fun: Callable) -> Any:
        function = custom_scale(fun, static_argnames=static_argnames)
        static = function.static_argnames
        dynamic = [n for n in inspect.signature(fun).parameters if n not in static]

        def by_position(*args: Any, **static: Any) -> jax.Array:
            return fun(**dict(zip(dynamic, args)), **static)

        # JAX then traces the function once for operands of the same types.
        cached = jax.jit(by_position, static_argnames=static, inline=True)

        def in_order(*args: Any, **static: Any) -> jax.Array:
            return (cached if _have_hashes(static.values()) else by_position)(*args, **static)

        @function.defscale
        def forward(*args: Any, **static: Any) -> ScaledArray:
            args = tuple(prepare(x) if isinstance(x, Operand) else x for x in args)
            narrow = [
                jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Operand) else x
                for x in args
            ]
            dtype = jax.eval_shape(functools.partial(in_order, **static), *narrow).dtype
            out_scale = scale(*args, **static)
            return made(in_order(*map(_wide, args), **static), ONE, out_scale, dtype)

        @function.defscale_vjp
        def backward(*operands: Any, **static: Any) -> tuple[Any, ...]:
            *args, cotangent = (prepare(x) if isinstance(x, Operand) else x for x in operands)
            floating = [i for i, x in enumerate(args) if isinstance(x, Operand)]

            def of_floating(*xs: Any) -> jax.Array:
                full = list(args)
                for i, x in zip(floating, xs, strict=True):
                    full[i] = x
                return in_order(*full, **static)

            value, pull = jax.vjp(of_floating, *(_wide(args[i]) for i in floating))
            unit = cotangent.unit
            gradients = pull(cotangent.source.astype(value.dtype))
            factors = slopes(*args, **static)
            if isinstance(factors, Scale):
                factors = (factors,) * len(floating)
            out: list[Any] = [None] * len(args)
            for i, gradient, factor in zip(floating, gradients, factors, strict=True):
                out[i] = made(gradient, unit, cotangent.scale * factor, args[i].dtype)
            return tuple(out)

        return function

    return define


def _have_hashes(values: Iterable[Any]) -> bool:
    try:
        hash(tuple(values))
    except TypeError:  # a learned slope, for one
        return False
    return True


def elementwise(
    scale: Callable[[Scale], Scale], slope: Callable[[Scale], Scale]
) -> Callable[[Callable], Any]:
    """Return the decorator for a function of one array. Other arguments are static."""

    def define(fun: Callable) -> Any:
        names = list(inspect.signature(fun).parameters)[1:]
        return scale_rules(
            scale=lambda x, **_: scale(x.scale),
            slopes=lambda x, **_: slope(x.scale),
            static_argnames=names,
            prepare=lambda x: x,
        )(fun)

    return define


def of_input(exponent: int) -> Callable[[Scale], Scale]:
    """Return the law `out.scale = x.scale * 2**exponent`."""
    return lambda scale: scale * Scale(exponent)


def fixed(exponent: int) -> Callable[[Scale], Scale]:
    """Return the law `out.scale = 2**exponent`."""
    return lambda scale: Scale(exponent)


def count_scale(count: int, dtype: Any, limit: int = NONNEGATIVE_LIMIT) -> Scale:
    """Return `count`, rounded down; for float16 at most `2**limit`: one term may dominate a sum."""
    exponent = max(count, 1).bit_length() - 1
    return Scale(min(exponent, limit) if dtypes.is_narrow(dtype) else exponent)


def _wide(x: Any) -> Any:
    """Return the value of an operand, in at least float32."""
    return x.at_unit(ONE, dtypes.compute_dtype(x.dtype)) if isinstance(x, Operand) else x
