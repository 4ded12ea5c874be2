"""Primitives that set or read scales: their evaluation, types, derivatives and batching.

Outside `scalify`, each primitive is the identity on values, so a model that uses them runs
unchanged. Inside, their rules (`rules/own_primitives.py`) move powers of two between data and
scale. The functions that bind them are in `ops/`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_scalify.base import dtypes
from jax_scalify.base.jaxprs import of_some
from jax_scalify.base.stochastic_rounding import round_stochastically

NOTHING_SEEN = -(2**30)
"""The entry of a history for a step that has not happened, or whose data was all zero."""


def define(
    name: str,
    impl: Callable,
    aval: Callable,
    *,
    jvp: Callable,
    batch: Callable,
    transpose: Callable | None = None,
    multiple_results: bool = False,
) -> Primitive:
    """Define a primitive, given its evaluation (also its lowering) and abstract evaluation.

    The rules `jvp` and `batch` are called as JAX calls them, with the primitive before the other
    arguments. `transpose` returns the cotangent of the first operand, given the result's cotangent
    and the operands. The other operands are constants to derivatives.
    """
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(impl)
    primitive.def_abstract_eval(aval)
    mlir.register_lowering(primitive, mlir.lower_fun(impl, multiple_results=multiple_results))

    def transpose_rule(cotangent, x, *others, **params):
        assert transpose is not None
        first = transpose(ad.instantiate_zeros(cotangent), x, *others, **params)
        return (first, *(None for _ in others))

    ad.primitive_jvps[primitive] = functools.partial(jvp, primitive)
    batching.primitive_batchers[primitive] = functools.partial(batch, primitive)
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose_rule
    return primitive


def first(x: Any, *_: Any, **__: Any) -> Any:
    """Return the first operand."""
    return x


def jvp_of_moved(fun: Callable, primals: Any, tangents: Any) -> Any:
    """Differentiate a function with respect to the operands that have a tangent."""
    moved = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    some = of_some(fun, primals, moved)
    return jax.jvp(some, [primals[i] for i in moved], [tangents[i] for i in moved])


def jvp_of_first(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    """Differentiate the identity on the first operand. Further results are constants."""
    out = primitive.bind(*primals, **params)
    if not primitive.multiple_results:
        return out, tangents[0]
    return out, [tangents[0], *(ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out[1:])]


def _jvp_of_cast(primitive: Primitive, primals: Any, tangents: Any, *, dtype: Any) -> Any:
    """Round tangents to nearest."""
    return primitive.bind(*primals, dtype=dtype), cast_p.bind(tangents[0], dtype=dtype)


def _jvp_on_backward(primitive: Primitive, primals: Any, tangents: Any, *, function: Any) -> Any:
    """Send the tangent through the primitive, not the primal, so that it is transposed."""
    return primals[0], primitive.bind(tangents[0], *primals[1:], function=function)


def _jvp_of_data_and_scale(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    """Differentiate `data = x / scale`, where the scale is a constant."""
    data, scale = primitive.bind(*primals, **params)
    inverse = 1 / lax.stop_gradient(scale)  # which float16 may not hold
    wide = dtypes.promoted(dtypes.compute_dtype(data.dtype), inverse.dtype)
    tangent = lax.convert_element_type(tangents[0], wide)
    tangent = lax.mul(tangent, lax.convert_element_type(inverse, wide))
    tangent = lax.convert_element_type(tangent, data.dtype)
    return (data, scale), (tangent, ad.Zero(jax.typeof(scale)))


def _size(args: Any, dims: Any) -> int:
    """Return the size of the mapped axis."""
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def _at_front(args: Any, dims: Any) -> list[Any]:
    """Return the operands with the mapped axis in front. Unmapped operands are broadcast."""
    size = _size(args, dims)
    return [batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True)]


def batch_all(primitive: Primitive, args: Any, dims: Any, **params: Any) -> Any:
    """Map all operands, along their first axis."""
    return primitive.bind(*_at_front(args, dims), **params), 0


def _batch_first(primitive: Primitive, args: Any, dims: Any, **params: Any) -> Any:
    """Map the first operand, and the others (scales) only if any of them is mapped."""
    if any(d is not None for d in dims[1:]):
        return batch_all(primitive, args, dims, **params)
    # `get_data_and_scale` has a second result, the scale, which all examples share.
    out = primitive.bind(*args, **params)
    return out, [dims[0], None] if primitive.multiple_results else dims[0]


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function that is mapped over one axis of some of its operands."""

    function: Hashable
    axes: tuple[int | None, ...]
    size: int

    def __call__(self, *args: jax.Array) -> jax.Array:
        return jax.vmap(self.function, self.axes, axis_size=self.size)(*args)  # type: ignore


def batch_function(
    primitive: Primitive, args: Any, dims: Any, *, function: Any, before: tuple[int, ...] = ()
) -> Any:
    """Map the first operand along its first axis, and a function of the other operands.

    `before` has the axes of the arguments that the function takes before them.
    """
    size = _size(args, dims)
    x = batching.bdim_at_front(args[0], dims[0], size)
    if function is not None:
        function = _Mapped(function, (*before, *dims[1:]), size)
    return primitive.bind(x, *args[1:], function=function), 0


def _batch_on_backward(primitive: Primitive, args: Any, dims: Any, *, function: Any) -> Any:
    """Map the function if an operand is mapped. Otherwise it gets all cotangents as one array."""
    if any(d is not None for d in dims[1:]):
        return batch_function(primitive, args, dims, function=function, before=(0,))
    return primitive.bind(*args, function=function), dims[0]


def _batch_dynamic(
    primitive: Primitive, args: Any, dims: Any, *, batch_ndim: int, **params: Any
) -> Any:
    """Give each example its own scale."""
    return primitive.bind(*_at_front(args, dims), batch_ndim=batch_ndim + 1, **params), (0, 0)


def _batch_delayed(
    primitive: Primitive, args: Any, dims: Any, *, batch_ndim: int, **params: Any
) -> Any:
    """Give each example its own scale, and so its own history: `(length, examples, ...)`."""
    x, history = _at_front(args, dims)
    # From (examples, length, ...) to (length, examples, ...).
    history = jnp.moveaxis(history, 0, 1)
    aligned = aligned_history(history, x.ndim)
    x, aligned, finite = primitive.bind(x, aligned, batch_ndim=batch_ndim + 1, **params)
    return (x, aligned.reshape(history.shape), finite), (0, 1, 0)


_define_identity = functools.partial(define, impl=first, aval=first, jvp=jvp_of_first)
_define_cast = functools.partial(
    define,
    aval=lambda x, *_, dtype: x.update(dtype=dtype, weak_type=False),
    jvp=_jvp_of_cast,
    transpose=lambda cotangent, x, *_, dtype: cast_p.bind(cotangent, dtype=x.aval.dtype),
)
_define_rescale = functools.partial(  # the operands, and a flag for each example
    define,
    impl=lambda x, *rest, batch_ndim, **_: (x, *rest, jnp.ones(x.shape[:batch_ndim], bool)),
    aval=lambda x, *rest, batch_ndim, **_: (
        x,
        *rest,
        x.update(shape=x.shape[:batch_ndim], dtype=np.dtype(bool), weak_type=False),
    ),
    jvp=jvp_of_first,
    multiple_results=True,
)

set_scaling_p = _define_identity("set_scaling", transpose=first, batch=_batch_first)
rebalance_scale_p = _define_identity("rebalance_scale", transpose=first, batch=_batch_first)
stop_scaling_p = _define_identity("stop_scaling", transpose=first, batch=_batch_first)
# The result takes the shape of the partner's scale, so both operands need the mapped axis.
match_scale_p = _define_identity("match_scale", transpose=first, batch=batch_all)
on_backward_p = define(
    "on_backward",
    first,
    first,
    jvp=_jvp_on_backward,
    # Tangents go through this primitive (`_jvp_on_backward`), so cotangents come here.
    transpose=lambda cotangent, x, *operands, function: function(cotangent, *operands),
    batch=_batch_on_backward,
)
get_data_and_scale_p = define(
    "get_data_and_scale",
    lambda x, *, scale_dtype: (x, jnp.ones((), scale_dtype)),
    lambda x, *, scale_dtype: (x, jax.typeof(np.ones((), scale_dtype))),
    jvp=_jvp_of_data_and_scale,
    batch=_batch_first,
    multiple_results=True,
)
cast_p = _define_cast(
    "saturating_cast", lambda x, *, dtype: dtypes.cast(x, dtype), batch=_batch_first
)
stochastic_cast_p = _define_cast(
    "stochastic_cast",
    lambda x, bits, *, dtype: round_stochastically(x, bits, dtype),
    batch=batch_all,
)
# Further results: whether the statistic is finite; the history, and whether its amax is finite.
dynamic_rescale_p = _define_rescale("dynamic_rescale", batch=_batch_dynamic)
delayed_rescale_p = _define_rescale("delayed_rescale", batch=_batch_delayed)


def aligned_history(history: Any, ndim: int) -> Any:
    """Return a history of shape `(length,)`, or `(length, ...)` with all axes of the data."""
    missing = ndim + 1 - history.ndim
    return history.reshape(history.shape + (1,) * missing) if history.ndim > 1 else history
