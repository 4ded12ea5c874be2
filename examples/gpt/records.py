"""Files that a run adds to, and that survive being killed."""

import json
from collections.abc import Sequence
from pathlib import Path


class JsonLines:
    """A file of JSON lines with a `step` each, cut back to `first` steps when a run is resumed.

    Without a path nothing is written.
    """

    def __init__(self, path: Path | None, first: int):
        self._path = path
        if path is not None:
            kept = [line for line in read_lines(path) if line["step"] <= first]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, lines: Sequence[dict]) -> None:
        """Add lines."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


def read_lines(path: Path) -> list[dict]:
    """Read the lines that `JsonLines` wrote; a last line cut short by a kill is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)
