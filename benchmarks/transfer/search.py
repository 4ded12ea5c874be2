"""Runs of the u-µP benchmark, and the search for the best learning rate.

A run is a cell of its own, by `key_of`: a parametrisation, a `Setting`, a learning rate and a seed.
Whoever asks for a run that another part of the benchmark has trained gets that one.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.transfer.models import BATCH, LAYERS, Multipliers, trainer

Results = dict[str, dict]
Run = Callable[[dict[str, Callable[[], dict]]], Results]

TITLES = {"standard": "standard parametrisation", "mup": "µP", "umup": "u-µP"}


class Setting(NamedTuple):
    """What a model is trained with, beside its parametrisation, learning rate and seed."""

    width: int
    layers: int = LAYERS
    batch: int = BATCH
    steps: int = 1500
    multipliers: Multipliers = ()

    @property
    def key(self) -> str:
        """That of the setting's cells."""
        multipliers = "".join(f"/{n}{e:+d}" for n, e in self.multipliers)
        return f"w{self.width}/d{self.layers}/b{self.batch}/s{self.steps}{multipliers}"


def train_cell(name: str, setting: Setting, exponent: int, seed: int) -> dict:
    """Train once, and return the held-out loss."""
    taught = trainer(name, setting.width, setting.layers, setting.batch, setting.multipliers)
    params, _ = taught.train(2.0**exponent, seed, setting.steps)
    return {"loss": taught.held_out_loss(params)}


def key_of(name: str, setting: Setting, exponent: int, seed: int = 0) -> str:
    """Return the key of a cell."""
    return f"runs/{name}/{setting.key}/{exponent}/{seed}"


def tasks_of(
    name: str, setting: Setting, exponents: Sequence[int], seeds: Sequence[int] = (0,)
) -> dict[str, Callable[[], dict]]:
    """Return the tasks of some learning rates and seeds, by the keys of their cells."""
    return {
        key_of(name, setting, e, s): functools.partial(train_cell, name, setting, e, s)
        for e, s in itertools.product(exponents, seeds)
    }


def losses_of(cells: Results, name: str, setting: Setting) -> dict[int, float]:
    """Return the losses of all exponents that were tried, inf where one is no number."""
    start = f"runs/{name}/{setting.key}/"
    found = {}
    for key, cell in cells.items():
        exponent, _, seed = key.removeprefix(start).partition("/")
        if key.startswith(start) and seed == "0":
            found[int(exponent)] = cell["loss"] if math.isfinite(cell["loss"]) else math.inf
    return dict(sorted(found.items()))


def best(cells: Results, name: str, setting: Setting) -> tuple[int, float]:
    """Return the exponent of the best learning rate, and its loss."""
    losses = losses_of(cells, name, setting)
    exponent = min(losses, key=losses.__getitem__)
    return exponent, losses[exponent]


def next_rates(cells: Results, name: str, setting: Setting, start: int) -> list[int]:
    """Return the exponents to be tried next: none once both neighbours of the best have been."""
    tried = losses_of(cells, name, setting)
    centre = best(cells, name, setting)[0] if tried else start
    return [e for e in (centre - 1, centre, centre + 1) if e not in tried]


def find_best(run: Run, name: str, setting: Setting, start: int, known: Results) -> Results:
    """Search until the rates on both sides of the best are worse: from `start`, or what is known.

    Returns what is known, and what was run.
    """
    found = dict(known)
    while rates := next_rates(found, name, setting, start):
        found |= run(tasks_of(name, setting, rates))
    return found
