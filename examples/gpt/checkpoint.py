"""Checkpoints with orbax: written under a temporary name, then renamed, so never half there."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import jax_scalify as jsa

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
                    state=ocp.args.StandardSave(jsa.checkpoint.to_storable(state)),
                    settings=ocp.args.JsonSave(self._settings),
                ),
            )

    def restore(self, step: int, like: PyTree) -> PyTree:
        """Read a checkpoint into the structure, dtypes and devices of `like`."""
        return jsa.checkpoint.restore(self._directory / str(step) / "state", like)

    def _manager(self) -> ocp.CheckpointManager:
        # Synchronous: the next step donates the state, and its buffers would be reused while they
        # are still being written.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self._directory, options=options)
