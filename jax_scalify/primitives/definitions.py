"""Primitives that set or read scales: their evaluation, types, derivatives and batching.

Outside `scalify`, each primitive is the identity on values, so a model that uses them runs
unchanged. Inside, their rules (`rules/own_primitives.py`) move powers of two between data and
scale. The functions that bind them are in `ops/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_scalify.base import dtypes
from jax_scalify.base.stochastic_rounding import round_stochastically

NOTHING_SEEN = -(2**30)
"""The entry of a history for a step that has not happened, or whose data was all zero."""


def define(name: str, impl: Callable, abstract: Callable, multiple_results=False) -> Primitive:
    """Define a primitive, given its evaluation (also its lowering) and abstract evaluation."""
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(impl)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(impl, multiple_results=multiple_results))
    return primitive


def _define_identity(name: str, transpose: Callable | None = None) -> Primitive:
    """Define a primitive that returns its first operand, and whose derivative is the identity."""
    primitive = define(name, lambda x, *_, **__: x, lambda x, *_, **__: x)

    def jvp(primals, tangents, **params):
        return primitive.bind(*primals, **params), tangents[0]

    def transpose_rule(cotangent, x, *others, **params):
        if isinstance(cotangent, ad.Zero):
            cotangent = ad.instantiate_zeros(cotangent)
        if transpose is not None:
            cotangent = transpose(cotangent, *others, **params)
        return (cotangent, *(None for _ in others))

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose_rule
    return primitive


set_scaling_p = _define_identity("set_scaling")
match_scale_p = _define_identity("match_scale")
rebalance_scale_p = _define_identity("rebalance_scale")
stop_scaling_p = _define_identity("stop_scaling")
# `jvp` sends the tangent, not the primal, through `on_backward`: see `_on_backward_jvp`.
on_backward_p = _define_identity(
    "on_backward",
    transpose=lambda cotangent, *operands, function: function(cotangent, *operands),
)
get_data_and_scale_p = define(
    "get_data_and_scale",
    lambda x, *, scale_dtype: (x, jnp.ones((), scale_dtype)),
    lambda x, *, scale_dtype: (x, jax.typeof(np.ones((), scale_dtype))),
    multiple_results=True,
)
dynamic_rescale_p = define(  # the value, and whether its statistic is finite
    "dynamic_rescale",
    lambda x, *, batch_ndim, **_: (x, jnp.ones(x.shape[:batch_ndim], bool)),
    lambda x, *, batch_ndim, **_: (x, x.update(shape=x.shape[:batch_ndim], dtype=bool)),
    multiple_results=True,
)


cast_p = define(
    "saturating_cast",
    lambda x, *, dtype: dtypes.cast(x, dtype),
    lambda x, *, dtype: x.update(dtype=dtype, weak_type=False),
)


stochastic_cast_p = define(
    "stochastic_cast",
    lambda x, bits, *, dtype: round_stochastically(x, bits, dtype),
    lambda x, bits, *, dtype: x.update(dtype=dtype, weak_type=False),
)


def _define_derivatives_of_cast(primitive: Primitive) -> None:
    """Define the derivatives of a cast: tangents and cotangents are cast to nearest."""

    def jvp(primals, tangents, *, dtype):
        return primitive.bind(*primals, dtype=dtype), cast_p.bind(tangents[0], dtype=dtype)

    def transpose(cotangent, x, *bits, dtype):
        cotangent = ad.instantiate_zeros(cotangent)
        return (cast_p.bind(cotangent, dtype=x.aval.dtype), *(None for _ in bits))

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


_define_derivatives_of_cast(cast_p)
_define_derivatives_of_cast(stochastic_cast_p)


def _on_backward_jvp(primals, tangents, *, function):
    return primals[0], on_backward_p.bind(tangents[0], *primals[1:], function=function)


ad.primitive_jvps[on_backward_p] = _on_backward_jvp


def _get_data_and_scale_jvp(primals, tangents, *, scale_dtype):
    # `data = x / scale`, where the scale is a constant to derivatives.
    data, scale = get_data_and_scale_p.bind(*primals, scale_dtype=scale_dtype)
    inverse = lax.convert_element_type(1 / lax.stop_gradient(scale), data.dtype)
    return (data, scale), (lax.mul(tangents[0], inverse), ad.Zero(jax.typeof(scale)))


ad.primitive_jvps[get_data_and_scale_p] = _get_data_and_scale_jvp


def identity_jvp(primitive: Primitive) -> Callable:
    """Return the JVP of a primitive that returns its first operand, and then constants."""

    def jvp(primals, tangents, **params):
        out = primitive.bind(*primals, **params)
        constant = (ad.Zero(jax.typeof(o).to_tangent_aval()) for o in out[1:])
        return out, [tangents[0], *constant]

    return jvp


ad.primitive_jvps[dynamic_rescale_p] = identity_jvp(dynamic_rescale_p)


def _batch_unary(primitive: Primitive) -> None:
    def batch(args, dims, **params):
        out = primitive.bind(*args, **params)
        return out, ([dims[0], None] if primitive.multiple_results else dims[0])

    batching.primitive_batchers[primitive] = batch


def _batch_dynamic_rescale(args, dims, *, stat, target, batch_ndim):
    x = jnp.moveaxis(args[0], dims[0], 0)  # each example gets its own scale
    return dynamic_rescale_p.bind(x, stat=stat, target=target, batch_ndim=batch_ndim + 1), (0, 0)


def _batch_match_scale(args, dims):
    x, like = (
        jnp.expand_dims(a, 0) if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims)
    )
    if dims[0] is None:
        x = jnp.broadcast_to(x, (like.shape[0], *x.shape[1:]))
    return match_scale_p.bind(x, like), 0


def _batch_stochastic_cast(args, dims, *, dtype):
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    x, bits = (batching.bdim_at_front(a, d, size) for a, d in zip(args, dims))
    return stochastic_cast_p.bind(x, bits, dtype=dtype), 0


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A function of a cotangent and operands, mapped over the leading axis of some of them."""

    function: Hashable
    axes: tuple[int | None, ...]
    size: int

    def __call__(self, *args: jax.Array) -> jax.Array:
        return jax.vmap(self.function, self.axes, axis_size=self.size)(*args)  # type: ignore


def _batch_on_backward(args, dims, *, function):
    (x, *operands), (dim, *others) = args, dims
    if all(d is None for d in others):
        return on_backward_p.bind(*args, function=function), dim
    size = next(a.shape[d] for a, d in zip(operands, others) if d is not None)
    x = batching.bdim_at_front(x, dim, size)
    mapped = Mapped(function, (0, *others), size)
    return on_backward_p.bind(x, *operands, function=mapped), 0


def _batch_with_scale(primitive: Primitive) -> None:
    def batch(args, dims, **params):
        (x, scale), (x_dim, scale_dim) = args, dims
        if scale_dim is None:
            return primitive.bind(x, scale, **params), x_dim
        x = batching.bdim_at_front(x, x_dim, scale.shape[scale_dim])
        scale = jnp.moveaxis(scale, scale_dim, 0)
        return primitive.bind(x, scale, **params), 0

    batching.primitive_batchers[primitive] = batch


for _primitive in (stop_scaling_p, cast_p, get_data_and_scale_p):
    _batch_unary(_primitive)
for _primitive in (set_scaling_p, rebalance_scale_p):
    _batch_with_scale(_primitive)
batching.primitive_batchers[stochastic_cast_p] = _batch_stochastic_cast
batching.primitive_batchers[on_backward_p] = _batch_on_backward
batching.primitive_batchers[match_scale_p] = _batch_match_scale
batching.primitive_batchers[dynamic_rescale_p] = _batch_dynamic_rescale


delayed_rescale_p = define(  # the value, its history, and whether its amax is finite
    "delayed_rescale",
    lambda x, history, *, batch_ndim, **_: (x, history, jnp.ones(x.shape[:batch_ndim], bool)),
    lambda x, history, *, batch_ndim, **_: (
        x,
        history,
        x.update(shape=x.shape[:batch_ndim], dtype=np.dtype(bool), weak_type=False),
    ),
    multiple_results=True,
)
ad.primitive_jvps[delayed_rescale_p] = identity_jvp(delayed_rescale_p)


def _batch_delayed_rescale(args, dims, *, batch_ndim, **params):
    """Give each example its own scale, and so its own history: `(length, examples, ...)`."""
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    x, history = (batching.bdim_at_front(a, d, size) for a, d in zip(args, dims))
    history = jnp.moveaxis(history, 0, 1)
    aligned = aligned_history(history, x.ndim)
    x, aligned, finite = delayed_rescale_p.bind(x, aligned, batch_ndim=batch_ndim + 1, **params)
    return (x, aligned.reshape(history.shape), finite), (0, 1, 0)


batching.primitive_batchers[delayed_rescale_p] = _batch_delayed_rescale


def aligned_history(history: Any, ndim: int) -> Any:
    """Return a history of shape `(length,)`, or `(length, ...)` with all axes of the data."""
    missing = ndim + 1 - history.ndim
    return history.reshape(history.shape + (1,) * missing) if history.ndim > 1 else history
