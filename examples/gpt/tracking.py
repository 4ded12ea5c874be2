"""`--track`: scales and ranges of a run, each so many steps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax_scalify as jsa
from examples.gpt.records import JsonLines

try:
    import tensorboardX
except ImportError:  # the JSON lines say the same
    tensorboardX = None

NO_TENSORBOARD = "no TensorBoard events: `pip install tensorboardX` (extra `tensorboard`)"


class Tracking:
    """Records of some steps in `track.jsonl`, and in `tensorboard/` if tensorboardX is there.

    Args:
        directory: for the files; `None` writes nothing.
        every: steps from one record to the next; `None` tracks nothing.
        select: what is recorded; `None` is the state as it was before the step.
        first: the step that the run goes on from; later records in the files are dropped.
    """

    def __init__(
        self, directory: Path | None, every: int | None, select: Sequence[str] | None, first: int
    ):
        self._every, self._select = every, select
        self._trackers: dict[Callable, jsa.numerics.Tracker] = {}
        self._waiting: list[tuple[int, jsa.numerics.Record]] = []  # still on the device
        self._lines, self._events = None, None
        if every is not None and directory is not None:
            self._lines = JsonLines(directory / "track.jsonl", first)
            if tensorboardX is not None:
                self._events = tensorboardX.SummaryWriter(
                    str(directory / "tensorboard"), purge_step=first + 1
                )

    def step(self, update: Callable, number: int, *args: Any) -> Any:
        """Call a training step; if it is time, keep a record of it."""
        if self._every is None:
            return update(*args)
        if update not in self._trackers:  # freezing the scales makes another one
            self._trackers[update] = jsa.numerics.track(update, self._select, every=self._every)
            self._trackers[update].calls = number - 1
        out, record = self._trackers[update](*args)
        if record is not None:
            self._waiting.append((number, record))
        return out

    def write(self) -> None:
        """Fetch the records that are waiting, and write them."""
        lines = [record.as_dict(number) for number, record in self._waiting]
        self._waiting.clear()
        if self._lines is not None:
            self._lines.write(lines)
        if self._events is not None:
            for line in lines:
                for name, statistics in line["tensors"].items():
                    for kind, value in statistics.items():
                        if value is not None:
                            self._events.add_scalar(f"{kind}/{name}", value, line["step"])
            self._events.flush()
