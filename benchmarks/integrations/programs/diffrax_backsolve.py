"""The neural ODE of `diffrax.py` with gradients from an ODE that is solved backwards in time."""

import diffrax

from benchmarks.integrations.programs import training
from benchmarks.integrations.programs.diffrax import problem as with_adjoint
from benchmarks.integrations.programs.training import Problem, PyTree


def problem(fp8: bool = False) -> Problem:
    """Return the fit with `BacksolveAdjoint`."""
    return with_adjoint(diffrax.BacksolveAdjoint(), fp8)


def train(found: Problem, precision: str, steps: int) -> tuple[list[float], PyTree]:
    """Train as usual, but with FP8 matmuls in the vector field instead of around the loss."""
    if precision != "fp8":
        return training.train(found, precision, steps)
    return training.train(problem(fp8=True), "float16", steps)
