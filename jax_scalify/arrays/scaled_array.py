"""`ScaledArray`: data and scale as one leaf of a tree, and its validation."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, tree_util

from jax_scalify import _compat
from jax_scalify.base import dtypes
from jax_scalify.base.stochastic_rounding import cast


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledArray:
    """A tensor `data * scale`, with `scale` a power of two.

    Arithmetic and `jax.numpy` raise, because they belong under `scalify`. For a single number, such
    as a loss, they return plain arrays. Comparisons (`==`, `<`, ...) compare values, element by
    element, in at least float32. A Python number is first rounded to the precision of `dtype`, as
    in JAX. A hash identifies the object, not its values.

    Attributes:
        data: array of any floating dtype, ideally close to unit RMS.
        scale: power of two, or 0 ("the data is zero, any scale will do"). Its shape is `()`; or the
            rank of `data` with each dim 1 or equal (one scale for each channel); or a lower rank,
            aligned with the *leading* axes of `data`, as `vmap` and a scan's stacking produce it.
            A Python float is a *static* scale: it is part of the tree's structure, so that `jit`
            specialises on it. An array is a *dynamic* scale, a leaf.

    The constructor validates nothing, because tree functions put placeholders in both fields.
    `scaled_array`, `as_scaled_array` and every function that takes a `ScaledArray` validate. Under
    `jit` the values of a dynamic scale are unknown, and are not checked to be powers of two.

    Example:
        >>> x = ScaledArray(jnp.array([1.0, -0.5], jnp.float16), jnp.float32(2.0**20))
        >>> print(x.to_array(jnp.float32)[1], x.dtype)
        -524288.0 float16
    """

    data: Any
    scale: Any

    is_static: bool = dataclasses.field(init=False, repr=False)
    """Whether the scale is known while tracing, as a number or as a static `Scale` of a rule."""

    def __post_init__(self) -> None:
        # Numbers in both fields are placeholders, as in `in_axes=(ScaledArray(1, 0),)`.
        static = type(self.scale) in (float, int) or getattr(self.scale, "is_static", False)
        object.__setattr__(self, "is_static", static and type(self.data) is not int)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return self.data.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the data."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """The rank of the data."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the data."""
        return math.prod(self.shape)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the data."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def astype(self, dtype: Any, *, key: Any = None) -> ScaledArray:
        """Cast the data and keep the scale. Casts to FP8 saturate.

        Rounding is to nearest even, or stochastic if a `jax.random` key is given.
        """
        dtype = dtypes.as_floating(dtype, "dtype")
        return ScaledArray(cast(jnp.asarray(self.data), dtype, key=key), self.scale)

    def to_array(self, dtype: Any = None) -> jax.Array:
        """Return `data * scale`, multiplied in at least float32 and cast once to `dtype`."""
        _check_form(self)
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if self.is_static and self.scale == 1:
            return dtypes.cast(jnp.asarray(self.data), dtype)
        return rescale_data(self.data, align_scale(self.scale, self.ndim), dtype)

    def block_until_ready(self) -> ScaledArray:
        """Wait until data and scale are computed."""
        return jax.block_until_ready(self)

    def item(self) -> float | complex:
        """Return the only element as a Python number."""
        return np.asarray(self).item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("A ScaledArray has no buffer of its values: `copy` cannot be False.")
        _check_form(self)
        if _compat.is_traced(self.data):
            raise TypeError(f"A traced ScaledArray is no array. {_ADVICE}")
        data = np.asarray(self.data)
        scale = along_leading_axes(np.asarray(self.scale), data.ndim)
        values: Any = np.array(data, dtypes.compute_dtype(data.dtype))
        # Both parts are multiplied separately, because `(inf + 0i) * (2 + 0i)` is `inf + nan i`.
        for part in (values.real, values.imag) if np.iscomplexobj(values) else (values,):
            part *= scale.astype(part.dtype)
        return values.astype(data.dtype if dtype is None else dtype)

    def __float__(self) -> float:
        return float(self.__array__(np.float64))

    def __int__(self) -> int:
        return int(float(self))

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        is_valid = is_packed(self) or may_be_powers_of_two(self.scale)
        problem = "" if is_valid else ", which is no power of two"
        return f"ScaledArray(data={self.data!r}, scale={self.scale!r}{problem})"

    def __getattr__(self, name: str) -> Any:
        # JAX converts an operand with `__jax_array__`. Without it, the operator of our class runs.
        if name == "__jax_array__" and _is_number(self):
            return lambda: _comparable(self)
        raise AttributeError(f"A ScaledArray has no `{name}`. {_ADVICE}")


_ADVICE = (
    "Put `@jsa.scalify` on the function that computes with it (below `@jax.jit`) and pass it as an "
    "argument; or take its value, `jsa.asarray(x)`."
)
_BINARY = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
_BINARY |= {"matmul": "@", "pow": "**", "divmod": "divmod"}
_ARITHMETIC = _BINARY | {f"r{name}": symbol for name, symbol in _BINARY.items()}
_ARITHMETIC |= {"neg": "-", "pos": "+", "abs": "abs", "round": "round"}
_ARITHMETIC |= {"getitem": "[]", "setitem": "[]"}


def _is_number(x: ScaledArray) -> bool:
    """Return whether an array is a single number."""
    return _has_values(x) and not x.ndim


def _operator(name: str, symbol: str) -> Any:
    def compute(self: ScaledArray, *operands: Any) -> Any:
        if not (_is_number(self) and all(_is_number(x) for x in operands if is_scaled(x))):
            raise TypeError(f"A ScaledArray has no `{symbol}`. {_ADVICE}")
        if name == "round":
            return round(float(self), *operands)
        wide = [_comparable(x) if is_scaled(x) else x for x in operands]
        return getattr(_comparable(self), f"__{name}__")(*wide)

    return compute


for _name, _symbol in _ARITHMETIC.items():
    setattr(ScaledArray, f"__{_name}__", _operator(_name, _symbol))


def _comparison(compare: Callable[[Any, Any], Any]) -> Any:
    def compared(self: ScaledArray, other: Any) -> Any:
        if not (_has_values(self) and _has_values(other)):
            return NotImplemented  # so `==` is identity
        return compare(_comparable(self), _comparable(other, self.dtype))

    return compared


def _has_values(x: Any) -> bool:
    """Return whether `x` is an array, a number, or a `ScaledArray` without placeholders."""
    if is_scaled(x):
        return isinstance(x.data, (jax.Array, np.ndarray, np.generic))
    return dtypes.leaf_dtype(x) is not None


def _comparable(x: Any, dtype: Any = None) -> Any:
    """Return the value in at least float32, or a Python number in the precision of `dtype`."""
    if is_scaled(x):
        _check_form(x)
        return x.to_array(dtypes.compute_dtype(x.dtype))
    if type(x) not in (int, float) or not math.isfinite(x):
        return x
    # Only the mantissa is rounded: a ScaledArray of float16 may hold 1e-9, which float16 does not.
    mantissa, exponent = np.frexp(np.float64(x))
    mantissa = np.asarray(mantissa, dtypes.real_dtype(dtype)).astype(np.float64)
    return float(np.ldexp(mantissa, exponent))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ScaledArray, f"__{_name}__", _comparison(getattr(operator, _name)))


def _flatten_with_keys(array: ScaledArray) -> tuple[tuple, float | None]:
    """Keys name a static scale: libraries store by key, so data returns to its own scale only."""
    children, scale = _flatten(array)
    names = ["data", "scale"]
    if scale is not None:
        mantissa, exponent = math.frexp(scale)
        names = [f"data@2^{exponent - 1}" if mantissa == 0.5 else f"data@{scale}"]
    return tuple(zip(map(tree_util.GetAttrKey, names), children)), scale


def _flatten(array: ScaledArray) -> tuple[tuple, float | None]:
    if array.is_static:
        return (array.data,), float(array.scale)
    return (array.data, array.scale), None


def _unflatten(static_scale: float | None, children: Iterable[Any]) -> ScaledArray:
    data, *dynamic = children
    array = ScaledArray(data, dynamic[0] if static_scale is None else static_scale)
    # Tree functions may put anything in the fields, but the structure must not change.
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
    """Return whether a leaf is a `ScaledArray`."""
    return isinstance(leaf, ScaledArray)


PACKED = jnp.dtype(jnp.float8_e8m0fnu)
"""The dtype of scales that are packed for storage by `storage.pack_scales`."""


def is_packed(leaf: Any) -> bool:
    """Return whether a leaf is a `ScaledArray` whose scale is packed for storage."""
    return is_scaled(leaf) and not leaf.is_static and getattr(leaf.scale, "dtype", None) == PACKED


def check_scaled(
    tree: Any, name: str = "tree", scales: Literal["usable", "powers", "any"] = "usable"
) -> None:
    """Raise if a `ScaledArray` of a tree is invalid. The message names the leaf.

    The data must be a floating array, and the scale must have a shape that fits. "usable" scales
    are not packed for storage and, if concrete, powers of two, or 0 if the data is zero. "powers",
    for `data * scale`, may be packed, and may be 0 with any data. "any" checks no values of scales.
    """
    for path, leaf in tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
        if is_scaled(leaf):
            where = f"{name}{tree_util.keystr(path)}"
            _check_form(leaf, f"{where}.")
            if scales == "usable" or (scales == "powers" and not is_packed(leaf)):
                _check_powers(leaf, where)
            if scales == "usable" and _is_known(leaf.scale) and _is_known(leaf.data):
                scale = along_leading_axes(np.asarray(leaf.scale), leaf.ndim)
                if np.any(scale == 0) and _is_lost(leaf.data, scale):
                    raise ValueError(_ZERO.format(f"{where}.scale"))


def _check_form(x: ScaledArray, prefix: str = "") -> None:
    """Raise if types or shapes of the fields are invalid."""
    data, scale = x.data, x.scale
    if not hasattr(data, "dtype") or is_scaled(data):
        raise TypeError(
            f"`{prefix}data` must be an array, got {type(data).__name__}. "
            "`jsa.scaled_array(data, scale)` takes numbers and lists."
        )
    if not dtypes.is_scalable(data.dtype):
        raise TypeError(
            f"`{prefix}data` must have a floating dtype, got {data.dtype}. What is no float has no "
            "scale: put the array itself in the place of its ScaledArray."
        )
    if not hasattr(scale, "shape") or hasattr(scale, "dtype"):  # a symbolic `Scale` has no dtype
        _check_real(scale, f"{prefix}scale")
    _check_shape(getattr(scale, "shape", ()), data.shape, f"{prefix}scale")


def _check_powers(x: ScaledArray, where: str) -> None:
    """Raise if a concrete scale is not a power of two or 0."""
    if is_packed(x):
        raise TypeError(
            f"`{where}` has a scale that is packed for storage ({PACKED}). Unpack the state "
            "first: `state = jsa.unpack_scales(state)`."
        )
    if not may_be_powers_of_two(x.scale):
        raise ValueError(
            f"`{where}.scale` must be a power of two or 0, got {x.scale!r}. Has optax or "
            "`jax.tree.map` computed on data and scale as two leaves? Put `@jsa.scalify` on the "
            "whole step. If the scale is meant, take `jsa.scaled_array(x.data, x.scale)`."
        )


_ZERO = "`{}` 0 needs data that is zero, got data that is not."


@jax.jit
def _is_lost(data: jax.Array, scale: jax.Array) -> jax.Array:
    """Return whether a finite nonzero element has the scale 0."""
    return jnp.any(jnp.isfinite(data) & (data != 0) & (scale == 0))


def _is_known(x: Any) -> bool:
    """Return whether `x` is a readable number or array: not traced, nor on other processes."""
    is_array = isinstance(x, (int, float, np.generic, np.ndarray, jax.Array))
    return is_array and not _compat.is_traced(x) and getattr(x, "is_fully_addressable", True)


def may_be_powers_of_two(scale: Any) -> bool:
    """Return whether a number or array has only powers of two and 0; True if it is unreadable."""
    if not _is_known(scale):
        return True
    values = np.asarray(scale, np.float64)
    is_zero = (values == 0) & ~np.signbit(values)
    return bool(np.all(is_zero | (np.frexp(values)[0] == 0.5)))


def along_leading_axes(scale: Any, ndim: int) -> Any:
    """Reshape a scale of a lower rank so that it is aligned with the leading axes."""
    return scale.reshape(scale.shape + (1,) * (ndim - scale.ndim)) if scale.ndim else scale


def align_scale(scale: Any, ndim: int) -> jax.Array:
    """Return a scale as an array of shape `()` or of the rank `ndim` of its data."""
    return along_leading_axes(jnp.asarray(scale), ndim)


def check_scale(scale: Any, data: Any, name: str = "scale") -> None:
    """Raise if a scale cannot belong to the data. The values of a traced scale are not checked."""
    _check_real(scale, name)
    shape, data_shape = np.shape(scale), np.shape(data)
    _check_shape(shape, data_shape, name)
    if _compat.is_traced(scale):
        return
    values = np.asarray(scale, np.float64)
    if not np.all(np.isfinite(values)) or np.any(values < 0):
        raise ValueError(f"`{name}` must be finite and not negative, got {scale!r}.")
    if np.any(values == 0) and not _compat.is_traced(data):
        values = along_leading_axes(values, len(data_shape))
        zero_where = np.broadcast_to(values, data_shape) == 0 if shape else True
        if np.any(np.asarray(data)[zero_where] != 0):
            raise ValueError(_ZERO.format(name))


def _check_real(scale: Any, name: str) -> None:
    kind = dtypes.leaf_dtype(scale)
    if kind is None or not (
        jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
    ):
        raise TypeError(f"`{name}` must be a real number or array, got {type(scale).__name__}.")


def _check_shape(shape: tuple[int, ...], data_shape: tuple[int, ...], name: str) -> None:
    leading = data_shape[: len(shape)]
    if len(shape) > len(data_shape) or any(s not in (1, d) for s, d in zip(shape, leading)):
        raise ValueError(
            f"`{name}` of shape {shape} does not fit data of shape {data_shape}: it must have "
            "shape (), or its rank with every dim 1 or equal, or match its leading axes."
        )


def check_scale_dtype(scale_dtype: Any) -> Any:
    """Return the dtype of scales, by default float32. Raise if it cannot hold their exponents."""
    dtype = jnp.dtype(scale_dtype or jnp.float32)
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(
            f"`scale_dtype` must be float32, float64 or bfloat16, got {dtype}: it has to hold the "
            "exponents of float32."
        )
    return dtype


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def rescale_data(data: jax.Array, ratio: jax.Array, dtype: Any = None) -> jax.Array:
    """Return `data * ratio`, multiplied in at least float32 and cast once.

    Outside `jit`, this is one compiled program.
    """
    compute = dtypes.compute_dtype(data.dtype)
    values = dtypes.times(data.astype(compute), ratio.astype(dtypes.real_dtype(compute)))
    return dtypes.cast(values, data.dtype if dtype is None else dtype)
