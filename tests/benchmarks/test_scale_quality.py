"""The measurement of scales: it changes nothing, its arithmetic, a run from end to end."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.linen")
pytest.importorskip("optax")
pytest.importorskip("matplotlib")

import jax_scalify as jsa
from benchmarks.accuracy import scale_models, scale_quality
from benchmarks.accuracy.scale_quality import PLAIN, RESCALED, Cell

BATCH, CONTEXT, WIDTH, VOCABULARY = 2, 8, 16, 32


class Inner(scale_models.Block):
    """A module whose output is not negative, which its sum has to know."""

    @scale_models.linen.compact
    def __call__(self, x):
        return self.layers.relu(self.make("Dense", WIDTH, name="child")(x))


class Tiny(scale_models.Block):
    """A module called twice, one around another, and the output of a child as its own."""

    @scale_models.linen.compact
    def __call__(self, tokens):
        dense = self.make("Dense", WIDTH, name="dense")
        x = self.make("Embed", VOCABULARY, WIDTH, name="tokens")(tokens)
        x = dense(dense(self.make("LayerNorm", name="norm")(x)))
        x = Inner(self.layers, self.dtype, name="inner")(x)
        return self.make("Dense", VOCABULARY, name="head")(x.mean(1, keepdims=True))


def tiny_batch(seed, step):
    tokens = np.random.default_rng((seed, step)).integers(VOCABULARY, size=(BATCH, CONTEXT + 1))
    tokens = tokens.astype(np.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, -1:]}


@pytest.fixture
def tiny(monkeypatch):
    model = scale_models.make_model("tiny", Tiny, tiny_batch)
    monkeypatch.setitem(scale_quality.MODELS, "tiny", model)
    return model


ACTIVATIONS = ["dense", "dense#2", "head", "inner", "inner/child", "norm", "tokens"]


@pytest.mark.full
def test_a_run_from_end_to_end_goes_on_where_it_stopped(tiny, tmp_path, capsys, monkeypatch):
    out = tmp_path / "results"
    arguments = ["--models", "tiny", "--variants", "rules", "--steps", "3", "--worst", "1"]
    arguments += ["--out", str(out)]
    scale_quality.main(arguments)
    text = capsys.readouterr().out
    assert "2 cells, 0 of them finished before" in text
    assert "tiny/rules/trained/float32" in text

    stored = json.loads((out / f"scale_quality-jax{jax.__version__}.json").read_text())
    assert len(stored) == 2
    for cell in stored.values():
        activations, gradients, weights = (cell["octaves"][kind] for kind in scale_quality.KINDS)
        assert sorted(activations) == sorted(gradients) == ACTIVATIONS
        assert "inner/child/kernel" in weights and len(weights) == 9
        # In float32, data and scale make the plain tensor.
        for rows in cell["octaves"].values():
            for data, scale, plain in rows.values():
                assert scale == int(scale)
                assert data + scale == pytest.approx(plain, abs=0.02)
    for name in ("scale_quality.png", "scale_quality-trained.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "runs" / "scale_quality").glob("tiny-3-*.msgpack"))) == 1

    def measure_nothing(*_):
        raise AssertionError("was measured before")

    monkeypatch.setattr(scale_quality, "measure", measure_nothing)
    scale_quality.main(arguments)
    assert "2 cells, 2 of them finished before" in capsys.readouterr().out


def test_taps_change_neither_values_nor_scales(tiny):
    params, other_state = scale_quality.scaled_state(tiny.init(0), jnp.float32)
    batch = tiny.batch(0, 0)
    loss_fn = scale_quality.recorded_loss(tiny, RESCALED, jnp.float32)
    step = jax.jit(jsa.scalify(jax.value_and_grad(loss_fn, has_aux=True)))
    (_, activations), _ = without = step(params, None, other_state, batch)
    eps = jsa.as_scaled_array({name: jnp.zeros(x.shape) for name, x in activations.items()})
    with_eps = step(params, eps, other_state, batch)

    assert sorted(activations) == ACTIVATIONS
    pairs = zip(jax.tree.leaves(without), jax.tree.leaves(with_eps), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_tap_has_the_gradient_of_an_addition(tiny):
    params, other_state = tiny.init(0)
    batch = tiny.batch(0, 0)
    loss_fn = scale_quality.recorded_loss(tiny, PLAIN, jnp.float32)
    activations = jax.eval_shape(loss_fn, params, None, other_state, batch)[1]
    eps = {name: jnp.zeros(x.shape) for name, x in activations.items()}
    gradient = jax.jit(jax.grad(loss_fn, argnums=(0, 1), has_aux=True))
    gradients = gradient(params, eps, other_state, batch)[0]
    bias = gradients[0]["dense"]["bias"]
    taps = gradients[1]["dense"] + gradients[1]["dense#2"]
    np.testing.assert_allclose(taps.sum((0, 1)), bias, rtol=1e-5, atol=1e-6)


def test_a_tensor_is_looked_at_in_octaves():
    scaled = jsa.scaled_array(jnp.full(3, 0.25), np.float32(8.0))
    assert scale_quality.data_and_scale(scaled) == (-2, 3)
    assert scale_quality.data_and_scale(jnp.zeros(2)) == (-math.inf, 0)
    assert scale_quality.data_and_scale(jnp.array([1.0, jnp.inf])) == (math.inf, 0)


def test_the_summary():
    def result(cell, first, second):
        octaves = dict.fromkeys(scale_quality.KINDS, {"a": first, "b": second})
        zeros = dict.fromkeys(scale_quality.KINDS, 5)
        return {"settings": cell.settings, "octaves": octaves, "zeros": zeros}

    init, trained = (Cell("gpt4", "rules", moment, "float32", 10) for moment in ("init", "trained"))
    results = {
        init.key: result(init, [0.0, -4, -4.0], [-1.0, 2, 1.0]),
        trained.key: result(trained, [-3.5, -4, -7.5], [1.0, -3, -2.0]),
    }
    activations, _, gradients, both = scale_quality.summarise(trained, results)
    assert "moved" not in activations
    assert gradients == {
        "cell": trained.key,
        "kind": "weight gradients",
        "count": 2,
        "zero": 5,
        "near": 0.5,
        "far": 1.0,
        "worst": -3.5,
        "worst_name": "a",
        # a went with the plain gradient; b's data grew by 2 octaves as the gradient fell by 3
        "moved": 5.0,
        "moved_name": "b",
    }
    names = {"worst_name": "at a", "moved_name": "at b"}
    assert both == gradients | names | {"kind": "all gradients", "count": 4, "zero": 10}
    assert "moved" not in scale_quality.summarise(init, results)[2]
    alone = scale_quality.summarise(trained, {trained.key: results[trained.key]})
    assert "moved" not in alone[2]


def test_plain_attention_is_that_of_jax():
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 6, 4, 8))
    key, value = (jax.random.normal(k, (2, 6, 2, 8)) for k in keys[1:])
    mask = (jnp.arange(6) < 4)[None, None, None]
    for options in ({"scale": 0.5}, {"mask": mask, "is_causal": True}):
        out, expected = (
            jax.jit(functools.partial(attend, **options))(query, key, value)
            for attend in (scale_models.dot_product_attention, jax.nn.dot_product_attention)
        )
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "gpt4,gpt5"], "unknown model gpt5: choose from gpt4, gpt12, llama"),
        (["--variants", "best"], "unknown variant best: choose from rules, nn, rescale"),
        (["--moments", "later"], "unknown moment later: choose from init, trained"),
        (["--steps", "0"], "--steps must be positive, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        scale_quality.main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())
