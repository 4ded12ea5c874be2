"""`softmax`, `log_softmax` and `logsumexp`."""

from __future__ import annotations

import math
from typing import Any

import jax

from jax_scalify.nn._rules import axes_of, count_scale, scale_rules
from jax_scalify.scales.algebra import ONE, Scale, join


def class_count(x: Any, axis: Any) -> int:
    """Return the number of elements along one axis, several axes, or all axes (None)."""
    return math.prod(x.shape[a] for a in axes_of(x, axis))


def _slope(x: Any, axis: Any) -> Scale:
    """Return `1 / n`; in float16 at least 2**-6, so that cotangents keep nine octaves of room."""
    return ONE / count_scale(class_count(x, axis), x.dtype, limit=6)


def log_scale(count: int) -> Scale:
    """Return `log(count)`, rounded down, at least 1: the logarithm of a sum of equal terms."""
    return Scale(math.floor(math.log2(max(math.log(max(count, 1)), 1))))


@scale_rules(
    scale=lambda x, where, *, axis: ONE / count_scale(class_count(x, axis), x.dtype),
    slopes=lambda x, where, *, axis: _slope(x, axis),
    static_argnames="axis",
)
def softmax(
    x: jax.Array, axis: int | tuple[int, ...] | None = -1, where: jax.Array | None = None
) -> jax.Array:
    """`exp(x) / sum(exp(x))`, as `jax.nn.softmax`.

    Scales: `out.scale = 1/n` for n classes, static. In float16 it is at least 2**-10, so that one
    confident class does not overflow. The gradient has `cotangent.scale / n`, in float16 at least
    `cotangent.scale * 2**-6`.

    Args:
        x: logits, an array of a floating dtype.
        axis: the axis or axes of the classes.
        where: bool array that broadcasts to `x`, True for classes that count. Other classes give 0.

    Raises:
        TypeError: if `axis` is no int and no tuple of ints.
        ValueError: if `x` has no such axis.

    Source: Blake et al., "Unit Scaling", 2023, table A.2.

    Example:
        >>> x = jsa.as_scaled_array(jnp.zeros(8, jnp.float16), scale=1.0)
        >>> print(jsa.scalify(jsa.nn.softmax)(x).scale)
        0.125
    """
    axes_of(x, axis)
    return jax.nn.softmax(x, axis, where)


@scale_rules(
    scale=lambda x, where, *, axis: join(log_scale(class_count(x, axis)), x.scale),
    slopes=lambda x, where, *, axis: ONE,
    static_argnames="axis",
)
def log_softmax(
    x: jax.Array, axis: int | tuple[int, ...] | None = -1, where: jax.Array | None = None
) -> jax.Array:
    """`x - logsumexp(x)`, as `jax.nn.log_softmax`.

    Scales: `out.scale = max(log(n), x.scale)` for n classes. The gradient, `ct - p * sum(ct)`, has
    the cotangent's scale.
    """
    axes_of(x, axis)
    return jax.nn.log_softmax(x, axis, where)


def logsumexp(
    a: jax.Array,
    axis: int | tuple[int, ...] | None = None,
    b: jax.Array | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: jax.Array | None = None,
) -> Any:
    """`log(sum(b * exp(a)))`, as `jax.nn.logsumexp`.

    Scales: `out.scale = max(log(n), a.scale)` for n terms. The gradient, `p * ct`, has
    `cotangent.scale / n`. With `b` or `return_sign`, the scales are those of its primitives.

    Example:
        >>> print(jsa.nn.logsumexp(jnp.zeros((1, 8)), axis=-1).round(4))
        [2.0794]
    """
    if b is not None or return_sign:
        return jax.nn.logsumexp(a, axis, b, keepdims, return_sign, where)
    return _logsumexp(a, where, axis=axis, keepdims=keepdims)


@scale_rules(
    scale=lambda a, where, *, axis, keepdims: join(log_scale(class_count(a, axis)), a.scale),
    slopes=lambda a, where, *, axis, keepdims: _slope(a, axis),
    static_argnames=("axis", "keepdims"),
)
def _logsumexp(a: jax.Array, where: jax.Array | None, axis: Any, keepdims: bool) -> jax.Array:
    return jax.nn.logsumexp(a, axis, keepdims=keepdims, where=where)
