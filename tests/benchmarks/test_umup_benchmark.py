"""The u-µP benchmark: its models, its tables, and a run that goes on where it was stopped."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from benchmarks.transfer import axes, figure4, independent, operands, search, umup
from benchmarks.transfer import models as umup_models
from benchmarks.transfer.search import Setting, key_of

pytestmark = pytest.mark.newest  # its command runs on the newest JAX


def printed(table, capsys):
    Console(width=200).print(table)
    return capsys.readouterr().out


@pytest.mark.full
def test_a_short_run_is_stored_and_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(umup, "RATES", {"umup": range(-1, 1)})
    arguments = "--parts sweep --widths 16 --steps 2".split()
    for _ in range(2):  # the second time nothing is left to do
        umup.main([*arguments, "--out", str(tmp_path)])
        out = capsys.readouterr().out
        assert "does the learning rate transfer?" in out
    assert "2 cells, 2 of them finished before" in out
    stored = json.loads((tmp_path / f"umup-jax{jax.__version__}.json").read_text())
    assert all(4 < cell["result"]["loss"] < 6.5 for cell in stored.values())
    assert (tmp_path / "umup-sweep.png").stat().st_size > 10_000


def test_all_parametrisations_start_as_one_decoder():
    tokens = jnp.asarray(umup_models.batch_of(0, 0))
    shapes = set()
    for name in ("standard", "mup", "umup", "umup-fp8"):
        model = umup_models.make_model(name, 32)
        params = jax.eval_shape(model.init, jax.random.key(0))
        loss = jax.eval_shape(model.loss, params, tokens)
        assert loss.shape == ()
        shapes.add(sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)))
    assert len(shapes) == 1


def test_mup_is_the_standard_parametrisation_at_the_base_width():
    base = umup_models.BASE_WIDTH
    tokens = jnp.asarray(umup_models.batch_of(0, 0)[:1])
    models = [umup_models.make_model(name, base) for name in ("standard", "mup")]
    key = jax.random.key(0)
    losses = [jax.jit(lambda m=m: m.loss(m.init(key), tokens))() for m in models]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_tables_mark_what_moves_and_what_misses(capsys):
    settings = [Setting(64), Setting(128)]
    cells = {
        key_of(name, setting, e): {"loss": 2 + abs(e - best) + 1 / setting.width}
        for name in umup.RATES
        for setting, best in zip(settings, umup.RATES[name][2:4])
        for e in umup.RATES[name]
    }
    out = printed(umup.transfer_table(cells, settings), capsys)
    assert out.count("yes") == 6
    losses = {"umup": 2.0, "umup-fp8": 2.02}
    cells = {key_of(n, settings[0], 0, s): {"loss": losses[n]} for n in losses for s in umup.SEEDS}
    assert printed(umup.fp8_table(cells, settings[0], 0), capsys).count("FAIL") == 4


def test_operands_of_matmuls_are_found_by_their_weights():
    rng = np.random.default_rng(0)
    params = {n: {"kernel": rng.normal(size=(8, 8)).astype(np.float32)} for n in ("first", "last")}
    x = rng.normal(size=(4, 8)).astype(np.float32)

    def loss(params):
        h = jnp.sin(x @ (2 * params["first"]["kernel"].astype(jnp.float32)))
        h = h @ h.T @ h  # attention's matmuls are of no weight
        return jnp.sum(h @ params["last"]["kernel"])

    found = operands.rms_of_operands(loss, params)
    assert list(found) == list(operands.KINDS)
    names = {kind: set(values) for kind, values in found.items()}
    assert names.pop("gradients of results") == {"last/kernel"}  # `x` itself has no gradient
    assert all(found == {"first/kernel", "last/kernel"} for found in names.values())
    np.testing.assert_allclose(found["inputs"]["first/kernel"], operands.rms(x), rtol=1e-5)
    double = 2 * operands.rms(params["first"]["kernel"])
    np.testing.assert_allclose(found["weights"]["first/kernel"], double, rtol=1e-5)
    assert found["gradients of results"]["last/kernel"] == 1
    grads = jax.grad(loss)(params)
    rms = operands.rms(grads["first"]["kernel"])
    np.testing.assert_allclose(found["gradients of weights"]["first/kernel"], rms, rtol=1e-4)


def test_what_is_outside_and_what_grows_is_named(capsys):
    def values(size):
        return {f"layers/{i}/mlp/down/kernel/value": size * 2**i for i in range(2)}

    kinds = {kind: values(1.0) for kind in operands.KINDS}
    cell = {"start": kinds, "end": kinds | {"inputs": values(8.0)}}
    assert umup.growth_of(cell, "inputs") == {"mlp/down": 3}
    assert "mlp/down +3.0" in printed(umup.growth_table(cell), capsys)
    assert "mlp/down" not in printed(umup.outside_table(cell, "start"), capsys)
    assert "+3.0 +4.0" in printed(umup.outside_table(cell, "end"), capsys)
    assert "+0.0 +0.5 +1.0" in printed(umup.rms_table(cell, 16), capsys)


def test_the_stored_decoder_starts_at_unit_scale_and_the_critical_tensors_grow():
    store = umup.RESULTS / "umup-jax0.12.0.1.json"
    cell = json.loads(store.read_text())["rms/128"]["result"]
    attention = {"attention/query", "attention/key"}  # gradients have the factor of the result
    for kind in ("inputs", "weights", "gradients of results"):
        outside = {umup.module_of(n) for n, x in cell["start"][kind].items() if not 1 / 4 < x < 4}
        assert outside <= (attention if kind == "gradients of results" else set())
    grown = umup.growth_of(cell, "inputs")
    assert {name for name, octaves in grown.items() if octaves > 0.1} == {
        "mlp/down",
        "attention/out",
    }
    weights = umup.growth_of(cell, "weights")
    assert {name for name, octaves in weights.items() if octaves > 0.5} == {"readout"}


def fake_training(monkeypatch, loss_of):
    """Put `loss_of(name, setting, exponent)` in place of training; return the runs."""
    ran = []

    def train(name, setting, exponent, seed):
        ran.append((name, setting, exponent, seed))
        return {"loss": loss_of(name, setting, exponent) + seed / 100}

    monkeypatch.setattr(search, "train_cell", train)
    return ran


def run_at_once(tasks):
    return {key: task() for key, task in tasks.items()}


def test_wide_models_are_trained_around_the_best_rate_only(monkeypatch):
    ran = fake_training(monkeypatch, lambda name, setting, e: (e + 1) ** 2)
    settings = [Setting(w, steps=240) for w in (64, 512)]
    found = umup.sweep(run_at_once, ["umup"], settings)
    assert [r[2] for r in ran] == [*umup.RATES["umup"], -2, -1, 0]
    assert [search.best(found, "umup", s) for s in settings] == [(-1, 0), (-1, 0)]


@pytest.mark.sampled(32)
@pytest.mark.parametrize("kind", figure4.networks(), ids=" ".join)
def test_both_schemes_compute_one_network(kind):
    """Up to the factors of weights: results of unit scale, and of the same shapes."""
    tokens = jnp.zeros((2, figure4.CONTEXT + 1), jnp.int32)
    shapes = []
    for is_unit in (False, True):
        network = figure4.Network(*kind, is_unit)
        weights = jax.eval_shape(network.init, jax.random.key(0))
        narrow = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float16), weights)
        loss, grads = jax.eval_shape(jax.value_and_grad(network.loss), narrow, tokens)
        assert loss.dtype == jnp.float32
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float16)}
        shapes.append(jax.tree.map(jnp.shape, weights))
    assert shapes[0] == shapes[1]


def test_figure4_says_which_float16_misses(capsys):
    cells = {}
    for kind in figure4.networks():
        for run, (scheme, dtype, _) in figure4.RUNS.items():
            exponents = figure4.RATES[scheme] if dtype == jnp.float32 else [-5]
            worse = 0.1 if run == "unit-scaled float16" and kind[0] == "RNN" else 0.0
            bits = {str(e): 2 + abs(e) / 100 + worse for e in exponents}
            cells[figure4.key_of(kind, run)] = {"bits": bits}
    references = {s: figure4.best_of(cells, figure4.networks()[0], s) for s in figure4.RATES}
    assert references == {"regular": (-7, 2.07), "unit": (-4, 2.04)}
    for key in list(cells):
        if key.endswith("unit-scaled float16") and "RNN" not in key:
            cells[key] = {"bits": {"-4": 2.04}}
    for kind in figure4.networks():
        wide = figure4.best_of(cells, kind, "unit")[1]
        (narrow,) = cells[figure4.key_of(kind, "unit-scaled float16")]["bits"].values()
        for dtype, bits in (("float32", wide), ("float16", narrow)):
            key = f"{figure4.key_of(kind, f'unit-scaled {dtype}')}/seeds"
            cells[key] = {"bits": {"1": bits, "2": bits}}
    out = printed(figure4.make_table(cells), capsys)
    assert out.count("pass") == 12 and out.count("FAIL") == 6


def test_bad_arguments_are_refused(capsys):
    for arguments in (["--steps", "0"], ["--widths", "20"], ["--independent-widths", "20"]):
        with pytest.raises(SystemExit):
            umup.main(arguments)
        assert "--widths multiples of 16" in capsys.readouterr().err


def test_the_search_ends_between_worse_rates_and_tables_say_who_is_ahead(
    tmp_path, capsys, monkeypatch
):
    def loss_of(name, setting, exponent):
        centre = {"mup": -7 - (setting.layers == 8), "umup": 2}[name]
        worse = 0.1 if (name, setting.steps) == ("umup", 240) else 0.0
        return 2 + abs(exponent - centre) + worse

    ran = fake_training(monkeypatch, loss_of)
    for _ in range(2):
        umup.main(["--parts", "axes", "--axes", *axes.AXES, "--out", str(tmp_path)])
    assert len(ran) == len(set(ran))
    first = axes.AXES["width"][0]
    assert [r[2] for r in ran if r[:2] == ("umup", first) and not r[3]] == [-1, 0, 1, 2, 3]
    out = capsys.readouterr().out
    assert "MISSED" in out and "u-µP <= µP" in out and "2.0100 ± 0.0058" in out
    assert (tmp_path / "umup-axes.png").stat().st_size > 10_000


@pytest.mark.full
def test_depth_and_batch_are_those_that_were_asked_for():
    taught = umup_models.trainer("umup", 16, layers=2, batch=3)
    params, _ = taught.train(2.0**-3, 0, 2)
    assert len(params["layers"]) == 2 and 4 < taught.held_out_loss(params) < 6.5
    model = umup_models.make_model("mup", 16, layers=2)
    assert len(jax.eval_shape(model.init, jax.random.key(0))["layers"]) == 2


def test_the_independent_search_combines_what_is_better_alone(monkeypatch, capsys):
    better = {("logits", 1): 0.2, ("scores", -1): 0.1, ("residual_mult", 2): 0.05}

    def loss_of(name, setting, exponent):
        centre = {"mup": -8, "umup": 0}[name]
        gain = sum(better.get(pair, -0.1) for pair in setting.multipliers)
        return {"mup": 2.1, "umup": 2.0}[name] + abs(exponent - centre) - gain

    ran = fake_training(monkeypatch, loss_of)
    setting = Setting(16)
    found = independent.search(run_at_once, setting)
    together = (("scores", -1), ("logits", 1))
    assert ran[4 + 20][:2] == ("mup", setting._replace(multipliers=together))
    assert len(ran) == 4 + 20 + 1 + 3 + 20 + 1
    out = printed(independent.make_table(found, setting), capsys)
    assert "2.1000" in out and "1.9000" in out and "1.8000" in out and "logits 2^1: 1.9000" in out
    assert "-0.1000 pass" in out and "+0.1000 MISSED" in out and "+0.2000 MISSED" in out
    assert "4, 24, and 1" in out and "3, 23, and 1" in out


@pytest.mark.full
def test_multipliers_are_those_of_the_papers_table():
    """At 1 they change nothing; each of the others changes the loss."""
    tokens = jnp.asarray(umup_models.batch_of(0, 0)[:1])
    for name, multipliers in umup_models.MULTIPLIERS.items():
        losses = []
        for chosen in ((), *(((m, 1),) for m in multipliers if m != "embedding_rate")):
            model = umup_models.make_model(name, 32, 2, chosen)
            losses.append(float(model.loss(model.init(jax.random.key(0)), tokens)))
        assert len(set(losses)) == len(losses), (name, losses)
    model = umup_models.make_model("mup", 32, 1, (("embedding_rate", 1),))
    params = model.init(jax.random.key(0))
    updates, _ = model.optimizer.update(params, model.optimizer.init(params))
    rms = [np.sqrt(np.mean(np.square(updates[n]))) for n in ("embedding", "readout")]
    np.testing.assert_allclose(rms, [2, 1], rtol=1e-3)
