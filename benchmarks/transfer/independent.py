"""The independent search of u-µP's paper: the learning rate first, then each multiplier alone.

A part of `umup.py` (Blake et al., *u-µP*, 2024, section 4.5 and appendix A.6). Every multiplier is
varied alone, at the best learning rate; the values that were better than 1 are then taken together.
µP and u-µP have five multipliers each, and so get as many runs, but for the learning rate's.
"""

import itertools

from rich import box
from rich.table import Table

from benchmarks.transfer.axes import STARTS
from benchmarks.transfer.models import MULTIPLIERS
from benchmarks.transfer.search import (
    TITLES,
    Results,
    Run,
    Setting,
    best,
    find_best,
    losses_of,
    tasks_of,
)

EXPONENTS = (-2, -1, 1, 2)  # of a multiplier


def varied(name: str, setting: Setting, multiplier: str) -> dict[int, Setting]:
    """Return the settings with one multiplier other than 1, by its exponent."""
    return {e: setting._replace(multipliers=((multiplier, e),)) for e in EXPONENTS}


def best_exponents(found: Results, name: str, setting: Setting) -> dict[str, tuple[int, float]]:
    """Return, of each multiplier, the exponent that is best alone, and its loss."""
    rate, default = best(found, name, setting)
    chosen = {}
    for multiplier in MULTIPLIERS[name]:
        losses = {
            e: losses_of(found, name, s)[rate] for e, s in varied(name, setting, multiplier).items()
        }
        chosen[multiplier] = min([(0, default), *losses.items()], key=lambda pair: pair[1])
    return chosen


def combined(found: Results, name: str, setting: Setting) -> Setting:
    """Return the setting with all multipliers as they are best alone."""
    exponents = best_exponents(found, name, setting)
    return setting._replace(multipliers=tuple((m, e) for m, (e, _) in exponents.items() if e))


def search(run: Run, setting: Setting) -> Results:
    """Run the search for µP and u-µP."""
    found: Results = {}
    for name, start in STARTS.items():
        found = find_best(run, name, setting, start, found)
        rate = best(found, name, setting)[0]
        for multiplier in MULTIPLIERS[name]:
            for alone in varied(name, setting, multiplier).values():
                found |= run(tasks_of(name, alone, [rate]))
        found |= run(tasks_of(name, combined(found, name, setting), [rate]))
    return found


def make_table(found: Results, setting: Setting) -> Table:
    """The least loss after each phase, and after how many runs."""
    phases = ("learning rate alone", "one multiplier", "all combined")
    table = Table(box=box.SIMPLE, title=f"independent search, width {setting.width}: held-out loss")
    for column in ("", *phases, "runs", "best alone"):
        table.add_column(column, justify="right")
    least = {}
    for name in STARTS:
        rate, default = best(found, name, setting)
        chosen = best_exponents(found, name, setting)
        together = losses_of(found, name, combined(found, name, setting))[rate]
        steps = itertools.accumulate((default, min(x for _, x in chosen.values()), together), min)
        least[name] = list(steps)
        tried = len(losses_of(found, name, setting))
        runs = f"{tried}, {tried + len(chosen) * len(EXPONENTS)}, and 1"
        names = ", ".join(f"{m} 2^{e}: {x:.4f}" for m, (e, x) in chosen.items() if e)
        table.add_row(
            f"{TITLES[name]} (2^{rate})", *(f"{x:.4f}" for x in least[name]), runs, names or "none"
        )
    gaps = [least["umup"][0] - x for x in least["mup"]]
    verdicts = [f"{gap:+.4f} {'pass' if gap <= 0 else 'MISSED'}" for gap in gaps]
    table.add_row("u-µP's first - µP", *verdicts, "", "")
    return table
