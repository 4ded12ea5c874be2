"""The names under which the leaves of a state are stored, and whether what is stored fits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.base import dtypes
from jax_scalify.blocks import storage as block_storage
from jax_scalify.blocks.array import is_array_of_ours, is_block_scaled


def name_of(path: tuple) -> str:
    """The name of a leaf: its path, joined with "/"."""
    return tree_util.keystr(path, simple=True, separator="/")


def _join(name: str, part: str) -> str:
    return f"{name}/{part}" if name else part


def is_key(leaf: Any) -> bool:
    """Return whether a leaf holds keys of `jax.random`."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name, those that are scaled or in a block format in several parts."""
    flat = {}
    for path, leaf in tree_util.tree_leaves_with_path(tree, is_leaf=is_array_of_ours):
        name = name_of(path)
        if 0 in getattr(leaf, "shape", ()):
            continue  # orbax refuses arrays without elements
        if is_block_scaled(leaf):
            parts = block_storage.stored_parts(name, leaf)
        elif is_scaled(leaf):
            kind = "static_scale" if leaf.is_static else "scale"
            parts = {_join(name, "data"): leaf.data, _join(name, kind): leaf.scale}
        elif is_key(leaf):
            parts = {_join(name, str(leaf.dtype)): jax.random.key_data(leaf)}
        else:
            parts = {name: leaf}
        twice = sorted(flat.keys() & parts.keys())
        if twice:
            raise ValueError(f"Two leaves have the name {twice[0]!r}: rename one of them.")
        flat |= parts
    return flat


def _find(flat: dict[str, Any], name: str, leaf: Any) -> dict[str, str]:
    """The names under which a leaf is stored: a plain one, data and scale, or none."""
    forms = [
        {"plain": name},
        {"data": _join(name, "data"), "scale": _join(name, "scale")},
        {"data": _join(name, "data"), "static_scale": _join(name, "static_scale")},
    ]
    if is_key(leaf):  # the second is how orbax alone stores it
        forms = [{"plain": _join(name, str(leaf.dtype))}, {"plain": name}]
    found = next((form for form in forms if flat.keys() >= set(form.values())), {})
    return found or block_storage.find_parts(flat, name)


def match(
    flat: dict[str, Any], like: Any, partial: bool = False
) -> list[tuple[Any, dict[str, str]]]:
    """Each leaf of `like` and the names under which it is stored, if everything fits.

    With `partial` there may be more than `like` has.
    """
    found, problems, left = [], [], dict(flat)
    for path, leaf in tree_util.tree_leaves_with_path(like, is_leaf=is_array_of_ours):
        name, wanted, names = name_of(path), stored_shape(leaf), {}
        if wanted is not None:
            names = _find(left, name, leaf)
            parts = {part: left.pop(n) for part, n in names.items()}
            if not parts and wanted.size:
                problems.append(f"{name!r} is missing, `like` has {_text(wanted)}")
            elif parts and (difference := _difference(parts, leaf, wanted)):
                problems.append(f"{name!r} {difference}")
        found.append((leaf, names))
    lines = list(problems)
    if not partial:
        lines += [f"{name!r} ({_text(leaf)}) has no place in `like`" for name, leaf in left.items()]
    if lines:
        message = "The checkpoint differs from `like`:\n  " + "\n  ".join(lines)
        if partial and left:
            more = f" and {len(left) - 6} more" if len(left) > 6 else ""
            message += f"\nIt has {', '.join(map(repr, list(left)[:6]))}{more}."
        elif not problems:
            message += "\n`partial=True` leaves out what has no place."
        raise ValueError(message)
    return found


def stored_data(parts: dict[str, Any]) -> Any:
    """Of the parts of a stored leaf the one of its shape."""
    return parts.get("data", parts.get("plain"))


def stored_shape(leaf: Any) -> jax.ShapeDtypeStruct | None:
    """Shape and dtype of what is stored of a leaf; None if nothing is."""
    if is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = np.asarray(leaf)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _is_weak(leaf: Any) -> bool:
    """Whether a scalar has no dtype of its own: a Python number, or what JAX has made of one."""
    return dtypes.is_python_number(leaf) or (getattr(leaf, "weak_type", False) and leaf.shape == ())


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)


def _difference(parts: dict[str, Any], leaf: Any, wanted: jax.ShapeDtypeStruct) -> str | None:
    """How what is stored of a leaf does not fit; None if it does."""
    if block_storage.is_stored_in_blocks(parts):
        return block_storage.shape_difference(parts, wanted.shape)
    data = stored_data(parts)
    for part in parts.values():
        if hasattr(part, "dtype") and part.dtype.type is np.void:
            return (
                f"has bytes of no dtype ({_text(part)}): view them as what `to_storable` returned"
            )
    if data.shape != wanted.shape or not _is_same_kind(data.dtype, wanted.dtype, leaf):
        have = f"a Python {type(leaf).__name__}" if dtypes.is_python_number(leaf) else _text(wanted)
        found = f"is {_text(data)}, `like` has {have}"
        if data.shape != wanted.shape:
            return found
        return f"{found}: let it have {data.dtype} there, and cast what comes back"
    if is_scaled(leaf) and "scale" in parts:
        return _scale_difference(parts["scale"].shape, leaf, len(data.shape))
    return None


def _is_same_kind(dtype: Any, wanted: Any, leaf: Any) -> bool:
    """Whether stored data can be cast to the dtype that is wanted of it."""
    kinds = (jnp.floating, jnp.complexfloating, *([jnp.integer] if _is_weak(leaf) else []))
    return dtype == wanted or any(
        jnp.issubdtype(dtype, kind) and jnp.issubdtype(wanted, kind) for kind in kinds
    )


def _scale_difference(shape: tuple[int, ...], leaf: ScaledArray, ndim: int) -> str | None:
    pairs = zip(full_shape(shape, ndim), full_shape(scale_shape(leaf), ndim))
    if len(shape) > ndim or not all(have in (1, want) for have, want in pairs):
        return f"has a scale of shape {shape}, `like` has {scale_shape(leaf)}"
    return None


def scale_shape(leaf: ScaledArray) -> tuple[int, ...]:
    """The shape of a leaf's scale."""
    return () if leaf.is_static else leaf.scale.shape


def full_shape(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """The shape of a scale with the rank of its data, aligned with the leading axes."""
    return tuple(shape) + (1,) * (ndim - len(shape))
