"""A float16 matmul whose sums are multiplied by a power of two before they are rounded.

On GPUs, XLA folds a constant factor after a matmul into cuBLAS's kernel, which applies it to its
float32 sums, if no other matmul has the same factor and a result of the same shape. The kernel
writes float16, and devices that share the contracted axis exchange float16. On other platforms the
sums are float32 in the program, because a float16 sum might overflow before it is multiplied.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_scalify.base.eager import compiled
from jax_scalify.base.pins import pin_constant
from jax_scalify.primitives.definitions import define, jvp_of_moved

# Triton's matmuls, sums over devices and equal matmuls (XLA merges their factors into one array) do
# not fold the factor: they round to float16 before it. So the factor behind the matmul is at least
# 2**-6, and elements of up to 2**10 times the expected size stay in range. If the factor is
# smaller, an operand is multiplied by the rest, at least 2**-10. Operand elements of 2**-7 then
# still have the precision of bfloat16. The smallest RMS of gradients is 2**-9.
_SMALLEST_BEHIND = -6
SMALLEST_EXPONENT = _SMALLEST_BEHIND - 10


def _wide(lhs: Any, rhs: Any, *, exponent: int, pinned: bool = False, **params: Any) -> Any:
    total = lax.dot_general_p.bind(lhs, rhs, preferred_element_type=np.dtype("float32"), **params)
    if exponent:
        factor = np.float32(math.ldexp(1.0, exponent))
        # If the factor is pinned, kernels that differ only in the factor are compiled once.
        total = lax.mul(pin_constant(factor) if pinned else factor, total)
    return lax.convert_element_type(total, jnp.float16)


def _narrow(lhs: Any, rhs: Any, *, exponent: int, **params: Any) -> Any:
    behind = max(exponent, _SMALLEST_BEHIND)
    if exponent < behind:
        factor = np.float16(math.ldexp(1.0, exponent - behind))
        # This factor is a pass over an operand, so it goes to the smaller one.
        lhs, rhs = (lhs * factor, rhs) if lhs.size < rhs.size else (lhs, rhs * factor)
    total = lax.dot_general_p.bind(lhs, rhs, preferred_element_type=np.dtype("float16"), **params)
    return lax.mul(total, np.float16(math.ldexp(1.0, behind))) if behind else total


def _aval(lhs: Any, rhs: Any, *, exponent: int, **params: Any) -> Any:
    dtype = np.dtype("float16")
    return lax.dot_general_p.abstract_eval(lhs, rhs, preferred_element_type=dtype, **params)[0]


def _jvp(_: Any, primals: Any, tangents: Any, **params: Any) -> Any:
    """Differentiate the float32 form, which is linear in each operand."""
    return jvp_of_moved(functools.partial(_wide, **params), primals, tangents)


def _batch(_: Any, args: Any, dims: Any, **params: Any) -> Any:
    return jax.vmap(functools.partial(_wide, **params), dims)(*args), 0


# `dot_general(lhs, rhs) * 2**exponent` of float16 arrays, in float16, for exponents from -16 to 0.
# The other parameters are those of `lax.dot_general_p`, without `preferred_element_type`.
narrow_dot_p = define("narrow_dot_general", _wide, _aval, jvp=_jvp, batch=_batch)
for _platform, _function in (
    ("cpu", functools.partial(_wide, pinned=True)),
    ("cuda", _narrow),
    ("rocm", _narrow),
):
    _lowered = mlir.lower_fun(_function, multiple_results=False)
    mlir.register_lowering(narrow_dot_p, _lowered, platform=_platform)


@functools.partial(jax.jit, static_argnames=("exponent", "params"))
def _jitted(lhs: Any, rhs: Any, exponent: int, params: tuple[tuple[str, Any], ...]) -> Any:
    return narrow_dot_p.bind(lhs, rhs, exponent=exponent, **dict(params))


@narrow_dot_p.def_impl
@compiled
def _impl(lhs: Any, rhs: Any, *, exponent: int, **params: Any) -> Any:
    return _jitted(lhs, rhs, exponent, tuple(sorted(params.items())))
