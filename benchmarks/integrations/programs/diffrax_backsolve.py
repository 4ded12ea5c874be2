"""The neural ODE of `diffrax.py` with gradients from an ODE that is solved backwards in time."""

import diffrax

from benchmarks.integrations.programs.diffrax import problem as checkpointed
from benchmarks.integrations.programs.training import Problem


def problem() -> Problem:
    """Return the fit with `BacksolveAdjoint`."""
    return checkpointed(diffrax.BacksolveAdjoint())
