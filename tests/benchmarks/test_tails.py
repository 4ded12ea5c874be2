"""Short runs of `benchmarks/accuracy/tails.py`, and what `frozen_runs.py` looks at."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa
from benchmarks.accuracy import frozen_runs, tails
from benchmarks.accuracy.small_problems import TrainState

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


def adam(mu, nu):
    return optax.ScaleByAdamState(jnp.int32(10_000), mu, nu)


def test_what_is_looked_at():
    mu, nu = jnp.float32([0.5, 0.0, -1.0]), jnp.float32([1.0, 4.0, 1.0])
    stored = adam(
        jsa.scaled_array(np.float16([1.0, 0.0, -2.0]), 0.5),
        jsa.optim.SquareRoot(jsa.scaled_array(np.float32([8.0, 16.0, 8.0]), 0.125)),
    )
    for got, want in zip(frozen_runs.adam_updates(stored), (0.5, 0.0, -1.0), strict=True):
        assert float(got) == pytest.approx(want, abs=1e-4)
    stuck = stored._replace(mu=jsa.scaled_array(np.float16([1.0, 2.0**15, -2.0]), 0.5))
    for state, error, room in ((stored, 0, 15), (stuck, 2.0**13, 1)):
        watched = frozen_runs.Watched(TrainState({}, (state,)), (adam(mu, nu),), (), ())
        finite, step_error, headroom = frozen_runs.look(watched)
        assert finite and float(step_error) == pytest.approx(error, 1e-4, 1e-4)
        assert float(headroom) == pytest.approx(room, abs=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("way", frozen_runs.WAYS)
@pytest.mark.parametrize("name", tails.TAILS)
def test_situations_with_frozen_scales(name, way, monkeypatch):
    for constant, steps in {"STEPS": 60, "DEAD": 60, "UNSEEN": 400}.items():
        monkeypatch.setattr(tails, constant, steps)
    checks = tails.TAILS[name](way)
    assert checks["finite"] and np.isfinite(checks["gap"]), checks
