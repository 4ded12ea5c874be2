"""Text as bytes: a training part, a held-out part, and batches that depend on (seed, step) only."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HELD_OUT = 0.1  # the share of the text, at its end, that the model never trains on


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text, cut in two.

    Attributes:
        train: bytes to learn from, `(N,)` uint8.
        held_out: bytes to validate on, `(M,)` uint8.
    """

    train: np.ndarray
    held_out: np.ndarray

    @functools.cached_property
    def digest(self) -> str:
        """A short hash of the text: a resumed run must see the text that it began with."""
        both = self.train.tobytes() + self.held_out.tobytes()
        return hashlib.sha256(both).hexdigest()[:16]


def load_corpus(text: Sequence[str | os.PathLike] | None, *, context: int) -> Corpus:
    """Read files, or the English text that every CPython carries, and hold out the last tenth.

    Args:
        text: files to join, of any encoding. `None` takes the help topics of `pydoc`.
        context: tokens that the model sees at once; each part must be longer than that.

    Raises:
        TypeError: if `text` is a single string, or holds something that is not a path.
        ValueError: if a file is missing or empty, or the text is too short.
    """
    raw = _pydoc_text() if text is None else _read_files(text)
    tokens = np.frombuffer(raw, np.uint8)
    cut = len(tokens) - int(len(tokens) * HELD_OUT)
    corpus = Corpus(tokens[:cut], tokens[cut:])
    # A sequence and its targets, which are shifted by one, take `context + 1` bytes.
    for part, size in (("training", corpus.train.size), ("held-out", corpus.held_out.size)):
        if size < context + 1:
            raise ValueError(
                f"`text` is too short: its {part} part has {size:,} of {len(tokens):,} bytes, "
                f"and a context of {context} takes at least {context + 1}."
            )
    return corpus


def train_batch(corpus: Corpus, *, seed: int, step: int, batch: int, context: int) -> np.ndarray:
    """Return the batch of one step, `(batch, context + 1)` int32, at random places of the text."""
    last = corpus.train.size - context - 1
    starts = np.random.default_rng((seed, step)).integers(0, last, size=batch, endpoint=True)
    return _cut(corpus.train, starts, context)


def held_out_batches(corpus: Corpus, *, batches: int, batch: int, context: int) -> list[np.ndarray]:
    """Return the validation batches, evenly spread over the held-out part and always the same."""
    last = corpus.held_out.size - context - 1
    starts = np.linspace(0, last, batches * batch).astype(np.int64)
    return [_cut(corpus.held_out, part, context) for part in starts.reshape(batches, batch)]


def _cut(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def _pydoc_text() -> bytes:
    from pydoc_data import topics

    return "\n".join(topics.topics.values()).encode()


def _read_files(text: Sequence[str | os.PathLike]) -> bytes:
    if isinstance(text, str | bytes | os.PathLike):
        raise TypeError(f"`text` must be a sequence of paths, got {text!r}.")
    if not text:
        raise ValueError("`text` must name at least one file.")
    parts = []
    for name in text:
        try:
            path = Path(name)
        except TypeError:
            raise TypeError(f"`text` must hold paths, got {name!r}.") from None
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise ValueError(f"`text`: cannot read {str(path)!r}: {error.strerror}.") from None
        if not parts[-1]:
            raise ValueError(f"`text`: {str(path)!r} is empty.")
    return b"\n".join(parts)
