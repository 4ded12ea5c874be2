"""Checkpoints of states with scales.

Orbax alone saves a state of `ScaledArray` leaves and restores it exactly into the same state. But
static scales are not leaves: it does not store them and restores those of the target. A cast to
float16 keeps the scale and may overflow. It cannot restore a plain checkpoint as a scaled state, or
a scaled checkpoint as a plain state, and it refuses NumPy scalars and empty arrays.

Here a state becomes a flat dictionary of plain arrays, named by their paths: `params/w/data` and
`params/w/scale`. Use `save` and `restore` for one checkpoint in a directory, and `to_storable` and
`from_storable` with a checkpoint manager or another format.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from jax_scalify import _compat
from jax_scalify.arrays.scaled_array import (
    PACKED,
    ScaledArray,
    along_leading_axes,
    check_scaled,
    is_packed,
    is_scaled,
)
from jax_scalify.base import dtypes, pow2
from jax_scalify.base.statistics import statistic
from jax_scalify.blocks import storage as block_storage
from jax_scalify.blocks.array import is_array_of_ours, is_block_scaled
from jax_scalify.storage import packing as storage
from jax_scalify.storage.finite import check_finite as refuse_nonfinite
from jax_scalify.storage.names import (
    flatten,
    full_shape,
    is_key,
    match,
    name_of,
    scale_shape,
    stored_data,
    stored_shape,
)
from jax_scalify.storage.placement import placed_like, sharding_like

__all__ = ["from_storable", "restore", "save", "to_storable"]

# The dtypes in which Python numbers are stored: those that NumPy gives them.
_PYTHON_DTYPES = tuple(map(np.dtype, (np.bool_, np.int64, np.uint64, np.float64, np.complex128)))


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    pack: bool = True,
    overwrite: bool = False,
    check_finite: bool = False,
) -> None:
    """Write a state to a directory with orbax, atomically.

    For one process. With several processes, or to keep the last few steps, give
    `to_storable(state)` to an `orbax.checkpoint.CheckpointManager`, and read its checkpoints with
    `restore(directory / str(step) / "default", like)`.

    Args:
        path: the directory to create.
        state: any pytree. Leaves that are not arrays, numbers or keys (functions, strings) are
            omitted.
        pack: whether to store dynamic scales in one byte each (`pack_scales`).
        overwrite: whether to replace a checkpoint at `path`. The new checkpoint is complete before
            the old one is moved to `path` + ".old" and removed.
        check_finite: whether to refuse a state with nan or infinities, so that it does not replace
            a good checkpoint. Do not set it if infinity is a valid value, as for the best loss
            before the first evaluation.

    Raises:
        FileExistsError: if `path` exists; with `overwrite`, if it is not a checkpoint.
        ImportError: if orbax is not installed.
        TypeError: as `to_storable` raises it.
        ValueError: as `to_storable` raises it; with `check_finite`, if a leaf is not finite. The
            message lists these leaves. Nothing is written.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> state = {"w": jsa.scaled_array(jnp.ones(2, jnp.float16), 2.0**-20), "step": 100}
        >>> jsa.checkpoint.save(path, state)
        >>> print(jsa.checkpoint.restore(path, like=state)["w"].scale)
        9.5367431640625e-07
        >>> plain = {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "step": 0}
        >>> print(jsa.checkpoint.restore(path, like=plain))
        {'step': 100, 'w': Array([9.536743e-07, 9.536743e-07], dtype=float32)}
    """
    ocp = _orbax()
    if check_finite:
        refuse_nonfinite(state, "state", "and nothing was saved")
    stored = to_storable(state, pack=pack)
    if not stored:
        raise ValueError("`state` must have an array with elements, or a number: there is none.")
    path = Path(path).absolute()
    exists = path.exists()
    if exists and not (overwrite and _is_checkpoint(path)):
        raise FileExistsError(
            f"`path`: {str(path)!r} exists"
            + (" and is no checkpoint." if overwrite else "; `overwrite=True` replaces it.")
        )
    new, old = (path.with_name(path.name + end) for end in (".new", ".old"))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        args = ocp.args.StandardSave(stored)
        checkpointer.save(new if exists else path, args=args, force=exists)
    if exists:
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        new.rename(path)
        shutil.rmtree(old)


def restore(
    path: str | os.PathLike[str], like: Any, *, dtype: Any = None, partial: bool = False
) -> Any:
    """Read a checkpoint into a state like `like`, converted as `from_storable` does.

    Each array is read onto the devices of its partner in `like`, if that has a sharding.
    Checkpoints written with orbax alone, scaled or plain, can be read too, if they have no static
    scales.

    Args:
        path: a directory that `save` or a checkpoint manager has written.
        like: a state, or its shapes from `jax.eval_shape`.
        dtype: dtype of the data; by default the dtypes of `like`.
        partial: whether to skip arrays that have no place in `like`, such as optimizer state if
            `like` is `{"params": ...}`.

    Raises:
        FileNotFoundError: if there is no checkpoint at `path`.
        ImportError: if orbax is not installed.
        ValueError: if leaves differ from `like`, with a list of all of them. Nothing is read.
    """
    ocp = _orbax()
    path = Path(path).absolute()
    if not _is_checkpoint(path):
        raise FileNotFoundError(f"`path`: there is no checkpoint at {str(path)!r}.")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata.tree
        found = match(flatten(metadata), like, partial)
        wanted = {name for _, names in found for name in names.values()}
        shardings = {
            stored_data(names): sharding_like(leaf.data if is_array_of_ours(leaf) else leaf)
            for leaf, names in found
            if not is_key(leaf)
        }

        def target(keys: tuple, leaf: Any) -> Any:
            sharding = shardings.get(name_of(keys))
            if sharding is None:  # to the host
                return np.empty(leaf.shape, leaf.dtype)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        def read(keys: tuple, leaf: Any) -> Any:
            return leaf if name_of(keys) in wanted else ocp.PLACEHOLDER

        item = tree_util.tree_map_with_path(target, metadata)
        args = ocp.args.PyTreeRestore(
            tree_util.tree_map_with_path(read, item),
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        )
        stored = checkpointer.restore(path, args=args)
    return from_storable(stored, like, dtype=dtype, partial=partial)


def to_storable(state: Any, *, pack: bool = True) -> dict[str, Any]:
    """Convert a state to a flat dictionary of plain arrays, without loss.

    A `ScaledArray` becomes `name/data` and `name/scale`, or `name/static_scale`. A `jax.random` key
    becomes its data, `name/key<…>`. A `BlockScaledArray` becomes `name/mxfp4_32x1/block_data`, with
    two 4-bit elements in a byte, and so on. Functions, strings and arrays without elements are
    omitted: `from_storable` takes them from its `like`.

    Args:
        state: any pytree of concrete arrays.
        pack: whether to store dynamic scales in one byte each (`pack_scales`).

    Raises:
        TypeError: if a leaf is traced or abstract, or an array of strings or objects.
        ValueError: if two leaves have the same name, or if a scale cannot be packed.

    Example:
        >>> state = {"w": jsa.as_scaled_array(jnp.ones(2)), "rng": jax.random.key(0)}
        >>> for name, array in jsa.checkpoint.to_storable(state).items():
        ...     print(name, array.dtype, array.shape)
        rng/key<fry> uint32 (2,)
        w/data float32 (2,)
        w/scale float8_e8m0fnu ()
    """
    check_scaled(state, "state", scales="any")
    stored = {}
    for name, leaf in flatten(storage.pack_scales(state) if pack else state).items():
        if _compat.is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"`state`: {name!r} must be a concrete array, got {leaf!r}.")
        if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "OUS":
            raise TypeError(f"`state`: {name!r} must be an array of numbers, got {leaf.dtype}.")
        if dtypes.leaf_dtype(leaf) is not None:
            stored[name] = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return stored


def from_storable(stored: Any, like: Any, *, dtype: Any = None, partial: bool = False) -> Any:
    """Build a state like `like` from stored arrays.

    Each leaf takes its kind, dtype and sharding from `like`, and its value from `stored`:

    - scaled to scaled is exact. A static scale has the stored value, not that of `like`. Data is
      cast if the dtypes differ. Before a cast to a shorter range, the data of each scale is brought
      to RMS 1; to less if the maximum would overflow; and, if no value is negative (second
      moments), to more if the smallest would underflow, up to 1/16 of the dtype's maximum.
    - plain to scaled is `as_scaled_array(scale="rms")`, with the same precautions.
    - a block format to the same format and block shape is exact. Others are converted by value.
    - scaled to plain is `to_array(dtype)`. Plain to plain is cast, as `asarray` does.
    - a Python number in `like` accepts any stored scalar of its kind (integer, floating or
      complex). A stored array scalar stays an array of its dtype. A stored Python number is
      restored as a Python number.

    Args:
        stored: the result of `to_storable`, or any pytree.
        like: a state, or its shapes from `jax.eval_shape`.
        dtype: dtype of scaled data and real floating arrays; by default the dtypes of `like`.
        partial: whether to skip arrays that have no place in `like`.

    Raises:
        TypeError: if `dtype` is not a real floating dtype.
        ValueError: if leaves are missing, left over, or of another shape or kind. It lists all.

    Example:
        >>> stored = {"w": np.array([3e-6, 1e-6], np.float32)}
        >>> like = {"w": jsa.as_scaled_array(jnp.zeros(2, jnp.float16))}
        >>> print(jsa.checkpoint.from_storable(stored, like)["w"])
        ScaledArray(data=Array([1.573 , 0.5244], dtype=float16),
                    scale=Array(1.9073486e-06, dtype=float32))
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`dtype` must be a real floating dtype, got {jnp.dtype(dtype)}.")
    flat = flatten(stored)
    leaves = [
        _load(block_storage.read_parts(flat, names, leaf), leaf, dtype)
        for leaf, names in match(flat, like, partial)
    ]
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_array_of_ours), leaves)


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "`jsa.checkpoint` saves with Orbax: `pip install orbax-checkpoint`."
        ) from error
    return orbax.checkpoint


def _is_checkpoint(path: Path) -> bool:
    return (path / "_METADATA").is_file()  # orbax writes it for a tree of arrays


def _load(parts: dict[str, Any], leaf: Any, dtype: Any) -> Any:
    """Return a leaf like `leaf` with the stored value."""
    wanted = stored_shape(leaf)
    if wanted is None:
        return leaf
    if is_block_scaled(leaf) and parts:
        return block_storage.load_like(parts, leaf)
    data = stored_data(parts)
    if data is None:  # an array without elements
        data = np.zeros(wanted.shape, wanted.dtype)
    if is_key(leaf):
        return placed_like(jax.random.wrap_key_data(jnp.asarray(data), impl=_key_impl(leaf)), leaf)
    scale = _stored_scale(parts, data.shape)
    if dtype is None or not jnp.issubdtype(wanted.dtype, jnp.floating):
        dtype = wanted.dtype
    if is_scaled(leaf):
        return _load_scaled(data, scale, leaf, jnp.dtype(dtype))
    if isinstance(leaf, (bool, int, float, complex)):
        return _load_number(data, scale, leaf)
    return _load_array(data, scale, leaf, dtype)


def _stored_scale(parts: dict[str, Any], shape: tuple[int, ...]) -> Any:
    """Return the unpacked scale of a stored leaf; None for a plain leaf."""
    scale = parts.get("scale", parts.get("static_scale"))
    if getattr(scale, "dtype", None) == PACKED:
        return storage.unpack_scales(ScaledArray(np.zeros(shape), np.asarray(scale))).scale
    return scale


def _load_number(data: Any, scale: Any, leaf: Any) -> Any:
    """Return a stored value for a Python number. A stored array scalar stays an array."""
    if dtypes.is_python_number(leaf) and scale is None and data.dtype not in _PYTHON_DTYPES:
        return jnp.asarray(data)
    return type(leaf)(np.asarray(data if scale is None else ScaledArray(data, scale)).item())


def _load_array(data: Any, scale: Any, leaf: Any, dtype: Any) -> Any:
    """Return a stored value as a plain array like `leaf`."""
    if scale is None and jnp.issubdtype(dtype, jnp.integer) and data.dtype != dtype:
        return placed_like(jnp.asarray(np.asarray(data).item(), dtype), leaf)  # raises if too large
    if scale is None:
        return placed_like(_cast(data, dtype), leaf)
    array = ScaledArray(data, scale)
    return placed_like(
        array.__array__(dtype) if _is_wide(data, dtype) else array.to_array(dtype), leaf
    )


def _load_scaled(data: Any, scale: Any, leaf: ScaledArray, dtype: np.dtype) -> ScaledArray:
    shape = scale_shape(leaf)
    full = full_shape(shape, data.ndim)
    if scale is not None:
        scale = np.asarray(scale, np.float64)
        scale = np.broadcast_to(along_leading_axes(scale, data.ndim), full)
    if scale is None or _is_shorter(dtype, data.dtype):
        data, scale = _by_rms(data, 1.0 if scale is None else scale, dtype, full)
    data, scale = placed_like(_cast(data, dtype), leaf.data), scale.reshape(shape)
    if leaf.is_static:
        return ScaledArray(data, float(scale))
    if is_packed(leaf):
        packed = storage.pack_scales(ScaledArray(np.zeros(data.shape), scale)).scale
        return ScaledArray(data, placed_like(packed, leaf.scale))
    return ScaledArray(data, placed_like(scale.astype(leaf.scale.dtype), leaf.scale))


def _by_rms(data: Any, scale: Any, dtype: np.dtype, full: tuple) -> tuple[jax.Array, np.ndarray]:
    """Move the data to RMS 1, or where it neither overflows nor underflows in `dtype`; cast it."""
    data = jnp.asarray(data)
    wide = dtypes.compute_dtype(data.dtype)
    target = jnp.finfo(dtype)
    axes = tuple(axis for axis, size in enumerate(full) if size == 1)
    rms, largest = (
        np.asarray(statistic(data, stat, axes), np.float64).reshape(full) for stat in ("rms", "max")
    )
    # The factor 2, because rounding down to a power of two loses up to a factor of two.
    size = np.maximum(rms, 2 * largest / float(target.max))
    if jnp.issubdtype(wide, jnp.floating) and jnp.all(data >= 0):
        values = jnp.where(data > 0, data.astype(wide), jnp.inf)
        smallest = np.asarray(jnp.min(values, axes, initial=jnp.inf), np.float64).reshape(full)
        needed = smallest / float(target.smallest_normal)
        size = np.minimum(size, np.maximum(needed, 32 * largest / float(target.max)))
    power = pow2.round_down_number(np.where(np.isfinite(size), size, 1))
    limit = 2.0**pow2.MAX_EXPONENT
    moved = np.where(power * scale == 0, 0, np.clip(power * scale, 1 / limit, limit))
    ratio = np.where(moved == 0, 1, scale / np.where(moved == 0, 1, moved))
    data = data.astype(wide) * jnp.asarray(ratio, dtypes.real_dtype(wide))
    return dtypes.cast(data, dtype), moved


def _is_shorter(dtype: np.dtype, than: np.dtype) -> bool:
    """Return whether a dtype overflows or underflows before another dtype does."""
    one, other = jnp.finfo(dtype), jnp.finfo(than)
    return one.maxexp < other.maxexp or one.minexp > other.minexp


def _cast(data: Any, dtype: Any) -> Any:
    if data.dtype == dtype:
        return data
    return data.astype(dtype) if _is_wide(data, dtype) else dtypes.cast(jnp.asarray(data), dtype)


def _is_wide(data: Any, dtype: Any) -> bool:
    """Return whether NumPy must do the cast: JAX may have 64-bit dtypes disabled."""
    return isinstance(data, np.ndarray) and jnp.finfo(dtype).bits == 64


def _key_impl(key: Any) -> Any:
    impls = []
    jax.eval_shape(lambda k: impls.append(jax.random.key_impl(k)), key)
    return impls[0]
