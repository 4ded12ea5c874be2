"""Cells of a benchmark: each is run once, kept in a file and not run again."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.gpt.report import clock
from examples.gpt.train import write_text


class Store:
    """Finished cells in a file of JSON, each with the settings that it depends on."""

    def __init__(self, path: Path):
        self._path = path
        self._cells = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, settings: dict) -> dict | None:
        """Return the result of a cell, if there is one of the same settings."""
        cell = self._cells.get(key)
        return cell["result"] if cell is not None and cell["settings"] == settings else None

    def put(self, key: str, settings: dict, result: dict) -> None:
        """Write a cell to the file, a line for each."""
        self._cells[key] = {"settings": settings, "result": result}
        lines = (
            f"{json.dumps(key)}: {json.dumps(self._cells[key])}" for key in sorted(self._cells)
        )
        write_text(self._path, "{\n" + ",\n".join(lines) + "\n}\n")


class Cells:
    """All that a run has to do.

    Args:
        store: where finished cells are.
        fresh: whether to run also those.
        console: where to show how far it is.
    """

    def __init__(self, store: Store, fresh: bool, console: Console):
        self._store, self._fresh, self._console = store, fresh, console
        self._tasks: dict[str, tuple[Callable[[], dict], dict]] = {}

    def add(self, tasks: dict[str, Callable[[], dict]], settings: dict) -> None:
        """Add tasks, by the key of their cell, that have the same settings."""
        self._tasks |= {key: (task, settings) for key, task in tasks.items()}

    def run(self) -> dict[str, dict]:
        """Run what has no stored result, and return all results."""
        missing = [
            key
            for key, (_, settings) in self._tasks.items()
            if self._fresh or self._store.get(key, settings) is None
        ]
        done = len(self._tasks) - len(missing)
        self._console.print(f"{len(self._tasks)} cells, {done} of them finished before")
        started = time.perf_counter()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
        )
        terminal = self._console.is_terminal
        with Progress(*columns, console=self._console, disable=not terminal) as bar:
            line = bar.add_task("", total=len(missing), left="-")
            for number, key in enumerate(missing):
                left = "-"
                if number:
                    seconds = (time.perf_counter() - started) / number * (len(missing) - number)
                    left = clock(seconds)
                bar.update(line, description=key, completed=number, left=left)
                if not terminal:
                    self._console.print(f"{number + 1}/{len(missing)} {key}, {left} left")
                    sys.stdout.flush()
                task, settings = self._tasks[key]
                self._store.put(key, settings, task())
                # Cells that differ in the last part of their keys, a seed, share what was compiled.
                # The others do not: some hundred compiled steps take gigabytes.
                following = missing[number + 1] if number + 1 < len(missing) else ""
                if following.rpartition("/")[0] != key.rpartition("/")[0]:
                    jax.clear_caches()
            bar.update(line, completed=len(missing), left="nothing")
        return {key: self._store.get(key, settings) for key, (_, settings) in self._tasks.items()}
