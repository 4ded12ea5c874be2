"""`benchmarks/accuracy/gradients.py`: how weights are cut, and what its table says."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from benchmarks.accuracy import gradients

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


def test_weights_are_cut_along_the_first_axis_that_can_be():
    shapes = {(64, 32): P("fsdp"), (3, 32): P(None, "fsdp"), (3, 5): P(), (64,): P(), (): P()}
    for shape, spec in shapes.items():
        assert gradients.cut(np.zeros(shape)) == spec


def test_the_table(capsys):
    losses = {"float32": 2.0, "float16": 2.0, "float8_e5m2": 2.01}
    cells = {
        f"{name}/{seed}": {"loss": loss + seed, "first_bad_step": 7 if loss > 2 else -1}
        for name, loss in losses.items()
        for seed in (0, 1)
    }
    Console(width=120).print(gradients.summarise(cells, (0, 1)))
    printed = capsys.readouterr().out
    assert "+0.42%" in printed and "+0.50%" in printed and "NOT FINITE" in printed


def test_bad_arguments_are_refused(capsys):
    for arguments, message in (
        (["--steps", "0"], "--steps must be positive, got 0"),
        ([], "needs 8 devices, and there are 1: set XLA_FLAGS="),
    ):
        if not arguments and jax.device_count() != 1:
            continue
        with pytest.raises(SystemExit):
            gradients.main(arguments)
        assert message in capsys.readouterr().err
