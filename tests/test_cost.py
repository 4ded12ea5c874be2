"""How large compiled steps are, as ratios to the plain ones: a guard against growth, no timing."""

import functools

import jax
import pytest

pytest.importorskip("optax")
pytest.importorskip("flax")
pytest.importorskip("sklearn")

from benchmarks.cost.models import make_gpt, make_mlp  # noqa: E402
from benchmarks.cost.programs import count_hlo, scalar_arithmetic  # noqa: E402
from examples.gpt.config import Config  # noqa: E402

# Ratios to the plain step, by the minor version of JAX: about 10% above what they are.
LIMITS = {
    "0.10": {
        ("mlp", "dynamic"): {"hlo": 3.45, "fusions": 1.81},
        ("mlp", "frozen"): {"hlo": 1.25, "fusions": 1.10},
        ("gpt", "dynamic"): {"hlo": 4.60, "fusions": 2.50},
        ("gpt", "frozen"): {"hlo": 1.25, "fusions": 1.11},
    },
    "0.12": {
        ("mlp", "dynamic"): {"hlo": 3.15, "fusions": 1.54},
        ("mlp", "frozen"): {"hlo": 1.31, "fusions": 1.07},
        ("gpt", "dynamic"): {"hlo": 2.16, "fusions": 1.52},
        ("gpt", "frozen"): {"hlo": 1.31, "fusions": 1.16},
    },
}
MODELS = {
    "mlp": lambda: make_mlp((32, 64, 64, 64, 10)),
    "gpt": lambda: make_gpt(Config(layers=2, width=32, heads=2, context=16, batch=2)),
}
# Data that is a number, as the norm of the gradients, may be multiplied by a constant.
DATA = {"multiply f32"}


def limits(model, variant):
    """Return the limits on this version of JAX, or on the newest that has some."""
    version = ".".join(jax.__version__.split(".")[:2])
    return LIMITS.get(version, LIMITS[max(LIMITS)])[model, variant]


@functools.cache
def frozen_scales(model):
    return MODELS[model]().find_scales()


@functools.cache
def lower(model, variant):
    problem = MODELS[model]()
    scales = frozen_scales(model) if variant == "frozen" else ()
    update, state = problem.setting(variant, scales)
    return update.lower(state, problem.batch)


@functools.cache
def sizes(model, variant):
    return count_hlo(lower(model, variant).compile().as_text())


@pytest.mark.sampled(16)
@pytest.mark.parametrize("variant", ["dynamic", "frozen"])
@pytest.mark.parametrize("model", MODELS)
def test_the_program_does_not_grow(model, variant):
    plain, ours = sizes(model, "plain"), sizes(model, variant)
    ratios = {name: ours[name] / plain[name] for name in plain}
    print(f"{model}, {variant}: {ratios}")  # `pytest -rP` shows it
    for name, limit in limits(model, variant).items():
        assert ratios[name] <= limit, f"{name}: {ratios[name]:.2f} of the plain step's"


@pytest.mark.sampled(16)
@pytest.mark.parametrize("model", MODELS)
def test_frozen_scales_leave_no_scale_arithmetic(model):
    plain, frozen, dynamic = (
        scalar_arithmetic(lower(model, variant).as_text())
        for variant in ("plain", "frozen", "dynamic")
    )
    assert set(dynamic - plain) - DATA  # it is seen where there is some
    assert set(frozen - plain) <= DATA


@pytest.mark.sampled(16)
@pytest.mark.usefixtures("counts_compilations")
@pytest.mark.parametrize("model", MODELS)
def test_a_frozen_step_gives_back_the_state_that_it_got(model):
    problem = MODELS[model]()
    update, state = problem.setting("frozen", frozen_scales(model))
    given = jax.tree.structure(state)
    for _ in range(2):
        state, _ = update(state, problem.batch)
        assert jax.tree.structure(state) == given
    assert update._cache_size() == 1
