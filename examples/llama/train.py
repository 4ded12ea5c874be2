"""The loop: each process takes its part of every batch, and writes its part of a checkpoint."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_scalify as jsa
from examples.gpt import data
from examples.gpt.checkpoint import Checkpoints
from examples.gpt.records import JsonLines
from examples.llama.step import Training

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        training: what is trained, and how.
        batch: sequences in a batch, of all devices.
        seed: of the weights and of the batches.
        corpus: the text, in bytes.
        directory: for `metrics.jsonl` and `checkpoints/`; None writes nothing.
        checkpoint_every: steps from one checkpoint to the next; the last step has one anyway.
        freeze_after: of the recipe "fp8-frozen": the step after which scales are static.
    """

    training: Training
    batch: int
    seed: int
    corpus: data.Corpus
    directory: Path | None = None
    checkpoint_every: int = 50
    freeze_after: int = 20

    def __post_init__(self) -> None:
        """Refuse a batch that the devices cannot share."""
        parts = self.training.layout.size("data", "fsdp")
        if self.batch < 1 or self.batch % parts:
            raise ValueError(
                f"`batch` must be a multiple of data x fsdp = {parts}, got {self.batch}."
            )

    def train(
        self, *, resume: bool = False, progress: Callable[[int, float, float], None] | None = None
    ) -> list[float]:
        """Train to the last step, from the newest checkpoint if `resume`; return the losses."""
        first = (self._checkpoints().latest_step() or 0) if resume and self.directory else 0
        state = self._state(first)
        if first:
            state = self._checkpoints().restore(first, state)
        jsa.tree.check_shardings(state)
        training, update = self.training, None
        writes = self.directory is not None and jax.process_index() == 0
        metrics = JsonLines(self.directory / "metrics.jsonl" if writes else None, first)
        losses, started = [], time.perf_counter()
        for number in range(first + 1, training.steps + 1):
            if self._freezes and number == self.freeze_after + 1 and number > first + 1:
                state, update = jsa.freeze_scales(state), None
            if update is None:
                recipe = "fp8" if self._freezes and number <= self.freeze_after else None
                now = dataclasses.replace(training, recipe=recipe or training.recipe)
                update = now.make_update(state)
            state, loss = update(state, self.tokens(number))
            losses.append(float(loss))
            seconds, started = time.perf_counter() - started, time.perf_counter()
            speed = self.batch * training.sizes.context / seconds
            metrics.write([{"step": number, "loss": losses[-1], "tokens_per_second": round(speed)}])
            if progress is not None:
                progress(number, losses[-1], speed)
            saves = number == training.steps or number % self.checkpoint_every == 0
            if self.directory is not None and saves:
                self._checkpoints().save(number, state)
        return losses

    def tokens(self, number: int) -> jax.Array:
        """The batch of a step; each process makes what its devices need."""
        sizes, sharding = self.training.sizes, self.training.layout.batch_sharding()
        batch = data.train_batch(
            self.corpus, seed=self.seed, step=number, batch=self.batch, context=sizes.context
        )
        if sharding is None:
            return jax.numpy.asarray(batch)
        return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])

    @property
    def settings(self) -> dict[str, Any]:
        """All that the final state depends on, but the mesh, as JSON types."""
        names = ("recipe", "steps", "learning_rate")
        training = {name: getattr(self.training, name) for name in names}
        own = {"batch": self.batch, "seed": self.seed, "text": self.corpus.digest}
        if self._freezes:
            own["freeze_after"] = self.freeze_after
        return own | training | dataclasses.asdict(self.training.sizes)

    @property
    def _freezes(self) -> bool:
        return self.training.recipe == "fp8-frozen"

    def _state(self, first: int) -> PyTree:
        """The first state, or what a checkpoint of a step is restored like."""
        state = self.training.make_state(self.seed)
        frozen = self._freezes and first > self.freeze_after
        return jsa.freeze_scales(state) if frozen else state

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.directory / "checkpoints", self.settings)


def perplexity(losses: list[float]) -> float:
    """Of the last tenth of the steps."""
    return float(np.exp(np.mean(losses[-max(1, len(losses) // 10) :])))
