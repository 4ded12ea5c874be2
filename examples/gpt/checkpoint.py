"""Checkpoints with orbax: written under a temporary name, then renamed, so never half there.

The state is stored as a dictionary of plain arrays, named by their paths (`params/blocks/0/...`):
a checkpoint depends neither on the classes in the state nor on their versions.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

PyTree = Any


class Checkpoints:
    """The checkpoints of one run, in `directory/<step>`.

    Args:
        directory: where they are kept; made by the first `save`.
        settings: what the run was started with (JSON types). Only a run of the same settings can
            continue from them.
    """

    def __init__(self, directory: Path, settings: dict):
        self._directory = directory.absolute()
        self._settings = settings

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or `None`.

        Raises:
            ValueError: if it was made with other settings. It is left as it is.
        """
        # The question must leave no trace: orbax would create the directory.
        if not self._directory.is_dir():
            return None
        with self._manager() as manager:
            step = manager.latest_step()
            if step is None:
                return None
            restored = manager.restore(
                step, args=ocp.args.Composite(settings=ocp.args.JsonRestore())
            )
        theirs = restored["settings"]
        different = [
            f"{name}={theirs.get(name)!r} (this run: {self._settings.get(name)!r})"
            for name in sorted(theirs.keys() | self._settings.keys())
            if theirs.get(name) != self._settings.get(name)
        ]
        if different:
            raise ValueError(
                f"`resume`: the checkpoint {self._directory / str(step)} was made with "
                f"{', '.join(different)}. Continue it with its own settings."
            )
        return step

    def save(self, step: int, state: PyTree) -> None:
        """Write a checkpoint; when this returns it is complete."""
        with self._manager() as manager:
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_to_dict(state)),
                    settings=ocp.args.JsonSave(self._settings),
                ),
            )

    def restore(self, step: int, like: PyTree) -> PyTree:
        """Read a checkpoint into the structure, dtypes and devices of `like`."""
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        with self._manager() as manager:
            restored = manager.restore(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardRestore(_to_dict(template))),
            )
        flat = traverse_util.flatten_dict(restored["state"], sep="/")
        return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in _names(like)])

    def _manager(self) -> ocp.CheckpointManager:
        # Synchronous: the next step donates the state, and its buffers would be reused while they
        # are still being written.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self._directory, options=options)


def _names(tree: PyTree) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def _to_dict(tree: PyTree) -> dict:
    flat = dict(zip(_names(tree), jax.tree.leaves(tree), strict=True))
    return traverse_util.unflatten_dict(flat, sep="/")
