"""How data and scales of a state lie on the devices, and in the processes, that share it."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jax_scalify.arrays.scaled_array import ScaledArray, is_scaled
from jax_scalify.blocks.array import BlockScaledArray

_REMEDY = "`jax.device_put(state, jsa.tree.shardings(state, …))` places data and scales."


def check_shardings(tree: Any) -> Any:
    """Return a state, if its scales lie where their data does and are the same in all processes.

    A scale is on every device of its data: whole, or cut along an axis as the data is. A static
    scale is part of the program, so each process has to have the same one. Call it once, in every
    process, before the first step; it computes nothing on the devices of one process alone.

    Args:
        tree: a state with `ScaledArray` leaves, of arrays or of shapes that have shardings.

    Raises:
        ValueError: if a scale is placed otherwise than its data, or has another value in another
            process. The message lists every such leaf, and says what to do.

    Example:
        >>> state = {"w": jsa.as_scaled_array(jnp.ones((4, 2)))}
        >>> jsa.tree.check_shardings(state) is state
        True
    """
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled)
    scaled = [(jax.tree_util.keystr(path), leaf) for path, leaf in flat if is_scaled(leaf)]
    lines = [
        f"  {name or 'the leaf'}: {problem}"
        for name, leaf in scaled
        if (problem := _misplaced(leaf)) is not None
    ]
    if lines:
        raise ValueError(
            "\n".join(["Scales are placed otherwise than their data:", *lines, _REMEDY])
        )
    if jax.process_count() > 1:
        _check_processes(scaled)
    return tree


def _misplaced(leaf: ScaledArray) -> str | None:
    """What is wrong with where a scale is; None if nothing is, or nothing is known."""
    data, scale = (getattr(x, "sharding", None) for x in (leaf.data, leaf.scale))
    if leaf.is_static or data is None or scale is None:
        return None
    if not getattr(leaf.scale, "committed", True):  # JAX takes it to where it is needed
        return None
    where = f"data {_described(data)}, scale {_described(scale)}"
    named = [isinstance(s, jax.sharding.NamedSharding) for s in (data, scale)]
    if not all(named):
        return None if data.device_set == scale.device_set else f"on other devices: {where}"
    if data.mesh != scale.mesh:
        return f"on another mesh: {where}"
    # The axes of a scale are the leading ones of its data.
    for along, names in zip((*data.spec, *(None,) * leaf.ndim), scale.spec):
        if names is not None and names != along:
            return f"along other axes: {where}"
    return None


def sharding_like(like: Any) -> Any:
    """Where an array has been put, or an abstract one is to be; None for no matter where."""
    if isinstance(like, jax.Array) and not like.committed:
        return None
    sharding = getattr(like, "sharding", None)
    named = isinstance(sharding, jax.sharding.NamedSharding)
    if not named or not isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        return sharding
    mesh = jax.sharding.get_mesh()  # `eval_shape` in a mesh of explicit axes names no devices
    if mesh.abstract_mesh != sharding.mesh:
        raise ValueError(
            f"`like` is sharded over {sharding.mesh}, without devices: restore it inside of "
            "`with jax.set_mesh(mesh)`, or give the arrays of `like` shardings of their own."
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def placed_like(value: Any, like: Any) -> Any:
    """Put an array to where another one is: on its devices, or the host."""
    if isinstance(like, (np.ndarray, np.generic)):
        return np.asarray(value) if isinstance(like, np.ndarray) else np.asarray(value)[()]
    sharding = sharding_like(like)
    return jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)


def check_blocks_fit(array: BlockScaledArray, sharding: Any) -> None:
    """Refuse to cut an array of a block format through its blocks.

    Raises:
        ValueError: naming the axis.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return
    sizes = (1,) * (array.ndim - len(array.block_shape)) + array.block_shape
    own = sharding.shard_shape(array.shape)
    for axis, (length, size) in enumerate(zip(own, sizes, strict=True)):
        if length != array.shape[axis] and length % size:
            raise ValueError(
                f"Axis {axis} of a BlockScaledArray {array.shape} has blocks of {size}, and "
                f"{_described(sharding)} would give each device {length}. Cut another axis, or "
                f"one into parts that are multiples of {size}."
            )


def _described(sharding: Any) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{sharding.spec} of {dict(sharding.mesh.shape)}"
    return str(sharding)


def _check_processes(scaled: list[tuple[str, ScaledArray]]) -> None:
    """Raise if another process has other leaves, or other values of their scales."""
    kinds = [f"{name} {x.dtype}{x.shape} {np.shape(x.scale)}" for name, x in scaled]
    digest = hashlib.sha256("\n".join(kinds).encode()).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    if not (digests == digests[0]).all():
        raise ValueError(
            "Processes have states of other leaves, shapes, dtypes or shapes of scales. Make the "
            "state in the same way in each process."
        )
    values = np.array([_smallest(x.scale) for _, x in scaled], np.float32)
    gathered = multihost_utils.process_allgather(values)
    lines = [
        f"  {name or 'the leaf'}: {', '.join(map(str, row))}{' (static)' if x.is_static else ''}"
        for (name, x), row in zip(scaled, gathered.T, strict=True)
        if not (row == row[0]).all() and not np.isnan(row).all()
    ]
    if lines:
        raise ValueError(
            "\n".join(
                [
                    "Processes have different scales, of process 0, 1, …:",
                    *lines,
                    "Restore the same checkpoint in each, or choose scales of whole arrays, inside "
                    "of `jax.jit`.",
                ]
            )
        )


def _smallest(scale: Any) -> float:
    """A number that differs if scales do; nan of a scale whose parts are elsewhere."""
    if isinstance(scale, jax.Array):
        if not scale.sharding.is_fully_replicated:
            return float("nan")
        scale = np.asarray(scale.addressable_data(0))
    return float(np.sum(np.asarray(scale, np.float64)))
