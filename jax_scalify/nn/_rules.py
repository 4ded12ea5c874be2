"""How these functions get their rules: evaluated in float32, the scale where the law puts it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from jax_scalify.arrays.scaled_array import ScaledArray
from jax_scalify.base import dtypes
from jax_scalify.interpreter.operand import Operand
from jax_scalify.primitives.custom_scale import custom_scale
from jax_scalify.rules.shared.along_axes import uniform_over
from jax_scalify.rules.shared.growth import NONNEGATIVE_LIMIT
from jax_scalify.rules.shared.products import made
from jax_scalify.scales.algebra import ONE, Scale


def scale_rules(
    *,
    scale: Callable[..., Scale],
    slopes: Callable[..., Any],
    static_argnames: Any = (),
    prepare: Callable[[Operand], Operand] = uniform_over,
) -> Callable[[Callable], Any]:
    """Make a `custom_scale` function of one that is exact in float32.

    Args:
        scale: the scale of the result, by the function's arguments.
        slopes: by the same arguments the scale of the derivative: one for all floating arguments,
            or a tuple of one for each. That of the gradient is the cotangent's times it.
        static_argnames: of the function; both laws get them by keyword.
        prepare: what is done to operands first; by default they get one scale each.
    """

    def define(fun: Callable) -> Any:
        function = custom_scale(fun, static_argnames=static_argnames)
        static = function.static_argnames
        dynamic = [n for n in inspect.signature(fun).parameters if n not in static]

        def in_order(*args: Any, **static: Any) -> jax.Array:
            return fun(**dict(zip(dynamic, args)), **static)

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


def elementwise(
    scale: Callable[[Scale], Scale], slope: Callable[[Scale], Scale]
) -> Callable[[Callable], Any]:
    """The rules of a function of one array, by the laws of its scale; the rest is static."""

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
    """A multiple of the operand's scale."""
    return lambda scale: scale * Scale(exponent)


def fixed(exponent: int) -> Callable[[Scale], Scale]:
    """A static scale."""
    return lambda scale: Scale(exponent)


def count_scale(count: int, dtype: Any, limit: int = NONNEGATIVE_LIMIT) -> Scale:
    """`count`, rounded down; for float16 at most `2**limit`, as one term may make up a sum."""
    exponent = max(count, 1).bit_length() - 1
    return Scale(min(exponent, limit) if dtypes.has_short_range(dtype) else exponent)


def _wide(x: Any) -> Any:
    """The value of an operand, in at least float32."""
    return x.at_unit(ONE, dtypes.compute_dtype(x.dtype)) if isinstance(x, Operand) else x
