"""A matmul of block formats: operands are quantised along the contracted dims, then multiplied.

It is one primitive, of wide operands: a backward pass quantises anew along contracted dims of its
own, so it is the wide operands that it needs, and no rule for scales sees a block scale. What it
becomes is decided when it is lowered. For CUDA it is `jax.nn.scaled_matmul`, of which XLA makes a
block-scaled kernel where the device has one, and otherwise what it means. For other platforms that
is written out: elements times their block scales, exact in bfloat16, and a matmul that adds up in
float32. A CPU multiplies in float32, so there they are of that dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_scalify import _compat
from jax_scalify.base.eager import compiled
from jax_scalify.blocks.formats import E5M2
from jax_scalify.blocks.quantising import Quantised, Quantiser, Rows
from jax_scalify.blocks.rounding import times_power


def _quantised_operands(lhs: Any, rhs: Any, params: Any) -> tuple[list[Quantised], Any]:
    """Both operands quantised along the contracted dims, and the dims of their product."""
    (contract, batch), hadamard = params["dimension_numbers"], params["hadamard"]
    quantisers = params["quantisers"]
    unit = max(hadamard, *(q.format.block_size for q in quantisers))
    rows = [
        q.rows(x, contract[i], batch[i], unit)
        for i, (q, x) in enumerate(zip(quantisers, (lhs, rhs)))
    ]
    if hadamard:
        rows = [_transformed(r, hadamard, is_second=i > 0) for i, r in enumerate(rows)]
    quantised = [q.quantise(r) for q, r in zip(quantisers, rows, strict=True)]
    return quantised, (tuple(r.contract for r in rows), tuple(r.batch for r in rows))


def hadamard_matrix(length: int) -> np.ndarray:
    """A Hadamard matrix whose rows have random signs, always the same.

    Its product with its transpose is `length` times the identity.
    """
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < length:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(length).choice(np.array([-1, 1], np.float32), length)
    return signs[:, None] * matrix


def _transformed(rows: Rows, length: int, *, is_second: bool) -> Rows:
    """Multiply each `length` elements of rows by a Hadamard matrix.

    Both operands together are divided by `length`: by powers of two, one for each.
    """
    exponent = length.bit_length() - 1
    exponent = exponent // 2 if is_second else exponent - exponent // 2
    matrix = hadamard_matrix(length) * np.float32(2.0**-exponent)
    axis, shape = rows.axis, rows.x.shape
    x = rows.x.astype(jnp.float32)
    x = lax.reshape(x, (*shape[:axis], shape[axis] // length, length, *shape[axis + 1 :]))
    dims = ((axis + 1,), (0,)), ((), ())
    out = lax.dot_general(x, matrix, dims, precision=lax.Precision.HIGHEST)
    return dataclasses.replace(rows, x=lax.reshape(jnp.moveaxis(out, -1, axis + 1), shape))


def _written_out(lhs: Any, rhs: Any, *, dtype: Any, **params: Any) -> Any:
    """The product of what the quantised operands stand for."""
    quantised, dims = _quantised_operands(lhs, rhs, params)
    lhs, rhs = (q.values(dtype) for q in quantised)
    types = params["precision"], params["preferred_element_type"]
    return lax.dot_general(lhs, rhs, dims, *types)


def has_kernel(quantisers: Sequence[Quantiser]) -> bool:
    """Whether a kernel multiplies operands of these formats: no mixture, not E5M2 by E5M2."""
    lhs, rhs = (q.format for q in quantisers)
    sizes = lhs.block_size == rhs.block_size, lhs.scale_dtype == rhs.scale_dtype
    bits = lhs.is_fp8 == rhs.is_fp8
    return all(sizes) and bits and not lhs.dtype == rhs.dtype == E5M2


def _kernel(lhs: Any, rhs: Any, **params: Any) -> Any:
    """`jax.nn.scaled_matmul`, of operands brought to `(batch, rows, contracted)`."""
    quantised, dims = _quantised_operands(lhs, rhs, params)
    wide = params["preferred_element_type"]
    total = jnp.dtype(wide) if jnp.finfo(wide).bits <= 32 else jnp.dtype(jnp.float32)
    avals = [jax.ShapeDtypeStruct(q.shape, jnp.float32) for q in quantised]
    out = jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims), *avals)
    parts = [q.parts() for q in quantised]
    elements = [_matrix(parts[i][0], dims[0][i], dims[1][i]) for i in range(2)]
    scales = [_matrix(parts[i][1], dims[0][i], dims[1][i]) for i in range(2)]
    product = jax.nn.scaled_matmul(*elements, *scales, preferred_element_type=total)
    product = lax.reshape(product, out.shape)
    for side, q in enumerate(quantised):
        if isinstance(q.exponent, int):
            product = (
                times_power(product.astype(jnp.float32), q.exponent) if q.exponent else product
            )
        else:
            ndims = [len(a.shape) for a in avals]
            factor = _along_result(q.exponent, side, ndims, dims)
            product = times_power(product.astype(jnp.float32), factor)
    return product.astype(wide)


def _matrix(x: jax.Array, contract: Sequence[int], batch: Sequence[int]) -> jax.Array:
    """Bring an operand to three dims."""
    free = [a for a in range(x.ndim) if a not in contract and a not in batch]
    shape = [math.prod(x.shape[a] for a in dims) for dims in (batch, free, contract)]
    return lax.reshape(lax.transpose(x, (*batch, *free, *contract)), shape)


def _along_result(x: jax.Array, side: int, ndims: Sequence[int], dims: Any) -> jax.Array:
    """Lay something of an operand, of length 1 along contracted dims, along the result's."""
    contract, batch = dims
    free = [
        [a for a in range(n) if a not in (*contract[i], *batch[i])] for i, n in enumerate(ndims)
    ]
    x = lax.transpose(x, (*batch[side], *free[side], *contract[side]))
    head, tail = x.shape[: len(batch[side])], x.shape[len(batch[side]) :][: len(free[side])]
    ones = (1,) * len(free[1 - side])
    return lax.reshape(x, (*head, *ones, *tail) if side else (*head, *tail, *ones))


block_dot_p = Primitive("block_dot_general")
_compat.lower_with_devices(block_dot_p)


def block_dot_general(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, **params: Any) -> Any:
    """Quantise both operands along the contracted dims, and multiply.

    Args:
        lhs: array of a floating dtype.
        rhs: array of a floating dtype.
        dimension_numbers: as in `jax.lax.dot_general`.
        **params: `quantisers` of both, `hadamard` (0 or the length of a random Hadamard transform
            of both along the contracted dims), and `precision`, `preferred_element_type` and
            `out_sharding` as in `jax.lax.dot_general`.
    """
    axes = _compat.varying_axes(lhs) | _compat.varying_axes(rhs)
    lhs, rhs = (_compat.as_varying(x, axes) for x in (lhs, rhs))
    return block_dot_p.bind(lhs, rhs, dimension_numbers=dimension_numbers, **params)


def _of_dot(params: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in params.items() if n not in ("quantisers", "hadamard")}


@block_dot_p.def_abstract_eval
def _dot_aval(lhs: Any, rhs: Any, **params: Any) -> Any:
    common = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = lhs.update(dtype=common), rhs.update(dtype=common)
    return lax.dot_general_p.abstract_eval(lhs, rhs, **_of_dot(params))[0]


@functools.partial(jax.jit, static_argnames="params")
def _jitted(lhs: Any, rhs: Any, params: tuple[tuple[str, Any], ...]) -> Any:
    return block_dot_p.bind(lhs, rhs, **dict(params))


@block_dot_p.def_impl
@compiled
def _dot_impl(lhs: Any, rhs: Any, **params: Any) -> Any:
    return _jitted(lhs, rhs, tuple(sorted(params.items())))


def _for_cuda(lhs: Any, rhs: Any, **params: Any) -> Any:
    is_empty = 0 in (*lhs.shape, *rhs.shape)  # which XLA refuses to compile as a kernel
    if has_kernel(params["quantisers"]) and not is_empty:
        return _kernel(lhs, rhs, **params)
    return _written_out(lhs, rhs, dtype=jnp.bfloat16, **params)


def _on_any_mesh(function: Callable, aval: Any, *operands: Any) -> Any:
    """Call a function whose reshapes say nothing of shardings, on a mesh of explicit axes too."""
    sharding = _compat.explicit_sharding(aval)
    if sharding is None:
        return function(*operands)
    with jax.sharding.use_abstract_mesh(sharding.mesh):
        return jax.sharding.auto_axes(function, out_sharding=sharding)(*operands)


def _lowered(function: Callable) -> Callable:
    """How the product is lowered, by a function of its operands."""

    def lowered(lhs: Any, rhs: Any, **params: Any) -> Any:
        aval = _dot_aval(jax.typeof(lhs), jax.typeof(rhs), **params)
        own = functools.partial(function, **{**params, "out_sharding": None})
        return _on_any_mesh(own, aval, lhs, rhs)

    return mlir.lower_fun(lowered, multiple_results=False)


for _platform, _function in (
    (None, functools.partial(_written_out, dtype=jnp.bfloat16)),
    ("cpu", functools.partial(_written_out, dtype=jnp.float32)),
    ("cuda", _for_cuda),
):
    mlir.register_lowering(block_dot_p, _lowered(_function), platform=_platform)


def _batch_dot(args: Any, dims: Any, **params: Any) -> Any:
    contract, batch = params["dimension_numbers"]
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    both = all(d is not None for d in dims)
    shifted = [int(d is not None) for d in dims]
    contract = tuple(tuple(a + s for a in axes) for axes, s in zip(contract, shifted))
    batch = tuple(
        (*((0,) if both else ()), *(a + s for a in axes)) for axes, s in zip(batch, shifted)
    )
    quantisers = tuple(
        q.batched() if s else q for q, s in zip(params["quantisers"], shifted, strict=True)
    )
    sharding = params["out_sharding"]
    if both or shifted[0]:
        place = 0 if both else len(batch[0])
    else:
        place = len(batch[0]) + args[0].ndim - len(contract[0]) - len(batch[0])
    if sharding is not None:
        spec = list(sharding.spec) + [None] * (len(batch[0]) - len(sharding.spec))
        sharding = sharding.update(spec=jax.P(*spec[:place], None, *spec[place:]))
    params |= dict(
        dimension_numbers=(contract, batch), quantisers=quantisers, out_sharding=sharding
    )
    return block_dot_p.bind(*moved, **params), place


batching.primitive_batchers[block_dot_p] = _batch_dot


block_round_p = Primitive("block_round")


def block_round(x: jax.Array, quantiser: Quantiser, contract: Any, batch: Any) -> jax.Array:
    """Round an operand to the numbers that it has in a block format, as bfloat16.

    For products that no block-scaled kernel computes: of groups, or of two kinds of formats.

    Args:
        x: array of a floating dtype.
        quantiser: how.
        contract: the dims along which blocks lie.
        batch: dims that have a power of two of their own for the whole, where one is chosen.
    """
    dims = dict(contract=tuple(contract), batch=tuple(batch))
    return block_round_p.bind(x, quantiser=quantiser, **dims)


def _rounded(x: Any, *, quantiser: Quantiser, contract: Any, batch: Any) -> Any:
    def function(x: Any) -> Any:
        rows = quantiser.rows(x, contract, batch)
        return rows.undo(quantiser.quantise(rows).values(jnp.bfloat16), x.shape)

    return _on_any_mesh(function, jax.typeof(x), x)


_jitted_rounded = jax.jit(_rounded, static_argnames=("quantiser", "contract", "batch"))
block_round_p.def_impl(compiled(_jitted_rounded))
block_round_p.def_abstract_eval(
    lambda x, **_: x.update(dtype=np.dtype(jnp.bfloat16), weak_type=False)
)
mlir.register_lowering(block_round_p, mlir.lower_fun(_rounded, multiple_results=False))


def _batch_round(args: Any, dims: Any, *, quantiser: Quantiser, contract: Any, batch: Any) -> Any:
    x = jnp.moveaxis(args[0], dims[0], 0)
    moved = (tuple(a + 1 for a in axes) for axes in (contract, batch))
    return block_round(x, quantiser.batched(), *moved), 0


batching.primitive_batchers[block_round_p] = _batch_round
