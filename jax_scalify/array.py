"""`ScaledArray`, and conversions between trees of arrays and of scaled arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, tree_util

from jax_scalify import _compat, dtypes, pow2
from jax_scalify.objects import map_states
from jax_scalify.statistics import statistic


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledArray:
    """A tensor `data * scale`, with `scale` a power of two.

    Attributes:
        data: array of any floating dtype, best close to unit RMS.
        scale: power of two, or 0 ("the data is zero, any scale will do"). Shape `()`; or the rank
            of `data` with every dim 1 or equal (one scale a channel); or a lower rank, aligned
            with the *leading* axes of `data`, as `vmap` and a scan's stacking produce them.
            A Python float is a *static* scale: it is part of the tree's structure, so that `jit`
            specialises on it. An array is a *dynamic* scale, a leaf.

    Nothing is validated here, since tree functions put placeholders in both fields:
    `scaled_array` and `as_scaled_array` validate.

    Example:
        >>> x = ScaledArray(jnp.array([1.0, -0.5], jnp.float16), jnp.float32(2.0**20))
        >>> print(x.to_array(jnp.float32)[1], x.dtype)
        -524288.0 float16
    """

    data: Any
    scale: Any

    is_static: bool = dataclasses.field(init=False, repr=False)
    """Whether the scale is a Python number, known while tracing."""

    def __post_init__(self) -> None:
        # Numbers in both fields are placeholders, as in `in_axes=(ScaledArray(1, 0),)`.
        static = type(self.scale) in (float, int) and type(self.data) is not int
        object.__setattr__(self, "is_static", static)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the data."""
        return self.data.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the data."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """Rank of the data."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Number of elements of the data."""
        return math.prod(self.shape)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the data."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def astype(self, dtype: Any, *, key: Any = None) -> ScaledArray:
        """Cast the data and keep the scale; to FP8, values out of range saturate.

        With a `key` of `jax.random` the rounding is stochastic, else to nearest even.
        """
        dtype = dtypes.as_floating(dtype, "dtype")
        return ScaledArray(dtypes.cast(jnp.asarray(self.data), dtype, key=key), self.scale)

    def to_array(self, dtype: Any = None) -> jax.Array:
        """Return `data * scale`, multiplied in at least float32 and cast once to `dtype`."""
        data = jnp.asarray(self.data)
        compute = dtypes.compute_dtype(data.dtype)
        if not self.is_static or self.scale != 1:
            scale = align_scale(self.scale, data.ndim).astype(dtypes.real_dtype(compute))
            data = data.astype(compute) * scale
        return dtypes.cast(data, self.dtype if dtype is None else dtype)

    def item(self) -> float | complex:
        """Return the only element as a Python number."""
        return np.asarray(self).item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("A ScaledArray has no buffer of its values: `copy` cannot be False.")
        data = np.asarray(self.data)
        wide = np.promote_types(np.dtype(dtypes.compute_dtype(data.dtype)), np.float32)
        scale = along_leading_axes(np.asarray(self.scale), data.ndim)
        values = data.astype(wide) * np.asarray(scale, wide)
        return np.asarray(values).astype(data.dtype if dtype is None else dtype)

    def __float__(self) -> float:
        return float(self.__array__(np.float64))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        return f"ScaledArray(data={self.data!r}, scale={self.scale!r})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"A ScaledArray has no `{name}`. {_ADVICE}")


_ADVICE = (
    "Put `@jsa.scalify` on the function that computes with it (below `@jax.jit`) and pass it as an "
    "argument; or take its value, `jsa.asarray(x)`."
)
_OPERATORS = {
    **{"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod"},
    **{"@": "matmul", "**": "pow", "divmod": "divmod"},
}
_REFUSED = {
    **{f"__{name}__": symbol for symbol, name in _OPERATORS.items()},
    **{f"__r{name}__": symbol for symbol, name in _OPERATORS.items()},
    **{"__neg__": "-", "__pos__": "+", "__abs__": "abs", "__round__": "round"},
    **{"__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="},
    **{"__getitem__": "[]", "__setitem__": "[]"},
}


def _refusal(symbol: str) -> Any:
    def refuse(self: ScaledArray, *operands: Any) -> Any:
        raise TypeError(f"A ScaledArray has no `{symbol}`. {_ADVICE}")

    return refuse


for _name, _symbol in _REFUSED.items():
    setattr(ScaledArray, _name, _refusal(_symbol))


def _flatten_with_keys(array: ScaledArray) -> tuple[tuple, float | None]:
    data = (tree_util.GetAttrKey("data"), array.data)
    if array.is_static:
        return (data,), float(array.scale)
    return (data, (tree_util.GetAttrKey("scale"), array.scale)), None


def _flatten(array: ScaledArray) -> tuple[tuple, float | None]:
    if array.is_static:
        return (array.data,), float(array.scale)
    return (array.data, array.scale), None


def _unflatten(static_scale: float | None, children: Iterable[Any]) -> ScaledArray:
    data, *dynamic = children
    array = ScaledArray(data, dynamic[0] if static_scale is None else static_scale)
    # Whatever is put in the fields, the structure stays.
    object.__setattr__(array, "is_static", static_scale is not None)
    return array


tree_util.register_pytree_with_keys(ScaledArray, _flatten_with_keys, _unflatten, _flatten)
export.register_pytree_node_serialization(
    ScaledArray,
    serialized_name="jax_scalify.ScaledArray",
    serialize_auxdata=lambda scale: b"" if scale is None else scale.hex().encode(),
    deserialize_auxdata=lambda text: float.fromhex(text.decode()) if text else None,
)


def is_scaled(leaf: Any) -> bool:
    """Tell whether a leaf is a `ScaledArray`."""
    return isinstance(leaf, ScaledArray)


PACKED = jnp.dtype(jnp.float8_e8m0fnu)
"""Dtype of scales that are stored, not computed with: `storage.pack_scales`."""


def is_packed(leaf: Any) -> bool:
    """Tell whether a leaf is a `ScaledArray` whose scale is packed for storage."""
    return is_scaled(leaf) and not leaf.is_static and getattr(leaf.scale, "dtype", None) == PACKED


def check_unpacked(tree: Any, name: str = "tree") -> None:
    """Raise a `TypeError` that names the leaf whose scale is packed for storage."""
    for path, leaf in tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
        if is_packed(leaf):
            raise TypeError(
                f"`{name}{tree_util.keystr(path)}` has a scale that is packed for storage "
                f"({PACKED}). Unpack the state first: `state = jsa.unpack_scales(state)`."
            )


def along_leading_axes(scale: Any, ndim: int) -> Any:
    """Reshape a scale of a lower rank so that it lies along the leading axes."""
    return scale.reshape(scale.shape + (1,) * (ndim - scale.ndim)) if scale.ndim else scale


def align_scale(scale: Any, ndim: int) -> jax.Array:
    """Bring a scale to shape `()` or to the rank `ndim` of its data."""
    return along_leading_axes(jnp.asarray(scale), ndim)


def check_scale(scale: Any, data: Any, name: str = "scale") -> None:
    """Refuse a scale that cannot belong to the data; a traced one is checked for its shape."""
    kind = dtypes.leaf_dtype(scale)
    if kind is None or not (
        jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
    ):
        raise TypeError(f"`{name}` must be a real number or array, got {type(scale).__name__}.")
    shape, data_shape = np.shape(scale), np.shape(data)
    full = shape + (1,) * (len(data_shape) - len(shape))
    fits = len(shape) <= len(data_shape) and all(
        s in (1, d) for s, d in zip(full, data_shape, strict=True)
    )
    if shape and not fits:
        raise ValueError(
            f"`{name}` of shape {shape} does not fit data of shape {data_shape}: it must have "
            "shape (), or its rank with every dim 1 or equal, or match its leading axes."
        )
    if _compat.is_traced(scale):
        return
    values = np.asarray(scale, np.float64)
    if not np.all(np.isfinite(values)) or np.any(values < 0):
        raise ValueError(f"`{name}` must be finite and not negative, got {scale!r}.")
    if np.any(values == 0) and not _compat.is_traced(data):
        zero_where = np.broadcast_to(values.reshape(full), data_shape) == 0 if shape else True
        if np.any(np.asarray(data)[zero_where] != 0):
            raise ValueError(f"`{name}` 0 needs data that is zero, got data that is not.")


def check_scale_dtype(scale_dtype: Any) -> Any:
    """Return the dtype of scales, float32 if there is none; refuse one that cannot hold them."""
    dtype = jnp.dtype(scale_dtype or jnp.float32)
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(
            f"`scale_dtype` must be float32, float64 or bfloat16, got {dtype}: it has to hold the "
            "exponents of float32."
        )
    return dtype


def _keepdims_axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The axes that share a scale, given those that have their own."""
    own = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    own = {a % ndim for a in own if -ndim <= a < ndim}
    return tuple(a for a in range(ndim) if a not in own)


def rescale_data(data: jax.Array, ratio: jax.Array) -> jax.Array:
    """Return `data * ratio`, in at least float32 and cast once."""
    compute = dtypes.compute_dtype(data.dtype)
    ratio = ratio.astype(dtypes.real_dtype(compute))
    return dtypes.cast(data.astype(compute) * ratio, data.dtype)


def scaled_array(data: Any, scale: Any, dtype: Any = None, scale_dtype: Any = None) -> ScaledArray:
    """Make a `ScaledArray` of the value `data * scale`.

    Args:
        data: array-like of a floating dtype.
        scale: not negative and finite. One that is not a power of two is rounded down and the
            data takes the rest. A Python float makes a static scale, an array a dynamic one.
        dtype: dtype of the data; by default, its own.
        scale_dtype: dtype of a dynamic scale; by default float32.

    Raises:
        TypeError: if `data` or `dtype` is not floating point, or `scale_dtype` too narrow.
        ValueError: if `scale` is negative, nan, infinite, of a shape that does not fit, or 0
            where the data is not zero.

    Example:
        >>> print(scaled_array(jnp.ones(2), 6.0).to_array())
        [6. 6.]
    """
    data = jnp.asarray(data, None if dtype is None else dtypes.as_floating(dtype, "dtype"))
    if not dtypes.is_scalable(data.dtype):
        raise TypeError(f"`data` must have a floating dtype, got {data.dtype}.")
    check_scale(scale, data)
    static = type(scale) in (float, int)
    if static:
        limit = pow2.MAX_EXPONENT
        exponent = max(-limit, min(limit, pow2.floor_exponent(scale)))
        power = 0.0 if scale == 0 else math.ldexp(1.0, exponent)
        with np.errstate(over="ignore"):  # the value is infinite then
            compute = dtypes.real_dtype(dtypes.compute_dtype(data.dtype))
            rest = np.asarray(scale / power if power else 1.0, compute)
        data = data if rest == 1 else rescale_data(data, jnp.asarray(rest))
        return ScaledArray(data, power)
    scale_dtype = check_scale_dtype(scale_dtype)
    power = _power_of(scale, scale_dtype)
    if _compat.is_traced(scale):
        wide = scale.astype(jnp.promote_types(scale.dtype, scale_dtype))
        rest = jnp.where(power == 0, 1, wide / power.astype(wide.dtype))
    else:
        powers = pow2.round_down_number(scale)
        with np.errstate(over="ignore"):  # the value is infinite then
            rest = np.asarray(scale, np.float64) / np.where(powers == 0, 1, powers)
            rest = np.where(powers == 0, 1, rest)
            compute = dtypes.real_dtype(dtypes.compute_dtype(data.dtype))
            rest = jnp.asarray(rest.astype(compute))
    return ScaledArray(rescale_data(data, align_scale(rest, data.ndim)), power)


def _power_of(scale: Any, dtype: Any) -> jax.Array:
    """Round a scale that somebody gave down to a power of two within the range of scales."""
    if not _compat.is_traced(scale):
        return jnp.array(pow2.round_down_number(scale).astype(dtype))
    wide = scale if jnp.issubdtype(scale.dtype, jnp.floating) else scale.astype(dtype)
    return pow2.round_down(wide, dtype)


def _choose_scale(data: jax.Array, scale: Any, scale_dtype: Any, axis: Any) -> jax.Array:
    """The power of two (or 0) by which `as_scaled_array` divides a leaf."""
    if scale is not None and not isinstance(scale, str):
        check_scale(scale, data)
        return _power_of(scale, scale_dtype)
    axes = _keepdims_axes(axis, data.ndim)
    per_axis = len(axes) < data.ndim
    if scale is not None:
        largest = statistic(data, scale, axes if per_axis else None)
        power = pow2.round_down(largest, scale_dtype)
        return jnp.where(jnp.isfinite(largest), power, jnp.ones_like(power))
    is_zero = not _compat.is_traced(data) and not np.any(np.asarray(data))
    shape = tuple(1 if a in axes else d for a, d in enumerate(data.shape)) if per_axis else ()
    return jnp.full(shape, 0.0 if is_zero else 1.0, scale_dtype)


def _convert(leaf: Any, path: tuple, scale: Any, dtype: Any, scale_dtype: Any, axis: Any) -> Any:
    if is_scaled(leaf):
        return leaf if dtype is None else leaf.astype(dtype)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "OUS":
        raise TypeError(
            f"`tree{tree_util.keystr(path)}` is an array of dtype {leaf.dtype}: only numbers have "
            "scales. Remove it from the tree or convert it to a numeric dtype."
        )
    kind = dtypes.leaf_dtype(leaf)
    if kind is None or not dtypes.is_scalable(kind):
        return leaf
    data = jnp.asarray(leaf)
    power = _choose_scale(data, scale, scale_dtype, axis)
    compute = dtypes.compute_dtype(data.dtype)
    ratio = jnp.where(power == 0, 1, 1 / power).astype(dtypes.real_dtype(compute))
    wide = data.astype(compute) * align_scale(ratio, data.ndim)
    return ScaledArray(dtypes.cast(wide, dtype or data.dtype), power)


def as_scaled_array(
    tree: Any,
    scale: Any | Literal["rms", "max"] | None = None,
    *,
    dtype: Any = None,
    scale_dtype: Any = None,
    axis: int | Sequence[int] | None = None,
) -> Any:
    """Turn every floating-point leaf of a tree into a `ScaledArray` of the same value.

    Integers, bools, PRNG keys, `None`, callables, strings and other non-arrays pass through; a
    leaf that is a `ScaledArray` already keeps its scale. Every leaf gets a scale buffer of its
    own, so that a state can be donated. Of an NNX object it makes a new one, in which variables
    that are shared stay shared.

    Args:
        tree: any pytree: a Flax `TrainState`, NNX state, optax state, Equinox module, array...
        scale: `None` for 1 (a concrete all-zero leaf gets 0, "any scale will do"); a number or
            array, rounded down to a power of two; or `"rms"` or `"max"`, taken from each leaf.
        dtype: dtype of the data, to which it is rounded *after* the division by the scale; by
            default each leaf's own.
        scale_dtype: dtype of the scales, float32 by default.
        axis: axis or axes along which every index has a scale of its own, of shape `(..., n, ...)`
            with 1 for the other axes. A leaf without that axis has one scale.

    Returns:
        The tree with `ScaledArray` leaves whose scales are dynamic.

    Raises:
        TypeError: for an array of objects or strings, naming the leaf; for a `dtype` that is not
            floating point; for a `scale_dtype` that cannot hold the exponents of float32.
        ValueError: for a `scale` that is negative, nan, infinite, of a shape that does not fit,
            or 0 where the leaf is not zero; for an unknown statistic.

    Example:
        >>> w = as_scaled_array({"w": jnp.full((2, 2), 0.03)}, scale="rms", dtype=jnp.float16)
        >>> print(w["w"].scale, w["w"].dtype)
        0.015625 float16
    """
    if isinstance(scale, str) and scale not in ("rms", "max"):
        raise ValueError(
            f'`scale` must be None, a number, an array, "rms" or "max", got {scale!r}.'
        )
    if dtype is not None:
        dtype = dtypes.as_floating(dtype, "dtype")
    scale_dtype = check_scale_dtype(scale_dtype)
    convert = functools.partial(
        _convert, scale=scale, dtype=dtype, scale_dtype=scale_dtype, axis=axis
    )

    def of_pytree(tree: Any) -> Any:
        return tree_util.tree_map_with_path(
            lambda p, leaf: convert(leaf, p), tree, is_leaf=is_scaled
        )

    return map_states(of_pytree, tree)


def _map_leaves(convert: Any, tree: Any) -> Any:
    return map_states(functools.partial(jax.tree.map, convert, is_leaf=is_scaled), tree)


def asarray(tree: Any, dtype: Any = None) -> Any:
    """Turn every `ScaledArray` of a tree back into a plain array `data * scale`.

    Args:
        tree: any pytree; plain leaves pass through unchanged unless `dtype` is given, then
            floating-point ones are cast.
        dtype: dtype of the values. `jnp.float32` is what evaluation wants: a value outside the
            range of float16 data is still inside that of `data * scale`. Default: the data's.

    Example:
        >>> x = ScaledArray(jnp.array([40000.0], jnp.float16), jnp.float32(2.0**-25))
        >>> print(asarray(x, jnp.float32))
        [0.00119209]
    """

    def convert(leaf: Any) -> Any:
        if is_scaled(leaf):
            return leaf.to_array(dtype)
        kind = dtypes.leaf_dtype(leaf)
        if dtype is None or kind is None or not dtypes.is_scalable(kind):
            return leaf
        return dtypes.cast(jnp.asarray(leaf), dtype)

    return _map_leaves(convert, tree)


def freeze_scales(tree: Any) -> Any:
    """Make every scalar scale of concrete state static: a Python float in the tree's structure.

    A step that is traced with static scales has no scale arithmetic left for them. Scales that
    are not scalar stay dynamic. A leaf of scale 0 has none to keep: it takes that of its first
    value, so freeze a state of zeros after its first steps, or the step compiles once more.

    Example:
        >>> state = jsa.as_scaled_array({"w": jnp.ones(2)}, scale=4.0)
        >>> print(jsa.freeze_scales(state)["w"].scale)
        4.0
    """
    check_unpacked(tree)

    def freeze(leaf: Any) -> Any:
        if is_scaled(leaf) and not leaf.is_static and np.ndim(leaf.scale) == 0:
            return ScaledArray(leaf.data, float(leaf.scale))
        return leaf

    return _map_leaves(freeze, tree)


def thaw_scales(tree: Any, scale_dtype: Any = None) -> Any:
    """Make every static scale dynamic again: an array, a leaf of the tree.

    Example:
        >>> state = jsa.freeze_scales(jsa.as_scaled_array({"w": jnp.ones(2)}, scale=4.0))
        >>> jsa.thaw_scales(state)["w"].scale
        Array(4., dtype=float32)
    """

    def thaw(leaf: Any) -> Any:
        if is_scaled(leaf) and leaf.is_static:
            return ScaledArray(leaf.data, jnp.array(leaf.scale, scale_dtype or jnp.float32))
        return leaf

    return _map_leaves(thaw, tree)
