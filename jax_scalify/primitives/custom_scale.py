"""The primitive of functions with scale rules, which `ops/custom_scale.py` binds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import as_function, of_some
from jax_scalify.primitives.definitions import jvp_of_moved


@dataclasses.dataclass(frozen=True, eq=False)
class AppliedRule:
    """A rule with the structures of one call.

    Attributes:
        name: the name of the function, for error messages.
        rule: the scale rule; None to interpret the body of the function.
        in_tree, out_tree: the structures of arguments and results.
        num_consts: the number of arrays before the arguments that the function closes over.
        num_cotangents: the number of cotangents, the last arrays. The function is linear in them.
        keeps_plain: whether operands and results without a scale are plain arrays.
        batched: for each enclosing `vmap`, innermost first: whether each argument has the mapped
            axis (in front), the size of this axis, and its name.
    """

    name: str
    rule: Callable | None
    in_tree: Any
    out_tree: Any
    num_consts: int
    num_cotangents: int = 0
    keeps_plain: bool = False
    batched: tuple[tuple[tuple[bool, ...], int, Any], ...] = ()


custom_scale_p = Primitive("custom_scale")
custom_scale_p.multiple_results = True


@custom_scale_p.def_impl
def _impl(*arrays: Any, jaxpr: Any, applied: AppliedRule) -> list[Any]:
    return as_function(jaxpr)(*arrays)


@custom_scale_p.def_effectful_abstract_eval
def _abstract(*arrays: Any, jaxpr: Any, applied: AppliedRule) -> tuple[list[Any], Any]:
    return list(jaxpr.out_avals), jaxpr.effects


mlir.register_lowering(custom_scale_p, mlir.lower_fun(_impl, multiple_results=True))


def _jvp(primals: Any, tangents: Any, *, jaxpr: Any, applied: AppliedRule) -> Any:
    """Differentiate the plain function. The equations of the derivative have their own rules."""
    outputs = custom_scale_p.bind(*primals, jaxpr=jaxpr, applied=applied)
    slopes = jvp_of_moved(as_function(jaxpr), primals, tangents)[1]
    # The tangent of an integer has the dtype float0. JAX takes `Zero` for it.
    slopes = [
        s if dtypes.is_scalable(aval.dtype) else ad.Zero(aval.to_tangent_aval())
        for s, aval in zip(slopes, jaxpr.out_avals, strict=True)
    ]
    return outputs, slopes


ad.primitive_jvps[custom_scale_p] = _jvp


def _transpose(cotangents: Any, *args: Any, jaxpr: Any, applied: AppliedRule) -> list[Any]:
    linear = [i for i, a in enumerate(args) if ad.is_undefined_primal(a)]
    pull = jax.linear_transpose(
        of_some(as_function(jaxpr), args, linear), *(args[i].aval for i in linear)
    )
    slopes = dict(zip(linear, pull(list(map(ad.instantiate_zeros, cotangents))), strict=True))
    return [slopes.get(i) for i in range(len(args))]


ad.primitive_transposes[custom_scale_p] = _transpose


def _batch(axis: Any, args: Any, dims: Any, *, jaxpr: Any, applied: AppliedRule) -> Any:
    # A function that names the axis, as in `lax.axis_index`, is mapped even if no operand is.
    named = any(getattr(effect, "name", None) == axis.name for effect in jaxpr.effects)
    if not named and all(d is None for d in dims):
        out = custom_scale_p.bind(*args, jaxpr=jaxpr, applied=applied)
        return out, [None] * len(out)
    args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    mapped = jax.vmap(
        as_function(jaxpr),
        [None if d is None else 0 for d in dims],
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name,
    )
    flags = tuple(d is not None for d in dims[applied.num_consts :])
    batched = (*applied.batched, (flags, axis.size, axis.name))
    applied = dataclasses.replace(applied, batched=batched)
    out = custom_scale_p.bind(*args, jaxpr=jax.make_jaxpr(mapped)(*args), applied=applied)
    return out, [0] * len(out)


batching.fancy_primitive_batchers[custom_scale_p] = _batch
