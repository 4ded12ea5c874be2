"""The training loop: batches in, metrics and checkpoints out."""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jax_scalify as jsa
from examples.gpt import data, step
from examples.gpt.checkpoint import Checkpoints
from examples.gpt.config import Config
from examples.gpt.presets import get_preset
from examples.gpt.records import JsonLines, write_text
from examples.gpt.tracking import Tracking

HELD_OUT_BATCHES = 16
# How often the host waits for the device, to read the losses and the clock.
LOG_EVERY = 10


class Progress(Protocol):
    """What the loop calls to show how far it is."""

    def __call__(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show the loss and the speed at a step."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        preset: its precision.
        validation_loss: mean cross-entropy over fixed held-out batches, in nats per byte.
        bits_per_byte: the same in bits.
        first_bad_step: the first step that left a value in the state that is not finite, or `None`.
        parameters: number of trained parameters.
        state_bytes_per_parameter: size of weights, both moments and all scales.
        step_seconds: median time of a step, without the first one; `None` for very short runs.
        first_call_seconds: time of the first step: tracing, compiling, running.
    """

    preset: str
    validation_loss: float
    bits_per_byte: float
    first_bad_step: int | None
    parameters: int
    state_bytes_per_parameter: float
    step_seconds: float | None
    first_call_seconds: float | None


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run, and where its files are.

    Attributes:
        preset: name of the precision preset.
        config: size and settings.
        seed: of the initial weights and of the batches.
        corpus: the text.
        directory: for `metrics.jsonl`, `result.json` and `checkpoints/`; `None` writes nothing.
        evaluate_every: steps from one validation to the next; the last step has one anyway.
        checkpoint_every: steps from one checkpoint to the next; the last step has one anyway.
        freeze_after: the step after which scales are static: the state keeps them, and the step
            is compiled once more. `None` leaves them dynamic.
        rescale_every: steps from one `step.rescale` of the state to the next; `None` has none. The
            step is compiled again if a frozen scale was changed by it, and only then.
        track_every: steps from one record of scales and ranges to the next, in `track.jsonl` and,
            if there is a writer, for TensorBoard; `None` has none.
        track_select: what is recorded, as `jsa.numerics.track` takes it; `None` is the state.
    """

    preset: str
    config: Config
    seed: int
    corpus: data.Corpus
    directory: Path | None = None
    evaluate_every: int = 1000
    checkpoint_every: int = 1000
    freeze_after: int | None = None
    rescale_every: int | None = None
    track_every: int | None = None
    track_select: Sequence[str] | None = None

    def __post_init__(self):
        """Refuse settings that cannot be used."""
        if self.freeze_after is not None and self.freeze_after < 2:
            raise ValueError(
                "`freeze_after` must be at least 2, because the learning rate of the first step is "
                f"0 and leaves biases without a scale, got {self.freeze_after}."
            )
        for name in ("rescale_every", "track_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be positive, got {value}.")

    @property
    def settings(self) -> dict:
        """All that the final state depends on, as JSON types."""
        names = ("preset", "seed", "freeze_after", "rescale_every")
        text = {name: getattr(self, name) for name in names} | {"text": self.corpus.digest}
        return text | dataclasses.asdict(self.config)

    def check_directory(self, *, resume: bool) -> int | None:
        """Return the step to resume from, or `None` to begin; touch nothing.

        Raises:
            ValueError: if there is a checkpoint of other settings, or one that was not asked for.
        """
        if self.directory is None:
            return None
        first = self._checkpoints().latest_step() if resume else None
        kept = self.directory / "checkpoints"
        if not resume and kept.is_dir() and any(kept.iterdir()):
            raise ValueError(
                f"`out`: {str(self.directory)!r} holds the checkpoints of another run; resume it, "
                "or choose another directory."
            )
        return first

    def train(self, *, resume: bool = False, progress: Progress | None = None) -> Result:
        """Train to the last step, from the newest checkpoint if `resume`, and return the result."""
        config, preset = self.config, get_preset(self.preset)
        first = self.check_directory(resume=resume) or 0
        result = self._finished_result(first)
        if result is not None:
            return result

        state = step.init_state(config, preset, seed=self.seed)
        parameters, state_bytes = step.count_parameters(state), step.count_bytes(state)
        bad_step = jnp.int32(-1)
        if first:
            like = jsa.freeze_scales(state) if self._is_frozen(first) else state
            state, bad_step = self._checkpoints().restore(first, (like, bad_step))
        metrics = JsonLines(self.directory and self.directory / "metrics.jsonl", first)
        tracking = Tracking(self.directory, self.track_every, self.track_select, first)
        validation_loss = None
        waiting: list[jax.Array] = []  # losses that the host has not read yet
        first_call_seconds, step_seconds = None, []

        started = time.perf_counter()
        for number in range(first + 1, config.steps + 1):
            tokens = data.train_batch(
                self.corpus,
                seed=self.seed,
                step=number,
                batch=config.batch,
                context=config.context,
            )
            update = step.make_update(config, preset, frozen=self._is_frozen(number - 1))
            state, loss = tracking.step(update, number, state, tokens)
            state = self._move_scales(state, number)
            is_first = first_call_seconds is None
            if is_first:
                jax.block_until_ready(loss)
                first_call_seconds = time.perf_counter() - started
            leaves = jax.tree.leaves(state)  # not the state: static scales would compile it again
            bad_step = step.first_bad_step(bad_step, leaves, np.int32(number))
            waiting.append(loss)

            last = number == config.steps
            evaluates = last or number % self.evaluate_every == 0
            saves = last or number % self.checkpoint_every == 0
            if not (is_first or evaluates or saves or number % LOG_EVERY == 0):
                continue
            losses = [float(x) for x in waiting]
            jax.block_until_ready(bad_step)
            seconds = (time.perf_counter() - started) / len(losses)
            if not is_first:
                step_seconds.append(seconds)
            tokens_per_second = config.batch * config.context / seconds
            metrics.write(
                [
                    {"step": i, "loss": value, "tokens_per_second": round(tokens_per_second)}
                    for i, value in enumerate(losses, number - len(losses) + 1)
                ]
            )
            tracking.write()
            waiting.clear()
            if progress is not None:
                progress(number, losses[-1], tokens_per_second)
            if evaluates:
                validation_loss = self.evaluate(state)
                metrics.write([{"step": number, "validation_loss": validation_loss}])
            if saves and self.directory is not None:
                self._checkpoints().save(number, (state, bad_step))
            started = time.perf_counter()

        if validation_loss is None:  # killed after the last checkpoint, before the result
            validation_loss = self.evaluate(state)
        result = Result(
            preset=self.preset,
            validation_loss=validation_loss,
            bits_per_byte=validation_loss / math.log(2),
            first_bad_step=None if bad_step < 0 else int(bad_step),
            parameters=parameters,
            state_bytes_per_parameter=state_bytes / parameters,
            step_seconds=float(np.median(step_seconds)) if step_seconds else None,
            first_call_seconds=first_call_seconds,
        )
        if self.directory is not None:
            text = json.dumps(dataclasses.asdict(result), indent=2)
            write_text(self.directory / "result.json", text + "\n")
        return result

    def evaluate(self, state: step.TrainState) -> float:
        """Return the mean loss over the held-out batches, in nats per byte."""
        loss_fn = step.make_evaluate(self.config, get_preset(self.preset))
        batches = data.held_out_batches(
            self.corpus,
            batches=HELD_OUT_BATCHES,
            batch=self.config.batch,
            context=self.config.context,
        )
        params = jsa.thaw_scales(state.params)  # compiled once, whatever the scales are
        return float(np.mean([float(loss_fn(params, tokens)) for tokens in batches]))

    def _is_frozen(self, number: int) -> bool:
        """Whether the state that a step has left behind has static scales."""
        is_scaled = get_preset(self.preset).scaled
        return is_scaled and self.freeze_after is not None and number >= self.freeze_after

    def _move_scales(self, state: step.TrainState, number: int) -> step.TrainState:
        """Rescale and freeze the state that a step has left behind, if it is time."""
        rescales = self.rescale_every is not None and number % self.rescale_every == 0
        if rescales:
            state = step.rescale(jsa.thaw_scales(state))
        if self._is_frozen(number) and (rescales or number == self.freeze_after):
            state = jsa.freeze_scales(state)
        return state

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.directory / "checkpoints", self.settings)

    def _finished_result(self, first: int) -> Result | None:
        """Return the stored result if there is nothing left to train."""
        path = self.directory / "result.json" if self.directory else None
        if first < self.config.steps or path is None or not path.exists():
            return None
        return Result(**json.loads(path.read_text()))
